"""The seam between the number of actors that a policy asks for and what starts and ends them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class FleetUnavailable(RuntimeError):
    """The cluster cannot be reached, or refuses. The message says which and why; a later try may succeed."""


class Fleet(Protocol):
    """Hosts of actors, by class. Of a class of size n the members `<class>-0` … `<class>-<n−1>` exist.

    Invariants, of every implementation (tests/orchestrator/fleet_contract.py):
      * `resize` says what is to be, not what to do, so it may be repeated, also by another leader.
      * A member that stays is not touched; what is taken away is the end of its class.
      * A member that dies is started again under its name without being asked for, or at the next `resize`.
    """

    def resize(self, members: Mapping[str, int]) -> None:
        """Makes every class named have so many members; returns without waiting until they are up.

        Raises:
          FleetUnavailable: if the cluster does not take it.
        """
        ...

    def sizes(self) -> dict[str, int]:
        """Members by class, as they were asked for last, by whomever.

        Raises:
          FleetUnavailable: if the cluster does not say.
        """
        ...

    def close(self) -> None:
        """Lets go of the connection, not of the members."""
        ...
