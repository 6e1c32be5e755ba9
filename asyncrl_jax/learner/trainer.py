"""The learner's JAX side: the train state, the frozen reference, the jitted step, and host copies of the weights."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.models.hf import load_params
from asyncrl_jax.models.hf_names import to_tensors
from asyncrl_jax.models.mesh import make_mesh
from asyncrl_jax.models.transformer import Params
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.transport.demonstrations import read_demonstrations
from asyncrl_jax.types import Group
from asyncrl_jax.weights.manifest import Canary, Leaf, leaves_digest

from .canary import canary_logprobs
from .checkpoint import Checkpoints
from .credit import assign_credit
from .optimizer import learning_rate_at
from .packing import pack_update
from .state import TrainState, copy_params, create_state, start_from
from .step import make_train_step
from .warm_start import warm_start

log = logging.getLogger(__name__)

CANARY_SHAPE = (4, 24)  # rows, tokens; at most environment.max_tokens
TAUGHT_NOTHING_UPDATES = 10  # in a row without any advantage, until it is said


class StopRequested(Exception):
    """The process was asked to stop in the middle of the warm start."""


class Trainer:
    """One update is a function of the weights, the ordered groups, their lags and masks, and a seed; nothing else."""

    def __init__(self, config: Config):
        self._config = config
        mesh = self._mesh = make_mesh(config.mesh)
        self._state = create_state(config, config.seed, mesh)
        self._reference: Params | None = None
        self._step = make_train_step(config, mesh)
        self._taught_nothing = 0  # updates in a row without any advantage
        self.lr_scale = 1.0  # factor on the learning rate of the updates to come
        self.warm_start_step = 0
        self.warm_start_accuracy = 0.0
        rows, length = CANARY_SHAPE
        self._canary_tokens = np.random.default_rng(derive_seed(config.seed, "canary")).integers(
            0, config.model.vocab_size, (rows, min(length, config.environment.max_tokens)), dtype=np.int32
        )

    def warm_start(self, default_path: Path, stop: threading.Event) -> None:
        """Weights of `model.checkpoint`, then supervised steps; the optimizer of the RL stage starts afresh.

        Args:
          default_path: of the demonstrations, when the config names none.
          stop: ends it early.

        Raises:
          ValueError: if checkpoint or demonstrations do not fit the model.
          StopRequested: when `stop` was set meanwhile.
        """
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
            if stop.is_set():
                raise StopRequested

        rows = [(np.asarray(row.tokens, np.int32), np.asarray(row.loss_mask, np.uint8)) for row in demonstrations.rows]
        self._state = warm_start(self._config, self._state, rows, progress)

    def freeze_reference(self) -> None:
        """From here on the KL is to the current weights."""
        self._reference = copy_params(self._state.params)

    def save_reference(self, directory: Path) -> None:
        saved = Checkpoints(directory, keep=1)
        if saved.latest() is None:  # else it was written before a kill, from the same demonstrations and seed
            saved.save(0, self._reference, {})
        saved.close()

    def load_reference(self, directory: Path) -> None:
        self._reference, _ = Checkpoints(directory, keep=1).restore(0, self._state.params)

    def start_from_reference(self, directory: Path) -> None:
        """Puts the train state where the first update found it: the weights of v0, a fresh optimizer."""
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
        packed = pack_update(groups, credit.advantages, lags, self._config, credit.loss_masks, credit.rewards)
        rate = np.float32(learning_rate_at(self._config.learner, update) * self.lr_scale)
        self._state, metrics = self._step(self._state, self._reference, packed, rate)
        values = {name: float(value) for name, value in jax.device_get(metrics).items()}
        return values | credit.statistics | {"recompilations": float(self._step.num_traces - 1)}

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
        dtype = np.dtype(self._config.weights.publish_dtype)
        tensors = to_tensors(self._config.model, jax.tree.map(np.array, self._state.params))
        return {name: np.ascontiguousarray(tensor.astype(dtype, copy=False)) for name, tensor in tensors.items()}

    def weights_digest(self) -> str:
        """Digest of the weights as a manifest states it: equal weights, equal digest."""
        weights = self.host_weights()
        return leaves_digest(tuple(Leaf.of(name, weights[name]) for name in sorted(weights)))

    def canary(self) -> Canary:
        """Fixed rows with their log-probs under the current weights, rounded as they are published."""
        params = self._state.params
        if self._config.weights.publish_dtype != "float32":
            dtype = jnp.dtype(self._config.weights.publish_dtype)
            params = jax.tree.map(lambda leaf: leaf.astype(dtype).astype(leaf.dtype), params)
        return Canary(self._canary_tokens, canary_logprobs(self._config, params, self._canary_tokens))

    @property
    def state(self) -> TrainState:
        """Weights, moments and counts, as a checkpoint holds them."""
        return self._state

    def restore(self, checkpoints: Checkpoints, step: int) -> dict[str, Any]:
        """Loads the train state of checkpoint `step`; returns the checkpoint's meta."""
        self._state, meta = checkpoints.restore(step, self._state)
        return meta


def _shuffled(rewards: list[np.ndarray], seed: int) -> list[np.ndarray]:
    """The control experiment: rewards permuted over the whole batch."""
    sizes = np.cumsum([len(of_group) for of_group in rewards])[:-1]
    permuted = np.random.default_rng(seed).permutation(np.concatenate(rewards))
    return np.split(permuted, sizes)
