"""Settings of how many actors there are, where they run, and what that may cost."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import re

from asyncrl_jax.config_leaf import require, setting

FLEETS = ("local", "ray", "kubernetes")


@dataclasses.dataclass(frozen=True)
class HostClass:
    """One kind of host. Its actors are called `<name>-0`, `<name>-1`, …"""

    name: str
    least: int  # actors on hosts of this kind
    most: int
    price: float  # of one for an hour
    ray_cpus: float  # that Ray reserves for one
    ray_gpus: float
    actor: tuple[tuple[str, str], ...] = ()  # settings of `actor` that differ here, as they were written


@dataclasses.dataclass(frozen=True, kw_only=True)
class AutoscaleConfig:
    """The number of actors, from throughput, staleness and watermark together."""

    enabled: bool = setting(False, "let the number of actors follow what the learner needs; off: actor.num_hosts")
    min_actors: int = setting(1, "fewest actors in service")
    max_actors: int = setting(8, "most actors, those that drain included")
    starved_high: float = setting(0.1, "share of its time the learner is short of groups above which actors are added")
    starved_low: float = setting(0.05, "the same, below which actors may be taken away")
    busy_high: float = setting(0.8, "share of actor slots in use above which more actors would help")
    busy_target: float = setting(0.9, "share of slots in use that the number of actors aims at")
    stale_share: float = setting(0.8, "mean lag ÷ N above which no actor is added: more would only make data older")
    tolerance: float = setting(0.1, "relative change in the number of actors below which nothing is changed")
    step: float = setting(2.0, "most that one change multiplies or divides the number of actors by")
    window_s: float = setting(
        30.0, "time over which all of this is averaged, and which passes before a judgement, in s"
    )
    grow_cooldown_s: float = setting(30.0, "shortest time from any change until actors are added, in s")
    shrink_cooldown_s: float = setting(
        120.0, "shortest time from any change until actors are taken away, in s; doubles when that proves wrong"
    )
    drain_limit_s: float = setting(
        600.0, "time for an actor to finish what it has; then it is removed and others take its tickets, in s"
    )
    hourly_budget: float = setting(0.0, "most that learner and actors may cost in an hour; 0: no limit")
    learner_price: float = setting(0.0, "of the learner for an hour, for each copy of its weights in mesh.data")
    learner_copies: tuple[int, ...] = setting(
        (), "values of mesh.data that the learner may be restarted with once actors could feed more, rising"
    )
    learner_patience_s: float = setting(600.0, "time the learner must be the bottleneck before it is asked for, in s")

    def __post_init__(self) -> None:
        name = "orchestrator.autoscale"
        require(self.min_actors >= 1, f"{name}.min_actors", self.min_actors, "at least 1")
        require(
            self.max_actors >= self.min_actors,
            f"{name}.max_actors",
            self.max_actors,
            f"at least {name}.min_actors = {self.min_actors}",
        )
        require(
            0 <= self.starved_low < self.starved_high < 1,
            f"{name}.starved_low",
            self.starved_low,
            f"at least 0 and below {name}.starved_high = {self.starved_high}, which is below 1",
        )
        for field in ("busy_high", "busy_target", "stale_share"):
            require(0 < getattr(self, field) <= 1, f"{name}.{field}", getattr(self, field), "above 0, at most 1")
        require(0 < self.tolerance < 1, f"{name}.tolerance", self.tolerance, "between 0 and 1")
        require(self.step > 1, f"{name}.step", self.step, "more than 1")
        for field in ("window_s", "drain_limit_s", "learner_patience_s"):
            require(getattr(self, field) > 0, f"{name}.{field}", getattr(self, field), "more than 0")
        for field in ("grow_cooldown_s", "shrink_cooldown_s", "hourly_budget", "learner_price"):
            require(getattr(self, field) >= 0, f"{name}.{field}", getattr(self, field), "at least 0")
        copies = self.learner_copies
        rising = all(one < following for one, following in itertools.pairwise((0, *copies)))
        require(rising, f"{name}.learner_copies", copies, "numbers from 1 that only rise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class FleetConfig:
    """Where actors run."""

    kind: str = setting("local", "processes of this machine (local), a Ray cluster, or a Kubernetes cluster")
    classes: tuple[str, ...] = setting(
        ("actor",),
        "kinds of hosts in the order in which they are filled, as name, name:most, name:least-most, or any of the last "
        "two with :hourly price; a resource of this name in Ray, a StatefulSet in Kubernetes",
    )
    class_settings: tuple[str, ...] = setting(
        (),
        "where actors of a class differ from the others, as cheap.slots=16: engine, slots, episodes, queue_share, "
        "kv_tokens, block_steps, prefill_tokens and prefix_reuse of actor, ray_cpus and ray_gpus of this group",
    )
    apply_every_s: float = setting(5.0, "seconds between two looks whether the fleet is as it was asked for")
    ray_address: str = setting("auto", "of the cluster: auto, host:port or ray://host:port")
    ray_cpus: float = setting(1.0, "CPUs that Ray reserves for one actor")
    ray_gpus: float = setting(0.0, "accelerators that Ray reserves for one actor, and lets it see")
    kubernetes_namespace: str = setting("default", "that the StatefulSets are in")

    def __post_init__(self) -> None:
        name = "orchestrator.fleet"
        require(self.kind in FLEETS, f"{name}.kind", self.kind, f"use one of {', '.join(FLEETS)}")
        require(len(self.classes) > 0, f"{name}.classes", self.classes, "at least one")
        for text in self.classes:
            need = "as actor, cheap:16, cheap:2-16 or cheap:16:0.4, and not more at least than at most"
            require(_parse(text) is not None, f"{name}.classes", text, need)
        names = [parsed[0] for parsed in map(_parse, self.classes) if parsed is not None]
        require(len(set(names)) == len(names), f"{name}.classes", self.classes, "each name once")
        for text in self.class_settings:
            found = _SETTING.fullmatch(text)
            known = f"a class ({', '.join(names)}), a setting ({', '.join(CLASS_SETTINGS)})"
            need = f"as cheap.slots=16: {known} and a value"
            right = found is not None and found[1] in names and found[2] in CLASS_SETTINGS
            require(right, f"{name}.class_settings", text, need)
            if found is not None and found[2] in _RAY_SETTINGS:
                right = re.fullmatch(r"\d+(\.\d+)?", found[3]) is not None
                require(right, f"{name}.class_settings", text, "a number, at least 0")
        given = [text.partition("=")[0] for text in self.class_settings]
        require(len(set(given)) == len(given), f"{name}.class_settings", self.class_settings, "each setting once")
        require(self.apply_every_s > 0, f"{name}.apply_every_s", self.apply_every_s, "more than 0")
        for field in ("ray_cpus", "ray_gpus"):
            require(getattr(self, field) >= 0, f"{name}.{field}", getattr(self, field), "at least 0")

    @property
    def host_classes(self) -> tuple[HostClass, ...]:
        """In the order in which they are filled."""
        return _host_classes(self.classes, self.class_settings, self.ray_cpus, self.ray_gpus)

    @property
    def least_members(self) -> int:
        """Of all classes together."""
        return sum(one.least for one in self.host_classes)

    @property
    def most_members(self) -> int:
        """Of all classes together."""
        return sum(one.most for one in self.host_classes)

    def class_of(self, actor_id: str) -> str:
        """The class of a member; empty for an actor that is none."""
        name, _, number = actor_id.rpartition("-")
        return name if number.isdigit() and any(one.name == name for one in self.host_classes) else ""

    def class_at(self, place: int) -> str:
        """The class of the member at a place in the order."""
        for one, count in self.blocks():
            if place < count:
                return one.name
            place -= count
        raise IndexError(f"place {place} beyond the end")

    def blocks(self) -> list[tuple[HostClass, int]]:
        """Members in order: the least of each class, then what may come on top."""
        classes = self.host_classes
        return [(one, one.least) for one in classes] + [(one, one.most - one.least) for one in classes]

    def members(self, size: int) -> dict[str, int]:
        """How many of the first `size` members each class has, by name."""
        counts = dict.fromkeys((one.name for one in self.host_classes), 0)
        for one, count in self.blocks():
            counts[one.name] += min(size, count)
            size -= min(size, count)
        return counts

    def names(self, size: int) -> list[str]:
        """Actor ids of the first `size` members, in order."""
        names, counts = list[str](), dict.fromkeys((one.name for one in self.host_classes), 0)
        for one, count in self.blocks():
            begin = counts[one.name]
            counts[one.name] += min(size - len(names), count)
            names += [f"{one.name}-{number}" for number in range(begin, counts[one.name])]
        return names

    def hourly_cost(self, size: int) -> float:
        """Of the first `size` members."""
        members = self.members(size)
        return sum(one.price * members[one.name] for one in self.host_classes)

    def affordable(self, budget: float) -> int:
        """Most members that so much pays for in an hour."""
        count = 0
        for one, room in self.blocks():
            fit = room if one.price == 0 else max(min(room, math.floor(budget / one.price + 1e-9)), 0)
            count, budget = count + fit, budget - fit * one.price
            if fit < room:
                break
        return count


NO_END = 10**9  # of a class without a number


_ACTOR_SETTINGS = (
    "engine",
    "slots",
    "episodes",
    "queue_share",
    "kv_tokens",
    "block_steps",
    "prefill_tokens",
    "prefix_reuse",
)
_RAY_SETTINGS = ("ray_cpus", "ray_gpus")
CLASS_SETTINGS = _ACTOR_SETTINGS + _RAY_SETTINGS
_SETTING = re.compile(r"([a-z][a-z0-9-]*)\.([a-z_]+)=(.+)")


@functools.cache
def _parse(text: str) -> tuple[str, int, int, float] | None:
    """(name, least, most, price); None if it is no class."""
    found = re.fullmatch(r"([a-z][a-z0-9-]{0,50})(?::(?:(\d+)-)?(\d+))?(?::(\d+(?:\.\d+)?))?", text)
    if found is None:
        return None
    name, least, most, price = found.groups()
    parsed = name, int(least or 0), int(most) if most else NO_END, float(price or 0.0)
    return parsed if parsed[1] <= parsed[2] else None


@functools.cache
def _host_classes(
    classes: tuple[str, ...], settings: tuple[str, ...], ray_cpus: float, ray_gpus: float
) -> tuple[HostClass, ...]:
    own: dict[str, dict[str, str]] = {}
    for text in settings:
        if found := _SETTING.fullmatch(text):
            own.setdefault(found[1], {})[found[2]] = found[3]
    made = []
    for parsed in map(_parse, classes):
        if parsed is None:
            continue
        given = own.get(parsed[0], {})
        cpus, gpus = float(given.pop("ray_cpus", ray_cpus)), float(given.pop("ray_gpus", ray_gpus))
        made.append(HostClass(*parsed, cpus, gpus, tuple(given.items())))
    return tuple(made)
