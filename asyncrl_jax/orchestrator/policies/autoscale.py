"""How many actors there are: enough that the learner, the expensive part, never waits for them, and no more.

Members of the fleet have an order: the least of each class, then classes as configured up to their most, and within a
class by number. The first `size` exist; those from `target` on drain. So growing appends, shrinking takes from the end,
and one number says who is there. What a member can do is taken to go with the slots of its class.

Rule. All of it is averaged over `window_s`, and judged only once that has passed since the last change.

* Add, if the learner is short of groups (`starved_high`; its wait for stragglers is not counted, no actor mends that)
  *and* the slots that exist are in use (`busy_high`; else the lag bound or a quota is what limits) *and* what is
  trained on is not stale already (`stale_share` of N; more would only make it older) *and* the watermark does not say
  "slow" *and* all actors asked for before are there (else the cluster has no more).
* Take away, if the learner is fed (`starved_low`) *and* the watermark does not say "fast" *and* fewer would do; or if
  it is fed, the watermark says "slow" and what is trained on is stale: then one at a time.
* How many: as many as have the slots in use ÷ `busy_target`, times what the learner could take ÷ what it gets,
  1 ÷ (1 − starved share), as in target tracking; at most a factor `step` at once, nothing within `tolerance`, never
  past the limits or the budget.
* If actors have to be added again after some were taken away, the cool-down of the latter doubles, up to 16 times; it
  halves again when a second step down follows a first.
* Who is taken away drains: it claims nothing more, and is removed once it has nothing left or after `drain_limit_s`.
  If more are wanted again meanwhile, it stays; until then no others are taken away.
* Once the learner has been fed, with actors to spare, for `learner_patience_s`, it is the bottleneck: if the budget has
  room for the next size of its mesh and for the actors to feed it, that is asked for.

Source: target tracking as in Kubernetes' horizontal pod autoscaler; the conditions from what each number alone gets
wrong (starved while episodes wait for weights; busy slots whose work comes too late; a backlog made by a checkpoint).
Failure mode: load that swings faster than the cool-downs is followed late, and the price is a starved learner on the
way up and idle actors on the way down. A learner that is slow for a reason of its own looks like a bottleneck.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Mapping

from asyncrl_jax.config_fleet import AutoscaleConfig, FleetConfig
from asyncrl_jax.types import Decision

_MOST_PATIENCE = 16.0


@dataclasses.dataclass(frozen=True)
class State:
    """What the next look needs of this one."""

    size: int  # members that exist
    target: int  # that are to stay
    copies: int  # of the weights in the learner's mesh, as asked for
    highest: int = 0  # largest size so far: who was there and is not to come back goes on being told to drain
    changed_at: float = -math.inf  # when size or target last changed
    draining_since: float = 0.0
    shrank: bool = False  # the last change took actors away
    patience: float = 1.0  # factor on the cool-down before any are taken away
    spare_since: float | None = None  # since when the learner has been the bottleneck
    judged_from: float | None = None  # begin of what the averages hold
    seen_at: float = -math.inf
    starved: float = 0.0  # averages; as in Observed
    busy: float = 0.0
    stale: float = 0.0


@dataclasses.dataclass(frozen=True)
class Observed:
    """The run as it is now."""

    now: float  # seconds
    starved: float  # share of its time the learner is short of groups, stragglers apart
    busy: float  # share of the slots of members in service that hold an episode
    stale: float  # mean lag of what is trained on ÷ N
    level: str  # of `watermark`
    alive: frozenset[int]  # members that show signs of life, by place in the order
    drained: frozenset[int] = frozenset()  # of those, that have nothing left
    training: bool = True  # the learner makes updates: nothing is judged while it starts or ends
    pinned: int | None = None  # target set by hand
    slots: Mapping[str, int] = dataclasses.field(default_factory=dict)  # of a member, by class; 1 where it is not said


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state and what is worth a line in the log."""

    state: State
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: AutoscaleConfig, fleet: FleetConfig) -> Decided:
    """The fleet to have. Off, it changes by hand only, but drains all the same."""
    now = max(observed.now, state.seen_at)
    if state.seen_at == -math.inf:  # the start counts as a change
        state = dataclasses.replace(state, changed_at=now)
    state = _averaged(state, observed, now, config)
    most = most_members(config, fleet, state.copies)
    log: list[Decision] = []
    state, removed = _removed(state, observed, now, config)
    log += removed
    wanted, why = _wanted(state, observed, now, most, config, fleet)
    if wanted != state.target:
        before, state = state, _changed(state, wanted, now)
        numbers = _numbers(before, state, config, fleet)
        action = "grow" if wanted > before.target else "drain"
        log.append(Decision("autoscale", action, "actors", f"from {before.target} to {wanted}: {why}", numbers))
    elif config.enabled and (copies := _larger_mesh(state, observed, now, config, fleet)) is not None:
        why = f"it is the bottleneck: mesh.data from {state.copies} to {copies}"
        numbers = _numbers(state, state, config, fleet)
        log.append(Decision("autoscale", "grow_learner", "learner", why, numbers))
        state = dataclasses.replace(_forgotten(state), copies=copies, changed_at=now, spare_since=None)
    return Decided(state, tuple(log))


def most_members(config: AutoscaleConfig, fleet: FleetConfig, copies: int) -> int:
    """Most members that limit, classes and budget allow beside a learner of so many copies."""
    most = min(config.max_actors, fleet.most_members) if config.enabled else fleet.most_members
    if config.hourly_budget == 0:
        return most
    return min(most, fleet.affordable(config.hourly_budget - config.learner_price * copies))


