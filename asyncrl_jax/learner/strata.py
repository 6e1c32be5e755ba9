"""Which of the pooled groups an update takes: by bucket, then by priority, spread over outcome and length.

Three steps, each a pure function.

1. **Quotas.** The update's groups are shared out over buckets (environment × level) in proportion to the buckets'
   weights. A bucket that has fewer than its share gives the rest to the others, so no place stays empty while groups
   are there.
2. **Inclusion probabilities.** Inside a bucket a group's chance follows its priority, with a uniform share mixed in;
   groups on their last chance come first. The probabilities of a bucket sum to its quota.
3. **Systematic sampling.** The groups are laid end to end, each as long as its probability, in the order of bucket,
   outcome and length, and every point u, u + 1, u + 2, … of one random u takes the group that it falls on. So each
   group is taken with exactly its probability, and of any stretch of that order (a bucket; the failures in it; the
   short ones among these) as many are taken as its probabilities sum to, rounded up or down. A batch can be all won or
   all short only if what is pooled nearly is.

What a priority did is undone by the weight (quota / pooled of the bucket) / probability, which makes the weighted batch
an unbiased estimate of the bucket's mean: D. G. Horvitz and D. J. Thompson, 1952. The weight is capped, which trades a
little bias for variance, as the truncation of importance weights does. Priorities by |advantage|: T. Schaul et al.,
"Prioritized experience replay", 2016. Systematic sampling with unequal probabilities: W. G. Madow, 1949.

Dimensions: n pooled groups, B buckets, k groups of an update.
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping, Sequence

import numpy as np

SIGNAL_FLOOR = 0.05  # added to the signal, so that a group without any still has a priority


class Verdict(enum.IntEnum):
    """How a group went."""

    LOST = 0  # no member solved the task
    MIXED = 1
    WON = 2  # every member did


def verdict_of(success: float) -> Verdict:
    """The outcome of a group in which this share of the members solved the task."""
    return Verdict.LOST if success == 0 else Verdict.WON if success == 1 else Verdict.MIXED


@dataclasses.dataclass(frozen=True)
class Candidate:
    """What the draw looks at of one pooled group."""

    bucket: str
    signal: float  # mean |advantage| of its members: how much there is to learn
    lag: int  # of its oldest token, in updates
    success: float  # share of its members that solved the task
    length: float  # mean number of tokens of its members
    last_chance: bool  # never trained on, and too old for the update after this one


@dataclasses.dataclass(frozen=True)
class Chosen:
    """One draw: which candidate, with what probability, and the weight that corrects for it."""

    index: int
    probability: float
    weight: float


def waterfill(shares: np.ndarray, caps: np.ndarray, total: float) -> np.ndarray:
    """Splits `total` in proportion to `shares`, none above its cap; what is cut off goes to the others.

    Args:
      shares: float [n], at least 0. Those of share 0 get something only when all others are full.
      caps: float [n], at least 0.
      total: at most the sum of the caps.

    Returns:
      float64 [n] that sums to `total`.

    Raises:
      ValueError: if the caps do not hold `total`.
    """
    caps = np.asarray(caps, np.float64)
    if total > caps.sum() + 1e-9:
        raise ValueError(f"{total} do not fit under caps that sum to {caps.sum()}")
    given = np.zeros(len(caps))
    for weights in (np.asarray(shares, np.float64), np.ones(len(caps))):
        open_ = (weights > 0) & (given < caps)
        while open_.any() and (left := total - given.sum()) > 0:
            among_open = np.where(open_, weights, 0.0)
            offer = given + left * (among_open / among_open.sum())
            full = open_ & (offer >= caps)
            given = np.where(full, caps, given) if full.any() else np.where(open_, offer, given)
            open_ &= full.any() & ~full  # every round fills one, or is the last
    return given


def inclusion_probabilities(
    candidates: Sequence[Candidate],
    num: int,
    bucket_weights: Mapping[str, float],
    *,
    random_share: float,
    half_life: float,
) -> tuple[np.ndarray, np.ndarray]:
    """Chance of each candidate to be among the `num`, and its bucket's mean chance.

    Args:
      candidates: at least `num`.
      num: k.
      bucket_weights: of every bucket that is asked for; one that is not named has weight 0.
      random_share: of the uniform part.
      half_life: lag at which a priority has halved, in updates; 0: age does not matter.

    Returns:
      float64 [n] that sums to k, each at most 1; float64 [n], quota / pooled of its bucket.
    """
    buckets = sorted({candidate.bucket for candidate in candidates})
    members = {bucket: [i for i, c in enumerate(candidates) if c.bucket == bucket] for bucket in buckets}
    quotas = waterfill(
        np.array([bucket_weights.get(bucket, 0.0) for bucket in buckets]),
        np.array([len(members[bucket]) for bucket in buckets]),
        num,
    )
    probabilities, means = np.zeros(len(candidates)), np.zeros(len(candidates))
    for bucket, quota in zip(buckets, quotas, strict=True):
        of_bucket = np.array(members[bucket])
        means[of_bucket] = quota / len(of_bucket)
        last = np.array([candidates[i].last_chance for i in of_bucket])
        rescued = min(float(last.sum()), quota)
        probabilities[of_bucket[last]] = rescued / max(last.sum(), 1)
        others = of_bucket[~last]
        if len(others):
            priorities = np.array([_priority(candidates[i], half_life) for i in others])
            mixed = (1 - random_share) * priorities / priorities.sum() + random_share / len(others)
            probabilities[others] = waterfill(mixed, np.ones(len(others)), quota - rescued)
    return probabilities, means


def _priority(candidate: Candidate, half_life: float) -> float:
    freshness = 0.5 ** (candidate.lag / half_life) if half_life else 1.0
    return (candidate.signal + SIGNAL_FLOOR) * freshness


def spread_order(candidates: Sequence[Candidate]) -> list[int]:
    """Candidates by bucket, outcome and length; every other stretch runs backwards, so that like lies by like."""
    order: list[int] = []
    stretches = 0
    for place, bucket in enumerate(sorted({candidate.bucket for candidate in candidates})):
        for outcome in sorted(Verdict, reverse=place % 2 == 1):
            inside = [i for i, c in enumerate(candidates) if c.bucket == bucket and verdict_of(c.success) is outcome]
            order += sorted(inside, key=lambda i: (candidates[i].length, i), reverse=stretches % 2 == 1)
            stretches += bool(inside)
    return order


def draw(
    candidates: Sequence[Candidate],
    num: int,
    bucket_weights: Mapping[str, float],
    rng: np.random.Generator,
    *,
    random_share: float,
    half_life: float,
    max_weight: float,
) -> list[Chosen]:
    """`num` candidates, in their own order. The same candidates in the same order and the same seed give the same draw.

    Args:
      max_weight: cap of the corrective weight.

    Others as `inclusion_probabilities`.
    """
    probabilities, means = inclusion_probabilities(
        candidates, num, bucket_weights, random_share=random_share, half_life=half_life
    )
    order = np.array(spread_order(candidates))
    ends = np.cumsum(probabilities[order])
    ends[-1] = num  # exactly, whatever was rounded on the way
    points = rng.random() + np.arange(num)
    taken = sorted(order[np.searchsorted(ends, points, side="right")].tolist())
    assert len(set(taken)) == num, "a probability above 1"
    return [Chosen(i, float(probabilities[i]), min(float(means[i] / probabilities[i]), max_weight)) for i in taken]
