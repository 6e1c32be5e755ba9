"""What a vLLM engine needs of vLLM, wherever it runs.

Dimensions: T sampled tokens, P tokens of a prompt, L layers, K experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

TOP = 32  # most likely tokens whose log-probs a proof asks for; vLLM must be started with max_logprobs of this


@dataclasses.dataclass(frozen=True)
class SamplingRequest:
    """One continuation to sample."""

    request_id: str  # its own among all requests ever
    prompt: tuple[int, ...]
    max_tokens: int
    temperature: float
    seed: int
    stop_tokens: tuple[int, ...]
    num_top: int = 0  # log-probs of so many of the most likely tokens besides the sampled one
    cache_salt: str | None = None  # prefixes are shared among requests of one salt only


@dataclasses.dataclass(frozen=True)
class Sampled:
    """What came of a request."""

    tokens: np.ndarray  # int32 [T]
    logprobs: np.ndarray  # float32 [T], of the distribution sampled from
    finish: str  # stop, length or abort
    version: str | None  # label of the weights that made all of the tokens; None if they were several
    num_cached: int  # tokens of the prompt that were not computed again
    top: tuple[Mapping[int, float], ...] = ()  # log-prob by token at each position, when asked for
    routed_experts: tuple[int, np.ndarray] | None = None  # first position, int16 [positions, L, K]; native capture only


@dataclasses.dataclass
class BackendCounters:
    """Work that vLLM has done, as far as it says."""

    num_steps: int = 0
    num_running: int = 0  # requests that were computed, summed over steps
    num_sampled: int = 0


class Backend(Protocol):
    """A running vLLM. Invariant: after `pause` returned, nothing is computed until `resume`."""

    counters: BackendCounters

    async def start(self) -> None:
        """Starts or finds vLLM, without weights.

        Raises:
          ValueError: if vLLM cannot serve the model.
          TimeoutError: if it is not there in time.
        """
        ...

    async def sample(self, request: SamplingRequest) -> Sampled:
        """Samples until the end, or until `pause` aborts it."""
        ...

    async def score(self, request_id: str, tokens: tuple[int, ...]) -> list[Mapping[int, float]]:
        """Log-probs at temperature 1 of tokens 1 to P - 1 given those before, and of the TOP most likely ones there."""
        ...

    async def pause(self) -> None:
        """Ends what is being sampled, which answers "abort" with what it has, and empties the prefix cache."""
        ...

    async def resume(self) -> None: ...

    async def reset_prefix_cache(self) -> bool:
        """False if it could not be emptied."""
        ...

    async def label(self, version: str) -> None:
        """Names the weights that sample from here on."""
        ...

    async def call(self, method: str, **arguments: Any) -> list[Any]:
        """Calls a method of `WorkerExtension` on every worker."""
        ...

    async def close(self) -> None: ...
