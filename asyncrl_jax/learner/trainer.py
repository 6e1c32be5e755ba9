"""The learner's JAX side: the train state, the frozen reference, the jitted step, and host copies of the weights."""

from __future__ import annotations

import logging
import math
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from asyncrl_jax.config import Config
from asyncrl_jax.models.hf import load_params
from asyncrl_jax.models.hf_names import to_tensors
from asyncrl_jax.models.mesh import batch_sharding, make_mesh, to_host, to_mesh
from asyncrl_jax.models.transformer import Params
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.demonstrations import read_demonstrations
from asyncrl_jax.transport.orders import Orders
from asyncrl_jax.types import Group
from asyncrl_jax.weights.manifest import Canary, Leaf, leaves_digest

from .batch_plan import BatchPlan, plan_update
from .canary import candidate_rows, make_canary
from .checkpoint import Checkpoints
from .credit import assign_credit
from .distill import load_teachers
from .optimizer import learning_rate_at
from .packing import PackedUpdate, max_rows, pack_update
from .state import TrainState, copy_params, create_state, start_from
from .step import make_train_step
from .warm_start import warm_start

log = logging.getLogger(__name__)

TAUGHT_NOTHING_UPDATES = 10  # in a row without any advantage, until it is said


class StopRequested(Exception):
    """The process was asked to stop in the middle of the warm start."""


