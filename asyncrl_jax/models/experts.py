"""The experts of one layer on the rows of one device: `run_experts`, three dispatch ways behind one function.

    dense     every expert on every row: the reference, and the faster one for the few rows of a decode step
    blocked   rows sorted by expert, each expert's share padded to whole blocks, one batched matmul: its arithmetic
              grows with the assignments and not with the experts; runs everywhere, on CPU by `cpu/experts.py`
    ragged    rows sorted by expert, `jax.lax.ragged_dot`: grouped matmuls of GPU and TPU; on CPU E times the cost

All three give the same output and the same gradients, and none drops a row: what a row gets does not depend on the
others.

Dimensions: N rows, D hidden width, E experts, A assignments of one row, F expert width, P slots (rows of all blocks),
M blocks, K rows of one block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp

from asyncrl_jax.models.cpu import experts as cpu_experts
from asyncrl_jax.models.router import NO_EXPERT

BLOCK_ROWS = 64  # the padding is at most this much per expert
DISPATCHES = ("blocked", "dense", "ragged")


class Experts(NamedTuple):
    """SwiGLU weights of all experts of one layer."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array


def run_experts(
    x_ND: jax.Array,
    ids_NA: jax.Array,
    weights_NA: jax.Array,
    experts: Experts,
    *,
    dispatch: str,
    block_rows: int | None = None,
) -> jax.Array:
    """Σ over the assignments of a row: weight · expert(row). [N, D].

    Args:
      x_ND: rows.
      ids_NA: int32 experts of each row; NO_EXPERT where an assignment counts for nothing.
      weights_NA: float32.
      experts: weights.
      dispatch: one of DISPATCHES.
      block_rows: rows of one block in "blocked"; None for a good number.

    Raises:
      ValueError: for another dispatch.
    """
    if dispatch == "dense":
        return _dense(x_ND, ids_NA, weights_NA, experts)
    if dispatch == "blocked":
        # bfloat16 is left to the plain version: its sums over blocks would round each time.
        if jax.default_backend() == "cpu" and x_ND.dtype == jnp.float32:
            rows = block_rows or cpu_experts.block_rows(ids_NA.size, len(experts.gate_EDF))
            return cpu_experts.run_sorted(x_ND, ids_NA, weights_NA, *experts, rows)
        return run_blocks(x_ND, ids_NA, weights_NA, experts, block_rows or BLOCK_ROWS)
    if dispatch == "ragged":
        return _ragged(x_ND, ids_NA, weights_NA, experts)
    raise ValueError(f"dispatch {dispatch!r}: use one of {', '.join(DISPATCHES)}")


def _dense(x_ND: jax.Array, ids_NA: jax.Array, weights_NA: jax.Array, experts: Experts) -> jax.Array:
    one_hot_NAE = jax.nn.one_hot(ids_NA, experts.gate_EDF.shape[0], dtype=x_ND.dtype)  # zeros for NO_EXPERT
    weights_NE = jnp.einsum("NAE,NA->NE", one_hot_NAE, weights_NA)
    gate_NEF = jnp.einsum("ND,EDF->NEF", x_ND, experts.gate_EDF)
    up_NEF = jnp.einsum("ND,EDF->NEF", x_ND, experts.up_EDF)
    hidden_NEF = jax.nn.silu(gate_NEF) * up_NEF * weights_NE[:, :, None]
    return jnp.einsum("NEF,EFD->ND", hidden_NEF, experts.down_EFD)


