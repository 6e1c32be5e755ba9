"""Circuit breakers: what keeps failing is taken out, probed, and put back when it is cured.

A target is `environment:<name>`, `tool:<name>`, `reward:<name>` or `actor:<id>`.

Rule. Closed, a breaker counts faults and successes over a window. It opens when infrastructure faults of one
signature reach `same_signature` (and a twentieth of the successes) or their share `fault_rate`; faults of the data (a
bad task, a reward that is no reward) are counted apart and open it only at `data_fault_rate`, since another try would
fail the same way. Open, nothing is sent. After the cool-down it is half open: a few probes are let through; all must
succeed to close it, and one fault opens it again for twice as long. A target whose episodes take `slow_factor` times
its own usual time is slow: it keeps a small share until it is back to twice the usual. An actor that has work and
makes no token for `stall_s` is dead, whatever its heartbeat says: it is replaced, at most `max_replacements` times in
an hour. Then it is left out, unless fewer than `min_healthy_actors` would stay in service.

Source: M. Nygard, "Release It!", 2007 (circuit breaker); retry budgets as in Google's SRE book, chapter 22.
Failure mode: if everything shares one cause (the network), every breaker opens at once; probes go on, so all close
again when it is gone. A target that fails less often than the rate is tolerated for ever; its faults stand in the
metrics.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence

from asyncrl_jax.config_orchestrator import BreakerConfig
from asyncrl_jax.types import Decision

SLOW_SHARE = 0.1  # factor on the weight of what is slow
PROBE_SHARE = 0.05  # factor on the weight of what is half open
_SLOW_LOOKS = 3  # in a row, before a target counts as slow: one slow group is noise
_SLOW_MEMORY = 0.05  # weight of one window's mean in the usual time
_HOUR_S = 3600.0
NO_PROGRESS = "no_progress"


@dataclasses.dataclass(frozen=True)
class Tally:
    """What happened to one target in one window."""

    successes: float = 0.0
    seconds: float = 0.0  # those successes took, summed
    infrastructure: Mapping[str, float] = dataclasses.field(default_factory=dict)  # faults by signature
    data: Mapping[str, float] = dataclasses.field(default_factory=dict)  # faults by signature

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.successes + other.successes,
            self.seconds + other.seconds,
            _added(self.infrastructure, other.infrastructure),
            _added(self.data, other.data),
        )


@dataclasses.dataclass(frozen=True)
class Breaker:
    """One target."""

    phase: str = "closed"  # closed, slow, open, half_open
    since: float = 0.0  # when the phase began
    now: Tally = Tally()  # the window under way
    before: Tally = Tally()  # the one before it
    window_from: float = -math.inf
    cooldown_s: float = 0.0
    signature: str = ""  # that opened it
    probes: float = 0.0  # successes while half open
    slow_looks: int = 0  # in a row, at which its episodes took much longer than usual
    usual_s: float = 0.0  # an episode's usual time; 0 if not known yet
    replaced_at: tuple[float, ...] = ()  # of an actor, within the last hour


@dataclasses.dataclass(frozen=True)
class Progress:
    """What an actor had done when it was last seen to advance."""

    tokens: float
    at: float


@dataclasses.dataclass(frozen=True)
class State:
    """Breakers by target, progress by actor, and the latest time seen."""

    breakers: Mapping[str, Breaker] = dataclasses.field(default_factory=dict)
    progress: Mapping[str, Progress] = dataclasses.field(default_factory=dict)
    now: float = -math.inf


@dataclasses.dataclass(frozen=True)
class Actor:
    """An actor as its heartbeat shows it."""

    tokens: float  # sampled since it started
    working: bool  # it has episodes to sample and is not paused


@dataclasses.dataclass(frozen=True)
class Observed:
    """What happened since the last look."""

    now: float  # seconds
    tallies: Mapping[str, Tally] = dataclasses.field(default_factory=dict)  # by target
    actors: Mapping[str, Actor] = dataclasses.field(default_factory=dict)  # alive, by id
    forced: Mapping[str, str] = dataclasses.field(default_factory=dict)  # "open" or "closed" by hand, by target


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state, the factor on the weight of each target, and actors to replace."""

    state: State
    factors: Mapping[str, float]  # by target; 1 where absent
    replace: tuple[str, ...] = ()  # actor ids
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: BreakerConfig) -> Decided:
    """What is in service. Cost: linear in targets and actors."""
    now = max(observed.now, state.now)
    breakers = dict(state.breakers)
    log: list[Decision] = []
    for target in sorted(breakers.keys() | observed.tallies.keys() | observed.forced.keys()):
        breaker = breakers.get(target, Breaker(since=now, window_from=now))
        tally = observed.tallies.get(target, Tally())
        moved, entry = _moved(breaker, tally, observed.forced.get(target), now, config)
        breakers[target] = moved
        if entry is not None:
            log.append(Decision("breaker", moved.phase, target, *entry))
    progress, replace, more = _stalled(state, observed, breakers, now, config)
    if not config.enabled:
        return Decided(State({}, progress, now), {})
    factors = {target: factor for target, b in breakers.items() if (factor := _factor(b.phase)) < 1}
    return Decided(State(breakers, progress, now), factors, tuple(replace), (*log, *more))