class Trainer:
    """One update is a function of the weights, the ordered groups, their lags and masks, and a seed; nothing else.

    In a learner of several processes every process has one. That of process 0 is given `orders`, and tells the others
    each call that they must make with it (`distributed.py`).
    """

    ORDERED = frozenset(
        {
            "warm_start",
            "freeze_reference",
            "host_reference",
            "load_reference",
            "start_from_reference",
            "host_weights",
            "host_state",
            "canary",
            "restore_step",
        }
    )  # besides `apply_plan`

    def __init__(self, config: Config, orders: Orders | None = None):
        """Args: orders: what to tell the other processes; None with one process, and in all but process 0."""
        self._config = config
        self._orders = orders
        mesh = self._mesh = make_mesh(config.mesh)
        self.own_rows = _own_rows(config, mesh)
        self._state = create_state(config, config.seed, mesh)
        self._reference: Params | None = None
        self._step = make_train_step(config, mesh)
        self._teachers = load_teachers(config, mesh)
        self._taught_nothing = 0  # updates in a row without any advantage
        self.lr_scale = 1.0  # factor on the learning rate of the updates to come
        self.warm_start_step = 0
        self.warm_start_accuracy = 0.0
        seed = derive_seed(config.seed, "canary")
        self._canary_rows = candidate_rows(seed, config.model.vocab_size, config.environment.max_tokens)

    def _tell(self, call: str, **arguments: Any) -> None:
        if self._orders is not None:
            self._orders.give({"call": call, "arguments": arguments})

    def close(self, status: int) -> None:
        """Ends the other processes with this exit status."""
        self._tell("close", status=status)

    def warm_start(self, default_path: str, stop: threading.Event | None = None) -> None:
        """Weights of `model.checkpoint`, then supervised steps; the optimizer of the RL stage starts afresh.

        Args:
          default_path: of the demonstrations, when the config names none.
          stop: ends it early; None: nothing does.

        Raises:
          ValueError: if checkpoint or demonstrations do not fit the model.
          StopRequested: when `stop` was set meanwhile.
        """
        self._tell("warm_start", default_path=str(default_path))
        model, settings = self._config.model, self._config.warm_start
        if model.checkpoint:
            self._state = start_from(self._config, load_params(model.checkpoint, model, self._mesh), self._mesh)
        if settings.num_steps == 0:
            return
        path = settings.demonstrations or default_path
        demonstrations = read_demonstrations(path)
        if demonstrations.vocab_size > self._config.model.vocab_size:
            raise ValueError(
                f"{path}: {demonstrations.vocab_size} tokens, --config.model.vocab_size={self._config.model.vocab_size}"
            )

        def progress(step: int, metrics: Mapping[str, float]) -> None:
            self.warm_start_step = step
            self.warm_start_accuracy = metrics["accuracy"]
            if stop is not None and stop.is_set():
                raise StopRequested

        rows = [
            (np.asarray(row.tokens, np.int32), np.asarray(row.loss_mask, np.uint8), row.weight)
            for row in demonstrations.rows
        ]
        self._state = warm_start(self._config, self._state, rows, progress)

    def freeze_reference(self) -> None:
        """From here on the KL is to the current weights."""
        self._tell("freeze_reference")
        self._reference = copy_params(self._state.params)

    def host_reference(self) -> Params:
        """The reference as a checkpoint takes it."""
        self._tell("host_reference")
        return to_host(self._reference)

    def save_reference(self, directory: Path) -> None:
        saved = Checkpoints(directory, keep=1)
        if saved.latest() is None:  # else it was written before a kill, from the same demonstrations and seed
            saved.save(0, self.host_reference(), {})
        saved.close()

    def load_reference(self, directory: Path | str) -> None:
        self._tell("load_reference", directory=str(directory))
        self._reference, _ = Checkpoints(directory, keep=1).restore(0, self._state.params)

    def start_from_reference(self, directory: Path | str) -> None:
        """Puts the train state where the first update found it: the weights of v0, a fresh optimizer."""
        self._tell("start_from_reference", directory=str(directory))
        weights, _ = Checkpoints(directory, keep=1).restore(0, self._state.params)
        self._reference = weights
        self._state = start_from(self._config, weights, self._mesh)

    def update(
        self,
        groups: Sequence[Group],
        lags: Sequence[Sequence[np.ndarray]],
        masks: Sequence[Sequence[np.ndarray]],
        seed: int,
        update: int,
        weights: Sequence[float] | None = None,
    ) -> dict[str, float]:
        """One optimizer update.

        Args:
          groups: in the order that the redo log states.
          lags: int32 [T] of every trajectory of every group.
          masks: uint8 [T] of the same; the tokens that enter the loss.
          seed: of everything random in the update.
          update: updates done before; the learning rate's schedule follows it.
          weights: of each group's policy gradient, where the draw was not uniform; None: 1 each.

        Returns:
          Metrics of the update; `skipped` is 1 when the gradient was not finite and nothing changed.
        """
        rewards = [np.asarray([t.reward for t in group.trajectories], np.float32) for group in groups]
        if self._config.reward.shuffle:
            rewards = _shuffled(rewards, seed)
        credit = assign_credit(self._config, groups, masks, rewards, weights)
        self._watch_credit(credit.statistics, update)
        rate = learning_rate_at(self._config.learner, update) * self.lr_scale
        batch = (credit.advantages, lags, credit.loss_masks, credit.rewards)
        if jax.process_count() == 1:
            advantages, lags, kept_masks, shaped = batch
            values = self._apply(pack_update(groups, advantages, lags, self._config, kept_masks, shaped), rate)
        else:
            plan = plan_update(groups, *batch, learning_rate=rate, config=self._config)
            self._tell("apply_plan", plan=plan.to_json())
            values = self.apply_plan(plan, dict(enumerate(groups)))
        return values | credit.statistics | {"recompilations": float(self._step.num_traces - 1)}

    def apply_plan(self, plan: BatchPlan, groups: Mapping[int, Group]) -> dict[str, float]:
        """One optimizer update with the other processes, of which this one feeds `own_rows`.

        Args:
          plan: the same in every process.
          groups: by their number in the plan, at least those of `own_rows`.
        """
        return self._apply(plan.pack(groups, self.own_rows, self._config), plan.learning_rate)

    def _apply(self, packed: PackedUpdate, learning_rate: float) -> dict[str, float]:
        if jax.process_count() > 1:
            rows = batch_sharding(self._mesh, leading_dims=1)
            laid_out = {name: to_mesh(array, rows) for name, array in packed._asdict().items() if np.ndim(array) >= 3}
            packed = packed._replace(**laid_out)
        rate = np.float32(learning_rate)
        self._state, metrics = self._step(self._state, self._reference, packed, rate, *self._teachers)
        return {name: _plain(value) for name, value in jax.device_get(metrics).items()}

    def _watch_credit(self, statistics: dict[str, float], update: int) -> None:
        """Says so when update after update teaches nothing, as when each group holds one trajectory cut into steps."""
        self._taught_nothing = self._taught_nothing + 1 if statistics["zero_advantage"] else 0
        if self._taught_nothing == TAUGHT_NOTHING_UPDATES:
            log.warning(
                "update %d: every advantage of the last %d updates is 0; rewards within each group are all equal",
                update,
                TAUGHT_NOTHING_UPDATES,
            )

    def host_weights(self) -> dict[str, np.ndarray]:
        """Copies of the weights as they are published, by Hugging Face name, that no later step can touch."""
        self._tell("host_weights")
        dtype = np.dtype(self._config.weights.publish_dtype)
        tensors = to_tensors(self._config.model, jax.tree.map(np.array, to_host(self._state.params)))
        return {name: np.ascontiguousarray(tensor.astype(dtype, copy=False)) for name, tensor in tensors.items()}

    def weights_digest(self) -> str:
        """Digest of the weights as a manifest states it: equal weights, equal digest."""
        weights = self.host_weights()
        return leaves_digest(tuple(Leaf.of(name, weights[name]) for name in sorted(weights)))

    def canary(self) -> Canary:
        """Rows with their log-probs under the current weights, rounded as they are published."""
        self._tell("canary")
        params = self._state.params
        if self._config.weights.publish_dtype != "float32":
            dtype = jnp.dtype(self._config.weights.publish_dtype)
            params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), params)
        return make_canary(self._config, params, self._canary_rows)

    @property
    def state(self) -> TrainState:
        """Weights, moments and counts, on the devices."""
        return self._state

    def host_state(self) -> TrainState:
        """`state` as a checkpoint takes it."""
        self._tell("host_state")
        return to_host(self._state)

    def restore(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """Loads the train state of checkpoint `step`; returns the checkpoint's meta."""
        self._tell("restore_step", directory=checkpoints.directory, step=step)
        self._state, meta = checkpoints.restore(step, self._state)
        return meta

    def restore_step(self, directory: str, step: int) -> None:
        """`restore`, in the other processes."""
        self._state, _ = Checkpoints(directory, keep=1).restore(step, self._state)


def _plain(metric: np.ndarray) -> Any:
    """A number; or numbers by their place, for a metric of each expert."""
    if metric.ndim == 0:
        return float(metric)
    return {str(place): float(value) for place, value in enumerate(metric)}


def _own_rows(config: Config, mesh: Mesh) -> frozenset[int]:
    """Rows of a batch, counted over all microbatches, that lie on this process's devices."""
    per_microbatch = config.learner.microbatch_rows
    num_microbatches = math.ceil(max_rows(config) / per_microbatch)
    shape = (num_microbatches, per_microbatch, config.learner.pack_tokens)
    places = batch_sharding(mesh, leading_dims=1).addressable_devices_indices_map(shape).values()
    columns = {row for place in places if place for row in range(*place[1].indices(per_microbatch))}
    return frozenset(microbatch * per_microbatch + row for microbatch in range(num_microbatches) for row in columns)


def _shuffled(rewards: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """The control experiment: rewards permuted over the whole batch."""
    sizes = np.cumsum([len(of_group) for of_group in rewards])[:-1]
    permuted = np.random.default_rng(seed).permutation(np.concatenate(rewards))
    return np.split(permuted, sizes)
