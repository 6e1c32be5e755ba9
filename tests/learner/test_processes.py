"""A learner of two processes is one learner: real processes over loopback, two forced host devices each."""

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from asyncrl_jax.config import override
from asyncrl_jax.learner.checkpoint import Checkpoints
from asyncrl_jax.weights.manifest import leaves_from_json
from asyncrl_jax.weights.publish import committed
from asyncrl_jax.weights.read import describe, read, read_arrays

from .run_fixture import ScriptedRun, small_config, trained_tasks

pytestmark = pytest.mark.timeout(1500)

NUM_UPDATES = 6
# Compiling, not computing, takes the time here.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]


class LearnerProcesses:
    """`num` processes of one learner with `devices` devices each, their output in files."""

    def __init__(self, run, password_file, num, devices):
        coordinator = f"127.0.0.1:{free_port()}" if num > 1 else ""
        flags = f"--xla_force_host_platform_device_count={devices} {QUICK_COMPILE}"
        environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        script = Path(__file__).with_name("learner_process.py")
        self.logs = [run.run_dir / f"process-{i}-{time.monotonic_ns()}.log" for i in range(num)]
        self.processes = []
        for i, log in enumerate(self.logs):
            arguments = [sys.executable, script, run.run_dir, password_file, coordinator, str(num), str(i)]
            with log.open("w") as file:
                self.processes.append(subprocess.Popen(arguments, env=environment, stdout=file, stderr=file))

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for process in self.processes:
            process.kill()
            process.wait()

    def finish(self, timeout_s=400):
        codes = [process.wait(timeout_s) for process in self.processes]
        assert codes == [0] * len(codes), "\n".join(log.read_text()[-3000:] for log in self.logs)

    def wait_until(self, condition, what, timeout_s=300):
        deadline = time.monotonic() + timeout_s
        while not condition():
            assert time.monotonic() < deadline, what
            alive = [process.poll() is None for process in self.processes]
            assert all(alive), "\n".join(log.read_text()[-3000:] for log in self.logs)
            time.sleep(0.05)


def config_of(run_dir, server):
    config = small_config(run_dir, server, num_updates=NUM_UPDATES, checkpoint_every_updates=2)
    mesh = {"mesh.fsdp": 2, "mesh.expert": 2, "learner.microbatch_rows": 4}
    return override(config, mesh)


@pytest.fixture(scope="module")
def password_file(server, tmp_path_factory):
    path = tmp_path_factory.mktemp("secret") / "password"
    path.write_text(server.password)
    return path


def result(run):
    """(trained tasks, arrays of the last checkpoint, weights of every version)."""
    assert run.audit().sound, run.audit().problems
    checkpoints = Checkpoints(run.run_dir / "checkpoints", keep=2)
    step = checkpoints.latest()
    assert step == NUM_UPDATES
    leaves = leaves_from_json(checkpoints._read_commit(step)["leaves"])
    state = read_arrays(checkpoints._path(step), leaves)
    weights_dir = run.run_dir / "weights"
    versions = {number: read(weights_dir, describe(weights_dir, number))[1] for number in committed(weights_dir)}
    return trained_tasks(run.run_dir), state, versions


@pytest.fixture(scope="module")
def one_process(server, password_file, tmp_path_factory):
    with ScriptedRun(config_of(tmp_path_factory.mktemp("one"), server), server) as run:
        with LearnerProcesses(run, password_file, num=1, devices=4) as learner:
            learner.finish()
        return result(run)


def test_loss_01_two_processes_train_publish_and_resume_as_one(one_process, server, password_file, tmp_path):
    """Both are killed on the way: with the second gone the first ends by itself, and both resume where they stood."""
    with ScriptedRun(config_of(tmp_path, server), server) as run:
        with LearnerProcesses(run, password_file, num=2, devices=2) as learner:
            reached = lambda: (state := run.control.learner()) is not None and state.update >= 3  # noqa: E731
            learner.wait_until(reached, "update 3 was never reached")
            os.kill(learner.processes[1].pid, signal.SIGKILL)
            assert learner.processes[0].wait(200) != 0
        with LearnerProcesses(run, password_file, num=2, devices=2) as learner:
            learner.finish()
        tasks, state, versions = result(run)
    expected_tasks, expected_state, expected_versions = one_process
    assert tasks == expected_tasks
    assert versions.keys() == expected_versions.keys()
    assert versions.keys() >= {0, NUM_UPDATES}
    for number, weights in versions.items():
        for name, value in weights.items():
            np.testing.assert_allclose(value, expected_versions[number][name], atol=1e-5, err_msg=f"v{number} {name}")
    assert state.keys() == expected_state.keys()
    for name, value in state.items():
        np.testing.assert_allclose(value, expected_state[name], atol=1e-5, err_msg=name)
