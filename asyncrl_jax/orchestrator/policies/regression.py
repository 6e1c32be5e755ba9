"""Whether the newest weights are worse than weights before them, on held-out tasks, and where to go back to.

Rule. An evaluation is compared with the best two neighbours, pooled, among those that have passed on what is still
the surviving line. It has fallen when a one-sided z test of two proportions (pooled variance) gives p below `p_value`
and the fall is at least `min_fall`. A fall is confirmed once more, on the same version, with other sampling seeds and
twice the tasks; if the confirmation has fallen by the same test, the run goes back to the newest checkpoint that a
passed evaluation vouches for: the learner restores it and goes on as a new line of weights, whose first version names
its parent. Everything else passes, and vouches for all checkpoints up to its update; the checkpoint it vouches for is
kept until a later evaluation has passed. One without a single episode that came to its end says nothing. After
`max_rollbacks` without a new best in between the run is paused: going back does not help, and a human should look.

Source: two-proportion z test, e.g. Agresti, "Categorical Data Analysis", 2002, section 3.
Failure mode: the best of many noisy results is biased upward, by about 1.5 standard errors after ten; therefore two
are pooled, and `p_value` is strict and must hold twice (a test counts the false alarms). A slow decline is caught
late, when it exceeds the noise of one evaluation. Evaluations use the same tasks, so the test, which takes them for
independent, is conservative.
"""

from __future__ import annotations

import dataclasses
import math

from asyncrl_jax.config_orchestrator import RegressionConfig
from asyncrl_jax.types import Decision

CONFIRM = "confirm-"  # prefix of the id of a second evaluation


@dataclasses.dataclass(frozen=True)
class Score:
    """One evaluation, over all levels."""

    evaluation_id: str
    version: int
    line: int
    update: int
    tasks: int
    successes: int

    @property
    def success(self) -> float:
        return self.successes / max(self.tasks, 1)


@dataclasses.dataclass(frozen=True)
class Rollback:
    """Where the learner is to go: to the newest checkpoint of `line` at or before `update`."""

    number: int  # of the rollback, counting from 1
    line: int  # that is abandoned
    update: int


@dataclasses.dataclass(frozen=True)
class State:
    """What later evaluations are compared with."""

    best: Score | None = None  # two neighbours pooled, or the first alone
    last: Score | None = None  # that has passed
    good_update: int | None = None  # newest update that a passed evaluation vouches for
    suspect: Score | None = None  # has fallen once; its confirmation is awaited
    seen: tuple[str, ...] = ()  # ids judged, of the lines still of interest
    rollback: Rollback | None = None  # the last one ordered
    since_best: int = 0  # rollbacks since the best rose


@dataclasses.dataclass(frozen=True)
class Observed:
    """Results so far, and where the learner is."""

    scores: tuple[Score, ...]  # every result of a known version
    line: int  # of the learner


@dataclasses.dataclass(frozen=True)
class Decided:
    """The next state, and what to ask for."""

    state: State
    confirm: Score | None = None  # ask for another evaluation of this one's version
    pause: bool = False
    log: tuple[Decision, ...] = ()


def decide(state: State, observed: Observed, config: RegressionConfig) -> Decided:
    """Judges the results that are new."""
    log: list[Decision] = []
    pause = False
    for score in sorted(observed.scores, key=lambda s: (s.update, s.evaluation_id.startswith(CONFIRM))):
        if score.evaluation_id in state.seen:
            continue
        state = dataclasses.replace(state, seen=(*state.seen, score.evaluation_id))
        if score.line != observed.line or _abandoned(state, score.line):
            log.append(_entry("ignore", score, state.best, "of a line that is no longer trained"))
            continue
        if not score.tasks:  # an environment that is out of order: neither a pass nor a fall
            settled = state.suspect is not None and _confirms(score, state.suspect)
            state = dataclasses.replace(state, suspect=None) if settled else state
            log.append(_entry("ignore", score, state.best, "none of its episodes could be played to the end"))
            continue
        state, entries, paused = _judge(state, score, config)
        log += entries
        pause |= paused
    awaited = state.suspect
    if awaited is not None and (awaited.line != observed.line or _abandoned(state, awaited.line)):
        state, awaited = dataclasses.replace(state, suspect=None), None
    return Decided(state, awaited, pause, tuple(log))


