"""Quotas, probabilities and the draw: pure functions, checked against their own promises."""

import collections

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_jax.learner.strata import (
    Candidate,
    Verdict,
    draw,
    inclusion_probabilities,
    spread_order,
    verdict_of,
    waterfill,
)

SETTINGS = {"random_share": 0.25, "half_life": 8.0}


def candidate(bucket="a/1", signal=0.5, lag=0, success=0.5, length=20.0, last_chance=False) -> Candidate:
    return Candidate(bucket, signal, lag, success, length, last_chance)


def random_candidates(rng: np.random.Generator, num: int, buckets: int = 3) -> list[Candidate]:
    return [
        candidate(
            bucket=f"a/{rng.integers(1, buckets + 1)}",
            signal=float(rng.random()),
            lag=int(rng.integers(0, 5)),
            success=float(rng.choice([0.0, 0.5, 1.0])),
            length=float(rng.integers(5, 60)),
            last_chance=bool(rng.random() < 0.1),
        )
        for _ in range(num)
    ]


@given(
    st.lists(st.tuples(st.floats(0, 10), st.floats(0, 5)), min_size=1, max_size=12),
    st.floats(0, 1),
)
@settings(deadline=None, derandomize=True)
def test_waterfill_gives_everything_and_nobody_more_than_it_holds(parts, fullness):
    shares, caps = np.array(parts).T
    total = fullness * caps.sum()
    given_out = waterfill(shares, caps, total)
    np.testing.assert_allclose(given_out.sum(), total, atol=1e-9)
    assert (given_out <= caps + 1e-9).all()
    assert (given_out >= 0).all()


def test_waterfill_is_proportional_until_a_cap_binds():
    np.testing.assert_allclose(waterfill(np.array([1, 2, 1]), np.array([9, 9, 9]), 8), [2, 4, 2])
    np.testing.assert_allclose(waterfill(np.array([1, 2, 1]), np.array([9, 2, 9]), 8), [3, 2, 3])
    np.testing.assert_allclose(waterfill(np.array([1, 0]), np.array([3, 9]), 5), [3, 2])
    with pytest.raises(ValueError, match="do not fit"):
        waterfill(np.ones(2), np.ones(2), 3)


@pytest.mark.parametrize("seed", range(30))
def test_the_chances_of_a_bucket_sum_to_its_quota_and_no_place_stays_empty(seed):
    rng = np.random.default_rng(seed)
    pooled = random_candidates(rng, 40)
    weights = {"a/1": 1.0, "a/2": 2.0, "a/3": 1.0}
    chances, means = inclusion_probabilities(pooled, 16, weights, **SETTINGS)
    np.testing.assert_allclose(chances.sum(), 16, atol=1e-9)
    assert (chances <= 1 + 1e-9).all()
    available = collections.Counter(c.bucket for c in pooled)
    for bucket, weight in weights.items():
        quota = chances[[c.bucket == bucket for c in pooled]].sum()
        if all(available[b] >= 16 * w / 4 for b, w in weights.items()):
            np.testing.assert_allclose(quota, 4 * weight, atol=1e-9)
        np.testing.assert_allclose(quota, means[[c.bucket == bucket for c in pooled]].sum(), atol=1e-9)


def test_a_bucket_that_has_too_few_gives_its_places_to_the_others():
    pooled = [candidate("a/1")] * 2 + [candidate("a/2")] * 20
    chances, _ = inclusion_probabilities(pooled, 10, {"a/1": 1.0, "a/2": 1.0}, **SETTINGS)
    np.testing.assert_allclose([chances[:2].sum(), chances[2:].sum()], [2, 8])


def test_a_group_is_drawn_as_often_as_its_recorded_probability_says():
    """The probability that the weight divides by is the true one: 4,000 draws, each within 4.5 standard errors."""
    rng = np.random.default_rng(3)
    pooled = random_candidates(rng, 24)
    weights = {"a/1": 1.0, "a/2": 2.0, "a/3": 1.0}
    chances, _ = inclusion_probabilities(pooled, 8, weights, **SETTINGS)
    num_draws, counted = 4000, np.zeros(24)
    for seed in range(num_draws):
        chosen = draw(pooled, 8, weights, np.random.default_rng(seed), **SETTINGS, max_weight=10)
        assert len(chosen) == 8
        for one in chosen:
            counted[one.index] += 1
            assert one.probability == chances[one.index]
    error = np.sqrt(chances * (1 - chances) / num_draws)
    assert (np.abs(counted / num_draws - chances) <= 4.5 * error + 1e-12).all()


