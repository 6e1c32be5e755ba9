"""What a simulated run is made of, besides the config of the run itself: times, sizes and faults, with their laws."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable

import numpy as np

from asyncrl_jax.config_leaf import setting
from asyncrl_jax.laws import Distribution, parse


@dataclasses.dataclass(frozen=True, kw_only=True)
class Inputs:
    """Times, sizes and faults. Distributions are texts, see `laws.py`; one for each level, separated by `;`."""

    duration_s: float = setting(3600.0, "simulated time after which the run stops, in s; 0: only at num_updates")
    episode_s: str = setting("lognormal:20:1.0", "law of one episode's time on its slot, in s; by level with ;")
    turns: str = setting(
        "constant:1", "law of an episode's turns, to each of which environment.turn_delay_s is added; by level with ;"
    )
    episode_tokens: str = setting("lognormal:1500:0.7", "law of the tokens one episode samples; by level with ;")
    update_s: str = setting("lognormal:40:0.1", "law of one optimizer update, in s; by load with ;")
    update_load: str = setting(
        "0", "episodes under way during an update from which each law of update_s holds, rising from 0; with ;"
    )
    publish_s: float = setting(5.0, "from an update's end until its version is announced, in s")
    swap_s: float = setting(5.0, "from a version's announcement until actors sample with it, in s")
    swap_pause_s: float = setting(0.5, "sampling that stands still for one swap, in s; 0 if episode_s has it in")
    dispatch_s: float = setting(
        0.05, "from when a ticket can be issued until its first token, where a slot is free, in s"
    )
    handover_s: float = setting(0.2, "from a group's last token until the learner has it, in s")
    slow_share: float = setting(0.0, "share of actors that are slow")
    slow_factor: float = setting(3.0, "times as long as on others an episode takes on a slow actor")
    crash_every_h: float = setting(0.0, "mean time between crashes of one actor, in h; 0: never")
    restart_s: float = setting(60.0, "until a crashed actor is back, in s")
    episode_fault_share: float = setting(0.0, "share of attempts at an episode that the environment fails")
    outage_from_s: float = setting(0.0, "when the environment begins to fail every episode, in s")
    outage_s: float = setting(0.0, "for how long, in s; 0: never")
    zero_variance_share: float = setting(0.3, "share of groups whose rewards are all equal")
    kl_per_update: float = setting(0.002, "KL that one update puts between two versions, in nats a token")
    deadlines: bool = setting(True, "tickets have deadlines; off: only what is outstanding is bounded, to compare")

    def __post_init__(self) -> None:
        for name in ("episode_s", "turns", "episode_tokens", "update_s"):
            self._laws(name)
        if len(self._laws("update_s")) != len(self.update_loads):
            raise ValueError(f"--simulate.update_s={self.update_s}: one law for each of update_load={self.update_load}")
        for name in ("slow_share", "episode_fault_share", "zero_variance_share"):
            if not 0 <= getattr(self, name) <= 1:
                raise ValueError(f"--simulate.{name}={getattr(self, name)}: between 0 and 1")
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if isinstance(value, float) and not (value >= 0 and math.isfinite(value)):
                raise ValueError(f"--simulate.{field.name}={value}: finite and at least 0")
        if self.slow_factor == 0:
            raise ValueError("--simulate.slow_factor=0.0: more than 0")

    @property
    def update_loads(self) -> tuple[float, ...]:
        """Episodes under way from which each law of `update_s` holds."""
        try:
            loads = tuple(float(text) for text in self.update_load.split(";"))
        except ValueError:
            loads = ()
        if not loads or loads[0] != 0 or any(not low < high < math.inf for low, high in itertools.pairwise(loads)):
            raise ValueError(f"--simulate.update_load={self.update_load}: numbers that rise from 0, separated by ;")
        return loads

    def _laws(self, name: str) -> tuple[Distribution, ...]:
        try:
            return tuple(parse(text.strip()) for text in getattr(self, name).split(";"))
        except ValueError as error:
            raise ValueError(f"--simulate.{name}={error}") from None

    def law(self, name: str, level: int = 1) -> Distribution:
        """The distribution of a field, for a level from 1; the last one given holds for all levels above."""
        laws = self._laws(name)
        return laws[min(level, len(laws)) - 1]

    def failing(self, now: float) -> bool:
        """Whether the environment fails everything now."""
        return self.outage_s > 0 and self.outage_from_s <= now < self.outage_from_s + self.outage_s


class Draws:
    """Random numbers by ticket: a ticket draws the same whatever the policies do, so two settings can be compared.

    Cost: O(1) amortised a ticket, O(block) memory a level.
    """

    _BLOCK = 1024  # tickets

    def __init__(self, inputs: Inputs, seed: int, group_size: int, turn_delay_s: str = ""):
        self._inputs = inputs
        self._loads = inputs.update_loads
        self._seed = seed
        self._size = group_size
        self._turn_delay = parse(turn_delay_s) if turn_delay_s else None
        self._blocks: dict[tuple[str, int], tuple[int, list[list[float]]]] = {}

    def episodes(self, ticket: int, level: int) -> tuple[list[float], list[float]]:
        """(seconds, tokens) of every member of a ticket's group."""
        return self._row("episode_s", ticket, level, self._size), self._row("episode_tokens", ticket, level, self._size)

    def update_s(self, update: int, load: Callable[[float], float]) -> float:
        """Seconds of the update that follows `update` updates.

        Args:
          load: episodes under way in so many seconds from now, on average.
        """
        seconds = self._row("update_s", update, 1, 1)[0]
        if len(self._loads) == 1:
            return seconds
        return self._row("update_s", update, bisect.bisect_right(self._loads, load(seconds)), 1)[0]

    def chances(self, purpose: int, number: int) -> Callable[[], float]:
        """Uniform numbers in [0, 1) of their own for rare things: faults of a ticket, crashes of an actor."""
        return np.random.default_rng((self._seed, purpose, number)).random

    def _row(self, name: str, index: int, level: int, width: int) -> list[float]:
        block, row = divmod(index, self._BLOCK)
        held = self._blocks.get((name, level))
        if held is None or held[0] != block:
            number = sum(name.encode())  # of the stream, so that no two fields share theirs
            generator = np.random.default_rng((self._seed, number, level, block))
            drawn = self._inputs.law(name, level).sample(generator, (self._BLOCK, width))
            if name == "episode_s" and self._turn_delay is not None:
                drawn = drawn + self._delays(generator, level, drawn.shape)
            held = (block, drawn.tolist())
            self._blocks[name, level] = held
        return held[1][row]

    def _delays(self, generator: np.random.Generator, level: int, shape: tuple[int, ...]) -> np.ndarray:
        """What the environment's added waits come to in an episode, in s."""
        assert self._turn_delay is not None
        turns = np.rint(self._inputs.law("turns", level).sample(generator, shape)).astype(int)
        waits = self._turn_delay.sample(generator, (*shape, int(turns.max(initial=0))))
        return np.where(np.arange(waits.shape[-1]) < turns[..., None], waits, 0.0).sum(axis=-1)
