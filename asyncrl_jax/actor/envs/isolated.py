"""Environments in processes of their own: one that dies, blocks or leaks takes no actor with it."""

from __future__ import annotations

import asyncio
import builtins
import collections
import contextlib
import dataclasses
import itertools
import json
import logging
import mmap
import os
import signal
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.environment_process import LINE_BYTES, MARK_BYTES
from asyncrl_jax.actor.envs.text import TextEnvironment, TextEnvironmentFactory, TextObservation, TextScore
from asyncrl_jax.actor.subprocesses import reap
from asyncrl_jax.actor.usage import Usage, usage_of
from asyncrl_jax.lifetime import PARENT_VARIABLE
from asyncrl_jax.types import Task

log = logging.getLogger(__name__)

EXIT_LIMIT_S = 1.0  # for a process that said nothing more to end by itself
WATCH_S = 1.0  # between two looks at a process
SETTLED_EPISODES = 32  # ended ones, after which what a process takes is what it needs
MORE_FILES, MORE_PROCESSES = 256, 32  # than then, which are a leak
MORE_CALLS = 32  # that were given up and go on in threads: their number is limited, and the others' calls wait for them
_REMEMBERED_SUSPECTS = 1024


class EnvironmentDied(RuntimeError):
    """The process of an environment ended. `culprit`: this episode's own code was running, as far as is known."""

    def __init__(self, detail: str, *, culprit: bool) -> None:
        super().__init__(detail)
        self.culprit = culprit


class EnvironmentRaised(RuntimeError):
    """An environment raised something that is no built-in exception."""


@dataclasses.dataclass
class IsolationCounters:
    """What became of the processes of an actor's environments."""

    environments_started: int = 0
    environments_died: int = 0  # by themselves
    environments_stuck: int = 0  # killed: their event loop stood still
    environments_leaking: int = 0  # replaced: they took more and more


@dataclasses.dataclass(frozen=True)
class IsolationLimits:
    """When a process is no longer trusted."""

    start_s: float = 60.0  # to import the environment and read its data
    stuck_s: float = 30.0  # without a sign of life
    more_memory_bytes: int = 2**30  # than it took when it had settled


@dataclasses.dataclass(frozen=True)
class Known:
    """What a process is told of the environment that it is to make."""

    name: str
    num_levels: int
    arguments: str = ""  # as `environment.arguments`


