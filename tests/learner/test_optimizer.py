"""Optimizers on a few weights named as a model's; the learning rate's schedule; the response to lag."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, NamedSharding, PartitionSpec
from update_setup import tiny_config

from asyncrl_jax.config_learner import LearnerConfig
from asyncrl_jax.learner.optimizer import lag_response, make_optimizer, moving_average
from asyncrl_jax.learner.state import _lying_like, create_state


def weights():
    """Three experts of 4 × 6, heads 2 × 4 of width 6, an embedding, a norm."""
    rng = np.random.default_rng(0)
    shapes = {
        "layers.0.moe.gate_proj": (3, 4, 6),
        "layers.0.attention.o_proj": (2, 4, 6),
        "embedding": (8, 6),
        "norm": (6,),
    }
    return {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}


def first_update(config, grads=None):
    optimizer, params = make_optimizer(config), weights()
    grads = jax.tree.map(lambda leaf: 2.0 * leaf, params) if grads is None else grads
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    return updates, grads


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor", "muon"])
def test_every_optimizer_goes_downhill(optimizer):
    """The step subtracts rate · update, so an update points along the gradient."""
    updates, grads = first_update(LearnerConfig(optimizer=optimizer))
    for name, update in updates.items():
        assert np.sum(np.asarray(update * grads[name])) > 0, name
        assert np.sqrt(np.mean(np.square(update))) < 3, name


def test_muon_makes_each_expert_orthogonal_by_itself():
    """Singular values near those of a scaled isometry; of heads, (2 · 4) × 6 as one matrix. The rest is Adam's."""
    updates, grads = first_update(LearnerConfig(optimizer="muon", max_grad_norm=1e9))
    for matrix in [*updates["layers.0.moe.gate_proj"], updates["layers.0.attention.o_proj"].reshape(8, 6)]:
        values = np.linalg.svd(np.asarray(matrix), compute_uv=False) / (0.2 * np.sqrt(max(matrix.shape)))
        assert ((values > 0.5) & (values < 1.4)).all()
    alone = first_update(
        LearnerConfig(optimizer="muon", max_grad_norm=1e9),
        grads | {"layers.0.moe.gate_proj": grads["layers.0.moe.gate_proj"].at[1].multiply(100.0)},
    )[0]
    np.testing.assert_allclose(
        alone["layers.0.moe.gate_proj"][0], updates["layers.0.moe.gate_proj"][0], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(np.abs(updates["norm"]), np.abs(updates["norm"][0]), rtol=1e-5)  # Adam's first step


@pytest.mark.parametrize("optimizer", ["adamw", "adafactor"])
def test_matrices_decay_and_norms_do_not(optimizer):
    still = jax.tree.map(jnp.zeros_like, weights())
    updates, _ = first_update(LearnerConfig(optimizer=optimizer, weight_decay=0.1), still)
    np.testing.assert_allclose(updates["embedding"], 0.1 * weights()["embedding"], rtol=1e-6)
    assert not np.any(updates["norm"])


def test_a_factored_moment_lies_like_its_weight_without_the_dimension_that_it_lacks():
    mesh = AbstractMesh((1, 2, 2, 2), ("data", "fsdp", "expert", "tensor"))
    of_weight = NamedSharding(mesh, PartitionSpec("expert", "fsdp", "tensor"))
    for shape, spec in [
        ((3, 4, 6), PartitionSpec("expert", "fsdp", "tensor")),
        ((3, 6), PartitionSpec("expert", "tensor")),
        ((3, 4), PartitionSpec("expert", "fsdp")),
        ((4, 6), PartitionSpec("fsdp", "tensor")),
        ((1,), PartitionSpec()),
    ]:
        assert _lying_like(shape, (3, 4, 6), of_weight).spec == spec


@pytest.mark.parametrize("optimizer", ["adafactor", "muon"])
def test_the_state_of_every_optimizer_has_a_place_on_the_mesh(optimizer):
    state = create_state(tiny_config(optimizer=optimizer, **{"advantage.estimator": "gae"}), 0)
    assert int(state.update) == 0
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    assert all(leaf.dtype in (jnp.float32, jnp.int32) for leaf in jax.tree.leaves(state))


def test_fresh_data_and_settings_of_0_leave_rate_and_coefficient_alone():
    assert lag_response(0.0, lr_slowdown=0.5, kl_gain=0.5) == (1.0, 1.0)
    assert lag_response(4.0, lr_slowdown=0.0, kl_gain=0.0) == (1.0, 1.0)


def test_older_data_make_smaller_steps_and_a_stronger_pull():
    """Lag 4, both settings 0.25."""
    assert lag_response(4.0, lr_slowdown=0.25, kl_gain=0.25) == (0.5, 2.0)


def test_a_moving_average_keeps_its_decay_of_the_past():
    found = moving_average({"a": jnp.ones(2)}, {"a": jnp.zeros(2)}, 0.75)
    np.testing.assert_allclose(found["a"], [0.75, 0.75])
