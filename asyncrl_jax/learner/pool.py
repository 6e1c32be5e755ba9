"""Groups that have arrived and may still be trained on, oldest deadline first."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from asyncrl_jax.transport.groups import Entry
from asyncrl_jax.types import Group


@dataclasses.dataclass
class PooledGroup:
    """A decoded group, where it stands in the stream, and how often it was trained on."""

    group: Group
    entry: Entry
    versions: tuple[int, ...]  # numbers of the versions that sampled it
    dequeued_at: float  # unix seconds
    uses: int = 0

    @property
    def ticket_id(self) -> str:
        return self.group.ticket.ticket_id


class Pool:
    """Holds what admission lets in, so its size is bounded by the lag bound; it never drops on its own.

    Order is by deadline, then by ticket, so the draw does not depend on the order of arrival. Cost: O(n log n) a draw
    for n pooled groups.
    """

    def __init__(self, replay_ratio: int):
        self._replay_ratio = replay_ratio
        self._groups: dict[str, PooledGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, ticket_id: str) -> bool:
        return ticket_id in self._groups

    def add(self, pooled: PooledGroup) -> None:
        """Adds a group with a use left.

        Raises:
          RuntimeError: if the ticket is already pooled: one ticket, one group.
        """
        if pooled.ticket_id in self._groups:
            raise RuntimeError(f"ticket {pooled.ticket_id} is pooled twice")
        self._groups[pooled.ticket_id] = pooled

    def remove(self, ticket_id: str) -> PooledGroup:
        return self._groups.pop(ticket_id)

    def all(self) -> list[PooledGroup]:
        """Every pooled group, the earliest deadline first."""
        return sorted(self._groups.values(), key=lambda p: (p.group.ticket.deadline, _order(p.ticket_id)))

    def draw(self, num_groups: int) -> list[PooledGroup]:
        """Takes the `num_groups` groups whose deadlines come first; those with a use left after this one stay.

        Raises:
          RuntimeError: if fewer are pooled.
        """
        chosen = self.all()[:num_groups]
        if len(chosen) < num_groups:
            raise RuntimeError(f"asked for {num_groups} groups, {len(self)} are pooled")
        return [self.use(pooled.ticket_id) for pooled in chosen]

    def use(self, ticket_id: str) -> PooledGroup:
        """Counts one use of a pooled group; its last use takes it out."""
        pooled = self._groups[ticket_id]
        pooled.uses += 1
        if pooled.uses >= self._replay_ratio:
            self.remove(ticket_id)
        return pooled

    def take_if(self, unusable: Callable[[PooledGroup], bool]) -> list[PooledGroup]:
        """Takes out every group that `unusable` names."""
        taken = [pooled for pooled in self.all() if unusable(pooled)]
        for pooled in taken:
            self.remove(pooled.ticket_id)
        return taken

    def clear(self) -> None:
        self._groups.clear()


def _order(ticket_id: str) -> tuple[int, ...]:
    """Ticket ids count up: "2-10" comes after "2-9"."""
    return tuple(int(part) for part in ticket_id.split("-"))
