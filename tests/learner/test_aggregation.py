import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.aggregation import (
    count_sequences,
    masked_mean,
    sequence_sums,
    token_weights,
    weighted_sum,
    whiten,
)

LOSSES = jnp.array([[1.0, 1.0, 1.0, 1.0, 6.0, 0.0]])
SEGMENTS = jnp.array([[1, 1, 1, 1, 2, 0]])
MASK = SEGMENTS > 0


def weights(aggregation, mask=MASK, segments=SEGMENTS, whole=None):
    whole_mask, whole_segments = whole or (mask, segments)
    return token_weights(
        loss_mask=mask,
        segment_ids=segments,
        aggregation=aggregation,
        num_tokens=jnp.sum(whole_mask, dtype=jnp.float32),
        num_sequences=count_sequences(whole_mask, whole_segments),
        constant_length=8.0,
    )


@pytest.mark.parametrize(("aggregation", "value"), [("token_mean", 2.0), ("sequence_mean", 3.5), ("constant", 0.625)])
def test_loss_01_the_three_means_do_not_depend_on_the_split(aggregation, value):
    """LOSS-01. Four tokens of loss 1, one of loss 6: in one row, in two rows of either order, in two microbatches."""
    whole = weights(aggregation)
    np.testing.assert_allclose(weighted_sum(LOSSES, whole), value, rtol=1e-6)
    a, b = jnp.array([[1.0, 1.0, 1.0, 1.0]]), jnp.array([[6.0, 0.0, 0.0, 0.0]])
    mask_a, mask_b = jnp.ones((1, 4), bool), jnp.array([[True, False, False, False]])
    for pair in ([(a, mask_a), (b, mask_b)], [(b, mask_b), (a, mask_a)]):
        losses, masks = (jnp.concatenate(part) for part in zip(*pair, strict=True))
        rows = masks.astype(jnp.int32)
        together = weighted_sum(losses, weights(aggregation, masks, rows))
        np.testing.assert_allclose(together, value, rtol=1e-6)
        parts = [
            jax.value_and_grad(lambda x, w: weighted_sum(x, w))(
                part, weights(aggregation, mask, mask.astype(jnp.int32), whole=(masks, rows))
            )
            for part, mask in pair
        ]
        np.testing.assert_allclose(sum(part for part, _ in parts), value, rtol=1e-6)
        gradients = np.concatenate([gradient for _, gradient in parts])
        np.testing.assert_allclose(np.sort(gradients[gradients > 0]), np.sort(whole[MASK]), rtol=1e-6)


def test_loss_02_what_the_mask_leaves_out_is_in_no_denominator():
    """LOSS-02. Two sequences of ten tokens with loss 1, the second masked: 1.0 and not 0.5."""
    mask = jnp.array([[True] * 10, [False] * 10])
    segments = jnp.ones((2, 10), jnp.int32)
    for aggregation in ("token_mean", "sequence_mean"):
        assert weighted_sum(jnp.ones((2, 10)), weights(aggregation, mask, segments)) == pytest.approx(1.0)
    perturbed = jnp.ones((2, 10)).at[1].set(jnp.nan)
    assert weighted_sum(perturbed, weights("token_mean", mask, segments)) == pytest.approx(1.0)


@pytest.mark.parametrize("aggregation", ["token_mean", "sequence_mean", "constant"])
def test_loss_03_with_everything_masked_value_and_gradient_are_zero(aggregation):
    """LOSS-03."""
    mask = jnp.zeros((1, 6), bool)
    value, gradient = jax.value_and_grad(weighted_sum)(LOSSES, weights(aggregation, mask))
    assert value == 0
    np.testing.assert_array_equal(gradient, np.zeros((1, 6)))
    assert masked_mean(LOSSES, mask, 0.0) == 0
    np.testing.assert_array_equal(whiten(LOSSES, mask), np.zeros((1, 6)))


@pytest.mark.parametrize("length", [4, 64])
def test_loss_07_whitening_counts_only_the_mask(length):
    """LOSS-07. Mean 1.4 and variance 0.64 of five values, whatever the padding; counting padding gives 2.2208."""
    values, mask = np.zeros((2, length), np.float32), np.zeros((2, length), bool)
    values[0, :4], values[1, 0], mask[0, :4], mask[1, 0] = 1.0, 3.0, True, True
    values[~mask] = 7.0
    found = whiten(jnp.asarray(values), jnp.asarray(mask))
    np.testing.assert_allclose(found[mask], [-0.5, -0.5, -0.5, -0.5, 2.0], rtol=1e-5)
    assert not found[~mask].any()


def test_loss_06_whitening_of_equal_values_gives_exactly_zero():
    """LOSS-06."""
    found = whiten(jnp.full((1, 7), 0.7), jnp.ones((1, 7), bool))
    np.testing.assert_array_equal(found, np.zeros((1, 7), np.float32))


def test_sums_are_over_the_own_sequence():
    sums = sequence_sums(jnp.array([[1.0, 2.0, 4.0], [8.0, 16.0, 32.0]]), jnp.array([[1, 1, 2], [3, 0, 3]]))
    assert sums.tolist() == [[3, 3, 4], [40, 16, 40]]


def test_a_sequence_counts_when_a_token_of_it_does():
    mask = jnp.array([[True, False, False, True], [False, True, True, False]])
    assert count_sequences(mask, jnp.array([[1, 1, 2, 3], [1, 2, 2, 0]])) == 3


def test_an_unknown_aggregation_is_refused():
    with pytest.raises(ValueError, match="token_mean"):
        weights("mean")
