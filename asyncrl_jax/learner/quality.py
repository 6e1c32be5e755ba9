"""Which sampled trajectories a rejection-sampling stage trains on: `generate → filter → train`.

Three bands of reward: the high ones are what is to be imitated, the middle ones keep what half works, and a few low
ones stay as negatives. The bands bias a policy gradient, so they belong to these stages and not to RL, where advantages
are taken over whole groups.

Within a band the best of every task come first, then the second best, and so on, so that easy tasks do not crowd out
the others; of one task at most `per_task` are kept, and of equal token sequences one.
"""

from __future__ import annotations

import collections
import dataclasses
import enum
from collections.abc import Sequence

import numpy as np

from asyncrl_jax.types import Task, Trajectory


class Band(enum.StrEnum):
    """How good a trajectory is."""

    HIGH = "high"
    MIDDLE = "middle"
    LOW = "low"


@dataclasses.dataclass(frozen=True)
class Sample:
    """One trajectory of one task."""

    task: Task
    trajectory: Trajectory


@dataclasses.dataclass(frozen=True)
class Kept:
    """What the filter kept, and what it counted on the way."""

    samples: tuple[Sample, ...]  # by falling band, in each by rising rank within the task
    bands: tuple[Band, ...]  # of each
    offered: dict[Band, int]  # distinct trajectories that came, by band
    duplicates: int  # trajectories of a task that had the tokens of another one
    num_tasks: int  # that the kept ones are of
    distinct_share: float  # diversity: distinct n-grams ÷ n-grams among the sampled tokens of the kept ones


def quality_filter(
    samples: Sequence[Sample],
    num: int,
    *,
    shares: tuple[int, int, int] = (5, 3, 2),
    high_reward: float = 1.0,
    low_reward: float = 0.5,
    per_task: int = 2,
    ngram: int = 4,
) -> Kept:
    """At most `num` samples, high : middle : low as `shares` say; a band that has too few leaves its places empty.

    Negatives never outnumber what they are contrasted with: where the high band runs short, the low one is cut to
    match.

    Args:
      samples: in any order; equal ones are told apart by position alone, so the same order gives the same result.
      num: most samples kept, at least 1.
      shares: of the three bands.
      high_reward: from here on a trajectory is high.
      low_reward: below this it is low.
      per_task: most samples of one task, over all bands.
      ngram: tokens of the n-grams that diversity counts.

    Raises:
      ValueError: for numbers that make no sense.
    """
    if num < 1 or per_task < 1 or ngram < 1 or min(shares) < 0 or shares[0] < 1 or low_reward > high_reward:
        raise ValueError(f"num={num}, shares={shares}, rewards {low_reward} to {high_reward}, per_task={per_task}")
    unique = _distinct(samples)
    by_band = {band: [s for s in unique if _band(s, high_reward, low_reward) is band] for band in Band}
    share_of = dict(zip(Band, shares, strict=True))
    taken_of_task: collections.Counter[Task] = collections.Counter()
    chosen: dict[Band, list[Sample]] = {}
    for band in Band:
        chosen[band] = _fair(by_band[band], round(num * share_of[band] / sum(shares)), per_task, taken_of_task)
    most_negatives = len(chosen[Band.HIGH]) * shares[2] // shares[0]
    chosen[Band.LOW] = chosen[Band.LOW][:most_negatives]
    kept = [sample for band in Band for sample in chosen[band]]
    return Kept(
        samples=tuple(kept),
        bands=tuple(band for band in Band for _ in chosen[band]),
        offered={band: len(of_band) for band, of_band in by_band.items()},
        duplicates=len(samples) - len(unique),
        num_tasks=len({sample.task for sample in kept}),
        distinct_share=_distinct_share(kept, ngram),
    )


def _distinct(samples: Sequence[Sample]) -> list[Sample]:
    """The first of all samples of a task that have the same tokens."""
    seen: dict[tuple[Task, bytes], Sample] = {}
    for sample in samples:
        seen.setdefault((sample.task, np.asarray(sample.trajectory.tokens, np.int32).tobytes()), sample)
    return list(seen.values())


def _band(sample: Sample, high: float, low: float) -> Band:
    reward = sample.trajectory.reward
    return Band.HIGH if reward >= high else Band.LOW if reward < low else Band.MIDDLE


def _fair(samples: Sequence[Sample], num: int, per_task: int, taken_of_task: collections.Counter[Task]) -> list[Sample]:
    """The best of every task, then the second best, up to `num`; counts what it takes of each task."""
    best_first = sorted(samples, key=lambda sample: -sample.trajectory.reward)  # stable: earlier ones first
    rank: collections.Counter[Task] = collections.Counter()
    ranked = []
    for sample in best_first:
        ranked.append((rank[sample.task], sample))
        rank[sample.task] += 1
    chosen: list[Sample] = []
    for _, sample in sorted(ranked, key=lambda pair: pair[0]):
        if len(chosen) < num and taken_of_task[sample.task] < per_task:
            chosen.append(sample)
            taken_of_task[sample.task] += 1
    return chosen


def _distinct_share(samples: Sequence[Sample], n: int) -> float:
    """Distinct n-grams of sampled tokens ÷ all of them; 0 without any."""
    grams: collections.Counter[tuple[int, ...]] = collections.Counter()
    for sample in samples:
        tokens = sample.trajectory.tokens[sample.trajectory.loss_mask.astype(bool)].tolist()
        grams.update(tuple(tokens[i : i + n]) for i in range(len(tokens) - n + 1))
    return len(grams) / grams.total() if grams else 0.0
