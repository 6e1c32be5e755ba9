"""The launcher as a user meets it: real processes and a real Redis, with fake roles in place of training."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.parse
from pathlib import Path

import pytest

from asyncrl_jax.config import Config
from asyncrl_jax.config_file import read_config, write_config
from asyncrl_jax.local import run
from asyncrl_jax.local.environment import redis_password
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.steering import Directives, Steering
from asyncrl_jax.types import Decision

LAUNCH = str(Path(__file__).with_name("launch.py"))
FOREVER = "100000"
ROLES = ("learner", "orchestrator", "actor-0", "actor-1")


def launch(how: str, run_dir: Path, num_updates: str, *settings: str, **variables: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, LAUNCH, how, str(run_dir), num_updates, *settings],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
    )


@contextlib.contextmanager
def running_launcher(run_dir: Path, num_updates: str = FOREVER, *settings: str):
    """A launcher whose parts are all up; it is gone at the end, whatever happened."""
    launcher = launch("new", run_dir, num_updates, *settings)
    try:
        wait_for(lambda: set(ROLES) <= set(parts(launcher.pid)) and state_of(run_dir) > 0, launcher)
        yield launcher
    finally:
        launcher.kill()
        launcher.communicate()


def state_of(run_dir: Path) -> int:
    """Rows that the learner has written."""
    path = run_dir / "metrics" / "learner.jsonl"
    return len(path.read_text().splitlines()) if path.exists() else 0


def parts(launcher_pid: int) -> dict[str, int]:
    """Process ids of the launcher's children by part."""
    found = {}
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = status.read_text().rsplit(")", 1)[1].split()[:2]
            command = (status.parent / "cmdline").read_text().split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(parent) != launcher_pid or state in ("Z", "X"):
            continue
        actor = [argument.split("=")[1] for argument in command if argument.startswith("--actor_id=")]
        role = [name for name in ("learner", "orchestrator", "demonstrations") if name in command]
        found[(actor or role or ["redis"])[0]] = int(status.parent.name)
    return found


def wait_for(condition, launcher: subprocess.Popen[str], limit_s: float = 30.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert launcher.poll() is None, launcher.communicate()
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def kill_and_await_restart(launcher: subprocess.Popen[str], part: str) -> None:
    pid = parts(launcher.pid)[part]
    os.kill(pid, signal.SIGKILL)
    wait_for(lambda: parts(launcher.pid).get(part, pid) != pid, launcher)


def gone(pids) -> bool:
    return not any(Path(f"/proc/{pid}").exists() for pid in pids)


def test_a_run_ends_with_its_report(tmp_path):
    run_dir = tmp_path / "runs" / "first"
    output, errors = (launcher := launch("new", run_dir, "8")).communicate(timeout=60)
    assert launcher.returncode == 0, errors
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["success_by_level_after"] == {"1": 0.5, "2": 0.4, "3": 0.1}
    assert (tmp_path / "runs" / "latest").resolve() == run_dir
    for name in ("run.png", "run.html", "record.json", "config.json", "demonstrations.avro"):
        assert (run_dir / name).stat().st_size > 0, name
    assert str(run_dir / "run.html") in output
    assert state_of(run_dir) == 8


@pytest.mark.parametrize("role", ["learner", "demonstrations"])
def test_ux_02_a_crash_at_start_ends_the_run_and_names_the_part(tmp_path, role):
    launcher = launch("new", tmp_path / "run", FOREVER, FAKE_CRASH=role)
    _, errors = launcher.communicate(timeout=30)
    assert launcher.returncode == 1
    assert f"{role}: no such mesh axis" in errors
    assert "error: " + role in errors


def test_ux_06_sigterm_stops_everything_and_the_run_can_be_resumed(tmp_path):
    with running_launcher(tmp_path / "run") as launcher:
        children = parts(launcher.pid)
        started = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        output, _ = launcher.communicate(timeout=20)
        assert time.monotonic() - started < 10.0
        assert launcher.returncode == 143
        assert f"--resume={tmp_path / 'run'}" in output
        assert gone(children.values())
    done = state_of(tmp_path / "run")
    launcher = launch("resume", tmp_path / "run", str(done + 3))
    _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert state_of(tmp_path / "run") == done + 3
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["sessions"] == 2


def test_ux_06_ctrl_c_during_start_stops_everything(tmp_path):
    launcher = launch("new", tmp_path / "run", FOREVER)
    wait_for(lambda: "redis" in parts(launcher.pid), launcher)
    children = parts(launcher.pid)
    launcher.send_signal(signal.SIGINT)
    launcher.communicate(timeout=20)
    assert launcher.returncode == 130
    assert gone(children.values())


def test_closing_one_part_stops_the_run(tmp_path):
    with running_launcher(tmp_path / "run") as launcher:
        children = parts(launcher.pid)
        os.kill(children["actor-1"], signal.SIGTERM)
        output, _ = launcher.communicate(timeout=20)
        assert launcher.returncode == 143
        assert "actor-1 was closed" in output
        assert gone(children.values())


def test_killed_parts_are_started_again_and_the_run_finishes(tmp_path):
    with running_launcher(tmp_path / "run", "100") as launcher:
        config = (tmp_path / "run" / "config.json").read_text()
        for part in ("redis", "learner"):
            kill_and_await_restart(launcher, part)
        output, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert "redis ended by signal SIGKILL; it is started again" in output
    assert json.loads((tmp_path / "run" / "summary.json").read_text())["restarts"] == {"learner": 1, "redis": 1}
    assert (tmp_path / "run" / "config.json").read_text() == config  # the same port


def test_nothing_survives_a_killed_launcher_and_no_command_line_holds_the_password(tmp_path):
    with running_launcher(tmp_path / "run") as launcher:
        children = parts(launcher.pid)
        password = (tmp_path / "run" / "redis" / "redis.password").read_text().strip()
        for pid in (launcher.pid, *children.values()):
            assert password not in Path(f"/proc/{pid}/cmdline").read_text()
        assert password not in (tmp_path / "run" / "config.json").read_text()
        second = launch("resume", tmp_path / "run", FOREVER)
        _, errors = second.communicate(timeout=20)
        assert second.returncode == 2
        assert "another asyncrl-local is running this run" in errors
        launcher.kill()
        launcher.wait()
        deadline = time.monotonic() + 10
        while not gone(children.values()) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert gone(children.values())


def test_ux_06_a_redis_that_hangs_does_not_delay_the_stop(tmp_path):
    with running_launcher(tmp_path / "run") as launcher:
        children = parts(launcher.pid)
        os.kill(children["redis"], signal.SIGSTOP)
        time.sleep(1.0)  # by now everybody waits for an answer
        started = time.monotonic()
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=40)
        assert time.monotonic() - started < 10.0
        assert launcher.returncode == 143
        assert gone(children.values())


