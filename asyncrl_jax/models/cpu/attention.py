"""Causal attention over packed rows on one CPU core: one row at a time, in blocks of queries.

The plain version writes scores of the whole batch to memory, several times over. Here the scores of one row and block
of queries stay in the cache, keys after the block are left out, and the gradient computes them again from the logarithm
of their sum. Everything is feature-major ([heads, width, positions]) and scores are [keys, queries], so that both
maximum and product run along the vector registers; the sum of a query's weights comes out of the product with the
values, which have a row of ones.

Dimensions: B rows, T positions, S keys, Q queries of one block, H query heads, G key/value heads, R query heads of one
key/value head (H = G·R), K head width.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite: a row with nothing to attend to must not become NaN
SMALLEST_BLOCK = 128  # queries
MOST_BLOCKS = 8  # each is compiled for itself

Residuals = tuple[jax.Array, ...]


def query_blocks(length: int) -> list[slice]:
    """The blocks of queries of a row."""
    size = max(SMALLEST_BLOCK, -(-length // MOST_BLOCKS))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _feature_major(x_BTHK: jax.Array) -> jax.Array:
    return x_BTHK.transpose(0, 2, 3, 1)


def _position_major(x_BHKT: jax.Array) -> jax.Array:
    return x_BHKT.transpose(0, 3, 1, 2)


def _bias(segment_ids_BT: jax.Array) -> jax.Array:
    """[B, S, T]: 0 where query t may see key s, MASKED elsewhere."""
    causal_ST = jnp.triu(jnp.ones((segment_ids_BT.shape[1],) * 2, bool))
    same_BST = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    return jnp.where(same_BST & causal_ST[None], 0.0, MASKED)


def _scores(k_HKT: jax.Array, q_HKT: jax.Array, bias_ST: jax.Array, block: slice) -> jax.Array:
    """[H, S, Q] of one block, masked."""
    scores_HSQ = jnp.einsum("HKS,HKQ->HSQ", k_HKT[:, :, : block.stop], q_HKT[:, :, block])
    return scores_HSQ + bias_ST[None, : block.stop, block]


@jax.custom_vjp
def attend_rows(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Causal softmax attention within segments; returns [B, T, H, K]. Query head h uses key/value head h // R.

    Args:
      q_BTHK, k_BTGK, v_BTGK: float32.
      segment_ids_BT: int32.
    """
    return _forward(q_BTHK, k_BTGK, v_BTGK, segment_ids_BT)[0]


def _forward(
    q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array
) -> tuple[jax.Array, Residuals]:
    num_heads, head_dim = q_BTHK.shape[2:]
    repeats = num_heads // k_BTGK.shape[2]
    q_BHKT, k_BGKT = _feature_major(q_BTHK * head_dim**-0.5), _feature_major(k_BTGK)
    v_BGKT = jnp.pad(_feature_major(v_BTGK), ((0, 0), (0, 0), (0, 1), (0, 0)), constant_values=1.0)
    bias_BST = _bias(segment_ids_BT)

    def row(_: None, arrays: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, jax.Array]]:
        q_HKT, k_GKT, v_GKT, bias_ST = arrays
        k_HKT, v_HKT = jnp.repeat(k_GKT, repeats, axis=0), jnp.repeat(v_GKT, repeats, axis=0)
        outputs, log_sums = [], []
        for block in query_blocks(q_HKT.shape[2]):
            scores_HSQ = _scores(k_HKT, q_HKT, bias_ST, block)
            # The barrier keeps the maximum from being computed once per score.
            largest_H1Q = jax.lax.optimization_barrier(jnp.max(scores_HSQ, axis=1, keepdims=True))
            sums_HKQ = jnp.einsum("HKS,HSQ->HKQ", v_HKT[:, :, : block.stop], jnp.exp(scores_HSQ - largest_H1Q))
            outputs.append(sums_HKQ[:, :-1] / sums_HKQ[:, -1:])
            log_sums.append(largest_H1Q + jnp.log(sums_HKQ[:, -1:]))
        return None, (jnp.concatenate(outputs, axis=2), jnp.concatenate(log_sums, axis=2))

    _, (output_BHKT, log_sums_BH1T) = jax.lax.scan(row, None, (q_BHKT, k_BGKT, v_BGKT, bias_BST))
    return _position_major(output_BHKT), (q_BHKT, k_BGKT, v_BGKT, bias_BST, output_BHKT, log_sums_BH1T)


def _backward(residuals: Residuals, grad_BTHK: jax.Array) -> tuple[Any, ...]:
    q_BHKT, k_BGKT, v_BGKT, bias_BST, output_BHKT, log_sums_BH1T = residuals
    num_heads, head_dim, length = q_BHKT.shape[1:]
    num_kv_heads = k_BGKT.shape[1]
    repeats = num_heads // num_kv_heads
    grad_BHKT = _feature_major(grad_BTHK)
    # Against the row of ones in the values, this row takes from each weight's gradient their weighted mean.
    mean_BH1T = jnp.sum(grad_BHKT * output_BHKT, axis=2, keepdims=True)
    grad_BHKT = jnp.concatenate([grad_BHKT, -mean_BH1T], axis=2)

    def row(_: None, arrays: tuple[jax.Array, ...]) -> tuple[None, tuple[jax.Array, ...]]:
        q_HKT, k_GKT, v_GKT, bias_ST, grad_HKT, log_sums_H1T = arrays
        k_HKT, v_HKT = jnp.repeat(k_GKT, repeats, axis=0), jnp.repeat(v_GKT, repeats, axis=0)
        dq, dk_HKT, dv_HKT = [], jnp.zeros_like(q_HKT), jnp.zeros_like(q_HKT)
        for block in query_blocks(length):
            seen = slice(0, block.stop)
            weights_HSQ = jnp.exp(_scores(k_HKT, q_HKT, bias_ST, block) - log_sums_H1T[:, :, block])
            dweights_HSQ = jnp.einsum("HKS,HKQ->HSQ", v_HKT[:, :, seen], grad_HKT[:, :, block])
            dscores_HSQ = weights_HSQ * dweights_HSQ
            dq.append(jnp.einsum("HKS,HSQ->HKQ", k_HKT[:, :, seen], dscores_HSQ))
            dk_HKT = dk_HKT.at[:, :, seen].add(jnp.einsum("HKQ,HSQ->HKS", q_HKT[:, :, block], dscores_HSQ))
            dv_HKT = dv_HKT.at[:, :, seen].add(jnp.einsum("HKQ,HSQ->HKS", grad_HKT[:, :-1, block], weights_HSQ))
        dk_GKT, dv_GKT = (
            jnp.sum(array.reshape(num_kv_heads, repeats, head_dim, length), axis=1) for array in (dk_HKT, dv_HKT)
        )
        return None, (jnp.concatenate(dq, axis=2), dk_GKT, dv_GKT)

    arrays = (q_BHKT, k_BGKT, v_BGKT, bias_BST, grad_BHKT, log_sums_BH1T)
    _, (dq_BHKT, dk_BGKT, dv_BGKT) = jax.lax.scan(row, None, arrays)
    dq_BTHK = _position_major(dq_BHKT) * head_dim**-0.5
    return dq_BTHK, _position_major(dk_BGKT), _position_major(dv_BGKT), None


attend_rows.defvjp(_forward, _backward)