def _factor(phase: str) -> float:
    return {"closed": 1.0, "slow": SLOW_SHARE, "open": 0.0, "half_open": PROBE_SHARE}[phase]


def _moved(
    breaker: Breaker, tally: Tally, forced: str | None, now: float, config: BreakerConfig
) -> tuple[Breaker, tuple[str, dict[str, float]] | None]:
    """(the breaker after this look, (reason, numbers) if its phase changed)."""
    breaker = _counted(breaker, tally, now, config)
    if forced is not None:
        if breaker.phase == forced:
            return breaker, None
        return _enter(breaker, forced, now, signature="by_hand"), ("by hand", {})
    if breaker.phase == "open":
        if breaker.signature == "by_hand":
            return _enter(breaker, "half_open", now), ("released: probes are let through", {})
        if now - breaker.since < breaker.cooldown_s:
            return breaker, None
        return _enter(breaker, "half_open", now), (
            "cooled down: probes are let through",
            {"open_s": now - breaker.since},
        )
    if breaker.phase == "half_open":
        return _probed(breaker, tally, now, config)
    if found := _tripped(breaker, config):
        reason, signature, numbers = found
        opened = _enter(breaker, "open", now, signature=signature)
        return dataclasses.replace(opened, cooldown_s=config.cooldown_s), (reason, numbers)
    return _timed(breaker, tally, now, config)


def _counted(breaker: Breaker, tally: Tally, now: float, config: BreakerConfig) -> Breaker:
    if now - breaker.window_from >= config.window_s:  # two windows are kept, so a burst at an edge is not cut in two
        old = breaker.now if now - breaker.window_from < 2 * config.window_s else Tally()
        breaker = dataclasses.replace(breaker, before=old, now=Tally(), window_from=now)
    return dataclasses.replace(breaker, now=breaker.now.plus(tally))


def _enter(breaker: Breaker, phase: str, now: float, signature: str | None = None) -> Breaker:
    """Another phase, with empty windows: what was counted in the old one says nothing about the new one."""
    return dataclasses.replace(
        breaker,
        phase=phase,
        since=now,
        now=Tally(),
        before=Tally(),
        window_from=now,
        probes=0.0,
        slow_looks=0,
        signature=breaker.signature if signature is None else signature,
    )


def _tripped(breaker: Breaker, config: BreakerConfig) -> tuple[str, str, dict[str, float]] | None:
    """(reason, signature, numbers) if the counts of both windows open the breaker."""
    seen = breaker.before.plus(breaker.now)
    infrastructure, data = sum(seen.infrastructure.values()), sum(seen.data.values())
    events = seen.successes + infrastructure + data
    numbers = {"successes": seen.successes, "infrastructure_faults": infrastructure, "data_faults": data}
    if seen.infrastructure:
        signature, count = max(seen.infrastructure.items(), key=lambda item: (item[1], item[0]))
        if count >= config.same_signature and count > seen.successes * 0.05:
            return f"{count:g} faults of one kind: {signature}", signature, numbers
        if events >= config.min_events and infrastructure / events >= config.fault_rate:
            return f"{infrastructure / events:.0%} faults, most of them {signature}", signature, numbers
    if seen.data and events >= config.min_events and data / events >= config.data_fault_rate:
        signature = max(seen.data, key=lambda name: seen.data[name])
        return f"{data / events:.0%} faults of the data, most of them {signature}", signature, numbers
    return None


def _probed(
    breaker: Breaker, tally: Tally, now: float, config: BreakerConfig
) -> tuple[Breaker, tuple[str, dict[str, float]] | None]:
    faults = {**tally.infrastructure, **tally.data}
    if faults:
        again = min(2 * max(breaker.cooldown_s, config.cooldown_s), config.max_cooldown_s)
        signature = max(faults, key=lambda name: faults[name])
        opened = dataclasses.replace(_enter(breaker, "open", now, signature=signature), cooldown_s=again)
        return opened, (f"a probe failed: {signature}", {"next_probe_s": again})
    probes = breaker.probes + tally.successes
    if probes < config.probes:
        return dataclasses.replace(breaker, probes=probes), None
    closed = dataclasses.replace(_enter(breaker, "closed", now, signature=""), cooldown_s=0.0)
    return closed, ("cured: probes succeeded", {"probes": probes})


