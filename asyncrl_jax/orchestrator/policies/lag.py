"""What the lag bound N should be, from what data of each lag is worth.

Rule. Once a window of updates: the *oldest* tokens trained on (the upper half of the lags seen) are worth their
effective sample size, (Σr)² ÷ (n Σr²) of the ratios r to the sampling policy, and their KL to it.
* Bad (ESS below `ess_low`, KL above `kl_high`, or clipping above `clip_high`): N falls by one at once.
* The learner starves and the data is good (ESS above `ess_good`, KL below half of `kl_high`): N rises by one, after
  two such windows in a row.
* In between nothing moves. A value of N that was bad is not tried again for `patience_windows` windows, and for twice
  as many each time, so around the edge N does not swing for ever: it changes O(log windows) times.
* KL above `runoff_kl` at any lag: the policy has run off. Only fresh data is admitted until it is below `kl_high`
  again.
An N set by hand leaves the last of these in force.
A ticket keeps the deadline that it was issued with, so when N changes no token exceeds the larger of both.

Source: effective sample size of importance sampling, Kish 1965, and Metelli et al. 2018 (arXiv 1809.06098) for its
use as a trust region.
Failure mode: ratios near 1 say that old data is close to the policy, not that it is informative; a learning rate of 0
would raise N to its limit.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from asyncrl_jax.config_orchestrator import TuningConfig
from asyncrl_jax.types import Decision

_STARVED_WINDOWS = 2  # in a row, before N rises
_LONGEST_PATIENCE = 1024  # windows


@dataclasses.dataclass(frozen=True)
class State:
    """What the next window needs of this one."""

    token_updates: int  # N
    judged_update: int | None = None  # at which the last window ended
    starved_windows: int = 0  # in a row
    fresh: bool = False  # only fresh data is admitted
    bad: tuple[int, int, int] | None = None  # (an N that was bad, windows until it may be tried again, its patience)


@dataclasses.dataclass(frozen=True)
class LagStatistics:
    """Tokens of one lag, since the window began."""

    tokens: float
    ess: float  # effective sample size ÷ tokens, in (0, 1]
    kl: float  # of the trained to the sampling policy, in nats a token


@dataclasses.dataclass(frozen=True)
class Observed:
    """What the learner has seen."""

    update: int  # done
    by_lag: Mapping[int, LagStatistics]  # of the newest updates
    clip_fraction: float
    idle_share: float  # of the learner's time since the last window
    pinned: int | None = None  # N set by hand
    fresh: bool | None = None  # "wait for fresh" set by hand; None leaves it to the rule


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state: N and the mode stand in it."""

    state: State
    token_updates: int
    fresh: bool
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: TuningConfig, *, initial: int, least: int) -> Decided:
    """N for the tickets issued from now on.

    Args:
      initial: N of the run's settings, in force while nothing moves it.
      least: smallest N that pool and replay allow; by hand too.
    """
    before, log = state.token_updates, list[Decision]()
    if config.enabled:
        lowest = max(least, config.min_token_updates)
        within = min(max(before, lowest), max(config.max_token_updates, lowest))  # the limits may have been set anew
        judged, entries = _judge(dataclasses.replace(state, token_updates=within), observed, config, lowest)
        if observed.pinned is None:
            return _decided(judged, observed, entries)
        log += [entry for entry in entries if entry.subject != "N"]
        state = judged
    else:
        state = dataclasses.replace(state, fresh=False)  # no rule would ever end it
    value = initial
    if observed.pinned is not None:
        value = min(max(observed.pinned, least), max(config.max_token_updates, initial))
    state = dataclasses.replace(state, token_updates=value, starved_windows=0)
    if value != before:
        log.append(_entry("set", before, value, observed, {}, "by hand"))
    return _decided(state, observed, tuple(log))


def _decided(state: State, observed: Observed, log: tuple[Decision, ...]) -> Decided:
    fresh = state.fresh if observed.fresh is None else observed.fresh
    return Decided(state, state.token_updates, fresh, log)


