"""A tiny model and groups of random trajectories for tests of the update."""

import numpy as np

from asyncrl_jax.config import Config, override
from asyncrl_jax.types import FinishReason, Group, Task, Ticket, Trajectory

TINY = {
    "model.num_layers": 1,
    "model.hidden_dim": 16,
    "model.num_heads": 2,
    "model.num_kv_heads": 2,
    "model.head_dim": 8,
    "model.num_experts": 4,
    "model.expert_dim": 8,
    "model.vocab_size": 16,
    "model.max_positions": 16,
    "model.init_std": 0.3,
    "environment.max_tokens": 16,
    "learner.pack_tokens": 32,
    "learner.microbatch_rows": 2,
    "learner.groups_per_update": 4,
    "learner.group_size": 4,
    "learner.kl.coefficient": 0.1,
    "learner.balance_coefficient": 0.1,
    "learner.max_grad_norm": 1e6,
}


def tiny_config(**changes) -> Config:
    """`tiny_config(microbatch_rows=1)` changes `learner.microbatch_rows`."""
    return override(Config(), TINY | {f"learner.{name}": value for name, value in changes.items()})


def trajectory(rng, length, *, sampled=0.6, logprob=-2.5) -> Trajectory:
    """Random tokens; the first two are the prompt."""
    mask = (rng.random(length) < sampled).astype(np.uint8)
    mask[:2] = 0
    logprobs = (mask * (logprob + 0.5 * rng.random(length))).astype(np.float32)
    return Trajectory(
        tokens=rng.integers(0, 16, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=logprobs,
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=float(rng.random()),
        reward_parts=np.zeros(4, np.float32),
        success=False,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=0.0,
        sampling_ended_at=1.0,
    )


def group(index, trajectories, temperature=1.0) -> Group:
    ticket = Ticket(
        f"0-{index}", Task("arithmetic", "train", 1, index), len(trajectories), 0, 0, 4, temperature, index, 0.0
    )
    return Group(ticket, tuple(trajectories), actor_id="actor-0")


def random_groups(seed=0, num=4, size=4, temperatures=(1.0, 0.7)) -> list[Group]:
    rng = np.random.default_rng(seed)
    return [
        group(i, [trajectory(rng, int(rng.integers(4, 17))) for _ in range(size)], temperatures[i % len(temperatures)])
        for i in range(num)
    ]


def zero_lags(groups):
    return [[np.zeros(len(t.tokens), np.int32) for t in g.trajectories] for g in groups]


def ramp_advantages(groups):
    """Distinct advantages, so that a swap shows."""
    return [np.linspace(-1.0, 1.0, len(g.trajectories)).astype(np.float32) + 0.1 * i for i, g in enumerate(groups)]
