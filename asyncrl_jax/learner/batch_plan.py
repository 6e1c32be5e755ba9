"""The global plan of one update: enough for any process to build its rows of the batch from the groups it fetches.

Process 0 writes it, since it alone holds the pool and knows how versions lag. Advantages need whole groups, and some
the whole batch, so the plan carries them; tokens and log-probs it does not carry. A batch therefore does not depend on
the number of processes.

Dimensions: T tokens of a trajectory. A place is (group, trajectory of it).
"""

from __future__ import annotations

import base64
from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from asyncrl_jax.config import Config
from asyncrl_jax.learner.packing import Layout, PackedUpdate, arrange, element, lay_out
from asyncrl_jax.types import Group

Place = tuple[int, int]


class Worth(NamedTuple):
    """What one trajectory is worth."""

    advantage: np.ndarray  # float32, a number or [T]
    mask: np.ndarray  # bool [T]; tokens that enter the loss
    reward: float


class BatchPlan(NamedTuple):
    """One update."""

    ticket_ids: list[str]  # of its groups, in order
    layout: Layout
    worth: dict[Place, Worth]
    version_lags: dict[int, int]  # updates between each version in the batch and the weights being updated
    learning_rate: float

    def rows_of(self, rows: Collection[int]) -> list[list[Place]]:
        """The rows with these numbers, counted over all microbatches; the rest stays empty."""
        return [row if index in rows else [] for index, row in enumerate(self.layout)]

    def groups_of(self, rows: Collection[int]) -> list[int]:
        """Numbers of the groups that have a trajectory in these rows."""
        return sorted({group for row in self.rows_of(rows) for group, _ in row})

    def pack(self, groups: Mapping[int, Group], rows: Collection[int], config: Config) -> PackedUpdate:
        """The batch, with all rows but `rows` left as padding.

        Args:
          groups: by their number, at least those of `groups_of(rows)`.
          rows: that this process feeds to its devices.
          config: sizes of the batch.

        Raises:
          ValueError: if a group does not fit its plan.
        """
        elements = {}
        for group, member in (place for row in self.rows_of(rows) for place in row):
            trajectory, worth = groups[group].trajectories[member], self.worth[group, member]
            lags = [self.version_lags[version] for version in trajectory.policy_versions.tolist()]
            elements[group, member] = element(
                trajectory,
                worth.advantage,
                np.asarray(lags, np.int32),
                worth.mask,
                worth.reward,
                ticket=groups[group].ticket,
                config=config,
            )
        return arrange(self.layout, elements, config)

    def to_json(self) -> dict[str, Any]:
        """As JSON holds it; arrays in base64."""
        return {
            "tickets": self.ticket_ids,
            "layout": self.layout,
            "worth": [
                [*place, _encoded(w.advantage), _encoded(np.packbits(w.mask)), len(w.mask), w.reward]
                for place, w in self.worth.items()
            ],
            "version_lags": list(self.version_lags.items()),
            "learning_rate": self.learning_rate,
        }

    @classmethod
    def from_json(cls, fields: dict[str, Any]) -> BatchPlan:
        """What `to_json` wrote."""
        return cls(
            ticket_ids=fields["tickets"],
            layout=[[(group, member) for group, member in row] for row in fields["layout"]],
            worth={
                (group, member): Worth(
                    _decoded(advantage, np.float32),
                    np.unpackbits(_decoded(mask, np.uint8), count=length).astype(bool),
                    reward,
                )
                for group, member, advantage, mask, length, reward in fields["worth"]
            },
            version_lags=dict(fields["version_lags"]),
            learning_rate=fields["learning_rate"],
        )


def plan_update(
    groups: Sequence[Group],
    advantages: Sequence[Sequence[np.ndarray]],
    token_lags: Sequence[Sequence[np.ndarray]],
    loss_masks: Sequence[Sequence[np.ndarray]],
    rewards: Sequence[Sequence[float]],
    *,
    learning_rate: float,
    config: Config,
) -> BatchPlan:
    """Plans the batch that `pack_update` would build from the same arguments."""
    worth: dict[Place, Worth] = {}
    version_lags: dict[int, int] = {}
    for g, (group, *of_group) in enumerate(zip(groups, advantages, token_lags, loss_masks, rewards, strict=True)):
        for t, (trajectory, advantage, lags, mask, reward) in enumerate(
            zip(group.trajectories, *of_group, strict=True)
        ):
            worth[g, t] = Worth(_shortened(advantage, mask), np.asarray(mask, bool), float(reward))
            version_lags.update(zip(trajectory.policy_versions.tolist(), np.asarray(lags).tolist(), strict=True))
    return BatchPlan(
        ticket_ids=[group.ticket.ticket_id for group in groups],
        layout=lay_out(groups, config),
        worth=worth,
        version_lags=version_lags,
        learning_rate=learning_rate,
    )


def _shortened(advantage: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """One number where all tokens of the mask have the same."""
    advantage = np.asarray(advantage, np.float32)
    if advantage.ndim == 0:
        return advantage
    trained = np.unique(advantage[np.asarray(mask, bool)])
    return advantage if trained.size > 1 else np.asarray(trained[0] if trained.size else 0.0, np.float32)


def _encoded(array: np.ndarray) -> list[Any]:
    return [list(array.shape), base64.b64encode(np.ascontiguousarray(array).tobytes()).decode()]


def _decoded(encoded: list[Any], dtype: type) -> np.ndarray:
    shape, data = encoded
    return np.frombuffer(base64.b64decode(data), dtype).reshape(shape)
