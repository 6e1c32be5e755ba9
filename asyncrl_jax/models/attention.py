"""Grouped-query attention with normalised queries and keys and rotary positions, as in Qwen3.

Dimensions: B rows, T query positions, S key positions, D hidden width, H query heads, G key/value heads, R query heads
of one key/value head (H = G·R), K head width.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx

MASKED = -1e30  # finite: a row with nothing to attend to must not become NaN


def rms_norm(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) · scale` over the last dimension; `scale` has that dimension only."""
    variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
    return x * jax.lax.rsqrt(variance + eps) * jnp.expand_dims(scale, range(x.ndim - 1))


def rotate(x_BTHK: jax.Array, positions_BT: jax.Array, theta: float) -> jax.Array:
    """Rotary position embedding; pairs are (i, i + K/2), as in the Hugging Face models."""
    half = x_BTHK.shape[-1] // 2
    frequencies = theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
    angles_BTK = positions_BT[:, :, None].astype(jnp.float32) * frequencies[None, None, :]
    cos, sin = jnp.cos(angles_BTK)[:, :, None, :], jnp.sin(angles_BTK)[:, :, None, :]
    first, second = x_BTHK[..., :half], x_BTHK[..., half:]
    return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)


def packed_mask(segment_ids_BT: jax.Array) -> jax.Array:
    """bool [B, T, T]: query t may see key s when both are of one segment and s ≤ t."""
    same_BTS = segment_ids_BT[:, :, None] == segment_ids_BT[:, None, :]
    causal_TS = jnp.tril(jnp.ones((segment_ids_BT.shape[1],) * 2, bool))
    return same_BTS & causal_TS[None]


def attend(q_BTHK: jax.Array, k_BSGK: jax.Array, v_BSGK: jax.Array, mask_BTS: jax.Array) -> jax.Array:
    """Softmax attention; returns [B, T, H, K]. Query head h uses key/value head h // R."""
    batch, length, num_heads, head_dim = q_BTHK.shape
    num_kv_heads = k_BSGK.shape[2]
    q_BTGRK = q_BTHK.reshape(batch, length, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores_BGRTS = jnp.einsum("BTGRK,BSGK->BGRTS", q_BTGRK * head_dim**-0.5, k_BSGK)
    scores_BGRTS = jnp.where(mask_BTS[:, None, None], scores_BGRTS, MASKED)
    # Normalising the output instead of the probabilities halves the time of the whole gradient on CPU.
    weights_BGRTS = jnp.exp(scores_BGRTS - jax.lax.stop_gradient(jnp.max(scores_BGRTS, axis=-1, keepdims=True)))
    sums_BGRT1 = jnp.sum(weights_BGRTS, axis=-1, keepdims=True)
    output_BGRTK = jnp.einsum("BGRTS,BSGK->BGRTK", weights_BGRTS, v_BSGK) / sums_BGRT1
    return output_BGRTK.transpose(0, 3, 1, 2, 4).reshape(q_BTHK.shape)


class Attention(nnx.Module):
    """Projections of one attention layer."""

    def __init__(self, hidden_dim: int, num_heads: int, num_kv_heads: int, head_dim: int, std: float, rngs: nnx.Rngs):
        init = nnx.initializers.normal(std)
        self.q_proj = nnx.Param(init(rngs.params(), (hidden_dim, num_heads, head_dim)))
        self.k_proj = nnx.Param(init(rngs.params(), (hidden_dim, num_kv_heads, head_dim)))
        self.v_proj = nnx.Param(init(rngs.params(), (hidden_dim, num_kv_heads, head_dim)))
        self.o_proj = nnx.Param(init(rngs.params(), (num_heads, head_dim, hidden_dim)))
        self.q_norm = nnx.Param(jnp.ones(head_dim))
        self.k_norm = nnx.Param(jnp.ones(head_dim))

    def project(
        self, x_BTD: jax.Array, positions_BT: jax.Array, theta: float, eps: float
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """(q_BTHK, k_BTGK, v_BTGK), queries and keys normalised and rotated."""
        q_BTHK = jnp.einsum("BTD,DHK->BTHK", x_BTD, self.q_proj[...])
        k_BTGK = jnp.einsum("BTD,DGK->BTGK", x_BTD, self.k_proj[...])
        v_BTGK = jnp.einsum("BTD,DGK->BTGK", x_BTD, self.v_proj[...])
        q_BTHK = rotate(rms_norm(q_BTHK, self.q_norm[...], eps), positions_BT, theta)
        k_BTGK = rotate(rms_norm(k_BTGK, self.k_norm[...], eps), positions_BT, theta)
        return q_BTHK, k_BTGK, v_BTGK

    def output(self, heads_BTHK: jax.Array) -> jax.Array:
        return jnp.einsum("BTHK,HKD->BTD", heads_BTHK, self.o_proj[...])
