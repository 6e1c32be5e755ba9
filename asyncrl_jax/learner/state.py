"""What an update changes, how it begins, and how it lies on the mesh."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec

from asyncrl_jax.config import Config, LearnerConfig
from asyncrl_jax.learner import kl
from asyncrl_jax.learner.optimizer import make_optimizer, moving_average, select
from asyncrl_jax.learner.values import init_critic
from asyncrl_jax.models.mesh import make_mesh, replicated
from asyncrl_jax.models.sharding import param_shardings
from asyncrl_jax.models.transformer import Params, abstract_params, init_params

Metrics = dict[str, jax.Array]


class TrainState(NamedTuple):
    """All that an update changes. A tree of arrays, ready for a checkpoint."""

    params: Params
    opt_state: Any
    update: jax.Array  # int32 scalar; updates applied since v0
    skipped: jax.Array  # int32 scalar; updates not applied: loss or gradient not finite, or no token to train on
    critic: Params  # the value head; empty without one
    moving: dict[str, Any]  # what the config lets follow the weights; see `_first_moving`


def create_state(config: Config, seed: int, mesh: Mesh | None = None) -> TrainState:
    """Random weights and a fresh optimizer, laid out on the mesh (None: that of the config).

    The weights depend on the seed alone, not on the mesh.
    """
    # Made before they are sharded: random bits may depend on how the program that makes them is partitioned.
    params = init_params(config.model, seed)
    if jax.process_count() > 1:
        params = jax.tree.map(np.asarray, params)  # on no device yet, so that it may go to those of other processes
    return start_from(config, params, make_mesh(config.mesh) if mesh is None else mesh)


def start_from(config: Config, params: Params, mesh: Mesh) -> TrainState:
    """Update 0 with a copy of these weights and a fresh optimizer."""

    def fresh(params: Params) -> TrainState:
        return _fresh_state(config, copy_params(params))

    return jax.jit(fresh, out_shardings=state_shardings(config, mesh))(params)


def copy_params(params: Params) -> Params:
    """Weights that outlive the state they came from: a step donates its state, so a reference must be a copy."""
    return jax.tree.map(jnp.copy, params)


def _fresh_state(config: Config, params: Params) -> TrainState:
    zero = jnp.zeros((), jnp.int32)
    critic: Params = {}
    if config.learner.advantage.estimator == "gae":
        critic = init_critic(config.model.hidden_dim, config.seed)
    opt_state = make_optimizer(config.learner).init(params | critic)
    return TrainState(params, opt_state, zero, zero, critic, _first_moving(config.learner, params, critic))


def _first_moving(config: LearnerConfig, params: Params, critic: Params) -> dict[str, Any]:
    """At update 0: `reference` (periodic or ema), `proximal` (decoupled), `critic` (slow head), `kl_coefficient`."""
    moving: dict[str, Any] = {}
    if config.kl.reference != "fixed":
        moving["reference"] = copy_params(params)
    if config.objective.correction == "decoupled":
        moving["proximal"] = copy_params(params)
    if critic:
        moving["critic"] = copy_params(critic)
    if config.kl.target:
        moving["kl_coefficient"] = jnp.asarray(config.kl.coefficient, jnp.float32)
    return moving


def move(config: LearnerConfig, moving: dict[str, Any], state: TrainState, measured_kl: jax.Array) -> dict[str, Any]:
    """What follows the weights, after the update that led to `state`."""
    moved = dict(moving)
    if config.kl.reference == "periodic":
        due = state.update % config.kl.reference_every_updates == 0
        moved["reference"] = select(due, state.params, moving["reference"])
    if config.kl.reference == "ema":
        moved["reference"] = moving_average(moving["reference"], state.params, config.kl.reference_decay)
    if "proximal" in moving:
        moved["proximal"] = moving_average(moving["proximal"], state.params, config.objective.proximal_decay)
    if "critic" in moving:
        moved["critic"] = moving_average(moving["critic"], state.critic, config.critic.slow_decay)
    if "kl_coefficient" in moving:
        moved["kl_coefficient"] = kl.adapted_coefficient(
            moving["kl_coefficient"],
            measured=measured_kl,
            target=config.kl.target,
            rate=config.kl.adaptation_rate,
        )
    return moved


def apply_gradient(
    config: LearnerConfig,
    state: TrainState,
    grads: Params,
    *,
    loss: jax.Array,
    num_tokens: jax.Array,
    learning_rate: jax.Array,
    measured_kl: jax.Array | None = None,
) -> tuple[TrainState, Metrics]:
    """The next state; or the same one with `skipped` one higher, when loss or gradient is not finite.

    Args:
      config: optimizer, and what follows the weights.
      state: before the update.
      grads: of `state.params | state.critic`.
      loss: of the step.
      num_tokens: trained on; with none there is no update.
      learning_rate: of this update.
      measured_kl: in nats per token, which adapts the KL coefficient; None leaves all of `moving` as it is.
    """
    grad_norm = optax.tree.norm(grads)
    good = jnp.isfinite(loss) & jnp.isfinite(grad_norm) & (num_tokens > 0)
    trained = state.params | state.critic
    updates, opt_state = make_optimizer(config).update(grads, state.opt_state, trained)
    trained = jax.tree.map(lambda param, update: param - learning_rate * update, trained, updates)
    new = state._replace(
        params={name: trained[name] for name in state.params},
        critic={name: trained[name] for name in state.critic},
        opt_state=opt_state,
        update=state.update + 1,
    )
    if measured_kl is not None:
        new = new._replace(moving=move(config, state.moving, new, measured_kl))
    applied = good.astype(jnp.int32)
    next_state = select(good, new, state._replace(skipped=state.skipped + 1))
    return next_state, {"grad_norm": grad_norm, "skipped": 1 - applied, "learning_rate": learning_rate}


def state_shardings(config: Config, mesh: Mesh | AbstractMesh) -> TrainState:
    """Sharding of every leaf: what is kept for a weight lies like the weight, everything else everywhere."""
    by_name = param_shardings(config.model, mesh)
    params = abstract_params(config.model)

    def of_leaf(path: tuple[Any, ...], leaf: jax.ShapeDtypeStruct) -> NamedSharding:
        name = getattr(path[-1], "key", "")
        if name not in by_name:
            return replicated(mesh)
        return _lying_like(leaf.shape, params[name].shape, by_name[name])

    return jax.tree_util.tree_map_with_path(of_leaf, abstract_state(config))


def abstract_state(config: Config) -> TrainState:
    """Shape and dtype of every leaf, without making any."""
    return jax.eval_shape(lambda params: _fresh_state(config, params), abstract_params(config.model))


def _lying_like(shape: tuple[int, ...], of_param: tuple[int, ...], sharding: NamedSharding) -> NamedSharding:
    """That of the weight; without the dimension that a factored moment lacks; or everywhere."""
    if shape == of_param:
        return sharding
    axes = (*sharding.spec, *(None,) * (len(of_param) - len(sharding.spec)))
    for missing in range(len(of_param)):
        if shape == of_param[:missing] + of_param[missing + 1 :]:
            return NamedSharding(sharding.mesh, PartitionSpec(*axes[:missing], *axes[missing + 1 :]))
    return NamedSharding(sharding.mesh, PartitionSpec())
