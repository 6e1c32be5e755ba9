"""What an actor saw, summed between two heartbeats: how groups look, and what failed where.

The orchestrator folds the sums of all actors into its policies (`orchestrator/round.py` reads what `take` gives).
"""

from __future__ import annotations

import collections
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl_jax.actor.engines.base import Completion, Engine, EngineCounters, Session
from asyncrl_jax.actor.episode import EpisodeFailed
from asyncrl_jax.actor.rewards import InvalidReward, step_gap
from asyncrl_jax.actor.tools.base import ToolBroken
from asyncrl_jax.actor.verifiers import ScoreFailed
from asyncrl_jax.types import Ticket, Trajectory, WeightVersion

# What a bad task, a bad reward or a bug raises. Anything else (no answer, no connection, no memory) is the
# infrastructure's, and another try may go well.
_OF_THE_DATA = (ValueError, TypeError, LookupError, ArithmeticError, AssertionError, AttributeError)


class Tally:
    """Sums since the last `take`."""

    def __init__(self, actor_id: str, environment: str = "", tool_outcomes: Mapping[str, int] | None = None):
        """Args:
        environment: that the actor plays.
        tool_outcomes: of its tools' calls so far, by "tool/outcome".
        """
        self._actor_id = actor_id
        self._environment = environment
        self._tool_outcomes = {} if tool_outcomes is None else tool_outcomes
        self._answered: dict[str, int] = {}  # calls of each tool that it has answered, as of the last `take`
        self._buckets: dict[str, dict[str, float]] = {}
        self._targets: dict[str, dict[str, Any]] = {}

    def group(self, ticket: Ticket, trajectories: Sequence[Trajectory]) -> None:
        """Counts a group that was sampled whole, whatever becomes of it later."""
        environment = ticket.task.environment
        sums = self._buckets.setdefault(f"{environment}/{ticket.task.level}", collections.defaultdict(float))
        rewards = np.array([trajectory.reward for trajectory in trajectories], np.float64)
        sums["groups"] += 1
        sums["episodes"] += len(trajectories)
        sums["reward"] += float(rewards.sum())
        sums["reward_squared"] += float(np.square(rewards).sum())
        sums["group_variance"] += float(rewards.var())
        gap = step_gap(trajectories)
        if gap is not None:
            sums["contrasts"] += 1
            sums["step_gap"] += gap
            sums["step_gap_squared"] += gap * gap
        for trajectory in trajectories:
            sampled = trajectory.loss_mask.astype(bool)
            sums["successes"] += int(trajectory.success)
            sums["tokens"] += int(sampled.sum())
            sums["repetition"] += repetition(trajectory.tokens[sampled])
            sums["surprisal"] -= float(trajectory.behaviour_logprobs[sampled].sum())
        seconds = sum(trajectory.sampling_ended_at - trajectory.sampling_started_at for trajectory in trajectories)
        for target in (f"environment:{environment}", f"reward:{environment}", f"actor:{self._actor_id}"):
            tally = self._target(target)
            tally["successes"] += len(trajectories)
            tally["seconds"] += seconds

    def fault(self, environment: str, error: EpisodeFailed) -> None:
        """Counts an episode that failed, by where it did and with what."""
        cause = error.__cause__
        if isinstance(cause, ToolBroken) and cause.tool:
            target = f"tool:{environment}/{cause.tool}"
        else:
            target = f"{'reward' if error.stage in ('score', 'process') else 'environment'}:{environment}"
        faults = self._target(target)["data" if isinstance(cause, _OF_THE_DATA) else "infrastructure"]
        signature = f"{error.stage}/{type(cause).__name__}"
        if isinstance(cause, (InvalidReward, ScoreFailed)):
            signature += f"/{cause.reason}"
        faults[signature] += 1

    def own_fault(self, error: Exception) -> None:
        """Counts a fault of this actor: it made something that cannot be sent."""
        self._target(f"actor:{self._actor_id}")["infrastructure"][type(error).__name__] += 1

    def take(self) -> Mapping[str, Any] | None:
        """The sums, which start anew; None when nothing happened."""
        self._count_answers()
        if not self._buckets and not self._targets:
            return None
        record = {"actor": self._actor_id, "buckets": self._buckets, "targets": self._targets}
        self._buckets, self._targets = {}, {}
        return record

    def _count_answers(self) -> None:
        """A tool that answers works, whatever it was asked. One that a call's time ran out on may not."""
        answered: dict[str, int] = collections.defaultdict(int)
        for name, count in self._tool_outcomes.items():
            tool, _, outcome = name.rpartition("/")
            if outcome in ("ok", "failed"):
                answered[tool] += count
        for tool, count in answered.items():
            if new := count - self._answered.get(tool, 0):
                self._target(f"tool:{self._environment}/{tool}")["successes"] += new
        self._answered = answered

    def _target(self, name: str) -> dict[str, Any]:
        empty = {
            "successes": 0,
            "seconds": 0.0,
            "infrastructure": collections.Counter(),
            "data": collections.Counter(),
        }
        return self._targets.setdefault(name, empty)


