"""The dense MLP: SwiGLU.

Dimensions: D hidden width, F width of the MLP.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import nnx


class MLP(nnx.Module):
    """`down(silu(gate(x)) · up(x))`. Weights are float32 and used in the dtype of what they multiply."""

    def __init__(self, hidden_dim: int, mlp_dim: int, *, bias: bool, std: float, rngs: nnx.Rngs):
        init = nnx.initializers.normal(std)
        self.bias = bias
        self.gate_proj = nnx.Param(init(rngs.params(), (hidden_dim, mlp_dim)))
        self.up_proj = nnx.Param(init(rngs.params(), (hidden_dim, mlp_dim)))
        self.down_proj = nnx.Param(init(rngs.params(), (mlp_dim, hidden_dim)))
        if bias:
            self.gate_bias = nnx.Param(jnp.zeros(mlp_dim))
            self.up_bias = nnx.Param(jnp.zeros(mlp_dim))
            self.down_bias = nnx.Param(jnp.zeros(hidden_dim))

    def __call__(self, x_BTD: jax.Array) -> jax.Array:
        """[B, T, D]."""
        gate_BTF = self._linear(x_BTD, self.gate_proj, self.gate_bias if self.bias else None)
        up_BTF = self._linear(x_BTD, self.up_proj, self.up_bias if self.bias else None)
        return self._linear(jax.nn.silu(gate_BTF) * up_BTF, self.down_proj, self.down_bias if self.bias else None)

    def _linear(self, x: jax.Array, weight: nnx.Param, bias: nnx.Param | None) -> jax.Array:
        y = x @ weight[...].astype(x.dtype)
        return y if bias is None else y + bias[...].astype(x.dtype)[None, None]