def _judge(state: State, observed: Observed, config: TuningConfig, least: int) -> tuple[State, tuple[Decision, ...]]:
    if state.judged_update is None or observed.update < state.judged_update:  # the first look, or another line
        return dataclasses.replace(state, judged_update=observed.update, starved_windows=0), ()
    if observed.update - state.judged_update < config.window_updates or not observed.by_lag:
        return state, ()
    state = dataclasses.replace(state, judged_update=observed.update, bad=_waited(state.bad))
    numbers = oldest(observed.by_lag) | {"clip_fraction": observed.clip_fraction, "idle_share": observed.idle_share}
    largest_kl = max(statistics.kl for statistics in observed.by_lag.values())
    if fresh := _fresh_mode(state, largest_kl, observed, config):
        return fresh
    value = state.token_updates
    if numbers["ess"] < config.ess_low or numbers["kl"] > config.kl_high or observed.clip_fraction > config.clip_high:
        patience = config.patience_windows
        if state.bad is not None and state.bad[0] <= value:
            patience = min(2 * state.bad[2], _LONGEST_PATIENCE)
        lowered = max(value - 1, least)
        state = dataclasses.replace(state, token_updates=lowered, starved_windows=0, bad=(value, patience, patience))
        if lowered == value:
            return state, ()
        return state, (_entry("lower", value, lowered, observed, numbers, "the oldest data is bad"),)
    good = numbers["ess"] >= config.ess_good and numbers["kl"] <= config.kl_high / 2
    starved = state.starved_windows + 1 if good and observed.idle_share >= config.idle_high else 0
    barred = state.bad is not None and state.bad[0] <= value + 1 and state.bad[1] > 0
    if starved < _STARVED_WINDOWS or barred or value >= config.max_token_updates:
        return dataclasses.replace(state, starved_windows=min(starved, _STARVED_WINDOWS)), ()
    state = dataclasses.replace(state, token_updates=value + 1, starved_windows=0)
    return state, (_entry("raise", value, value + 1, observed, numbers, "the learner starves and old data is good"),)


def _fresh_mode(
    state: State, largest_kl: float, observed: Observed, config: TuningConfig
) -> tuple[State, tuple[Decision, ...]] | None:
    """Enters or leaves "wait for fresh"; None if neither."""
    numbers = {"update": float(observed.update), "largest_kl": largest_kl}
    if not state.fresh and largest_kl > config.runoff_kl:
        entry = Decision("lag", "wait_for_fresh", "admission", "the policy has run off from what sampled", numbers)
        return dataclasses.replace(state, fresh=True, starved_windows=0), (entry,)
    if state.fresh and largest_kl <= config.kl_high:
        entry = Decision("lag", "resume", "admission", "the policy is close to what samples again", numbers)
        return dataclasses.replace(state, fresh=False, starved_windows=0), (entry,)
    return None


def oldest(by_lag: Mapping[int, LagStatistics]) -> dict[str, float]:
    """ESS and KL of the upper half of the lags, weighted by tokens."""
    lags = [lag for lag, statistics in by_lag.items() if statistics.tokens > 0] or list(by_lag)
    upper = [lag for lag in lags if lag >= (min(lags) + max(lags)) / 2]
    weight = sum(max(by_lag[lag].tokens, 1e-9) for lag in upper)
    return {
        "ess": sum(by_lag[lag].ess * max(by_lag[lag].tokens, 1e-9) for lag in upper) / weight,
        "kl": sum(by_lag[lag].kl * max(by_lag[lag].tokens, 1e-9) for lag in upper) / weight,
    }


def _waited(bad: tuple[int, int, int] | None) -> tuple[int, int, int] | None:
    return None if bad is None else (bad[0], max(bad[1] - 1, 0), bad[2])


def _entry(
    action: str, before: int, after: int, observed: Observed, numbers: Mapping[str, float], reason: str
) -> Decision:
    given = {"before": float(before), "after": float(after), "update": float(observed.update)}
    return Decision("lag", action, "N", reason, given | dict(numbers))
