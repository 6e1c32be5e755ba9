"""RMS norm on one CPU core, with sums over features as matrix products.

XLA's loops for reductions along the registers' dimension, and what it fuses into them, take several times as long as
these products, whose other side is a single column or row.

Dimensions: N rows, D width.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp

Residuals = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def normalise(x_ND: jax.Array, scale_D: jax.Array, eps: float) -> jax.Array:
    """`x / rms(x) · scale`, float32."""
    return _forward(x_ND, scale_D, eps)[0]


def _forward(x_ND: jax.Array, scale_D: jax.Array, eps: float) -> tuple[jax.Array, Residuals]:
    variance_N1 = jnp.mean(jnp.square(x_ND), axis=1, keepdims=True)
    # The barrier keeps it from being computed once per feature.
    inverse_N1 = jax.lax.optimization_barrier(jax.lax.rsqrt(variance_N1 + eps))
    return x_ND * inverse_N1 * scale_D[None], (x_ND, scale_D, inverse_N1)


def _backward(eps: float, residuals: Residuals, grad_ND: jax.Array) -> tuple[jax.Array, jax.Array]:  # noqa: ARG001
    x_ND, scale_D, inverse_N1 = residuals
    product_ND = grad_ND * x_ND
    means_N1 = product_ND @ (scale_D[:, None] / x_ND.shape[1])
    along_N1 = jax.lax.optimization_barrier(means_N1 * inverse_N1**3)
    return inverse_N1 * (grad_ND * scale_D[None]) - x_ND * along_N1, (inverse_N1.T @ product_ND)[0]


normalise.defvjp(_forward, _backward)
