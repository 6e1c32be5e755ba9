"""What an actor asks of an engine: sessions that sample, and weights that are proven before they sample.

Dimensions: T tokens of a turn, S tokens of a sequence, L layers, K experts of a token.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal, Protocol

import numpy as np

from asyncrl_jax.types import WeightVersion


@dataclasses.dataclass(frozen=True)
class Completion:
    """Tokens that the policy sampled in one turn."""

    tokens: np.ndarray  # int32 [T], the stop token included
    logprobs: np.ndarray  # float32 [T], of the temperature-scaled distribution sampled from
    versions: np.ndarray  # int32 [T], number of the version that made each token
    finish: Literal["stop", "length"]
    # int16 [S - 1, L, K], when asked for: experts that served each token of the sequence so far when it was first
    # computed; -1 in dense layers. The last token has none yet.
    routed_experts: np.ndarray | None = None


@dataclasses.dataclass
class EngineCounters:
    """Work done since the start."""

    num_steps: int = 0
    num_fed_tokens: int = 0  # sequences that were computed, summed over steps
    num_sampled_tokens: int = 0
    num_prompt_tokens: int = 0  # asked for, over all turns; history of the session included
    num_reused_tokens: int = 0  # of these, not computed again
    num_loads: int = 0
    swap_s: float = 0.0  # seconds in which nothing could be sampled because weights were swapped
    proof_s: float = 0.0  # seconds that proofs took
    compute_s: float = 0.0  # seconds in which prompts or turns were computed: of the device, not of the host beside it
    rebuild_s: float = 0.0  # seconds in which caches of running sequences were computed anew after swaps


class Session(Protocol):
    """One sequence that grows by turns. It holds a slot while it samples, and may hold it until it is closed."""

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        """Appends `new_tokens`, then samples until a stop token or until `max_tokens` were sampled.

        Raises:
          ValueError: if there is nothing to append to or nothing to sample, or the sequence would outgrow the engine.
          RuntimeError: if no weights are proven yet, or the session is closed, also while it samples.
        """
        ...

    def close(self) -> None:
        """Frees the slot, and stops what is being sampled. May be called more than once."""
        ...


class SessionSource(Protocol):
    """What an episode needs of an engine."""

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> Session:
        """A session; waits for a free slot, first come first served.

        Args:
          seed: of sampling.
          temperature: of sampling, more than 0.
          routed_experts: whether completions say which experts served each token.

        Raises:
          ValueError: for a temperature that is not more than 0, or if the engine cannot say which experts served.
        """
        ...


class Engine(SessionSource, Protocol):
    """Samples many sessions together.

    Invariants:
      * A token's version is the one whose weights made it and everything it attended to.
      * Weights sample nothing before they are proven; after a failed load the old ones go on.
      * What a session samples depends on its seed, its tokens and the weights, not on the other sessions.
    """

    @property
    def version(self) -> int | None:
        """Number of the version that samples now; None before the first load."""
        ...

    @property
    def counters(self) -> EngineCounters:
        """Work done so far."""
        ...

    @property
    def num_slots(self) -> int:
        """Sessions that sample at once."""
        ...

    @property
    def num_busy_slots(self) -> int:
        """Slots that sessions hold."""
        ...

    async def load(self, directory: str, version: WeightVersion) -> None:
        """Reads, proves and swaps in an announced version; sessions under way go on with it.

        Args:
          directory: of all versions.
          version: as announced.

        Raises:
          VersionGone: if it was deleted, also while it was being read; the old weights stay.
          WeightsMismatch: when the proof fails; the old weights stay.
        """
        ...

    async def pause(self) -> None:
        """Samples nothing from its return until `resume`; sessions stay."""
        ...

    async def resume(self) -> None:
        """Goes on after `pause`."""
        ...

    async def run(self) -> None:
        """Samples for as long as it is not cancelled."""
        ...
