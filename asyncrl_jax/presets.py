"""Named starting points: changes to the default `Config`, by dotted name. Flags given beside a preset win over it."""

from __future__ import annotations

from typing import Any

from asyncrl_jax.config import Config, override

PRESETS: dict[str, dict[str, Any]] = {
    # The defaults: a small MoE that learns arithmetic with a calculator in minutes on two CPU cores.
    "quickstart": {},
    # The same task with a real vLLM in the actor. Its kernels for the CPU want heads of 32; one host leaves the other
    # core to the learner.
    "vllm": {
        "actor.engine": "vllm",
        "actor.num_hosts": 1,
        "model.head_dim": 32,
    },
    # Each group is trained on twice, from a pool of 20 updates' worth of uses.
    "replay": {
        "lag.actor_updates": 4,
        "lag.token_updates": 24,
        "learner.replay_ratio": 2,
        "pool.size_updates": 20,
        "pool.draw": "strata",
        "weights.keep_versions": 32,
    },
    # Bit-equal weights from the same seed, on the same machine and packages; see docs/data.md.
    "deterministic": {"deterministic": True, "mode": "sync", "actor.num_hosts": 1},
    # An agent program written against the OpenAI client, from random weights: examples/vowels.py.
    "agent": {
        "environment.name": "agent:vowels:play",
        "environment.level_weights": (1.0,),
        "environment.demonstrated_levels": (1,),
        "environment.max_turns": 2,
        "environment.max_tokens": 96,
        "model.max_positions": 96,
        "model.vocab_size": 258,
        "warm_start.num_steps": 0,
        "learner.num_updates": 60,
        "learner.learning_rate": 3e-3,
    },
    # A pretrained model with experts on a laptop: SmolLM2-135M upcycled to four, sampled by vLLM, with the Python
    # tool. Give it the checkpoint as --config.model.checkpoint and as --config.environment.tokenizer
    # (docs/engines.md).
    "smollm2": {
        "actor.engine": "vllm",
        "actor.num_hosts": 1,
        "actor.slots": 8,
        "environment.name": "reasoning_gym:letter_counting",
        "environment.level_weights": (1.0,),
        "environment.demonstrated_levels": (1,),
        "environment.max_turns": 3,
        "environment.turn_tokens": 64,
        "environment.max_tokens": 384,
        "tools.names": ("python",),
        "warm_start.num_steps": 0,
        "learner.num_updates": 20,
        "learner.groups_per_update": 2,
        "learner.group_size": 4,
        "learner.pack_tokens": 384,
        "learner.microbatch_rows": 1,
        "learner.optimizer": "adafactor",
        "learner.learning_rate": 1e-5,
        "learner.kl.coefficient": 0.0,
        "learner.checkpoint_every_updates": 10,
        "learner.keep_checkpoints": 1,
        "model.max_positions": 384,
        "model.remat": "layers",
        "lag.actor_updates": 1,
        "lag.token_updates": 2,
        "weights.keep_versions": 4,
        "evaluation.every_updates": 20,
        "evaluation.num_tasks_per_level": 16,
    },
    # Where practice at scale starts from: 1,024 episodes an update, 16 steps an episode, 256 environments, replay 2.
    "seed": {
        "learner.groups_per_update": 128,
        "learner.group_size": 8,
        "learner.replay_ratio": 2,
        "learner.kl.coefficient": 0.05,
        "learner.objective.clip_range": 0.2,
        "learner.balance_coefficient": 0.02,
        "environment.max_turns": 16,
        "actor.num_hosts": 2,
        "actor.slots": 128,
        "reward.final": 1.0,
        "reward.step": 0.4,
        "reward.format": 0.1,
        "reward.tool": 0.1,
        "evaluation.every_updates": 50,
    },
    # What asyncrl-simulate starts from: 1,000 actors of 8 slots, 2,048 episodes an update, no end but time.
    "thousand": {
        "learner.groups_per_update": 256,
        "learner.group_size": 8,
        "learner.num_updates": 1_000_000,
        "actor.num_hosts": 1000,
        "actor.slots": 8,
    },
}


def preset(name: str) -> Config:
    """The config of a preset.

    Raises:
      ValueError: for an unknown name.
    """
    if name not in PRESETS:
        raise ValueError(f"--preset={name}: use one of {', '.join(PRESETS)}")
    config: Config = override(Config(), PRESETS[name])
    return config
