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
import types
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

from asyncrl_jax.config_orchestrator import BreakerConfig
from asyncrl_jax.types import Decision

SLOW_SHARE = 0.1  # factor on the weight of what is slow
PROBE_SHARE = 0.05  # factor on the weight of what is half open
_SLOW_LOOKS = 3  # in a row, before a target counts as slow: one slow group is noise
_SLOW_MEMORY = 0.05  # weight of one window's mean in the usual time
_HOUR_S = 3600.0
_ACTOR = "actor:"
NO_PROGRESS = "no_progress"
_NO_FAULTS: Mapping[str, float] = types.MappingProxyType({})


class Tally(NamedTuple):
    """What happened to one target in one window. A tuple, as `Breaker`: one of each is made per actor and look."""

    successes: float = 0.0
    seconds: float = 0.0  # those successes took, summed
    infrastructure: Mapping[str, float] = _NO_FAULTS  # by signature
    data: Mapping[str, float] = _NO_FAULTS  # by signature

    def plus(self, other: Tally) -> Tally:
        return Tally(
            self.successes + other.successes,
            self.seconds + other.seconds,
            _added(self.infrastructure, other.infrastructure),
            _added(self.data, other.data),
        )

    @classmethod
    def total(cls, records: Sequence[Mapping[str, Any]]) -> Tally:
        """The sum of records of these fields, each of which may be absent.

        Raises:
          TypeError, ValueError, AttributeError: if a record is none, or the sum is not finite.
        """
        if len(records) == 1:
            total = cls(**records[0])
        else:
            given = set[str]().union(*records)
            if not _TALLY_FIELDS.issuperset(given):
                raise ValueError(f"unknown fields among {sorted(map(str, given))}")
            total = cls(
                sum([record.get("successes", 0.0) for record in records]),
                sum([record.get("seconds", 0.0) for record in records]),
                _summed([record.get("infrastructure", _NO_FAULTS) for record in records]),
                _summed([record.get("data", _NO_FAULTS) for record in records]),
            )
        successes, seconds, infrastructure, data = total
        if not (isinstance(infrastructure, _MAPPINGS) and isinstance(data, _MAPPINGS)):
            raise TypeError(f"faults that are none in {total}")
        faults = sum(infrastructure.values()) + sum(data.values()) if infrastructure or data else 0.0
        if not math.isfinite(successes + seconds + faults):
            raise ValueError(f"{total} is not finite")
        return total


_TALLY_FIELDS = frozenset(Tally._fields)
_MAPPINGS = (dict, types.MappingProxyType)  # of JSON, and the default: asking for any Mapping takes five times as long
_NOTHING = Tally()


class Breaker(NamedTuple):
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


_WELL = Breaker()


@dataclasses.dataclass(frozen=True)
class State:
    """Breakers, what each actor has done, and the latest time seen.

    Most targets are well, and there may be one for each of ten thousand actors, so two numbers are all that is kept of
    them. A breaker is there for what has a fault in its windows, is not closed, slows down, or was replaced of late.
    """

    breakers: Mapping[str, Breaker] = dataclasses.field(default_factory=dict)
    usual_s: Mapping[str, float] = dataclasses.field(default_factory=dict)  # as in Breaker, of targets that are well
    successes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of those, in the window under way
    before: Mapping[str, float] = dataclasses.field(default_factory=dict)  # and in the one before it
    window_from: float = -math.inf
    tokens: Mapping[str, float] = dataclasses.field(default_factory=dict)  # sampled at the last look, by actor
    still_since: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by actor that did not advance at it
    now: float = -math.inf

    def phase(self, target: str) -> str:
        """As in Breaker."""
        return self.breakers[target].phase if target in self.breakers else "closed"


class Actor(NamedTuple):
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
    targets = _Targets(state, now, config)
    targets.forget_actors(observed.actors.keys())
    targets.count(observed.tallies, config)
    log: list[Decision] = []
    for target in sorted(targets.breakers.keys() | observed.forced.keys()):
        tally = observed.tallies.get(target, _NOTHING)
        moved, entry = _moved(targets.breaker(target), tally, observed.forced.get(target), now, config)
        targets.put(target, moved)
        if entry is not None:
            log.append(Decision("breaker", moved.phase, target, *entry))
    tokens = {actor: seen.tokens for actor, seen in observed.actors.items()}
    still_since, replace, more = _stalled(state, observed, targets, now, config)
    if not config.enabled:
        return Decided(State(tokens=tokens, still_since=still_since, now=now), {})
    factors = {target: _FACTORS[b.phase] for target, b in targets.breakers.items() if b.phase != "closed"}
    after = State(
        targets.breakers,
        targets.usual_s,
        targets.successes,
        targets.before,
        targets.window_from,
        tokens,
        still_since,
        now,
    )
    return Decided(after, factors, tuple(replace), (*log, *more))


