"""The mesh, and on which of its axes each logical dimension lies.

The mesh always has its four axes, also on one device, so that the step is the same program everywhere. Pipeline
parallelism is left out: expert × fsdp × tensor cover the sizes aimed at.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec, Sharding

from asyncrl_jax.config_model import MeshConfig

AXES = ("data", "fsdp", "expert", "tensor")

BATCH_AXES = ("data", "fsdp", "expert")  # rows of a batch: every device but those of one tensor group has its own

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


def make_mesh(config: MeshConfig) -> Mesh:
    """The mesh over the first data · fsdp · expert · tensor devices.

    Raises:
      ValueError: if there are fewer devices.
    """
    shape = tuple(getattr(config, axis) for axis in AXES)
    devices = jax.devices()
    if math.prod(shape) > len(devices):
        sizes = " × ".join(f"{axis} {size}" for axis, size in zip(AXES, shape, strict=True))
        raise ValueError(
            f"mesh {sizes} needs {math.prod(shape)} devices; {len(devices)} found. Lower one of "
            f"{', '.join(f'--config.mesh.{axis}' for axis in AXES)}"
        )
    # Auto: the compiler places the collectives; jax.make_mesh of newer JAX defaults to Explicit.
    types = (AxisType.Auto,) * len(AXES)
    return jax.make_mesh(shape, AXES, axis_types=types, devices=devices[: math.prod(shape)])


def partition(dims: tuple[str | None, ...]) -> PartitionSpec:
    """Mesh axes of an array with these logical dimensions."""
    return PartitionSpec(*(MESH_AXIS[dim] for dim in dims))


def num_batch_shards(mesh: Mesh) -> int:
    """Parts that the rows of a batch are cut into; it must divide their number."""
    return math.prod(mesh.shape[axis] for axis in BATCH_AXES)


def batch_sharding(mesh: Mesh, leading_dims: int = 0) -> NamedSharding:
    """Sharding of an array whose dimension `leading_dims` counts the rows of a batch."""
    return NamedSharding(mesh, PartitionSpec(*(None,) * leading_dims, BATCH_AXES))


def replicated(mesh: Mesh | AbstractMesh) -> NamedSharding:
    """Sharding of an array that every device holds whole."""
    return NamedSharding(mesh, PartitionSpec())


def to_mesh(array: np.ndarray, sharding: Sharding) -> jax.Array:
    """`array` laid out on the mesh, of which this process may hold a part. Only the parts of its devices are read."""
    return jax.make_array_from_callback(array.shape, sharding, lambda index: array[index])


def to_host(tree: Any) -> Any:
    """`tree` whose arrays this process can read whole; all processes must ask together.

    With one process the arrays are those of `tree`. With several every array is gathered on each, one after the other.
    """
    if jax.process_count() == 1:
        return tree
    return jax.tree.map(lambda leaf: np.asarray(multihost_utils.process_allgather(leaf, tiled=True)), tree)
