"""Routing and dispatch against a NumPy loop written like the equations.

Dimensions: N tokens, D hidden width, E experts, A experts of one token, F expert width.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.models.experts import DISPATCHES, Experts, run_experts
from asyncrl_jax.models.moe import moe
from asyncrl_jax.models.router import RouterOptions

N, D, E, A, F = 23, 8, 4, 2, 6
jitted_moe = jax.jit(moe, static_argnames=("options", "dispatch"))


def softmax(x):
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def loop_moe(x_ND, valid_N, router_DE, experts, choices):
    """One token, one expert at a time, in float64."""
    gate, up, down = (np.asarray(w, np.float64) for w in experts)
    y = np.zeros_like(x_ND, np.float64)
    for n in np.flatnonzero(valid_N):
        probs = softmax(np.asarray(x_ND[n], np.float64) @ np.asarray(router_DE, np.float64))
        chosen = np.argsort(-probs, kind="stable")[:choices]
        for e in chosen:
            h = x_ND[n] @ gate[e]
            y[n] += probs[e] / probs[chosen].sum() * (h / (1 + np.exp(-h)) * (x_ND[n] @ up[e])) @ down[e]
    return y


@pytest.fixture
def layer():
    rng = np.random.default_rng(0)
    experts = Experts(*(rng.normal(size=size, scale=0.3) for size in [(E, D, F), (E, D, F), (E, F, D)]))
    return jax.tree.map(
        lambda x: jnp.asarray(x, jnp.float32), (rng.normal(size=(N, D)), rng.normal(size=(D, E)), experts)
    )


def run(x_ND, router_DE, experts, *, valid_N=None, dispatch="blocked", choices=A):
    valid_N = np.ones(len(x_ND), bool) if valid_N is None else valid_N
    y_1ND, routing = jitted_moe(
        x_ND[None], valid_N[None], router_DE, experts, RouterOptions(choices), dispatch=dispatch
    )
    return y_1ND[0], routing


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("choices", [1, 2, E])
def test_every_dispatch_equals_the_loop(layer, dispatch, choices):
    x, router, experts = layer
    valid = np.arange(N) % 5 != 3
    y, routing = run(x, router, experts, valid_N=jnp.asarray(valid), dispatch=dispatch, choices=choices)
    np.testing.assert_allclose(y, loop_moe(np.asarray(x), valid, router, experts, choices), rtol=1e-4, atol=1e-5)
    assert not np.any(np.asarray(y)[~valid])
    assert routing.num_tokens == valid.sum()
    assert routing.counts_E.sum() == valid.sum() * choices
    np.testing.assert_allclose(routing.prob_sums_E, softmax(np.asarray(x @ router))[valid].sum(0), rtol=1e-5)


@pytest.mark.parametrize("dispatch", ["blocked", "ragged"])
def test_gradients_of_every_dispatch_equal_those_of_dense(layer, dispatch):
    valid = jnp.arange(N) % 4 != 1

    def loss(x, router, experts, dispatch):
        y, routing = run(x, router, experts, valid_N=valid, dispatch=dispatch)
        return jnp.sum(jnp.sin(y)) + jnp.sum(routing.prob_sums_E * jnp.arange(E))

    gradient = jax.jit(jax.grad(loss, (0, 1, 2)), static_argnums=3)
    for dense, other in zip(
        jax.tree.leaves(gradient(*layer, "dense")), jax.tree.leaves(gradient(*layer, dispatch)), strict=True
    ):
        np.testing.assert_allclose(other, dense, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("block_rows", [1, 4])
def test_the_block_size_changes_nothing(layer, block_rows):
    x, _, experts = layer
    ids = np.random.default_rng(1).integers(-1, E - 1, (N, A))  # the last expert gets no row, -1 is nobody
    run_once = jax.jit(run_experts, static_argnames=("dispatch", "block_rows"))
    weights = jnp.where(ids < 0, 0.0, 0.5)
    small = run_once(x, ids, weights, experts, dispatch="blocked", block_rows=block_rows)
    expected = run_once(x, ids, weights, experts, dispatch="dense")
    np.testing.assert_allclose(small, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_moe_06_a_token_gets_the_same_beside_any_batch_mates(layer, dispatch):
    """MOE-06. All tokens choose the same experts, far more than a balanced share, and none is dropped."""
    x, _, experts = layer
    router = jnp.zeros((D, E)).at[:, 1].set(1.0)
    x = jnp.abs(x)
    together, routing = run(x, router, experts, dispatch=dispatch)
    alone = np.concatenate([run(x[n : n + 1], router, experts, dispatch=dispatch)[0] for n in range(N)])
    np.testing.assert_allclose(together, alone, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(routing.counts_E, [N, N, 0, 0])  # ties go to the lower id


def test_permuting_the_experts_permutes_nothing_else(layer):
    x, router, experts = layer
    order = np.array([2, 0, 3, 1])
    y, routing = run(x, router, experts)
    permuted, of_permuted = run(x, router[:, order], Experts(*(w[order] for w in experts)))
    np.testing.assert_allclose(permuted, y, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(of_permuted.counts_E, routing.counts_E[order])


def test_an_unknown_dispatch_is_refused(layer):
    with pytest.raises(ValueError, match="'sorted'"):
        run(*layer, dispatch="sorted")
