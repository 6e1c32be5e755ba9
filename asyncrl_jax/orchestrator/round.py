"""One look at everything but admission: all policies, in order, on one scene. A pure function, as they are.

breaker ───┐
drift ─────┼▶ curriculum ─▶ weights      lag ─▶ N, "wait for fresh"   ─┐   watermark ─▶ factor, quotas ─┐
agreement ─┘                                                          └────────────────────────────────┴▶ autoscale
regression ─▶ rollback, confirmation, pause                       a human's settings go before every rule
"""

from __future__ import annotations

import collections
import dataclasses
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator.policies import (
    agreement,
    autoscale,
    breaker,
    curriculum,
    drift,
    lag,
    regression,
    watermark,
)
from asyncrl_jax.orchestrator.policies.agreement import State as AgreementState
from asyncrl_jax.orchestrator.policies.autoscale import State as AutoscaleState
from asyncrl_jax.orchestrator.policies.breaker import State as BreakerState
from asyncrl_jax.orchestrator.policies.curriculum import State as CurriculumState
from asyncrl_jax.orchestrator.policies.drift import State as DriftState
from asyncrl_jax.orchestrator.policies.lag import State as LagState
from asyncrl_jax.orchestrator.policies.regression import State as RegressionState
from asyncrl_jax.orchestrator.policies.watermark import Quota
from asyncrl_jax.orchestrator.policies.watermark import State as WatermarkState
from asyncrl_jax.transport.steering import ActorOrder, Directives, RollbackOrder
from asyncrl_jax.types import Decision, LearnerState


@dataclasses.dataclass(frozen=True)
class Clock:
    """The time that policies see: as that of Redis, and it never goes back. One that was put back goes on from where
    it stood, so that nothing waits for it to catch up."""

    seen: float | None = None  # seconds, by the clock of Redis, at the last round
    now: float = 0.0  # seconds

    def at(self, seen: float) -> Clock:
        """The clock at a round. Args: seen: by the clock of Redis."""
        return Clock(seen, seen if self.seen is None else self.now + max(seen - self.seen, 0.0))


@dataclasses.dataclass(frozen=True)
class States:
    """What the next round needs of this one, by policy; each is one JSON in Redis."""

    lag: LagState
    autoscale: AutoscaleState
    watermark: WatermarkState = WatermarkState()
    curriculum: CurriculumState = CurriculumState()
    breaker: BreakerState = BreakerState()
    drift: DriftState = DriftState()
    agreement: AgreementState = AgreementState()
    regression: RegressionState = RegressionState()
    quotas: Mapping[str, Quota] = dataclasses.field(default_factory=dict)
    issued: Mapping[str, int] = dataclasses.field(default_factory=dict)  # groups, by bucket
    orders: Mapping[str, int] = dataclasses.field(default_factory=dict)  # replacements ordered, by actor
    marks: Mapping[str, str] = dataclasses.field(
        default_factory=dict
    )  # once-only settings of a human, that were heeded
    expire_before: tuple[int, int] | None = None  # as in Directives
    halted: str = ""  # why the run is paused until a human resumes it
    clock: Clock = Clock()


@dataclasses.dataclass(frozen=True)
class Scene:
    """What there is to see."""

    now: float  # seconds, by the clock of Redis
    learner: LearnerState
    learner_beat: Mapping[str, Any]
    actor_beats: Mapping[str, Mapping[str, Any]]  # of live actors, by id
    backlog_groups: int  # that wait for the learner
    scores: tuple[regression.Score, ...] = ()
    observations: tuple[Mapping[str, Any], ...] = ()  # new since the last round
    operator: Mapping[str, Any] = dataclasses.field(default_factory=dict)  # set by hand, by name


