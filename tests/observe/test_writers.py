"""Trackers get the numbers of the JSON lines: the real clients, offline; each is tested where it is installed."""

import builtins
import sqlite3

import pytest

from asyncrl_jax.config_data import ObserveConfig
from asyncrl_jax.observe.metrics import Metrics, read_rows

# What the clients' own dependencies warn of at import is not ours to mend.
pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.timeout(180)]

ROWS = {1: {"reward": 0.25, "load": {"layer0": 1.5}, "phase": "training"}, 2: {"reward": 0.5}}


@pytest.fixture
def write(tmp_path, monkeypatch):
    """Writes ROWS as the learner of a run would; returns the run directory."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    run_dir = tmp_path / "run-1"

    def run(*writers: str):
        metrics = Metrics(run_dir, "learner", ObserveConfig(writers=writers, project="project-1"))
        for step, row in ROWS.items():
            metrics.write(step, row)
        metrics.close()
        assert [row["reward"] for row in read_rows(run_dir / "metrics" / "learner.jsonl")][:2] == [0.25, 0.5]
        return run_dir

    return run


def test_without_trackers_the_files_are_all(write):
    run_dir = write()
    assert [path.name for path in (run_dir / "metrics").iterdir()] == ["learner.jsonl"]


def test_mlflow_has_the_same_numbers_at_the_same_steps_and_goes_on_with_its_run(write):
    pytest.importorskip("mlflow")
    pytest.importorskip("sqlalchemy")
    from mlflow.tracking import MlflowClient

    run_dir = write("mlflow")
    write("mlflow")
    client = MlflowClient(tracking_uri=f"sqlite:///{run_dir / 'metrics' / 'mlflow.db'}")
    experiment = client.get_experiment_by_name("project-1")
    (run,) = client.search_runs([experiment.experiment_id])
    assert run.info.run_name == "run-1/learner"
    history = client.get_metric_history(run.info.run_id, "reward")
    assert sorted({(m.step, m.value) for m in history}) == [(1, 0.25), (2, 0.5)]
    assert client.get_metric_history(run.info.run_id, "load/layer0")[0].value == 1.5
    assert "phase" not in run.data.metrics


def test_wandb_writes_offline(write):
    pytest.importorskip("wandb")
    run_dir = write("wandb")
    (stored,) = (run_dir / "metrics" / "wandb").glob("offline-run-*/run-*.wandb")
    data = stored.read_bytes()
    assert b"reward" in data
    assert b"load/layer0" in data


def test_trackio_has_the_same_numbers_at_the_same_steps(write, tmp_path):
    pytest.importorskip("trackio")
    write("trackio")
    (database,) = (tmp_path / "trackio").glob("project-1*.db")
    with sqlite3.connect(database) as connection:
        rows = connection.execute("SELECT step, metrics FROM metrics ORDER BY step").fetchall()
    assert [step for step, _ in rows] == [1, 2]
    assert '"reward"' in str(rows[0][1])


def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *args, **kwargs):
        if name == "wandb":
            raise ModuleNotFoundError("No module named 'wandb'")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(ValueError, match=r"asyncrl-jax\[wandb\]"):
        Metrics(tmp_path, "learner", ObserveConfig(writers=("wandb",)))
