"""Two runs side by side: what differs is shown, what does not is not, and the curves are those of the runs."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.observe.compare import differing_settings, draw, figures, read_run
from asyncrl_jax.observe.record import write_record
from asyncrl_jax.observe.summary import save_evaluations, summarise

from .synthetic import run_data


def left_run(directory, seed: int, **changes):
    """A run directory as a run would leave it, from synthetic figures."""
    config = override(Config(), {"seed": seed, "run_dir": str(directory), **changes})
    data = run_data(seed=seed, num_updates=60, config=config)
    (directory / "metrics").mkdir(parents=True)
    write_config(directory / "config.json", config)
    (directory / "summary.json").write_text(json.dumps(summarise(data)))
    (directory / "metrics" / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in data.rows))
    save_evaluations(directory, data.evaluations)
    write_record(directory, config, {})
    return directory


@pytest.fixture
def runs(tmp_path):
    return left_run(tmp_path / "fifo", 1), left_run(tmp_path / "strata", 2, **{"pool.draw": "strata"})


def test_settings_that_differ_are_shown_and_no_others(runs):
    first, second = map(read_run, runs)
    assert differing_settings(first, second) == [("pool.draw", "fifo", "strata"), ("seed", "1", "2")]
    assert differing_settings(first, first) == []


def test_figures_are_those_of_the_summaries_with_their_difference(runs):
    first, second = map(read_run, runs)
    by_name = {row[0]: row[1:] for row in figures(first, second)}
    a, b = (run.summary["tokens_trained"] for run in (first, second))
    assert by_name["tokens_trained"] == (f"{a:,}", f"{b:,}", f"{b - a:+.4g}")
    assert by_name["lag.bound"] == ("4", "4", "+0")
    empty = dataclasses.replace(second, summary={})
    assert {row[2] for row in figures(first, empty)} == {"–"}


def test_the_picture_shows_both_runs_in_every_panel(runs):
    first, second = map(read_run, runs)
    success, reward, lag, _ = draw(first, second).axes
    assert [line.get_label() for line in reward.get_lines()] == ["fifo", "strata"]
    assert len(success.containers) == 2
    assert lag.get_lines()[0].get_xdata()[-1] == 60
    assert success.get_ylim() == (0.0, 1.0)


def test_the_binary_prints_tables_and_writes_the_picture(runs, tmp_path):
    command = [sys.executable, "-m", "launchers.compare", *map(str, runs), f"--output={tmp_path / 'x.png'}"]
    options = {"capture_output": True, "text": True, "timeout": 100, "check": False, "cwd": Path(__file__).parents[2]}
    done = subprocess.run(command, **options)
    assert done.returncode == 0, done.stderr
    assert "pool.draw" in done.stdout
    assert "tokens_trained" in done.stdout
    assert (tmp_path / "x.png").stat().st_size > 10_000
    wrong = subprocess.run([*command[:3], str(tmp_path)], **options)
    assert wrong.returncode == 2
    assert "usage" in wrong.stderr