@dataclasses.dataclass(frozen=True)
class Plan:
    """What holds until the next round."""

    weights: Mapping[str, float]  # share of each bucket
    token_updates: int  # N
    fresh: bool
    factor: float  # on what admission aims at
    temperature: float  # of tickets
    halt: str  # why nothing is issued, and how that ends; empty: tickets are issued
    draining: bool  # issue nothing, then stop the run
    probe_groups: int | None  # most tickets until the next round, while everything is only probed; None: no limit
    quotas: Mapping[str, watermark.Quota]
    confirm: regression.Score | None  # evaluate its version once more
    directives: Directives


def initial_states(config: Config) -> States:
    """Before the first round."""
    hosts = config.actor.num_hosts
    return States(
        lag=lag.State(config.effective_lag.token_updates), autoscale=autoscale.State(hosts, hosts, config.mesh.data)
    )


def decide(states: States, scene: Scene, config: Config) -> tuple[States, Plan, tuple[Decision, ...]]:
    """One round."""
    settings, operator = config.orchestrator, scene.operator
    clock = states.clock.at(scene.now)
    scene = dataclasses.replace(scene, now=clock.now)
    samples, tallies = fold(scene.observations)
    broken = breaker.decide(
        states.breaker,
        breaker.Observed(scene.now, tallies, _actors(scene.actor_beats), _chosen(operator, "breaker.")),
        settings.breaker,
    )
    seen = _drift_observed(states, samples, operator, config)
    drifted = drift.decide(states.drift, seen, settings.drift)
    agreed = agreement.decide(
        states.agreement,
        agreement.Observed(
            _contrasts(samples), config.reward.step + config.learner.advantage.step_credit, seen.released
        ),
        settings.agreement,
    )
    drifted = dataclasses.replace(drifted, factors={**drifted.factors, **agreed.factors})
    taught = _weights(states, scene, config, samples, broken, drifted)
    tuned = _bound(states, scene, config)
    pressed = watermark.decide(
        states.watermark,
        watermark.Observed(
            scene.now,
            scene.backlog_groups,
            config.learner.groups_per_update,
            tuned.token_updates - config.effective_lag.actor_updates + 1,
            number(scene.learner_beat, "idle_share"),
        ),
        settings.watermark,
    )
    judged = regression.decide(
        states.regression, regression.Observed(scene.scores, scene.learner.line), settings.regression
    )
    scaled = autoscale.decide(
        states.autoscale,
        _scaling(states.autoscale, scene, config, pressed.state.level, tuned.token_updates),
        settings.autoscale,
        settings.fleet,
    )
    log = [*broken.log, *drifted.log, *agreed.log, *taught.log, *tuned.log, *pressed.log, *judged.log, *scaled.log]
    halted, resumed = _halted(states, operator, judged)
    expire_before, reset = _archive_reset(states, scene, tuned)
    log += [*resumed, *reset]
    orders = {**states.orders, **{actor: states.orders.get(actor, 0) + 1 for actor in broken.replace}}
    environments = tuple(sorted({curriculum.split_bucket(name)[0] for name in taught.weights}))
    after = States(
        lag=tuned.state,
        autoscale=scaled.state,
        watermark=pressed.state,
        curriculum=taught.state,
        breaker=broken.state,
        drift=drifted.state,
        agreement=agreed.state,
        regression=judged.state,
        issued=states.issued,
        quotas=watermark.refill(states.quotas, environments, scene.now, settings.watermark),
        orders=orders,
        marks=_marks(operator),
        expire_before=expire_before,
        halted=halted,
        clock=clock,
    )
    buckets = breaker.bucket_factors(broken.factors, list(taught.weights))
    probing = bool(buckets) and max(buckets.values()) <= breaker.PROBE_SHARE
    temperature = number(operator, "temperature", config.actor.temperature) * drifted.temperature
    plan = Plan(
        weights=taught.weights,
        token_updates=tuned.token_updates,
        fresh=tuned.fresh,
        factor=pressed.factor,
        temperature=temperature,
        halt=halt(halted, operator, config),
        draining=bool(operator.get("draining", False)),
        probe_groups=settings.breaker.probes if probing else None,
        quotas=after.quotas,
        confirm=judged.confirm,
        directives=dataclasses.replace(
            _directives(after, tuned, operator, judged.state, config), steps_held_out=agreed.held_out
        ),
    )
    return after, plan, tuple(log)


