"""Rotary position embedding (RoFormer, arXiv 2104.09864) with the frequency scalings of Hugging Face's models.

Dimensions: B rows, T positions, H heads, K head width.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.config_model import RopeScalingConfig


@dataclasses.dataclass(frozen=True)
class Rotary:
    """Rotation of the first `dim` of a head's dimensions; the others pass through."""

    dim: int
    theta: float
    scaling: RopeScalingConfig

    def frequencies(self) -> np.ndarray:
        """float32 [dim / 2], in radians a position."""
        frequencies = self.theta ** (-np.arange(0, self.dim, 2) / self.dim)
        if self.scaling.kind == "linear":
            frequencies = frequencies / self.scaling.factor
        if self.scaling.kind == "llama3":
            frequencies = _llama3(frequencies, self.scaling)
        return frequencies.astype(np.float32)


def _llama3(frequencies: np.ndarray, scaling: RopeScalingConfig) -> np.ndarray:
    """Llama 3.1: long wavelengths are stretched by `factor`, short ones are not, and between them it is blended."""
    turns = scaling.original_positions * frequencies / (2 * np.pi)  # in the context length of the pretraining
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return frequencies * (kept + (1.0 - kept) / scaling.factor)


def rotate(x_BTHK: jax.Array, positions_BT: jax.Array, rotary: Rotary) -> jax.Array:
    """Rotates each head by its position; pairs are (i, i + dim / 2). Angles are float32 in any dtype of `x`."""
    angles_BTK = positions_BT[:, :, None].astype(jnp.float32) * rotary.frequencies()[None, None, :]
    # One array of both, or the compiler computes them once per head and layer.
    both_BT1K = jnp.concatenate([jnp.cos(angles_BTK), jnp.sin(angles_BTK)], axis=-1)[:, :, None]
    cos, sin = jnp.split(jax.lax.optimization_barrier(both_BT1K), 2, axis=-1)
    turning = _turn(x_BTHK[..., : rotary.dim].astype(jnp.float32), cos, sin).astype(x_BTHK.dtype)
    if rotary.dim == x_BTHK.shape[-1]:
        return turning
    return jnp.concatenate([turning, x_BTHK[..., rotary.dim :]], axis=-1)


@jax.custom_vjp
def _turn(x_BTHK: jax.Array, cos_BT1K: jax.Array, sin_BT1K: jax.Array) -> jax.Array:
    """All of `x` by these angles, which get no gradient."""
    first, second = jnp.split(x_BTHK, 2, axis=-1)
    return jnp.concatenate([first * cos_BT1K - second * sin_BT1K, second * cos_BT1K + first * sin_BT1K], axis=-1)


def _turn_forward(
    x_BTHK: jax.Array, cos_BT1K: jax.Array, sin_BT1K: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    return _turn(x_BTHK, cos_BT1K, sin_BT1K), (cos_BT1K, sin_BT1K)


def _turn_backward(angles: tuple[jax.Array, jax.Array], grad_BTHK: jax.Array) -> tuple[jax.Array, None, None]:
    """Back by the same angles. Derived from the slices and the concatenation, it takes twice the time."""
    cos_BT1K, sin_BT1K = angles
    return _turn(grad_BTHK, cos_BT1K, -sin_BT1K), None, None


_turn.defvjp(_turn_forward, _turn_backward)
