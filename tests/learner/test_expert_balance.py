"""z-loss, selection biases and replay in whole updates of a tiny model. Dimensions: L layers, E experts."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_setup import ramp_advantages, random_groups, tiny_config, zero_lags

from asyncrl_jax.config import override
from asyncrl_jax.learner.balance import balanced_biases, router_z_loss
from asyncrl_jax.learner.packing import pack_update
from asyncrl_jax.models.router import RouterOptions, route


def routing_of(logits):
    return route(logits, jnp.ones(len(logits), bool), RouterOptions(1))[1]


def stacked(routing):
    return jax.tree.map(lambda leaf: leaf[None], routing)


def test_moe_04_the_z_loss_of_microbatches_adds_up_and_reaches_the_router():
    """MOE-04. Linear in its part; its gradient is 2 · logsumexp · softmax ÷ tokens, as written in the paper."""
    logits = jnp.array([[2.0, 1.0, 0.0], [0.0, 0.0, 3.0]])
    whole = stacked(routing_of(logits))

    def loss(x):
        return router_z_loss(whole, stacked(routing_of(x)).z_sum)

    lse = np.log(np.exp(logits).sum(axis=1))
    np.testing.assert_allclose(loss(logits), np.mean(lse**2), rtol=1e-6)
    np.testing.assert_allclose(loss(logits[:1]) + loss(logits[1:]), loss(logits), rtol=1e-6)
    expected = 2 * lse[:, None] * np.exp(logits - lse[:, None]) / 2
    np.testing.assert_allclose(jax.grad(loss)(logits), expected, rtol=1e-5)


def test_biases_move_towards_balance_by_their_rate():
    params = {"layers.10.moe.router_bias": jnp.zeros(3), "layers.2.moe.router_bias": jnp.ones(3), "norm": jnp.ones(2)}
    moved = balanced_biases(params, jnp.array([[4.0, 2.0, 0.0], [2.0, 2.0, 2.0]]), 0.1)
    np.testing.assert_allclose(moved["layers.2.moe.router_bias"], [0.9, 1.0, 1.1])
    np.testing.assert_allclose(moved["layers.10.moe.router_bias"], 0.0)
    np.testing.assert_array_equal(moved["norm"], 1.0)


@pytest.mark.parametrize(
    ("changes", "flag"),
    [
        ({"experts.bias_rate": 0.1}, "experts.bias_rate"),
        ({"experts.replay": True, "model.router.capacity_factor": 1.25}, "capacity_factor"),
        ({"experts.replay": True, "model.router.noise": 0.1}, "noise"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes, flag):
    with pytest.raises(ValueError, match=flag):
        override(tiny_config(), changes)


def replayed(groups, rows):
    return [
        dataclasses.replace(
            g, trajectories=tuple(dataclasses.replace(t, routed_experts=rows(t)) for t in g.trajectories)
        )
        for g in groups
    ]


def pack(groups, config):
    return pack_update(groups, ramp_advantages(groups), zero_lags(groups), config)


def test_moe_02_recorded_rows_lie_at_their_input_tokens():
    """MOE-02. One row fewer than tokens, a missing prompt, no rows at all; what is missing is -1."""
    config = override(tiny_config(), {"experts.replay": True})
    groups = replayed(random_groups(num=1, size=2), lambda t: None)
    first, second = groups[0].trajectories
    rows = np.stack([first.tokens[:-1] % 4, (first.tokens[:-1] + 1) % 4], axis=-1).astype(np.int16)[:, None]
    rows[:2] = -1  # the prompt was cached elsewhere
    groups = [dataclasses.replace(groups[0], trajectories=(dataclasses.replace(first, routed_experts=rows), second))]
    packed = pack(groups, config)
    assert packed.routed_experts.shape == (*packed.tokens.shape, 1, 2)
    of_first = np.isin(packed.routed_experts[..., 0, 0], np.arange(4))
    assert of_first.sum() == len(rows) - 2
    np.testing.assert_array_equal(packed.routed_experts[of_first][:, 0, 0], packed.tokens[of_first] % 4)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (lambda t: np.full((len(t.tokens), 1, 2), 4, np.int16), "ids are −1 and 0 to 3"),
        (lambda t: np.full((len(t.tokens), 1, 2), -2, np.int16), "ids are −1 and 0 to 3"),
        (lambda t: np.zeros((len(t.tokens), 2, 2), np.int16), "routed experts have shape"),
        (lambda t: np.zeros((len(t.tokens) + 1, 1, 2), np.int16), "routed experts have shape"),
    ],
)
def test_moe_02_ids_of_no_expert_and_rows_of_another_model_are_rejected(rows, message):
    config = override(tiny_config(), {"experts.replay": True})
    with pytest.raises(ValueError, match=message):
        pack(replayed(random_groups(num=1, size=1), rows), config)
