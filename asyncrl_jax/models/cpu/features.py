"""What stands around attention on one CPU core, feature-major: projections, norm and rotation of heads.

With positions along the registers' dimension, sums over a head's features and the halves of a rotation are whole
vectors; position-major, XLA's loops for them take several times as long. The gradients are written out so that no
product has a left side that is read down its columns, which is half as fast: it is transposed after the product.

Dimensions: T positions of a row, D hidden width, E features of all heads, G key/value heads, K head width, R query
heads of one key/value head.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp

Residuals = tuple[jax.Array, ...]


def transposed(matrix: jax.Array) -> jax.Array:
    """Written out: inside of a product the transposition would cost more."""
    return jax.lax.optimization_barrier(matrix.T)


def _project_in(x_TD: jax.Array, weights_ED: jax.Array) -> jax.Array:
    return jnp.matmul(weights_ED, x_TD.T)


def _project_out(features_ET: jax.Array, weights_ED: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(jnp.matmul(transposed(weights_ED), features_ET)).T


@jax.custom_vjp
def project_in(x_TD: jax.Array, weights_ED: jax.Array) -> jax.Array:
    """[E, T]."""
    return _project_in(x_TD, weights_ED)


def _project_in_forward(x_TD: jax.Array, weights_ED: jax.Array) -> tuple[jax.Array, Residuals]:
    return _project_in(x_TD, weights_ED), (x_TD, weights_ED)


def _project_in_backward(residuals: Residuals, grad_ET: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_TD, weights_ED = residuals
    return _project_out(grad_ET, weights_ED), jnp.matmul(grad_ET, x_TD)


project_in.defvjp(_project_in_forward, _project_in_backward)


@jax.custom_vjp
def project_out(features_ET: jax.Array, weights_ED: jax.Array) -> jax.Array:
    """[T, D]."""
    return _project_out(features_ET, weights_ED)


def _project_out_forward(features_ET: jax.Array, weights_ED: jax.Array) -> tuple[jax.Array, Residuals]:
    return _project_out(features_ET, weights_ED), (features_ET, weights_ED)


def _project_out_backward(residuals: Residuals, grad_TD: jax.Array) -> tuple[jax.Array, jax.Array]:
    features_ET, weights_ED = residuals
    return _project_in(grad_TD, weights_ED), jnp.matmul(features_ET, grad_TD)


project_out.defvjp(_project_out_forward, _project_out_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def normalise_features(x_MFJ: jax.Array, scale_F: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) · scale`, the mean over F; float32."""
    return _normalise_forward(x_MFJ, scale_F, eps)[0]


def _normalise_forward(x_MFJ: jax.Array, scale_F: jax.Array, eps: float) -> tuple[jax.Array, Residuals]:
    variance_M1J = jnp.mean(jnp.square(x_MFJ), axis=1, keepdims=True)
    inverse_M1J = jax.lax.optimization_barrier(jax.lax.rsqrt(variance_M1J + eps))  # once, and not per feature
    return x_MFJ * inverse_M1J * scale_F[None, :, None], (x_MFJ, scale_F, inverse_M1J)


def _normalise_backward(eps: float, residuals: Residuals, grad_MFJ: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: ARG001
    x_MFJ, scale_F, inverse_M1J = residuals
    product_MFJ = jax.lax.optimization_barrier(grad_MFJ * x_MFJ)
    weights_M1F = jnp.broadcast_to(scale_F / len(scale_F), (len(x_MFJ), 1, len(scale_F)))
    along_M1J = jax.lax.optimization_barrier(jnp.matmul(weights_M1F, product_MFJ) * inverse_M1J**3)
    dscale_MF1 = jnp.matmul(product_MFJ, inverse_M1J.transpose(0, 2, 1))
    dx_MFJ = inverse_M1J * (grad_MFJ * scale_F[None, :, None]) - x_MFJ * along_M1J
    return dx_MFJ, jnp.sum(dscale_MF1[:, :, 0], axis=0)


normalise_features.defvjp(_normalise_forward, _normalise_backward)


@jax.custom_vjp
def turn_heads(x_GKRT: jax.Array, cos_KT: jax.Array, sin_KT: jax.Array) -> jax.Array:
    """The first 2·len(cos) features of each head by these angles, which get no gradient; pairs are (i, i + half)."""
    return _turn(x_GKRT, cos_KT, sin_KT)


def _turn(x_GKRT: jax.Array, cos_KT: jax.Array, sin_KT: jax.Array) -> jax.Array:
    half = len(cos_KT)
    cos_1K1T, sin_1K1T = cos_KT[None, :, None], sin_KT[None, :, None]
    first, second, rest = x_GKRT[:, :half], x_GKRT[:, half : 2 * half], x_GKRT[:, 2 * half :]
    turned = [first * cos_1K1T - second * sin_1K1T, second * cos_1K1T + first * sin_1K1T]
    return jax.lax.optimization_barrier(jnp.concatenate([*turned, rest], axis=1))


def _turn_forward(x_GKRT: jax.Array, cos_KT: jax.Array, sin_KT: jax.Array) -> tuple[jax.Array, Residuals]:
    return _turn(x_GKRT, cos_KT, sin_KT), (cos_KT, sin_KT)


def _turn_backward(angles: Residuals, grad_GKRT: jax.Array) -> tuple[Any, ...]:
    cos_KT, sin_KT = angles
    return _turn(grad_GKRT, cos_KT, -sin_KT), None, None


turn_heads.defvjp(_turn_forward, _turn_backward)
