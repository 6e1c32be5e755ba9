"""Experts on one CPU core: rows sorted by expert, one expert at a time, in blocks that fit the cache.

The plain version gives each block a copy of its expert's weights and pads every share to whole blocks; both are traffic
that a core waits for. Here the loop over experts takes its weights once, the loop over blocks runs as often as there
are rows, and only real rows are stored. A last block that is not full runs over into the next expert's rows, which that
expert, coming later, overwrites; in sums over rows, what runs over weighs 0.

The gate's and the up projection's outputs are kept for the gradient, and nothing else.

Dimensions: N rows, D hidden width, E experts, A assignments of one row, F expert width, S sorted assignments (N·A and a
block to run over into), K rows of one block.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from asyncrl_jax.models.cpu.features import transposed
from asyncrl_jax.models.router import NO_EXPERT

FEW_ASSIGNMENTS = 32  # below so many an expert, on average
_FEW_TO_COMPARE = 1024
_OVERFLOW_ROWS = 8
# Rows of one block, by the least balanced share of an expert that it is best for.
BLOCK_ROWS = ((1024, 128), (256, 64), (0, 32))


class _Order(NamedTuple):
    """Assignments sorted by expert."""

    assignment_S: jax.Array  # int32; which assignment is at each place
    place_NA: jax.Array  # int32; where each assignment is
    start_E: jax.Array  # int32; where each expert's share starts
    count_E: jax.Array  # int32


Residuals = tuple[jax.Array, jax.Array, tuple[jax.Array, ...], _Order, jax.Array, jax.Array]


def block_rows(num_assignments: int, num_experts: int) -> int:
    """Rows of one block: few run over, and the product of one is not too small."""
    return next(rows for share, rows in BLOCK_ROWS if num_assignments >= share * num_experts)


@functools.partial(jax.custom_vjp, nondiff_argnums=(6,))
def run_sorted(
    x_ND: jax.Array,
    ids_NA: jax.Array,
    weights_NA: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    rows: int,
) -> jax.Array:
    """Σ over the assignments of a row: weight · SwiGLU expert(row). [N, D].

    Args:
      x_ND: float32 rows.
      ids_NA: int32 experts of each row; NO_EXPERT where an assignment counts for nothing.
      weights_NA: float32.
      gate_EDF, up_EDF, down_EFD: float32 weights of the experts.
      rows: K, see `block_rows`.
    """
    if ids_NA.size < FEW_ASSIGNMENTS * len(gate_EDF):
        return _run_few(x_ND, ids_NA, weights_NA, gate_EDF, up_EDF, down_EFD)
    return _run_blocks(x_ND, ids_NA, weights_NA, (gate_EDF, up_EDF, down_EFD), rows, for_gradient=False)[0]


def _run_few(
    x_ND: jax.Array,
    ids_NA: jax.Array,
    weights_NA: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
) -> jax.Array:
    """`run_sorted` of a decode step, without gradient: reading the weights is most of it, and taking them out one
    expert at a time would copy them all. So as many rows of every expert as are its balanced share go through one
    batched product, which reads them in place, and what is left goes through blocks.
    """
    num_experts, choices = len(gate_EDF), ids_NA.shape[1]
    first = _OVERFLOW_ROWS * -(-ids_NA.size // (num_experts * _OVERFLOW_ROWS))
    order = _sort(ids_NA, num_experts, max(first, _OVERFLOW_ROWS))

    def of(x_KD: jax.Array, gate_DF: jax.Array, up_DF: jax.Array, down_FD: jax.Array) -> jax.Array:
        return jnp.matmul(jax.nn.silu(jnp.matmul(x_KD, gate_DF)) * jnp.matmul(x_KD, up_DF), down_FD)

    places_EC = order.start_E[:, None] + jnp.arange(first, dtype=jnp.int32)[None]
    x_ECD = _take(x_ND, _take(order.assignment_S, places_EC) // choices)
    y_ECD = of(x_ECD, gate_EDF, up_EDF, down_EFD)
    ends_E = jnp.cumsum(-(-jnp.maximum(order.count_E - first, 0) // _OVERFLOW_ROWS))

    def block(index: jax.Array, y_SD: jax.Array) -> jax.Array:
        expert = jnp.sum(ends_E <= index, dtype=jnp.int32)
        before = jnp.where(expert > 0, ends_E[expert - 1], 0)
        at = order.start_E[expert] + first + (index - before) * _OVERFLOW_ROWS
        x_KD = _take(x_ND, jax.lax.dynamic_slice_in_dim(order.assignment_S, at, _OVERFLOW_ROWS) // choices)
        return _put(y_SD, of(x_KD, gate_EDF[expert], up_EDF[expert], down_EFD[expert]), at)

    (start_SD,) = _zeros(order, (ids_NA.size + _OVERFLOW_ROWS, x_ND.shape[1]))
    y_SD = jax.lax.fori_loop(0, ends_E[-1], block, start_SD)
    # Where each assignment's row is: in the product's output, or after it, at its place.
    nth_NA = order.place_NA - _take(order.start_E, jnp.maximum(ids_NA, 0))
    row_NA = jnp.where(nth_NA < first, jnp.maximum(ids_NA, 0) * first + nth_NA, num_experts * first + order.place_NA)
    rows_RD = jnp.concatenate([y_ECD.reshape(-1, x_ND.shape[1]), y_SD])
    return _sum_of_assignments(rows_RD, order._replace(place_NA=row_NA), weights_NA, ids_NA != NO_EXPERT)


def _sort(ids_NA: jax.Array, num_experts: int, rows: int) -> _Order:
    ids = jnp.where(ids_NA == NO_EXPERT, num_experts, ids_NA).reshape(-1)
    assert (num_experts + 1) * ids.size < 2**31, "expert and assignment share 31 bits"
    places = jnp.arange(ids.size, dtype=jnp.int32)
    # One array to sort, instead of the two of a stable argsort: a fifth of the time.
    keys = jnp.sort(ids * ids.size + places)
    order = keys % ids.size
    firsts = jnp.arange(num_experts + 1, dtype=jnp.int32) * ids.size
    # Of few, all comparisons at once take less than the steps of a search.
    method = "compare_all" if ids.size <= _FEW_TO_COMPARE else "scan"
    bounds = jnp.searchsorted(keys, firsts, method=method).astype(jnp.int32)
    place = jnp.zeros(ids.size, jnp.int32).at[order].set(places, unique_indices=True)
    return _Order(
        assignment_S=jnp.pad(order, (0, rows)),
        place_NA=place.reshape(ids_NA.shape),
        start_E=bounds[:-1],
        count_E=jnp.diff(bounds),
    )


def _take(array: jax.Array, index: jax.Array) -> jax.Array:
    """`array[index]` without the checks of its bounds, which cost as much as the rows."""
    return array.at[index].get(mode="promise_in_bounds", wrap_negative_indices=False)


def _zeros(order: _Order, *shapes: tuple[int, ...]) -> tuple[jax.Array, ...]:
    """Zeros that vary over the same devices as the rows, as a loop's start must inside of `shard_map`."""
    varying = (order.start_E[0] * 0).astype(jnp.float32)  # of integers, the compiler knows this product
    return tuple(jnp.full(shape, varying) for shape in shapes)


