import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.importance import LOG_RATIO_LIMIT
from asyncrl_jax.learner.kl import adapted_coefficient, kl_estimate, kl_loss_terms

PI, Q = jnp.array([0.5, 0.3, 0.2]), jnp.array([0.2, 0.5, 0.3])
TRUE_KL, TRUE_GRADIENT = 0.2238047, [0.346243, -0.2203891, -0.125854]


def row(*values):
    return jnp.array([values], jnp.float32)


def estimate(estimator, target, reference):
    mask = jnp.ones(target.shape, bool)
    return kl_estimate(target_logprobs=target, reference_logprobs=reference, loss_mask=mask, estimator=estimator)


def loss_terms(target, behaviour, reference, mask=None, **options):
    mask = jnp.ones(target.shape, bool) if mask is None else mask
    return kl_loss_terms(
        target_logprobs=target, behaviour_logprobs=behaviour, reference_logprobs=reference, loss_mask=mask, **options
    )


@pytest.mark.parametrize(
    ("estimator", "value", "slope"), [("k1", 0.5, 1.0), ("k2", 0.125, 0.5), ("k3", 0.1065307, 0.3934693)]
)
def test_loss_10_the_log_ratio_is_bounded_before_exp(estimator, value, slope):
    """LOSS-10. At target −200, reference −1, exp(199) overflows; clamping afterwards leaves a NaN gradient."""
    found = jax.value_and_grad(lambda target: estimate(estimator, target, row(-1.5))[0, 0])(row(-1.0))
    np.testing.assert_allclose([found[0], found[1][0, 0]], [value, slope], rtol=1e-5)
    found = jax.value_and_grad(lambda target: estimate(estimator, target, row(-1.0))[0, 0])(row(-200.0))
    assert np.isfinite(found[0])
    assert np.isfinite(found[1]).all()
    if estimator == "k3":
        np.testing.assert_allclose(found[0], np.exp(LOG_RATIO_LIMIT) - 1 - LOG_RATIO_LIMIT, rtol=1e-5)


@pytest.mark.parametrize(
    ("estimator", "value", "gradient"),
    [("k1", TRUE_KL, [0, 0, 0]), ("k2", 0.2654788, TRUE_GRADIENT), ("k3", TRUE_KL, [0.3, -0.2, -0.1])],
)
def test_loss_11_what_each_estimator_would_do_as_a_plain_loss(estimator, value, gradient):
    """LOSS-11. Enumerated: mean of the estimate, and mean of its gradient, for tokens of the target itself."""

    def mean_of_estimates(logits):
        return jnp.sum(PI * estimate(estimator, jax.nn.log_softmax(logits)[None], jnp.log(Q)[None])[0])

    found = jax.value_and_grad(mean_of_estimates)(jnp.log(PI))
    np.testing.assert_allclose(found[0], value, rtol=1e-5)
    np.testing.assert_allclose(found[1], gradient, atol=1e-6)


@pytest.mark.parametrize("behaviour", [[0.5, 0.3, 0.2], [0.4, 0.25, 0.35]])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_loss_11_as_used_here_every_estimator_has_the_gradient_of_the_kl(estimator, behaviour):
    """LOSS-11. Sampled on and off policy, weighted by target ÷ behaviour."""
    behaviour = jnp.array(behaviour)

    def expected_term(logits):
        terms = loss_terms(
            jax.nn.log_softmax(logits)[None], jnp.log(behaviour)[None], jnp.log(Q)[None], estimator=estimator
        )
        return jnp.sum(behaviour * terms[0])

    value, gradient = jax.value_and_grad(expected_term)(jnp.log(PI))
    np.testing.assert_allclose(value, 0.2654788 if estimator == "k2" else TRUE_KL, rtol=1e-5)
    np.testing.assert_allclose(gradient, TRUE_GRADIENT, atol=1e-5)


def test_loss_11_as_a_reward_k1_has_the_gradient_of_the_kl():
    """LOSS-11. E[∇ log π · k1], which is what subtracting it from the reward makes of it."""

    def surrogate(logits):
        target = jax.nn.log_softmax(logits)[None]
        return jnp.sum(PI * target[0] * jax.lax.stop_gradient(estimate("k1", target, jnp.log(Q)[None])[0]))

    np.testing.assert_allclose(jax.grad(surrogate)(jnp.log(PI)), TRUE_GRADIENT, atol=1e-6)


def test_loss_12_the_kl_is_linear_in_its_coefficient_and_blind_to_masked_positions():
    """LOSS-12."""
    rng = np.random.default_rng(0)
    target, behaviour, reference = (-3 * rng.random((3, 5), np.float32) for _ in range(3))
    mask = rng.random((3, 5)) < 0.6
    terms = loss_terms(target, behaviour, reference, mask)
    ratios, d = np.minimum(np.exp(target - behaviour), 2.0), reference - target
    np.testing.assert_allclose(terms, np.where(mask, ratios * (np.exp(d) - 1 - d), 0), rtol=1e-5, atol=1e-7)
    np.testing.assert_array_equal(loss_terms(target, behaviour, np.where(mask, reference, 50.0), mask), terms)


def test_mis_08_the_importance_weight_of_the_kl_is_truncated():
    """MIS-08. Log-ratio ln 3 has weight 2, −ln 2 has weight 0.5."""
    target, reference = row(-1.0, -1.0), row(-2.0, -2.0)
    terms = loss_terms(target, row(-1.0 - np.log(3), -1.0 + np.log(2)), reference)
    np.testing.assert_allclose(terms / estimate("k3", target, reference), [[2.0, 0.5]], rtol=1e-5)


@pytest.mark.parametrize("poison", [-np.inf, np.inf, np.nan])
@pytest.mark.parametrize("estimator", ["k1", "k2", "k3"])
def test_loss_04_a_masked_token_leaks_into_no_gradient_of_the_kl(estimator, poison):
    """LOSS-04, TOK-03."""
    mask = jnp.array([[True, False]])

    def loss(target):
        return loss_terms(target, row(-1.2, poison), row(-1.1, poison), mask, estimator=estimator).sum()

    value, gradient = jax.value_and_grad(loss)(row(-1.0, poison))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    assert gradient[0, 1] == 0


@pytest.mark.parametrize(("measured", "expected"), [(0.05, 1.0), (0.055, 1.01), (1.0, 1.02), (0.0, 0.98)])
def test_the_coefficient_moves_towards_the_target_by_bounded_steps(measured, expected):
    """Target 0.05, rate 0.1: +10 % of it gives +1 %; no error gives more than 2 %."""
    found = adapted_coefficient(1.0, measured=measured, target=0.05, rate=0.1)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
