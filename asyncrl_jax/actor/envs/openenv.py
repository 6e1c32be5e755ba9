"""Environments behind an OpenEnv server: one session of its websocket for each instance. Needs the extra `openenv`.

The policy's turn goes into the one text field that an action of the environment must have. An observation is shown as
its one text field, or else as JSON. Rewards add up to `final`, which must stay in [0, 1]; an episode that got 1 is a
success.
"""

from __future__ import annotations

import json
import urllib.request
from collections.abc import Mapping, Sequence
from typing import Any

import xxhash

from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.envs.text import TextEnvironment, TextObservation, TextScore
from asyncrl_jax.actor.tools.base import Tool
from asyncrl_jax.exit_codes import Unreachable
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task

SCHEMA_LIMIT_S = 10.0
MAX_MESSAGE_BYTES = 16 * 2**20
_COMMON_FIELDS = {"metadata", "reward", "done"}  # of every action or observation


class OpenEnvFailed(RuntimeError):
    """The server answered with an error."""


class OpenEnvTasks:
    """See `TextEnvironmentFactory`. A task's seed goes to the environment's reset, and its level if reset takes one."""

    tools: Mapping[str, Tool] = {}
    limits_own_score = False

    def __init__(self, url: str, num_levels: int) -> None:
        """Args: url: of the server, http:// or https://; num_levels: that the config asks for.

        Raises:
          ValueError: if there is no such server, or its actions are no text.
        """
        self.name = f"openenv:{url}"
        self.num_levels = num_levels
        self.url = url.rstrip("/")
        where = f"--config.environment.name={self.name}"
        if not self.url.startswith(("http://", "https://")):
            raise ValueError(f"{where}: a URL begins with http:// or https://")
        try:
            with urllib.request.urlopen(f"{self.url}/schema", timeout=SCHEMA_LIMIT_S) as answer:  # noqa: S310, http(s)
                schema = json.load(answer)
            fields = _text_fields(schema["action"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise Unreachable(f"{where}: no OpenEnv server there ({error!r})") from error
        if len(fields) != 1:
            raise ValueError(f"{where}: an action must have one field of text, this one's are {fields or 'none'}")
        self.field = fields[0]
        self.sockets: set[Any] = set()  # of all sessions
        self.idle: list[Any] = []  # of these, without an episode
        self.identity = f"{self.name}-{xxhash.xxh3_64_hexdigest(json.dumps(schema, sort_keys=True).encode())}"

    def __call__(self) -> TextEnvironment:
        return _OpenEnvEpisode(self)

    async def close(self) -> None:
        """Ends all sessions."""
        while self.sockets:
            await self.sockets.pop().close()


def _text_fields(schema: Mapping[str, Any]) -> list[str]:
    """Names of an action's fields of text; the required ones, if there are any."""
    texts = [
        name
        for name, field in schema["properties"].items()
        if field.get("type") == "string" and name not in _COMMON_FIELDS
    ]
    required = [name for name in texts if name in schema.get("required", ())]
    return required or texts


class _OpenEnvEpisode:
    def __init__(self, tasks: OpenEnvTasks) -> None:
        self._tasks = tasks
        self._socket: Any = None
        self._reward = 0.0

    async def reset(self, task: Task) -> Sequence[Message]:
        seed = derive_seed(0, self._tasks.name, task.split, task.level, task.index) % 2**31
        if self._socket is None:
            self._socket = self._tasks.idle.pop() if self._tasks.idle else await self._connect()
        answer = await self._ask("reset", {"seed": seed, "level": task.level})
        self._reward = 0.0
        return [Message("user", _shown(answer["observation"]))]

    async def step(self, text: str) -> TextObservation:
        answer = await self._ask("step", {self._tasks.field: text})
        self._reward += float(answer["reward"] or 0.0)
        return TextObservation((Message("user", _shown(answer["observation"])),), done=answer["done"])

    async def score(self) -> TextScore:
        return TextScore(self._reward, success=self._reward == 1.0)

    async def close(self) -> None:
        """The session is kept, whatever becomes of this instance: it is reset for the next episode."""
        if self._socket is not None:
            self._tasks.idle.append(self._socket)
            self._socket = None

    async def _connect(self) -> Any:
        from websockets.asyncio.client import connect

        socket = await connect(f"ws{self._tasks.url.removeprefix('http')}/ws", max_size=MAX_MESSAGE_BYTES)
        self._tasks.sockets.add(socket)
        return socket

    async def _ask(self, kind: str, data: Mapping[str, Any]) -> Mapping[str, Any]:
        """One request. A session in which one failed, was given up or was answered by nonsense is not used again."""
        socket, self._socket = self._socket, None
        try:
            await socket.send(json.dumps({"type": kind, "data": data}))
            result = _result(json.loads(await socket.recv()), kind)
        except BaseException:
            self._tasks.sockets.discard(socket)
            socket.transport.abort()
            raise
        self._socket = socket
        return result


def _result(answer: Any, kind: str) -> Mapping[str, Any]:
    """What the server says to a reset or a step.

    Raises:
      OpenEnvFailed: if it says that it failed.
      ValueError: if it says anything else.
    """
    data = answer.get("data") if isinstance(answer, dict) else None
    if not isinstance(data, dict):
        raise ValueError(f"an answer without data: {answer!r:.200}")
    if answer.get("type") == "error":
        raise OpenEnvFailed(str(data.get("message", data))[:1000])
    if not isinstance(data.get("observation"), dict):
        raise ValueError(f"an answer without an observation: {data!r:.200}")
    if kind == "step" and not isinstance(data.get("done"), bool):
        raise ValueError(f"done is {data.get('done')!r:.40}")
    if kind == "step" and not isinstance(data.get("reward"), (int, float, type(None))):
        raise ValueError(f"reward is {data.get('reward')!r:.40}")
    return data


def _shown(observation: Mapping[str, Any]) -> str:
    texts = [value for name, value in observation.items() if isinstance(value, str) and name not in _COMMON_FIELDS]
    return texts[0] if len(texts) == 1 else json.dumps(observation)
