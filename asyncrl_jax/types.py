"""What crosses from one process to another. Frozen, and free of JAX, Redis and flags.

Dimensions: T tokens of one trajectory, G trajectories of one group, P reward parts.

Two units are used throughout and never mixed:

* an **update** is one optimizer step; `update` counts those done on the current line of weights;
* a **version** is a published set of weights; its `number` never repeats, even across rollbacks.

**Lag** of a token = optimizer updates between the weights that sampled it and the weights being updated.
"""

from __future__ import annotations

import dataclasses
import enum

import numpy as np

REWARD_PARTS = ("final", "step", "format", "tool")


class FinishReason(enum.StrEnum):
    """Why a trajectory ended."""

    ANSWERED = "answered"  # the environment ended the episode
    LENGTH = "length"  # the token budget ran out
    MAX_TURNS = "max_turns"  # the turn budget ran out
    ERROR = "error"  # the environment, a tool or a reward raised
    OUT_OF_TIME = "out_of_time"  # the time budget ran out


class Outcome(enum.StrEnum):
    """Where a ticket ended. Every issued ticket has exactly one outcome, or is pending."""

    TRAINED = "trained"  # in a durable checkpoint of the surviving line
    EXPIRED = "expired"  # too old for the lag bound before it could be trained
    FILTERED = "filtered"  # valid, left out by a stated rule
    QUARANTINED = "quarantined"  # failed validation; its bytes are in the dead-letter stream
    FAILED = "failed"  # no actor could finish it, or it was lost with a reset of Redis
    UNDONE = "undone"  # trained only on an abandoned line of weights


@dataclasses.dataclass(frozen=True, slots=True)
class Task:
    """One problem, named so that any process makes the same one from it."""

    environment: str  # registered name
    split: str  # "train" or "heldout"
    level: int  # difficulty, 1 is the easiest
    index: int  # position in the endless, seeded list of that split and level


@dataclasses.dataclass(frozen=True, slots=True)
class Ticket:
    """Permission to sample one group, with the age its weights may have."""

    ticket_id: str  # unique for ever: "<redis epoch>-<count>"
    task: Task
    group_size: int  # G
    line: int  # line of weights that `min_update` and `deadline` count on
    min_update: int  # no token is sampled with weights of fewer updates
    deadline: int  # last update count at which the learner may train on it
    temperature: float  # of sampling
    seed: int  # of sampling; sample i of the group folds in i
    issued_at: float  # unix seconds


class Exploration(enum.StrEnum):
    """Policies other than the one being trained that may sample a small share of the trajectories."""

    UNIFORM = "uniform"  # every token of the vocabulary alike
    OLDER = "older"  # a version beyond the lag bound


@dataclasses.dataclass(frozen=True)
class Trajectory:
    """One episode, token in, token out: what the policy sampled is what is trained."""

    tokens: np.ndarray  # int32 [T]
    loss_mask: np.ndarray  # uint8 [T]; 1 exactly where the policy sampled the token
    behaviour_logprobs: np.ndarray  # float32 [T]; of the distribution sampled from; 0 where not sampled
    policy_versions: np.ndarray  # int32 [T]; version number that made the token; -1 where not sampled
    reward: float  # weighted sum of `reward_parts`
    reward_parts: np.ndarray  # float32 [P], each in [0, 1], in the order of REWARD_PARTS
    success: bool  # the final answer is right
    finish_reason: FinishReason
    num_turns: int  # times the policy was asked for tokens
    sampling_started_at: float  # unix seconds
    sampling_ended_at: float  # unix seconds
    # Experts that the sampler's routers chose: int16, by input token, layer with experts, and choice; −1 where unknown.
    routed_experts: np.ndarray | None = None
    # Of a process reward model, which scores K steps; both None without one. A step is what the policy sampled up to
    # (and not including) token `step_ends[k]`, since the step before it.
    step_scores: np.ndarray | None = None  # float32 [K], each in [0, 1]
    step_ends: np.ndarray | None = None  # int32 [K], rising
    temperature: float | None = None  # of sampling, where it is not the ticket's
    exploration: Exploration | None = None  # which policy sampled it, where it is not the one being trained


@dataclasses.dataclass(frozen=True)
class Group:
    """All trajectories of one ticket: the unit of the wire, of advantages and of the ledger."""

    ticket: Ticket
    trajectories: tuple[Trajectory, ...]  # G of them, fewer only when `partial`
    actor_id: str
    partial: bool = False  # sent without members that came too late
    enqueued_at: float = 0.0  # unix seconds

    @property
    def num_tokens(self) -> int:
        return sum(len(t.tokens) for t in self.trajectories)


