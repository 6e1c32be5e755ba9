"""Numbers worked out by hand; the case ids are those of the acceptance list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.aggregation import masked_mean
from asyncrl_jax.learner.importance import importance_weights, interpolated_proximal
from asyncrl_jax.learner.policy_losses import cispo_terms, gspo_terms, ppo_terms, reinforce_terms

CLIP = (0.2, 0.2)


def row(*values):
    return jnp.array([values], jnp.float32)


def ones(like):
    return jnp.ones(like.shape, bool)


def ppo(target, proximal, advantages, mask=None, **options):
    mask = ones(target) if mask is None else mask
    given = {"clip_range": CLIP} | options
    return ppo_terms(target_logprobs=target, proximal_logprobs=proximal, advantages=advantages, loss_mask=mask, **given)


def ppo_loss(target, proximal, advantages, mask=None, denominator=1.0, **options):
    mask = ones(target) if mask is None else mask
    return masked_mean(ppo(target, proximal, advantages, mask, **options).loss, mask, denominator)


def random_tokens(seed=0, shape=(3, 5)):
    rng = np.random.default_rng(seed)
    target, behaviour = (-3 * rng.random(shape, np.float32) for _ in range(2))
    return target, behaviour, rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.6


def numpy_ppo_loss(target, behaviour, advantages, mask):
    """The equation, token by token."""
    total = 0.0
    for t, b, a, m in zip(target.flat, behaviour.flat, advantages.flat, mask.flat, strict=True):
        if m:
            ratio = np.exp(float(t) - float(b))
            total -= min(ratio * a, np.clip(ratio, 1 - CLIP[0], 1 + CLIP[1]) * a)
    return total


def test_ppo_equals_the_equation_token_by_token():
    target, behaviour, advantages, mask = random_tokens()
    expected = numpy_ppo_loss(target, behaviour, advantages, mask) / 7
    np.testing.assert_allclose(ppo_loss(target, behaviour, advantages, mask, 7.0), expected, rtol=1e-5)


@pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, 0.3), (-1.0, -0.3), (1.0, -0.3), (-1.0, 0.3)])
def test_clipping_takes_the_gradient_only_where_it_would_go_on_outwards(advantage, log_ratio):
    outwards = advantage * log_ratio > 0
    target, behaviour, advantages = row(-1.0 + log_ratio), row(-1.0), row(advantage)
    gradient = jax.grad(ppo_loss)(target, behaviour, advantages)
    np.testing.assert_allclose(gradient, row(0.0 if outwards else -advantage * np.exp(log_ratio)), rtol=1e-5)
    assert ppo(target, behaviour, advantages).clipped == outwards


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss"), [(1.5, 1.0, -1.4), (1.3, 1.0, -1.3), (0.5, -1.0, 0.9), (0.95, -1.0, 0.95)]
)
def test_the_clip_range_may_be_wider_upwards(ratio, advantage, loss):
    """(0.1, 0.4): from 0.9 to 1.4."""
    terms = ppo(row(np.log(ratio)), row(0.0), row(advantage), clip_range=(0.1, 0.4))
    np.testing.assert_allclose(terms.loss, row(loss), rtol=1e-5)


@pytest.mark.parametrize(("ratio", "loss", "gradient"), [(2.0, 2.0, 2.0), (5.0, 3.0, 0.0)])
def test_dual_clip_bounds_the_loss_of_a_bad_token_that_became_likely(ratio, loss, gradient):
    """A = −1, c = 3: PPO alone has no bound here."""
    value, slope = jax.value_and_grad(ppo_loss)(row(np.log(ratio)), row(0.0), row(-1.0), dual_clip=3.0)
    np.testing.assert_allclose([value, slope[0, 0]], [loss, gradient], rtol=1e-5)
    assert ppo_loss(row(np.log(5.0)), row(0.0), row(-1.0)) > 4.9


@pytest.mark.parametrize(("target", "expected"), [(-0.9, -np.exp(0.3)), (-0.7, -1.2 * np.exp(0.2))])
def test_loss_14_with_a_proximal_policy_the_ratio_is_to_it_and_the_weight_to_behaviour(target, expected):
    """LOSS-14. Behaviour −1.2, proximal −1.0."""
    behaviour, proximal, one = row(-1.2), row(-1.0), jnp.ones((1, 1), jnp.int32)
    weights = importance_weights(
        proximal_logprobs=proximal, behaviour_logprobs=behaviour, loss_mask=ones(proximal), segment_ids=one
    )
    loss = ppo_loss(row(target), proximal, row(1.0), weights=weights.weight)
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


def test_loss_14_the_interpolated_proximal_policy_is_one_update_behind():
    """LOSS-14. At lag 3 two thirds of the way from behaviour to target; at lag 0 and 1 it is the behaviour policy."""
    proximal = interpolated_proximal(
        target_logprobs=row(-1.0, -1.0, -1.0),
        behaviour_logprobs=row(-4.0, -4.0, -4.0),
        token_lag=jnp.array([[0, 1, 3]]),
    )
    np.testing.assert_allclose(proximal, row(-4.0, -4.0, -2.0), rtol=1e-6)
    slope = jax.grad(
        lambda target: interpolated_proximal(
            target_logprobs=target, behaviour_logprobs=row(-4.0), token_lag=jnp.array([[3]])
        ).sum()
    )(row(-1.0))
    assert slope == 0


def test_gspo_has_one_ratio_a_sequence():
    """Two sequences in a row, log-ratios (0.1, 0.3) and (−0.2): exp of the means 0.2 and −0.2; padding in none."""
    target, mask = row(0.1, 0.3, -0.2, 9.0), jnp.array([[True, True, True, False]])
    segments, advantages = jnp.array([[1, 1, 2, 0]]), row(1.0, 1.0, 1.0, 1.0)

    def terms(target, clip_range=(0.5, 0.5)):
        return gspo_terms(
            target_logprobs=target,
            proximal_logprobs=jnp.zeros((1, 4)),
            advantages=advantages,
            loss_mask=mask,
            segment_ids=segments,
            clip_range=clip_range,
        )

    expected = np.exp([0.2, 0.2, -0.2])
    np.testing.assert_allclose(terms(target).ratio, row(*expected, 0.0), rtol=1e-6)
    gradient = jax.grad(lambda target: terms(target).loss.sum())(target)
    np.testing.assert_allclose(
        gradient, -row(*expected, 0.0), rtol=1e-5
    )  # two tokens share one ratio: d mean = 1/2 each
    assert terms(target, (0.1, 0.1)).clipped.tolist() == [[1, 1, 0, 0]]


def test_cispo_keeps_the_gradient_of_clipped_tokens():
    """Ratios 3 and 0.1, held at 1.2 and, with ε_low = 1, not from below."""

    def loss(target):
        terms = cispo_terms(
            target_logprobs=target,
            proximal_logprobs=row(-1.0, -1.0),
            advantages=row(1.0, 2.0),
            loss_mask=ones(target),
            clip_range=(1.0, 0.2),
        )
        return terms.loss.sum(), terms

    target = row(-1.0 + np.log(3.0), -1.0 + np.log(0.1))
    (value, terms), gradient = jax.value_and_grad(loss, has_aux=True)(target)
    np.testing.assert_allclose(gradient, row(-1.2, -0.2), rtol=1e-5)
    np.testing.assert_allclose(value, -(1.2 * target[0, 0] + 0.2 * target[0, 1]), rtol=1e-5)
    assert terms.clipped.tolist() == [[1.0, 0.0]]


def test_the_gradient_of_reinforce_is_that_of_the_expected_reward():
    """Enumerated over three actions, sampled off policy and weighted by target ÷ behaviour."""
    logits, behaviour = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.array([0.2, 0.3, 0.5])
    rewards = row(1.0, 0.0, -2.0)

    def expected_loss(logits):
        target = jax.nn.log_softmax(logits)[None]
        mask, segments = ones(target), jnp.ones((1, 3), jnp.int32)
        weights = importance_weights(
            proximal_logprobs=target, behaviour_logprobs=jnp.log(behaviour)[None], loss_mask=mask, segment_ids=segments
        )
        terms = reinforce_terms(target_logprobs=target, advantages=rewards, loss_mask=mask, weights=weights.weight)
        return jnp.sum(behaviour * terms.loss[0])

    true = jax.grad(lambda logits: -jnp.sum(jax.nn.softmax(logits) * rewards[0]))(logits)
    np.testing.assert_allclose(jax.grad(expected_loss)(logits), true, atol=1e-6)


ALL = {
    "ppo": lambda target, other, segments, **given: ppo_terms(
        target_logprobs=target, proximal_logprobs=other, clip_range=CLIP, dual_clip=3.0, **given
    ),
    "gspo": lambda target, other, segments, **given: gspo_terms(
        target_logprobs=target, proximal_logprobs=other, clip_range=CLIP, segment_ids=segments, **given
    ),
    "cispo": lambda target, other, segments, **given: cispo_terms(
        target_logprobs=target, proximal_logprobs=other, clip_range=CLIP, **given
    ),
    "reinforce": lambda target, other, segments, **given: reinforce_terms(target_logprobs=target, **given),
}


@pytest.mark.parametrize("poison", [-np.inf, np.inf, np.nan, -1e30])
@pytest.mark.parametrize("name", ALL)
def test_loss_04_a_masked_token_of_any_value_leaks_into_no_gradient(name, poison):
    """LOSS-04, TOK-03. Proximal log-prob, advantage and target of a token outside the mask, in the same sequence."""
    mask, segments = jnp.array([[True, False]]), jnp.ones((1, 2), jnp.int32)

    def loss(target, poison):
        other, advantages = row(-1.2, poison), row(1.0, poison)
        return ALL[name](target, other, segments, advantages=advantages, loss_mask=mask).loss.sum()

    value, gradient = jax.value_and_grad(loss)(row(-1.0, -1.0), poison)
    clean, of_clean = jax.value_and_grad(loss)(row(-1.0, -1.0), 0.0)
    assert value == clean
    np.testing.assert_array_equal(gradient, of_clean)
    assert np.isfinite(gradient).all()
    value, gradient = jax.value_and_grad(loss)(row(-1.0, poison), 0.0)
    assert value == clean
    np.testing.assert_array_equal(gradient, of_clean)


@pytest.mark.parametrize("name", ALL)
def test_loss_10_no_objective_overflows(name):
    """LOSS-10. exp(299) is infinite in float32; bounding it afterwards would leave a NaN gradient."""

    def loss(target):
        given = {"advantages": row(-1.0), "loss_mask": ones(target)}
        return ALL[name](target, row(-300.0), jnp.ones((1, 1), jnp.int32), **given).loss.sum()

    value, gradient = jax.value_and_grad(loss)(row(-1.0))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


def test_ranks_and_shapes_are_asserted():
    with pytest.raises(AssertionError):
        ppo(jnp.zeros(3), jnp.zeros(3), jnp.zeros(3), jnp.ones(3, bool))
    with pytest.raises(AssertionError):
        ppo(jnp.zeros((1, 3)), jnp.zeros((1, 3)), jnp.zeros((1, 2)), jnp.ones((1, 3), bool))
