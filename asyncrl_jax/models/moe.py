"""Mixture of experts: softmax top-k routing and SwiGLU experts, dropless.

Two dispatch ways behind one function, `moe`. `dense` runs every expert on every token: the reference, and the faster
one for the few tokens of a decode step. `blocked` sorts the assignments by expert, pads each expert's share to whole
blocks and runs one batched matmul, so its arithmetic grows with `experts_per_token` and not with `num_experts`.

Neither drops a token: what a token gets does not depend on its batch-mates.

Dimensions: N tokens, D hidden width, E experts, A experts of one token, F expert width, P slots (rows of all blocks),
M blocks, K rows of one block.
"""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

BLOCK_ROWS = 64  # best of 32, 64, 128 on CPU at the default size; the padding is at most this much per expert


class Routing(NamedTuple):
    """Sums over tokens, so that those of microbatches add up to those of the whole step."""

    counts_E: jax.Array  # float32; assignments of each expert (no gradient)
    prob_sums_E: jax.Array  # float32; router probability of each expert, summed over tokens
    num_tokens: jax.Array  # float32 scalar; tokens that were routed, padding left out


class Choice(NamedTuple):
    """Experts of each token."""

    ids_NA: jax.Array  # int32
    weights_NA: jax.Array  # float32; renormalised to sum to 1, and 0 for padding


class Experts(NamedTuple):
    """Weights of all experts of one layer."""

    gate_EDF: jax.Array
    up_EDF: jax.Array
    down_EFD: jax.Array


def route(logits_NE: jax.Array, valid_N: jax.Array, experts_per_token: int) -> tuple[Choice, Routing]:
    """Softmax over all experts, then the top k, renormalised (Qwen3-MoE with `norm_topk_prob`).

    Args:
      logits_NE: float32 router logits.
      valid_N: bool; False for padding, which is routed nowhere and counted nowhere.
      experts_per_token: A.
    """
    num_experts = logits_NE.shape[-1]
    probs_NE = jax.nn.softmax(logits_NE, axis=-1)
    # A argmax passes: on CPU several times faster than top_k, with the same order and ties to the lower id.
    left_NE = jax.lax.stop_gradient(probs_NE)
    ids, weights = [], []
    for _ in range(experts_per_token):
        ids.append(jnp.argmax(left_NE, axis=-1))
        chosen_NE = jax.nn.one_hot(ids[-1], num_experts, dtype=bool)
        weights.append(jnp.sum(jnp.where(chosen_NE, probs_NE, 0.0), axis=-1))
        left_NE = jnp.where(chosen_NE, -1.0, left_NE)
    weights_NA = jnp.stack(weights, axis=-1)
    weights_NA = weights_NA / jnp.sum(weights_NA, axis=-1, keepdims=True)
    taken_NE = (left_NE < 0.0) & valid_N[:, None]
    routing = Routing(
        counts_E=jnp.sum(taken_NE, axis=0, dtype=jnp.float32),
        prob_sums_E=jnp.sum(jnp.where(valid_N[:, None], probs_NE, 0.0), axis=0),
        num_tokens=jnp.sum(valid_N, dtype=jnp.float32),
    )
    return Choice(jnp.stack(ids, axis=-1), jnp.where(valid_N[:, None], weights_NA, 0.0)), routing


def _dense(x_ND: jax.Array, choice: Choice, experts: Experts) -> jax.Array:
    num_experts = experts.gate_EDF.shape[0]
    one_hot_NAE = jax.nn.one_hot(choice.ids_NA, num_experts, dtype=x_ND.dtype)
    weights_NE = jnp.einsum("NAE,NA->NE", one_hot_NAE, choice.weights_NA)
    gate_NEF = jnp.einsum("ND,EDF->NEF", x_ND, experts.gate_EDF)
    up_NEF = jnp.einsum("ND,EDF->NEF", x_ND, experts.up_EDF)
    hidden_NEF = jax.nn.silu(gate_NEF) * up_NEF * weights_NE[:, :, None]
    return jnp.einsum("NEF,EFD->ND", hidden_NEF, experts.down_EFD)


def _take(rows: jax.Array, index: jax.Array) -> jax.Array:
    """`rows[index]`, and zeros where the index is past the end."""
    return jnp.take(rows, index, axis=0, mode="fill", fill_value=0)


@jax.custom_vjp
def _to_slots(x_ND: jax.Array, token_P: jax.Array, slot_NA: jax.Array) -> jax.Array:  # noqa: ARG001, for the gradient
    """Rows of tokens laid out by slot. `slot_NA` is the inverse of `token_P`, so that the gradient is a gather too."""
    return _take(x_ND, token_P)


