import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.importance import LOG_RATIO_LIMIT, importance_weights

SEGMENTS = jnp.array([[1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 2]])
MASK = SEGMENTS > 0


def weights(log_ratios, **options):
    log_ratios = jnp.asarray([log_ratios], jnp.float32)
    segments = options.pop("segments", jnp.ones(log_ratios.shape, jnp.int32))
    return importance_weights(
        proximal_logprobs=log_ratios - 3.0,
        behaviour_logprobs=jnp.full(log_ratios.shape, -3.0),
        loss_mask=options.pop("mask", segments > 0),
        segment_ids=segments,
        **options,
    )


def test_mis_08_truncation_caps_from_above_and_leaves_small_weights():
    """MIS-08. ln 3 with cap 2 has weight 2, −ln 2 has 0.5; one of two was bounded."""
    found = weights([np.log(3), -np.log(2)], bound="truncate", cap=2.0)
    np.testing.assert_allclose(found.weight, [[2.0, 0.5]], rtol=1e-6)
    assert found.bounded.tolist() == [[1, 0]]


def test_mis_08_a_mask_takes_out_what_is_outside_of_its_bounds_on_either_side():
    """MIS-08. IcePop's band from 0.5 to 5: the rest keeps its weight as it is."""
    found = weights(np.log([3.0, 6.0, 0.4, 0.6]), bound="mask", floor=0.5, cap=5.0)
    np.testing.assert_allclose(found.weight, [[3.0, 0.0, 0.0, 0.6]], rtol=1e-5)
    assert found.bounded.tolist() == [[0, 1, 1, 0]]


TWENTY = [0.0] * 9 + [20.0] + [0.1, 0.1]  # ten tokens, one of them far out, and a second sequence of two


@pytest.mark.parametrize(
    ("level", "bound", "first", "last_of_first", "second"),
    [
        ("token", "truncate", 1.0, 2.0, np.exp(0.1)),
        ("token", "mask", 1.0, 0.0, np.exp(0.1)),
        ("sequence", "truncate", 2.0, 2.0, np.exp(0.2)),
        ("sequence", "mask", 0.0, 0.0, np.exp(0.2)),
        ("geometric", "truncate", 2.0, 2.0, np.exp(0.1)),  # mean 2
        ("geometric", "mask", 0.0, 0.0, np.exp(0.1)),
    ],
)
def test_mis_08_one_token_of_plus_20_costs_itself_or_its_sequence_as_the_level_says(
    level, bound, first, last_of_first, second
):
    """MIS-08. And what was bounded is counted: the token, or all ten of its sequence."""
    found = weights(TWENTY, segments=SEGMENTS, level=level, bound=bound, cap=2.0)
    expected = np.array([[first] * 9 + [last_of_first] + [second] * 2])
    np.testing.assert_allclose(found.weight, expected, rtol=1e-5)
    assert found.bounded.sum() == (1 if level == "token" else 10)


def test_unbounded_weights_are_the_ratio_within_the_limit_of_exp():
    found = weights(TWENTY, segments=SEGMENTS)
    np.testing.assert_allclose(found.weight[0, 9], np.exp(LOG_RATIO_LIMIT), rtol=1e-6)
    assert found.bounded.sum() == 0


@pytest.mark.parametrize("level", ["token", "sequence", "geometric"])
def test_a_masked_token_is_in_no_weight(level):
    mask = MASK.at[0, 9].set(False)
    found = weights(TWENTY, segments=SEGMENTS, mask=mask, level=level, bound="mask", cap=2.0)
    assert found.weight[0, :9].tolist() == [1.0] * 9
    assert found.weight[0, 9] == 0
    poisoned = weights([*TWENTY[:9], np.nan, *TWENTY[10:]], segments=SEGMENTS, mask=mask, level=level)
    assert np.isfinite(poisoned.weight).all()


def test_no_gradient_flows_through_a_weight():
    def total(proximal):
        one = jnp.ones((1, 1), jnp.int32)
        return importance_weights(
            proximal_logprobs=proximal, behaviour_logprobs=jnp.zeros((1, 1)), loss_mask=one > 0, segment_ids=one
        ).weight.sum()

    assert jax.grad(total)(jnp.full((1, 1), -0.5)) == 0


@pytest.mark.parametrize("bad", [{"level": "row"}, {"bound": "clip"}])
def test_an_unknown_level_or_bound_is_refused(bad):
    with pytest.raises(ValueError, match="use one of"):
        weights([0.0], **bad)
