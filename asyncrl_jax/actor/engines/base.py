"""What an actor asks of an engine: sessions that sample, and weights that are proven before they sample."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal, Protocol

import numpy as np

from asyncrl_jax.weights.manifest import Manifest


@dataclasses.dataclass(frozen=True)
class Completion:
    """Tokens that the policy sampled in one turn."""

    tokens: np.ndarray  # int32 [T], the stop token included
    logprobs: np.ndarray  # float32 [T], of the temperature-scaled distribution sampled from
    versions: np.ndarray  # int32 [T], number of the version that made each token
    finish: Literal["stop", "length"]


class Session(Protocol):
    """One sequence that grows by turns. It holds a slot of the engine until it is closed."""

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        """Appends `new_tokens`, then samples until a stop token or until `max_tokens` were sampled.

        Raises:
          ValueError: if there is nothing to append to or nothing to sample, or the sequence would outgrow the engine.
          RuntimeError: if no weights are proven yet, or the session is closed, also while it samples.
        """
        ...

    def close(self) -> None:
        """Frees the slot. May be called more than once."""
        ...


class Engine(Protocol):
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

    async def open(self, seed: int, temperature: float) -> Session:
        """A session; waits for a free slot, first come first served."""
        ...

    async def load(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> None:
        """Proves these weights and swaps them in between two tokens; sessions under way go on with them.

        Args:
          manifest: of the version.
          tensors: its arrays by Hugging Face name.

        Raises:
          WeightsMismatch: when the proof fails; the old weights stay.
        """
        ...

    def pause(self) -> None:
        """Samples nothing until `resume`; sessions stay."""
        ...

    def resume(self) -> None:
        """Goes on after `pause`."""
        ...

    async def run(self) -> None:
        """Samples for as long as it is not cancelled."""
        ...
