"""The process reward model of a run, as `reward.process` says."""

from __future__ import annotations

from asyncrl_jax.actor.process_rewards.base import ProcessRewardModel, ProcessScorer, Text
from asyncrl_jax.config import Config


def make_process_scorer(config: Config, text: Text) -> ProcessScorer | None:
    """What scores the steps of training episodes; None where the environment does.

    Args:
      config: of the run.
      text: what tokens of the environment say.

    Raises:
      ValueError: for settings that can't be had; it names them.
    """
    settings = config.reward.process
    if not settings.enabled:
        return None
    model: ProcessRewardModel
    if settings.url:
        from asyncrl_jax.actor.process_rewards.remote import RemoteProcessModel

        model = RemoteProcessModel(settings)
    else:
        from asyncrl_jax.actor.process_rewards.jax_model import JaxProcessModel

        model = JaxProcessModel(settings, one_at_a_time=config.deterministic)
    return ProcessScorer(model, text, settings)
