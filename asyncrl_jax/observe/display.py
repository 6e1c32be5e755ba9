"""What a run shows while it runs: one look at Redis, drawn as a live table, or as plain lines without a terminal."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import redis as redis_client
from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from asyncrl_jax.config import Config
from asyncrl_jax.orchestrator.host_classes import ClassSeen, seen_by_class
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.types import EvaluationResult, LearnerState

PLAIN_EVERY_S = 5.0
LEDGER_ORDER = ("trained", "expired", "filtered", "quarantined", "failed", "undone", "pending")


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """What Redis knows of a run at one moment."""

    phase: str | None  # of the run
    state: LearnerState | None
    learner: Mapping[str, Any]  # heartbeat; empty before the first and when it is overdue
    orchestrator: Mapping[str, Any]
    actors: Mapping[str, Mapping[str, Any]]  # heartbeats by actor id
    evaluations: tuple[EvaluationResult, ...]  # by rising update

    @property
    def finished(self) -> bool:
        """The last evaluation is in, and parts are closing."""
        return self.phase == "finished"

    def ending(self, num_updates: int) -> bool:
        """Whether parts may close without the run being cut short: its `num_updates` are done."""
        # After a resume the state may be that of an earlier, shorter session until the learner is up.
        done = self.state is not None and self.state.phase == "done" and self.state.update >= num_updates
        return done or self.phase in ("finishing", "finished")


def read_snapshot(client: redis_client.Redis, keys: Keys) -> Snapshot:
    """One look.

    Raises:
      RedisUnavailable: if Redis stays away longer than the client waits.
    """
    control = Control(client, keys)
    beats = control.heartbeats()

    def of_role(role: str) -> dict[str, Mapping[str, Any]]:
        return {instance: beat for (name, instance), beat in sorted(beats.items()) if name == role}

    return Snapshot(
        phase=control.phase(),
        state=control.learner(),
        learner=next(iter(of_role("learner").values()), {}),
        orchestrator=next(iter(of_role("orchestrator").values()), {}),
        actors=of_role("actor"),
        evaluations=tuple(sorted(control.evaluations(), key=lambda result: (result.update, result.finished_at))),
    )


class Display:
    """Live table on a terminal, a line every few seconds elsewhere. Use as a context manager."""

    def __init__(self, config: Config, console: Console):
        self._config = config
        self._console = console
        self._started_at = time.monotonic()
        self._live = Live(console=console, auto_refresh=False) if console.is_terminal else None
        self._told_at = -PLAIN_EVERY_S
        self._told: tuple[Any, ...] = ()

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_error: type[BaseException] | BaseException | TracebackType | None) -> None:
        if self._live:
            self._live.stop()

    def show(self, snapshot: Snapshot | None, restarts: Mapping[str, int]) -> None:
        """Draws what is known. Plain lines come every few seconds, and at once for a new phase or evaluation."""
        now = time.monotonic()
        elapsed_s = now - self._started_at
        if self._live:
            self._live.update(panel(self._config, snapshot, restarts, elapsed_s), refresh=True)
            return
        news = (snapshot.phase, _doing(snapshot), len(snapshot.evaluations)) if snapshot else ()
        if news == self._told and now - self._told_at < PLAIN_EVERY_S:
            return
        self._told, self._told_at = news, now
        line = plain_line(self._config, snapshot, elapsed_s)
        self._console.print(line, highlight=False, soft_wrap=True, markup=False)


def phase_name(snapshot: Snapshot | None) -> str:
    """What the run is doing, in words."""
    if snapshot is None:
        return "redis is away"
    if snapshot.finished:
        return "finished"
    if snapshot.state is None:
        return "starting"
    if snapshot.state.phase == "warm_start" and snapshot.state.update:  # behind the learner's restored state
        return "resuming"
    return {"warm_start": "warm start", "training": "training", "done": "last evaluation"}.get(
        snapshot.state.phase, snapshot.state.phase
    )


def _doing(snapshot: Snapshot | None) -> str:
    """The phase, and why nothing new is issued where that is so: a run that waits for a human must not seem stuck."""
    halt = snapshot.orchestrator.get("halt", "") if snapshot and not snapshot.finished else ""
    return ", ".join(filter(None, [phase_name(snapshot), halt]))


def plain_line(config: Config, snapshot: Snapshot | None, elapsed_s: float) -> str:
    """One line: progress, freshness, success, throughput, ledger."""
    parts = [f"[{elapsed_s:5.0f} s] {_doing(snapshot)}"]
    if snapshot is None or snapshot.state is None:
        return parts[0]
    learner = snapshot.learner
    if phase_name(snapshot) == "warm start":
        step = learner.get("warm_start_step", 0)
        return f"{parts[0]} step {step}/{config.warm_start.num_steps}{'' if step else ', compiling'}"
    parts[0] += f" update {snapshot.state.update}/{config.learner.num_updates}"
    parts[0] += "" if snapshot.state.update else ", compiling and sampling the first groups"
    parts.append(_freshness(config, snapshot))
    parts.append(f"success {_success(config, snapshot)}")
    rate = sum(beat.get("tokens_per_s", 0) for beat in snapshot.actors.values())
    parts.append(f"sampled {rate:,.0f} tok/s by {len(snapshot.actors)}")
    parts.append(f"effective {learner.get('effective_token_share', 0):.0%}")
    shares = [beat.get("accelerator_busy", 0) for beat in snapshot.actors.values()]
    parts.append(f"accelerators busy {sum(shares) / len(shares) if shares else 0:.0%}")
    parts.append(f"learner busy {learner.get('busy', 0):.0%}")
    parts.append(_ledger(snapshot))
    return " | ".join(parts)


def panel(config: Config, snapshot: Snapshot | None, restarts: Mapping[str, int], elapsed_s: float) -> RenderableType:
    """The live table."""
    table = Table.grid(padding=(0, 2))
    table.add_column(style="bold")
    table.add_column()
    clock = f"{int(elapsed_s) // 60}:{int(elapsed_s) % 60:02d}"
    title = Text(f"asyncrl  {config.mode}  seed {config.seed}  {_doing(snapshot)}  {clock}", style="bold cyan")
    if snapshot is None:
        return Group(title, table)
    learner = snapshot.learner
    table.add_row("progress", _progress(config, snapshot))
    over = learner.get("over_bound_tokens", 0)
    table.add_row("freshness", Text(_freshness(config, snapshot), style="bold red" if over else ""))
    table.add_row("success", f"{_success(config, snapshot)}   in training {_share(learner.get('success_train'))}")
    table.add_row(
        "learner",
        f"busy {learner.get('busy', 0):.0%}   trained {learner.get('tokens_trained', 0):,} tokens at "
        f"{learner.get('tokens_per_s', 0):,.0f}/s   reward {learner.get('reward') or 0:.2f}   "
        f"queue {learner.get('queue_depth', 0)}   checkpoint {learner.get('checkpoint_update', '–')}",
    )
    for name, beat in snapshot.actors.items():
        table.add_row(
            name,
            f"v{beat.get('version', '–')}   {beat.get('tokens_per_s', 0):,.0f} tok/s   "
            f"slots busy {beat.get('busy', 0):.0%}   accelerator busy {beat.get('accelerator_busy', 0):.0%}   "
            f"{beat.get('running', 0)} episodes in hand",
        )
    for name, seen in _classes(config, snapshot).items():
        table.add_row(
            f"{name}-*",
            f"{seen.actors} actors   {seen.tokens_per_s:,.0f} tok/s   accelerator busy {seen.accelerator_busy:.0%}   "
            f"{seen.episodes} episodes in hand",
        )
    table.add_row("tickets", _ledger(snapshot))
    if sum(restarts.values()):
        table.add_row("restarts", ", ".join(f"{name} {count}" for name, count in sorted(restarts.items())))
    return Group(title, table)


def _classes(config: Config, snapshot: Snapshot) -> Mapping[str, ClassSeen]:
    fleet = config.orchestrator.fleet
    return seen_by_class(snapshot.actors, fleet) if len(fleet.classes) > 1 else {}


def _progress(config: Config, snapshot: Snapshot) -> RenderableType:
    if snapshot.state is None:
        return Text("waiting for the learner")
    if phase_name(snapshot) == "warm start":
        done, total, unit = snapshot.learner.get("warm_start_step", 0), config.warm_start.num_steps, "warm-start steps"
    else:
        done, total, unit = snapshot.state.update, config.learner.num_updates, f"updates, v{snapshot.state.version}"
    row = Table.grid(padding=(0, 1))
    unit += "" if done else ", compiling"
    row.add_row(ProgressBar(total=max(total, 1), completed=done, width=30), f"{done}/{total} {unit}")
    return row


def _freshness(config: Config, snapshot: Snapshot) -> str:
    learner = snapshot.learner
    bound = snapshot.orchestrator.get("token_updates", config.effective_lag.token_updates)  # N may have been set since
    if not learner.get("tokens_trained"):  # a lag of nothing is no lag of 0
        return f"lag – of {bound}"
    text = f"lag mean {learner['lag_mean']:.2f} p95 {learner['lag_p95']:.0f} max {learner['lag_max']:.0f} of {bound}"
    over = learner.get("over_bound_tokens", 0)
    return f"{text}, {over} tokens over" if over else text


def _success(config: Config, snapshot: Snapshot) -> str:
    if not snapshot.evaluations:
        return "–"
    shown = config.environment.demonstrated_levels
    hidden = tuple(level for level in range(1, len(config.environment.level_weights) + 1) if level not in shown)
    first, last = snapshot.evaluations[0], snapshot.evaluations[-1]
    text = _evaluated(first, shown)
    if last is not first:
        text += f" → {_evaluated(last, shown)} (update {last.update})"
    if any(last.num_tasks.get(level) for level in hidden):
        text += f", undemonstrated {_evaluated(first, hidden)}"
        text += f" → {_evaluated(last, hidden)}" if last is not first else ""
    return text


def _evaluated(result: EvaluationResult, levels: tuple[int, ...]) -> str:
    """Success on these levels; an evaluation whose episodes all failed has none."""
    return _share(result.success(levels) if any(result.num_tasks.get(level) for level in levels) else None)


def _ledger(snapshot: Snapshot) -> str:
    counts = snapshot.orchestrator.get("ledger", {})
    if not counts:
        return "tickets –"
    ends = " + ".join(f"{counts[name]} {name}" for name in LEDGER_ORDER if counts.get(name))
    return f"{counts.get('issued', 0)} issued = {ends or '0'}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
