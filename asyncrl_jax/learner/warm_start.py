"""Supervised steps on demonstrations before the first RL update, so that v0 can be rewarded at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import jax
import numpy as np
import optax

from asyncrl_jax.config import Config
from asyncrl_jax.learner.state import TrainState, start_from
from asyncrl_jax.learner.supervised import SupervisedBatch, make_supervised_step
from asyncrl_jax.models.mesh import batch_sharding, make_mesh, to_mesh

Demonstration = tuple[np.ndarray, np.ndarray] | tuple[np.ndarray, np.ndarray, float]
# tokens int32 [T], loss_mask uint8 [T], and a weight where that is not 1: below 0 for what not to say
Progress = Callable[[int, Mapping[str, float]], None]  # (steps done, metrics: means since the last call)

REPORT_EVERY_STEPS = 50
WIDTH_MULTIPLE = 8  # the batch is as wide as the longest demonstration, rounded up to this


def warm_start(
    config: Config, state: TrainState, demonstrations: Sequence[Demonstration], progress: Progress
) -> TrainState:
    """Trains `warm_start.num_steps` supervised steps; returns the trained weights at update 0 with a fresh optimizer.

    The same config, state and demonstrations give the same weights. With 0 steps the state is returned as it is.

    Args:
      config: `warm_start`, `model`, `mesh`, `seed`, and of `learner` the optimizer's settings.
      state: where to start; donated.
      demonstrations: at least one. Position t of a demonstration is trained on where its mask is 1.
      progress: called every REPORT_EVERY_STEPS steps and after the last.

    Raises:
      ValueError: without a usable demonstration, or for one that is too long or whose fields differ in length.
      RuntimeError: when the loss is no longer finite.
    """
    settings = config.warm_start
    if settings.num_steps == 0:
        return state
    _check(demonstrations, config.model.max_positions)
    mesh = make_mesh(config.mesh)
    step = make_supervised_step(config, mesh)
    schedule = optax.cosine_decay_schedule(settings.learning_rate, settings.num_steps, alpha=0.1)
    rates = np.asarray(schedule(np.arange(settings.num_steps)), np.float32)
    since_report: list[Mapping[str, jax.Array]] = []
    for index, batch in enumerate(_batches(demonstrations, settings.batch_rows, settings.num_steps, config.seed)):
        placed = batch
        if jax.process_count() > 1:
            placed = jax.tree.map(lambda array: to_mesh(array, batch_sharding(mesh)), batch)
        state, metrics = step(state, placed, rates[index])
        since_report.append(metrics)
        done = index + 1
        if done % REPORT_EVERY_STEPS == 0 or done == settings.num_steps:
            rows = jax.device_get(since_report)
            report = {name: float(np.mean([row[name] for row in rows])) for name in rows[0]}
            since_report.clear()
            progress(done, report)
            if not np.isfinite(report["loss"]):
                raise RuntimeError(f"warm start: loss {report['loss']} at step {done}; lower warm_start.learning_rate")
    return start_from(config, state.params, mesh)


def _check(demonstrations: Sequence[Demonstration], max_positions: int) -> None:
    if not any(np.any(mask[1:]) for _, mask, *_ in demonstrations):
        raise ValueError(f"{len(demonstrations)} demonstrations, none with a token to train on")
    for i, (tokens, mask, *_) in enumerate(demonstrations):
        if len(tokens) != len(mask):
            raise ValueError(f"demonstration {i} has {len(tokens)} tokens and a mask of {len(mask)}")
        if len(tokens) > max_positions:
            raise ValueError(f"demonstration {i} has {len(tokens)} tokens; model.max_positions is {max_positions}")


def _batches(
    demonstrations: Sequence[Demonstration], rows: int, num_batches: int, seed: int
) -> Iterator[SupervisedBatch]:
    """Batches of one shape, drawn from epochs in shuffled order; one demonstration a row."""
    longest = max(len(tokens) for tokens, *_ in demonstrations) - 1
    width = -(-longest // WIDTH_MULTIPLE) * WIDTH_MULTIPLE
    num = len(demonstrations)
    tokens, targets, segment_ids = (np.zeros((num, width), np.int32) for _ in range(3))
    loss_mask, weights = np.zeros((num, width), bool), np.ones((num, width), np.float32)
    for i, (sequence, mask, *weight) in enumerate(demonstrations):
        length = max(len(sequence) - 1, 0)
        tokens[i, :length], targets[i, :length] = sequence[:-1], sequence[1:]
        segment_ids[i, :length], loss_mask[i, :length] = 1, mask[1:]
        weights[i] = weight[0] if weight else 1.0
    positions = np.tile(np.arange(width, dtype=np.int32), (rows, 1))
    rng = np.random.default_rng(seed)
    order = np.empty(0, np.int64)
    for _ in range(num_batches):
        while len(order) < rows:
            order = np.append(order, rng.permutation(num))
        chosen, order = order[:rows], order[rows:]
        of_rows = (array[chosen] for array in (loss_mask, weights))
        yield SupervisedBatch(tokens[chosen], targets[chosen], segment_ids[chosen], positions, *of_rows)