def fold(observations: Iterable[Mapping[str, Any]]) -> tuple[dict[str, drift.Sample], dict[str, breaker.Tally]]:
    """(samples by bucket, tallies by target) of what actors saw. Records that are none are left out.

    Cost: linear. Only where the sum of all is none, every record is looked at by itself.
    """
    records = tuple(observations)
    try:
        return _sums(records)
    except (TypeError, ValueError, AttributeError):
        return _sums([record for record in records if _sound(record)])


def _sums(records: Sequence[Mapping[str, Any]]) -> tuple[dict[str, drift.Sample], dict[str, breaker.Tally]]:
    buckets, targets = collections.defaultdict[str, list[Any]](list), collections.defaultdict[str, list[Any]](list)
    for record in records:
        for name, sums in record.get("buckets", {}).items():
            buckets[name].append(sums)
        for name, sums in record.get("targets", {}).items():
            targets[name].append(sums)
    samples = {name: drift.Sample.total(sums) for name, sums in buckets.items()}
    return samples, {name: breaker.Tally.total(sums) for name, sums in targets.items()}


def _sound(record: Mapping[str, Any]) -> bool:
    try:
        _sums([record])
    except (TypeError, ValueError, AttributeError):
        return False
    return True


def base_weights(config: Config, operator: Mapping[str, Any]) -> dict[str, float]:
    """Weight of each bucket as configured, or as set by hand with `weight.<bucket>`."""
    name = config.environment.name
    weights = {
        curriculum.bucket_name(name, level): weight for level, weight in enumerate(config.environment.level_weights, 1)
    }
    return {bucket: max(number(operator, f"weight.{bucket}", weight), 0.0) for bucket, weight in weights.items()}


def _actors(beats: Mapping[str, Mapping[str, Any]]) -> dict[str, breaker.Actor]:
    return {
        actor: breaker.Actor(
            finite(beat.get("tokens_sampled")), not beat.get("paused_s") and finite(beat.get("generating")) > 0
        )
        for actor, beat in beats.items()
    }


def _chosen(operator: Mapping[str, Any], prefix: str) -> dict[str, str]:
    return {
        name.removeprefix(prefix): value
        for name, value in operator.items()
        if name.startswith(prefix) and value in ("open", "closed")
    }


def _drift_observed(
    states: States, samples: Mapping[str, drift.Sample], operator: Mapping[str, Any], config: Config
) -> drift.Observed:
    reviews = {name.removeprefix("review."): str(v) for name, v in operator.items() if name.startswith("review.")}
    released = {
        bucket
        for bucket, value in reviews.items()
        if value.startswith("released") and states.marks.get(f"review.{bucket}") != value
    }
    held = {bucket for bucket, value in reviews.items() if value.startswith("held")}
    drawn = frozenset(name for name, weight in base_weights(config, operator).items() if weight > 0)
    return drift.Observed(samples, frozenset(released), frozenset(held), drawn)


def _contrasts(samples: Mapping[str, drift.Sample]) -> dict[str, agreement.Contrasts]:
    return {
        name: agreement.Contrasts(sample.contrasts, sample.step_gap, sample.step_gap_squared)
        for name, sample in samples.items()
        if sample.contrasts
    }


def _weights(
    states: States,
    scene: Scene,
    config: Config,
    samples: Mapping[str, drift.Sample],
    broken: breaker.Decided,
    drifted: drift.Decided,
) -> curriculum.Decided:
    base = base_weights(config, scene.operator)
    factors = breaker.bucket_factors(broken.factors, list(base))
    return curriculum.decide(
        states.curriculum,
        curriculum.Observed(
            base=base,
            groups={name: sample.groups for name, sample in samples.items()},
            successes={name: sample.measures()["success"] for name, sample in samples.items()},
            factors={name: factors[name] * drifted.factors.get(name, 1.0) for name in base},
            explore=drifted.explore,
        ),
        config.orchestrator.curriculum,
    )


