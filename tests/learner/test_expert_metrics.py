"""MOE-10: metrics of the experts, from loads and gradients made by hand."""

import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.expert_metrics import expert_gradient_norms, expert_metrics
from asyncrl_jax.models.router import Routing


def routing(counts, *, tokens, dropped=0.0, unreplayed=0.0, entropy=0.0):
    counts = jnp.asarray(counts, jnp.float32)
    num_layers = len(counts)
    return Routing(
        counts_E=counts,
        prob_sums_E=counts,
        num_tokens=jnp.full(num_layers, tokens, jnp.float32),
        z_sum=jnp.zeros(num_layers),
        entropy_sum=jnp.full(num_layers, entropy),
        dropped=jnp.full(num_layers, dropped),
        unreplayed=jnp.full(num_layers, unreplayed),
    )


def gradients(layers):
    """Those of expert e of layer i are all (i + 1)(e + 1), in 2 × 3 values of each of three leaves."""
    of_expert = np.arange(1, 5)[:, None, None]
    return {
        f"layers.{layer}.moe.{leaf}": jnp.asarray((layer + 1.0) * of_expert * np.ones((4, 2, 3)))
        for layer in layers
        for leaf in ("gate_proj", "up_proj", "down_proj")
    } | {"layers.0.moe.router": jnp.ones((2, 4)), "embedding": jnp.ones((3, 2))}


def test_moe_10_a_forced_router_gives_exact_values():
    counts = [[8, 4, 4, 0], [4, 4, 4, 4]]
    metrics = expert_metrics(routing(counts, tokens=8, entropy=8.0), gradients((0, 2)), alarm_ratio=3.0)
    np.testing.assert_allclose(metrics["expert_load/layer_0"], [2, 1, 1, 0])
    assert metrics["expert_load_max/layer_0"] == 2
    assert metrics["expert_load_min/layer_0"] == 0
    assert metrics["expert_load_max_over_min/layer_0"] == 8  # an idle expert counts as one assignment
    assert metrics["expert_load_max_over_min/layer_2"] == 1
    np.testing.assert_allclose(metrics["expert_load_entropy/layer_0"], 0.5 * np.log(2) + 0.5 * np.log(4), rtol=1e-6)
    np.testing.assert_allclose(metrics["expert_load_entropy/layer_2"], np.log(4), rtol=1e-6)
    np.testing.assert_allclose(metrics["router_entropy/layer_0"], 1.0)
    assert metrics["dead_experts"] == 1
    assert metrics["imbalanced_layers"] == 1


@pytest.mark.parametrize(("counts", "alarms"), [([3, 1, 1, 1], 0), ([13, 4, 4, 4], 1)])
def test_a_load_above_3_to_1_is_an_alarm(counts, alarms):
    metrics = expert_metrics(routing([counts], tokens=8), gradients((0,)), alarm_ratio=3.0)
    assert metrics["imbalanced_layers"] == alarms


def test_the_gradient_norm_is_that_of_each_expert():
    norms = expert_gradient_norms(gradients((0, 1)))
    assert list(norms) == [0, 1]
    np.testing.assert_allclose(norms[0], np.sqrt(18) * np.arange(1, 5), rtol=1e-6)
    np.testing.assert_allclose(norms[1], 2 * np.sqrt(18) * np.arange(1, 5), rtol=1e-6)


def test_drops_and_missing_rows_are_shares():
    metrics = expert_metrics(
        routing([[8, 8, 0, 0]], tokens=8, dropped=4.0, unreplayed=2.0), gradients((0,)), alarm_ratio=3.0
    )
    assert (metrics["dropped_share"], metrics["unreplayed_share"]) == (0.25, 0.25)
