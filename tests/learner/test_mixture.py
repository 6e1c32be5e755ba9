"""What is trained on, over many updates of a synthetic source: three categories, one hopeless and one solved."""

from __future__ import annotations

import collections
import dataclasses

import numpy as np
import pytest

from asyncrl_jax.config_data import PoolConfig
from asyncrl_jax.learner.pool import Moment, Pool, PooledGroup, Traits
from asyncrl_jax.types import Group, Task, Ticket

UPDATES, GROUPS, BOUND = 150, 16, 6
WEIGHTS = {"sums/1": 2.0, "sums/2": 1.0, "words/1": 1.0, "words/2": 2.0, "code/1": 1.0, "code/2": 1.0}
HOPELESS, SOLVED = "code/2", "sums/1"


@dataclasses.dataclass
class Source:
    """Issues what admission would, by weight; groups arrive late, with an age of some updates."""

    rng: np.random.Generator
    count: int = 0

    def group(self, update: int) -> PooledGroup:
        self.count += 1
        names, weights = list(WEIGHTS), np.array(list(WEIGHTS.values()))
        environment, level = names[self.rng.choice(len(names), p=weights / weights.sum())].split("/")
        bucket = f"{environment}/{level}"
        success = {HOPELESS: 0.0, SOLVED: 1.0}.get(bucket, float(self.rng.choice([0, 0.25, 0.5, 0.75, 1])))
        sampled_at = max(update - int(self.rng.integers(0, 3)), 0)
        task = Task(environment, "train", int(level), self.count)
        ticket = Ticket(f"1-{self.count}", task, 8, 0, sampled_at, sampled_at + BOUND, 1.0, 0, 0.0)
        traits = Traits(
            signal=2 * np.sqrt(success * (1 - success)),
            reward=success,
            success=success,
            length=float(self.rng.integers(10, 60)),
            sampled_tokens=200,
            zero_variance=success in (0.0, 1.0),
        )
        return PooledGroup(Group(ticket, (), "actor-0"), None, (sampled_at,), 0.0, traits)


@dataclasses.dataclass
class Batch:
    trained: list[PooledGroup]
    pooled: list[PooledGroup]  # what there was to choose from
    starved: bool  # there was not more than one update's worth


def run(replay_ratio: int, pool_groups: int, seed: int = 0) -> tuple[list[Batch], int, Source]:
    source, pool = Source(np.random.default_rng(seed)), Pool(replay_ratio, PoolConfig(draw="strata"))
    batches, overfilled = [], 0
    for update in range(UPDATES):
        overfilled += sum(p.uses == 0 for p in pool.take_if(lambda p, u=update: u - p.versions[0] > BOUND))
        while len(pool) < GROUPS or pool.uses_left < pool_groups * replay_ratio:
            pool.add(source.group(update))
        pooled = pool.all()
        moment = Moment(
            lambda: WEIGHTS,
            lag=lambda p, u=update: u - p.versions[0],
            last_chance=lambda p, u=update: u + 1 - p.versions[0] > BOUND,
            seed=update,
        )
        drawn = [d.pooled for d in pool.draw(GROUPS, moment)]
        batches.append(Batch(drawn, pooled, len(pooled) == GROUPS))
    return batches, overfilled, source


@pytest.fixture(scope="module", params=[(1, 40), (2, 40)], ids=["one use", "two uses"])
def history(request):
    return run(*request.param)


def test_the_trained_mixture_follows_the_weights_within_sampling_error(history):
    """The hopeless and the solved bucket too: that nothing is learnt there is no reason to train on less of them."""
    batches, _, _ = history
    trained = collections.Counter(p.bucket for batch in batches for p in batch.trained)
    total = trained.total()
    assert total == UPDATES * GROUPS
    for bucket, weight in WEIGHTS.items():
        share = weight / sum(WEIGHTS.values())
        error = np.sqrt(share * (1 - share) / total)
        assert abs(trained[bucket] / total - share) < 4 * error, (bucket, trained[bucket] / total, share)


def test_every_batch_holds_its_strata(history):
    """Of each bucket its quota, rounded, as far as it is pooled; won and lost, short and long as the pool is."""
    batches, _, _ = history
    for batch in batches:
        available = collections.Counter(p.bucket for p in batch.pooled)
        taken = collections.Counter(p.bucket for p in batch.trained)
        quotas = {bucket: GROUPS * weight / sum(WEIGHTS.values()) for bucket, weight in WEIGHTS.items()}
        enough = all(available[bucket] >= quota for bucket, quota in quotas.items())
        for bucket, quota in quotas.items():
            assert taken[bucket] >= min(np.floor(quota), available[bucket])
            assert not enough or taken[bucket] <= np.ceil(quota)
        outcomes = collections.Counter(p.traits.success for p in batch.trained)
        assert outcomes[0.0] < GROUPS
        assert outcomes[1.0] < GROUPS
        median = np.median([p.traits.length for p in batch.pooled])
        assert 2 <= sum(p.traits.length < median for p in batch.trained) <= GROUPS - 2


def test_no_group_is_used_more_often_than_allowed_nor_past_the_bound(history):
    batches, _, source = history
    uses = collections.Counter(p.ticket_id for batch in batches for p in batch.trained)
    most = max(p.uses for batch in batches for p in batch.trained)
    assert max(uses.values()) == most <= 2
    for update, batch in enumerate(batches):
        assert len({p.ticket_id for p in batch.trained}) == GROUPS
        assert all(update - p.versions[0] <= BOUND for p in batch.trained)
    assert len(uses) <= source.count


def test_little_of_what_was_sampled_grows_too_old_unused(history):
    """Groups on their last chance go first: less than 2 % is lost, and it is counted."""
    _, overfilled, source = history
    assert overfilled / source.count < 0.02


def test_a_pool_larger_than_the_bound_can_use_is_seen_as_overfilled():
    _, overfilled, source = run(1, GROUPS * (BOUND + 4))
    assert overfilled / source.count > 0.1