def _timed(
    breaker: Breaker, tally: Tally, now: float, config: BreakerConfig
) -> tuple[Breaker, tuple[str, dict[str, float]] | None]:
    """Slow, or back to its usual time."""
    if tally.successes < 1:
        return breaker, None
    mean_s = tally.seconds / tally.successes
    if breaker.usual_s == 0:
        return dataclasses.replace(breaker, usual_s=mean_s), None
    numbers = {"episode_s": mean_s, "usual_s": breaker.usual_s}
    if breaker.phase == "slow":
        if mean_s > 2 * breaker.usual_s:
            return breaker, None
        return _enter(breaker, "closed", now, signature=""), ("back to its usual time", numbers)
    if mean_s > config.slow_factor * breaker.usual_s:
        breaker = dataclasses.replace(breaker, slow_looks=breaker.slow_looks + 1)
        if breaker.slow_looks < _SLOW_LOOKS:
            return breaker, None
        return _enter(breaker, "slow", now, signature="slow"), ("much slower than usual", numbers)
    usual_s = breaker.usual_s + _SLOW_MEMORY * (mean_s - breaker.usual_s)
    return dataclasses.replace(breaker, usual_s=usual_s, slow_looks=0), None


def _stalled(
    state: State, observed: Observed, breakers: dict[str, Breaker], now: float, config: BreakerConfig
) -> tuple[dict[str, Progress], list[str], list[Decision]]:
    """(progress by actor, actors to replace, what is new). Opens the breaker of an actor that stands still."""
    progress: dict[str, Progress] = {}
    replace: list[str] = []
    log: list[Decision] = []
    in_service = sum(
        _factor(breakers[t].phase) > 0 if (t := f"actor:{a}") in breakers else True for a in observed.actors
    )
    for actor, seen in sorted(observed.actors.items()):
        last = state.progress.get(actor)
        if last is None or seen.tokens != last.tokens or not seen.working:
            progress[actor] = Progress(seen.tokens, now)
            continue
        progress[actor] = last
        if now - last.at < config.stall_s or not config.enabled:
            continue
        target = f"actor:{actor}"
        breaker = breakers.get(target, Breaker(since=now, window_from=now))
        recent = tuple(at for at in breaker.replaced_at if now - at < _HOUR_S)
        numbers = {"still_s": now - last.at, "replaced_before": float(len(recent)), "in_service": float(in_service)}
        was_in_service = _factor(breaker.phase) > 0
        if len(recent) >= config.max_replacements:
            if breaker.phase != "open" and in_service > config.min_healthy_actors:
                breakers[target] = _out(breaker, recent, now, config)
                in_service -= was_in_service
                log.append(
                    Decision("breaker", "open", target, "still again after every replacement: left out", numbers)
                )
            continue
        breakers[target] = _out(breaker, (*recent, now), now, config)
        in_service -= was_in_service
        progress[actor] = Progress(seen.tokens, now)  # the next one is judged afresh
        replace.append(actor)
        log.append(
            Decision("breaker", "replace", target, f"alive, with work, and no token for {now - last.at:.0f} s", numbers)
        )
    return progress, replace, log


def _out(breaker: Breaker, replaced_at: tuple[float, ...], now: float, config: BreakerConfig) -> Breaker:
    opened = _enter(breaker, "open", now, signature=NO_PROGRESS)
    return dataclasses.replace(opened, cooldown_s=config.cooldown_s, replaced_at=replaced_at)


def bucket_factors(factors: Mapping[str, float], buckets: Sequence[str]) -> dict[str, float]:
    """Factor on the weight of each bucket `<environment>/<level>`: the least of what its episodes depend on.

    Tools and rewards name the environment that they belong to, as `tool:<environment>/<tool>`.
    """
    of_environment: dict[str, float] = {}
    for target, factor in factors.items():
        kind, _, name = target.partition(":")
        if kind != "actor":
            environment = name.partition("/")[0]
            of_environment[environment] = min(of_environment.get(environment, 1.0), factor)
    return {name: of_environment.get(name.rpartition("/")[0], 1.0) for name in buckets}


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> dict[str, float]:
    return {name: one.get(name, 0.0) + other.get(name, 0.0) for name in one.keys() | other.keys()}
