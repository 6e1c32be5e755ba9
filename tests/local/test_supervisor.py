import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from asyncrl_jax.local import supervisor as module
from asyncrl_jax.local.supervisor import Part, PartFailed, Supervisor, spawn

SLEEP = "exec sleep 60"


@pytest.fixture
def supervisor():
    made = Supervisor(notify=lambda message: None)
    yield made
    made.stop(timeout_s=0.2)


def shell(tmp_path: Path, name: str, script: str, foundation: bool = False) -> Part:
    log = tmp_path / f"{name}.log"
    return Part(name, lambda: spawn(["sh", "-c", script], os.environ, log), log, foundation)


def poll_until(supervisor: Supervisor, condition, limit_s: float = 10.0, ending: bool = False):
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline:
        closed = supervisor.poll(ending=ending)
        if condition() or closed:
            return closed
        time.sleep(0.01)
    raise AssertionError("the condition did not come true in time")


def test_a_killed_part_is_started_again(tmp_path, supervisor):
    supervisor.start(shell(tmp_path, "actor-0", SLEEP))
    first = supervisor.process("actor-0")
    os.kill(first.pid, signal.SIGKILL)
    poll_until(supervisor, lambda: supervisor.process("actor-0") is not first)
    assert supervisor.process("actor-0").poll() is None
    assert supervisor.restarts == {"actor-0": 1}


def test_restarts_wait_twice_as_long_each_time(tmp_path):
    now = [0.0]
    supervisor = Supervisor(notify=lambda message: None, clock=lambda: now[0])
    supervisor.start(shell(tmp_path, "actor-0", "exit 3"))
    waits = []
    for _ in range(3):
        now[0] += module.EARLY_S + 1  # not an early crash
        supervisor.process("actor-0").wait()
        supervisor.poll(ending=False)
        before, process = now[0], supervisor.process("actor-0")
        while supervisor.process("actor-0") is process:
            now[0] += 0.25
            supervisor.poll(ending=False)
        waits.append(now[0] - before)
    supervisor.stop()
    assert waits == [0.5, 1.0, 2.0]


def test_too_many_restarts_in_the_window_fail_the_run(tmp_path):
    now = [0.0]
    supervisor = Supervisor(notify=lambda message: None, clock=lambda: now[0])
    supervisor.start(shell(tmp_path, "learner", SLEEP))

    def kill_and_restart():
        process = supervisor.process("learner")
        process.kill()
        process.wait()
        supervisor.poll(ending=False)
        now[0] += 16.0  # longer than any pause before a restart, six of them within the window
        supervisor.poll(ending=False)

    for _ in range(module.MAX_RESTARTS):
        kill_and_restart()
    with pytest.raises(PartFailed, match="learner ended by signal SIGKILL"):
        kill_and_restart()
    supervisor.stop()
    assert supervisor.restarts["learner"] == module.MAX_RESTARTS


def test_restarts_outside_the_window_are_forgiven(tmp_path):
    now = [0.0]
    supervisor = Supervisor(notify=lambda message: None, clock=lambda: now[0])
    supervisor.start(shell(tmp_path, "learner", SLEEP))
    for _ in range(module.MAX_RESTARTS + 2):
        process = supervisor.process("learner")
        process.kill()
        process.wait()
        supervisor.poll(ending=False)
        now[0] += module.RESTART_WINDOW_S + 1
        supervisor.poll(ending=False)
    supervisor.stop()
    assert supervisor.restarts["learner"] == module.MAX_RESTARTS + 2


@pytest.mark.parametrize("name", ["learner", "actor-0", "orchestrator"])
def test_ux_02_a_crash_at_start_twice_names_the_part_and_its_last_lines(tmp_path, supervisor, name):
    for other in {"learner", "actor-0", "orchestrator"} - {name}:
        supervisor.start(shell(tmp_path, other, SLEEP))
    supervisor.start(shell(tmp_path, name, "echo no such mesh axis >&2; exit 1"))
    started = time.monotonic()
    with pytest.raises(PartFailed, match=rf"(?s){name} ended by exit code 1.*no such mesh axis"):
        poll_until(supervisor, lambda: False)
    assert time.monotonic() - started < 5.0
    assert supervisor.restarts == {name: 1}


def test_exit_code_2_is_a_users_mistake_and_is_not_tried_again(tmp_path, supervisor):
    supervisor.start(shell(tmp_path, "learner", "echo seed=x: no number; exit 2"))
    with pytest.raises(PartFailed, match="seed=x: no number"):
        poll_until(supervisor, lambda: False)
    assert not supervisor.restarts


