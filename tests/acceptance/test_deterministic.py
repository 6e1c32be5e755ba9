"""`--preset=deterministic`: two runs from one seed publish the same bytes, and a replay makes them again."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from asyncrl_jax.transport.archive import read_groups
from asyncrl_jax.weights.manifest import content_digest
from asyncrl_jax.weights.publish import committed
from asyncrl_jax.weights.read import read_manifest

from .test_small_run import SMALL
from .whole_run import WholeRun, run_local

pytestmark = pytest.mark.timeout(400)

NUM_UPDATES = 5


def weights_of(run: WholeRun) -> dict[int, str]:
    """Digest of every published version that is still there."""
    directory = str(run.directory / "weights")
    return {number: content_digest(read_manifest(directory, number)) for number in committed(directory)}


def sampled_by(run: WholeRun) -> dict[str, list[tuple[list[int], list[float], list[int]]]]:
    """Tokens, log-probs and versions of every archived trajectory, by ticket."""
    rows = [row for path in (run.directory / "archive").glob("groups-*") for row in read_groups(path)]
    return {
        row.group.ticket.ticket_id: [
            (t.tokens.tolist(), t.behaviour_logprobs.tolist(), t.policy_versions.tolist())
            for t in row.group.trajectories
        ]
        for row in rows
    }


def test_two_deterministic_runs_from_one_seed_are_bit_equal(tmp_path):
    flags = ["--preset=deterministic", *SMALL, "--config.seed=3", f"--config.learner.num_updates={NUM_UPDATES}"]
    runs = [run_local(tmp_path / name, flags) for name in ("first", "second")]
    for run in runs:
        assert run.code == 0, run.output[-3000:]
        assert run.audited.sound, run.audited.problems
    first, second = map(sampled_by, runs)
    assert first == second
    weights = weights_of(runs[0])
    assert weights == weights_of(runs[1])
    assert len(weights) == NUM_UPDATES + 1
    assert len(set(weights.values())) == NUM_UPDATES + 1
    command = [sys.executable, "-m", "launchers.replay", f"--run={runs[0].directory}"]
    root = Path(__file__).parents[2]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    replayed = json.loads(done.stdout.splitlines()[-1])
    assert (replayed["updates"], replayed["weights_digest"]) == (NUM_UPDATES, weights[NUM_UPDATES])
    assert (len(replayed["compared"]), replayed["differing"]) == (NUM_UPDATES + 1, [])
