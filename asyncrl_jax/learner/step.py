"""One optimizer update as one compiled function: the batch is the batch.

                 ┌── counting pass ──┐   ┌── gradient pass ──────────────┐
    PackedUpdate │ routing of every  │──▶│ policy + KL + balance, summed │──▶ ÷ whole step ──▶ clip ──▶ optimizer
                 │ microbatch        │   │ over microbatches             │
                 └───────────────────┘   └───────────────────────────────┘
                   with a critic, or the KL as a reward: also values and log-probs, and from them the advantages

Every mean divides by the whole step's count, and the expert fractions of the balance loss are the whole step's (hence
the counting pass), so that packing, microbatches, row order and mesh shape change neither loss nor gradient.

Dimensions: M microbatches, B rows of a microbatch, T positions of a row, L layers, E experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from asyncrl_jax.config import Config, LearnerConfig
from asyncrl_jax.learner import kl
from asyncrl_jax.learner.aggregation import count_sequences, whiten
from asyncrl_jax.learner.balance import balance_loss, balanced_biases, router_z_loss
from asyncrl_jax.learner.compiled import CompiledStep
from asyncrl_jax.learner.distill import sampled_divergence, teacher_forwards, whole_divergence
from asyncrl_jax.learner.expert_metrics import expert_metrics
from asyncrl_jax.learner.forward import Forward, forward_on
from asyncrl_jax.learner.lag_worth import NUM_LAGS, metrics_by_lag
from asyncrl_jax.learner.objective import Counts, CriticTokens, Sums, Tokens, step_loss
from asyncrl_jax.learner.optimizer import lag_response
from asyncrl_jax.learner.packing import PackedUpdate
from asyncrl_jax.learner.state import Metrics, TrainState, apply_gradient, state_shardings
from asyncrl_jax.learner.values import critic_values, gae, suffix_sums
from asyncrl_jax.models.mesh import batch_sharding, replicated
from asyncrl_jax.models.router import Routing
from asyncrl_jax.models.transformer import Params


class _Frozen(NamedTuple):
    """What the step reads and does not train. Weights are None where the config asks for none."""

    reference: Params | None
    proximal: Params | None
    teachers: tuple[Params, ...]
    slow_critic: Params
    kl_coefficient: jax.Array


class _Scored(NamedTuple):
    """Per position of the whole step, [M, B, T], before the update."""

    logprobs: jax.Array
    reference: jax.Array
    values: jax.Array  # of the slow critic


@dataclasses.dataclass(frozen=True)
class _Step:
    """The passes of an update over its microbatches."""

    config: Config
    forward: Forward
    teachers: tuple[Forward, ...] = ()

    @property
    def learner(self) -> LearnerConfig:
        return self.config.learner

    def count_routing(self, params: Params, packed: PackedUpdate) -> Routing:
        """Routing of the whole step; zeros when one microbatch is all of it, which then counts for itself.

        Only trunk and routers are computed.
        """

        def of_microbatch(batch: PackedUpdate) -> Routing:
            return self.forward.trunk(params, batch)[1]

        if packed.tokens.shape[0] == 1:  # XLA would take the body out of its loop, and run it though the loop does not
            return _zeros_like(lambda: of_microbatch(_microbatch(packed, jnp.zeros((), jnp.int32))))
        num_needed = jnp.where(packed.num_microbatches > 1, packed.num_microbatches, 0)
        return _sum_over_microbatches(packed, num_needed, of_microbatch)

    def score(self, params: Params, frozen: _Frozen, packed: PackedUpdate) -> tuple[Routing, _Scored]:
        """Routing of the whole step, and log-probs and values of all its positions."""

        def of_microbatch(batch: PackedUpdate) -> tuple[Routing, _Scored]:
            x_BTD, routing = self.forward.trunk(params, batch)
            nothing = jnp.zeros(batch.tokens.shape)
            logprobs = reference = values = nothing
            if self.learner.kl.placement == "reward" and frozen.reference is not None:
                logprobs = self.forward.scores(params, x_BTD, batch).logprobs
                reference = self.forward.logprobs(frozen.reference, batch)
            if frozen.slow_critic:
                values = critic_values(frozen.slow_critic, x_BTD)
            return routing, _Scored(logprobs, reference, values)

        def add(index: jax.Array, carry: tuple[Routing, _Scored]) -> tuple[Routing, _Scored]:
            routing, scored = of_microbatch(_microbatch(packed, index))
            total, whole = carry
            whole = jax.tree.map(lambda array, part: array.at[index].set(part), whole, scored)
            return jax.tree.map(jnp.add, total, routing), whole

        start = _zeros_like(lambda: of_microbatch(_microbatch(packed, jnp.zeros((), jnp.int32)))[0])
        empty = jnp.zeros(packed.tokens.shape)
        return jax.lax.fori_loop(0, packed.num_microbatches, add, (start, _Scored(empty, empty, empty)))

    def credited(self, packed: PackedUpdate, scored: _Scored, kl_coefficient: jax.Array) -> tuple[jax.Array, jax.Array]:
        """(advantages, returns) [M, B, T] of the whole step, with the KL as a reward and the critic's values."""
        flat = jax.tree.map(lambda array: array.reshape(-1, array.shape[-1]), (packed.loss_mask, packed.segment_ids))
        mask, segments = flat
        rewards, advantages, logprobs, reference, values = (
            array.reshape(mask.shape)
            for array in (packed.rewards, packed.advantages, scored.logprobs, scored.reference, scored.values)
        )
        penalty = jnp.zeros_like(rewards)
        if self.learner.kl.placement == "reward" and self.learner.kl.coefficient:
            penalty = kl_coefficient * kl.kl_estimate(
                target_logprobs=logprobs, reference_logprobs=reference, loss_mask=mask, estimator="k1"
            )
        settings = self.learner.advantage
        returns = jnp.zeros_like(rewards)
        if settings.estimator == "gae":
            advantages, returns = gae(
                rewards=rewards - penalty,
                values=values,
                loss_mask=mask,
                segment_ids=segments,
                discount=settings.discount,
                decay=settings.decay,
            )
        else:
            advantages = advantages - suffix_sums(penalty, mask, segments)
        return advantages.reshape(packed.tokens.shape), returns.reshape(packed.tokens.shape)

    def part(
        self,
        trained: Params,
        frozen: _Frozen,
        batch: PackedUpdate,
        fixed: tuple[jax.Array, jax.Array],
        routing: Routing,
        counts: Counts,
    ) -> tuple[jax.Array, tuple[Sums, jax.Array, Routing]]:
        """(one microbatch's part of the step's loss, (its sums, its largest ratio, its routing))."""
        old_values, returns = fixed
        params = {name: leaf for name, leaf in trained.items() if name not in frozen.slow_critic}
        x_BTD, own_routing = self.forward.trunk(params, batch)
        scores = self.forward.scores(params, x_BTD, batch)
        entropy = scores.entropy
        if not self.learner.objective.entropy_coefficient:
            entropy = jax.lax.stop_gradient(entropy)
        tokens = Tokens(
            target=scores.logprobs,
            entropy=entropy,
            behaviour=batch.behaviour_logprobs,
            advantages=batch.advantages,
            loss_mask=batch.loss_mask,
            segment_ids=batch.segment_ids,
            token_lag=batch.token_lag,
            explored=batch.explored,
            reference=self._logprobs_or_none(frozen.reference, batch),
            proximal=self._logprobs_or_none(frozen.proximal, batch),
            divergence=self._divergence(params, x_BTD, scores.logprobs, frozen.teachers, batch),
        )
        if frozen.slow_critic:
            tokens = tokens._replace(critic=CriticTokens(critic_values(trained, x_BTD), old_values, returns))
        loss, aux = step_loss(self.learner, tokens, counts, frozen.kl_coefficient)
        counted = jnp.sum(routing.num_tokens) > 0  # else this microbatch is the whole step
        step_routing = jax.tree.map(lambda step, own: jnp.where(counted, step, own), routing, own_routing)
        balance = self.learner.balance_coefficient * balance_loss(
            step_routing, own_routing.prob_sums_E, self.config.model.experts_per_token
        )
        balance += self.config.experts.z_coefficient * router_z_loss(step_routing, own_routing.z_sum)
        return loss + balance, (*aux, own_routing)

    def _logprobs_or_none(self, params: Params | None, batch: PackedUpdate) -> jax.Array | None:
        return None if params is None else self.forward.logprobs(params, batch)

    def _divergence(
        self,
        params: Params,
        x_BTD: jax.Array,
        logprobs_BT: jax.Array,
        teachers: tuple[Params, ...],
        batch: PackedUpdate,
    ) -> jax.Array | None:
        """KL to the teachers, [B, T], with its gradient; None without any."""
        if not teachers:
            return None
        distill = self.learner.distill
        own = batch._replace(routed_experts=None, noise_keys=None)  # a teacher's routers choose for themselves
        if distill.match == "logprobs":
            return sampled_divergence(
                target_logprobs=logprobs_BT,
                behaviour_logprobs=batch.behaviour_logprobs,
                teacher_logprobs=[f.logprobs(p, own) for f, p in zip(self.teachers, teachers, strict=True)],
                shares=distill.mixture,
                loss_mask=batch.loss_mask,
            )
        placed = [(f, f.trunk(p, own)[0], p) for f, p in zip(self.teachers, teachers, strict=True)]
        return whole_divergence(
            (self.forward, x_BTD, params),
            placed,
            distill.mixture,
            batch.temperature,
            batch.loss_mask,
            self.config.model.head_chunk_tokens,
        )

    def gradient(
        self,
        trained: Params,
        frozen: _Frozen,
        packed: PackedUpdate,
        fixed: tuple[jax.Array, jax.Array],
        routing: Routing,
        counts: Counts,
    ) -> tuple[jax.Array, Params, Sums, Routing, jax.Array]:
        """The gradient pass: (loss, gradient, sums, routing, largest ratio) of the whole step."""
        part = jax.value_and_grad(self.part, has_aux=True)

        def add(index: jax.Array, carry: tuple[jax.Array, Params, Sums, Routing, jax.Array]) -> tuple[Any, ...]:
            of_batch = jax.tree.map(lambda array: array[index], fixed)
            batch = _microbatch(packed, index)
            (loss, (sums, ratio_max, own_routing)), grads = part(trained, frozen, batch, of_batch, routing, counts)
            *totals, largest = carry
            totals = jax.tree.map(jnp.add, tuple(totals), (loss, grads, sums, own_routing))
            return *totals, jnp.maximum(largest, ratio_max)

        zero = jnp.zeros(())
        zero_sums = Sums(*[zero] * len(Sums._fields))._replace(by_lag=jnp.zeros((4, NUM_LAGS)))
        no_grads, no_routing = jax.tree.map(jnp.zeros_like, (trained, routing))
        zeros = (zero, no_grads, zero_sums, no_routing, zero)
        if packed.tokens.shape[0] == 1:  # a loop would copy weights and gradients
            return add(jnp.zeros((), jnp.int32), zeros)
        return jax.lax.fori_loop(0, packed.num_microbatches, add, zeros)