def _bound(states: States, scene: Scene, config: Config) -> lag.Decided:
    """N; in modes sync and semi_async it is the mode's own."""
    effective, beat = config.effective_lag, scene.learner_beat
    tuning = config.orchestrator.tuning
    pinned = scene.operator.get("N")
    if config.mode != "async":
        tuning, pinned = dataclasses.replace(tuning, enabled=False), None
    mode = scene.operator.get("mode")
    return lag.decide(
        states.lag,
        lag.Observed(
            update=scene.learner.update,
            by_lag=_by_lag(beat.get("by_lag")),
            clip_fraction=number(beat, "clip_fraction"),
            idle_share=number(beat, "idle_share"),
            pinned=pinned if isinstance(pinned, int) else None,
            fresh={"fresh": True, "normal": False}.get(str(mode)),
        ),
        tuning,
        initial=effective.token_updates,
        least=effective.actor_updates + config.learner.replay_ratio - 1,
    )


def _scaling(state: AutoscaleState, scene: Scene, config: Config, level: str, token_updates: int) -> autoscale.Observed:
    """What the size of the fleet follows from. Cost: linear in its members."""
    beat, fleet = scene.learner_beat, config.orchestrator.fleet
    settings = {one.name: config.actor_of(one.name) for one in fleet.host_classes}
    alive, drained, busy, there = set[int](), set[int](), 0.0, 0
    looks = config.orchestrator.autoscale.enabled or state.target < state.size
    for place, name in enumerate(fleet.names(state.size) if looks else ()):
        actor = scene.actor_beats.get(name)
        if actor is None:
            continue
        alive.add(place)
        if place >= state.target:
            if actor.get("drained") and not number(actor, "evaluating"):
                drained.add(place)
        else:
            own = settings[name.rpartition("-")[0]]
            share = number(actor, "running") / max(own.slots, own.episodes)
            if own.episodes > own.slots:  # then its engine may be full before it is
                share = max(share, number(actor, "generating") / own.slots)
            busy += own.slots * min(share, 1.0)
            there += own.slots
    by_lag = _by_lag(beat.get("by_lag"))
    tokens = sum(found.tokens for found in by_lag.values())
    mean_lag = sum(updates * found.tokens for updates, found in by_lag.items()) / tokens if tokens > 0 else 0.0
    pinned = scene.operator.get("actors")
    return autoscale.Observed(
        now=scene.now,
        starved=min(max(number(beat, "starved_share"), 0.0), 1.0),
        busy=busy / there if there else 0.0,
        stale=mean_lag / token_updates if token_updates else 0.0,
        level=level,
        alive=frozenset(alive),
        drained=frozenset(drained),
        training=scene.learner.phase == "training" and number(beat, "step_s") > 0,
        pinned=pinned if isinstance(pinned, int) else None,
        slots={name: own.slots for name, own in settings.items()},
    )


def _by_lag(found: Any) -> dict[int, lag.LagStatistics]:
    if not isinstance(found, Mapping):
        return {}
    statistics = {}
    for name, values in found.items():
        if _UPDATES.fullmatch(str(name)) and isinstance(values, list) and len(values) == 3:
            statistics[int(name)] = lag.LagStatistics(*map(finite, values))
    return statistics


def halt(halted: str, operator: Mapping[str, Any], config: Config) -> str:
    """Why nothing is issued, and how that ends, in words; empty: tickets are issued.

    Args:
      halted: of the states.
      operator: what was set by hand.
    """
    if halted:
        return f"paused by {halted} until `asyncrl resume`"
    if operator.get("draining"):
        return "draining"
    if operator.get("paused"):
        return "paused by hand until `asyncrl resume`"
    nothing = not any(base_weights(config, operator).values())
    return "every bucket weighs 0 until `asyncrl set weight.<bucket>=auto`" if nothing else ""


