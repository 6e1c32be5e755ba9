"""Causal attention over one packed row on one CPU core, in blocks of queries.

The plain version writes scores of the whole batch to memory, several times over. Here the scores of one row and block
of queries stay in the cache, keys after the block are left out, and the gradient computes them again from the logarithm
of their sum. Everything is feature-major ([width, positions]) and scores are [keys, queries], so that both maximum and
product run along the vector registers; the sum of a query's weights comes out of the product with the values, which
have a row of ones. The query heads of one key/value head lie side by side, as if they were more queries.

Dimensions: B rows, T positions of a row, S keys, Q queries of one block, H query heads, G key/value heads, R query
heads of one key/value head (H = G·R), J = R·Q, K head width.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

MASKED = -1e30  # finite: a row with nothing to attend to must not become NaN
SMALLEST_BLOCK = 128  # queries
MOST_BLOCKS = 8  # each is compiled for itself

Residuals = tuple[Any, ...]


def query_blocks(length: int) -> list[slice]:
    """The blocks of queries of a row."""
    size = max(SMALLEST_BLOCK, -(-length // MOST_BLOCKS))
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def attend_rows(q_BTHK: jax.Array, k_BTGK: jax.Array, v_BTGK: jax.Array, segment_ids_BT: jax.Array) -> jax.Array:
    """Causal softmax attention within segments, row by row; returns [B, T, H, K]. Query head h uses k/v head h // R.

    Args:
      q_BTHK, k_BTGK, v_BTGK: float32.
      segment_ids_BT: int32.
    """
    num_kv_heads, head_dim = k_BTGK.shape[2:]

    def row(arrays: tuple[Any, ...]) -> jax.Array:
        q_THK, k_TGK, v_TGK, seen = arrays
        q_GKRT = q_THK.reshape(len(q_THK), num_kv_heads, -1, head_dim).transpose(1, 3, 2, 0)
        k_GKT, v_GKT = (x_TGK.transpose(1, 2, 0) for x_TGK in (k_TGK, v_TGK))
        return attend_row(q_GKRT, k_GKT, v_GKT, seen).transpose(3, 0, 2, 1).reshape(q_THK.shape)

    seen = Segments.of(segment_ids_BT, q_BTHK.shape[2] // num_kv_heads)
    return jax.lax.map(row, (q_BTHK, k_BTGK, v_BTGK, seen))


class Segments(NamedTuple):
    """Segment ids of rows, or of one of them: of keys, and of the queries of each block and head."""

    ids_BT: jax.Array
    of_blocks_BJ: tuple[jax.Array, ...]

    @classmethod
    def of(cls, ids_BT: jax.Array, repeats: int) -> Segments:
        """Repeated before the loop over rows: loops that do it per score are not vectorised."""
        blocks = query_blocks(ids_BT.shape[1])
        return cls(ids_BT, tuple(jnp.tile(ids_BT[:, block], (1, repeats)) for block in blocks))


@jax.custom_vjp
def attend_row(q_GKRT: jax.Array, k_GKT: jax.Array, v_GKT: jax.Array, segments: Segments) -> jax.Array:
    """`attend_rows` of one row, feature-major; returns [G, K, R, T]."""
    return _forward(q_GKRT, k_GKT, v_GKT, segments)[0]


def _queries(x_GKRT: jax.Array, block: slice) -> jax.Array:
    """[G, K, J] of one block."""
    part_GKRQ = x_GKRT[..., block]
    return jax.lax.optimization_barrier(part_GKRQ.reshape(*part_GKRQ.shape[:2], -1))


def _rejoined(parts_GKJ: list[jax.Array], repeats: int) -> jax.Array:
    """[G, K, R, T] of all blocks."""
    return jnp.concatenate([part.reshape(*part.shape[:2], repeats, -1) for part in parts_GKJ], axis=-1)


def _position_major(x_GKT: jax.Array) -> jax.Array:
    # Without the barrier the transposition would enter the product, which is slower than both.
    return jax.lax.optimization_barrier(x_GKT.transpose(0, 2, 1))


def _masked(scores_GSJ: jax.Array, segments: Segments, number: int) -> jax.Array:
    """The scores of one block, MASKED where the key is of another segment, or after the query."""
    block = query_blocks(len(segments.ids_BT))[number]
    positions = np.arange(block.stop)
    position_J = np.tile(positions[block], scores_GSJ.shape[2] // (block.stop - block.start))
    same_SJ = segments.ids_BT[: block.stop, None] == segments.of_blocks_BJ[number][None]
    return jnp.where((same_SJ & (positions[:, None] <= position_J[None]))[None], scores_GSJ, MASKED)


def _forward(q_GKRT: jax.Array, k_GKT: jax.Array, v_GKT: jax.Array, segments: Segments) -> tuple[jax.Array, Residuals]:
    scale, outputs, log_sums = q_GKRT.shape[1] ** -0.5, [], []
    k_GTK = _position_major(k_GKT)
    ones_GKT = jnp.pad(v_GKT, ((0, 0), (0, 1), (0, 0)), constant_values=1.0)
    for number, block in enumerate(query_blocks(k_GKT.shape[2])):
        scores_GSJ = jnp.matmul(k_GTK[:, : block.stop], _queries(q_GKRT, block) * scale)
        scores_GSJ = _masked(scores_GSJ, segments, number)
        # The barrier keeps the maximum from being computed once per score.
        largest_G1J = jax.lax.optimization_barrier(jnp.max(scores_GSJ, axis=1, keepdims=True))
        sums_GKJ = jnp.matmul(ones_GKT[:, :, : block.stop], jnp.exp(scores_GSJ - largest_G1J))
        outputs.append(sums_GKJ[:, :-1] / sums_GKJ[:, -1:])
        log_sums.append(largest_G1J + jnp.log(sums_GKJ[:, -1:]))
    output_GKRT = _rejoined(outputs, q_GKRT.shape[2])
    return output_GKRT, (q_GKRT, k_GKT, v_GKT, segments, output_GKRT, log_sums)


def _backward(residuals: Residuals, grad_GKRT: jax.Array) -> tuple[Any, ...]:
    q_GKRT, k_GKT, v_GKT, segments, output_GKRT, log_sums = residuals
    scale, dq = q_GKRT.shape[1] ** -0.5, []
    k_GTK, v_GTK = _position_major(k_GKT), _position_major(v_GKT)
    dk_GKT = dv_GKT = jnp.zeros_like(k_GKT)
    ones_G1K = jnp.ones((len(k_GKT), 1, k_GKT.shape[1]))
    for number, block in enumerate(query_blocks(k_GKT.shape[2])):
        keys = slice(0, block.stop)
        q_GKJ, grad_GKJ = _queries(q_GKRT, block) * scale, _queries(grad_GKRT, block)
        # As a product, so that the compiler does not make the sum a part of the next one.
        mean_G1J = jnp.matmul(ones_G1K, grad_GKJ * _queries(output_GKRT, block))
        scores_GSJ = _masked(jnp.matmul(k_GTK[:, keys], q_GKJ), segments, number)
        weights_GSJ = jnp.exp(scores_GSJ - log_sums[number])
        dscores_GSJ = weights_GSJ * (jnp.matmul(v_GTK[:, keys], grad_GKJ) - mean_G1J)
        dq.append(jnp.matmul(k_GKT[:, :, keys], dscores_GSJ) * scale)
        dk_GKT = dk_GKT.at[:, :, keys].add(jnp.einsum("GKJ,GSJ->GKS", q_GKJ, dscores_GSJ))
        dv_GKT = dv_GKT.at[:, :, keys].add(jnp.einsum("GKJ,GSJ->GKS", grad_GKJ, weights_GSJ))
    return _rejoined(dq, q_GKRT.shape[2]), dk_GKT, dv_GKT, None


attend_row.defvjp(_forward, _backward)
