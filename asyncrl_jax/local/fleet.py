"""Actors as processes of this machine, under the launcher's supervisor, so that they outlive any orchestrator."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from asyncrl_jax.local.supervisor import Part, Supervisor


class LocalFleet:
    """A `Fleet` (orchestrator/fleets/base.py). It must be used from the thread that polls the supervisor.

    What is taken away gets SIGTERM, on which an actor gives its tickets back, and SIGKILL some seconds later.
    """

    def __init__(self, supervisor: Supervisor, part: Callable[[str], Part]):
        """Args: part: what starts the actor of a name."""
        self._supervisor = supervisor
        self._part = part
        self._sizes: dict[str, int] = {}

    def resize(self, members: Mapping[str, int]) -> None:
        for name, size in members.items():
            before = self._sizes.get(name, 0)
            for number in range(size, before):
                self._supervisor.retire(f"{name}-{number}")
            for number in range(before, size):
                self._supervisor.start(self._part(f"{name}-{number}"))
            self._sizes[name] = size

    def sizes(self) -> dict[str, int]:
        return dict(self._sizes)

    def close(self) -> None:
        """The members are the supervisor's."""
