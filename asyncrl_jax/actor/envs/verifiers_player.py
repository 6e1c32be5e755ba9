"""The package `verifiers` in a process of its own: loads an environment and plays its tasks. See `verifiers_env`.

Rows. A task's level and index count through the data set, and begin again at its end. Held-out tasks are those of the
environment's evaluation set; without one, the rows whose prompt has a hash that says so, one in ten.

Reward. A rubric's weighted sum, divided by the sum of its positive weights where that is above 1, so that 1 is the most
that functions in [0, 1] give. The package takes a function that raised for one that returned 0; here it is a fault, and
the episode has no reward. So it is if the rollout ended with an error that is not of the policy's making.
"""

from __future__ import annotations

import contextvars
import functools
import hashlib
import inspect
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from asyncrl_jax.actor.envs.third_party import read_arguments

HELDOUT_BYTES = 26  # held out when the first byte of the prompt's SHA-256 is below this: 10 %
_ROUNDING = 1e-6  # of a sum of weighted scores

_faults: contextvars.ContextVar[list[str]] = contextvars.ContextVar("faults")


class RolloutFailed(RuntimeError):
    """The environment, or what it needs, failed during an episode."""


def player_factory(name: str, num_levels: int, arguments: str) -> Callable[[], Any]:
    """Loads the environment; the result makes what plays one episode.

    Raises:
      ValueError: if it can't be loaded or played.
    """
    os.environ.setdefault("VF_LOG_LEVEL", "WARNING")
    os.environ.setdefault("HF_DATASETS_DISABLE_PROGRESS_BARS", "1")
    import verifiers

    environment = verifiers.load_environment(name.partition(":")[2], **read_arguments(arguments))
    player = RubricPlayer(environment, num_levels)
    return lambda: player


class RubricPlayer:
    """Plays any number of episodes of a `verifiers.Environment` at once."""

    def __init__(self, environment: Any, num_levels: int) -> None:
        """Raises:
        ValueError: if rewards need a whole group, a split has no rows, or a prompt is in both.
        """
        if environment.requires_group_rollouts:
            raise ValueError("its rubric scores groups; rewards of single episodes are needed")
        self._environment = environment
        self._num_levels = num_levels
        self._rows = split_rows(environment)
        self._most = max(_most(environment.rubric), 1.0)
        self._http: Any = None
        for rubric in _rubrics(environment.rubric):
            rubric.funcs[:] = [_noting(function) for function in rubric.funcs]

    async def play(self, argument: dict[str, Any]) -> dict[str, Any]:
        """One episode against the endpoint: its reward, what its functions said, and what went wrong in them.

        Raises:
          RolloutFailed: if it did not come to an end.
        """
        import openai
        import verifiers

        if self._http is None:  # episodes share connections; their limits are the actor's
            self._http = openai.DefaultAsyncHttpxClient(timeout=None)
        task = argument["task"]
        rows = self._rows[task["split"]]
        row = rows[(task["index"] * self._num_levels + task["level"] - 1) % len(rows)]
        client = openai.AsyncOpenAI(
            base_url=argument["base_url"], api_key=argument["api_key"], max_retries=0, http_client=self._http
        )
        faults: list[str] = []
        _faults.set(faults)
        played = await self._environment.run_rollout(dict(row), client_class()(client), "policy", {}, state_columns=[])
        error = played["error"]
        if error is not None and not issubclass(getattr(verifiers, error["error"], Exception), verifiers.ToolError):
            raise RolloutFailed(error["error_chain_repr"][:1000])
        return {"reward": self._share(played["reward"]), "metrics": dict(played["metrics"] or {}), "faults": faults}

    def _share(self, reward: float) -> float:
        share = reward / self._most
        return 1.0 if abs(share - 1.0) < _ROUNDING else share


@functools.cache
def client_class() -> Any:
    """The package's client, but for a policy that says nothing: that is an answer, and no failure of the model."""
    import verifiers

    class Client(verifiers.OpenAIChatCompletionsClient):
        async def raise_from_native_response(self, response: Any) -> None:
            message = response.choices[0].message
            if message.content or message.tool_calls:
                await super().raise_from_native_response(response)

        async def from_native_response(self, response: Any) -> Any:
            answer = await super().from_native_response(response)
            if answer.message.content is None and not answer.message.tool_calls:
                answer.message.content = ""
            return answer

    return Client


def split_rows(environment: Any) -> dict[str, Sequence[Any]]:
    """Rows of the environment's data by split.

    Raises:
      ValueError: if a split has none, or a prompt is in both.
    """
    train, heldout = environment.build_dataset(), environment.build_eval_dataset()
    if train is None or heldout is None:
        both = heldout if train is None else train
        names = ["heldout" if _digest(p)[0] < HELDOUT_BYTES else "train" for p in both["prompt"]]
        rows = {split: both.select([i for i, n in enumerate(names) if n == split]) for split in ("train", "heldout")}
    else:
        shared = set(map(_digest, train["prompt"])) & set(map(_digest, heldout["prompt"]))
        if shared:
            raise ValueError(f"{len(shared)} prompts of its evaluation set are in its training set")
        rows = {"train": train, "heldout": heldout}
    for split, found in rows.items():
        if not len(found):
            raise ValueError(f"its data has no rows for split {split}")
    return rows


def _digest(prompt: Any) -> bytes:
    return hashlib.sha256(json.dumps(prompt, sort_keys=True, default=str).encode()).digest()


def _rubrics(rubric: Any) -> Iterator[Any]:
    """The rubric and all in it: groups have rubrics, and a group of environments has theirs."""
    yield rubric
    inner = [*getattr(rubric, "rubrics", ()), *(e.rubric for e in getattr(rubric, "env_map", {}).values())]
    for one in inner:
        yield from _rubrics(one)


def _most(rubric: Any) -> float:
    """What functions in [0, 1] give at most."""
    own = sum(max(weight, 0.0) for weight in rubric.weights)
    routes = [_most(environment.rubric) for environment in getattr(rubric, "env_map", {}).values()]
    return own + sum(_most(one) for one in getattr(rubric, "rubrics", ())) + max(routes, default=0.0)


def _noting(function: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, whose failure is kept for the episode."""

    @functools.wraps(function)
    async def noted(*args: Any, **named: Any) -> float:
        try:
            result = function(*args, **named)
            return float(await result if inspect.isawaitable(result) else result)
        except Exception as error:
            _faults.get().append(f"{getattr(function, '__name__', function)}: {error!r}"[:500])
            raise

    return noted
