"""Log-probs and entropy of targets, without ever holding the logits of a whole batch.

The positions that are asked for are gathered to the front and scored in chunks; the backward pass computes a chunk's
logits again. So memory is that of one chunk's logits, and positions that nobody asks for cost nothing: the loop runs as
often as there are chunks to fill.

On a mesh every device scores its own rows, with its own slice of the vocabulary; a tensor group shares its rows, and so
takes the same number of turns.

Dimensions: B rows, T positions, N = B·T positions of one device, C positions of one chunk, D hidden width, V vocabulary
(of one device).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from asyncrl_jax.models.mesh import BATCH_AXES, partition

_HEAD_DIMS = ("hidden", "vocab")


class TargetScores(NamedTuple):
    """Of softmax(logits / temperature), float32 [B, T]; 0 where nothing was asked."""

    logprobs: jax.Array  # of the target, in nats
    entropy: jax.Array  # in nats
    is_likeliest: jax.Array  # 1 where no token is likelier than the target; without gradient


class _Inputs(NamedTuple):
    """See `score_targets`."""

    x_BTD: jax.Array
    head_DV: jax.Array
    targets_BT: jax.Array
    temperature_BT: jax.Array
    asked_BT: jax.Array


class _Plan(NamedTuple):
    """What is static."""

    chunk_tokens: int
    mesh: Mesh | None


def score_targets(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    temperature_BT: jax.Array,
    asked_BT: jax.Array,
    *,
    chunk_tokens: int,
    mesh: Mesh | None = None,
) -> TargetScores:
    """Scores the targets; gradients flow to `x_BTD` and `head_DV`.

    Args:
      x_BTD: normalised outputs of the last layer, in the compute dtype.
      head_DV: float32 weights of the head; products are in the dtype of `x`, sums and softmax in float32.
      targets_BT: int32.
      temperature_BT: float32, more than 0.
      asked_BT: bool; positions to score.
      chunk_tokens: C.
      mesh: with the axes of `mesh.AXES`; None for one device.
    """
    plan = _Plan(
        min(chunk_tokens, x_BTD.shape[0] * x_BTD.shape[1]), mesh if mesh is not None and mesh.size > 1 else None
    )
    return TargetScores(*_score(x_BTD, head_DV, targets_BT, temperature_BT, asked_BT, plan))


Scores3 = tuple[jax.Array, jax.Array, jax.Array]


@functools.partial(jax.custom_vjp, nondiff_argnums=(5,))
def _score(
    x_BTD: jax.Array,
    head_DV: jax.Array,
    targets_BT: jax.Array,
    temperature_BT: jax.Array,
    asked_BT: jax.Array,
    plan: _Plan,
) -> Scores3:
    rows = PartitionSpec(BATCH_AXES)
    local = _on_devices(
        functools.partial(_forward, plan=plan), plan, (rows, partition(_HEAD_DIMS), rows, rows, rows), rows
    )
    return local(x_BTD, head_DV, targets_BT, temperature_BT, asked_BT)


def _score_forward(*args: Any) -> tuple[Scores3, Any]:
    *arrays, plan = args
    return _score(*arrays, plan), arrays


def _score_backward(plan: _Plan, arrays: Any, gradients: Scores3) -> tuple[jax.Array, jax.Array, None, None, None]:
    rows, head = PartitionSpec(BATCH_AXES), partition(_HEAD_DIMS)
    local = _on_devices(
        functools.partial(_backward, plan=plan), plan, (rows, head, rows, rows, rows, rows, rows), (rows, head)
    )
    grad_x_BTD, grad_head_DV = local(*arrays, *gradients[:2])
    return grad_x_BTD, grad_head_DV, None, None, None


_score.defvjp(_score_forward, _score_backward)


def _on_devices(function: Callable[..., Any], plan: _Plan, in_specs: Any, out_specs: Any) -> Callable[..., Any]:
    if plan.mesh is None:
        return function
    return jax.shard_map(function, mesh=plan.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# ---------------------------------------------------------------------------------------------- on one device, a chunk


class _Chunk(NamedTuple):
    """What both passes need of one chunk."""

    index_C: jax.Array  # of its positions among the N
    x_CD: jax.Array
    logits_CV: jax.Array  # float32, divided by the temperature
    logprobs_CV: jax.Array
    is_target_CV: jax.Array
    inverse_temperature_C: jax.Array


class _Local:
    """The positions of one device, those that are asked for first."""

    def __init__(self, inputs: _Inputs, plan: _Plan):
        x_BTD, head_DV, targets_BT, temperature_BT, asked_BT = inputs
        self.plan = plan
        self.x_ND = x_BTD.reshape(-1, x_BTD.shape[-1])
        if plan.mesh is not None:
            head_DV = jax.lax.all_gather(head_DV, "fsdp", axis=0, tiled=True)
        self.head_DV = head_DV.astype(x_BTD.dtype)
        self.targets_N, self.temperature_N = targets_BT.reshape(-1), temperature_BT.reshape(-1)
        self.asked_N = asked_BT.reshape(-1)
        num, size = self.asked_N.size, plan.chunk_tokens
        order_N = jnp.argsort(~self.asked_N, stable=True).astype(jnp.int32)
        self.order = jnp.pad(order_N, (0, -num % size), constant_values=num)  # `num` is past the end: no position
        self.num_chunks = (jnp.sum(self.asked_N, dtype=jnp.int32) + size - 1) // size
        shards = 1 if plan.mesh is None else plan.mesh.shape["tensor"]
        self.first_token = 0 if shards == 1 else jax.lax.axis_index("tensor") * self.head_DV.shape[1]

    def sum(self, values: jax.Array) -> jax.Array:
        """Over the devices that hold slices of the vocabulary."""
        return values if self.plan.mesh is None else jax.lax.psum(values, "tensor")

    def max(self, values: jax.Array) -> jax.Array:
        """As `sum`."""
        return values if self.plan.mesh is None else jax.lax.pmax(values, "tensor")

    def chunk(self, number: jax.Array) -> _Chunk:
        """Logits and log-probs of chunk `number`, computed."""
        size = self.plan.chunk_tokens
        index_C = jax.lax.dynamic_slice_in_dim(self.order, number * size, size)
        x_CD = jnp.take(self.x_ND, index_C, axis=0, mode="fill", fill_value=0)
        targets_C = jnp.take(self.targets_N, index_C, mode="fill", fill_value=0)
        scale_C = 1.0 / jnp.take(self.temperature_N, index_C, mode="fill", fill_value=1.0)
        logits_CV = jnp.matmul(x_CD, self.head_DV, preferred_element_type=jnp.float32) * scale_C[:, None]
        largest_C1 = self.max(jnp.max(logits_CV, axis=1, keepdims=True))
        sums_C1 = self.sum(jnp.sum(jnp.exp(logits_CV - largest_C1), axis=1, keepdims=True))
        logprobs_CV = logits_CV - largest_C1 - jnp.log(sums_C1)
        tokens_V = jnp.arange(logits_CV.shape[1], dtype=jnp.int32) + self.first_token
        is_target_CV = tokens_V[None] == targets_C[:, None]
        return _Chunk(index_C, x_CD, logits_CV, logprobs_CV, is_target_CV, scale_C)

    def entropy(self, chunk: _Chunk) -> jax.Array:
        """[C], in nats."""
        return -self.sum(jnp.sum(jnp.exp(chunk.logprobs_CV) * chunk.logprobs_CV, axis=1))

    def loop(self, body: Callable[[jax.Array, Any], Any], start: Any) -> Any:
        """Over the chunks that are asked for."""
        return jax.lax.fori_loop(0, self.num_chunks, body, start)


def _forward(*arrays: jax.Array, plan: _Plan) -> Scores3:
    inputs = _Inputs(*arrays)
    local = _Local(inputs, plan)

    def body(number: jax.Array, scores: Scores3) -> Scores3:
        chunk = local.chunk(number)
        logprobs_C = local.sum(jnp.sum(jnp.where(chunk.is_target_CV, chunk.logprobs_CV, 0.0), axis=1))
        likeliest_C = logprobs_C >= local.max(jnp.max(chunk.logprobs_CV, axis=1))
        found = (logprobs_C, local.entropy(chunk), likeliest_C.astype(jnp.float32))
        logprobs, entropy, likeliest = (
            all_N.at[chunk.index_C].set(of_C, mode="drop") for all_N, of_C in zip(scores, found, strict=True)
        )
        return logprobs, entropy, likeliest

    nothing_N = jnp.zeros(local.asked_N.shape, jnp.float32)
    scores = local.loop(body, (nothing_N, nothing_N, nothing_N))
    shape = inputs.targets_BT.shape
    logprobs, entropy, likeliest = (jnp.where(local.asked_N, of_N, 0.0).reshape(shape) for of_N in scores)
    return logprobs, entropy, likeliest


def _backward(*arrays: jax.Array, plan: _Plan) -> tuple[jax.Array, jax.Array]:
    inputs, (grad_logprobs_BT, grad_entropy_BT) = _Inputs(*arrays[:5]), arrays[5:]
    local = _Local(inputs, plan)
    grads_N = [jnp.where(local.asked_N, grad.reshape(-1), 0.0) for grad in (grad_logprobs_BT, grad_entropy_BT)]

    def body(number: jax.Array, grads: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        chunk = local.chunk(number)
        grad_logprob_C1, grad_entropy_C1 = (
            jnp.take(grad_N, chunk.index_C, mode="fill", fill_value=0)[:, None] for grad_N in grads_N
        )
        probs_CV = jnp.exp(chunk.logprobs_CV)
        surprise_CV = chunk.logprobs_CV + local.entropy(chunk)[:, None]
        # d logprob / d logits = 1[target] − p, and d entropy / d logits = −p (log p + entropy)
        grad_logits_CV = grad_logprob_C1 * (chunk.is_target_CV - probs_CV) - grad_entropy_C1 * probs_CV * surprise_CV
        grad_logits_CV = (grad_logits_CV * chunk.inverse_temperature_C[:, None]).astype(chunk.x_CD.dtype)
        grad_x_CD = jnp.matmul(grad_logits_CV, local.head_DV.T, preferred_element_type=jnp.float32)
        grad_x_ND = grads[0].at[chunk.index_C].set(local.sum(grad_x_CD).astype(grads[0].dtype), mode="drop")
        return grad_x_ND, grads[1] + jnp.matmul(chunk.x_CD.T, grad_logits_CV, preferred_element_type=jnp.float32)

    start = jnp.zeros_like(local.x_ND), jnp.zeros(local.head_DV.shape, jnp.float32)
    grad_x_ND, grad_head_DV = local.loop(body, start)
    if plan.mesh is not None:
        grad_head_DV = jax.lax.psum(grad_head_DV, ("data", "expert"))
        grad_head_DV = jax.lax.psum_scatter(grad_head_DV, "fsdp", scatter_dimension=0, tiled=True)
    return grad_x_ND.reshape(inputs.x_BTD.shape), grad_head_DV
