"""Scores of steps on the wire: three columns of a group, all empty where no process reward model scored anything.

Dimensions: G trajectories, S tokens of the whole group, K scored steps of all trajectories, or of one.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from asyncrl_jax.types import Trajectory

STEP_COLUMNS = {"num_steps": "<i4", "step_scores": "<f4", "step_ends": "<i4"}


class BadColumn(ValueError):
    """Values that can't be; `reason` is a short stable name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason


def step_columns(members: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The columns of `STEP_COLUMNS`: num_steps [G], step_scores and step_ends [K].

    Raises:
      TypeError, ValueError, AttributeError: for scores or ends of another type or rank, or not as many of each.
    """
    scores, ends = [m.step_scores for m in members], [m.step_ends for m in members]
    if all(array is None for array in (*scores, *ends)):
        return {name: np.zeros(0, dtype) for name, dtype in STEP_COLUMNS.items()}
    counts = [0 if array is None else len(array) for array in scores]
    if counts != [0 if array is None else len(array) for array in ends]:
        raise ValueError(f"{counts} scores of steps, and not as many ends")
    columns = {"num_steps": np.array(counts, "<i4")}
    for name, arrays in (("step_scores", scores), ("step_ends", ends)):
        there = [array for array in arrays if array is not None]
        if any(array.ndim != 1 for array in there):
            raise ValueError(f"{name} has shapes {[array.shape for array in there]}")
        columns[name] = np.concatenate(there, dtype=STEP_COLUMNS[name], casting="no")
    return columns


def split_steps(columns: Mapping[str, np.ndarray]) -> list[dict[str, np.ndarray]]:
    """The fields step_scores [K] and step_ends [K] of each trajectory, nothing for one without.

    Args:
      columns: of `STEP_COLUMNS`, lengths [G] and loss_mask [S].

    Raises:
      BadColumn: reasons "length_mismatch", "bad_step_scores" and "bad_step_ends".
    """
    lengths_G, counts_G = columns["lengths"], columns["num_steps"]
    scores_K, ends_K = columns["step_scores"], columns["step_ends"]
    if not (len(counts_G) or len(scores_K) or len(ends_K)):
        return [{}] * len(lengths_G)
    fits = len(counts_G) == len(lengths_G) and counts_G.min() >= 0
    if not (fits and counts_G.sum(dtype=np.int64) == len(scores_K) == len(ends_K)):
        detail = f"{len(scores_K)} scores and {len(ends_K)} ends, for {counts_G[:9].tolist()} steps"
        raise BadColumn("length_mismatch", detail)
    good_K = (scores_K >= 0) & (scores_K <= 1)  # NaN is not
    if not good_K.all():
        raise BadColumn("bad_step_scores", f"{scores_K[~good_K][0]} is outside [0, 1]")
    bounds, starts = np.cumsum([0, *counts_G], dtype=np.int64), np.cumsum([0, *lengths_G], dtype=np.int64)
    steps: list[dict[str, np.ndarray]] = []
    for g, (first, last) in enumerate(itertools.pairwise(bounds)):
        own_ends = ends_K[first:last]
        if len(own_ends) == 0:
            steps.append({})
            continue
        rising = own_ends[0] > 0 and (own_ends[1:] > own_ends[:-1]).all() and own_ends[-1] <= lengths_G[g]
        if not (rising and columns["loss_mask"][starts[g] + own_ends - 1].all()):
            raise BadColumn("bad_step_ends", f"trajectory {g}: {own_ends[:9].tolist()} are no ends of sampled steps")
        steps.append({"step_scores": scores_K[first:last], "step_ends": own_ends})
    return steps
