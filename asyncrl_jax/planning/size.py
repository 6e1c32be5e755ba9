"""Parameters of a model and bytes of a learner: counted from shapes, nothing is allocated.

    bytes on a device = state (masters, moments) + reference + gradients + activations of one microbatch
                      + workspace + batch

What lies like the weights is counted leaf by leaf through the sharding that the learner uses. Activations are what
reverse-mode differentiation of one microbatch keeps, read off the learner's own forward pass. Rows are divided by the
axes that shard a batch; the tensor axis is not credited there, so with it the figure is an upper bound.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from asyncrl_jax.config import Config, MeshConfig, ModelConfig
from asyncrl_jax.learner.forward import forward_on
from asyncrl_jax.learner.packing import PackedUpdate, max_rows
from asyncrl_jax.learner.state import abstract_state, state_shardings
from asyncrl_jax.models.cpu.attention import query_blocks
from asyncrl_jax.models.mesh import AXES, BATCH_AXES, make_mesh
from asyncrl_jax.models.sharding import LEAF_DIMS
from asyncrl_jax.models.transformer import abstract_params

# Of one layer's activations: what its backward pass holds beside them. Fitted to the compiler's memory analysis of
# small models, where it lies between 0 and 1; with many layers it does not matter.
WORKSPACE_SHARE = 0.65


@dataclasses.dataclass(frozen=True)
class Parameters:
    """How many parameters there are, and how many serve one token."""

    total: int
    in_experts: int
    embedding: int  # looked up, not multiplied with
    active: float

    @property
    def active_share(self) -> float:
        return self.active / self.total


@dataclasses.dataclass(frozen=True)
class LearnerBytes:
    """Bytes on one device while it makes an update."""

    masters: int  # fp32
    moments: int  # of the optimizer, and averages that follow the weights
    gradients: int  # the sum over microbatches, and that of one
    reference: int  # frozen weights for the KL; 0 without
    activations: int  # of one microbatch
    workspace: int  # of the layer whose gradient is being computed, of one row's scores, and of one chunk of logits
    batch: int  # of the packed update

    @property
    def total(self) -> int:
        return sum(dataclasses.astuple(self))


def active_share(expert_share: float, num_experts: int, experts_per_token: int) -> float:
    """Share of the parameters that serve one token, when `expert_share` of them is in experts.

    Everything outside the experts serves every token; of the experts, `experts_per_token` of `num_experts` do.
    """
    return (1.0 - expert_share) + expert_share * experts_per_token / num_experts


def parameters(model: ModelConfig) -> Parameters:
    """Parameters of a model, embedding and head included."""
    leaves = {name: math.prod(leaf.shape) for name, leaf in abstract_params(model).items()}
    total = sum(leaves.values())
    in_experts = sum(size for name, size in leaves.items() if "experts" in _dims(name))
    share = active_share(in_experts / total, max(model.num_experts, 1), max(model.experts_per_token, 1))
    return Parameters(total, in_experts, leaves["embedding"], share * total)


def learner_bytes(config: Config) -> LearnerBytes:
    """Bytes on each device of the config's mesh.

    Raises:
      ValueError: if a mesh axis does not divide a dimension; it names the leaf.
    """
    axes = tuple(getattr(config.mesh, axis) for axis in AXES)
    mesh = AbstractMesh(axes, AXES, axis_types=(AxisType.Auto,) * len(AXES))
    shapes = abstract_state(config)
    shardings = state_shardings(config, mesh)
    weights = _sharded_bytes(shapes.params, shardings.params)
    state = _sharded_bytes(shapes, shardings)
    activations = _activation_bytes(config)
    keeps_reference = config.learner.kl.coefficient > 0 and config.learner.kl.reference == "fixed"
    return LearnerBytes(
        masters=weights,
        moments=state - weights,
        gradients=2 * weights,
        reference=weights if keeps_reference else 0,
        activations=activations,
        workspace=round(WORKSPACE_SHARE * activations / config.model.num_layers)
        + _scores_bytes(config)
        + _logits_bytes(config),
        batch=sum(_bytes(leaf) for leaf in _packed_shapes(config, _rows_per_device(config))),
    )


def cache_bytes(model: ModelConfig, tokens: float, bytes_per_value: int = 2) -> float:
    """Bytes of an engine's keys and values for one sequence of this many tokens."""
    projections = (leaf for name, leaf in abstract_params(model).items() if name.endswith(("k_proj", "v_proj")))
    per_token = sum(math.prod(leaf.shape[1:]) for leaf in projections)
    return per_token * tokens * bytes_per_value


def attention_dims(model: ModelConfig) -> tuple[int, int, int]:
    """(layers, query heads, widths of a key and a value together) for the arithmetic of attention."""
    leaves = abstract_params(model)
    widths = [leaves[f"layers.0.attention.{name}"].shape[-1] for name in ("k_proj", "v_proj")]
    return model.num_layers, model.num_heads, sum(widths)


def _dims(name: str) -> tuple[str | None, ...]:
    return LEAF_DIMS[name.split(".", 2)[2] if name.startswith("layers.") else name]


def _bytes(leaf: Any) -> int:
    return math.prod(leaf.shape) * np.dtype(leaf.dtype).itemsize


def _sharded_bytes(shapes: Any, shardings: Any) -> int:
    """Bytes of a tree on one device."""

    def of_leaf(leaf: Any, sharding: Any) -> int:
        return math.prod(sharding.shard_shape(leaf.shape)) * np.dtype(leaf.dtype).itemsize

    return sum(jax.tree.leaves(jax.tree.map(of_leaf, shapes, shardings)))


def _rows_per_device(config: Config) -> int:
    shards = math.prod(getattr(config.mesh, axis) for axis in BATCH_AXES)
    return math.ceil(config.learner.microbatch_rows / shards)


def _packed_shapes(config: Config, rows: int) -> list[jax.ShapeDtypeStruct]:
    """Leaves of the whole packed update on a device: some ten numbers a position."""
    microbatches = math.ceil(max_rows(config) / config.learner.microbatch_rows)
    shape = (microbatches, rows, config.learner.pack_tokens)
    names = set(PackedUpdate._fields) - set(PackedUpdate._field_defaults) - {"num_microbatches"}
    return [jax.ShapeDtypeStruct(shape, jnp.float32) for _ in names]


def _logits_bytes(config: Config) -> int:
    """Of the chunk that the head works on: float32 logits and their gradient, on one device."""
    positions = min(config.model.head_chunk_tokens, _rows_per_device(config) * config.learner.pack_tokens)
    return 2 * 4 * positions * math.ceil(config.model.vocab_size / config.mesh.tensor)


def _scores_bytes(config: Config) -> int:
    """Of the block of queries that attention works on: float32 scores, weights and the gradients of both."""
    length = config.learner.pack_tokens
    queries = max(block.stop - block.start for block in query_blocks(length))
    return 4 * 4 * math.ceil(config.model.num_heads / config.mesh.tensor) * length * queries


def _activation_bytes(config: Config) -> int:
    """Bytes that the backward pass of one microbatch keeps, besides the weights themselves."""
    one = dataclasses.replace(config, mesh=MeshConfig())
    forward = forward_on(one, make_mesh(one.mesh))
    shape = (_rows_per_device(config), config.learner.pack_tokens)
    numbers, integers = (jax.ShapeDtypeStruct(shape, dtype) for dtype in (jnp.float32, jnp.int32))
    batch = _Rows(integers, integers, integers, integers, numbers, jax.ShapeDtypeStruct(shape, jnp.bool_))

    def residuals(params: Any, batch: _Rows) -> Any:
        def logprobs(params: Any) -> Any:
            x_BTD, routing = forward.trunk(params, batch)
            return forward.scores(params, x_BTD, batch).logprobs, routing.prob_sums_E

        return jax.vjp(logprobs, params)[1]

    jaxpr = jax.make_jaxpr(residuals)(abstract_params(config.model), batch).jaxpr
    given = set(jaxpr.invars)
    kept = {variable for variable in jaxpr.outvars if not hasattr(variable, "val") and variable not in given}
    return sum(_bytes(variable.aval) for variable in kept)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Rows:
    """One microbatch, as far as a forward pass reads it."""

    tokens: Any
    positions: Any
    segment_ids: Any
    targets: Any
    temperature: Any
    loss_mask: Any