def _confirms(score: Score, suspect: Score) -> bool:
    return score.evaluation_id.startswith(CONFIRM) and score.version == suspect.version


def _abandoned(state: State, line: int) -> bool:
    """Whether the learner has been told to leave this line; it may not have heard yet."""
    return state.rollback is not None and state.rollback.line == line


def _judge(state: State, score: Score, config: RegressionConfig) -> tuple[State, list[Decision], bool]:
    confirming = score.evaluation_id.startswith(CONFIRM)
    if confirming and (state.suspect is None or not _confirms(score, state.suspect)):
        return state, [], False
    if not confirming and state.suspect is not None and score.update > state.suspect.update:
        # Judged when the suspicion before it is settled; until then it vouches for nothing.
        return dataclasses.replace(state, seen=state.seen[:-1]), [], False
    p = fall_probability(state.best, score)
    fall = state.best.success - score.success if state.best else 0.0
    fallen = state.best is not None and p < config.p_value and fall >= config.min_fall
    if not fallen:
        return _passed(state, score), [_entry("pass", score, state.best, "within noise, or better", p)], False
    assert state.best is not None
    if not confirming:
        entry = _entry("suspect", score, state.best, "fell beyond noise; it is evaluated once more", p)
        return dataclasses.replace(state, suspect=score), [entry], False
    state = dataclasses.replace(state, suspect=None)
    if not config.rollback:
        return state, [_entry("alarm", score, state.best, "fell beyond noise, confirmed; rollback is off", p)], False
    if state.since_best >= config.max_rollbacks:
        entry = _entry("pause", score, state.best, "fell again after every rollback: a human should look", p)
        return state, [entry], True
    number = 1 if state.rollback is None else state.rollback.number + 1
    rollback = Rollback(number, score.line, state.good_update or 0)
    entry = _entry("rollback", score, state.best, f"fell beyond noise, confirmed: back to update {rollback.update}", p)
    return dataclasses.replace(state, rollback=rollback, since_best=state.since_best + 1), [entry], False


def _passed(state: State, score: Score) -> State:
    pooled = score
    if state.last is not None:
        tasks, successes = score.tasks + state.last.tasks, score.successes + state.last.successes
        pooled = dataclasses.replace(score, tasks=tasks, successes=successes)
    better = state.best is None or pooled.success > state.best.success
    return dataclasses.replace(
        state,
        best=pooled if better else state.best,
        last=score,
        good_update=max(state.good_update or 0, score.update),
        suspect=None if score.evaluation_id.startswith(CONFIRM) else state.suspect,
        since_best=0 if better else state.since_best,
    )


def fall_probability(best: Score | None, score: Score) -> float:
    """p of a result this low or lower, if both versions solved the same share: one-sided, pooled variance."""
    if best is None or not best.tasks or not score.tasks:
        return 1.0
    pooled = (best.successes + score.successes) / (best.tasks + score.tasks)
    variance = pooled * (1 - pooled) * (1 / best.tasks + 1 / score.tasks)
    if variance <= 0:
        return 1.0
    z = (best.success - score.success) / math.sqrt(variance)
    return 0.5 * math.erfc(z / math.sqrt(2))


def _entry(action: str, score: Score, best: Score | None, reason: str, p: float = 1.0) -> Decision:
    numbers = {"success": score.success, "tasks": float(score.tasks), "update": float(score.update), "p": p}
    if best is not None:
        numbers["best"] = best.success
    return Decision("regression", action, f"v{score.version}", reason, numbers)
