"""Exact counts of what was trained. Saved in every checkpoint, so a resumed learner goes on counting where it stood."""

from __future__ import annotations

import collections
import dataclasses
import statistics
from typing import Any

import numpy as np


def lag_statistics(histogram: dict[int, int]) -> dict[str, float]:
    """Mean, 95th percentile and maximum of the lag of trained tokens, in updates.

    Args:
      histogram: number of trained tokens by lag. Empty gives zeros.
    """
    total = sum(histogram.values())
    if total == 0:
        return {"mean": 0.0, "p95": 0.0, "max": 0.0}
    seen, p95 = 0, 0
    for lag in sorted(histogram):
        seen += histogram[lag]
        p95 = lag
        if seen >= 0.95 * total:
            break
    mean = sum(lag * count for lag, count in histogram.items()) / total
    return {"mean": mean, "p95": float(p95), "max": float(max(lag for lag, count in histogram.items() if count))}


@dataclasses.dataclass
class Progress:
    """Totals over the surviving line."""

    tokens_trained: int = 0  # tokens that entered a gradient
    over_bound_tokens: int = 0  # of those, older than the lag bound: the proof that the bound holds is that this is 0
    tokens_explored: int = 0  # of the tokens trained, those of another policy; they are in no count of lags
    groups_trained: int = 0  # uses
    zero_variance_groups: int = 0  # uses whose rewards were all equal: advantage exactly 0
    mixed_version_trajectories: int = 0  # trajectories whose tokens came from more than one version
    skipped_updates: int = 0  # non-finite loss or gradient
    groups_arrived: int = 0  # valid ones, whatever became of them
    tokens_generated: int = 0  # tokens that the policy made for them
    tokens_effective: int = 0  # of the tokens trained, those whose advantage is not 0
    groups_filtered: int = 0  # left out for want of variance, and replaced
    groups_overfilled: int = 0  # grew too old in the pool without a use: it held more than the updates could take
    starved_s: float = 0.0  # waited because fewer groups were pooled than an update takes
    busy_s: float = 0.0  # in updates
    wait_s: float = 0.0  # for groups
    lag_histogram: collections.Counter[int] = dataclasses.field(default_factory=collections.Counter)
    groups_by_bucket: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)  # uses

    def count_lags(self, lags_T: np.ndarray, bound: int) -> None:
        """Adds the lags of the tokens that enter a gradient, in updates."""
        values, counts = np.unique(lags_T, return_counts=True)
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            self.lag_histogram[value] += count
            if value > bound:
                self.over_bound_tokens += count
        self.tokens_trained += int(lags_T.size)

    def count_explored(self, num_tokens: int) -> None:
        """Adds tokens of another policy that enter a gradient."""
        self.tokens_trained += num_tokens
        self.tokens_explored += num_tokens

    @property
    def effective_token_share(self) -> float:
        """Trained tokens that teach something ÷ generated tokens; a group used twice counts twice above."""
        return self.tokens_effective / self.tokens_generated if self.tokens_generated else 0.0

    @property
    def busy_share(self) -> float:
        total = self.busy_s + self.wait_s
        return self.busy_s / total if total else 0.0

    def to_json(self) -> dict[str, Any]:
        values = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return values | {"lag_histogram": {str(lag): count for lag, count in sorted(self.lag_histogram.items())}}

    @classmethod
    def from_json(cls, values: dict[str, Any]) -> Progress:
        histogram = collections.Counter({int(lag): count for lag, count in values["lag_histogram"].items()})
        buckets = collections.Counter(values.get("groups_by_bucket", {}))
        return cls(**(values | {"lag_histogram": histogram, "groups_by_bucket": buckets}))


class Pace:
    """How fast updates are, lately; what heartbeats tell and admission reckons with.

    Times are medians of the last few updates, so that one that compiles or waits for a crash does not count for many
    after it; shares are smoothed.
    """

    _RECENT = 5  # updates

    def __init__(self) -> None:
        self._recent: collections.deque[tuple[float, float]] = collections.deque(maxlen=self._RECENT)
        self.idle_share = 0.0  # of the time between updates: waiting for groups
        self.starved_share = 0.0  # the same, without the wait for stragglers

    @property
    def update_s(self) -> float:
        """Seconds from update to update; 0 before the first."""
        return statistics.median_low(seconds for seconds, _ in self._recent) if self._recent else 0.0

    @property
    def step_s(self) -> float:
        """Of them busy with the update; 0 before the first."""
        return statistics.median_low(step_s for _, step_s in self._recent) if self._recent else 0.0

    def updated(self, seconds: float, step_s: float, idle_s: float, starved_s: float) -> None:
        """An update is done.

        Args:
          seconds: since the update before.
          step_s: of them busy.
          idle_s: of them waiting for groups.
          starved_s: of these without enough groups for an update.
        """
        self._recent.append((seconds, step_s))
        seconds = max(seconds, 1e-9)
        self.idle_share = 0.8 * self.idle_share + 0.2 * min(idle_s / seconds, 1.0)
        self.starved_share = 0.8 * self.starved_share + 0.2 * min(starved_s / seconds, 1.0)

    def told(self) -> dict[str, float]:
        """What a heartbeat carries of it."""
        return {
            "update_s": self.update_s,
            "step_s": self.step_s,
            "idle_share": self.idle_share,
            "starved_share": self.starved_share,
        }