def _sum_of_assignments(
    rows_SD: jax.Array,
    order: _Order,
    weights_NA: jax.Array | None = None,
    assigned_NA: jax.Array | None = None,
) -> jax.Array:
    """[N, D]: Σ over the assignments of each row, without what no expert computed."""
    if assigned_NA is None:
        assigned_NA = order.place_NA < jnp.sum(order.count_E)

    def part(choice: int) -> jax.Array:
        part_ND = _take(rows_SD, order.place_NA[:, choice])
        if weights_NA is not None:
            part_ND *= weights_NA[:, choice, None]
        return jnp.where(assigned_NA[:, choice, None], part_ND, 0.0)

    # One fused loop; a reduction would first write out [N, A, D].
    return functools.reduce(jnp.add, [part(choice) for choice in range(order.place_NA.shape[1])])


def _put(array: jax.Array, block: jax.Array, start: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(array, block, start, axis=0)


def _over_blocks(count: jax.Array, rows: int, block: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
    """`block(offset, carry)` for every block of an expert's share."""
    return jax.lax.fori_loop(0, -(-count // rows), lambda index, carry: block(index * rows, carry), carry)


def _forward(
    x_ND: jax.Array,
    ids_NA: jax.Array,
    weights_NA: jax.Array,
    gate_EDF: jax.Array,
    up_EDF: jax.Array,
    down_EFD: jax.Array,
    rows: int,
) -> tuple[jax.Array, Residuals]:
    y_ND, residuals = _run_blocks(x_ND, ids_NA, weights_NA, (gate_EDF, up_EDF, down_EFD), rows, for_gradient=True)
    assert residuals is not None
    return y_ND, residuals


def _run_blocks(
    x_ND: jax.Array,
    ids_NA: jax.Array,
    weights_NA: jax.Array,
    experts: tuple[jax.Array, ...],
    rows: int,
    *,
    for_gradient: bool,
) -> tuple[jax.Array, Residuals | None]:
    """(output, what the gradient needs)."""
    num_experts, width, expert_width = experts[0].shape
    choices, length = ids_NA.shape[1], ids_NA.size + rows
    order = _sort(ids_NA, num_experts, rows)
    # The last block may run over into rows of no expert. They weigh 0, and 0 times what they hold must be 0.
    x_ND = jnp.where(jnp.all(ids_NA == NO_EXPERT, axis=1)[:, None], 0.0, x_ND)

    def expert(stored: tuple[jax.Array, ...], share: tuple[jax.Array, ...]) -> tuple[tuple[jax.Array, ...], None]:
        gate_DF, up_DF, down_FD, start, count = share

        def block(offset: jax.Array, stored: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            at = start + offset
            x_KD = _take(x_ND, jax.lax.dynamic_slice_in_dim(order.assignment_S, at, rows) // choices)
            gate_KF, up_KF = x_KD @ gate_DF, x_KD @ up_DF
            y_KD = (jax.nn.silu(gate_KF) * up_KF) @ down_FD
            # Without a gradient only the first is stored.
            return tuple(_put(whole, part, at) for whole, part in zip(stored, (y_KD, gate_KF, up_KF), strict=False))

        return _over_blocks(count, rows, block, stored), None

    hidden = ((length, expert_width), (length, expert_width)) if for_gradient else ()
    start = _zeros(order, (length, width), *hidden)
    stored, _ = jax.lax.scan(expert, start, (*experts, order.start_E, order.count_E))
    y_ND = _sum_of_assignments(stored[0], order, weights_NA)
    if not for_gradient:
        return y_ND, None
    weights_NA = jnp.where(ids_NA == NO_EXPERT, 0.0, weights_NA)
    return y_ND, (x_ND, weights_NA, experts, order, stored[1], stored[2])


def _backward(rows: int, residuals: Residuals, grad_ND: jax.Array) -> tuple[Any, ...]:
    x_ND, weights_NA, experts, order, gate_SF, up_SF = residuals
    width, expert_width = experts[0].shape[1:]
    choices, length = weights_NA.shape[1], weights_NA.size + rows
    weights = weights_NA.reshape(-1)

    def expert(stored: tuple[jax.Array, ...], share: tuple[jax.Array, ...]) -> tuple[Any, tuple[jax.Array, ...]]:
        gate_DF, up_DF, down_FD, start, count = share

        def block(offset: jax.Array, carry: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            dx_SD, dweight_S, dgate_DF, dup_DF, ddown_DF = carry
            at = start + offset
            assignment_K = jax.lax.dynamic_slice_in_dim(order.assignment_S, at, rows)
            own_K = jnp.arange(rows) < count - offset
            weight_K1 = jnp.where(own_K, _take(weights, assignment_K), 0.0)[:, None]
            x_KD, grad_KD = _take(x_ND, assignment_K // choices), _take(grad_ND, assignment_K // choices)
            x_DK = transposed(x_KD)
            gate_KF = jax.lax.dynamic_slice_in_dim(gate_SF, at, rows)
            up_KF = jax.lax.dynamic_slice_in_dim(up_SF, at, rows)
            sigmoid_KF = jax.nn.sigmoid(gate_KF)
            silu_KF = gate_KF * sigmoid_KF
            hidden_KF = silu_KF * up_KF
            unweighted_KF = grad_KD @ down_FD.T
            dhidden_KF = unweighted_KF * weight_K1
            dup_KF = dhidden_KF * silu_KF
            dgate_KF = dhidden_KF * up_KF * (sigmoid_KF + silu_KF * (1.0 - sigmoid_KF))
            return (
                _put(dx_SD, dgate_KF @ gate_DF.T + dup_KF @ up_DF.T, at),
                _put(dweight_S, jnp.sum(unweighted_KF * hidden_KF, axis=1), at),
                dgate_DF + x_DK @ dgate_KF,
                dup_DF + x_DK @ dup_KF,
                ddown_DF + transposed(grad_KD * weight_K1) @ hidden_KF,
            )

        sums = _zeros(order, *[(width, expert_width)] * 3)
        dx_SD, dweight_S, *sums = _over_blocks(count, rows, block, (*stored, *sums))
        return (dx_SD, dweight_S), tuple(sums)

    shares = (*experts, order.start_E, order.count_E)
    (dx_SD, dweight_S), (dgate_EDF, dup_EDF, ddown_EDF) = jax.lax.scan(
        expert, _zeros(order, (length, width), (length,)), shares
    )
    assigned_NA = order.place_NA < jnp.sum(order.count_E)
    dweights_NA = jnp.where(assigned_NA, _take(dweight_S, order.place_NA), 0.0)
    return _sum_of_assignments(dx_SD, order), None, dweights_NA, dgate_EDF, dup_EDF, ddown_EDF.swapaxes(1, 2)


run_sorted.defvjp(_forward, _backward)
