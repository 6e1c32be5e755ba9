"""Numbers worked out by hand or by enumeration; the case ids are those of the acceptance list."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.losses import (
    LOG_RATIO_LIMIT,
    clipped_policy_terms,
    k3_kl,
    kl_terms,
    masked_mean,
    switch_balance_loss,
    token_logprobs,
)

CLIP = 0.2


def row(*values):
    return jnp.array([values], jnp.float32)


def policy_loss(target, behaviour, advantages, mask, denominator=1.0, proximal=None):
    terms = clipped_policy_terms(
        target_logprobs=target,
        behaviour_logprobs=behaviour,
        advantages=advantages,
        loss_mask=mask,
        clip_range=CLIP,
        proximal_logprobs=proximal,
    )
    return masked_mean(terms.loss, mask, denominator)


def kl_loss(target, behaviour, reference, mask, denominator=1.0, **options):
    terms = kl_terms(
        target_logprobs=target, behaviour_logprobs=behaviour, reference_logprobs=reference, loss_mask=mask, **options
    )
    return masked_mean(terms, mask, denominator)


def numpy_policy_loss(target, behaviour, advantages, mask):
    """The equation, token by token."""
    total = 0.0
    for t, b, a, m in zip(target.flat, behaviour.flat, advantages.flat, mask.flat, strict=True):
        if m:
            ratio = np.exp(float(t) - float(b))
            total -= min(ratio * a, np.clip(ratio, 1 - CLIP, 1 + CLIP) * a)
    return total


def random_tokens(seed=0, shape=(3, 5)):
    rng = np.random.default_rng(seed)
    target, behaviour, reference = (-3 * rng.random(shape, np.float32) for _ in range(3))
    return target, behaviour, reference, rng.normal(size=shape).astype(np.float32), rng.random(shape) < 0.6


def test_the_loss_equals_the_equation_token_by_token():
    target, behaviour, _, advantages, mask = random_tokens()
    expected = numpy_policy_loss(target, behaviour, advantages, mask) / 7
    np.testing.assert_allclose(policy_loss(target, behaviour, advantages, mask, 7.0), expected, rtol=1e-5)


@pytest.mark.parametrize(("advantage", "log_ratio"), [(1.0, 0.3), (-1.0, -0.3), (1.0, -0.3), (-1.0, 0.3)])
def test_clipping_takes_the_gradient_only_where_it_would_go_on_outwards(advantage, log_ratio):
    outwards = advantage * log_ratio > 0
    args = row(-1.0), row(advantage), jnp.ones((1, 1), bool)
    gradient = jax.grad(lambda target: policy_loss(target, *args))(row(-1.0 + log_ratio))
    np.testing.assert_allclose(gradient, row(0.0 if outwards else -advantage * np.exp(log_ratio)), rtol=1e-5)
    terms = clipped_policy_terms(
        target_logprobs=row(-1.0 + log_ratio),
        behaviour_logprobs=args[0],
        advantages=args[1],
        loss_mask=args[2],
        clip_range=CLIP,
    )
    assert terms.clipped == outwards


def test_loss_01_token_mean_does_not_depend_on_the_split():
    """LOSS-01. Four tokens of loss 1 and one of loss 6: 2.0, not the mean of means 3.5."""
    a, b = row(-1.0, -1.0, -1.0, -1.0), row(-6.0)
    ones_a, ones_b = jnp.ones(a.shape, bool), jnp.ones(b.shape, bool)
    parts = [policy_loss(jnp.zeros_like(x), jnp.zeros_like(x), x, m, 5.0) for x, m in [(a, ones_a), (b, ones_b)]]
    assert sum(parts) == pytest.approx(2.0)


def test_loss_02_what_the_mask_leaves_out_is_in_no_denominator_and_changes_nothing():
    """LOSS-02. Two rows of ten tokens with loss 1; the second is masked."""
    mask = jnp.array([[True] * 10, [False] * 10])
    advantages = -jnp.ones((2, 10))

    def loss(target):
        return policy_loss(target, jnp.zeros((2, 10)), advantages, mask, jnp.sum(mask))

    value, gradient = jax.value_and_grad(loss)(jnp.zeros((2, 10)))
    assert value == 1.0
    perturbed, of_perturbed = jax.value_and_grad(loss)(jnp.zeros((2, 10)).at[1].set(-7.0))
    assert perturbed == value
    np.testing.assert_array_equal(of_perturbed, gradient)


def test_loss_03_with_everything_masked_loss_and_gradient_are_zero():
    """LOSS-03."""
    target, behaviour, reference, advantages, _ = random_tokens()
    mask = jnp.zeros(target.shape, bool)

    def loss(target):
        count = jnp.sum(mask, dtype=jnp.float32)
        return policy_loss(target, behaviour, advantages, mask, count) + kl_loss(
            target, behaviour, reference, mask, count
        )

    value, gradient = jax.value_and_grad(loss)(target)
    assert value == 0.0
    np.testing.assert_array_equal(gradient, np.zeros_like(target))


@pytest.mark.parametrize("poison", [-np.inf, np.inf, np.nan, -1e30])
def test_loss_04_a_masked_token_of_any_value_leaks_into_no_gradient(poison):
    """LOSS-04, TOK-03. Behaviour, reference, advantage and target of a token outside the mask."""
    mask = jnp.array([[True, False]])

    def loss(target, poison):
        spoilt = row(-1.2, poison)
        return policy_loss(target, spoilt, row(1.0, poison), mask) + kl_loss(target, spoilt, row(-1.1, poison), mask)

    value, gradient = jax.value_and_grad(loss)(row(-1.0, -1.0), poison)
    clean, of_clean = jax.value_and_grad(loss)(row(-1.0, -1.0), 0.0)
    assert value == clean
    np.testing.assert_array_equal(gradient, of_clean)
    assert np.isfinite(gradient).all()
    assert loss(row(-1.0, poison), 0.0) == clean


def test_loss_10_the_log_ratio_is_bounded_before_exp():
    """LOSS-10. exp(199) overflows in float32; bounding it afterwards leaves a NaN gradient."""
    mask = jnp.ones((1, 1), bool)

    def k3(target, reference):
        return k3_kl(target_logprobs=target, reference_logprobs=reference, loss_mask=mask)[0, 0]

    value, gradient = jax.value_and_grad(k3)(row(-200.0), row(-1.0))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    np.testing.assert_allclose(value, np.exp(LOG_RATIO_LIMIT) - 1 - LOG_RATIO_LIMIT, rtol=1e-5)
    value, gradient = jax.value_and_grad(k3)(row(-1.0), row(-1.5))
    np.testing.assert_allclose([value, gradient[0, 0]], [0.1065307, 0.3934693], rtol=1e-5)
    value, gradient = jax.value_and_grad(policy_loss)(row(-1.0), row(-300.0), row(-1.0), mask)
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("behaviour", [[0.5, 0.3, 0.2], [0.4, 0.25, 0.35]])
def test_loss_11_value_and_gradient_of_the_kl_term_are_those_of_the_kl(behaviour):
    """LOSS-11. Enumerated over three tokens, sampled on and off policy; k3 alone would give (.3, −.2, −.1)."""
    logits, reference = jnp.log(jnp.array([0.5, 0.3, 0.2])), jnp.log(jnp.array([0.2, 0.5, 0.3]))
    behaviour = jnp.array(behaviour)

    def expected_term(logits):
        terms = kl_terms(
            target_logprobs=jax.nn.log_softmax(logits)[None],
            behaviour_logprobs=jnp.log(behaviour)[None],
            reference_logprobs=reference[None],
            loss_mask=jnp.ones((1, 3), bool),
        )
        return jnp.sum(behaviour * terms[0])

    value, gradient = jax.value_and_grad(expected_term)(logits)
    np.testing.assert_allclose(value, 0.2238047, rtol=1e-5)
    np.testing.assert_allclose(gradient, [0.346243, -0.2203891, -0.125854], atol=1e-5)


def test_loss_12_the_kl_has_the_same_mask_and_denominator_as_the_policy_term():
    """LOSS-12. A huge KL outside the mask does not matter, and padding changes nothing."""
    target, behaviour, reference, _, mask = random_tokens()
    count = float(mask.sum())
    value = kl_loss(target, behaviour, reference, mask, count)
    ratios = np.minimum(np.exp(target - behaviour), 2.0)
    d = reference - target
    np.testing.assert_allclose(value, (ratios * (np.exp(d) - 1 - d))[mask].sum() / count, rtol=1e-5)
    assert kl_loss(target, behaviour, np.where(mask, reference, 50.0), mask, count) == value
    padded = [np.pad(x, ((0, 2), (0, 9))) for x in (target, behaviour, reference, mask)]
    np.testing.assert_allclose(kl_loss(*padded, count), value, rtol=1e-6)


def test_mis_08_the_importance_weight_of_the_kl_is_truncated():
    """MIS-08. Log-ratio ln 3 has weight 2, −ln 2 has weight 0.5."""
    mask, reference = jnp.ones((1, 2), bool), row(-2.0, -2.0)
    target, behaviour = row(-1.0, -1.0), row(-1.0 - np.log(3), -1.0 + np.log(2))
    terms = kl_terms(target_logprobs=target, behaviour_logprobs=behaviour, reference_logprobs=reference, loss_mask=mask)
    k3 = k3_kl(target_logprobs=target, reference_logprobs=reference, loss_mask=mask)
    np.testing.assert_allclose(terms / k3, [[2.0, 0.5]], rtol=1e-5)


@pytest.mark.parametrize(("target", "expected"), [(-0.9, -np.exp(0.3)), (-0.7, -1.2 * np.exp(0.2))])
def test_loss_14_with_a_proximal_policy_the_ratio_is_to_it_and_the_weight_to_behaviour(target, expected):
    """LOSS-14."""
    loss = policy_loss(row(target), row(-1.2), row(1.0), jnp.ones((1, 1), bool), proximal=row(-1.0))
    np.testing.assert_allclose(loss, expected, rtol=1e-6)


@pytest.mark.parametrize("temperature", [0.5, 0.6, 1.0, 1.3])
def test_mis_01_the_logprobs_are_those_of_the_distribution_sampled_from(temperature):
    """MIS-01. Logits (2, 0): −0.126928 at temperature 1, −0.01814993 at 0.5; the ratio to the sampler is 1."""
    logits = jnp.array([[[2.0, 0.0]]])
    sampled = np.log(1 / (1 + np.exp(-2.0 / temperature)))
    logprobs, entropy = token_logprobs(logits, jnp.zeros((1, 1), jnp.int32), row(temperature))
    np.testing.assert_allclose(logprobs, [[sampled]], rtol=1e-5)
    np.testing.assert_allclose(np.exp(logprobs - sampled), 1.0, atol=1e-6)
    p = np.exp(sampled)
    np.testing.assert_allclose(entropy, [[-p * np.log(p) - (1 - p) * np.log(1 - p)]], rtol=1e-4)


def balance(counts, prob_sums, num_tokens):
    return switch_balance_loss(
        counts_LE=jnp.array([counts]), prob_sums_LE=jnp.array([prob_sums]), num_tokens=num_tokens, experts_per_token=1
    )


def test_moe_04_the_balance_loss_uses_the_fractions_of_the_whole_step():
    """MOE-04. Two microbatches of ten tokens, routed wholly to opposite experts at p = 0.9: alone 1.8, together 1."""
    assert balance([10.0, 0.0], [9.0, 1.0], 10.0) == pytest.approx(1.8)
    whole = [10.0, 10.0]
    parts = [balance(whole, [9.0, 1.0], 20.0), balance(whole, [1.0, 9.0], 20.0)]
    assert sum(parts) == pytest.approx(1.0)
    assert balance(whole, [10.0, 10.0], 20.0) == pytest.approx(1.0)


def test_moe_04_the_balance_loss_pushes_probability_away_from_the_loaded_expert():
    gradient = jax.grad(lambda prob_sums: balance([9.0, 1.0], prob_sums, 10.0))(jnp.array([6.0, 4.0]))
    np.testing.assert_allclose(gradient, [2 * 0.9 / 10, 2 * 0.1 / 10], rtol=1e-6)
