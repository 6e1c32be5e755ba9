"""The whole loss as a function of log-probs: the same value and gradient however a step is cut."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_setup import tiny_config

from asyncrl_jax.config_learner import LearnerConfig, ObjectiveConfig
from asyncrl_jax.learner.aggregation import count_sequences
from asyncrl_jax.learner.objective import Counts, CriticTokens, Tokens, step_loss

LENGTHS = (5, 3, 6, 1, 4)
TOTAL = sum(LENGTHS)

# One sequence a row; and packed in another order, with more padding.
PLAIN = [[0], [1], [2], [3], [4]], 6
PACKED = [[4, 1], [], [3, 2], [0]], 11


def arranged(layout):
    """int [B, T]: which token of the step stands where, −1 for padding; and segment ids."""
    rows, width = layout
    starts = np.cumsum((0, *LENGTHS))
    index, segments = np.full((len(rows), width), -1), np.zeros((len(rows), width), np.int32)
    for row, sequences in enumerate(rows):
        at = 0
        for segment, sequence in enumerate(sequences, start=1):
            length = LENGTHS[sequence]
            index[row, at : at + length] = np.arange(starts[sequence], starts[sequence] + length)
            segments[row, at : at + length] = segment
            at += length
    return index, segments


@functools.cache
def per_token():
    rng = np.random.default_rng(0)
    names = ("behaviour", "reference", "proximal", "advantages", "entropy", "old_values", "returns", "values")
    values = {name: rng.normal(size=TOTAL).astype(np.float32) for name in names}
    for name in ("behaviour", "reference", "proximal"):
        values[name] = -np.abs(values[name]) - 0.2
    target = values["behaviour"] + 0.3 * rng.normal(size=TOTAL).astype(np.float32)
    mask, lag = rng.random(TOTAL) < 0.7, rng.integers(0, 4, TOTAL)
    mask[9:14] = False  # a whole sequence with nothing to train on
    return target, values, mask, lag


def loss_and_gradient(config, layout, num_parts):
    """Of the step, cut into parts of rows, by token."""
    target, values, mask, lag = per_token()
    index, segments = arranged(layout)

    def place(array, fill):
        return jnp.where(index >= 0, jnp.asarray(array)[index], fill)

    mask_BT = place(mask, False)
    counts = Counts(jnp.sum(mask_BT, dtype=jnp.float32), count_sequences(mask_BT, segments), 8.0)

    def loss(theta, rows):
        given = {name: place(array, jnp.nan)[rows] for name, array in values.items()}
        critic = CriticTokens(*(given.pop(name) for name in ("values", "old_values", "returns")))
        tokens = Tokens(
            target=place(theta, jnp.nan)[rows],
            loss_mask=mask_BT[rows],
            segment_ids=jnp.asarray(segments)[rows],
            token_lag=place(lag, 0)[rows],
            critic=critic,
            **given,
        )
        return step_loss(config, tokens, counts, 0.3)

    total, gradient, sums = 0.0, 0.0, []
    for rows in np.array_split(np.arange(len(index)), num_parts):
        (part, (own, _)), slope = jax.value_and_grad(loss, has_aux=True)(jnp.asarray(target), rows)
        total, gradient = total + part, gradient + slope
        sums.append(own)
    return total, gradient, jax.tree.map(lambda *parts: sum(parts), *sums)


VARIANTS = {
    "ppo": {"loss": "ppo", "dual_clip": 3.0},
    "gspo": {"loss": "gspo"},
    "cispo": {"loss": "cispo"},
    "reinforce": {"loss": "reinforce", "correction": "importance", "weight_bound": "truncate"},
    "decoupled": {"correction": "decoupled", "weight_level": "sequence", "weight_bound": "mask", "weight_cap": 3.0},
    "interpolated": {"correction": "interpolated", "weight_level": "geometric", "weight_bound": "truncate"},
}


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
@pytest.mark.parametrize("variant", VARIANTS)
def test_loss_01_no_objective_depends_on_packing_row_order_padding_or_microbatches(variant, aggregation):
    """LOSS-01, LOSS-02, LOSS-12, TOK-07. With KL, entropy bonus and values in it; padding is NaN."""
    settings = VARIANTS[variant] | {"aggregation": aggregation, "entropy_coefficient": 0.1}
    config = tiny_config(**{f"objective.{name}": value for name, value in settings.items()}).learner
    loss, gradient, sums = loss_and_gradient(config, PLAIN, 1)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()
    assert gradient.any()
    assert not gradient[~per_token()[2]].any()
    other_loss, other_gradient, other_sums = loss_and_gradient(config, PACKED, 3)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    np.testing.assert_allclose(other_gradient, gradient, atol=1e-6)
    for name, value, other in zip(sums._fields, sums, other_sums, strict=True):
        np.testing.assert_allclose(other, value, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("aggregation", "loss"), [("token_mean", 2.0), ("sequence_mean", 3.5), ("constant", 0.625)])
def test_loss_01_the_aggregation_that_the_config_names_is_the_one_in_the_loss(aggregation, loss):
    """LOSS-01. Four tokens of loss 1 in one sequence, one of loss 6 in another; constant length 8."""
    settings = ObjectiveConfig(loss="reinforce", correction="none", aggregation=aggregation)
    target, segments = jnp.array([[-1.0, -1.0, -1.0, -1.0, -6.0, 5.0]]), jnp.array([[1, 1, 1, 1, 2, 0]])
    ones, mask = jnp.ones((1, 6)), segments > 0
    tokens = Tokens(target, ones, target, ones, mask, segments, jnp.zeros((1, 6), jnp.int32))
    counts = Counts(jnp.sum(mask, dtype=jnp.float32), count_sequences(mask, segments), 8.0)
    found, (sums, _) = step_loss(LearnerConfig(objective=settings), tokens, counts, 0.0)
    np.testing.assert_allclose([found, sums.policy_loss], loss, rtol=1e-6)


def test_a_token_of_another_policy_is_weighed_to_the_policy_trained_and_has_no_lag():
    """Behaviour log(1/16), target −0.1: e^2.67, of which the cap of 2 is left. Beside it a token of lag 2."""
    objective = ObjectiveConfig(correction="interpolated", weight_bound="truncate", weight_cap=2.0)
    target, behaviour = jnp.array([[-0.1, -0.5]]), jnp.array([[-math.log(16), -0.5]])
    ones = jnp.ones((1, 2))
    tokens = Tokens(
        target=target,
        entropy=ones,
        behaviour=behaviour,
        advantages=ones,
        loss_mask=ones > 0,
        segment_ids=jnp.array([[1, 2]]),
        token_lag=jnp.array([[0, 2]]),
        explored=jnp.array([[True, False]]),
    )
    loss, (sums, _) = step_loss(LearnerConfig(objective=objective), tokens, Counts(2.0, 2.0, 8.0), 0.0)
    np.testing.assert_allclose(loss, -(2.0 + 1.0) / 2, rtol=1e-6)
    assert (float(sums.tokens_lag0), float(sums.gap_lag0), float(sums.lag)) == (0.0, 0.0, 2.0)
    assert sums.by_lag[:, 0].tolist() == [0.0] * 4
    unmarked, _ = step_loss(
        LearnerConfig(objective=objective), tokens._replace(explored=None), Counts(2.0, 2.0, 8.0), 0.0
    )
    assert abs(unmarked - loss) > 0.1, "at lag 0 the sampler's policy would be taken for the one trained"


def one_token(**settings):
    """Log-probs behaviour −1.2, proximal −1.0, target −0.9, advantage 1; nothing else in the loss."""
    config = LearnerConfig(objective=ObjectiveConfig(**settings))
    ones = jnp.ones((1, 1))
    tokens = Tokens(
        target=-0.9 * ones,
        entropy=ones,
        behaviour=-1.2 * ones,
        advantages=ones,
        loss_mask=ones > 0,
        segment_ids=jnp.ones((1, 1), jnp.int32),
        token_lag=jnp.full((1, 1), 3),
        proximal=-1.0 * ones,
    )
    return step_loss(config, tokens, Counts(1.0, 1.0, 8.0), 0.0)[0]


@pytest.mark.parametrize(
    ("settings", "loss"),
    [
        ({}, -1.2),  # ratio e^0.3, clipped
        ({"clip_range_high": 0.5}, -np.exp(0.3)),
        ({"correction": "decoupled"}, -1.349859),  # LOSS-14
        ({"correction": "interpolated"}, -np.exp(0.3)),  # proximal −1.0 at lag 3
        ({"correction": "decoupled", "weight_bound": "truncate", "weight_cap": 1.1}, -1.1 * np.exp(0.1)),
        ({"correction": "none"}, -1.0),
        ({"loss": "reinforce", "correction": "importance"}, 0.9 * np.exp(0.3)),
        ({"loss": "reinforce", "correction": "none"}, 0.9),
        ({"loss": "cispo"}, 0.9 * 1.2),
        ({"entropy_coefficient": 0.5}, -1.7),
    ],
)
def test_loss_14_the_correction_that_the_config_names_is_the_one_in_the_loss(settings, loss):
    """LOSS-14."""
    np.testing.assert_allclose(one_token(**settings), loss, rtol=1e-5)


def test_absent_behaviour_logprobs_count_as_those_of_the_weights_before_the_update():
    with_them = one_token(correction="none")
    assert one_token(correction="none", behaviour_logprobs="absent") == with_them == -1.0