@pytest.mark.parametrize("script", ["exit 0", "kill -TERM $$"])
def test_a_part_closed_before_the_end_is_named_so_that_the_run_stops(tmp_path, supervisor, script):
    supervisor.start(shell(tmp_path, "actor-0", SLEEP))
    supervisor.start(shell(tmp_path, "actor-1", script))
    assert poll_until(supervisor, lambda: False) == "actor-1"


def test_a_part_may_close_at_the_end_of_the_run(tmp_path, supervisor):
    supervisor.start(shell(tmp_path, "learner", "exit 0"))
    supervisor.start(shell(tmp_path, "redis", SLEEP, foundation=True))
    assert poll_until(supervisor, supervisor.all_ended, ending=True) is None


def test_stop_ends_a_part_that_ignores_sigterm_and_what_it_started(tmp_path, supervisor):
    marker = tmp_path / "grandchild"
    supervisor.start(
        shell(tmp_path, "actor-0", f"trap '' TERM; sleep 60 & echo $! > {marker}; while :; do sleep 1; done")
    )
    poll_until(supervisor, lambda: marker.exists() and marker.read_text().strip())
    supervisor.stop(timeout_s=0.3)
    assert supervisor.process("actor-0").poll() == -signal.SIGKILL
    wait_for(lambda: not running(int(marker.read_text())))


def test_the_foundation_is_stopped_after_the_roles(tmp_path, supervisor):
    order = tmp_path / "order"
    script = "trap 'echo {0} >> {1}; exit 0' TERM; touch {1}.{0}; while :; do sleep 0.02; done"
    supervisor.start(shell(tmp_path, "redis", script.format("redis", order), foundation=True))
    supervisor.start(shell(tmp_path, "learner", script.format("learner", order)))
    poll_until(supervisor, lambda: Path(f"{order}.redis").exists() and Path(f"{order}.learner").exists())
    supervisor.stop()
    assert order.read_text().split() == ["learner", "redis"]


def test_children_die_with_a_launcher_that_is_killed(tmp_path):
    pid_file = tmp_path / "child"
    child = f"""
import os, time, pathlib
from asyncrl_jax.lifetime import die_with_parent
die_with_parent()
pathlib.Path({str(pid_file)!r}).write_text(str(os.getpid()))
time.sleep(60)
"""
    parent = f"""
import os, sys, time, pathlib
from asyncrl_jax.local.environment import child_environment
from asyncrl_jax.local.supervisor import spawn
spawn([sys.executable, "-c", {child!r}], child_environment(os.environ), pathlib.Path({str(tmp_path / "log")!r}))
time.sleep(60)
"""
    launcher = subprocess.Popen([sys.executable, "-c", parent])
    wait_for(lambda: pid_file.exists() and pid_file.read_text())
    launcher.kill()
    launcher.wait()
    wait_for(lambda: not running(int(pid_file.read_text())))


def wait_for(condition, limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.02)


def running(pid: int) -> bool:
    """Whether a process exists and is no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


def test_a_retired_part_ends_and_is_forgotten_and_the_run_goes_on(tmp_path, supervisor):
    supervisor.start(shell(tmp_path, "actor-0", SLEEP))
    supervisor.start(shell(tmp_path, "actor-1", SLEEP))
    retired = supervisor.process("actor-1")
    supervisor.retire("actor-1")
    assert poll_until(supervisor, lambda: retired.poll() is not None) is None
    assert supervisor.poll(ending=False) is None, "its end does not end the run"
    assert supervisor.process("actor-0").poll() is None
    assert supervisor.restarts == {}
    with pytest.raises(KeyError):
        supervisor.process("actor-1")


def test_a_retired_part_that_does_not_close_is_killed(tmp_path, supervisor, monkeypatch):
    monkeypatch.setattr(module, "STOP_S", 0.2)
    script = "trap '' TERM; echo > ready; while :; do sleep 0.1; done".replace("ready", str(tmp_path / "ready"))
    supervisor.start(shell(tmp_path, "actor-0", script))
    deaf = supervisor.process("actor-0")
    poll_until(supervisor, (tmp_path / "ready").exists)
    supervisor.retire("actor-0")
    poll_until(supervisor, lambda: deaf.poll() is not None)
    assert deaf.returncode == -signal.SIGKILL