_FACTORS = {"closed": 1.0, "slow": SLOW_SHARE, "open": 0.0, "half_open": PROBE_SHARE}


class _Targets:
    """All targets within one look: the state's own mappings, copied once and then changed in place."""

    def __init__(self, state: State, now: float, config: BreakerConfig):
        self.now = now
        self.begins_window = False
        self.breakers = dict(state.breakers)
        self.usual_s = dict(state.usual_s)
        self.successes, self.before, self.window_from = dict(state.successes), state.before, state.window_from
        if now - self.window_from >= config.window_s:
            recent = now - self.window_from < 2 * config.window_s
            self.before, self.successes, self.window_from = self.successes if recent else {}, {}, now
            self.begins_window = True

    def forget_actors(self, alive: Collection[str]) -> None:
        """Once a window, drops what is known of actors that are gone: fleets grow and shrink, and names are new."""
        if not self.begins_window:
            return
        for target in [t for t in self.usual_s if t.startswith(_ACTOR) and t not in self.before]:
            if target[len(_ACTOR) :] not in alive:
                del self.usual_s[target]
        for target in [t for t, b in self.breakers.items() if t.startswith(_ACTOR) and self.now - b.since > _HOUR_S]:
            if target[len(_ACTOR) :] not in alive:
                del self.breakers[target]

    def count(self, tallies: Mapping[str, Tally], config: BreakerConfig) -> None:
        """Adds a look to the numbers of what is well. What no longer is gets a breaker, as it was before the look."""
        breakers, successes, usual_s = self.breakers, self.successes, self.usual_s
        slow = config.slow_factor
        for target, (num, seconds, infrastructure, data) in tallies.items():
            if target in breakers:
                continue
            usual = usual_s.get(target, 0.0)
            if infrastructure or data or (usual and seconds > slow * usual * num):
                breakers[target] = self.breaker(target)
            elif num >= 1:
                successes[target] = successes.get(target, 0.0) + num
                usual_s[target] = usual + _SLOW_MEMORY * (seconds / num - usual) if usual else seconds / num

    def breaker(self, target: str) -> Breaker:
        """The breaker of a target, also of one that is well."""
        if target in self.breakers:
            return self.breakers[target]
        if target not in self.usual_s and target not in self.successes:
            return Breaker(since=self.now, window_from=self.now)
        seen, before = Tally(self.successes.get(target, 0.0)), Tally(self.before.get(target, 0.0))
        usual_s = self.usual_s.get(target, 0.0)
        return Breaker("closed", self.now, seen, before, self.window_from, usual_s=usual_s)

    def put(self, target: str, breaker: Breaker) -> None:
        """The breaker after a look; its numbers, once the target is well."""
        seen, before = breaker.now, breaker.before
        faults = seen.infrastructure or seen.data or before.infrastructure or before.data
        replaced = any(self.now - at < _HOUR_S for at in breaker.replaced_at)
        if faults or replaced or breaker.slow_looks or breaker.phase != "closed":
            self.breakers[target] = breaker
            return
        self.breakers.pop(target, None)
        self.usual_s[target] = breaker.usual_s
        self.successes[target] = seen.successes


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
        return opened._replace(cooldown_s=config.cooldown_s), (reason, numbers)
    if tally.successes >= 1 and (breaker.slow_looks or breaker.phase == "slow"):
        return _paced(breaker, tally, now)
    return breaker, None


def _counted(breaker: Breaker, tally: Tally, now: float, config: BreakerConfig) -> Breaker:
    """The breaker with this look in its windows and in its usual time."""
    _, since, seen, before, window_from, _, _, _, slow_looks, usual_s, _ = breaker
    if now - window_from >= config.window_s:  # two windows are kept, so a burst at an edge is not cut in two
        before = seen if now - window_from < 2 * config.window_s else _NOTHING
        seen, window_from = _NOTHING, now
    if breaker.phase == "closed" and tally.successes >= 1:
        mean_s = tally.seconds / tally.successes
        if usual_s == 0:
            usual_s = mean_s
        elif mean_s > config.slow_factor * usual_s:
            slow_looks += 1
        else:
            usual_s, slow_looks = usual_s + _SLOW_MEMORY * (mean_s - usual_s), 0
    return Breaker(
        breaker.phase,
        since,
        seen.plus(tally),
        before,
        window_from,
        breaker.cooldown_s,
        breaker.signature,
        breaker.probes,
        slow_looks,
        usual_s,
        breaker.replaced_at,
    )


def _enter(breaker: Breaker, phase: str, now: float, signature: str | None = None) -> Breaker:
    """Another phase, with empty windows: what was counted in the old one says nothing about the new one."""
    return breaker._replace(
        phase=phase,
        since=now,
        now=_NOTHING,
        before=_NOTHING,
        window_from=now,
        probes=0.0,
        slow_looks=0,
        signature=breaker.signature if signature is None else signature,
    )


