"""Arithmetic, time and money of a run: closed formulas, each stated where it is used.

The learner is bound by arithmetic, decoding by memory bandwidth, and episodes by their environments; a batch takes as
long as the slowest of the three, since none waits for another (Little's law holds what is in flight).
"""

from __future__ import annotations

import dataclasses

from asyncrl_jax.planning.devices import Device

BACKWARD = 2.0  # of a matmul, in forwards: one product for its input, one for its weights
BYTES_PER_WEIGHT = 2  # bf16, as engines hold them


@dataclasses.dataclass(frozen=True)
class Workload:
    """What one update trains on."""

    episodes: int  # trajectories in a batch
    turns: int  # environment steps of an episode
    tokens: float  # of a trajectory, prompt and tool results included
    sampled_tokens: float  # of a trajectory, by the policy
    environments: int  # running at once
    environment_step_s: float  # one step of one environment
    effective_share: float  # trained tokens with an advantage other than 0 ÷ sampled tokens


@dataclasses.dataclass(frozen=True)
class Fleet:
    """The machines, and what share of their peak they reach."""

    device: Device
    learner_devices: int
    actor_devices: int
    learner_mfu: float  # model FLOPs utilisation of the update
    decode_share: float  # share of the memory bandwidth that decoding reaches
    slots: int  # sequences that one actor device decodes together
    price_per_device_hour: float


@dataclasses.dataclass(frozen=True)
class Flops:
    """FLOPs for one token."""

    forward: float
    update: float  # forward, backward, and the forwards of the counting pass and of the reference


@dataclasses.dataclass(frozen=True)
class Rates:
    """Speeds in tokens per second of the fleet, times in seconds, money in the unit of the price."""

    learner_tokens_per_s: float
    rollout_tokens_per_s: float
    learner_s: float
    rollout_s: float
    environment_s: float
    cost_per_hour: float
    cost_per_million_effective_tokens: float

    @property
    def batch_s(self) -> float:
        return max(self.learner_s, self.rollout_s, self.environment_s)

    @property
    def bound_by(self) -> str:
        """What sets the pace; the others idle for the rest of the time."""
        times = {"learner": self.learner_s, "rollout": self.rollout_s, "environments": self.environment_s}
        return max(times, key=times.__getitem__)


def flops(active_matmul_params: float, attention_flops: float, *, num_extra_forwards: int) -> Flops:
    """FLOPs for one token.

    Args:
      active_matmul_params: parameters in the products that serve a token: the embedding is a lookup and left out, the
        head is in.
      attention_flops: scores and weighted values of one token, forward.
      num_extra_forwards: forwards of an update besides the one that is differentiated.
    """
    forward = 2.0 * active_matmul_params + attention_flops
    return Flops(forward, (1.0 + BACKWARD + num_extra_forwards) * forward)


def attention_flops(num_layers: int, num_heads: int, key_and_value_dim: int, context: float) -> float:
    """FLOPs of one token's attention over `context` earlier tokens: scores, then weighted values, of every layer."""
    return 2.0 * num_layers * num_heads * key_and_value_dim * context


def environment_s(step_s: float, turns: int, episodes: int, environments: int) -> float:
    """Seconds for a batch of episodes when `environments` of them run at once, by steps alone."""
    return step_s * turns * episodes / environments


def decode_tokens_per_s(
    device: Device, *, weight_bytes: float, cache_bytes_per_sequence: float, flops_per_token: float, fleet: Fleet
) -> float:
    """Tokens per second of one actor device that decodes `fleet.slots` sequences together.

    A step reads the weights that its tokens need once, and every sequence's cache; or it is bound by arithmetic.
    """
    slots = fleet.slots
    read_s = (weight_bytes + slots * cache_bytes_per_sequence) / (device.memory_bytes_per_s * fleet.decode_share)
    compute_s = slots * flops_per_token / (device.peak_flops * fleet.learner_mfu)
    return slots / max(read_s, compute_s)


def rates(workload: Workload, fleet: Fleet, *, update_flops: float, decode_rate: float) -> Rates:
    """Speeds and cost of a fleet on a workload.

    Args:
      workload: one update's episodes.
      fleet: the machines.
      update_flops: FLOPs of the update for one token.
      decode_rate: see `decode_tokens_per_s`.
    """
    learner_rate = fleet.learner_devices * fleet.device.peak_flops * fleet.learner_mfu / update_flops
    rollout_rate = fleet.actor_devices * decode_rate
    cost_per_hour = (fleet.learner_devices + fleet.actor_devices) * fleet.price_per_device_hour
    without_cost = Rates(
        learner_tokens_per_s=learner_rate,
        rollout_tokens_per_s=rollout_rate,
        learner_s=workload.episodes * workload.tokens / learner_rate,
        rollout_s=workload.episodes * workload.sampled_tokens / rollout_rate,
        environment_s=environment_s(
            workload.environment_step_s, workload.turns, workload.episodes, workload.environments
        ),
        cost_per_hour=cost_per_hour,
        cost_per_million_effective_tokens=0.0,
    )
    effective = workload.episodes * workload.sampled_tokens * workload.effective_share
    cost = cost_per_hour / 3600 * without_cost.batch_s / effective * 1e6
    return dataclasses.replace(without_cost, cost_per_million_effective_tokens=cost)
