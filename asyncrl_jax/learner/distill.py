"""On-policy distillation: KL(policy ‖ teachers) on what the policy sampled.

The student is corrected where it goes itself, not where a teacher would have gone (Agarwal et al. 2023, "On-Policy
Distillation of Language Models", arXiv 2306.13649; Gu et al. 2023, "MiniLLM", arXiv 2306.08543). Several teachers are
one: the mixture p(v) = Σ share · p_teacher(v).

    match      per sampled token                            needs of a teacher           variance
    logits     Σ_v p(v) (log p(v) − log mixture(v))         its logits, a chunk a time   none, given the prefix
    logprobs   min(ratio, cap) · k1 of that token (kl.py)   its log-prob of the token    that of one sample

Both have the gradient of the KL at each prefix; the prefixes are those of the behaviour policy, whose age the lag bound
limits. Teachers share the student's vocabulary and nothing else.

Dimensions: B rows, T positions of a row, C positions of a chunk, D hidden width, V vocabulary, K teachers.
"""

from __future__ import annotations

from collections.abc import Sequence

import chex
import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from asyncrl_jax.config import Config
from asyncrl_jax.config_hf import read_teachers
from asyncrl_jax.learner.forward import Forward, forward_of
from asyncrl_jax.learner.kl import kl_loss_terms
from asyncrl_jax.models.hf import load_params
from asyncrl_jax.models.transformer import Params

Placed = tuple[Forward, jax.Array, Params]  # a model, the output of its trunk [B, T, D], its weights


def mixture_logprobs(logprobs: Sequence[jax.Array], shares: Sequence[float]) -> jax.Array:
    """log Σ share · exp(logprobs), elementwise, of K arrays of one shape.

    Args:
      logprobs: float32, of each teacher.
      shares: of each teacher, more than 0, summing to 1.
    """
    chex.assert_equal_shape(logprobs)
    weighted = [of_one + jnp.log(share) for of_one, share in zip(logprobs, shares, strict=True)]
    return jax.nn.logsumexp(jnp.stack(weighted), axis=0)


def sampled_divergence(
    *,
    target_logprobs: jax.Array,
    behaviour_logprobs: jax.Array,
    teacher_logprobs: Sequence[jax.Array],
    shares: Sequence[float],
    loss_mask: jax.Array,
) -> jax.Array:
    """`match = logprobs`: terms [B, T] whose expected gradient is that of the KL; 0 outside the mask."""
    return kl_loss_terms(
        target_logprobs=target_logprobs,
        behaviour_logprobs=behaviour_logprobs,
        reference_logprobs=mixture_logprobs(teacher_logprobs, shares),
        loss_mask=loss_mask,
        estimator="k1",
    )


def whole_divergence(
    student: Placed,
    teachers: Sequence[Placed],
    shares: Sequence[float],
    temperature_BT: jax.Array,
    loss_mask_BT: jax.Array,
    chunk_tokens: int,
) -> jax.Array:
    """`match = logits`: the KL at each position, [B, T], 0 outside the mask. Gradient flows to the student alone.

    Logits are made for `chunk_tokens` positions at a time, and again in the backward pass.

    Args:
      student: its trunk's output carries gradient.
      teachers: of the same rows.
      shares: of each teacher.
      temperature_BT: of student and teachers alike.
      loss_mask_BT: bool.
      chunk_tokens: positions, over all rows.
    """
    forward, x_BTD, params = student
    num_rows, length = temperature_BT.shape
    size = max(1, min(length, chunk_tokens // num_rows))

    def chunks(array: jax.Array) -> jax.Array:
        """[B, T, …] to [T ÷ C, B, C, …]."""
        padding = [(0, 0), (0, -length % size)] + [(0, 0)] * (array.ndim - 2)
        padded = jnp.pad(array, padding, constant_values=1) if array.ndim == 2 else jnp.pad(array, padding)
        return jnp.moveaxis(padded.reshape(num_rows, -1, size, *array.shape[2:]), 1, 0)

    @jax.checkpoint
    def of_chunk(x_BCD: jax.Array, others: list[jax.Array], temperature_BC: jax.Array) -> jax.Array:
        def logprobs(forward: Forward, params: Params, x: jax.Array) -> jax.Array:
            return jax.nn.log_softmax(forward.head(params, x) / temperature_BC[..., None])

        target_BCV = logprobs(forward, params, x_BCD)
        of_teachers = [logprobs(f, p, x) for (f, _, p), x in zip(teachers, others, strict=True)]
        mixture_BCV = jax.lax.stop_gradient(mixture_logprobs(of_teachers, shares))
        return jnp.sum(jnp.exp(target_BCV) * (target_BCV - mixture_BCV), axis=-1)

    inputs = chunks(x_BTD), [chunks(x) for _, x, _ in teachers], chunks(temperature_BT)
    _, divergence = jax.lax.scan(lambda carry, chunk: (carry, of_chunk(*chunk)), None, inputs)
    divergence_BT = jnp.moveaxis(divergence, 0, 1).reshape(num_rows, -1)[:, :length]
    return jnp.where(loss_mask_BT, divergence_BT, 0.0)


def teacher_forwards(config: Config, mesh: Mesh) -> tuple[Forward, ...]:
    """The teachers of the config as functions of their weights. Raises as `read_teachers`."""
    models = read_teachers(config.learner.distill.teachers, config.model.vocab_size)
    return tuple(forward_of(model, config.mesh, mesh) for model in models)


def load_teachers(config: Config, mesh: Mesh) -> tuple[Params, ...]:
    """Their weights, laid out on the mesh. Raises as `read_teachers` and `models.hf.load_params`."""
    models = read_teachers(config.learner.distill.teachers, config.model.vocab_size)
    return tuple(load_params(*of_one, mesh) for of_one in zip(config.learner.distill.teachers, models, strict=True))