def run_blocks(
    x_ND: jax.Array, ids_NA: jax.Array, weights_NA: jax.Array, experts: Experts, block_rows: int
) -> jax.Array:
    """The plain version of "blocked"."""
    slot_NA, assignment_P, expert_M = _layout(ids_NA, experts.gate_EDF.shape[0], block_rows)
    x_MKD = to_slots(x_ND, assignment_P // ids_NA.shape[1], slot_NA).reshape(len(expert_M), block_rows, -1)
    gate_MKF = jnp.einsum("MKD,MDF->MKF", x_MKD, experts.gate_EDF[expert_M])
    up_MKF = jnp.einsum("MKD,MDF->MKF", x_MKD, experts.up_EDF[expert_M])
    y_MKD = jnp.einsum("MKF,MFD->MKD", jax.nn.silu(gate_MKF) * up_MKF, experts.down_EFD[expert_M])
    y_NAD = from_slots(y_MKD.reshape(-1, x_ND.shape[-1]), slot_NA, assignment_P)
    return jnp.sum(y_NAD * weights_NA[:, :, None], axis=1)


def _ragged(x_ND: jax.Array, ids_NA: jax.Array, weights_NA: jax.Array, experts: Experts) -> jax.Array:
    num_experts, num_assignments = experts.gate_EDF.shape[0], ids_NA.size
    ids = jnp.where(ids_NA == NO_EXPERT, num_experts, ids_NA).reshape(-1)
    order_P = jnp.argsort(ids, stable=True).astype(jnp.int32)
    slot_NA = (
        jnp.zeros(num_assignments, jnp.int32)
        .at[order_P]
        .set(jnp.arange(num_assignments, dtype=jnp.int32), unique_indices=True)
    )
    slot_NA = slot_NA.reshape(ids_NA.shape)
    sizes_E = jnp.diff(jnp.searchsorted(ids[order_P], jnp.arange(num_experts + 1))).astype(jnp.int32)
    x_PD = to_slots(x_ND, order_P // ids_NA.shape[1], slot_NA)
    gate_PF = jax.lax.ragged_dot(x_PD, experts.gate_EDF, sizes_E)  # rows past the sizes' sum give zeros
    up_PF = jax.lax.ragged_dot(x_PD, experts.up_EDF, sizes_E)
    y_PD = jax.lax.ragged_dot(jax.nn.silu(gate_PF) * up_PF, experts.down_EFD, sizes_E)
    return jnp.sum(from_slots(y_PD, slot_NA, order_P) * weights_NA[:, :, None], axis=1)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """`rows[index]`, and zeros where the index is past the end."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def to_slots(x_ND: jax.Array, token_P: jax.Array, slot_NA: jax.Array) -> jax.Array:  # noqa: ARG001, for the gradient
    """Rows of tokens laid out by slot. `slot_NA` is the inverse of `token_P`, so that the gradient is a gather too."""
    return _take(x_ND, token_P)


def _to_slots_forward(x_ND: jax.Array, token_P: jax.Array, slot_NA: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(x_ND, token_P), slot_NA


def _to_slots_backward(slot_NA: jax.Array, grad_PD: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(_take(grad_PD, slot_NA), axis=1), None, None


to_slots.defvjp(_to_slots_forward, _to_slots_backward)


@jax.custom_vjp
def from_slots(y_PD: jax.Array, slot_NA: jax.Array, assignment_P: jax.Array) -> jax.Array:  # noqa: ARG001, likewise
    """Rows of slots laid out by (token, choice); the inverse gather of `to_slots`."""
    return _take(y_PD, slot_NA)


def _from_slots_forward(y_PD: jax.Array, slot_NA: jax.Array, assignment_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(y_PD, slot_NA), assignment_P


def _from_slots_backward(assignment_P: jax.Array, grad_NAD: jax.Array) -> tuple[jax.Array, None, None]:
    return _take(grad_NAD.reshape(-1, grad_NAD.shape[-1]), assignment_P), None, None


from_slots.defvjp(_from_slots_forward, _from_slots_backward)


def _layout(ids_NA: jax.Array, num_experts: int, block_rows: int) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where each assignment goes, when every expert's share is padded to whole blocks.

    Returns:
      (slot_NA, assignment_P, expert_M): slot of each assignment (P for NO_EXPERT), assignment of each slot (N·A for an
      empty slot), expert of each block. P is fixed by the shapes: no load, however uneven, needs more.
    """
    num_assignments = ids_NA.size
    num_blocks = -(-num_assignments // block_rows) + num_experts
    ids = jnp.where(ids_NA == NO_EXPERT, num_experts, ids_NA).reshape(-1)
    order = jnp.argsort(ids, stable=True)
    sorted_ids = ids[order]
    starts_E = jnp.searchsorted(sorted_ids, jnp.arange(num_experts + 1))  # also where NO_EXPERT starts
    blocks_E = -(-jnp.diff(starts_E) // block_rows)
    block_ends_E = jnp.cumsum(blocks_E)
    offset_E = (block_ends_E - blocks_E) * block_rows - starts_E[:-1]
    sorted_slots = jnp.arange(num_assignments) + jnp.append(offset_E, 0)[sorted_ids]
    sorted_slots = jnp.where(sorted_ids < num_experts, sorted_slots, num_blocks * block_rows)
    slot_NA = jnp.zeros(num_assignments, jnp.int32).at[order].set(sorted_slots.astype(jnp.int32), unique_indices=True)
    assignment_P = jnp.full(num_blocks * block_rows, num_assignments, jnp.int32)
    assignment_P = assignment_P.at[sorted_slots].set(order.astype(jnp.int32), mode="drop")
    expert_M = jnp.searchsorted(block_ends_E, jnp.arange(num_blocks), side="right")
    return slot_NA.reshape(ids_NA.shape), assignment_P, jnp.minimum(expert_M, num_experts - 1)
