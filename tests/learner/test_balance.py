import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.balance import switch_balance_loss


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
