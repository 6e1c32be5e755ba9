"""How weights lie on the mesh: the logical dimensions of every leaf; `mesh.py` says which axis each of those has."""

from __future__ import annotations

from jax.sharding import AbstractMesh, Mesh, NamedSharding

from asyncrl_jax.config_model import ModelConfig
from asyncrl_jax.models.mesh import MESH_AXIS, partition
from asyncrl_jax.models.transformer import abstract_params

# Logical dimensions of every leaf, by its name within the layer. A norm of each head lacks the dimension of the heads.
LEAF_DIMS: dict[str, tuple[str | None, ...]] = {
    "embedding": ("vocab", "hidden"),
    "norm": (None,),
    "lm_head": ("hidden", "vocab"),
    "attention_norm": (None,),
    "attention.q_proj": ("hidden", "heads", None),
    "attention.k_proj": ("hidden", "kv_heads", None),
    "attention.v_proj": ("hidden", "kv_heads", None),
    "attention.o_proj": ("heads", None, "hidden"),
    "attention.q_bias": ("heads", None),
    "attention.k_bias": ("kv_heads", None),
    "attention.v_bias": ("kv_heads", None),
    "attention.o_bias": (None,),
    "attention.q_norm": ("heads", None),
    "attention.k_norm": ("kv_heads", None),
    "attention.sinks": ("heads",),
    "mlp_norm": (None,),
    "mlp.gate_proj": ("hidden", "mlp_hidden"),
    "mlp.up_proj": ("hidden", "mlp_hidden"),
    "mlp.down_proj": ("mlp_hidden", "hidden"),
    "mlp.gate_bias": ("mlp_hidden",),
    "mlp.up_bias": ("mlp_hidden",),
    "mlp.down_bias": (None,),
    "moe_norm": (None,),
    "moe.router": ("hidden", None),
    "moe.router_bias": (None,),
    "moe.gate_proj": ("experts", "hidden", "expert_hidden"),
    "moe.up_proj": ("experts", "hidden", "expert_hidden"),
    "moe.down_proj": ("experts", "expert_hidden", "hidden"),
}


def param_shardings(config: ModelConfig, mesh: Mesh | AbstractMesh) -> dict[str, NamedSharding]:
    """Sharding of every weight.

    Raises:
      ValueError: if a mesh axis does not divide a dimension; it names the leaf, the axis and its flag.
    """
    shardings = {}
    for name, leaf in abstract_params(config).items():
        dims = LEAF_DIMS[name.split(".", 2)[2] if name.startswith("layers.") else name][-leaf.ndim :]
        for dim, size in zip(dims, leaf.shape, strict=True):
            axis = MESH_AXIS[dim]
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(
                    f"mesh axis {axis} = {mesh.shape[axis]} does not divide {dim} = {size} of {name!r}; "
                    f"set --config.mesh.{axis} to a divisor of {size}"
                )
        shardings[name] = NamedSharding(mesh, partition(dims))
    return shardings
