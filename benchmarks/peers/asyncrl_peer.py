"""This package's learner: the compiled update of `learner/step.py`, from trajectories that its packer put into rows."""

from __future__ import annotations

import sys
from pathlib import Path

import jax
import numpy as np

from asyncrl_jax.config import Config, override
from asyncrl_jax.learner.packing import PackedUpdate, pack_update
from asyncrl_jax.learner.state import start_from
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models import load_params
from asyncrl_jax.models.mesh import make_mesh
from asyncrl_jax.types import FinishReason, Group, Task, Ticket, Trajectory
from benchmarks.peers import problem
from benchmarks.peers.problem import Batch, FirstUpdate

GROUP_SIZE = 8
# The rows that each batch fills, as whoever tunes a run would choose: then the step is one microbatch.
MICROBATCH_ROWS = {"even": 16, "uneven": 7}


def config_for(batch: str) -> Config:
    settings = {
        "model.num_layers": problem.NUM_LAYERS,
        "model.hidden_dim": problem.HIDDEN_DIM,
        "model.num_heads": problem.NUM_HEADS,
        "model.num_kv_heads": problem.NUM_KV_HEADS,
        "model.head_dim": problem.HEAD_DIM,
        "model.num_experts": problem.NUM_EXPERTS,
        "model.experts_per_token": problem.CHOICES,
        "model.expert_dim": problem.EXPERT_DIM,
        "model.vocab_size": problem.VOCAB_SIZE,
        "model.rope_theta": problem.ROPE_THETA,
        "model.norm_eps": problem.NORM_EPS,
        "model.max_positions": problem.LENGTH,
        "environment.max_tokens": problem.LENGTH,
        "learner.groups_per_update": problem.NUM_SEQUENCES // GROUP_SIZE,
        "learner.group_size": GROUP_SIZE,
        "learner.pack_tokens": problem.LENGTH,
        "learner.microbatch_rows": MICROBATCH_ROWS[batch],
        "learner.objective.clip_range": problem.CLIP_RANGE,
        "learner.max_grad_norm": problem.MAX_GRAD_NORM,
        "learner.kl.coefficient": 0.0,
        "learner.balance_coefficient": 0.0,  # peers have none
    }
    return override(Config(), settings)


def trajectory(batch: Batch, row: int) -> Trajectory:
    length = int(batch.lengths_B[row])
    mask = batch.mask_BT[row, :length].astype(np.uint8)
    return Trajectory(
        tokens=batch.tokens_BT[row, :length],
        loss_mask=mask,
        behaviour_logprobs=np.where(mask, batch.behaviour_BT[row, :length], 0.0).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=0.0,
        reward_parts=np.zeros(4, np.float32),
        success=False,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=0.0,
        sampling_ended_at=0.0,
    )


def packed(batch: Batch, config: Config) -> PackedUpdate:
    groups, advantages = [], []
    for first in range(0, problem.NUM_SEQUENCES, GROUP_SIZE):
        ticket = Ticket(f"0-{first}", Task("random", "train", 1, first), GROUP_SIZE, 0, 0, 4, 1.0, first, 0.0)
        rows = range(first, first + GROUP_SIZE)
        groups.append(Group(ticket, tuple(trajectory(batch, row) for row in rows), actor_id="benchmark"))
        advantages.append(batch.advantages_B[first : first + GROUP_SIZE])
    lags = [[np.zeros(len(t.tokens), np.int32) for t in group.trajectories] for group in groups]
    return pack_update(groups, advantages, lags, config)


def main() -> None:
    directory = Path(sys.argv[1])
    steps, states, references, updates = {}, {}, {}, {}
    for name in problem.BATCHES:
        config = config_for(name)
        mesh = make_mesh(config.mesh)
        references[name] = load_params(directory / "model", config.model)
        steps[name], states[name] = make_train_step(config, mesh), start_from(config, references[name], mesh)
        updates[name] = packed(problem.read_batch(directory, name), config)
        assert updates[name].num_microbatches == 1

    def update(name: str) -> FirstUpdate:
        arguments = states[name], references[name], updates[name], np.float32(problem.LEARNING_RATE)
        states[name], metrics = steps[name](*arguments)
        jax.block_until_ready(states[name])
        return FirstUpdate(float(metrics["loss"]), float(metrics["grad_norm"]))

    problem.serve({"jax": jax.__version__}, update)


if __name__ == "__main__":
    main()
