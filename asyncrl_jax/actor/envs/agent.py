"""An agent program as an environment: it drives, through the recording endpoint, and its tokens are trained on.

    async def solve(seed: int, level: int, split: str, base_url: str, api_key: str) -> float:
        '''Plays one episode against the endpoint and returns its reward in [0, 1]; 1 is a success.'''

    --config.environment.name=agent:my_agent:solve

A plain function runs in a thread, so a blocking client will do.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import inspect
import logging
import math
import random
import threading
from collections.abc import Callable, Coroutine, Sequence
from typing import Any

from asyncrl_jax.actor.chat.endpoint import Answer, Conversation, Endpoint, Request
from asyncrl_jax.actor.chat.formats import ChatFormat, plain_text
from asyncrl_jax.actor.envs.base import Observation, Score
from asyncrl_jax.actor.envs.user_code import user_function
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class AgentProgram:
    """What drives the episodes of an environment."""

    name: str
    identity: str  # changes whenever tasks or scoring do
    play: Callable[[Task, str, str], Coroutine[Any, Any, Any]]  # (task, base_url, api_key); ends when the episode has
    reward: Callable[[Any], float]  # of what `play` returned; raises if there is none


def agent_program(address: str) -> AgentProgram:
    """The user's function at `module:function`.

    Raises:
      ValueError: if there is no such function.
    """
    name = f"agent:{address}"
    function, source = user_function(name)

    async def play(task: Task, base_url: str, api_key: str) -> Any:
        arguments = {
            "seed": derive_seed(0, name, task.split, task.level, task.index) % 2**31,
            "level": task.level,
            "split": task.split,
            "base_url": base_url,
            "api_key": api_key,
        }
        return await _run(function, arguments)

    return AgentProgram(name, f"{name}-{source}", play, checked_reward)


def checked_reward(returned: Any) -> float:
    """Raises: TypeError: for what is no number, or no finite one."""
    if isinstance(returned, bool) or not isinstance(returned, (int, float)) or not math.isfinite(returned):
        raise TypeError(f"the agent returned {returned!r}, which is no reward")
    return float(returned)


class AgentEnvironments:
    """Makes the episodes of one agent program."""

    limits_own_score = False

    def __init__(
        self, program: AgentProgram, num_levels: int, chat_format: ChatFormat, endpoint: Endpoint, turn_tokens: int = 0
    ) -> None:
        """Args:
        num_levels: that the config asks for.
        chat_format: of the conversations.
        endpoint: is started when first used.
        turn_tokens: most of one turn, 0 for what the agent asks for.
        """
        logging.getLogger("httpx").setLevel(logging.WARNING)  # clients would log a line for every turn
        self.name = program.name
        self.num_levels = num_levels
        self.program = program
        self.format = chat_format
        self.vocab_size = chat_format.tokenizer.vocab_size
        self.stop_tokens = chat_format.stop_tokens
        self.identity = f"{program.identity}/{chat_format.tokenizer.identity}"
        self.endpoint = endpoint
        self.turn_tokens = turn_tokens

    def text(self, tokens: Sequence[int]) -> str:
        return plain_text(self.format, tokens)

    def __call__(self) -> AgentEpisode:
        return AgentEpisode(self)


class AgentEpisode:
    """One run of the agent. Reward parts: `final` is what the agent returns, `format` is 1 if it ended by itself."""

    limits_own_score = False

    def __init__(self, source: AgentEnvironments) -> None:
        self.vocab_size = source.vocab_size
        self.stop_tokens = source.stop_tokens
        self._source = source
        self._exits = contextlib.ExitStack()
        self._conversation: Conversation | None = None
        self._agent: asyncio.Task[Any] | None = None
        self._num_tokens = 0
        self._ended = True  # the policy's last turn, by a stop token
        self.turn_tokens = source.turn_tokens

    async def reset(self, task: Task) -> tuple[int, ...]:
        source = self._source
        if task.environment != source.name:
            raise ValueError(f"a task of environment {task.environment!r}, not {source.name!r}")
        await source.endpoint.start()
        self._conversation = self._exits.enter_context(source.endpoint.conversation())
        playing = source.program.play(task, source.endpoint.base_url, self._conversation.key)
        self._agent = asyncio.create_task(playing, name=f"agent of {task}")
        request = await self._next_request()
        if request is None:
            raise RuntimeError("the agent ended without asking the policy anything")
        return self._grown(self._tokens(request))

    async def step(self, tokens: Sequence[int]) -> Observation:
        assert self._conversation is not None
        ended = bool(tokens) and tokens[-1] in self.stop_tokens
        text = self._source.format.tokenizer.decode(tokens[:-1] if ended else tokens)
        self._ended = ended
        before = self._num_tokens
        self._num_tokens += len(tokens)
        self._conversation.answer(Answer(text, "stop" if ended else "length", before, len(tokens)))
        request = await self._next_request()
        if request is None:
            return Observation((), done=True)
        return Observation(self._grown(self._tokens(request)), done=False)

    async def score(self) -> Score:
        ended = self._agent is not None and self._agent.done()
        final = self._source.program.reward(self._agent.result()) if ended and self._agent is not None else 0.0
        return Score({"final": final, "step": 0.0, "format": float(ended), "tool": 0.0}, success=final == 1.0)

    async def close(self) -> None:
        self._exits.close()
        agent, self._agent = self._agent, None
        if agent is not None:
            agent.cancel()
            await asyncio.gather(agent, return_exceptions=True)

    def demonstrate(self, rng: random.Random) -> list[tuple[int, ...]]:  # noqa: ARG002
        raise ValueError(
            f"--config.environment.name={self._source.name}: an agent has no scripted policy; start from a pretrained "
            "model, with --config.warm_start.num_steps=0"
        )

    async def _next_request(self) -> Request | None:
        """What the agent asks next; None when it has ended.

        Raises:
          Exception: whatever ended the agent.
        """
        assert self._conversation is not None
        assert self._agent is not None
        asking = asyncio.create_task(self._conversation.next_request())
        try:
            await asyncio.wait({asking, self._agent}, return_when=asyncio.FIRST_COMPLETED)
            if asking.done():
                return asking.result()
            self._agent.result()
            return None
        finally:
            asking.cancel()

    def _tokens(self, request: Request) -> tuple[int, ...]:
        chat, limits = self._source.format, [self._source.turn_tokens, request.max_tokens]
        self.turn_tokens = min((limit for limit in limits if limit > 0), default=0)
        if request.text:
            return chat.tokenizer.encode(request.text)
        if request.first:
            return chat.prompt(request.messages, [dict(tool) for tool in request.tools])
        return chat.reply(request.messages, ended=self._ended)

    def _grown(self, tokens: tuple[int, ...]) -> tuple[int, ...]:
        self._num_tokens += len(tokens)
        return tokens


async def _run(program: Callable[..., Any], arguments: dict[str, Any]) -> Any:
    if inspect.iscoroutinefunction(program):
        return await program(**arguments)
    return await _in_thread_of_its_own(functools.partial(program, **arguments))


async def _in_thread_of_its_own(call: Callable[[], Any]) -> Any:
    """What `call` returns. A pool would make agents wait for each other, and the actor's own calls for agents.

    A call that is given up goes on until it ends; it does not keep the process.
    """
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[Any] = loop.create_future()

    def tell(result: Any, error: BaseException | None) -> None:
        if ended.done():  # given up
            return
        if error is None:
            ended.set_result(result)
        else:
            ended.set_exception(error)

    def run() -> None:
        result, error = None, None
        try:
            result = call()
        except Exception as raised:  # noqa: BLE001, whoever waits is told
            error = raised
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(tell, result, error)

    threading.Thread(target=run, name="agent", daemon=True).start()
    return await ended
