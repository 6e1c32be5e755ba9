"""Environments by the name that `--config.environment.name` and `Task.environment` carry."""

from __future__ import annotations

from asyncrl_jax.actor.envs.arithmetic import Arithmetic
from asyncrl_jax.actor.envs.base import Environment
from asyncrl_jax.config import Config

_CLASSES: tuple[type[Environment], ...] = (Arithmetic,)
ENVIRONMENTS = {environment.name: environment for environment in _CLASSES}


def environment_class(name: str) -> type[Environment]:
    """The registered class; one instance of it serves one episode.

    Raises:
      ValueError: for a name that is not registered.
    """
    if name not in ENVIRONMENTS:
        raise ValueError(f"--config.environment.name={name}: not registered; known: {', '.join(sorted(ENVIRONMENTS))}")
    return ENVIRONMENTS[name]


def check_environment(config: Config) -> type[Environment]:
    """The environment of a run, after checking that the model can speak it and that its levels exist.

    Raises:
      ValueError: naming the setting that does not fit.
    """
    environment = environment_class(config.environment.name)
    if config.model.vocab_size < environment.vocab_size:
        raise ValueError(
            f"--config.model.vocab_size={config.model.vocab_size}: environment {config.environment.name} has "
            f"{environment.vocab_size} tokens"
        )
    if len(config.environment.level_weights) > environment.num_levels:
        raise ValueError(
            f"--config.environment.level_weights={config.environment.level_weights}: environment "
            f"{config.environment.name} has {environment.num_levels} levels"
        )
    return environment
