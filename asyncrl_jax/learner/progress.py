"""Exact counts of what was trained. Saved in every checkpoint, so a resumed learner goes on counting where it stood."""

from __future__ import annotations

import collections
import dataclasses
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
