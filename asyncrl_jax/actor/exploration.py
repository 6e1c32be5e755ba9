"""Samples that are not the newest policy's at the ticket's temperature: what each member of a group is played with.

* Jitter: each member's temperature is the ticket's times e^u, u uniform within ±`temperature_jitter`. Its log-probs are
  those at its own temperature, and the learner computes its at the same.
* A share of members is sampled by another policy: `uniform` over the vocabulary, or `older`, the version that this
  host evaluated last, in the evaluation's engine: none before its first evaluation. They are tagged; the learner weighs
  them by truncated importance and counts them apart.

All is drawn from the ticket's seed.
"""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Sequence

import numpy as np

from asyncrl_jax.actor.engines.base import Completion, Engine, Session, SessionSource
from asyncrl_jax.config_actor import ExplorationConfig
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Exploration, Ticket


@dataclasses.dataclass(frozen=True)
class Choice:
    """What a member of a group is sampled with. `temperature` is None where it is the ticket's."""

    source: SessionSource
    temperature: float | None = None
    exploration: Exploration | None = None


class Explorer:
    """Chooses by the rules above."""

    def __init__(self, config: ExplorationConfig, engine: Engine, older: Engine, vocab_size: int) -> None:
        """Args: older: holds the weights evaluated last. vocab_size: tokens that a uniform policy chooses from."""
        self._config = config
        self._engine = engine
        self._older = older
        self._uniform = UniformEngine(engine, vocab_size)

    def choose(self, ticket: Ticket, member: int) -> Choice:
        """For every attempt at one member of the ticket's group."""
        config = self._config
        if not (config.share or config.temperature_jitter):
            return Choice(self._engine)
        drawn = random.Random(derive_seed(ticket.seed, "exploration", member))
        if drawn.random() < config.share:
            if config.policy == Exploration.UNIFORM:
                return Choice(self._uniform, None, Exploration.UNIFORM)
            if self._older.version is not None and self._older.version != self._engine.version:
                return Choice(self._older, None, Exploration.OLDER)
        if not config.temperature_jitter:
            return Choice(self._engine)
        factor = math.exp(drawn.uniform(-config.temperature_jitter, config.temperature_jitter))
        # Rounded as the wire and the learner hold it.
        return Choice(self._engine, float(np.float32(ticket.temperature * factor)))


class UniformEngine:
    """Opens sessions of the policy that gives every token the same probability. It needs neither slot nor weights."""

    def __init__(self, engine: Engine, vocab_size: int) -> None:
        """Args: engine: whose version its tokens carry: their age is that of the policy they are compared with."""
        self._engine = engine
        self._vocab_size = vocab_size

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> Session:
        """A session. The temperature changes nothing.

        Raises:
          ValueError: if it is asked for experts, which it has none of.
        """
        del temperature
        if routed_experts:
            raise ValueError("a uniform policy has no experts")
        return _UniformSession(self._engine, self._vocab_size, seed)


class _UniformSession:
    """See `Session`."""

    def __init__(self, engine: Engine, vocab_size: int, seed: int) -> None:
        self._engine = engine
        self._vocab_size = vocab_size
        self._random = np.random.default_rng(seed)

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        del new_tokens  # what was said before does not matter to it
        tokens = self._random.integers(self._vocab_size, size=max_tokens).astype(np.int32)
        stops = np.flatnonzero(np.isin(tokens, list(stop_tokens)))
        if stops.size:
            tokens = tokens[: stops[0] + 1]
        version = self._engine.version
        if version is None:
            raise RuntimeError("no weights are proven yet")
        logprobs = np.full(len(tokens), -math.log(self._vocab_size), np.float32)
        return Completion(tokens, logprobs, np.full(len(tokens), version, np.int32), "stop" if stops.size else "length")

    def close(self) -> None:
        """Nothing is held."""
