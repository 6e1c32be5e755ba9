"""Buckets whose rewards or episodes no longer look like themselves: reward holes, changed rules, collapse.

Rule. Of every bucket, `window_groups` groups make one observation of reward mean, reward deviation, success, length,
repetition and entropy. Each is compared with its own history (mean and deviation over past observations, smoothed). A
change of more than `z_score` deviations *and* of more than `min_change` is drift: it is named (as `reward_rise`), and
the bucket is only alarmed, weighs less, or is held out until a human releases it, as configured. What drifts does not
enter the history; after a release the history starts anew, so what a human accepted is the new normal. Separately, a
bucket collapses when its policy is nearly deterministic (entropy below `collapse_entropy`), the members of its groups
score alike, and it does *not* succeed: no gradient will come from it again. That is answered with exploration: a
higher temperature and a larger exploratory share, until the entropy is back at twice the threshold.

Source: Shewhart's control charts with an exponentially weighted history (Roberts 1959); reward hacking as in Skalse
et al. 2022 (arXiv 2209.13085).
Failure mode: a hole that is found slowly, over many observations, moves the history with it; held-out success that
does not rise with the reward shows it (see `regression`). Fast honest learning may be alarmed; the threshold is set
against that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from asyncrl_jax.config_orchestrator import DriftConfig
from asyncrl_jax.types import Decision

MEASURES = ("reward", "reward_deviation", "success", "length", "repetition", "entropy")
_RELATIVE = ("length", "entropy")  # `min_change` is a share of the history for these
_EXPLORE_SHARE = 4.0  # factor on the exploratory share while a bucket has collapsed


@dataclasses.dataclass(frozen=True)
class Sample:
    """Groups of one bucket, summed over their episodes (entropy over tokens)."""

    groups: float = 0.0
    episodes: float = 0.0
    tokens: float = 0.0  # sampled
    reward: float = 0.0
    reward_squared: float = 0.0
    group_variance: float = 0.0  # of rewards within a group, summed over groups
    successes: float = 0.0
    repetition: float = 0.0  # share of an episode's token pairs that it had before
    surprisal: float = 0.0  # −log-prob of the sampled tokens, in nats; its mean estimates the entropy
    contrasts: float = 0.0  # groups that did not end alike, with scored steps; see `agreement`
    step_gap: float = 0.0  # step part of their better members − that of the worse ones
    step_gap_squared: float = 0.0

    def plus(self, other: Sample) -> Sample:
        names = [field.name for field in dataclasses.fields(self)]
        return Sample(*(getattr(self, name) + getattr(other, name) for name in names))

    @classmethod
    def total(cls, records: Sequence[Mapping[str, Any]]) -> Sample:
        """The sum of records of these fields, each of which may be absent.

        Raises:
          TypeError, ValueError: if a record is none, or the sum is not finite.
        """
        given = set[str]().union(*records)
        if not _SAMPLE_FIELDS.issuperset(given):
            raise ValueError(f"unknown fields among {sorted(map(str, given))}")
        sums = {name: sum([record.get(name, 0.0) for record in records]) for name in given or _SAMPLE_FIELDS}
        if not math.isfinite(sum(sums.values())):
            raise ValueError("a sum is not finite")
        return cls(**sums)

    def measures(self) -> dict[str, float]:
        """By the names of MEASURES."""
        episodes = max(self.episodes, 1e-9)
        mean = self.reward / episodes
        return {
            "reward": mean,
            "reward_deviation": math.sqrt(max(self.reward_squared / episodes - mean * mean, 0.0)),
            "success": self.successes / episodes,
            "length": self.tokens / episodes,
            "repetition": self.repetition / episodes,
            "entropy": self.surprisal / max(self.tokens, 1e-9),
        }


_SAMPLE_FIELDS = frozenset(field.name for field in dataclasses.fields(Sample))


@dataclasses.dataclass(frozen=True)
class History:
    """Of one measure: smoothed mean and variance of past observations."""

    windows: int = 0
    mean: float = 0.0
    variance: float = 0.0


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket."""

    window: Sample = Sample()  # under way
    histories: Mapping[str, History] = dataclasses.field(default_factory=dict)
    drift: str = ""  # name of what is drifting; "" for nothing
    held: bool = False  # for a human
    collapsed: bool = False