def _averaged(state: State, observed: Observed, now: float, config: AutoscaleConfig) -> State:
    if not observed.training:
        return dataclasses.replace(_forgotten(state), seen_at=now, spare_since=None)
    if state.judged_from is None:
        starved, busy, stale, since = observed.starved, observed.busy, observed.stale, now
    else:
        weight = 1 - math.exp(-(now - state.seen_at) / config.window_s)
        starved = state.starved + weight * (observed.starved - state.starved)
        busy = state.busy + weight * (observed.busy - state.busy)
        stale = state.stale + weight * (observed.stale - state.stale)
        since = state.judged_from
    spare = starved <= config.starved_low and busy < config.busy_high and observed.level != "fast"
    spare_since = (now if state.spare_since is None else state.spare_since) if spare else None
    return dataclasses.replace(
        state, judged_from=since, seen_at=now, starved=starved, busy=busy, stale=stale, spare_since=spare_since
    )


def _forgotten(state: State) -> State:
    """Without averages: what was seen before a change says little about what is after it."""
    return dataclasses.replace(state, judged_from=None)


def _removed(
    state: State, observed: Observed, now: float, config: AutoscaleConfig
) -> tuple[State, tuple[Decision, ...]]:
    """Takes away, from the end, what drained and has nothing left, is dead, or had its time."""
    size, late = state.size, now - state.draining_since >= config.drain_limit_s
    while size > state.target and (late or _has_nothing(size - 1, observed.alive, observed.drained)):
        size -= 1
    if size == state.size:
        return state, ()
    why = "after their time to drain" if late else "drained"
    entry = Decision("autoscale", "remove", "actors", f"from {state.size} to {size}: {why}", {"size": float(size)})
    return dataclasses.replace(state, size=size), (entry,)


def _has_nothing(place: int, alive: Collection[int], drained: Collection[int]) -> bool:
    return place not in alive or place in drained


def _wanted(
    state: State, observed: Observed, now: float, most: int, config: AutoscaleConfig, fleet: FleetConfig
) -> tuple[int, str]:
    """(members that are to stay, why)."""
    least = max(fleet.least_members, 1)
    if observed.pinned is not None:
        return max(min(observed.pinned, most), least), "by hand"
    if not config.enabled:
        return state.target, ""
    if state.target > most:
        return max(most, least), "limit or budget"
    if state.target < config.min_actors <= most:
        return config.min_actors, "the least"
    if state.judged_from is None or now - state.judged_from < config.window_s:
        return state.target, ""
    since_s = now - state.changed_at
    needed = _with_slots(state, observed, fleet, state.busy / config.busy_target / (1 - min(state.starved, 0.9)))
    if since_s >= config.grow_cooldown_s and _may_grow(state, observed, config):
        wanted = min(needed, math.floor(state.target * config.step), most)
        if wanted > state.target * (1 + config.tolerance):
            return wanted, "the learner starves and every slot is in use"
    draining = state.size > state.target
    patience_s = config.shrink_cooldown_s * state.patience
    if draining or since_s < patience_s or state.starved > config.starved_low or observed.level == "fast":
        return state.target, ""
    wanted = max(needed, math.ceil(state.target / config.step), config.min_actors)
    if wanted < state.target * (1 - config.tolerance):
        return wanted, "fewer feed the learner as well"
    if observed.level == "slow" and state.stale >= config.stale_share and state.target > config.min_actors:
        return state.target - 1, "the learner is fed, and what waits for it is stale"
    return state.target, ""


def _with_slots(state: State, observed: Observed, fleet: FleetConfig, factor: float) -> int:
    """Fewest members that have `factor` times the slots of those that are to stay."""
    blocks = [(observed.slots.get(one.name, 1), count) for one, count in fleet.blocks()]
    there, left = 0, state.target
    for slots, count in blocks:
        there += slots * min(left, count)
        left -= min(left, count)
    needed, members = there * factor - 1e-9 * max(there, 1), 0
    for slots, count in blocks:
        more = min(max(math.ceil(needed / slots), 0), count)
        members, needed = members + more, needed - more * slots
    return members + (needed > 0)  # more than there can be


def _may_grow(state: State, observed: Observed, config: AutoscaleConfig) -> bool:
    return (
        state.starved >= config.starved_high
        and state.busy >= config.busy_high
        and state.stale < config.stale_share
        and observed.level != "slow"
        and observed.alive.issuperset(range(state.target))
    )


def _changed(state: State, wanted: int, now: float) -> State:
    shrinks = wanted < state.target
    patience = state.patience
    if state.shrank:  # the change before is judged by this one
        patience = max(patience / 2, 1.0) if shrinks else min(2 * patience, _MOST_PATIENCE)
    size = max(state.size, wanted)
    return dataclasses.replace(
        _forgotten(state),
        size=size,
        highest=max(state.highest, size),
        target=wanted,
        changed_at=now,
        draining_since=now if shrinks else state.draining_since,
        shrank=shrinks,
        patience=patience,
        spare_since=None,
    )


def _larger_mesh(
    state: State, observed: Observed, now: float, config: AutoscaleConfig, fleet: FleetConfig
) -> int | None:
    """The next number of copies, if the learner has long been the bottleneck and all of it can be paid."""
    following = next((copies for copies in config.learner_copies if copies > state.copies), None)
    if following is None or state.spare_since is None or now - state.spare_since < config.learner_patience_s:
        return None
    needed = _with_slots(state, observed, fleet, state.busy / config.busy_target * following / state.copies)
    return following if max(needed, state.size) <= most_members(config, fleet, following) else None


def _numbers(before: State, after: State, config: AutoscaleConfig, fleet: FleetConfig) -> dict[str, float]:
    return {
        "starved_share": before.starved,
        "busy_share": before.busy,
        "stale_share": before.stale,
        "size": float(after.size),
        "hourly_cost": fleet.hourly_cost(after.size) + config.learner_price * after.copies,
    }
