"""How old each token is, in optimizer updates, and what the bound leaves of a group."""

from __future__ import annotations

import numpy as np

from asyncrl_jax.types import Exploration, Line, Ticket, Trajectory, WeightVersion, update_distance


class Staleness:
    """Lag of tokens against the weights being updated.

    Args:
      versions: announced versions by number.
      lines: lines of weights by number.
      most: largest N that may ever be in force, in updates.
      mask_over_age: policy "mask": an over-age token leaves the loss and its group stays. Otherwise one over-age token
        makes the whole group unusable.
    """

    def __init__(
        self, versions: dict[int, WeightVersion], lines: dict[int, Line], most: int, mask_over_age: bool = False
    ):
        self.versions = versions
        self.lines = lines
        self._most = most
        self._mask_over_age = mask_over_age

    def bound(self, ticket: Ticket) -> int:
        """N as it was when the ticket was issued: a change of N meanwhile neither ages nor renews a group."""
        return min(ticket.deadline - ticket.min_update, self._most)

    def version_lag(self, number: int, line: int, update: int) -> int:
        """Updates between version `number` and update count `update` of `line`."""
        return update_distance(self.versions[number], line, update, self.lines)

    def token_lags(self, trajectory: Trajectory, line: int, update: int) -> np.ndarray:
        """int32 [T]: lag of every sampled token, 0 where the policy did not sample."""
        numbers, inverse = np.unique(trajectory.policy_versions, return_inverse=True)
        lags = [0 if number < 0 else self.version_lag(int(number), line, update) for number in numbers]
        return np.asarray(lags, np.int32)[inverse]

    def trainable_mask(self, trajectory: Trajectory, lags_T: np.ndarray, bound: int) -> np.ndarray:
        """uint8 [T]: the one effective mask: sampled, and within the bound unless an older policy was to explore."""
        if trajectory.exploration == Exploration.OLDER:
            return trajectory.loss_mask
        return (trajectory.loss_mask.astype(bool) & (lags_T <= bound)).astype(np.uint8)

    def is_unusable(self, numbers: tuple[int, ...], line: int, update: int, bound: int) -> bool:
        """Whether a group sampled by versions `numbers` may no longer be trained on at update count `update`."""
        over_age = [self.version_lag(number, line, update) > bound for number in numbers]
        return bool(over_age) and (all if self._mask_over_age else any)(over_age)