def test_a_run_whose_port_was_taken_meanwhile_is_resumed_on_another(tmp_path):
    run_dir = tmp_path / "run"
    with running_launcher(run_dir) as launcher:
        launcher.send_signal(signal.SIGTERM)
        launcher.communicate(timeout=20)
    before = read_config(run_dir / "config.json").redis.url
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", urllib.parse.urlsplit(before).port))
        taken.listen()
        launcher = launch("resume", run_dir, str(state_of(run_dir) + 3))
        _, errors = launcher.communicate(timeout=60)
    assert launcher.returncode == 0, errors
    assert read_config(run_dir / "config.json").redis.url != before


def test_a_finished_run_resumes_to_one_line(tmp_path, capsys):
    write_config(tmp_path / "config.json", Config())
    updates = Config().learner.num_updates
    (tmp_path / "summary.json").write_text(json.dumps({"updates": updates}))
    assert run.resume_run(tmp_path, {}) == 0
    (line,) = capsys.readouterr().out.splitlines()
    assert f"finished, with {updates} updates" in line
    assert "--config.learner.num_updates=" in line


def test_the_launcher_has_the_actors_and_the_learner_that_the_orchestrator_asks_for(tmp_path):
    run_dir = tmp_path / "run"
    with running_launcher(run_dir) as launcher:
        config = read_config(run_dir / "config.json")
        steering = Steering(connect(config.redis, redis_password(config.redis)), Keys(config.redis.namespace))
        first = parts(launcher.pid)
        steering.commit({}, Directives(fleet_size=3))
        wait_for(lambda: "actor-2" in parts(launcher.pid), launcher)
        steering.commit({}, Directives(fleet_size=1, learner_copies=2))
        wait_for(lambda: not {"actor-1", "actor-2"} & parts(launcher.pid).keys(), launcher)
        wait_for(lambda: parts(launcher.pid).get("learner", first["learner"]) != first["learner"], launcher)
        command = Path(f"/proc/{parts(launcher.pid)['learner']}/cmdline").read_text().split("\0")
        assert "--config.mesh.data=2" in command
        assert {name: parts(launcher.pid)[name] for name in ("actor-0", "orchestrator", "redis")} == {
            name: first[name] for name in ("actor-0", "orchestrator", "redis")
        }, "nobody else is touched"


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="needs two cores")
def test_the_console_says_what_the_orchestrator_finds_wrong(tmp_path):
    with running_launcher(tmp_path / "run") as launcher:
        config = read_config(tmp_path / "run" / "config.json")
        client = connect(config.redis, redis_password(config.redis))
        faults = Decision("breaker", "open", "environment:mine", "20 faults of one kind: KeyError('my bug')")
        passed = Decision("regression", "pass", "v0", "within noise, or better")
        usual = Decision("watermark", "halve", "admission", "the learner is behind")
        Steering(client, Keys(config.redis.namespace)).commit({}, None, [usual, passed, faults])
        told = next(line for line in launcher.stdout if line.startswith(("breaker", "watermark", "regression")))
        launcher.terminate()
        said, _ = launcher.communicate(timeout=20)
    assert told == "breaker: open environment:mine, 20 faults of one kind: KeyError('my bug')\n"
    assert "breaker" not in said, "once"


def test_the_learner_has_its_cores_alone(tmp_path):
    with running_launcher(tmp_path / "run", FOREVER, "learner.cpu_cores=1") as launcher:
        cores = {part: os.sched_getaffinity(pid) for part, pid in parts(launcher.pid).items()}
        learners, rest = cores.pop("learner"), set.union(*cores.values())
        assert len(learners) == 1
        assert cores.keys() >= {"redis", "orchestrator", "actor-0"}
        assert learners | rest == os.sched_getaffinity(0)
        assert not learners & rest
        kill_and_await_restart(launcher, "learner")
        wait_for(lambda: os.sched_getaffinity(parts(launcher.pid)["learner"]) == learners, launcher)