class EnvironmentProcess:
    """One process and the calls that are under way in it. `start` before anything else.

    Invariants:
      * Every call ends: by its answer, by the caller's limit, or with EnvironmentDied when the process ends.
      * A process whose event loop stands still longer than `stuck_s` is killed.
      * One that leaks gets no new episodes, and ends when it has none.
    """

    def __init__(self, known: Known, limits: IsolationLimits, counters: IsolationCounters) -> None:
        self.num_episodes = 0  # under way
        self.retired = False
        self.ended = False
        self._arguments = [known.name, str(known.num_levels), known.arguments]
        self._limits = limits
        self._counters = counters
        self._ids = itertools.count(1)
        self._waiting: dict[int, tuple[int, asyncio.Future[Any]]] = {}  # id to (instance, answer)
        self._num_ended = 0
        self._abandoned = 0  # calls that were given up and go on
        self._settled: Usage | None = None
        self._alive_at = 0.0  # when it was last heard, monotonic
        self._asked = False  # to end
        self._tasks: list[asyncio.Task[None]] = []

    async def start(self) -> None:
        """Raises EnvironmentDied if the process does not come up."""
        self._counters.environments_started += 1
        with tempfile.TemporaryFile() as shared:
            shared.truncate(MARK_BYTES)
            self._mark = mmap.mmap(shared.fileno(), MARK_BYTES)
            self._process = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "asyncrl_jax.actor.envs.environment_process",
                *self._arguments,
                str(shared.fileno()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                pass_fds=(shared.fileno(),),
                env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
                start_new_session=True,
                limit=LINE_BYTES,
            )
        self._tasks.append(asyncio.create_task(self._read(), name="environment process"))
        try:
            async with asyncio.timeout(self._limits.start_s):
                while not self.ended and self._alive_at == 0.0:
                    await asyncio.sleep(0.01)
        except TimeoutError:
            await self.close()
        except asyncio.CancelledError:
            await self.close()
            raise
        if self.ended:
            raise EnvironmentDied(f"{self._arguments[0]} did not start; its process said why", culprit=True)
        self._tasks.append(asyncio.create_task(self._watch(), name="environment process watch"))

    async def call(self, instance: int, call: str, argument: Any = None) -> Any:
        """One call of an instance, which is made when it is first named.

        Raises:
          EnvironmentDied: if the process ended.
          Exception: as the environment raised, for the built-in ones; else EnvironmentRaised.
        """
        if self.ended:
            raise EnvironmentDied("the process of the environment has ended", culprit=False)
        number = next(self._ids)
        answer: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._waiting[number] = (instance, answer)
        try:
            self._send({"id": number, "instance": instance, "call": call, "argument": argument})
            return await answer
        finally:
            self._waiting.pop(number, None)

    def episode_ended(self, instance: int, *, broken: bool) -> None:
        """One episode less; a broken instance is forgotten."""
        self.num_episodes -= 1
        self._num_ended += 1
        if broken and not self.ended:
            self._send({"id": 0, "instance": instance, "call": "drop", "argument": None})
        if self.retired and not self.num_episodes:
            self._kill()

    async def close(self) -> None:
        """Ends the process; may be called more than once."""
        self._kill()
        for task in self._tasks[1:]:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    def _send(self, request: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        if not self._process.stdin.is_closing():
            self._process.stdin.write(json.dumps(request).encode() + b"\n")

    def _kill(self) -> None:
        self._asked = True
        if self.ended:  # its number may be another's by now
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)

    async def _read(self) -> None:
        assert self._process.stdout is not None
        try:
            while line := await self._process.stdout.readline():
                self._heard(json.loads(line))
        except Exception as error:  # noqa: BLE001, what says anything else is not to be trusted with episodes
            log.error("an environment process is killed for what it said: %.500r", error)
        if not self._asked:
            self._counters.environments_died += 1
            with contextlib.suppress(TimeoutError):  # its exit code says what it died of
                async with asyncio.timeout(EXIT_LIMIT_S):
                    await self._process.wait()
        self._kill()
        await reap(self._process)
        self._end()

    def _heard(self, answer: Any) -> None:
        """Takes an answer or a sign of life; raises anything for what is neither."""
        self._alive_at = time.monotonic()
        if "id" not in answer:
            self._abandoned = int(answer["abandoned"])
            return
        waiting = self._waiting.get(answer["id"])
        if waiting is not None and not waiting[1].done():
            _resolve(waiting[1], answer)

    def _end(self) -> None:
        """Tells all who wait. The mark says whose code was running; without one, all who were in a call are suspect."""
        self.ended = True
        running = int.from_bytes(self._mark[:MARK_BYTES], "little")
        code = self._process.returncode
        for number, (_, answer) in list(self._waiting.items()):
            if not answer.done():
                culprit = number == running if running in self._waiting else True
                answer.set_exception(EnvironmentDied(f"its process ended with exit code {code}", culprit=culprit))
        self._waiting.clear()

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(WATCH_S)
            if self.ended:
                return
            self._send({})
            silent_s = time.monotonic() - self._alive_at
            if silent_s > self._limits.stuck_s:
                self._counters.environments_stuck += 1
                log.error("an environment process gave no sign of life for %.0f s and is killed", silent_s)
                self._kill()
                return
            self._look()

    def _look(self) -> None:
        used = usage_of(self._process.pid)
        if used is None or self.retired or self._num_ended < SETTLED_EPISODES:
            return
        if self._settled is None:
            self._settled = used
        more = [
            (used.rss_bytes - self._settled.rss_bytes, self._limits.more_memory_bytes, "bytes of memory"),
            (used.open_files - self._settled.open_files, MORE_FILES, "open files"),
            (used.processes - self._settled.processes, MORE_PROCESSES, "processes"),
            (self._abandoned, MORE_CALLS, "threads of calls that were given up"),
        ]
        for taken, limit, what in more:
            if taken > limit:
                self.retired = True
                self._counters.environments_leaking += 1
                log.error("an environment process takes %d %s more than it did and is replaced", taken, what)
                if not self.num_episodes:
                    self._kill()
                return


def _resolve(future: asyncio.Future[Any], answer: dict[str, Any]) -> None:
    if "error" not in answer:
        future.set_result(answer["result"])
        return
    name, text = answer["error"]
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        with contextlib.suppress(TypeError):  # a few want more than a text
            future.set_exception(kind(text))
            return
    future.set_exception(EnvironmentRaised(f"{name}: {text}"))


