"""generate → filter → train → distil, each stage a whole run or a tool, handing on files alone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from .whole_run import run_local

pytestmark = [pytest.mark.acceptance, pytest.mark.timeout(2400)]

BARELY_TAUGHT = "--config.warm_start.num_steps=700"
SHORT = ["--config.evaluation.num_tasks_per_level=100", "--config.learner.checkpoint_every_updates=10"]


def tool(name, *flags):
    command = [sys.executable, "-m", f"asyncrl_jax.launchers.{name}", *flags]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def finished(record, directory, *flags):
    """(success before the first update, success after the last) of a run that ended well."""
    run = run_local(directory, [*SHORT, *flags])
    record(f"stage: {directory.name}", run)
    assert run.code == 0, run.output[-3000:]
    assert run.audited.sound, run.audited.problems
    return run.summary["success_before"], run.summary["success_after"]


def test_the_best_of_a_run_teaches_the_next_and_that_one_teaches_a_smaller_student(tmp_path, record):
    generate, tuned, student = (tmp_path / name for name in ("generate", "tuned", "student"))
    before, unchanged = finished(
        record, generate, BARELY_TAUGHT, "--config.learner.learning_rate=0", "--config.learner.num_updates=20"
    )
    assert before == unchanged, "a learning rate of 0 changes nothing"
    counts = json.loads(tool("filter", f"--run={generate}", f"--output={tmp_path / 'kept.avro'}", "--num=2000"))
    assert counts["kept"]["high"] > 50
    tool("convert", f"--source={generate}", f"--output={tmp_path / 'base'}")
    after_filter, _ = finished(
        record,
        tuned,
        f"--config.model.checkpoint={tmp_path / 'base'}",
        f"--config.warm_start.demonstrations={tmp_path / 'kept.avro'}",
        "--config.warm_start.num_steps=300",
        "--config.warm_start.learning_rate=1e-3",
        "--config.learner.num_updates=40",
    )
    print(f"fine-tuned on {counts}: {before:.3f} to {after_filter:.3f}")
    assert after_filter > before
    tool("convert", f"--source={tuned}", f"--output={tmp_path / 'teacher'}")
    student_before, student_after = finished(
        record,
        student,
        BARELY_TAUGHT,
        "--config.model.num_layers=1",
        f"--config.learner.distill.teachers={tmp_path / 'teacher'}",
        "--config.learner.objective.coefficient=0",
        "--config.learner.kl.coefficient=0",
        "--config.learner.num_updates=60",
    )
    assert student_after > student_before
