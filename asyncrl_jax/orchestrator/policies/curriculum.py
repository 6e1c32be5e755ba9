"""Which task a ticket gets.

Rule. The level is drawn by the configured weights from a seed that names the ticket, so whoever draws it, draws the
same; the task's index is the ticket's count, so no task repeats within a run.
Failure mode: weights that favour a level beyond reach make groups of equal rewards, which teach nothing; the learner's
`zero_variance_share` shows it.
"""

from __future__ import annotations

import bisect
import itertools
import random

from asyncrl_jax.config import EnvironmentConfig
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import Task


def draw_task(environment: EnvironmentConfig, seed: int, count: int) -> Task:
    """The training task of the `count`-th ticket of a run with this seed."""
    bounds = list(itertools.accumulate(environment.level_weights))
    point = random.Random(derive_seed(seed, "level", count)).random() * bounds[-1]
    level = bisect.bisect_right(bounds[:-1], point) + 1
    return Task(environment=environment.name, split="train", level=level, index=count)