def _tripped(breaker: Breaker, config: BreakerConfig) -> tuple[str, str, dict[str, float]] | None:
    """(reason, signature, numbers) if the counts of both windows open the breaker."""
    before, now = breaker.before, breaker.now
    if not (before.infrastructure or before.data or now.infrastructure or now.data):
        return None
    seen = before.plus(now)
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
        opened = _enter(breaker, "open", now, signature=signature)._replace(cooldown_s=again)
        return opened, (f"a probe failed: {signature}", {"next_probe_s": again})
    probes = breaker.probes + tally.successes
    if probes < config.probes:
        return breaker._replace(probes=probes), None
    closed = _enter(breaker, "closed", now, signature="")._replace(cooldown_s=0.0)
    return closed, ("cured: probes succeeded", {"probes": probes})


def _paced(breaker: Breaker, tally: Tally, now: float) -> tuple[Breaker, tuple[str, dict[str, float]] | None]:
    """Slow, or back to its usual time."""
    mean_s = tally.seconds / tally.successes
    numbers = {"episode_s": mean_s, "usual_s": breaker.usual_s}
    if breaker.phase == "slow" and mean_s <= 2 * breaker.usual_s:
        return _enter(breaker, "closed", now, signature=""), ("back to its usual time", numbers)
    if breaker.phase == "closed" and breaker.slow_looks >= _SLOW_LOOKS:
        return _enter(breaker, "slow", now, signature="slow"), ("much slower than usual", numbers)
    return breaker, None


def _stalled(
    state: State, observed: Observed, targets: _Targets, now: float, config: BreakerConfig
) -> tuple[dict[str, float], list[str], list[Decision]]:
    """(since when an actor stands still, actors to replace, what is new). Opens the breaker of one that is dead."""
    before, replace, log = state.tokens, [], list[Decision]()
    still_since = {
        actor: state.still_since.get(actor, state.now)
        for actor, (tokens, working) in observed.actors.items()
        if working and before.get(actor) == tokens
    }
    if not config.enabled:
        return still_since, [], []
    dead = sorted(actor for actor, since in still_since.items() if now - since >= config.stall_s)
    in_service = sum(targets.breakers.get(f"actor:{a}", _WELL).phase != "open" for a in observed.actors if dead)
    for actor in dead:
        target = f"actor:{actor}"
        breaker = targets.breaker(target)
        recent = tuple(at for at in breaker.replaced_at if now - at < _HOUR_S)
        still_s = now - still_since[actor]
        numbers = {"still_s": still_s, "replaced_before": float(len(recent)), "in_service": float(in_service)}
        was_in_service, kept = breaker.phase != "open", observed.forced.get(target) == "closed"
        if len(recent) >= config.max_replacements:
            if was_in_service and not kept and in_service > config.min_healthy_actors:
                targets.breakers[target] = _out(breaker, recent, now, config)
                in_service -= 1
                why = "still again after every replacement: left out"
                log.append(Decision("breaker", "open", target, why, numbers))
            continue
        if kept:  # in service, whatever it does: a human says so
            targets.breakers[target] = breaker._replace(replaced_at=(*recent, now))
        else:
            targets.breakers[target] = _out(breaker, (*recent, now), now, config)
            in_service -= was_in_service
        del still_since[actor]  # the next one is judged afresh
        replace.append(actor)
        log.append(
            Decision("breaker", "replace", target, f"alive, with work, and no token for {still_s:.0f} s", numbers)
        )
    return still_since, replace, log


def _out(breaker: Breaker, replaced_at: tuple[float, ...], now: float, config: BreakerConfig) -> Breaker:
    opened = _enter(breaker, "open", now, signature=NO_PROGRESS)
    return opened._replace(cooldown_s=config.cooldown_s, replaced_at=replaced_at)


def bucket_factors(factors: Mapping[str, float], buckets: Sequence[str]) -> dict[str, float]:
    """Factor on the weight of each bucket `<environment>/<level>`: the least of what its episodes depend on.

    Tools and rewards name the environment that they belong to, as `tool:<environment>/<tool>`.
    """
    of_environment: dict[str, float] = {}
    for target, factor in factors.items():
        kind, _, name = target.partition(":")
        if kind != "actor":
            environment = name.rpartition("/")[0] if kind == "tool" else name  # it may be a path
            of_environment[environment] = min(of_environment.get(environment, 1.0), factor)
    return {name: of_environment.get(name.rpartition("/")[0], 1.0) for name in buckets}


def _added(one: Mapping[str, float], other: Mapping[str, float]) -> Mapping[str, float]:
    return _summed((one, other)) if other else one


def _summed(faults: Sequence[Mapping[str, float]]) -> dict[str, float]:
    sums: dict[str, float] = {}
    for one in faults:
        for name, count in one.items():
            sums[name] = sums.get(name, 0.0) + count
    return sums
