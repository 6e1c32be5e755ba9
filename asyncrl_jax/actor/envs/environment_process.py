"""A process of environments: answers JSON lines with JSON lines, any number at once. See `isolated`.

    asyncrl_jax.actor.envs.environment_process <environment> <levels> <arguments> <descriptor of the mark>

Asked: {"id", "instance", "call": reset | step | score | close | play | drop, "argument"}; an empty object asks for a
sign of life; drop forgets an instance, ends what it is at and has no answer. Answered: {"id", "result"} or
{"id", "error": [type, text]}; a sign of life is {"abandoned"}, the number of threads that work for calls which were
given up. The mark is a number in memory shared with the actor: the id of the request whose code holds the event loop, 0
for none. When the process dies it says who was at it.
"""

from __future__ import annotations

import asyncio
import contextvars
import dataclasses
import json
import mmap
import os
import sys
from collections.abc import Callable, Coroutine, Generator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from asyncrl_jax.actor.envs.third_party import third_party_factory
from asyncrl_jax.lifetime import die_with_parent
from asyncrl_jax.types import Task

MARK_BYTES = 8
MAX_THREADS = 256
LINE_BYTES = 16 * 2**20


class _Threads(ThreadPoolExecutor):
    """Knows the requests that its threads work for: a thread can't be ended when its request is."""

    def __init__(self, num_threads: int) -> None:
        super().__init__(num_threads)
        self.working: dict[object, int] = {}  # to the request

    def submit(self, call: Callable[..., Any], /, *args: Any, **named: Any) -> Future[Any]:
        number, mine = _request.get(), object()

        def work() -> Any:
            self.working[mine] = number
            try:
                return call(*args, **named)
            finally:
                del self.working[mine]

        return super().submit(work)


_request: contextvars.ContextVar[int] = contextvars.ContextVar("request", default=0)  # that a task belongs to


class _Marked:
    """A coroutine that leaves its mark while its code runs, and none while it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], number: int, mark: mmap.mmap) -> None:
        self._coroutine = coroutine
        self._number = number
        self._mark = mark

    def __await__(self) -> Generator[Any, Any, Any]:
        value: Any = None
        thrown: BaseException | None = None
        while True:
            self._set(self._number)
            try:
                waits_for = self._coroutine.throw(thrown) if thrown is not None else self._coroutine.send(value)
            except StopIteration as end:
                return end.value
            finally:
                self._set(0)
            value = thrown = None
            try:
                value = yield waits_for
            except BaseException as error:  # noqa: BLE001, passed on, also a cancellation
                thrown = error

    def _set(self, number: int) -> None:
        self._mark[:MARK_BYTES] = number.to_bytes(MARK_BYTES, "little")


class _Server:
    def __init__(self, factory: Callable[[], Any], mark: mmap.mmap, answers: Any) -> None:
        """Args: factory: makes instances of a TextEnvironment, or of what has `play`."""
        self._factory = factory
        self._mark = mark
        self._answers = answers
        self._instances: dict[int, Any] = {}
        self._serving: dict[asyncio.Task[None], tuple[int, int]] = {}  # to request and instance
        self._threads = _Threads(MAX_THREADS)

    async def run(self) -> None:
        asyncio.get_running_loop().set_task_factory(self._marked_task)
        # Many environments call their code in a thread; in a pool of the usual size episodes would wait for each other.
        asyncio.get_running_loop().set_default_executor(self._threads)
        reader = asyncio.StreamReader(limit=LINE_BYTES)
        await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(reader), sys.stdin)
        self._show_life()
        while line := await reader.readline():
            request = json.loads(line)
            if not request:
                self._show_life()
                continue
            if request["call"] == "drop":
                self._drop(request["instance"])
                continue
            task = asyncio.create_task(self._serve(request))
            self._serving[task] = request["id"], request["instance"]
            task.add_done_callback(self._serving.pop)

    def _drop(self, instance: int) -> None:
        self._instances.pop(instance, None)
        for task, (_, at) in self._serving.items():
            if at == instance:
                task.cancel()

    def _show_life(self) -> None:
        served = {0, *(number for number, _ in self._serving.values())}
        self._write(json.dumps({"abandoned": sum(n not in served for n in list(self._threads.working.values()))}))

    def _marked_task(self, loop: asyncio.AbstractEventLoop, coroutine: Any, **named: Any) -> asyncio.Task[Any]:
        """A task that a request starts leaves that request's mark."""
        number = _request.get()
        return asyncio.Task(_run(_Marked(coroutine, number, self._mark)) if number else coroutine, loop=loop, **named)

    async def _serve(self, request: dict[str, Any]) -> None:
        _request.set(request["id"])
        try:
            result = await _Marked(self._call(request), request["id"], self._mark)
            line = json.dumps({"id": request["id"], "result": result}, default=_plain)
            if len(line) >= LINE_BYTES:
                raise ValueError(f"it said {len(line)} bytes at once, and {LINE_BYTES} can be taken")
        except BaseException as error:  # whatever an environment raises is an answer, also an exit
            task = asyncio.current_task()
            if isinstance(error, asyncio.CancelledError) and task is not None and task.cancelling():
                raise  # nobody waits any more
            line = json.dumps({"id": request["id"], "error": [type(error).__name__, _told(error)]})
        self._write(line)

    async def _call(self, request: dict[str, Any]) -> Any:
        number, argument = request["instance"], request["argument"]
        if number not in self._instances:
            self._instances[number] = self._factory()
        instance = self._instances[number]
        if request["call"] == "reset":
            return [dataclasses.asdict(message) for message in await instance.reset(Task(**argument))]
        if request["call"] == "step":
            observation = await instance.step(argument)
            return [[dataclasses.asdict(message) for message in observation.messages], observation.done]
        if request["call"] == "score":
            return dataclasses.asdict(await instance.score())
        if request["call"] == "play":
            return await instance.play(argument)
        await instance.close()
        return None

    def _write(self, line: str) -> None:
        self._answers.write(line + "\n")
        self._answers.flush()


def _plain(value: Any) -> Any:
    """Scalars of NumPy and the like as Python's."""
    if getattr(value, "ndim", None) == 0 and hasattr(value, "item"):
        return value.item()
    raise TypeError(f"{type(value).__name__} is no JSON")


def _told(error: BaseException) -> str:
    try:
        return str(error)[:1000]
    except Exception as another:  # noqa: BLE001, it may do anything there too
        return f"its text can't be had: {type(another).__name__}"


async def _run(marked: _Marked) -> Any:
    return await marked


def _factory(name: str, num_levels: int, arguments: str) -> Callable[[], Any]:
    if name.startswith("verifiers:"):
        from asyncrl_jax.actor.envs.verifiers_player import player_factory

        return player_factory(name, num_levels, arguments)
    factory = third_party_factory(name, num_levels, arguments)
    assert factory is not None
    return factory


def main() -> None:
    """Serves until its input ends."""
    die_with_parent()
    name, num_levels, arguments, descriptor = sys.argv[1], int(sys.argv[2]), sys.argv[3], int(sys.argv[4])
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints must not look like an answer
    factory = _factory(name, num_levels, arguments)
    asyncio.run(_Server(factory, mmap.mmap(descriptor, MARK_BYTES), answers).run())


if __name__ == "__main__":
    main()