@dataclasses.dataclass(frozen=True)
class State:
    """By bucket name."""

    buckets: Mapping[str, Bucket] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Observed:
    """What was sampled since the last look, and what a human decided."""

    samples: Mapping[str, Sample] = dataclasses.field(default_factory=dict)  # by bucket
    released: frozenset[str] = frozenset()  # buckets that a human has released
    held: frozenset[str] = frozenset()  # buckets that a human holds
    drawn: frozenset[str] | None = None  # buckets with a weight: no other's collapse can be answered; None: all


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state, factors on the weights of buckets, and the answer to a collapse."""

    state: State
    factors: Mapping[str, float]  # by bucket; 1 where absent
    temperature: float = 1.0  # factor
    explore: float = 1.0  # factor on the exploratory share
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: DriftConfig) -> Decided:
    """What to make of the newest groups."""
    buckets = dict(state.buckets)
    log: list[Decision] = []
    for name in sorted(observed.released & buckets.keys()):
        if buckets[name].held or buckets[name].drift:
            buckets[name] = Bucket()
            log.append(Decision("drift", "release", f"bucket:{name}", "released by hand: its history starts anew"))
    for name in sorted(observed.held):
        bucket = buckets.get(name, Bucket())
        if not bucket.held:
            buckets[name] = dataclasses.replace(bucket, held=True, drift=bucket.drift or "by_hand")
            log.append(Decision("drift", "hold", f"bucket:{name}", "held by hand"))
    for name, sample in sorted(observed.samples.items()):
        bucket = buckets.get(name, Bucket())
        bucket = dataclasses.replace(bucket, window=bucket.window.plus(sample))
        if bucket.window.groups >= config.window_groups:
            bucket, entries = _closed(name, bucket, config)
            log += entries
        buckets[name] = bucket
    factors = {name: factor for name, b in buckets.items() if (factor := _factor(b, config)) < 1}
    drawn = buckets.keys() if observed.drawn is None else observed.drawn
    collapsed = any(bucket.collapsed and name in drawn for name, bucket in buckets.items())  # held: until released
    temperature, explore = (config.explore_temperature, _EXPLORE_SHARE) if collapsed else (1.0, 1.0)
    return Decided(State(buckets), factors, temperature, explore, tuple(log))


def _factor(bucket: Bucket, config: DriftConfig) -> float:
    if bucket.held:
        return 0.0
    return config.lowered_weight if bucket.drift and config.action == "lower" else 1.0


def _closed(name: str, bucket: Bucket, config: DriftConfig) -> tuple[Bucket, list[Decision]]:
    """The bucket after a full window, and what is new."""
    window, measures = bucket.window, bucket.window.measures()
    log: list[Decision] = []
    collapsed = _collapsed(bucket, window, measures, config)
    if collapsed != bucket.collapsed:
        numbers = {"entropy": measures["entropy"], "success": measures["success"]}
        action, why = ("collapse", "flat and deterministic: answered with exploration")
        if not collapsed:
            action, why = ("recover", "the policy varies again")
        log.append(Decision("drift", action, f"bucket:{name}", why, numbers))
    found = [f for m in MEASURES if (f := _drift(m, measures[m], bucket.histories.get(m, History()), config))]
    if found and not bucket.held:
        kind, numbers = max(found, key=lambda item: item[1]["z"])
        held = config.action == "hold"
        if kind != bucket.drift:
            action = "hold" if held else config.action
            log.append(Decision("drift", action, f"bucket:{name}", f"{kind}, against its own history", numbers))
        return dataclasses.replace(bucket, window=Sample(), drift=kind, held=held, collapsed=collapsed), log
    if bucket.drift and not bucket.held:
        log.append(Decision("drift", "recover", f"bucket:{name}", f"{bucket.drift} is over"))
    if bucket.held:  # what was under way when it was held says nothing new
        return dataclasses.replace(bucket, window=Sample(), collapsed=collapsed), log
    histories = {m: _remembered(bucket.histories.get(m, History()), measures[m], config) for m in MEASURES}
    return Bucket(Sample(), histories, "", False, collapsed), log


def _collapsed(bucket: Bucket, window: Sample, measures: Mapping[str, float], config: DriftConfig) -> bool:
    alike = window.group_variance / max(window.groups, 1e-9) < 1e-3
    failing = measures["success"] < 0.5
    limit = 2 * config.collapse_entropy if bucket.collapsed else config.collapse_entropy
    return measures["entropy"] < limit and failing and (alike or bucket.collapsed)


def _drift(measure: str, value: float, history: History, config: DriftConfig) -> tuple[str, dict[str, float]] | None:
    """(name, numbers) if this observation is out of its history."""
    if history.windows < config.min_windows:
        return None
    change = value - history.mean
    scale = abs(history.mean) if measure in _RELATIVE else 1.0
    deviation = math.sqrt(history.variance) + 0.02 * max(scale, 1e-9)  # a history without any variance trusts nothing
    z = abs(change) / deviation
    if z < config.z_score or abs(change) < config.min_change * scale:
        return None
    direction = "rise" if change > 0 else "fall"
    return f"{measure}_{direction}", {"value": value, "usual": history.mean, "z": z}


def _remembered(history: History, value: float, config: DriftConfig) -> History:
    weight = max(1 - 0.5 ** (1 / config.half_life_windows), 1 / (history.windows + 1))
    change = value - history.mean
    if history.windows == 0:
        return History(1, value, 0.0)
    mean = history.mean + weight * change
    variance = (1 - weight) * (history.variance + weight * change * change)
    return History(history.windows + 1, mean, variance)
