"""Where the numbers of `metrics/<role>.jsonl` go besides: the same names and steps, to the trackers asked for.

Each tracker is imported when it is asked for and not before. All of them write to disk when nothing else is set up:
W&B with `WANDB_MODE=offline`, MLflow to a database in the run directory unless `MLFLOW_TRACKING_URI` names a server,
Trackio to its own directory (`TRACKIO_DIR`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol


class Writer(Protocol):
    """One tracker, for one role of a run."""

    def write(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        """Adds values of a step; `at` is unix seconds. A step may come again after a kill."""
        ...

    def close(self) -> None: ...


class TensorBoardWriter:
    """Event files in `metrics/<role>/`."""

    def __init__(self, run_dir: Path, role: str, project: str):
        del project  # TensorBoard goes by directories
        from tensorboardX import FileWriter
        from tensorboardX.proto.summary_pb2 import Summary

        self._summary = Summary
        self._events = FileWriter(str(run_dir / "metrics" / role))

    def write(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        # One event for all: each costs a checksum in Python and a place in a short queue that its writer waits for.
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in scalars.items()]
        self._events.add_summary(self._summary(value=values), step, at)

    def close(self) -> None:
        self._events.close()


class WandbWriter:
    """One W&B run a role, in a group named for the run. W&B takes only rising steps: what a kill undid stays."""

    def __init__(self, run_dir: Path, role: str, project: str):
        import wandb

        self._run: Any = wandb.init(
            project=project,
            group=run_dir.name,
            name=f"{run_dir.name}/{role}",
            id=_identifier(f"{run_dir.name}-{role}"),
            resume="allow",
            dir=str(run_dir / "metrics"),
            settings=wandb.Settings(silent=True, console="off", x_disable_stats=True),
        )

    def write(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        self._run.log({**scalars, "time": at}, step=step)

    def close(self) -> None:
        self._run.finish()


class MlflowWriter:
    """One MLflow run a role, in an experiment named for the project; a role that starts again goes on with its run."""

    def __init__(self, run_dir: Path, role: str, project: str):
        from mlflow.tracking import MlflowClient

        database = run_dir / "metrics" / "mlflow.db"
        self._client: Any = MlflowClient(
            tracking_uri=os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{database.absolute()}"
        )
        found = self._client.get_experiment_by_name(project)
        experiment = found.experiment_id if found else self._client.create_experiment(project)
        name = f"{run_dir.name}/{role}"
        earlier = self._client.search_runs([experiment], f"attributes.run_name = '{name}'", max_results=1)
        run = earlier[0] if earlier else self._client.create_run(experiment, run_name=name)
        self._run_id: str = run.info.run_id

    def write(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        from mlflow.entities import Metric

        metrics = [Metric(name, value, int(at * 1000), step) for name, value in scalars.items()]
        for start in range(0, len(metrics), 1000):  # the most that one call takes
            self._client.log_batch(self._run_id, metrics=metrics[start : start + 1000])

    def close(self) -> None:
        self._client.set_terminated(self._run_id)


class TrackioWriter:
    """One Trackio run a role."""

    def __init__(self, run_dir: Path, role: str, project: str):
        import trackio

        self._run: Any = trackio.init(
            project=project,
            name=f"{run_dir.name}-{role}",
            group=run_dir.name,
            resume="allow",
            embed=False,
            auto_log_gpu=False,
            auto_log_cpu=False,
        )

    def write(self, step: int, scalars: Mapping[str, float], at: float) -> None:
        del at  # Trackio takes its own time
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


_WRITERS: dict[str, type[Any]] = {
    "tensorboard": TensorBoardWriter,
    "wandb": WandbWriter,
    "mlflow": MlflowWriter,
    "trackio": TrackioWriter,
}
PACKAGES = {"tensorboard": "tensorboardX", "wandb": "wandb", "mlflow": "mlflow", "trackio": "trackio"}


def open_writer(name: str, run_dir: Path, role: str, project: str) -> Writer:
    """A writer by its name in `observe.writers`.

    Raises:
      ValueError: if its package is not installed; the message says how to.
    """
    try:
        writer: Writer = _WRITERS[name](run_dir, role, project)
    except ImportError as error:
        raise ValueError(
            f"--config.observe.writers={name}: {error}; needs pip install 'asyncrl-jax[{name}]'"
        ) from error
    return writer


def _identifier(text: str) -> str:
    return "".join(c if c.isalnum() or c in "-_" else "-" for c in text)
