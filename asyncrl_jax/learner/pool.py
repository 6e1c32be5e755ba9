"""Groups that have arrived and may still be trained on, and the draw of those that an update takes."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping

import numpy as np

from asyncrl_jax.config_data import PoolConfig
from asyncrl_jax.transport.groups import Entry
from asyncrl_jax.types import Group

from . import strata


@dataclasses.dataclass(frozen=True)
class Traits:
    """What the pool knows of a group's content."""

    signal: float  # mean |advantage| of its members, taken before anything is filtered
    reward: float  # mean over its members
    success: float  # share of its members that solved the task
    length: float  # mean number of tokens of its members
    sampled_tokens: int  # tokens that the policy made
    zero_variance: bool  # all members have one reward: nothing to learn


@dataclasses.dataclass
class PooledGroup:
    """A decoded group, where it stands in the stream, and how often it was trained on."""

    group: Group
    entry: Entry
    versions: tuple[int, ...]  # numbers of the versions that sampled it
    dequeued_at: float  # unix seconds
    traits: Traits
    uses: int = 0

    @property
    def ticket_id(self) -> str:
        return self.group.ticket.ticket_id

    @property
    def bucket(self) -> str:
        return bucket_of(self.group.ticket.task.environment, self.group.ticket.task.level)


@dataclasses.dataclass(frozen=True)
class Drawn:
    """A group taken for one update, and the weight of its policy gradient in it."""

    pooled: PooledGroup
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Moment:
    """What a draw by strata depends on besides the pooled groups."""

    bucket_weights: Callable[[], Mapping[str, float]]  # asked for when needed: they are the orchestrator's
    lag: Callable[[PooledGroup], int]  # of its oldest token now, in updates
    last_chance: Callable[[PooledGroup], bool]  # whether it is too old for the update after this one
    seed: int


def bucket_of(environment: str, level: int) -> str:
    """Name of a bucket: category × difficulty, two levels and no finer."""
    return f"{environment}/{level}"


class Pool:
    """Holds what admission lets in, so its size is bounded by the lag bound; it never drops on its own.

    * A group is used at most `replay_ratio` times.
    * The draw depends on what is pooled, not on the order of arrival.
    * `draw: fifo` takes the earliest deadlines. `draw: strata` takes by bucket, outcome, length and priority
      (`strata.py`), and first those that are on their last chance: what was sampled is not left to grow too old while
      it could be used.
    * Whatever the weights ask for, an update is filled while enough groups are pooled.

    Cost: O(n log n) a draw for n pooled groups.
    """

    def __init__(self, replay_ratio: int, config: PoolConfig):
        self._replay_ratio = replay_ratio
        self._config = config
        self._groups: dict[str, PooledGroup] = {}

    def __len__(self) -> int:
        return len(self._groups)

    def __contains__(self, ticket_id: str) -> bool:
        return ticket_id in self._groups

    @property
    def uses_left(self) -> int:
        """Uses that the pooled groups still have: what the pool's size is counted in."""
        return sum(self._replay_ratio - pooled.uses for pooled in self._groups.values())

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

    def draw(self, num_groups: int, moment: Moment) -> list[Drawn]:
        """Takes groups for one update, in the order of their deadlines; those with a use left after it stay.

        Raises:
          RuntimeError: if fewer are pooled.
        """
        pooled = self.all()
        if len(pooled) < num_groups:
            raise RuntimeError(f"asked for {num_groups} groups, {len(self)} are pooled")
        if self._config.draw == "fifo" or len(pooled) == num_groups:
            return [Drawn(self.use(p.ticket_id)) for p in pooled[:num_groups]]
        chosen = strata.draw(
            [_candidate(p, moment) for p in pooled],
            num_groups,
            moment.bucket_weights(),
            np.random.default_rng(moment.seed),
            random_share=self._config.random_share,
            half_life=self._config.freshness_half_life_updates,
            max_weight=self._config.max_draw_weight,
        )
        return [Drawn(self.use(pooled[one.index].ticket_id), one.weight) for one in chosen]

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


def _candidate(pooled: PooledGroup, moment: Moment) -> strata.Candidate:
    return strata.Candidate(
        bucket=pooled.bucket,
        signal=pooled.traits.signal,
        lag=moment.lag(pooled),
        success=pooled.traits.success,
        length=pooled.traits.length,
        last_chance=pooled.uses == 0 and moment.last_chance(pooled),
    )


def _order(ticket_id: str) -> tuple[int, ...]:
    """Ticket ids count up: "2-10" comes after "2-9"."""
    return tuple(int(part) for part in ticket_id.split("-"))
