"""One optimizer update as one compiled function: the batch is the batch.

                 ┌── counting pass ──┐   ┌── gradient pass ──────────────┐
    PackedUpdate │ routing of every  │──▶│ policy + KL + balance, summed │──▶ ÷ whole step ──▶ clip ──▶ AdamW
                 │ microbatch        │   │ over microbatches             │
                 └───────────────────┘   └───────────────────────────────┘

Every mean divides by the whole step's count, and the expert fractions of the balance loss are the whole step's (hence
the counting pass), so that packing, microbatches, row order and mesh shape change neither loss nor gradient.

Dimensions: B rows of a microbatch, T positions of a row, C canary rows, L layers, E experts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx
from jax.sharding import Mesh

from asyncrl_jax.config import Config, LearnerConfig, ModelConfig
from asyncrl_jax.learner import losses
from asyncrl_jax.learner.packing import Array, PackedUpdate
from asyncrl_jax.models.router import Routing
from asyncrl_jax.models.sharding import batch_sharding, make_mesh, param_shardings, replicated
from asyncrl_jax.models.transformer import DecoderOutput, Params, graph_of, init_params, merge

Metrics = dict[str, jax.Array]


FINAL_LR_SHARE = 0.1  # of the peak, once `learner.lr_decay_updates` are done


class TrainState(NamedTuple):
    """All that an update changes. A tree of arrays, ready for a checkpoint."""

    params: Params
    opt_state: Any
    update: jax.Array  # int32 scalar; updates applied since v0
    skipped: jax.Array  # int32 scalar; updates not applied: loss or gradient not finite, or no token to train on


class SupervisedBatch(NamedTuple):
    """Rows of demonstrations; position t predicts token t + 1. Arrays are [B, T]."""

    tokens: Array  # int32
    targets: Array  # int32
    segment_ids: Array  # int32; 0 is padding
    positions: Array  # int32
    loss_mask: Array  # bool


class CompiledStep:
    """A jitted function that counts how often it was traced; the count says whether shapes ever changed."""

    def __init__(self, function: Callable[..., Any], **jit_options: Any):
        self.num_traces = 0

        def counted(*args: Any) -> Any:
            self.num_traces += 1
            return function(*args)

        self._jitted = jax.jit(counted, **jit_options)

    def __call__(self, *args: Any) -> Any:
        return self._jitted(*args)


# ---------------------------------------------------------------------------------------------------- state, optimizer


def make_optimizer(config: LearnerConfig) -> optax.GradientTransformation:
    """AdamW in fp32 without its learning rate, which is an input of the step; norm scales do not decay."""

    def matrices(params: Params) -> dict[str, bool]:
        return {name: leaf.ndim > 1 for name, leaf in params.items()}

    return optax.chain(
        optax.clip_by_global_norm(config.max_grad_norm),
        optax.scale_by_adam(),
        optax.add_decayed_weights(config.weight_decay, mask=matrices),
    )


def learning_rate_at(config: LearnerConfig, update: int) -> float:
    """Learning rate of the update after `update` done ones: a linear rise, then a linear fall to `FINAL_LR_SHARE`.

    As more and more groups are solved by all members or by none, the gradient comes from few of them, and Adam would
    still make steps of the same size; the fall keeps late updates from undoing early ones. It does not depend on the
    length of the run, so a run that is extended replays the updates that it made.
    """
    rise = min(1.0, (update + 1) / max(config.lr_warmup_updates, 1))
    if config.lr_decay_updates == 0:
        return config.learning_rate * rise
    done = (update + 1 - config.lr_warmup_updates) / (config.lr_decay_updates - config.lr_warmup_updates)
    fall = 1.0 - (1.0 - FINAL_LR_SHARE) * min(max(done, 0.0), 1.0)
    return config.learning_rate * rise * fall


def create_state(config: Config, seed: int, mesh: Mesh | None = None) -> TrainState:
    """Random weights and a fresh optimizer, laid out on the mesh (None: that of the config).

    The weights depend on the seed alone, not on the mesh.
    """
    # Made before they are sharded: random bits may depend on how the program that makes them is partitioned.
    return start_from(config, init_params(config.model, seed), make_mesh(config.mesh) if mesh is None else mesh)


def start_from(config: Config, params: Params, mesh: Mesh) -> TrainState:
    """Update 0 with a copy of these weights and a fresh optimizer."""

    def fresh(params: Params) -> TrainState:
        return _fresh_state(config, jax.tree.map(jnp.copy, params))

    return jax.jit(fresh, out_shardings=_state_shardings(config, mesh))(params)


def copy_params(params: Params) -> Params:
    """Weights that outlive the state they came from: a step donates its state, so a reference must be a copy."""
    return jax.tree.map(jnp.copy, params)


def _fresh_state(config: Config, params: Params) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    return TrainState(params, make_optimizer(config.learner).init(params), zero, zero)


def _state_shardings(config: Config, mesh: Mesh) -> TrainState:
    """Sharding of every leaf: optimizer moments lie like their weights, scalars everywhere."""
    by_name = param_shardings(config.model, mesh)

    def of_leaf(path: tuple[Any, ...], _: Any) -> Any:
        return by_name.get(getattr(path[-1], "key", ""), replicated(mesh))

    shapes = jax.eval_shape(lambda: _fresh_state(config, init_params(config.model, 0)))
    return jax.tree_util.tree_map_with_path(of_leaf, shapes)


def _apply(
    optimizer: optax.GradientTransformation,
    state: TrainState,
    grads: Params,
    *,
    loss: jax.Array,
    num_tokens: jax.Array,
    learning_rate: jax.Array,
) -> tuple[TrainState, Metrics]:
    """The next state; or the same weights and moments with `skipped` one higher."""
    grad_norm = optax.tree.norm(grads)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (num_tokens > 0)
    updates, opt_state = optimizer.update(grads, state.opt_state, state.params)
    params = jax.tree.map(lambda param, update: param - learning_rate * update, state.params, updates)
    new, old = (params, opt_state), (state.params, state.opt_state)
    params, opt_state = jax.tree.map(lambda new, old: jnp.where(good, new, old), new, old)
    applied = good.astype(jnp.int32)
    next_state = TrainState(params, opt_state, state.update + applied, state.skipped + 1 - applied)
    return next_state, {"grad_norm": grad_norm, "skipped": 1 - applied, "learning_rate": learning_rate}


# ------------------------------------------------------------------------------------------------------ the RL update


class _Sums(NamedTuple):
    """What the gradient pass adds up over microbatches, besides gradients: sums over the tokens of the mask."""

    policy_loss: jax.Array
    kl: jax.Array
    entropy: jax.Array
    clipped: jax.Array
    ratio: jax.Array
    ratio_squared: jax.Array
    gap_lag0: jax.Array  # |target − behaviour log-prob| over tokens of lag 0
    tokens_lag0: jax.Array
    lag: jax.Array


@dataclasses.dataclass(frozen=True)
class _Objective:
    """The loss of a step as a sum over its microbatches."""

    graph: nnx.GraphDef
    model: ModelConfig
    learner: LearnerConfig

    def forward(self, params: Params, batch: PackedUpdate | SupervisedBatch) -> DecoderOutput:
        return merge(self.graph, params).forward(batch.tokens, batch.positions, batch.segment_ids)

    def logprobs(self, params: Params, batch: PackedUpdate) -> tuple[jax.Array, jax.Array, Routing]:
        """(log-probs of the targets, entropy, routing) at the temperature of sampling."""
        output = self.forward(params, batch)
        return *losses.token_logprobs(output.logits_BTV, batch.targets, batch.temperature), output.routing

    def count_routing(self, params: Params, packed: PackedUpdate) -> Routing:
        """The counting pass: routing of the whole step. Only trunk and routers are computed; the head is dead code."""

        def add(index: jax.Array, routing: Routing) -> Routing:
            return jax.tree.map(jnp.add, routing, self.forward(params, _microbatch(packed, index)).routing)

        shapes = jax.eval_shape(lambda: self.forward(params, _microbatch(packed, jnp.zeros((), jnp.int32))).routing)
        zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
        return jax.lax.fori_loop(0, packed.num_microbatches, add, zeros)

    def balance_loss(self, step_routing: Routing, prob_sums_LE: jax.Array) -> jax.Array:
        """Balance loss of the part of the step that these probabilities were summed over."""
        return losses.switch_balance_loss(
            counts_LE=step_routing.counts_E,
            prob_sums_LE=prob_sums_LE,
            num_tokens=step_routing.num_tokens[0],
            experts_per_token=self.model.experts_per_token,
        )

    def part(
        self, params: Params, reference_params: Params, batch: PackedUpdate, routing: Routing, num_tokens: jax.Array
    ) -> tuple[jax.Array, tuple[_Sums, jax.Array]]:
        """(one microbatch's part of the step's loss, (its sums, its largest ratio))."""
        target, entropy, own_routing = self.logprobs(params, batch)
        reference = None
        if self.learner.kl_coefficient:
            reference = jax.lax.stop_gradient(self.logprobs(reference_params, batch)[0])
        sums, ratio_max = _microbatch_sums(self.learner, target, entropy, reference, batch)
        loss = (sums.policy_loss + self.learner.kl_coefficient * sums.kl) / jnp.maximum(num_tokens, 1.0)
        balance = self.learner.balance_coefficient * self.balance_loss(routing, own_routing.prob_sums_E)
        return loss + balance, (sums, ratio_max)

    def gradient(
        self, params: Params, reference_params: Params, packed: PackedUpdate, routing: Routing, num_tokens: jax.Array
    ) -> tuple[jax.Array, Params, _Sums, jax.Array]:
        """The gradient pass: (loss, gradient, sums, largest ratio) of the whole step."""
        part = jax.value_and_grad(self.part, has_aux=True)

        def add(index: jax.Array, carry: tuple[jax.Array, Params, _Sums, jax.Array]) -> tuple[Any, ...]:
            batch = _microbatch(packed, index)
            (loss, (sums, ratio_max)), grads = part(params, reference_params, batch, routing, num_tokens)
            *totals, largest = carry
            return *jax.tree.map(jnp.add, tuple(totals), (loss, grads, sums)), jnp.maximum(largest, ratio_max)

        zero = jnp.zeros(())
        zeros = (zero, jax.tree.map(jnp.zeros_like, params), _Sums(*[zero] * len(_Sums._fields)), zero)
        return jax.lax.fori_loop(0, packed.num_microbatches, add, zeros)


def _microbatch(packed: PackedUpdate, index: jax.Array) -> PackedUpdate:
    """Microbatch `index`: every array [B, T]."""
    arrays = {name: value[index] for name, value in packed._asdict().items() if name != "num_microbatches"}
    return packed._replace(**arrays)


def _microbatch_sums(
    config: LearnerConfig, target: jax.Array, entropy: jax.Array, reference: jax.Array | None, batch: PackedUpdate
) -> tuple[_Sums, jax.Array]:
    """Sums over one microbatch, and its largest ratio. `policy_loss` and `kl` carry the gradient."""
    shared = {
        "target_logprobs": target,
        "behaviour_logprobs": batch.behaviour_logprobs,
        "loss_mask": batch.loss_mask,
    }
    terms = losses.clipped_policy_terms(**shared, advantages=batch.advantages, clip_range=config.clip_range)
    kl = jnp.zeros_like(target) if reference is None else losses.kl_terms(**shared, reference_logprobs=reference)
    lag0 = batch.loss_mask & (batch.token_lag == 0)

    def total(values: jax.Array, mask: jax.Array = batch.loss_mask) -> jax.Array:
        return losses.masked_mean(values.astype(jnp.float32), mask, 1.0)

    sums = _Sums(
        policy_loss=total(terms.loss),
        kl=total(kl),
        entropy=total(entropy),
        clipped=total(terms.clipped),
        ratio=total(terms.ratio),
        ratio_squared=total(jnp.square(terms.ratio)),
        gap_lag0=total(jnp.abs(jax.lax.stop_gradient(target) - batch.behaviour_logprobs), lag0),
        tokens_lag0=jnp.sum(lag0, dtype=jnp.float32),
        lag=total(batch.token_lag),
    )
    return sums, jnp.max(terms.ratio)


def _policy_metrics(config: LearnerConfig, sums: _Sums, num_tokens: jax.Array) -> Metrics:
    count = jnp.maximum(num_tokens, 1.0)
    metrics = {
        "policy_loss": sums.policy_loss / count,
        "entropy": sums.entropy / count,
        "clip_fraction": sums.clipped / count,
        "ratio_mean": sums.ratio / count,
        "ess": jnp.square(sums.ratio) / jnp.maximum(count * sums.ratio_squared, 1e-9),
        "logprob_gap_lag0": sums.gap_lag0 / jnp.maximum(sums.tokens_lag0, 1.0),
        "tokens_lag0": sums.tokens_lag0,
        "lag_mean": sums.lag / count,
        "tokens": num_tokens,
    }
    return metrics | ({"kl": sums.kl / count} if config.kl_coefficient else {})


def _load_metrics(counts_LE: jax.Array) -> Metrics:
    """Expert load of each layer: largest and smallest ÷ the balanced load, their quotient; and idle experts."""
    metrics: Metrics = {"dead_experts": jnp.sum(counts_LE == 0)}
    for layer, counts_E in enumerate(counts_LE):
        balanced = jnp.maximum(jnp.mean(counts_E), 1e-9)
        largest, smallest = jnp.max(counts_E), jnp.min(counts_E)
        metrics[f"expert_load_max/layer_{layer}"] = largest / balanced
        metrics[f"expert_load_min/layer_{layer}"] = smallest / balanced
        # An idle expert counts as one with a single assignment, to keep the quotient finite.
        metrics[f"expert_load_max_over_min/layer_{layer}"] = largest / jnp.maximum(smallest, 1.0)
    return metrics


def make_train_step(config: Config, mesh: Mesh) -> CompiledStep:
    """The compiled update `step(state, reference_params, packed, learning_rate) -> (state, metrics)`.

    `state` is donated: do not use it afterwards, and give a reference that is a copy (`copy_params`).

    Metrics are float32 or int32 scalars. Means are over the tokens trained on:
      loss, policy_loss, kl (absent when its coefficient is 0), balance_loss (1 is balanced), entropy (nats),
      clip_fraction, ratio_mean, ratio_max, ess (effective sample size of the ratios ÷ tokens), lag_mean (updates),
      tokens, tokens_lag0, logprob_gap_lag0 (mean |target − behaviour| log-prob of the tokens that these very weights
      sampled: below 1e-5 when sampler and trainer agree), grad_norm (before clipping), learning_rate, skipped (1 when
      the update was not applied), dead_experts (over all layers), expert_load_{max,min,max_over_min}/layer_<i>.
    """
    objective = _Objective(graph_of(config.model), config.model, config.learner)
    optimizer = make_optimizer(config.learner)

    def step(
        state: TrainState, reference_params: Params, packed: PackedUpdate, learning_rate: jax.Array
    ) -> tuple[TrainState, Metrics]:
        num_tokens = jnp.sum(packed.loss_mask, dtype=jnp.float32)
        routing = objective.count_routing(state.params, packed)
        loss, grads, sums, ratio_max = objective.gradient(state.params, reference_params, packed, routing, num_tokens)
        state, metrics = _apply(optimizer, state, grads, loss=loss, num_tokens=num_tokens, learning_rate=learning_rate)
        balance_loss = objective.balance_loss(routing, routing.prob_sums_E)
        metrics |= {"loss": loss, "ratio_max": ratio_max, "balance_loss": balance_loss}
        metrics |= _policy_metrics(config.learner, sums, num_tokens) | _load_metrics(routing.counts_E)
        return state, metrics

    shardings = _state_shardings(config, mesh)
    rows = batch_sharding(mesh, leading_dims=1)
    packed_shardings = PackedUpdate(*[rows] * len(PackedUpdate._fields))._replace(num_microbatches=replicated(mesh))
    return CompiledStep(
        step,
        in_shardings=(shardings, shardings.params, packed_shardings, None),
        out_shardings=(shardings, None),
        donate_argnums=0,
    )


# --------------------------------------------------------------------------------------- supervised update and canary


def make_supervised_step(config: Config, mesh: Mesh) -> CompiledStep:
    """The compiled update `step(state, batch: SupervisedBatch, learning_rate) -> (state, metrics)`; `state` is donated.

    Metrics: loss, cross_entropy (nats), accuracy (share of teacher-forced targets that are the likeliest token),
    balance_loss, tokens, grad_norm, learning_rate, skipped.
    """
    objective = _Objective(graph_of(config.model), config.model, config.learner)
    optimizer = make_optimizer(config.learner)

    def loss_of(params: Params, batch: SupervisedBatch) -> tuple[jax.Array, Metrics]:
        output = objective.forward(params, batch)
        logprobs, _ = losses.token_logprobs(output.logits_BTV, batch.targets, jnp.ones(batch.targets.shape))
        num_tokens = jnp.sum(batch.loss_mask, dtype=jnp.float32)
        balance_loss = objective.balance_loss(output.routing, output.routing.prob_sums_E)
        hits = (jnp.argmax(output.logits_BTV, axis=-1) == batch.targets).astype(jnp.float32)
        metrics = {
            "cross_entropy": losses.masked_mean(-logprobs, batch.loss_mask, num_tokens),
            "accuracy": losses.masked_mean(hits, batch.loss_mask, num_tokens),
            "balance_loss": balance_loss,
            "tokens": num_tokens,
        }
        return metrics["cross_entropy"] + config.learner.balance_coefficient * balance_loss, metrics

    def step(state: TrainState, batch: SupervisedBatch, learning_rate: jax.Array) -> tuple[TrainState, Metrics]:
        (loss, metrics), grads = jax.value_and_grad(loss_of, has_aux=True)(state.params, batch)
        state, applied = _apply(
            optimizer, state, grads, loss=loss, num_tokens=metrics["tokens"], learning_rate=learning_rate
        )
        return state, {"loss": loss} | metrics | applied

    shardings = _state_shardings(config, mesh)
    batch_shardings = SupervisedBatch(*[batch_sharding(mesh)] * len(SupervisedBatch._fields))
    return CompiledStep(
        step, in_shardings=(shardings, batch_shardings, None), out_shardings=(shardings, None), donate_argnums=0
    )


@functools.cache
def _scorer(config: ModelConfig) -> CompiledStep:
    """Compiled once per model, not once per published version."""
    graph = graph_of(config)

    def score(params: Params, tokens_CT: jax.Array) -> jax.Array:
        positions_CT = jnp.broadcast_to(jnp.arange(tokens_CT.shape[1])[None], tokens_CT.shape)
        logits_CTV = merge(graph, params)(tokens_CT, positions_CT, jnp.ones_like(tokens_CT))
        targets = tokens_CT[:, 1:]
        return losses.token_logprobs(logits_CTV[:, :-1], targets, jnp.ones(targets.shape))[0]

    return CompiledStep(score)


def canary_logprobs(config: Config, params: Params, tokens_CT: np.ndarray) -> np.ndarray:
    """Log-probs of tokens 1 … T−1 of C sequences, teacher-forced at temperature 1: float32 [C, T−1].

    An engine that holds these weights gives the same numbers; the manifest of a version carries them.
    """
    return np.asarray(_scorer(config.model)(params, jnp.asarray(tokens_CT, jnp.int32)))
