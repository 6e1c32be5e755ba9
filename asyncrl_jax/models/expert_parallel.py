"""The experts of one layer on a mesh: each token is sent to the shard that holds its expert, and its result comes back.

    tokens of a shard ──▶ all_to_all over `expert` ──▶ run_experts on its own ──▶ all_to_all back ──▶ sum over `tensor`

Tokens lie on data × fsdp × expert, experts on `expert`, their hidden width on `tensor`, their model width on `fsdp`
(gathered before use, as the rest of the weights is). It is dropless for any load: a shard sends at most `cell` rows to
another in one exchange, and what is left over goes in further exchanges.

Cost. `cell` is `buffer_factor` times the balanced share, so one exchange, the usual case, moves
2 · buffer_factor · N · A rows of D values, and the experts run on buffer_factor · N · A rows. All devices agree on the
number of rows for the busiest shard (`pmax`), so further exchanges happen only when somebody needs them; there are at
most min(A, E) · S ÷ (buffer_factor · A) of them, when all tokens want one shard. Memory is that of two exchanges: the
further ones are recomputed in the backward pass. A single buffer for the worst case would cost up to S ÷ buffer_factor
times the memory and time always, whatever the load. What tells a receiver which rows are in use travels with them: an
empty row has the id NO_EXPERT.

Dimensions: B rows, T positions, N tokens of one device, D hidden width, E experts of one shard, A assignments of one
token, S shards of the expert axis, P slots of one exchange.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from asyncrl_jax.models.experts import Experts, from_slots, run_experts, to_slots
from asyncrl_jax.models.mesh import AXES, BATCH_AXES, num_batch_shards, partition
from asyncrl_jax.models.router import NO_EXPERT

BUFFER_FACTOR = 1.5


def run_experts_on_mesh(
    x_BTD: jax.Array,
    ids_BTA: jax.Array,
    weights_BTA: jax.Array,
    experts: Experts,
    mesh: Mesh,
    *,
    dispatch: str,
    buffer_factor: float = BUFFER_FACTOR,
) -> jax.Array:
    """`run_experts` over all devices of the mesh: [B, T, D]. Equal to one device's, gradients included.

    Args:
      x_BTD: tokens.
      ids_BTA: int32 experts of each token, counted over all shards; NO_EXPERT for none.
      weights_BTA: float32.
      experts: weights of all experts.
      mesh: with the axes of `mesh.AXES`.
      dispatch: of the experts on each device, see `run_experts`.
      buffer_factor: rows of one exchange ÷ rows of a balanced load.

    Raises:
      ValueError: if the mesh does not divide rows or experts.
    """
    num_rows, num_experts = x_BTD.shape[0], experts.gate_EDF.shape[0]
    if num_rows % num_batch_shards(mesh):
        raise ValueError(
            f"{num_rows} rows do not divide over the mesh's {' × '.join(BATCH_AXES)} = {num_batch_shards(mesh)}"
        )
    if num_experts % mesh.shape["expert"]:
        raise ValueError(f"mesh axis expert = {mesh.shape['expert']} does not divide {num_experts} experts")
    rows, into = PartitionSpec(BATCH_AXES), partition(("experts", "hidden", "expert_hidden"))
    out_of = partition(("experts", "expert_hidden", "hidden"))
    local = functools.partial(
        _on_device, num_shards=mesh.shape["expert"], dispatch=dispatch, buffer_factor=buffer_factor
    )
    sharded = jax.shard_map(local, mesh=mesh, in_specs=(rows, rows, rows, into, into, out_of), out_specs=rows)
    return sharded(x_BTD, ids_BTA, weights_BTA, *experts)


def _varying(tree: Any, axes: tuple[str, ...]) -> Any:
    """`tree` as values that may differ along `axes`, so that their gradient is summed over those."""
    return jax.tree.map(lambda leaf: jax.lax.pcast(leaf, axes, to="varying"), tree)


def _on_device(
    x_BTD: jax.Array,
    ids_BTA: jax.Array,
    weights_BTA: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    *,
    num_shards: int,
    dispatch: str,
    buffer_factor: float,
) -> jax.Array:
    x_BTD, ids_BTA, weights_BTA = _varying((x_BTD, ids_BTA, weights_BTA), ("tensor",))
    gate_EDF, up_EDF, down_EFD = _varying((gate_EDF, up_EDF, down_EFD), ("data",))
    gather = functools.partial(jax.lax.all_gather, axis_name="fsdp", tiled=True)
    experts = Experts(gather(gate_EDF, axis=1), gather(up_EDF, axis=1), gather(down_EFD, axis=2))
    x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
    ids_NA, weights_NA = (array.reshape(-1, array.shape[-1]) for array in (ids_BTA, weights_BTA))
    if num_shards == 1:
        y_ND = run_experts(x_ND, ids_NA, weights_NA, experts, dispatch=dispatch)
    else:
        y_ND = _exchanged(
            x_ND,
            ids_NA,
            weights_NA,
            experts,
            num_shards=num_shards,
            dispatch=dispatch,
            buffer_factor=buffer_factor,
        )
    # Each device of a tensor group has the part of its slice of the experts' hidden width.
    return jax.lax.psum(y_ND, "tensor").reshape(x_BTD.shape)


def _exchanged(
    x_ND: jax.Array,
    ids_NA: jax.Array,
    weights_NA: jax.Array,
    experts: Experts,
    *,
    num_shards: int,
    dispatch: str,
    buffer_factor: float,
) -> jax.Array:
    num_tokens, choices = ids_NA.shape
    shard_experts = experts.gate_EDF.shape[0]
    shard_NA = jnp.where(ids_NA == NO_EXPERT, num_shards, ids_NA // shard_experts)
    rank_NA, sizes_S = _ranks(shard_NA, num_shards)
    largest = num_tokens * min(choices, shard_experts)  # rows for one shard, in the worst case
    cell = min(largest, max(1, math.ceil(buffer_factor * num_tokens * choices / num_shards)))
    busiest = jax.lax.pmax(jnp.max(sizes_S), AXES)

    def exchange(index: jax.Array) -> jax.Array:
        """What the rows ranked from index · cell to (index + 1) · cell give."""
        place_NA = rank_NA - index * cell
        inside_NA = (shard_NA < num_shards) & (place_NA >= 0) & (place_NA < cell)
        slot_NA = jnp.where(inside_NA, shard_NA * cell + place_NA, num_shards * cell)
        return _one_exchange(
            x_ND, ids_NA % shard_experts, weights_NA, experts, slot_NA, num_slots=num_shards * cell, dispatch=dispatch
        )

    def further(y_ND: jax.Array, index: jax.Array) -> tuple[jax.Array, None]:

        def nothing(_: jax.Array) -> jax.Array:
            return _varying(jnp.zeros(x_ND.shape, x_ND.dtype), AXES)

        needed = index * cell < busiest
        return y_ND + jax.lax.cond(needed, jax.checkpoint(exchange), nothing, index), None

    y_ND = exchange(jnp.zeros((), jnp.int32))
    num_exchanges = math.ceil(largest / cell)
    if num_exchanges > 1:
        y_ND, _ = jax.lax.scan(further, y_ND, jnp.arange(1, num_exchanges, dtype=jnp.int32))
    return y_ND


def _ranks(shard_NA: jax.Array, num_shards: int) -> tuple[jax.Array, jax.Array]:
    """(rank of each assignment among those for the same shard, number of those per shard)."""
    shard = shard_NA.reshape(-1)
    order = jnp.argsort(shard, stable=True)
    sorted_shard = shard[order]
    starts = jnp.searchsorted(sorted_shard, jnp.arange(num_shards + 1))
    ranks = (jnp.arange(shard.size) - starts[sorted_shard]).astype(jnp.int32)
    rank = jnp.zeros(shard.size, jnp.int32).at[order].set(ranks, unique_indices=True)
    return rank.reshape(shard_NA.shape), jnp.diff(starts)


def _one_exchange(
    x_ND: jax.Array,
    local_ids_NA: jax.Array,
    weights_NA: jax.Array,
    experts: Experts,
    slot_NA: jax.Array,
    *,
    num_slots: int,
    dispatch: str,
) -> jax.Array:
    """Sends the assignments that have a slot, runs them where their experts are, and brings the results home."""
    num_assignments, choices = slot_NA.size, slot_NA.shape[1]
    slots = slot_NA.reshape(-1)
    assignment_P = jnp.full(num_slots, num_assignments, jnp.int32)
    assignment_P = assignment_P.at[slots].set(jnp.arange(num_assignments, dtype=jnp.int32), mode="drop")
    ids_P = jnp.take(local_ids_NA.reshape(-1), assignment_P, mode="fill", fill_value=NO_EXPERT)
    weights_P1 = to_slots(weights_NA.reshape(-1, 1), assignment_P, slots[:, None])
    x_PD = to_slots(x_ND, assignment_P // choices, slot_NA)
    swap = functools.partial(jax.lax.all_to_all, axis_name="expert", split_axis=0, concat_axis=0, tiled=True)
    y_PD = run_experts(swap(x_PD), swap(ids_P)[:, None], swap(weights_P1), experts, dispatch=dispatch)
    return jnp.sum(from_slots(swap(y_PD), slot_NA, assignment_P), axis=1)
