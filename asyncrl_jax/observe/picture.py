"""The picture of a run: success, freshness, throughput and the learner's business over time."""

from __future__ import annotations

import io
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator, PercentFormatter, StrMethodFormatter

from asyncrl_jax.observe.summary import RunData, wilson_interval
from asyncrl_jax.types import EvaluationResult

_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0063b2", "#d1660f", "#1b7f4b", "#c0232c", "#9aa0a6"
_SMOOTH = 10  # updates in a moving average


def draw(data: RunData) -> Figure:
    """The figure; nothing is written and no window opens."""
    figure = Figure(figsize=(11, 7.4), layout="constrained")
    axes = figure.subplots(2, 2, sharex=True)
    minutes = [data.active_s(row["time"]) / 60 for row in data.rows]
    _success(axes[0, 0], data, minutes)
    _freshness(axes[0, 1], data, minutes)
    _throughput(axes[1, 0], data, minutes)
    _busy(axes[1, 1], data, minutes)
    for axis in axes.flat:
        axis.grid(visible=True, color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
        if minutes:
            axis.axvspan(0, _first_update(data, minutes), color="#f3f3f3", zorder=0)
        for start, _ in data.sessions[1:]:
            axis.axvline(data.active_s(start) / 60, color=_GREY, linestyle=":", linewidth=1)
    for axis in axes[1]:
        axis.set_xlabel(
            "minutes of running; grey: warm start" + ("; dotted: resumed" if len(data.sessions) > 1 else "")
        )
        axis.set_xlim(left=0)
    figure.suptitle(
        f"mode {data.config.mode}, seed {data.config.seed}: {len(data.rows)} updates in {data.wall_s / 60:.1f} minutes",
        fontsize=12,
    )
    return figure


def save_png(figure: Figure, path: Path) -> None:
    """Writes the figure as a PNG."""
    figure.savefig(path, dpi=110)


def to_svg(figure: Figure) -> str:
    """The figure as an `<svg>` element that can stand inside a page; the same run gives the same text."""
    buffer = io.StringIO()
    with matplotlib.rc_context({"svg.fonttype": "none", "svg.hashsalt": "asyncrl_jax"}):
        figure.savefig(buffer, format="svg", metadata={"Date": None})
    text = buffer.getvalue()
    return text[text.index("<svg") :]


def _success(axis: Axes, data: RunData, minutes: Sequence[float]) -> None:
    trained_on = _moving_average([row["success_train"] for row in data.rows])
    axis.plot(minutes, trained_on, color=_GREY, linewidth=1, label="training tasks")
    when = _time_of_update(data, minutes)
    if data.demonstrated:
        label = f"levels {_list(data.demonstrated)}, demonstrated"
        _evaluations(axis, data, data.demonstrated, when, label, color=_BLUE, marker="o", linestyle="-")
    if data.undemonstrated:
        label = f"level {_list(data.undemonstrated)}, never demonstrated"
        _evaluations(axis, data, data.undemonstrated, when, label, color=_ORANGE, marker="s", linestyle="--")
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_ylabel("share solved (bars: 95 %)")
    _head(axis, "Success on held-out tasks, sampled")


def _evaluations(
    axis: Axes,
    data: RunData,
    levels: tuple[int, ...],
    when: Callable[[EvaluationResult], float],
    label: str,
    **style: Any,
) -> None:
    """One point an evaluation, at the moment when the evaluated weights came to be."""
    results = [e for e in data.evaluations if any(e.num_tasks.get(level) for level in levels)]
    if not results:
        return
    shares = [result.success(levels) for result in results]
    intervals = [
        wilson_interval(sum(e.num_successes.get(n, 0) for n in levels), sum(e.num_tasks.get(n, 0) for n in levels))
        for e in results
    ]
    below = [share - low for share, (low, _) in zip(shares, intervals, strict=True)]
    above = [high - share for share, (_, high) in zip(shares, intervals, strict=True)]
    times = [when(result) for result in results]
    axis.errorbar(
        times, shares, yerr=[below, above], label=label, capsize=2, markersize=4, linewidth=1.6, clip_on=False, **style
    )


def _freshness(axis: Axes, data: RunData, minutes: Sequence[float]) -> None:
    bound = data.config.effective_lag.token_updates
    axis.step(minutes, [row["lag_max"] for row in data.rows], color=_GREY, linewidth=1, where="mid", label="max")
    axis.step(minutes, [row["lag_p95"] for row in data.rows], color=_ORANGE, linewidth=1.2, where="mid", label="p95")
    axis.plot(minutes, [row["lag_mean"] for row in data.rows], color=_BLUE, linewidth=1.6, label="mean")
    axis.axhline(bound, color=_RED, linestyle="--", linewidth=1.4, label=f"bound N = {bound}")
    worst = max([row["lag_max"] for row in data.rows], default=0)
    axis.set_ylim(0, max(bound, worst, 1) * 1.25)
    axis.yaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_ylabel("updates")
    _head(axis, "Freshness: lag of trained tokens, in optimizer updates")


def _throughput(axis: Axes, data: RunData, minutes: Sequence[float]) -> None:
    gaps = [(b - a) * 60 for a, b in itertools.pairwise(minutes)]
    rates = [row["tokens"] / gap if gap > 0 else 0.0 for row, gap in zip(data.rows[1:], gaps, strict=True)]
    axis.plot(minutes[1:], rates, color=_GREY, linewidth=0.8, label="each update")
    axis.plot(minutes[1:], _moving_average(rates), color=_GREEN, linewidth=1.6, label=f"mean of {_SMOOTH} updates")
    axis.set_ylim(bottom=0)
    axis.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    axis.set_ylabel("tokens / s")
    _head(axis, "Throughput: tokens trained on")


def _busy(axis: Axes, data: RunData, minutes: Sequence[float]) -> None:
    shares = [row["step_s"] / max(row["step_s"] + row["wait_s"], 1e-9) for row in data.rows]
    axis.plot(minutes, shares, color=_GREY, linewidth=0.8, label="each update")
    axis.plot(minutes, _moving_average(shares), color=_GREEN, linewidth=1.6, label=f"mean of {_SMOOTH} updates")
    axis.set_ylim(0, 1)
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    _head(axis, "Learner busy: share of its time not spent waiting for groups")


def _time_of_update(data: RunData, minutes: Sequence[float]) -> Callable[[EvaluationResult], float]:
    """Minutes of running at which the weights of an evaluation came to be."""
    made = {row["step"]: minute for row, minute in zip(data.rows, minutes, strict=True)}
    if minutes:
        made[0] = _first_update(data, minutes)
    return lambda result: made.get(result.update, data.active_s(result.finished_at) / 60)


def _first_update(data: RunData, minutes: Sequence[float]) -> float:
    """Minutes of running at which the first update was begun, so v0 was there."""
    first = data.rows[0]
    return max(0.0, minutes[0] - (first["wait_s"] + first["step_s"]) / 60)


def _head(axis: Axes, title: str) -> None:
    """Title and legend above the plot, where they can't hide a curve."""
    axis.set_title(title, fontsize=10, loc="left", pad=22)
    axis.legend(fontsize=8, loc="lower left", bbox_to_anchor=(-0.02, 0.99), ncols=4, frameon=False, columnspacing=1.2)


def _moving_average(values: Sequence[float]) -> list[float]:
    """Mean of the last `_SMOOTH` values, of fewer at the start."""
    windows = (values[max(0, end - _SMOOTH) : end] for end in range(1, len(values) + 1))
    return [sum(window) / len(window) for window in windows]


def _list(levels: Sequence[int]) -> str:
    return ", ".join(map(str, levels))