def _microbatch(packed: PackedUpdate, index: jax.Array) -> PackedUpdate:
    """Microbatch `index`: every array [B, T, …]."""
    fields = packed._asdict()
    del fields["num_microbatches"]
    return packed._replace(**{name: value[index] for name, value in fields.items() if value is not None})


def _zeros_like(function: Callable[[], Any]) -> Any:
    """Zeros in the shapes that the function would return."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), jax.eval_shape(function))


def _sum_over_microbatches(packed: PackedUpdate, num: jax.Array, function: Callable[[PackedUpdate], Any]) -> Any:
    def add(index: jax.Array, total: Any) -> Any:
        return jax.tree.map(jnp.add, total, function(_microbatch(packed, index)))

    zeros = _zeros_like(lambda: function(_microbatch(packed, jnp.zeros((), jnp.int32))))
    return jax.lax.fori_loop(0, num, add, zeros)


def _policy_metrics(config: LearnerConfig, sums: Sums, frozen: _Frozen, counts: Counts) -> Metrics:
    count = jnp.maximum(counts.num_tokens, 1.0)
    metrics = {
        "policy_loss": sums.policy_loss,
        "entropy": sums.entropy / count,
        "clip_fraction": sums.clipped / count,
        "ratio_mean": sums.ratio / count,
        "ess": jnp.square(sums.ratio) / jnp.maximum(count * sums.ratio_squared, 1e-9),
        "logprob_gap_lag0": sums.gap_lag0 / jnp.maximum(sums.tokens_lag0, 1.0),
        "tokens_lag0": sums.tokens_lag0,
        "lag_mean": sums.lag / count,
        "tokens": counts.num_tokens,
        "sequences": counts.num_sequences,
        **metrics_by_lag(sums.by_lag),
    }
    if config.kl.coefficient:
        metrics |= {"kl": sums.kl / count, "kl_coefficient": frozen.kl_coefficient}
    if config.objective.uses_weights:
        metrics |= {"weight_mean": sums.weight / count, "weight_bounded_fraction": sums.weight_bounded / count}
    if frozen.slow_critic:
        metrics["value_loss"] = sums.value_loss
    if frozen.teachers:
        metrics["distill_loss"] = sums.distill_loss
    return metrics


def make_train_step(config: Config, mesh: Mesh) -> CompiledStep:
    """The compiled update `step(state, reference_params, packed, learning_rate, *teachers) -> (state, metrics)`.

    `state` is donated: do not use it afterwards, and give a reference that is a copy (`copy_params`). Where the config
    lets the reference follow the weights, it is part of the state and `reference_params` is not read. `teachers` are
    the weights of those that `learner.distill` names, in its order.

    Metrics are float32 or int32. Means are over the tokens trained on:
      loss, policy_loss, kl and kl_coefficient (absent when the coefficient is 0), balance_loss (1 is balanced), entropy
      (nats), clip_fraction, ratio_mean, ratio_max, ess (effective sample size of the ratios ÷ tokens), weight_mean and
      weight_bounded_fraction (with importance weights), value_loss (with a critic), distill_loss (KL to the teachers,
      with teachers), lag_mean (updates), tokens,
      sequences, tokens_lag0, logprob_gap_lag0 (mean |target − behaviour| log-prob of the tokens that these very weights
      sampled: below 1e-5 when sampler and trainer agree), grad_norm (before clipping), learning_rate, skipped (1 when
      the update was not applied), lag_{tokens,ess,kl}/<lag> (of tokens that old, see lag_worth.py), z_loss (mean
      squared logsumexp of router logits), and those of `expert_metrics`, of which some are [E].
    """
    learner = config.learner
    passes = _Step(config, forward_on(config, mesh), teacher_forwards(config, mesh))
    needs_scores = learner.advantage.estimator == "gae" or (learner.kl.coefficient and learner.kl.placement == "reward")
    whitens = learner.advantage.whiten or learner.advantage.estimator == "reinforce_pp"

    def step(
        state: TrainState,
        reference_params: Params,
        packed: PackedUpdate,
        learning_rate: jax.Array,
        *teachers: Params,
    ) -> tuple[TrainState, Metrics]:
        counts = _counts(config, packed)
        if config.model.router.noise:
            of_update = jax.random.fold_in(jax.random.key(config.seed), state.update + state.skipped)
            packed = packed._replace(noise_keys=jax.random.split(of_update, packed.tokens.shape[0]))
        own = packed.loss_mask if packed.explored is None else packed.loss_mask & ~packed.explored
        mean_lag = jnp.sum(jnp.where(own, packed.token_lag, 0)) / jnp.maximum(jnp.sum(own), 1.0)
        lr_factor, kl_factor = lag_response(mean_lag, lr_slowdown=learner.lr_lag_slowdown, kl_gain=learner.kl.lag_gain)
        coefficient = state.moving.get("kl_coefficient", jnp.asarray(learner.kl.coefficient, jnp.float32))
        frozen = _Frozen(
            reference=state.moving.get("reference", reference_params) if learner.kl.coefficient else None,
            proximal=state.moving.get("proximal"),
            teachers=teachers,
            slow_critic=state.moving.get("critic", {}),
            kl_coefficient=coefficient * kl_factor,
        )
        old_values = returns = jnp.zeros(packed.tokens.shape)
        if needs_scores:
            routing, scored = passes.score(state.params, frozen, packed)
            advantages, returns = passes.credited(packed, scored, frozen.kl_coefficient)
            packed, old_values = packed._replace(advantages=advantages), scored.values
        else:
            routing = passes.count_routing(state.params, packed)
        if whitens:
            packed = packed._replace(advantages=whiten(packed.advantages, packed.loss_mask))
        trained = state.params | state.critic
        loss, grads, sums, routing, ratio_max = passes.gradient(
            trained, frozen, packed, (old_values, returns), routing, counts
        )
        state, metrics = apply_gradient(
            learner,
            state,
            grads,
            loss=loss,
            num_tokens=counts.num_tokens,
            learning_rate=learning_rate * lr_factor,
            measured_kl=sums.kl / jnp.maximum(counts.num_tokens, 1.0),
        )
        bias_step = config.experts.bias_rate * (1 - metrics["skipped"])
        state = state._replace(params=balanced_biases(state.params, routing.counts_E, bias_step))
        metrics |= {
            "loss": loss,
            "ratio_max": ratio_max,
            "balance_loss": balance_loss(routing, routing.prob_sums_E, config.model.experts_per_token),
            "z_loss": router_z_loss(routing, routing.z_sum),
        }
        metrics |= _policy_metrics(learner, sums, frozen, counts)
        metrics |= expert_metrics(routing, grads, config.experts.load_alarm)
        return state, metrics

    shardings = state_shardings(config, mesh)
    rows = batch_sharding(mesh, leading_dims=1)
    packed_shardings = PackedUpdate(*[rows] * len(PackedUpdate._fields))._replace(
        num_microbatches=replicated(mesh),
        routed_experts=rows if config.experts.replay else None,
        explored=rows if config.actor.exploration.share else None,
        noise_keys=None,
    )
    return CompiledStep(
        step,
        in_shardings=(shardings, shardings.params, packed_shardings, None, *[None] * len(passes.teachers)),
        out_shardings=(shardings, replicated(mesh)),
        donate_argnums=0,
    )


def _counts(config: Config, packed: PackedUpdate) -> Counts:
    """Denominators of the step."""
    mask, segments = (array.reshape(-1, array.shape[-1]) for array in (packed.loss_mask, packed.segment_ids))
    return Counts(
        num_tokens=jnp.sum(packed.loss_mask, dtype=jnp.float32),
        num_sequences=count_sequences(mask, segments),
        constant_length=float(config.environment.max_tokens),
    )
