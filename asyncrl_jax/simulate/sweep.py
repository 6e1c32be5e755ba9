"""One setting, several values, one simulation each: as figures, as a table and as a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import PercentFormatter
from rich.table import Table

from asyncrl_jax.config import Config, leaf_types, override
from asyncrl_jax.simulate.inputs import Inputs
from asyncrl_jax.simulate.outcome import Outcome
from asyncrl_jax.simulate.simulation import simulate

PREFIX = "simulate."  # of the simulation's own settings; all others are the run's
_BLUE, _ORANGE, _GREEN, _RED, _GREY = "#0063b2", "#d1660f", "#1b7f4b", "#c0232c", "#9aa0a6"


def parse_sweep(text: str) -> tuple[str, list[Any]]:
    """(setting, values) of `lag.token_updates=2,4,8`.

    Raises:
      ValueError: for an unknown setting, one that is no number or text, or a value of the wrong kind.
    """
    name, _, values = text.partition("=")
    leaves = leaf_types(Inputs, PREFIX) if name.startswith(PREFIX) else leaf_types(Config)
    if name not in leaves:
        raise ValueError(f"--sweep={text}: unknown setting {name!r}; use NAME=VALUE,VALUE,… as lag.token_updates=2,4,8")
    kind = leaves[name][0]
    if kind not in (int, float, str) or not values:
        raise ValueError(f"--sweep={text}: give values of a setting that is one number or text")
    try:
        return name, [kind(value) for value in values.split(",")]
    except ValueError:
        raise ValueError(f"--sweep={text}: {name} takes a comma list of {kind.__name__}s") from None


def with_setting(config: Config, inputs: Inputs, name: str, value: Any) -> tuple[Config, Inputs]:
    """Both with one setting changed. An N below A lowers A with it; no version is deleted in a simulation."""
    if name.startswith(PREFIX):
        return config, dataclasses.replace(inputs, **{name.removeprefix(PREFIX): value})
    given = {name: value}
    if name == "lag.token_updates":
        given["lag.actor_updates"] = min(config.lag.actor_updates, value)
        given["weights.keep_versions"] = max(config.weights.keep_versions, value + 2)
        tuning = config.orchestrator.tuning
        given["orchestrator.tuning.max_token_updates"] = max(tuning.max_token_updates, value)
    return override(config, given), inputs


def run_sweep(config: Config, inputs: Inputs, name: str, values: Sequence[Any]) -> dict[str, Outcome]:
    """Outcomes by value, with the same random numbers in each.

    Raises:
      ValueError: for a value that is refused.
    """
    return {str(value): simulate(*with_setting(config, inputs, name, value)) for value in values}


def as_table(name: str, outcomes: dict[str, Outcome]) -> Table:
    """A row a value."""
    table = Table(title_justify="left", box=None, padding=(0, 1, 0, 0))
    titles = "updates", "s per\nupdate", "learner\nbusy", "slots\nbusy", "mean\nlag", "p95", "max", "expired"
    for title in (name.replace(".", ".\n"), *titles, "wasted\ntokens", "tokens/s"):
        table.add_column(title, justify="right", no_wrap=True)
    for value, one in outcomes.items():
        table.add_row(
            value,
            f"{one.updates:,}",
            "–" if one.seconds_per_update is None else f"{one.seconds_per_update:.3g}",
            f"{one.learner_busy:.1%}",
            f"{one.actor_busy:.1%}",
            f"{one.lag_mean:.2f}",
            f"{one.lag_p95:.0f}",
            f"{one.lag_max:.0f}",
            f"{_expired(one):.1%}",
            f"{one.wasted_share:.1%}",
            f"{one.tokens_per_s:,.0f}",
        )
    return table


def draw(name: str, outcomes: dict[str, Outcome], title: str) -> Figure:
    """Speed, busy shares, lag and waste over the values; no window opens."""
    figure = Figure(figsize=(10, 6.4), layout="constrained")
    axes = figure.subplots(2, 2)
    places = range(len(outcomes))
    found = list(outcomes.values())
    _bars(axes[0, 0], [3600 * one.updates / max(one.wall_s, 1e-9) for one in found], _BLUE, "{:.0f}", "Updates an hour")
    _pair(
        axes[0, 1],
        [("learner", _BLUE, [one.learner_busy for one in found]), ("slots", _GREY, [one.actor_busy for one in found])],
        "Share of the time that is used",
    )
    _lags(axes[1, 0], outcomes)
    _pair(
        axes[1, 1],
        [
            ("groups expired", _RED, [_expired(one) for one in found]),
            ("tokens wasted", _ORANGE, [one.wasted_share for one in found]),
        ],
        "Sampled in vain",
    )
    for axis in (axes[0, 0], axes[0, 1], axes[1, 1]):
        axis.set_xticks(places, list(outcomes))
        axis.set_xlabel(name)
    for axis in axes.flat:
        axis.grid(visible=True, axis="y", color="#e6e6e6", linewidth=0.6)
        axis.set_axisbelow(True)
        axis.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=12)
    return figure


def _expired(outcome: Outcome) -> float:
    """Share of the tickets that have an outcome."""
    return outcome.ledger["expired"] / max(outcome.ledger["issued"] - outcome.ledger["pending"], 1)


def _bars(axis: Axes, values: Sequence[float], colour: str, label: str, title: str) -> None:
    bars = axis.bar(range(len(values)), values, width=0.55, color=colour)
    axis.bar_label(bars, [label.format(value) for value in values], padding=2, fontsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    axis.margins(y=0.12)


def _pair(axis: Axes, series: Sequence[tuple[str, str, Sequence[float]]], title: str) -> None:
    for number, (label, colour, values) in enumerate(series):
        places = [place + (number - 0.5) * 0.36 for place in range(len(values))]
        bars = axis.bar(places, values, width=0.34, color=colour, label=label)
        axis.bar_label(bars, [f"{value:.0%}" for value in values], padding=2, fontsize=9)
    axis.set_title(title, fontsize=10, loc="left")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    top = max((value for _, _, values in series for value in values), default=0.0)
    axis.set_ylim(0, max(1.35 * top, 0.05))
    axis.legend(frameon=False, fontsize=9, loc="upper center", ncols=2)


def _lags(axis: Axes, outcomes: dict[str, Outcome]) -> None:
    widest = max((max(one.lag_histogram, default=0) for one in outcomes.values()), default=0)
    width = 0.8 / max(len(outcomes), 1)
    colours = (_GREY, _BLUE, _GREEN, _ORANGE, _RED)
    for number, (value, one) in enumerate(outcomes.items()):
        total = max(one.tokens_trained, 1)
        shares = [one.lag_histogram.get(lag, 0) / total for lag in range(widest + 1)]
        places = [lag + (number - (len(outcomes) - 1) / 2) * width for lag in range(widest + 1)]
        axis.bar(places, shares, width=0.92 * width, color=colours[number % len(colours)], label=value)
    axis.set_title("Share of trained tokens by lag", fontsize=10, loc="left")
    axis.yaxis.set_major_formatter(PercentFormatter(1.0))
    axis.set_xlabel("lag, in updates")
    axis.set_xticks(range(widest + 1) if widest <= 16 else range(0, widest + 1, max(widest // 8, 1)))
    axis.legend(frameon=False, fontsize=9, ncols=min(len(outcomes), 5))
