"""What a run leaves for people: `summary.json`, `run.png` and `run.html`, and a table on the console."""

from __future__ import annotations

import html
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from asyncrl_jax.config import Config, flatten
from asyncrl_jax.observe import picture
from asyncrl_jax.observe.record import read_record
from asyncrl_jax.observe.summary import RunData, summarise

SUMMARY_FILE, PICTURE_FILE, PAGE_FILE = "summary.json", "run.png", "run.html"

_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1d2125; max-width: 1120px; margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.5rem; margin-bottom: 0; } h2 { font-size: 1.1rem; margin-top: 2rem; }
table { border-collapse: collapse; } th, td { text-align: left; padding: .2rem 1.2rem .2rem 0; vertical-align: top; }
th { font-weight: 600; } td { font-variant-numeric: tabular-nums; } tr { border-bottom: 1px solid #eceef0; }
svg { width: 100%; height: auto; } .bad { color: #c0232c; font-weight: 600; } code { font-size: .9em; }
"""


def write_report(run_dir: Path, data: RunData) -> dict[str, Any]:
    """Writes the three files and returns the summary."""
    summary = summarise(data)
    draft = run_dir / f"{SUMMARY_FILE}.tmp"
    draft.write_text(json.dumps(summary, indent=2, allow_nan=False) + "\n")
    os.replace(draft, run_dir / SUMMARY_FILE)
    figure = picture.draw(data)
    picture.save_png(figure, run_dir / PICTURE_FILE)
    (run_dir / PAGE_FILE).write_text(page(run_dir, data, summary, picture.to_svg(figure)))
    return summary


def print_summary(console: Console, run_dir: Path, summary: Mapping[str, Any]) -> None:
    """The table that ends a run on the console."""
    table = Table(show_header=False, box=None, padding=(0, 2, 0, 0))
    table.add_column(style="bold")
    table.add_column(overflow="fold")
    for name, value in headline(summary):
        table.add_row(name, value)
    for problem in summary["ledger_problems"]:
        table.add_row("[red]ledger problem[/red]", problem)
    console.print(table)
    for name in (SUMMARY_FILE, PICTURE_FILE, PAGE_FILE):  # not in the table: a wrapped path can't be copied
        console.print(str(run_dir / name), highlight=False, soft_wrap=True)


def headline(summary: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Names and values of what matters most, for the console and the page."""
    lag = summary["lag"]
    rows = [
        ("run", f"mode {summary['mode']}, seed {summary['seed']}"),
        ("success, held-out", _change(summary["success_before"], summary["success_after"])),
    ]
    if summary["undemonstrated_levels"]:
        levels = ", ".join(map(str, summary["undemonstrated_levels"]))
        change = _change(summary["success_undemonstrated_before"], summary["success_undemonstrated_after"])
        rows.append((f"level {levels}, never demonstrated", change))
    rows += [
        ("updates", f"{summary['updates']} in {summary['wall_s']:.0f} s, {summary['versions']} weight versions"),
        (
            "lag of trained tokens",
            f"mean {_number(lag['mean'])}, p95 {_number(lag['p95'])}, max {_number(lag['max'])} of {lag['bound']}; "
            f"{lag['over_bound_tokens']} over",
        ),
        ("reward, held-out", _change(summary["reward_before"], summary["reward_after"])),
        ("tokens trained", f"{summary['tokens_trained']:,}"),
        ("effective tokens", _effective(summary)),
        ("learner busy", "–" if summary["learner_busy"] is None else f"{summary['learner_busy']:.0%}"),
        ("tickets", _tickets(summary["ledger"])),
        ("episodes across versions", f"{summary['mixed_version_trajectories']:,}"),
    ]
    if summary["restarts"]:
        rows.append(("restarts", ", ".join(f"{name} {count}" for name, count in sorted(summary["restarts"].items()))))
    return rows


def _effective(summary: Mapping[str, Any]) -> str:
    """Trained tokens with an advantage ÷ generated tokens, and where the pool starved or ran over."""
    share = summary["effective_token_share"]
    if share is None:
        return "–"
    text = f"{share:.0%} of {summary['tokens_generated']:,} generated"
    if summary["filtered_groups"]:
        text += f"; {summary['filtered_groups']} groups without variance left out"
    if summary["overfilled_groups"]:
        text += f"; {summary['overfilled_groups']} groups too old before their turn"
    return text


def _tickets(ledger: Mapping[str, int]) -> str:
    """The equation of the ledger, without its zeros."""
    ends = " + ".join(f"{count} {name}" for name, count in ledger.items() if count and name != "issued")
    return f"{ledger['issued']} issued = {ends or '0'}"


def page(run_dir: Path, data: RunData, summary: Mapping[str, Any], svg: str) -> str:
    """The page, whole in one file: nothing is loaded from elsewhere."""
    levels = sorted(set(summary["success_by_level_before"]) | set(summary["success_by_level_after"]))
    by_level = [
        (
            f"{level}" + ("" if int(level) in data.demonstrated else " (never demonstrated)"),
            _share(summary["success_by_level_before"].get(level)),
            _share(summary["success_by_level_after"].get(level)),
            str(summary["evaluation_tasks_before"].get(level, 0)),
            str(summary["evaluation_tasks_after"].get(level, 0)),
        )
        for level in levels
    ]
    sections = [
        f"<h1>asyncrl run {html.escape(run_dir.name)}</h1>",
        _table([], headline(summary)),
        "<p class='bad'>The ledger does not balance.</p>" if summary["ledger_problems"] else "",
        _titled("Problems", [("problem", problem) for problem in summary["ledger_problems"]]),
        svg,
        "<h2>Success by level</h2>",
        _table(["level", "before", "after", "tasks before", "tasks after"], by_level),
        _titled("Settings that differ from the defaults", _changed_settings(data.config)),
        _titled("Made with", _made_with(run_dir)),
    ]
    return (
        f"<!doctype html><html lang='en'><head><meta charset='utf-8'><title>{html.escape(run_dir.name)}</title>"
        f"<style>{_STYLE}</style></head><body>{''.join(sections)}</body></html>\n"
    )


def _titled(title: str, rows: Sequence[tuple[str, str]]) -> str:
    return f"<h2>{title}</h2>{_table([], rows)}" if rows else ""


def _table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    head = f"<tr>{''.join(f'<th>{html.escape(name)}</th>' for name in header)}</tr>" if header else ""
    return f"<table>{head}{''.join(_row(row) for row in rows)}</table>"


def _row(row: Sequence[str]) -> str:
    name, *values = map(html.escape, row)
    return f"<tr><th>{name}</th>{''.join(f'<td>{value}</td>' for value in values)}</tr>"


def _changed_settings(config: Config) -> list[tuple[str, str]]:
    defaults = flatten(Config())
    return [(name, str(value)) for name, value in flatten(config).items() if value != defaults[name]]


def _made_with(run_dir: Path) -> list[tuple[str, str]]:
    sessions = read_record(run_dir)
    if not sessions:
        return []
    last = sessions[-1]
    packages = last["packages"]
    names = [name for name in ("jax", "flax", "optax", "orbax-checkpoint", "grain", "redis") if name in packages]
    hardware = last["hardware"]
    return [
        ("command", " ".join(last["command"])),
        ("code", ", ".join(f"{name} {value}" for name, value in last["code"].items())),
        ("python", last["python"].split()[0]),
        ("packages", ", ".join(f"{name} {packages[name]}" for name in names)),
        ("tasks", last["tasks"]["identity"]),
        ("machine", f"{hardware['processor']}, {hardware['cores']} cores, {hardware['memory_bytes'] / 2**30:.0f} GiB"),
        ("accelerators", ", ".join(hardware["accelerators"]) or "none"),
    ]


def _change(before: float | None, after: float | None) -> str:
    return f"{_share(before)} → {_share(after)}"


def _share(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}".rstrip("0").rstrip(".")
