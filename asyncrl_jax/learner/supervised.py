"""The supervised update, on demonstrations. Dimensions: B rows, T positions of a row."""

from __future__ import annotations

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from asyncrl_jax.config import Config
from asyncrl_jax.learner.aggregation import masked_mean
from asyncrl_jax.learner.balance import balance_loss
from asyncrl_jax.learner.compiled import CompiledStep
from asyncrl_jax.learner.forward import forward_on
from asyncrl_jax.learner.packing import Array
from asyncrl_jax.learner.state import Metrics, TrainState, apply_gradient, state_shardings
from asyncrl_jax.models.mesh import batch_sharding, replicated
from asyncrl_jax.models.transformer import Params

_LARGEST_LOGPROB = -1e-4  # where unlikelihood stops growing: its gradient is 1 ÷ (1 − p)


class SupervisedBatch(NamedTuple):
    """Rows of demonstrations; position t predicts token t + 1. Arrays are [B, T]."""

    tokens: Array  # int32
    targets: Array  # int32
    segment_ids: Array  # int32; 0 is padding
    positions: Array  # int32
    loss_mask: Array  # bool
    weights: Array  # float32; below 0 where the target is what not to say


def imitation_terms(logprobs: jax.Array, weights: jax.Array) -> jax.Array:
    """Loss per token: −w · log p where w > 0, and −|w| · log(1 − p) where w < 0.

    The second is unlikelihood (Welleck et al. 2019, arXiv 1908.04319, equation 5): unlike a negative weight on log p it
    is bounded below, and teaches nothing any more once the token is unlikely.

    Args:
      logprobs: of the targets, float32.
      weights: of the same shape.
    """
    likely = jnp.minimum(logprobs, _LARGEST_LOGPROB)
    return jnp.where(weights > 0, -weights * logprobs, weights * jnp.log(-jnp.expm1(likely)))


def make_supervised_step(config: Config, mesh: Mesh) -> CompiledStep:
    """The compiled update `step(state, batch: SupervisedBatch, learning_rate) -> (state, metrics)`; `state` is donated.

    Metrics: loss, cross_entropy (nats), accuracy (share of teacher-forced targets that are the likeliest token), both
    of targets with a weight above 0, balance_loss, tokens, grad_norm, learning_rate, skipped.
    """
    forward = forward_on(config, mesh)

    def loss_of(params: Params, batch: SupervisedBatch) -> tuple[jax.Array, Metrics]:
        x_BTD, routing = forward.trunk(params, batch)
        scores = forward.scores(params, x_BTD, batch, jnp.ones(batch.targets.shape))
        num_tokens = jnp.sum(batch.loss_mask, dtype=jnp.float32)
        wanted = batch.loss_mask & (batch.weights > 0)
        num_wanted = jnp.sum(wanted, dtype=jnp.float32)
        imitation = masked_mean(imitation_terms(scores.logprobs, batch.weights), batch.loss_mask, num_tokens)
        balance = balance_loss(routing, routing.prob_sums_E, config.model.experts_per_token)
        metrics = {
            "cross_entropy": masked_mean(-scores.logprobs, wanted, num_wanted),
            "accuracy": masked_mean(scores.is_likeliest, wanted, num_wanted),
            "balance_loss": balance,
            "tokens": num_tokens,
        }
        return imitation + config.learner.balance_coefficient * balance, metrics

    def step(state: TrainState, batch: SupervisedBatch, learning_rate: jax.Array) -> tuple[TrainState, Metrics]:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
        grads |= jax.tree.map(jnp.zeros_like, state.critic)
        state, applied = apply_gradient(
            config.learner, state, grads, loss=loss, num_tokens=metrics["tokens"], learning_rate=learning_rate
        )
        return state, {"loss": loss} | metrics | applied

    shardings = state_shardings(config, mesh)
    batch_shardings = SupervisedBatch(*[batch_sharding(mesh)] * len(SupervisedBatch._fields))
    return CompiledStep(
        step,
        in_shardings=(shardings, batch_shardings, None),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )
