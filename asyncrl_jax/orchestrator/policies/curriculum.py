"""Which tasks are drawn: a weight for each bucket, category × difficulty, and the task of a ticket.

Rule. A group teaches by the differences between its members, which vanish when all succeed and when all fail: a
bucket with recent success p weighs 4p(1 − p). Easy levels come first: a level opens once the open ones of its
category reach `enter_success`. A bucket that stays below `stuck_success` is stuck; its weight rises once, for a
while, and then falls like that of any hopeless one. No open bucket falls below the floor, and a share of the tasks is
exploratory, drawn evenly from all buckets, so that a bucket that was given up is seen again. Breakers and drift
multiply the result; what they set to 0 is not drawn at all. The draw is from a seed that names the ticket, and the
task's index is the ticket's count, so whoever draws it with these weights draws the same, and no task repeats within
a run.

Source: variance of a Bernoulli reward as learning progress, as in Bae et al. 2025 (arXiv 2504.03380) and Tzannetos et
al. 2023; floors against forgetting.
Failure mode: noise in the reward keeps p off 0 and 1 and so a bucket alive that teaches nothing; the learner's
`zero_variance_share` and the held-out success of the level show it.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import random
from collections.abc import Mapping

from asyncrl_jax.config_orchestrator import CurriculumConfig
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Decision, Task

_IMPROVEMENT = 0.02  # of success, that counts as one


def bucket_name(category: str, level: int) -> str:
    """`arithmetic/2`."""
    return f"{category}/{level}"


def split_bucket(bucket: str) -> tuple[str, int]:
    """(category, level) of a bucket's name."""
    category, _, level = bucket.rpartition("/")
    return category, int(level)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """What is known of one bucket."""

    success: float = 0.5  # recent share, smoothed; as unsure as can be before the first group
    groups: float = 0.0  # seen
    open: bool = False
    best: float = 0.0  # success that counts as the last improvement
    improved_at: float = 0.0  # `groups` then
    boosted: bool = False  # it had its rise


@dataclasses.dataclass(frozen=True)
class State:
    """By bucket name."""

    buckets: Mapping[str, Bucket] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Observed:
    """What has been sampled since the last look."""

    base: Mapping[str, float]  # weight of each bucket as configured or set by hand; 0 closes it for good
    groups: Mapping[str, float] = dataclasses.field(default_factory=dict)  # by bucket, since the last look
    successes: Mapping[str, float] = dataclasses.field(default_factory=dict)  # share of those groups' episodes
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # of breakers and drift, 1 where absent
    explore: float = 1.0  # factor on the exploratory share, where the policy has collapsed


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state and the share of tasks of each bucket; all zero when nothing may be drawn."""

    state: State
    weights: Mapping[str, float]
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: CurriculumConfig) -> Decided:
    """Shares for the tickets issued from now on."""
    buckets: dict[str, Bucket] = {}
    log: list[Decision] = []
    for name in observed.base:
        bucket = _learnt(state.buckets.get(name, Bucket()), name, observed, config)
        buckets[name] = bucket
    for name in sorted(observed.base, key=split_bucket):
        if not buckets[name].open and _may_open(name, buckets, config):
            buckets[name] = dataclasses.replace(buckets[name], open=True)
            if config.adaptive:
                log.append(Decision("curriculum", "open", f"bucket:{name}", "the easier levels are solved well enough"))
    raw: dict[str, float] = {}
    for name, weight in observed.base.items():
        raw[name] = weight
        if config.adaptive:
            raw[name], buckets[name], entries = _worth(name, weight, buckets[name], config)
            log += entries
    return Decided(State(buckets), _shares(raw, buckets, observed, config), tuple(log))


def _learnt(bucket: Bucket, name: str, observed: Observed, config: CurriculumConfig) -> Bucket:
    seen = observed.groups.get(name, 0.0)
    if seen <= 0:
        return bucket
    keep = 0.5 ** (seen / config.half_life_groups)
    success = observed.successes.get(name, 0.0)
    smoothed = success if bucket.groups == 0 else keep * bucket.success + (1 - keep) * success
    groups = bucket.groups + seen
    if smoothed >= bucket.best + _IMPROVEMENT:
        return dataclasses.replace(
            bucket, success=smoothed, groups=groups, best=smoothed, improved_at=groups, boosted=False
        )
    return dataclasses.replace(bucket, success=smoothed, groups=groups)


def _may_open(name: str, buckets: Mapping[str, Bucket], config: CurriculumConfig) -> bool:
    category, level = split_bucket(name)
    easier = [
        b for other, b in buckets.items() if split_bucket(other)[0] == category and split_bucket(other)[1] < level
    ]
    return all(b.open and (b.groups > 0 and b.success >= config.enter_success) for b in easier)


def _worth(name: str, weight: float, bucket: Bucket, config: CurriculumConfig) -> tuple[float, Bucket, list[Decision]]:
    """(weight before floors, the bucket, what is new)."""
    if not bucket.open:
        return 0.0, bucket, []
    worth = 4 * bucket.success * (1 - bucket.success)
    since = bucket.groups - bucket.improved_at
    stuck = bucket.success < config.stuck_success and since >= config.stuck_groups
    if not stuck or since >= 2 * config.stuck_groups:
        return weight * worth, bucket, []
    entries = []
    if not bucket.boosted:
        numbers = {"success": bucket.success, "groups_without_improvement": since}
        entries = [Decision("curriculum", "boost", f"bucket:{name}", "stuck: it gets more tries for a while", numbers)]
    return weight * config.stuck_boost, dataclasses.replace(bucket, boosted=True), entries


def _shares(
    raw: Mapping[str, float], buckets: Mapping[str, Bucket], observed: Observed, config: CurriculumConfig
) -> dict[str, float]:
    """Floors and exploration, then breakers and drift."""
    total = sum(raw.values())
    usable = [name for name, weight in observed.base.items() if weight > 0]
    if not usable:
        return dict.fromkeys(raw, 0.0)
    shares = {
        name: weight / total if total > 0 else float(name in usable) / len(usable) for name, weight in raw.items()
    }
    explore = min(config.exploratory_share * observed.explore, 0.5) if config.adaptive else 0.0
    if observed.explore > 1 and not config.adaptive:
        explore = min(0.05 * observed.explore, 0.5)
    if config.adaptive:
        shares = {
            name: max(share, config.floor) if buckets[name].open and observed.base[name] > 0 else share
            for name, share in shares.items()
        }
        shares = _normalised(shares)
    for name in shares:
        shares[name] = (1 - explore) * shares[name] + (explore / len(usable) if name in usable else 0.0)
        shares[name] *= observed.factors.get(name, 1.0)
    return _normalised(shares)


def _normalised(shares: Mapping[str, float]) -> dict[str, float]:
    total = sum(shares.values())
    return {name: share / total if total > 0 else 0.0 for name, share in shares.items()}


def draw_task(weights: Mapping[str, float], seed: int, count: int) -> Task | None:
    """The training task of the `count`-th ticket of a run with this seed; None if no bucket may be drawn from."""
    names = [name for name, weight in weights.items() if weight > 0]
    if not names:
        return None
    bounds = list(itertools.accumulate(weights[name] for name in names))
    point = random.Random(derive_seed(seed, "level", count)).random() * bounds[-1]
    category, level = split_bucket(names[bisect.bisect_right(bounds[:-1], point)])
    return Task(environment=category, split="train", level=level, index=count)
