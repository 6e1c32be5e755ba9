"""Whether a process reward model agrees with the final reward, bucket by bucket: a biased one is named and taken out.

Rule. A group whose members did not end alike is a contrast: the mean step part of its better members (final part above
the group's mean) minus that of its worse ones. Members of a group solve one task, so how hard it is takes no part.
After `window_groups` contrasts, and at each doubling of their number up to 16 times as many, their mean is tested
against noise: with s the standard error of the mean over contrasts and z = `z_score`,

    mean + z·s < 0          the model prefers failures
    mean + z·s < min_gap    it says nothing that would be worth its weight
    mean − z·s > 0          it agrees

and a verdict begins a new window. The first two are an alarm, which ends when a later window agrees. Meanwhile, by
`action`, nothing else happens (alarm), the step part counts 0 in the groups of the bucket (hold_out), or the bucket is
taken out until a human releases it (hold). A model that has no weight is not judged.

Source: Student's t test on paired differences (1908), looked at a few times only (Armitage et al. 1969 on repeated
looks); over-optimised reward models as in Gao et al. 2023 (arXiv 2210.10760).
Failure mode: where all groups end alike there is no contrast and no verdict; a model that is right on average and wrong
on one kind of task within a bucket passes.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from asyncrl_jax.config_orchestrator import AgreementConfig
from asyncrl_jax.types import Decision

MOST_WINDOWS = 16  # that one verdict may take
PREFERS_FAILURES, UNINFORMATIVE = "prefers_failures", "uninformative"
_WORDS = {
    PREFERS_FAILURES: "the process model prefers failures",
    UNINFORMATIVE: "the process model does not tell success from failure",
}


@dataclasses.dataclass(frozen=True)
class Contrasts:
    """Groups that did not end alike, summed."""

    groups: float = 0.0
    gap: float = 0.0  # step part of the better members − that of the worse ones
    gap_squared: float = 0.0

    def plus(self, other: Contrasts) -> Contrasts:
        return Contrasts(self.groups + other.groups, self.gap + other.gap, self.gap_squared + other.gap_squared)

    @property
    def mean(self) -> float:
        return self.gap / self.groups

    @property
    def standard_error(self) -> float:
        """Of the mean, over two groups or more."""
        variance = max(self.gap_squared / self.groups - self.mean**2, 0.0) * self.groups / (self.groups - 1)
        return math.sqrt(variance / self.groups)


@dataclasses.dataclass(frozen=True)
class Bucket:
    """One bucket."""

    window: Contrasts = Contrasts()  # under way
    next_look: float = 0.0  # groups of the window at which it is tested; 0: at the first
    alarm: str = ""  # name of what is wrong; "" for nothing
    held: bool = False  # for a human


@dataclasses.dataclass(frozen=True)
class State:
    """By bucket name."""

    buckets: Mapping[str, Bucket] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Observed:
    """What was sampled since the last look."""

    contrasts: Mapping[str, Contrasts] = dataclasses.field(default_factory=dict)  # by bucket
    weight: float = 0.0  # of the step part
    released: frozenset[str] = frozenset()  # buckets that a human has released


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state, buckets whose step part counts nothing, and factors on the weights of buckets."""

    state: State
    held_out: tuple[str, ...] = ()
    factors: Mapping[str, float] = dataclasses.field(default_factory=dict)  # 0 by bucket that is held; 1 where absent
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: AgreementConfig) -> Decided:
    """What to make of the newest groups."""
    buckets = dict(state.buckets)
    log: list[Decision] = []
    for name in sorted(observed.released & buckets.keys()):
        if buckets[name].alarm:
            buckets[name] = Bucket()
            log.append(Decision("agreement", "release", f"bucket:{name}", "released by hand: it is judged anew"))
    for name, contrasts in sorted(observed.contrasts.items()):
        if observed.weight <= 0 or contrasts.groups <= 0:
            continue
        bucket = buckets.get(name, Bucket())
        bucket = dataclasses.replace(bucket, window=bucket.window.plus(contrasts))
        if bucket.window.groups >= max(bucket.next_look, config.window_groups):
            bucket, entries = _looked(name, bucket, observed.weight, config)
            log += entries
        buckets[name] = bucket
    alarmed = {name: bucket for name, bucket in buckets.items() if bucket.alarm}
    held_out = tuple(sorted(alarmed)) if config.action != "alarm" else ()
    return Decided(State(buckets), held_out, {name: 0.0 for name, b in alarmed.items() if b.held}, tuple(log))


def _looked(name: str, bucket: Bucket, weight: float, config: AgreementConfig) -> tuple[Bucket, list[Decision]]:
    """The bucket after a test of its window, and what is new."""
    window = bucket.window
    found = _verdict(window, config)
    if found is None:
        if window.groups >= MOST_WINDOWS * config.window_groups:
            return dataclasses.replace(bucket, window=Contrasts(), next_look=0.0), []
        return dataclasses.replace(bucket, next_look=2 * window.groups), []
    numbers = {
        "gap": window.mean,
        "standard_error": window.standard_error,
        "groups": window.groups,
        "weight": weight,
    }
    after = Bucket(alarm=found, held=bucket.held)
    subject, log = f"bucket:{name}", list[Decision]()
    if found and not bucket.held:
        found = (
            PREFERS_FAILURES if bucket.alarm == PREFERS_FAILURES else found
        )  # what was worse stands until it is over
        after = Bucket(alarm=found, held=config.action == "hold")
        if found != bucket.alarm:
            log.append(Decision("agreement", config.action, subject, f"{found}: {_WORDS[found]}", numbers))
    elif bucket.held:  # for a human to judge, whatever came in late
        after = dataclasses.replace(after, alarm=bucket.alarm)
    elif bucket.alarm:
        log.append(Decision("agreement", "recover", subject, "the process model agrees with the final reward", numbers))
    return after, log


def _verdict(window: Contrasts, config: AgreementConfig) -> str | None:
    """Name of what is wrong, "" if the model agrees, None if that can't be told from noise."""
    margin = config.z_score * window.standard_error
    if window.mean + margin < 0:
        return PREFERS_FAILURES
    if window.mean + margin < config.min_gap:
        return UNINFORMATIVE
    return "" if window.mean - margin > 0 else None
