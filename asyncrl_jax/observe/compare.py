"""Two runs side by side: the settings that differ, the figures of both, and their curves over updates."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from rich.console import Console
from rich.table import Table

from asyncrl_jax.config import flatten
from asyncrl_jax.config_file import read_config
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.observe.record import read_record
from asyncrl_jax.observe.summary import EVALUATIONS_FILE, wilson_interval

_STYLES = ({"color": "#0063b2", "linestyle": "-"}, {"color": "#d1660f", "linestyle": "--"})  # one may lie on the other
_SMOOTH = 10  # updates in a moving average
_WHERE_THE_RUN_WAS = ("run_dir", "redis.url", "redis.password_file", "redis.namespace", "redis.port")


@dataclasses.dataclass(frozen=True)
class LeftRun:
    """What one run left, as far as it is there."""

    name: str
    config: dict[str, Any]  # leaves by dotted name
    summary: Mapping[str, Any]  # empty for a run without its report
    rows: list[dict[str, Any]]  # of the learner, by rising update
    evaluations: list[dict[str, Any]]  # by rising update
    session: Mapping[str, Any]  # the last one of its record; empty without one


def read_run(run_dir: Path) -> LeftRun:
    """Reads a run directory; the run may be unfinished.

    Raises:
      ValueError: if it is none, or a file in it is damaged.
    """
    config = read_config(run_dir / "config.json")
    sessions = read_record(run_dir)
    return LeftRun(
        name=run_dir.resolve().name,
        config=flatten(config),
        summary=_json(run_dir / "summary.json") or {},
        rows=read_rows(run_dir / "metrics" / "learner.jsonl"),
        evaluations=_json(run_dir / EVALUATIONS_FILE) or [],
        session=sessions[-1] if sessions else {},
    )


def differing_settings(first: LeftRun, second: LeftRun) -> list[tuple[str, str, str]]:
    """(name, value of the first, of the second) of every setting that is not the same, places of the runs left out."""
    names = sorted((first.config.keys() | second.config.keys()) - set(_WHERE_THE_RUN_WAS))
    pairs = [(name, first.config.get(name), second.config.get(name)) for name in names]
    return [(name, str(a), str(b)) for name, a, b in pairs if a != b]


def figures(first: LeftRun, second: LeftRun) -> list[tuple[str, str, str, str]]:
    """(name, first, second, difference) of every number that both or one of the summaries has."""
    numbers = [_numbers(run.summary) for run in (first, second)]
    names = list(dict.fromkeys([*numbers[0], *numbers[1]]))
    rows = []
    for name in names:
        a, b = numbers[0].get(name), numbers[1].get(name)
        difference = "" if a is None or b is None else f"{b - a:+.4g}"
        rows.append((name, _shown(a), _shown(b), difference))
    return rows


def made_with(first: LeftRun, second: LeftRun) -> list[tuple[str, str, str]]:
    """Code, machine, tasks and packages that are not the same."""
    sides = [_provenance(run.session) for run in (first, second)]
    names = sorted(sides[0].keys() | sides[1].keys())
    return [
        (name, sides[0].get(name, "–"), sides[1].get(name, "–"))
        for name in names
        if sides[0].get(name) != sides[1].get(name)
    ]


def print_comparison(console: Console, first: LeftRun, second: LeftRun) -> None:
    """The tables."""
    for title, rows in (
        ("settings that differ", differing_settings(first, second)),
        ("made with", made_with(first, second)),
        ("figures", figures(first, second)),
    ):
        table = Table(title=title, title_justify="left", box=None, padding=(0, 2, 0, 0))
        for name in ("", first.name, second.name, "difference")[: len(rows[0]) if rows else 3]:
            table.add_column(name, overflow="fold")
        for row in rows or [("none", "", "")]:
            table.add_row(*row)
        console.print(table)
        console.print()


def draw(first: LeftRun, second: LeftRun) -> Figure:
    """Success on held-out tasks, reward in training, mean lag and effective tokens, over updates; no window opens."""
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    for run, style, marker in zip((first, second), _STYLES, ("o", "s"), strict=True):
        _success(axes[0, 0], run, style, marker)
        for axis, name in ((axes[0, 1], "reward"), (axes[1, 0], "lag_mean"), (axes[1, 1], "effective_token_share")):
            _curve(axis, run, name, style)
    titles = (
        "Success on held-out tasks (bars: 95 %)",
        f"Reward of trained groups, mean of {_SMOOTH} updates",
        f"Lag of trained tokens, in updates, mean of {_SMOOTH}",
        "Effective tokens ÷ generated tokens, so far",
    )
    for axis, title in zip(axes.flat, titles, strict=True):
        axis.set_title(title, fontsize=10, loc="left")
        axis.grid(visible=True, color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        axis.set_ylim(bottom=0)
    axes[0, 0].set_ylim(0, 1)
    for axis in axes[1]:
        axis.set_xlabel("optimizer updates")
    handles, labels = axes[0, 1].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, frameon=False)
    return figure


def _success(axis: Axes, run: LeftRun, style: dict[str, Any], marker: str) -> None:
    counted = [
        (e["update"], sum(e["num_successes"].values()), sum(e["num_tasks"].values()))
        for e in sorted(run.evaluations, key=lambda e: e["update"])
    ]
    counted = [(update, won, total) for update, won, total in counted if total]
    shares = [won / total for _, won, total in counted]
    intervals = [wilson_interval(won, total) for _, won, total in counted]
    below = [share - low for share, (low, _) in zip(shares, intervals, strict=True)]
    above = [high - share for share, (_, high) in zip(shares, intervals, strict=True)]
    updates = [update for update, _, _ in counted]
    axis.errorbar(updates, shares, yerr=[below, above], marker=marker, markersize=4, linewidth=1.6, capsize=2, **style)


def _curve(axis: Axes, run: LeftRun, name: str, style: dict[str, Any]) -> None:
    points = [(row["step"], row[name]) for row in run.rows if row.get(name) is not None]
    values = [value for _, value in points]
    window = 1 if name == "effective_token_share" else _SMOOTH
    smooth = [sum(values[max(0, end - window) : end]) / min(window, end) for end in range(1, len(values) + 1)]
    axis.plot([step for step, _ in points], smooth, linewidth=1.6, label=run.name, **style)


def _numbers(values: Mapping[str, Any], prefix: str = "") -> dict[str, float]:
    found: dict[str, float] = {}
    for name, value in values.items():
        if isinstance(value, Mapping):
            found |= _numbers(value, f"{prefix}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[prefix + name] = value
    return found


def _provenance(session: Mapping[str, Any]) -> dict[str, str]:
    if not session:
        return {}
    hardware = session["hardware"]
    facts = {f"code {name}": str(value) for name, value in session["code"].items()}
    facts |= {f"package {name}": version for name, version in session["packages"].items()}
    facts |= {"python": session["python"].split()[0], "tasks": str(session["tasks"]["identity"])}
    return facts | {"processor": hardware["processor"], "accelerators": ", ".join(hardware["accelerators"]) or "none"}


def _shown(value: float | None) -> str:
    return "–" if value is None else f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def _json(path: Path) -> Any:
    if not path.exists():
        return None
    try:
        return json.loads(path.read_text())
    except json.JSONDecodeError as error:
        raise ValueError(f"{path}: {error}") from error
