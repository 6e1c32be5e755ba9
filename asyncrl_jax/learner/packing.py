"""Packs the trajectories of one update into rows, by Grain's first-fit packer.

A trajectory of T tokens gives T − 1 positions: position t holds token t as input and everything about token t + 1,
which it predicts: the target, its mask, log-prob, advantage, temperature and lag. Nothing is shifted after that.

Dimensions: M microbatches, R rows of a microbatch, L positions of a row, G trajectories of a group, T tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from asyncrl_jax.config import Config, LearnerConfig
from asyncrl_jax.types import Group, Trajectory

Array = Any  # numpy.ndarray on the host, jax.Array inside of the step


class PackedUpdate(NamedTuple):
    """One update. Arrays have the same shape every time, so the step is compiled once."""

    tokens: Array  # int32 [M, R, L]; 0 in padding
    targets: Array  # int32 [M, R, L]; the next token of the same trajectory
    segment_ids: Array  # int32 [M, R, L]; 1, 2, … within a row; 0 is padding
    positions: Array  # int32 [M, R, L]; within the trajectory
    loss_mask: Array  # bool [M, R, L]; the one effective mask: targets that are trained on
    behaviour_logprobs: Array  # float32 [M, R, L]; of the targets
    advantages: Array  # float32 [M, R, L]
    temperature: Array  # float32 [M, R, L]; of sampling; 1 in padding
    token_lag: Array  # int32 [M, R, L]; updates between the weights that sampled it and those being updated
    rewards: Array  # float32 [M, R, L]; at the last trained token of a trajectory; for a critic
    num_microbatches: Array  # int32 scalar; microbatches in use, the rest is padding

    @property
    def num_tokens(self) -> int:
        """Tokens trained on: the denominator of every mean."""
        return int(self.loss_mask.sum())


def max_rows(config: Config) -> int:
    """Rows that any update fits into: first-fit leaves at most one row with fewer trajectories than always fit."""
    longest = config.environment.max_tokens - 1
    per_row = config.learner.pack_tokens // longest
    return math.ceil(config.learner.most_groups * config.learner.group_size / per_row)


def groups_for_update(backlog: int, config: LearnerConfig) -> int:
    """Groups that the next update takes of `backlog` usable ones: all of them, within the config's bounds.

    A larger update only uses tickets up sooner than planned. Each keeps its deadline, and what is outstanding shrinks,
    so no token gets older than it would have; and the number of microbatches is an input of the compiled step.
    """
    return min(max(backlog, config.groups_per_update), config.most_groups)


def pack_update(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[np.ndarray] | np.ndarray],
    token_lags: Sequence[Sequence[np.ndarray]],
    config: Config,
    loss_masks: Sequence[Sequence[np.ndarray]] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
) -> PackedUpdate:
    """Packs groups, longest trajectory first; the same input gives the same rows.

    Args:
      groups: at most `learner.most_groups`, each of at most `learner.group_size` trajectories.
      advantages: per trajectory per group a number, or float32 [T].
      token_lags: int32 [T] per trajectory per group, in updates; read where the mask is 1.
      config: sizes of the batch.
      loss_masks: uint8 [T] per trajectory per group, where the caller leaves out more tokens than the trajectory's own
        mask does, for instance those over the lag bound. None: the trajectories' own.
      rewards: per trajectory per group. None: 0, for a step without a critic.

    Raises:
      ValueError: for inputs that do not match each other or the sizes of the config, and for a mask that covers a token
        that was not sampled.
    """
    if loss_masks is None:
        loss_masks = [[trajectory.loss_mask for trajectory in group.trajectories] for group in groups]
    if rewards is None:
        rewards = [[0.0] * len(group.trajectories) for group in groups]
    elements = []
    for group, *of_group in zip(groups, advantages, token_lags, loss_masks, rewards, strict=True):
        for trajectory, advantage, lag, mask, reward in zip(group.trajectories, *of_group, strict=True):
            where = f"ticket {group.ticket.ticket_id}"
            _check(trajectory, lag, mask, config, where)
            if len(trajectory.tokens) > 1:
                advantage_T = np.broadcast_to(np.asarray(advantage, np.float32), (len(trajectory.tokens),))
                element = _element(trajectory, advantage_T, group.ticket.temperature, lag, mask)
                elements.append(element | {"rewards": _at_the_end(float(reward), element["loss_mask"])})
    limit = config.learner.most_groups * config.learner.group_size
    if len(elements) > limit:
        raise ValueError(f"{len(elements)} trajectories in one update: the config allows {limit}")
    elements.sort(key=lambda element: -len(element["tokens"]))
    return _arrange(_first_fit(elements, config.learner.pack_tokens, max_rows(config)), config)


def _check(trajectory: Trajectory, lag: np.ndarray, mask: np.ndarray, config: Config, where: str) -> None:
    length, longest = len(trajectory.tokens), config.environment.max_tokens
    if length > longest:
        raise ValueError(f"{where}: trajectory of {length} tokens; environment.max_tokens is {longest}")
    lengths = {len(trajectory.loss_mask), len(trajectory.behaviour_logprobs), len(lag), len(mask), length}
    if len(lengths) > 1:
        raise ValueError(f"{where}: fields of one trajectory have different lengths {sorted(lengths)}")
    if np.any(np.asarray(mask, bool) & ~np.asarray(trajectory.loss_mask, bool)):
        raise ValueError(f"{where}: the mask covers a token that the policy did not sample")
    if length and mask[0]:
        raise ValueError(f"{where}: the first token is masked as sampled, and nothing predicts it")


def _element(
    trajectory: Trajectory, advantage_T: np.ndarray, temperature: float, lag: np.ndarray, mask: np.ndarray
) -> dict[str, np.ndarray]:
    """Inputs at t, and what belongs to token t + 1."""
    num = len(trajectory.tokens) - 1
    return {
        "tokens": trajectory.tokens[:-1].astype(np.int32),
        "targets": trajectory.tokens[1:].astype(np.int32),
        "loss_mask": np.asarray(mask[1:], bool),
        "behaviour_logprobs": trajectory.behaviour_logprobs[1:].astype(np.float32),
        "advantages": advantage_T[1:],
        "temperature": np.full(num, temperature, np.float32),
        "token_lag": np.asarray(lag[1:], np.int32),
    }


def _at_the_end(reward: float, loss_mask: np.ndarray) -> np.ndarray:
    """The reward at the last token of the mask; nowhere if there is none."""
    rewards = np.zeros(len(loss_mask), np.float32)
    if loss_mask.any():
        rewards[np.flatnonzero(loss_mask)[-1]] = reward
    return rewards


def _first_fit(elements: list[dict[str, np.ndarray]], length: int, num_rows: int) -> list[dict[str, np.ndarray]]:
    """Rows of `length` positions, with segment ids and positions of every feature."""
    if not elements:
        return []
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    packed = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(elements).to_iter_dataset(inline),
        length_struct=dict.fromkeys(elements[0], length),
        num_packing_bins=num_rows,  # all rows stay open, so nothing is emitted before everything is placed
        shuffle_bins=False,
    )
    return list(packed)


def _arrange(rows: list[dict[str, np.ndarray]], config: Config) -> PackedUpdate:
    """[M, R, L] arrays of rows, padded to the fixed M."""
    per_microbatch, length = config.learner.microbatch_rows, config.learner.pack_tokens
    num_microbatches = math.ceil(max_rows(config) / per_microbatch)
    shape = (num_microbatches, per_microbatch, length)

    def stack(name: str, dtype: type, fill: float = 0) -> np.ndarray:
        flat: np.ndarray = np.full((num_microbatches * per_microbatch, length), fill, dtype)
        for i, row in enumerate(rows):
            flat[i] = np.where(row["tokens_segment_ids"] > 0, row[name], fill)
        return flat.reshape(shape)

    return PackedUpdate(
        tokens=stack("tokens", np.int32),
        targets=stack("targets", np.int32),
        segment_ids=stack("tokens_segment_ids", np.int32),
        positions=stack("tokens_positions", np.int32),
        loss_mask=stack("loss_mask", np.bool_),
        behaviour_logprobs=stack("behaviour_logprobs", np.float32),
        advantages=stack("advantages", np.float32),
        temperature=stack("temperature", np.float32, fill=1),
        token_lag=stack("token_lag", np.int32),
        rewards=stack("rewards", np.float32),
        num_microbatches=np.asarray(math.ceil(len(rows) / per_microbatch), np.int32),
    )