def _to_slots_forward(x_ND: jax.Array, token_P: jax.Array, slot_NA: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(x_ND, token_P), slot_NA


def _to_slots_backward(slot_NA: jax.Array, grad_PD: jax.Array) -> tuple[jax.Array, None, None]:
    return jnp.sum(_take(grad_PD, slot_NA), axis=1), None, None


_to_slots.defvjp(_to_slots_forward, _to_slots_backward)


@jax.custom_vjp
def _from_slots(y_PD: jax.Array, slot_NA: jax.Array, assignment_P: jax.Array) -> jax.Array:  # noqa: ARG001, likewise
    """Rows of slots laid out by (token, choice); the inverse gather of `_to_slots`."""
    return _take(y_PD, slot_NA)


def _from_slots_forward(y_PD: jax.Array, slot_NA: jax.Array, assignment_P: jax.Array) -> tuple[jax.Array, jax.Array]:
    return _take(y_PD, slot_NA), assignment_P


def _from_slots_backward(assignment_P: jax.Array, grad_NAD: jax.Array) -> tuple[jax.Array, None, None]:
    return _take(grad_NAD.reshape(-1, grad_NAD.shape[-1]), assignment_P), None, None


_from_slots.defvjp(_from_slots_forward, _from_slots_backward)


def _layout(
    ids_NA: jax.Array, valid_N: jax.Array, num_experts: int, block_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Where each assignment goes, when every expert's share is padded to whole blocks.

    Returns:
      (slot_NA, assignment_P, expert_M): slot of each assignment (P for padding), assignment of each slot (N·A for an
      empty slot), expert of each block. P is fixed by the shapes: no load, however uneven, needs more.
    """
    num_assignments = ids_NA.size
    num_blocks = -(-num_assignments // block_rows) + num_experts
    ids = jnp.where(valid_N[:, None], ids_NA, num_experts).reshape(-1)
    order = jnp.argsort(ids, stable=True)
    sorted_ids = ids[order]
    starts_E = jnp.searchsorted(sorted_ids, jnp.arange(num_experts + 1))  # also where padding starts
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


def _blocked(x_ND: jax.Array, choice: Choice, valid_N: jax.Array, experts: Experts, block_rows: int) -> jax.Array:
    choices = choice.ids_NA.shape[1]
    slot_NA, assignment_P, expert_M = _layout(choice.ids_NA, valid_N, experts.gate_EDF.shape[0], block_rows)
    x_MKD = _to_slots(x_ND, assignment_P // choices, slot_NA).reshape(len(expert_M), block_rows, -1)
    gate_MKF = jnp.einsum("MKD,MDF->MKF", x_MKD, experts.gate_EDF[expert_M])
    up_MKF = jnp.einsum("MKD,MDF->MKF", x_MKD, experts.up_EDF[expert_M])
    y_MKD = jnp.einsum("MKF,MFD->MKD", jax.nn.silu(gate_MKF) * up_MKF, experts.down_EFD[expert_M])
    y_NAD = _from_slots(y_MKD.reshape(-1, x_ND.shape[-1]), slot_NA, assignment_P)
    return jnp.sum(y_NAD * choice.weights_NA[:, :, None], axis=1)


def moe(
    x_ND: jax.Array,
    valid_N: jax.Array,
    router_DE: jax.Array,
    experts: Experts,
    *,
    experts_per_token: int,
    dispatch: str,
    block_rows: int = BLOCK_ROWS,
) -> tuple[jax.Array, Routing]:
    """Output of one MoE layer, and what its router did.

    Args:
      x_ND: float32 tokens.
      valid_N: bool; False for padding, whose output is 0.
      router_DE: router weights.
      experts: SwiGLU weights.
      experts_per_token: A.
      dispatch: "blocked" or "dense"; both compute the same function.
      block_rows: rows of one block in "blocked".

    Raises:
      ValueError: for another dispatch.
    """
    choice, routing = route(x_ND @ router_DE, valid_N, experts_per_token)
    if dispatch == "dense":
        return _dense(x_ND, choice, experts), routing
    if dispatch == "blocked":
        return _blocked(x_ND, choice, valid_N, experts, block_rows), routing
    raise ValueError(f"dispatch {dispatch!r}: use blocked or dense")


class MoE(nnx.Module):
    """One MoE layer."""

    def __init__(
        self, hidden_dim: int, expert_dim: int, num_experts: int, experts_per_token: int, std: float, rngs: nnx.Rngs
    ):
        init = nnx.initializers.normal(std)
        self.experts_per_token = experts_per_token
        self.router = nnx.Param(init(rngs.params(), (hidden_dim, num_experts)))
        self.gate_proj = nnx.Param(init(rngs.params(), (num_experts, hidden_dim, expert_dim)))
        self.up_proj = nnx.Param(init(rngs.params(), (num_experts, hidden_dim, expert_dim)))
        self.down_proj = nnx.Param(init(rngs.params(), (num_experts, expert_dim, hidden_dim)))

    def __call__(self, x_BTD: jax.Array, valid_BT: jax.Array, dispatch: str) -> tuple[jax.Array, Routing]:
        """Args: valid_BT: bool, False for padding; dispatch: see `moe`."""
        experts = Experts(self.gate_proj[...], self.up_proj[...], self.down_proj[...])
        y_ND, routing = moe(
            x_BTD.reshape(-1, x_BTD.shape[-1]),
            valid_BT.reshape(-1),
            self.router[...],
            experts,
            experts_per_token=self.experts_per_token,
            dispatch=dispatch,
        )
        return y_ND.reshape(x_BTD.shape), routing