class EnvironmentProcesses:
    """The processes that an actor plays one environment in.

    Invariants:
      * They are started once for all episodes that wait for them: the limit of an episode ends its wait, not a start.
      * A task whose episode was, or may have been, what killed a process is played again in one of its own, so that it
        takes no other episode with it a second time.
    """

    def __init__(self, known: Known, num_processes: int, limits: IsolationLimits) -> None:
        self.counters = IsolationCounters()
        self.running: list[EnvironmentProcess] = []
        self._known = known
        self._limits = limits
        self._num_processes = num_processes
        self._leaving: set[EnvironmentProcess] = set()  # end with their episodes
        self._filling: asyncio.Task[None] | None = None
        self._suspects: collections.OrderedDict[Task, None] = collections.OrderedDict()
        self._ids = itertools.count(1)

    def next_instance(self) -> int:
        """A number that no instance has had."""
        return next(self._ids)

    async def start(self) -> None:
        """Makes the number full.

        Raises:
          EnvironmentDied: if a process does not come up.
        """
        if self._filling is None or self._filling.done():
            self._filling = asyncio.create_task(self._fill(), name="start of environment processes")
            self._filling.add_done_callback(lambda task: task.cancelled() or task.exception())  # whoever waits is told
        await asyncio.shield(self._filling)

    async def process_for(self, task: Task) -> EnvironmentProcess:
        """A process that takes another episode; of its own, for a task that is suspect."""
        if task in self._suspects:
            process = await self._start()
            process.retired = True
            self._leaving = {process, *(other for other in self._leaving if not other.ended)}
            return process
        await self.start()
        return min(self.running, key=lambda process: process.num_episodes)

    async def play(self, task: Task, argument: Any) -> Any:
        """What an instance of its own says to `play`. One that is cancelled is ended there too.

        Raises:
          EnvironmentDied: if its process ended.
          Exception: see `EnvironmentProcess.call`.
        """
        process, instance = await self.process_for(task), self.next_instance()
        process.num_episodes += 1
        try:
            return await process.call(instance, "play", argument)
        except EnvironmentDied as error:
            if error.culprit:
                self.suspect(task)
            raise
        finally:
            process.episode_ended(instance, broken=True)

    def suspect(self, task: Task) -> None:
        """Its episode may have been what killed a process."""
        self._suspects[task] = None
        while len(self._suspects) > _REMEMBERED_SUSPECTS:
            self._suspects.popitem(last=False)

    async def close(self) -> None:
        """Ends all processes."""
        if self._filling is not None:
            self._filling.cancel()
            await asyncio.wait([self._filling])
        await asyncio.gather(*(process.close() for process in [*self.running, *self._leaving]))

    async def _fill(self) -> None:
        known = [*self._leaving, *self.running]
        self._leaving = {process for process in known if process.retired and not process.ended}
        self.running = [process for process in self.running if not (process.ended or process.retired)]
        while len(self.running) < self._num_processes:
            self.running.append(await self._start())

    async def _start(self) -> EnvironmentProcess:
        process = EnvironmentProcess(self._known, self._limits, self.counters)
        await process.start()
        return process


class IsolatedTasks:
    """See `TextEnvironmentFactory`: the same tasks as `inner`, whose instances live in `processes`."""

    def __init__(self, inner: TextEnvironmentFactory, processes: EnvironmentProcesses) -> None:
        """Args: inner: made in this process too, for what it says of itself; its tools run here."""
        self.name = inner.name
        self.num_levels = inner.num_levels
        self.identity = inner.identity
        self.limits_own_score = inner.limits_own_score
        self.tools = inner.tools
        self.processes = processes

    def __call__(self) -> TextEnvironment:
        return _IsolatedEpisode(self.processes)


class _IsolatedEpisode:
    """An instance here stands for one there, in whichever process has it."""

    def __init__(self, processes: EnvironmentProcesses) -> None:
        self._processes = processes
        self._number = processes.next_instance()
        self._process: EnvironmentProcess | None = None
        self._task: Task | None = None
        self._broken = False

    async def reset(self, task: Task) -> Sequence[Message]:
        if self._process is None or self._process.ended or self._process.retired:
            self._process = await self._processes.process_for(task)
        self._task, self._broken = task, False
        self._process.num_episodes += 1
        return [Message(**message) for message in await self._call("reset", dataclasses.asdict(task))]

    async def step(self, text: str) -> TextObservation:
        messages, done = await self._call("step", text)
        return TextObservation(tuple(Message(**message) for message in messages), done)

    async def score(self) -> TextScore:
        return TextScore(**await self._call("score"))

    async def close(self) -> None:
        process, task, self._task = self._process, self._task, None
        if process is None or task is None:
            return
        try:
            if not self._broken:
                await process.call(self._number, "close")
        finally:
            process.episode_ended(self._number, broken=self._broken)

    async def _call(self, call: str, argument: Any = None) -> Any:
        assert self._process is not None
        self._broken = True  # until the answer is there; a caller that is cancelled leaves it so
        try:
            result = await self._process.call(self._number, call, argument)
        except EnvironmentDied as error:
            if error.culprit and self._task is not None:
                self._processes.suspect(self._task)
            raise
        self._broken = False
        return result
