"""How weights and batches lie on the mesh: one table of logical dimensions, and one from those to mesh axes.

The mesh always has its four axes, also on one device, so that the step is the same program everywhere. Pipeline
parallelism is left out: expert × fsdp × tensor cover the sizes aimed at.
"""

from __future__ import annotations

import math

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from asyncrl_jax.config import MeshConfig, ModelConfig
from asyncrl_jax.models.transformer import abstract_params

AXES = ("data", "fsdp", "expert", "tensor")

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

# Mesh axis of every logical dimension.
MESH_AXIS: dict[str | None, str | None] = {
    "hidden": "fsdp",
    "heads": "tensor",
    "kv_heads": "tensor",
    "experts": "expert",
    "mlp_hidden": "tensor",
    "expert_hidden": "tensor",
    "vocab": "tensor",
    None: None,
}

BATCH_AXES = ("data", "fsdp")  # rows of a batch


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over the first data · fsdp · expert · tensor devices.

    Raises:
      ValueError: if there are fewer devices.
    """
    shape = tuple(getattr(config, axis) for axis in AXES)
    devices = jax.devices()
    if math.prod(shape) > len(devices):
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(f"mesh {sizes} needs {math.prod(shape)} devices; {len(devices)} found")
    # Auto: the compiler places the collectives; jax.make_mesh of newer JAX defaults to Explicit.
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices[: math.prod(shape)])


def param_shardings(config: ModelConfig, mesh: Mesh) -> dict[str, NamedSharding]:
    """Sharding of every weight.

    Raises:
      ValueError: if a mesh axis does not divide a dimension; it names the leaf.
    """
    shardings = {}
    for name, leaf in abstract_params(config).items():
        dims = LEAF_DIMS[name.split(".", 2)[2] if name.startswith("layers.") else name][-leaf.ndim :]
        axes = tuple(MESH_AXIS[dim] for dim in dims)
        for dim, axis, size in zip(dims, axes, leaf.shape, strict=True):
            if axis is not None and size % mesh.shape[axis]:
                raise ValueError(f"mesh axis {axis} = {mesh.shape[axis]} does not divide {dim} = {size} of {name!r}")
        shardings[name] = NamedSharding(mesh, PartitionSpec(*axes))
    return shardings


def batch_sharding(mesh: Mesh, leading_dims: int = 0) -> NamedSharding:
    """Sharding of an array whose dimension `leading_dims` counts the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading_dims, BATCH_AXES))


def replicated(mesh: Mesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())
