"""Packs the trajectories of one update into rows, by Grain's first-fit packer.

A trajectory of T tokens gives T − 1 positions: position t holds token t as input and everything about token t + 1,
which it predicts: the target, its mask, log-prob, advantage, temperature and lag. Nothing is shifted after that.

Dimensions: M microbatches, R rows of a microbatch, L positions of a row, G trajectories of a group, T tokens of one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import grain
import numpy as np

from asyncrl_jax.config import Config, LearnerConfig
from asyncrl_jax.types import Group, Ticket, Trajectory

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
    routed_experts: Array | None = None  # int32 [M, R, L, N, A] for N layers with experts; −1: routed live
    explored: Array | None = None  # bool [M, R, L]; sampled by another policy; None where none is asked for
    noise_keys: Array | None = None  # random keys [M] of the routers' noise; made inside of the step

    @property
    def num_tokens(self) -> int:
        """Tokens trained on: the denominator of every mean."""
        return int(self.loss_mask.sum())


_FEATURES: dict[str, tuple[type, float]] = {  # dtype, and what padding holds
    "tokens": (np.int32, 0),
    "targets": (np.int32, 0),
    "segment_ids": (np.int32, 0),
    "positions": (np.int32, 0),
    "loss_mask": (np.bool_, 0),
    "behaviour_logprobs": (np.float32, 0),
    "advantages": (np.float32, 0),
    "temperature": (np.float32, 1),
    "token_lag": (np.int32, 0),
    "rewards": (np.float32, 0),
}


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


Layout = list[list[tuple[int, int]]]  # rows of (group, trajectory of it), in their order within the row


def lay_out(groups: Sequence[Group], config: Config) -> Layout:
    """Which trajectories share a row: the longest first, each into the first row with room (Grain's first-fit).

    The lengths alone decide, so every process that is told the layout builds the same batch.

    Raises:
      ValueError: for more trajectories than the config allows.
    """
    places = [(g, t) for g, group in enumerate(groups) for t in range(len(group.trajectories))]
    lengths = {(g, t): len(groups[g].trajectories[t].tokens) - 1 for g, t in places}  # nothing predicts the first token
    places = sorted((place for place in places if lengths[place] > 0), key=lambda place: -lengths[place])
    limit = config.learner.most_groups * config.learner.group_size
    if len(places) > limit:
        raise ValueError(f"{len(places)} trajectories in one update: the config allows {limit}")
    if not places:
        return []
    elements = [{"place": np.full(lengths[place], index, np.int32)} for index, place in enumerate(places)]
    inline = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    packed = grain.experimental.FirstFitPackIterDataset(
        grain.MapDataset.source(elements).to_iter_dataset(inline),
        length_struct={"place": config.learner.pack_tokens},
        num_packing_bins=max_rows(config),  # all rows stay open, so nothing is emitted before everything is placed
        shuffle_bins=False,
    )
    rows = []
    for row in packed:
        used = row["place"][row["place_segment_ids"] > 0]
        rows.append([places[index] for index in dict.fromkeys(used.tolist())])
    return rows


def pack_update(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[np.ndarray] | np.ndarray],
    token_lags: Sequence[Sequence[np.ndarray]],
    config: Config,
    loss_masks: Sequence[Sequence[np.ndarray]] | None = None,
    rewards: Sequence[Sequence[float]] | None = None,
) -> PackedUpdate:
    """Packs groups as `lay_out` says; the same input gives the same rows.

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
    elements = {}
    for g, (group, *of_group) in enumerate(zip(groups, advantages, token_lags, loss_masks, rewards, strict=True)):
        for t, (trajectory, *worth) in enumerate(zip(group.trajectories, *of_group, strict=True)):
            elements[g, t] = element(trajectory, *worth, ticket=group.ticket, config=config)
    return arrange(lay_out(groups, config), elements, config)


def element(
    trajectory: Trajectory,
    advantage: np.ndarray,
    lag: np.ndarray,
    mask: np.ndarray,
    reward: float,
    *,
    ticket: Ticket,
    config: Config,
) -> dict[str, np.ndarray]:
    """Positions of one trajectory: inputs at t, and what belongs to token t + 1. Arguments: see `pack_update`."""
    _check(trajectory, lag, mask, config, f"ticket {ticket.ticket_id}")
    num = max(len(trajectory.tokens) - 1, 0)
    loss_mask = np.asarray(mask[1:], bool)
    optional = {"explored": np.full(num, trajectory.exploration is not None)} if config.actor.exploration.share else {}
    if config.experts.replay:
        optional["routed_experts"] = _routing_rows(trajectory, num, config, f"ticket {ticket.ticket_id}")
    return optional | {
        "tokens": trajectory.tokens[:-1].astype(np.int32),
        "targets": trajectory.tokens[1:].astype(np.int32),
        "positions": np.arange(num, dtype=np.int32),
        "loss_mask": loss_mask,
        "behaviour_logprobs": trajectory.behaviour_logprobs[1:].astype(np.float32),
        "advantages": np.broadcast_to(np.asarray(advantage, np.float32), (len(trajectory.tokens),))[1:],
        "temperature": np.full(num, trajectory.temperature or ticket.temperature, np.float32),
        "token_lag": np.asarray(lag[1:], np.int32),
        "rewards": _at_the_end(float(reward), loss_mask),
    }


def arrange(layout: Layout, elements: Mapping[tuple[int, int], dict[str, np.ndarray]], config: Config) -> PackedUpdate:
    """[M, R, L] arrays of the rows, padded to the fixed M. Trajectories that `elements` lacks are left as padding."""
    per_microbatch, length = config.learner.microbatch_rows, config.learner.pack_tokens
    num_microbatches = math.ceil(max_rows(config) / per_microbatch)
    flat: dict[str, np.ndarray] = {
        name: np.full((num_microbatches * per_microbatch, length), fill, dtype)
        for name, (dtype, fill) in _FEATURES.items()
    }
    if config.actor.exploration.share:
        flat["explored"] = np.zeros((num_microbatches * per_microbatch, length), bool)
    if config.experts.replay:
        shape = (num_microbatches * per_microbatch, length, config.model.num_moe_layers, config.model.experts_per_token)
        flat["routed_experts"] = np.full(shape, -1, np.int32)
    for index, row in enumerate(layout):
        start = 0
        for segment, place in enumerate(row, 1):
            if place not in elements:
                break  # a row is built whole or not at all
            end = start + len(elements[place]["tokens"])
            flat["segment_ids"][index, start:end] = segment
            for name, values in elements[place].items():
                flat[name][index, start:end] = values
            start = end
    arrays = {name: array.reshape(num_microbatches, per_microbatch, *array.shape[1:]) for name, array in flat.items()}
    return PackedUpdate(**arrays, num_microbatches=np.asarray(math.ceil(len(layout) / per_microbatch), np.int32))


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


def _routing_rows(trajectory: Trajectory, num: int, config: Config, where: str) -> np.ndarray:
    """int32 [num, N, A]: what the sampler's routers chose for each input token; −1 for what it did not record.

    Recorded rows may be fewer than tokens: the last sampled token was never an input of the sampler.
    """
    shape = (num, config.model.num_moe_layers, config.model.experts_per_token)
    rows = np.full(shape, -1, np.int32)
    recorded = trajectory.routed_experts
    if recorded is None:
        return rows
    if recorded.shape[1:] != shape[1:] or len(recorded) > len(trajectory.tokens):
        need = f"at most {len(trajectory.tokens)} rows of {shape[1:]}"
        raise ValueError(f"{where}: routed experts have shape {recorded.shape}, needed are {need}")
    if recorded.size and (recorded.min() < -1 or recorded.max() >= config.model.num_experts):
        span = f"{recorded.min()} to {recorded.max()}"
        raise ValueError(f"{where}: routed experts {span}; ids are −1 and 0 to {config.model.num_experts - 1}")
    rows[: len(recorded)] = recorded[:num]
    return rows


def _at_the_end(reward: float, loss_mask: np.ndarray) -> np.ndarray:
    """The reward at the last token of the mask; nowhere if there is none."""
    rewards = np.zeros(len(loss_mask), np.float32)
    if loss_mask.any():
        rewards[np.flatnonzero(loss_mask)[-1]] = reward
    return rewards