@dataclasses.dataclass(frozen=True, slots=True)
class WeightVersion:
    """A published set of weights, as announced. v0 is the weights before the first RL update."""

    number: int  # v0, v1, ...; never repeats
    parent: int | None  # version it was trained from; None for v0
    line: int  # line of weights; a rollback or an unreproducible resume opens a new one
    update: int  # optimizer updates since v0 on its line; with one version an update, v_n has n
    manifest_digest: str  # xxh3_128 hex of the manifest file's bytes
    announced_at: float = 0.0  # unix seconds


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One line of weights: where it left its parent. Line 0 has no parent."""

    line: int
    parent: int | None = None
    fork_update: int = 0  # update count at which it left the parent


@dataclasses.dataclass(frozen=True, slots=True)
class LearnerState:
    """The learner's progress, as the orchestrator and actors see it."""

    line: int
    update: int  # optimizer updates done on this line
    version: int  # newest announced version
    phase: str  # "warm_start", "training", "done"
    unsettled_tickets: int = 0  # tickets with no use left, trained but not yet settled by a durable checkpoint
    unsettled_uses: int = 0  # uses of tickets that are not settled yet: made, or never to be made, being too old


@dataclasses.dataclass(frozen=True, slots=True)
class Decision:
    """One line of the decision log: what was decided about what, by whom, and the numbers that caused it."""

    policy: str  # file of `orchestrator/policies/`, or "operator" for a human's
    action: str  # short and stable, as "open" or "raise"
    subject: str  # what it is about, as "N", "actor:actor-0" or "bucket:arithmetic/2"
    reason: str  # in words
    numbers: dict[str, float] = dataclasses.field(default_factory=dict)  # that caused it


@dataclasses.dataclass(frozen=True, slots=True)
class EvaluationRequest:
    """Held-out tasks to be solved by one exact version."""

    evaluation_id: str
    version: int
    update: int
    num_tasks_per_level: int
    seed: int  # task i of level l samples with seed folded by (l, i), the same for every version


@dataclasses.dataclass(frozen=True)
class EvaluationResult:
    """Sampled success of one version, per level, on the held-out tasks."""

    evaluation_id: str
    version: int
    update: int
    num_tasks: dict[int, int]  # by level
    num_successes: dict[int, int]  # by level
    mean_reward: float
    finished_at: float = 0.0  # unix seconds

    def success(self, levels: tuple[int, ...]) -> float:
        """Share of tasks of these levels that were solved.

        Raises:
          ValueError: if no task of these levels was evaluated.
        """
        total = sum(self.num_tasks.get(level, 0) for level in levels)
        if total == 0:
            raise ValueError(f"no evaluated task in levels {levels}; this result has {sorted(self.num_tasks)}")
        return sum(self.num_successes.get(level, 0) for level in levels) / total


def update_distance(sampled: WeightVersion, line: int, update: int, lines: dict[int, Line]) -> int:
    """Optimizer updates that separate `sampled` from update count `update` of `line`.

    On one line it is the difference of update counts. Across a fork it is the updates since the common ancestor on
    both branches, so work sampled on an abandoned line counts its true distance.

    Args:
      sampled: the version that made a token.
      line: line of the weights being updated.
      update: update count of the weights being updated.
      lines: every line by its number.

    Raises:
      KeyError: if a line is not in `lines`.
    """

    def ancestors(node: int) -> list[tuple[int, float]]:
        """(line, highest update of it that is an ancestor), from the line itself up to line 0."""
        path, limit = [], float("inf")
        current: int | None = node
        while current is not None:
            path.append((current, limit))
            limit = min(limit, lines[current].fork_update)
            current = lines[current].parent
        return path

    of_sampled = dict(ancestors(sampled.line))
    for candidate, limit in ancestors(line):
        if candidate in of_sampled:
            common = min(limit, of_sampled[candidate], sampled.update, update)
            return int((sampled.update - common) + (update - common))
    raise KeyError(f"lines {sampled.line} and {line} have no common ancestor in {sorted(lines)}")


def on_line(line: int, update: int, surviving: int, lines: dict[int, Line]) -> bool:
    """Whether the update that made `update` + 1 updates on `line` is part of the surviving line.

    A line shares with its parent what the parent had done when it was left.
    """
    if line not in lines or surviving not in lines:
        return line == surviving
    shared: dict[int, float] = {}  # of the surviving line's ancestors: updates that it shares with them
    current, limit = surviving, float("inf")
    while True:
        shared[current] = limit
        parent = lines[current].parent
        if parent is None:
            break
        limit = min(limit, lines[current].fork_update)
        current = parent
    own_limit, current = float("inf"), line
    while current not in shared:
        own_limit = min(own_limit, lines[current].fork_update)
        parent = lines[current].parent
        assert parent is not None, "lines of one run have a common ancestor"
        current = parent
    return update < min(shared[current], own_limit)
