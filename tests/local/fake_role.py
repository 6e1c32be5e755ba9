"""Stands in for every role, so that the launcher is tested in seconds: real processes, real Redis, no training.

FAKE_CRASH=<role> ends that role at its start; FAKE_UPDATES is how many updates the learner pretends, 0.05 s each.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path

from asyncrl_jax.config_file import read_config
from asyncrl_jax.lifetime import die_with_parent
from asyncrl_jax.local.environment import redis_password
from asyncrl_jax.observe.metrics import Metrics
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.types import EvaluationResult, LearnerState

STEP_S = 0.05
STOP = threading.Event()


def learner(control: Control, run_dir: Path, num_updates: int) -> None:
    metrics = Metrics(run_dir, "learner")
    before = control.learner()
    update = before.update if before else 0
    while update < num_updates and not STOP.wait(STEP_S):
        update += 1
        row = {"tokens": 10, "lag_mean": 1.0, "lag_p95": 1.0, "lag_max": 1.0, "success_train": 0.5, "reward": 0.5}
        metrics.write(update, row | {"wait_s": 0.01, "step_s": 0.04})
        control.set_learner(LearnerState(line=0, update=update, version=update, phase="training"))
        control.beat("learner", "0", {"update": update, "busy": 0.8, "tokens_trained": 10 * update, **row}, 15.0)
    if update >= num_updates:
        control.set_learner(LearnerState(line=0, update=update, version=update, phase="done"))
        wait_for_end(control)


def orchestrator(control: Control, num_updates: int) -> None:
    while not STOP.wait(STEP_S):
        state = control.learner()
        control.beat("orchestrator", "0", {"ledger": {"issued": 0, "pending": 0}}, 15.0)
        if state is not None and state.phase == "done" and state.update >= num_updates:
            for update in (0, state.update):
                tasks, successes = {1: 10, 2: 10, 3: 10}, {1: 5, 2: 4, 3: 1}
                control.report_evaluation(EvaluationResult(f"e{update}", update, update, tasks, successes, 0.5))
            control.set_phase("finished")
            return


def actor(control: Control, actor_id: str) -> None:
    while not STOP.wait(STEP_S) and control.phase() != "finished":
        control.beat("actor", actor_id, {"version": 0, "tokens_per_s": 100.0, "running": 3, "busy": 0.5}, 15.0)


def wait_for_end(control: Control) -> None:
    while control.phase() != "finished" and not STOP.wait(STEP_S):
        pass


def main() -> None:
    role, arguments = sys.argv[1], dict(argument[2:].split("=", 1) for argument in sys.argv[2:])
    die_with_parent()
    if os.environ.get("FAKE_CRASH") == role:
        sys.exit(f"{role}: no such mesh axis")
    signal.signal(signal.SIGTERM, lambda *_: STOP.set())
    if role == "demonstrations":
        Path(arguments["output"]).write_bytes(b"demonstrations")
        return
    config = read_config(Path(arguments["config_file"]))
    control = Control(connect(config.redis, redis_password(config.redis)), Keys(config.redis.namespace))
    run_dir, num_updates = Path(config.run_dir), config.learner.num_updates
    if role == "learner":
        learner(control, run_dir, num_updates)
    elif role == "orchestrator":
        orchestrator(control, num_updates)
    else:
        actor(control, arguments["actor_id"])


if __name__ == "__main__":
    main()
