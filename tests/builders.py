"""Tickets and trajectories for tests, each stating only what it is about."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from asyncrl_jax.types import FinishReason, Task, Ticket, Trajectory


def make_trajectory(
    tokens: Sequence[int] | np.ndarray, versions: Sequence[int] | np.ndarray, **fields: Any
) -> Trajectory:
    """Tokens, and which version made each: -1 for those that were not sampled. Other fields are taken as given."""
    tags_T = np.asarray(versions, np.int32)
    sampled_T = tags_T >= 0
    trajectory = Trajectory(
        tokens=np.asarray(tokens, np.int32),
        loss_mask=sampled_T.astype(np.uint8),
        behaviour_logprobs=-sampled_T.astype(np.float32),
        policy_versions=tags_T,
        reward=0.0,
        reward_parts=np.zeros(4, np.float32),
        success=False,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=1.0,
        sampling_ended_at=2.0,
    )
    return dataclasses.replace(trajectory, **fields)


def make_ticket(ticket_id: str, *, level: int = 1, index: int = 0, **fields: Any) -> Ticket:
    """A ticket of a training task, issued at update 0 with a bound of 4. Other fields are taken as given."""
    ticket = Ticket(
        ticket_id=ticket_id,
        task=Task("arithmetic", "train", level, index),
        group_size=2,
        line=0,
        min_update=0,
        deadline=4,
        temperature=1.0,
        seed=0,
        issued_at=1.0,
    )
    return dataclasses.replace(ticket, **fields)
