"""The orchestrator inside a simulation: its own functions, on what the simulation shows them.

What `orchestrator/loop.py` reads from Redis comes from the simulation; what it decides with is the same code:
`orchestrator/round.py` with every policy behind it, `policies/admission.py`, and the draw of tasks.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Mapping
from typing import Any

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.policies import admission, curriculum, watermark
from asyncrl_jax.types import Decision, LearnerState

SURPRISAL = 0.5  # nats a token that simulated episodes report: no collapse


@dataclasses.dataclass(frozen=True)
class Order:
    """A ticket to be issued."""

    number: int
    bucket: str
    level: int
    min_update: int
    deadline: int


class Tallies:
    """What all actors saw since the last round, in the form of `actor/tally.py`."""

    def __init__(self) -> None:
        self._buckets: dict[str, dict[str, float]] = {}
        self._targets: dict[str, dict[str, Any]] = {}

    def group(self, bucket: str, seconds: float, tokens: float, episodes: int) -> None:
        """A group came: half of its episodes succeed."""
        sums = self._buckets.setdefault(bucket, collections.defaultdict(float))
        for name, value in (
            ("groups", 1.0),
            ("episodes", episodes),
            ("tokens", tokens),
            ("reward", episodes / 2),
            ("reward_squared", episodes / 2),
            ("group_variance", 0.25),
            ("successes", episodes / 2),
            ("surprisal", SURPRISAL * tokens),
        ):
            sums[name] += value
        target = self._target(bucket)
        target["successes"] += episodes
        target["seconds"] += seconds

    def faults(self, bucket: str, count: int) -> None:
        """Attempts that the environment failed."""
        self._target(bucket)["infrastructure"]["step/TimeoutError"] += count

    def take(self) -> tuple[Mapping[str, Any], ...]:
        """The sums, which start anew."""
        record = {"buckets": self._buckets, "targets": self._targets}
        self._buckets, self._targets = {}, {}
        return (record,)

    def _target(self, bucket: str) -> dict[str, Any]:
        name = f"environment:{curriculum.split_bucket(bucket)[0]}"
        empty = {"successes": 0.0, "seconds": 0.0, "infrastructure": collections.Counter(), "data": {}}
        return self._targets.setdefault(name, empty)


class Controller:
    """Rounds and admission of one run, as `Orchestrator` makes them. Cost: O(1) a call and O(1) a ticket."""

    def __init__(self, config: Config):
        self.decisions: list[tuple[float, Decision]] = []
        self.issued: collections.Counter[str] = collections.Counter()  # groups, by bucket
        self._config = config
        self._lag = config.effective_lag
        self._states = rounds.initial_states(config)
        self._plan: rounds.Plan | None = None
        self._quotas: Mapping[str, watermark.Quota] = {}
        self._probes_left: int | None = None
        self._count = 0

    @property
    def token_updates(self) -> int:
        """N for the tickets issued now."""
        return self._states.lag.token_updates

    @property
    def fleet(self) -> tuple[int, int]:
        """(actors that are to exist, those of them that do not drain)."""
        return self._states.autoscale.size, self._states.autoscale.target

    def round(
        self,
        now: float,
        update: int,
        beat: Mapping[str, Any],
        backlog: int,
        tallies: Tallies,
        actor_beats: Mapping[str, Mapping[str, Any]] = types.MappingProxyType({}),
    ) -> None:
        """All policies but admission look."""
        if self._plan is not None:
            self._states = dataclasses.replace(self._states, quotas=self._quotas, issued=dict(self.issued))
        scene = rounds.Scene(
            now=now,
            learner=LearnerState(line=0, update=update, version=update, phase="training"),
            learner_beat=beat,
            actor_beats=actor_beats,
            backlog_groups=backlog,
            observations=tallies.take(),
        )
        self._states, self._plan, decisions = rounds.decide(self._states, scene, self._config)
        self.decisions += [(now, decision) for decision in decisions]
        self._quotas = dict(self._plan.quotas)
        self._probes_left = self._plan.probe_groups

    def admit(self, update: int, tickets: int, uses: int, beat: Mapping[str, Any]) -> list[Order]:
        """Tickets to issue now.

        Args:
          tickets: outstanding.
          uses: outstanding.
          beat: the learner's newest heartbeat.
        """
        plan, settings = self._plan, self._config.learner
        if plan is None or plan.halt:
            return []
        decision = admission.decide(
            admission.Observed(
                update=update,
                outstanding_tickets=tickets,
                outstanding_uses=uses,
                step_s=beat.get("step_s", 0.0),
                service_s=beat.get("service_s", 0.0),
                factor=plan.factor,
                fresh=plan.fresh,
                most_tickets=self._probes_left,
            ),
            dataclasses.replace(self._lag, token_updates=plan.token_updates),
            mode=self._config.mode,
            groups_per_update=settings.groups_per_update,
            replay_ratio=settings.replay_ratio,
            num_updates=settings.num_updates,
            pool_updates=self._config.pool.size_updates,
            publish_every_updates=self._config.weights.publish_every_updates,
        )
        orders = []
        for _ in range(decision.num_tickets):
            task = curriculum.draw_task(self._drawable(plan), self._config.seed, self._count)
            if task is None:
                break
            self._quotas = watermark.spend(self._quotas, task.environment, settings.group_size)
            bucket = curriculum.bucket_name(task.environment, task.level)
            orders.append(Order(self._count, bucket, task.level, decision.min_update, decision.deadline))
            self.issued[bucket] += 1
            self._count += 1
        if self._probes_left is not None:
            self._probes_left -= len(orders)
        return orders

    def _drawable(self, plan: rounds.Plan) -> dict[str, float]:
        """Weights of the buckets that may be drawn from now."""
        size = self._config.learner.group_size
        weights = {}
        for name, weight in plan.weights.items():
            left = watermark.allowed(self._quotas, curriculum.split_bucket(name)[0], size)
            if weight > 0 and (left is None or left > 0):
                weights[name] = weight
        return weights
