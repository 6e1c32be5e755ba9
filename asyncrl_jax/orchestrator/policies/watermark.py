"""How hard to push, from what waits for the learner; and how fast one environment may be asked.

Rule. The backlog is the groups that wait for the learner, in updates' worth. Above the high mark, not falling, and
with a busy learner, less is put in flight (factor 1/2); below the low mark, not rising and with a learner that idles,
more (factor 2). Less ends in the middle between the marks; more ends there too, and at the latest where one update's
worth above the low mark waits: the learner has its next update then, and whatever else is put in flight only ages.
No two changes are closer than the dwell time: hysteresis in level and in time, so noise around a mark changes nothing.
The high mark is a share of what the bound on lag lets be outstanding: where much may be under way, and episodes are
uneven, much comes and goes at once, and a mark that it passes each time would starve the learner in between. Less in
flight also ends once the learner idles after all, as when it waits for stragglers: then what waits for it is no sign
that it has too much. The factor scales what admission aims at and never its bound. Apart from that, each environment
has a token bucket: an outside service's quota in episodes a second is never exceeded by more than the burst.

Source: high and low watermarks as in Reactive Streams and Kafka's quota; token bucket, RFC 2697.
Failure mode: a learner that idles for another reason (a checkpoint, a compile) looks starved; the price is more
groups in flight, and so more lag, up to the bound.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from asyncrl_jax.config_orchestrator import WatermarkConfig
from asyncrl_jax.types import Decision

FACTORS = {"slow": 0.5, "normal": 1.0, "fast": 2.0}
_RATE_WEIGHT = 0.3  # of the newest observation in the smoothed rate


@dataclasses.dataclass(frozen=True)
class State:
    """What the next look needs of this one."""

    level: str = "normal"  # a key of FACTORS
    changed_at: float = -math.inf  # when the level last changed
    backlog: float = 0.0  # updates' worth, at the last look
    rate: float = 0.0  # of the backlog, in updates' worth a second, smoothed
    seen_at: float | None = None  # of the last look


@dataclasses.dataclass(frozen=True)
class Observed:
    """What waits, and whether the learner does."""

    now: float  # seconds
    backlog_groups: int  # groups queued or pooled, waiting for the learner
    groups_per_update: int
    bound_updates: int  # updates' worth that the bound on lag lets be outstanding, N - A + 1
    idle_share: float  # of the learner's time since the last look


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state, the factor on what admission aims at, and what is worth a line in the log."""

    state: State
    factor: float
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: WatermarkConfig) -> Decided:
    """The level to work at."""
    if not config.enabled:
        return Decided(State(), 1.0)
    backlog = observed.backlog_groups / observed.groups_per_update
    elapsed = 0.0 if state.seen_at is None else max(observed.now - state.seen_at, 0.0)
    rate = state.rate
    if elapsed > 0:
        rate += _RATE_WEIGHT * ((backlog - state.backlog) / elapsed - rate)
    seen_at = observed.now if state.seen_at is None else max(observed.now, state.seen_at)
    level = _level(state.level, backlog, rate, observed, config)
    if level != state.level and seen_at - state.changed_at < config.dwell_s:
        level = state.level
    if level == state.level:
        return Decided(dataclasses.replace(state, backlog=backlog, rate=rate, seen_at=seen_at), FACTORS[level])
    entry = Decision(
        "watermark",
        level,
        "admission",
        f"from {state.level}: {backlog:.2f} updates' worth wait for the learner",
        {"backlog_updates": backlog, "rate_per_s": rate, "idle_share": observed.idle_share},
    )
    return Decided(State(level, seen_at, backlog, rate, seen_at), FACTORS[level], (entry,))


def _level(level: str, backlog: float, rate: float, observed: Observed, config: WatermarkConfig) -> str:
    high, idle_share = config.high_mark(observed.bound_updates), observed.idle_share
    middle = (high + config.low_updates) / 2
    if backlog >= high and rate >= 0 and idle_share < config.idle_share:
        return "slow"
    if backlog <= config.low_updates and rate <= 0 and idle_share >= config.idle_share:
        return "fast"
    if level == "slow" and backlog > middle and idle_share < 2 * config.idle_share:
        return "slow"
    if level == "fast" and backlog < min(middle, config.low_updates + 1) and idle_share >= config.idle_share / 2:
        return "fast"
    return "normal"


@dataclasses.dataclass(frozen=True)
class Quota:
    """One environment's token bucket. A new one is full."""

    episodes: float | None = None  # that may be started now; None before the first look
    seen_at: float = 0.0


def refill(
    quotas: Mapping[str, Quota], environments: tuple[str, ...], now: float, config: WatermarkConfig
) -> dict[str, Quota]:
    """The buckets as of `now`; empty without a limit. A clock that jumps forward fills a bucket, no more."""
    rate = config.dispatch_episodes_per_s
    if rate == 0:
        return {}
    most = rate * config.dispatch_burst_s
    filled = {}
    for name in environments:
        quota = quotas.get(name, Quota())
        if quota.episodes is None:
            filled[name] = Quota(most, now)
            continue
        elapsed = max(now - quota.seen_at, 0.0)
        filled[name] = Quota(min(quota.episodes + elapsed * rate, most), max(now, quota.seen_at))
    return filled


def allowed(quotas: Mapping[str, Quota], environment: str, group_size: int) -> int | None:
    """Groups that may be issued for an environment now; None without a limit."""
    quota = quotas.get(environment)
    return None if quota is None or quota.episodes is None else math.floor(max(quota.episodes, 0.0) / group_size)


def spend(quotas: Mapping[str, Quota], environment: str, episodes: int) -> dict[str, Quota]:
    """The buckets after `episodes` were started."""
    quota = quotas.get(environment)
    if quota is None or quota.episodes is None:
        return dict(quotas)
    return {**quotas, environment: Quota(quota.episodes - episodes, quota.seen_at)}
