"""Writes demonstrations for the warm start: a scripted policy plays the environment's own training tasks."""

from __future__ import annotations

import asyncio
import os
import random
from collections.abc import Sequence

from asyncrl_jax.actor.envs.base import Environment
from asyncrl_jax.actor.envs.registry import make_environments
from asyncrl_jax.config import Config, EnvironmentConfig
from asyncrl_jax.transport.demonstrations import Demonstration, DemonstrationSet, save_demonstrations
from asyncrl_jax.types import Task


def write_demonstrations(config: Config, path: str | os.PathLike[str]) -> DemonstrationSet:
    """Plays training tasks of the demonstrated levels in turn and writes `warm_start.num_demonstrations` to `path`.

    The file depends on the config alone. Episodes that do not fit in `environment.max_tokens` or
    `environment.max_turns` are left out and the next task takes their place, up to ten tasks for every demonstration
    asked for.

    Raises:
      ValueError: if the environment does not fit the config, or too few episodes fit its limits.
    """
    environments = make_environments(config)
    settings, wanted = config.environment, config.warm_start.num_demonstrations
    rng = random.Random(f"demonstrations/{config.seed}")

    async def play_all() -> list[Demonstration]:
        rows: list[Demonstration] = []
        for attempt in range(10 * wanted):
            level = settings.demonstrated_levels[attempt % len(settings.demonstrated_levels)]
            task = Task(settings.name, "train", level, attempt // len(settings.demonstrated_levels))
            row = await _play(environments(), task, settings, rng)
            if row is not None:
                rows.append(row)
            if len(rows) == wanted:
                return rows
        raise ValueError(
            f"--config.environment.max_tokens={settings.max_tokens}, max_turns={settings.max_turns}: only {len(rows)} "
            f"of {wanted} demonstrations fit"
        )

    demonstrations = DemonstrationSet(
        environment=settings.name,
        identity=environments.identity,
        vocab_size=environments.vocab_size,
        rows=tuple(asyncio.run(play_all())),
    )
    save_demonstrations(path, demonstrations)
    return demonstrations


async def _play(
    environment: Environment, task: Task, settings: EnvironmentConfig, rng: random.Random
) -> Demonstration | None:
    """One scripted episode, or None when it breaks a limit."""
    tokens: list[int] = []
    loss_mask: list[int] = []

    def record(new: Sequence[int], spoken: bool) -> None:
        tokens.extend(new)
        loss_mask.extend([int(spoken)] * len(new))

    record(await environment.reset(task), spoken=False)
    turns = environment.demonstrate(rng)
    for turn in turns:
        record(turn, spoken=True)
        observation = await environment.step(turn)
        if observation.done:
            break
        record(observation.tokens, spoken=False)
    success = (await environment.score()).success
    await environment.close()
    if len(tokens) > settings.max_tokens or len(turns) > settings.max_turns:
        return None
    return Demonstration(level=task.level, tokens=tuple(tokens), loss_mask=tuple(loss_mask), success=success)
