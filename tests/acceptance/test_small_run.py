"""A whole run at toy size in every test run: real processes, kills, a stop and a resume."""

from __future__ import annotations

import signal
import subprocess
import sys
import time

import pytest

from asyncrl_jax.observe.audit import audit
from asyncrl_jax.observe.metrics import read_rows

from .whole_run import run_local

pytestmark = pytest.mark.timeout(280)

SMALL = [
    "--config.warm_start.num_steps=20",
    "--config.warm_start.num_demonstrations=200",
    "--config.model.num_layers=1",
    "--config.model.hidden_dim=16",
    "--config.model.expert_dim=16",
    "--config.learner.groups_per_update=4",
    "--config.learner.group_size=4",
    "--config.learner.checkpoint_every_updates=5",
    "--config.evaluation.num_tasks_per_level=4",
    "--config.actor.slots=16",
]


def test_a_small_run_survives_the_death_of_each_part(tmp_path):
    """Real `kill -9` of real processes: the ledger balances and the learner reproduces what it had published."""
    kills = ((3, "actor-0"), (8, "learner"), (14, "orchestrator"), (18, "redis"))
    run = run_local(tmp_path / "run", [*SMALL, "--config.learner.num_updates=24"], kills)
    assert run.code == 0, run.output[-3000:]
    assert run.left_running == []
    assert run.audited.sound, run.audited.problems
    assert run.audited.ledger == run.summary["ledger"]
    assert run.audited.line == 0, "the learner could not reproduce its updates"
    assert "replayed, equal to published" in run.log("learner")
    assert run.summary["updates"] == 24
    assert run.summary["ledger"]["pending"] == 0
    assert run.summary["ledger"]["trained"] == 24 * 4
    assert run.summary["lag"]["over_bound_tokens"] == 0
    assert set(run.summary["restarts"]) == {"actor-0", "learner", "orchestrator", "redis"}


def test_ux_06_a_stopped_run_is_resumed_to_its_end_in_sync_mode(tmp_path):
    """Ctrl-C in the middle, then --resume: lag 0 throughout, and the same line of weights."""
    run_dir = tmp_path / "run"
    flags = [*SMALL, "--config.mode=sync", "--config.learner.num_updates=12"]
    command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--config.run_dir={run_dir}", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    rows = run_dir / "metrics" / "learner.jsonl"
    deadline = time.monotonic() + 120
    while not (rows.exists() and rows.read_text().count("\n") >= 6):
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    asked_at = time.monotonic()
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - asked_at < 10
    assert process.returncode == 130, output
    command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--resume={run_dir}"]
    resumed = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    report = audit(run_dir)
    assert report.sound, report.problems
    assert (report.line, report.update) == (0, 12)
    assert set(report.lag_histogram) == {0}


def test_a_run_explores_with_an_older_policy_and_with_temperatures_and_counts_them_apart(tmp_path):
    flags = [
        *SMALL,
        "--config.learner.num_updates=16",
        "--config.actor.exploration.share=0.05",
        "--config.actor.exploration.temperature_jitter=0.3",
        "--config.learner.objective.correction=interpolated",
        "--config.learner.objective.weight_bound=truncate",
    ]
    run = run_local(tmp_path / "run", flags)
    assert run.code == 0, run.output[-3000:]
    assert run.audited.sound, run.audited.problems
    assert run.summary["lag"]["over_bound_tokens"] == 0
    last = read_rows(tmp_path / "run" / "metrics" / "learner.jsonl")[-1]
    assert 0 < last["num_tokens_explored_total"] < 0.2 * last["num_tokens_trained_total"]
    assert abs(last["logprob_gap_lag0"]) < 1e-4, "a row is scored at another temperature than it was sampled at"
