"""Exploration on the wire: two columns of a group, both empty where every member was sampled as its ticket says."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from asyncrl_jax.config_leaf import COLDEST_HOTTEST
from asyncrl_jax.transport.scored_steps import BadColumn
from asyncrl_jax.types import Exploration, Trajectory

EXPLORED_COLUMNS = {"temperatures": "<f4", "explored": "u1"}
_COLDEST, _HOTTEST = COLDEST_HOTTEST
_KINDS = (None, *Exploration)  # the wire holds positions in it; new kinds join at the end


def explored_columns(members: Sequence[Trajectory]) -> dict[str, np.ndarray]:
    """The columns of `EXPLORED_COLUMNS`, [G] each: temperatures, 0 where it is the ticket's, and positions of kinds.

    Raises:
      ValueError, TypeError: for a kind that is none, and a temperature that is no number.
    """
    if all(member.temperature is None and member.exploration is None for member in members):
        return {name: np.zeros(0, dtype) for name, dtype in EXPLORED_COLUMNS.items()}
    temperatures = [0.0 if member.temperature is None else member.temperature for member in members]
    kinds = [_KINDS.index(member.exploration) for member in members]
    return {"temperatures": np.array(temperatures, "<f4"), "explored": np.array(kinds, "u1")}


def split_explored(columns: Mapping[str, np.ndarray]) -> list[dict[str, Any]]:
    """The fields temperature and exploration of each trajectory, nothing for a group without.

    Args:
      columns: of `EXPLORED_COLUMNS`, and lengths [G].

    Raises:
      BadColumn: reason "bad_exploration", for another length, a temperature that no softmax takes, or a kind that is
        not known.
    """
    temperatures_G, kinds_G = columns["temperatures"], columns["explored"]
    num_members = len(columns["lengths"])
    if len(temperatures_G) == len(kinds_G) == 0:
        return [{}] * num_members
    if not len(temperatures_G) == len(kinds_G) == num_members:
        detail = f"{len(temperatures_G)} temperatures and {len(kinds_G)} kinds of {num_members} trajectories"
        raise BadColumn("bad_exploration", detail)
    fields = []
    for temperature, kind in zip(temperatures_G.tolist(), kinds_G.tolist(), strict=True):
        if not ((temperature == 0 or _COLDEST <= temperature <= _HOTTEST) and kind < len(_KINDS)):  # NaN is not
            raise BadColumn("bad_exploration", f"temperature {temperature}, kind of exploration {kind}")
        fields.append({"temperature": temperature or None, "exploration": _KINDS[kind]})
    return fields
