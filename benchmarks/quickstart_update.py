"""Seconds of one learner update of the default model, blocked and dense dispatch, in one run.

Prints one JSON line. The two take turns, so that a busy machine slows both; compare the ratio, not the seconds, with
other runs. The batch is random tokens: 16 groups of 8 trajectories of 20 to 51 tokens, KL on.

    python -m benchmarks.quickstart_update [--repeats 15]
"""

import argparse
import json
import statistics
import time
from typing import Any

import jax
import numpy as np

from asyncrl_jax.config import Config, override
from asyncrl_jax.learner.advantages import group_advantages
from asyncrl_jax.learner.packing import PackedUpdate, pack_update
from asyncrl_jax.learner.state import copy_params, create_state
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models.mesh import make_mesh
from asyncrl_jax.types import FinishReason, Group, Task, Ticket, Trajectory


def random_trajectory(rng: np.random.Generator, vocab_size: int) -> Trajectory:
    length = int(rng.integers(20, 52))
    mask = (np.arange(length) >= 8).astype(np.uint8)
    return Trajectory(
        tokens=rng.integers(0, vocab_size, length).astype(np.int32),
        loss_mask=mask,
        behaviour_logprobs=(-np.log(vocab_size) * mask).astype(np.float32),
        policy_versions=np.where(mask, 0, -1).astype(np.int32),
        reward=float(rng.integers(0, 2)),
        reward_parts=np.zeros(4, np.float32),
        success=False,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=0.0,
        sampling_ended_at=0.0,
    )


def random_update(config: Config) -> tuple[PackedUpdate, float]:
    """The packed update, and the seconds that packing took."""
    rng = np.random.default_rng(0)
    groups = []
    for i in range(config.learner.groups_per_update):
        ticket = Ticket(f"0-{i}", Task("random", "train", 1, i), config.learner.group_size, 0, 0, 4, 1.0, i, 0.0)
        members = [random_trajectory(rng, config.model.vocab_size) for _ in range(config.learner.group_size)]
        groups.append(Group(ticket, tuple(members), actor_id="benchmark"))
    advantages = [group_advantages(np.array([t.reward for t in g.trajectories]), 1e-6) for g in groups]
    lags = [[np.zeros(len(t.tokens), np.int32) for t in g.trajectories] for g in groups]
    pack_update(groups, advantages, lags, config)
    start = time.perf_counter()
    packed = pack_update(groups, advantages, lags, config)
    return packed, time.perf_counter() - start


def seconds(step: Any, state: Any, reference: Any, packed: PackedUpdate) -> tuple[Any, float]:
    start = time.perf_counter()
    state, _ = jax.block_until_ready(step(state, reference, packed, np.float32(1e-4)))
    return state, time.perf_counter() - start


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    repeats = parser.parse_args().repeats
    steps, states, first, times = {}, {}, {}, {"blocked": [], "dense": []}
    for dispatch in times:
        config = override(Config(), {"model.dispatch": dispatch})
        mesh = make_mesh(config.mesh)
        steps[dispatch], states[dispatch] = make_train_step(config, mesh), create_state(config, 0, mesh)
    packed, pack_s = random_update(config)
    reference = copy_params(states["blocked"].params)
    for dispatch, step in steps.items():
        states[dispatch], first[dispatch] = seconds(step, states[dispatch], reference, packed)
    for _ in range(repeats):
        for dispatch, step in steps.items():
            states[dispatch], elapsed = seconds(step, states[dispatch], reference, packed)
            times[dispatch].append(elapsed)
    median = {dispatch: statistics.median(values) for dispatch, values in times.items()}
    result = {
        "blocked_s": round(median["blocked"], 4),
        "dense_s": round(median["dense"], 4),
        "dense_over_blocked": round(median["dense"] / median["blocked"], 2),
        "blocked_range_s": [round(min(times["blocked"]), 4), round(max(times["blocked"]), 4)],
        "first_call_s": {dispatch: round(value, 1) for dispatch, value in first.items()},
        "pack_s": round(pack_s, 4),
        "positions": int((packed.segment_ids > 0).sum()),
        "trained_tokens": packed.num_tokens,
        "repeats": repeats,
        "device": jax.devices()[0].device_kind,
        "jax": jax.__version__,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