def repetition(tokens_T: np.ndarray) -> float:
    """Share of the pairs of neighbouring tokens that were there before: 0 without repetition, near 1 for a loop."""
    if len(tokens_T) < 2:
        return 0.0
    pairs = tokens_T[:-1].astype(np.int64) << 32 | tokens_T[1:].astype(np.int64)
    return 1.0 - len(np.unique(pairs)) / len(pairs)


class WatchedEngine:
    """An engine that knows how many sessions wait for tokens: the sign of work by which a standstill is known.

    They fill the engine's slots first, so they also say how many of these are in use: for a prompt, a token, or a swap.
    """

    def __init__(self, engine: Engine):
        self._slot_s = 0.0  # time of all slots in use, since it was last taken
        self._taken_at = self._changed_at = time.monotonic()
        self.num_generating = 0
        self.num_generating_tokens = 0  # of their sequences, as they were when they asked
        self._engine = engine

    @property
    def version(self) -> int | None:
        return self._engine.version

    @property
    def counters(self) -> EngineCounters:
        return self._engine.counters

    @property
    def num_slots(self) -> int:
        return self._engine.num_slots

    @property
    def num_busy_slots(self) -> int:
        return self._engine.num_busy_slots

    def count(self, sessions: int, tokens: int) -> None:
        """So many more sessions want tokens, and their sequences hold so many; fewer if negative."""
        now = time.monotonic()
        self._slot_s += (now - self._changed_at) * min(self.num_generating, self.num_slots)
        self._changed_at = now
        self.num_generating += sessions
        self.num_generating_tokens += tokens

    def take_slots_busy(self) -> float:
        """Mean share of the slots in use since the last call."""
        self.count(0, 0)
        seconds, slot_s = self._changed_at - self._taken_at, self._slot_s
        self._taken_at, self._slot_s = self._changed_at, 0.0
        return slot_s / max(seconds * self.num_slots, 1e-9)

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> Session:
        return _WatchedSession(self, await self._engine.open(seed, temperature, routed_experts=routed_experts))

    async def load(self, directory: str, version: WeightVersion) -> None:
        await self._engine.load(directory, version)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def run(self) -> None:
        await self._engine.run()


class _WatchedSession:
    def __init__(self, engine: WatchedEngine, session: Session):
        self._engine = engine
        self._session = session
        self._num_tokens = 0

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        asked = self._num_tokens + len(new_tokens)
        self._engine.count(1, asked)
        try:
            completion = await self._session.generate(new_tokens, stop_tokens, max_tokens)
            self._num_tokens = asked + len(completion.tokens)
            return completion
        finally:
            self._engine.count(-1, -asked)

    def close(self) -> None:
        self._session.close()