def test_the_weights_undo_what_priority_did():
    """The weighted sum over a batch estimates the bucket's plain mean, to sampling error; unweighted is far off."""
    rng = np.random.default_rng(5)
    pooled = [candidate(signal=float(rng.random())) for _ in range(30)]
    values = np.array([c.signal for c in pooled])  # the worst case: what is averaged is what is prioritised
    weighted, plain = [], []
    for seed in range(3000):
        chosen = draw(pooled, 6, {"a/1": 1.0}, np.random.default_rng(seed), **SETTINGS, max_weight=100)
        weighted.append(sum(one.weight * values[one.index] for one in chosen) / 6)
        plain.append(np.mean([values[one.index] for one in chosen]))
    error = np.std(weighted) / np.sqrt(len(weighted))
    assert abs(np.mean(weighted) - values.mean()) < 4 * error
    assert np.mean(plain) - values.mean() > 20 * error


def test_a_share_of_the_draw_is_uniform_whatever_the_priorities():
    """Of 2 places among 10 a group without any signal keeps at least its part of the uniform share."""
    pooled = [candidate(signal=1.0)] * 5 + [candidate(signal=0.0)] * 5
    for share in (0.25, 0.5, 1.0):
        chances, _ = inclusion_probabilities(pooled, 2, {"a/1": 1.0}, random_share=share, half_life=0.0)
        low = 2 * ((1 - share) * 0.05 / (5 * 1.05 + 5 * 0.05) + share / 10)
        np.testing.assert_allclose(chances[5:], low)


def test_the_weight_is_capped():
    pooled = [candidate(signal=1.0)] * 20 + [candidate(signal=0.0)] * 20
    weights = [
        one.weight
        for seed in range(50)
        for one in draw(pooled, 10, {"a/1": 1.0}, np.random.default_rng(seed), **SETTINGS, max_weight=1.5)
    ]
    assert max(weights) == 1.5
    assert min(weights) < 1


def test_a_fresh_group_comes_before_an_old_one_and_one_on_its_last_chance_before_all():
    pooled = [candidate(lag=0), candidate(lag=8), candidate(lag=16), candidate(lag=16, last_chance=True)]
    chances, _ = inclusion_probabilities(pooled, 2, {"a/1": 1.0}, **SETTINGS)
    assert chances[3] == 1
    assert chances[0] > chances[1] > chances[2] > 0


def test_more_last_chances_than_places_share_them():
    pooled = [candidate(last_chance=True)] * 6 + [candidate()] * 6
    chances, _ = inclusion_probabilities(pooled, 3, {"a/1": 1.0}, **SETTINGS)
    np.testing.assert_allclose(chances, [0.5] * 6 + [0] * 6)


@pytest.mark.parametrize("seed", range(40))
def test_of_every_stretch_as_many_are_taken_as_its_chances_sum_to(seed):
    """Buckets, outcomes within a bucket, and the short half within these: rounded up or down, never further off."""
    rng = np.random.default_rng(seed)
    pooled = random_candidates(rng, 48)
    weights = {"a/1": 1.0, "a/2": 2.0, "a/3": 1.0}
    chances, _ = inclusion_probabilities(pooled, 16, weights, **SETTINGS)
    taken = {c.index for c in draw(pooled, 16, weights, np.random.default_rng(seed), **SETTINGS, max_weight=2)}
    order = spread_order(pooled)
    assert sorted(order) == list(range(48))
    for bucket in weights:
        for verdict in (None, *Verdict):
            stretch = [
                i for i in order if pooled[i].bucket == bucket and verdict in (None, verdict_of(pooled[i].success))
            ]
            middle = len(stretch) // 2  # on one side the shorter, on the other the longer ones
            for part in (stretch, stretch[:middle], stretch[middle:]):
                expected = chances[part].sum()
                assert np.floor(expected - 1e-9) <= len(taken & set(part)) <= np.ceil(expected + 1e-9)


@pytest.mark.parametrize("seed", range(40))
def test_a_batch_is_not_all_won_lost_short_or_long_unless_the_pool_nearly_is(seed):
    """A quarter of a pool of 48 is enough for 2 places of 16 in every draw."""
    rng = np.random.default_rng(seed)
    share = rng.uniform(0.25, 0.75)
    pooled = [
        candidate(
            bucket=f"a/{rng.integers(1, 4)}",
            success=float(i < 48 * share),
            length=float(rng.integers(5, 60)),
        )
        for i in range(48)
    ]
    config = {"random_share": 1.0, "half_life": 0.0}
    available = collections.Counter(c.bucket for c in pooled)
    chosen = draw(pooled, 16, available, np.random.default_rng(seed), **config, max_weight=2)
    wins = sum(pooled[c.index].success for c in chosen)
    assert 2 <= wins <= 14
    median = np.median([c.length for c in pooled])
    short = sum(pooled[c.index].length < median for c in chosen)
    assert 4 <= short <= 12


def test_the_same_pool_and_seed_give_the_same_draw():
    pooled = random_candidates(np.random.default_rng(0), 40)
    weights = {"a/1": 1.0, "a/2": 1.0, "a/3": 1.0}
    first, second, other = (
        draw(pooled, 16, weights, np.random.default_rng(seed), **SETTINGS, max_weight=2) for seed in (1, 1, 2)
    )
    assert first == second != other