def _halted(
    states: States, operator: Mapping[str, Any], judged: regression.Decided
) -> tuple[str, tuple[Decision, ...]]:
    """(why the run is paused until a human resumes it or "", what is new)."""
    if judged.pause:
        return "regression", ()
    if states.halted and "resumed" in operator and str(operator["resumed"]) != states.marks.get("resumed"):
        return "", (Decision("regression", "resume", "run", f"resumed by hand after {states.halted}"),)
    return states.halted, ()


def _archive_reset(
    states: States, scene: Scene, tuned: lag.Decided
) -> tuple[tuple[int, int] | None, tuple[Decision, ...]]:
    """((line, update) before which untrained groups end, what is new): by hand, or when the policy has run off."""
    line, update = scene.learner.line, scene.learner.update
    asked = scene.operator.get("archive_reset")
    entered = tuned.state.fresh and not states.lag.fresh
    if isinstance(asked, dict) and str(asked) != states.marks.get("archive_reset"):
        before, why = update - int(number(asked, "updates")), "by hand: the oldest end"
    elif entered:
        before, why = update - tuned.token_updates // 2, "the policy has run off: the oldest end"
    else:
        return states.expire_before, ()
    numbers = {"line": float(line), "min_update": float(before), "update": float(update)}
    return (line, before), (Decision("lag", "archive_reset", "pool", why, numbers),)


def _marks(operator: Mapping[str, Any]) -> dict[str, str]:
    """Once-only settings, as they stand now: what stands there at the next round has been heeded."""
    once = {name: value for name, value in operator.items() if name.startswith("review.")}
    once |= {name: operator[name] for name in ("archive_reset", "resumed") if name in operator}
    return {name: str(value) for name, value in once.items()}


def _directives(
    states: States, tuned: lag.Decided, operator: Mapping[str, Any], judged: regression.State, config: Config
) -> Directives:
    actors: dict[str, ActorOrder] = {}
    for target, state in states.breaker.breakers.items():
        kind, _, actor = target.partition(":")
        if kind == "actor" and state.phase in ("open", "half_open"):
            actors[actor] = ActorOrder(pause=state.phase == "open", probe=state.phase == "half_open")
    for actor, count in states.orders.items():
        actors[actor] = dataclasses.replace(actors.get(actor, ActorOrder()), replace=count)
    scaled = states.autoscale
    some_left = scaled.highest > scaled.target
    leaving = config.orchestrator.fleet.names(scaled.highest)[scaled.target :] if some_left else []
    by_hand = [name.removeprefix("drain.") for name, value in operator.items() if name.startswith("drain.") and value]
    for actor in (*leaving, *by_hand):
        actors[actor] = dataclasses.replace(actors.get(actor, ActorOrder()), drain=True)
    rollback = judged.rollback
    keep = judged.good_update
    return Directives(
        token_updates=tuned.token_updates,
        fresh=tuned.fresh,
        learning_rate_scale=max(number(operator, "learning_rate_scale", 1.0), 0.0),
        expire_before=states.expire_before,
        keep_update=keep,
        rollback=RollbackOrder(rollback.number, rollback.line, rollback.update) if rollback else None,
        actors=actors,
        fleet_size=scaled.size,
        learner_copies=scaled.copies if scaled.copies != config.mesh.data else None,
    )


def number(values: Mapping[str, Any], name: str, default: float = 0.0) -> float:
    """A finite number by name; the default for anything else."""
    return finite(values.get(name, default), default)


def finite(value: Any, default: float = 0.0) -> float:
    """A finite number; the default for anything else."""
    return float(value) if type(value) in _NUMBERS and -_MOST <= value <= _MOST else default


_NUMBERS = (float, int)  # exactly: True is none
_MOST = sys.float_info.max
_UPDATES = re.compile(r"[0-9]{1,9}")
