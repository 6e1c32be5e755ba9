"""A run on one machine, from its directory to its report.

    new_run | resume_run → preflight → directory, record → Redis → demonstrations → learner, actors, orchestrator
                         → display until the run is finished → report

Exit codes are those of `exit_codes.py`. A run that failed or was stopped can be resumed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import redis as redis_client
from rich.console import Console

from asyncrl_jax import exit_codes
from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import read_config, write_config
from asyncrl_jax.local import preflight
from asyncrl_jax.local.environment import (
    PASSWORD_VARIABLE,
    child_environment,
    divide_cores,
    learner_environment,
    redis_password,
)
from asyncrl_jax.local.fleet import LocalFleet
from asyncrl_jax.local.supervisor import Part, PartFailed, Supervisor, failure, spawn
from asyncrl_jax.observe.display import Display, Snapshot, read_snapshot
from asyncrl_jax.observe.record import write_record
from asyncrl_jax.observe.summary import collect_run
from asyncrl_jax.transport.connection import RedisUnavailable, connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.server import Server, start_server
from asyncrl_jax.transport.steering import Steering

DEMONSTRATIONS_LIMIT_S = 600.0
CLOSING_LIMIT_S = 60.0  # for parts to end by themselves once the run is finished
# The launcher never waits long for Redis: it is the one that must start it again.
_PATIENCE_S = 0.2
_ANSWER_S = 0.5  # nor for an answer: it must hear that it is to stop, whatever Redis does
_REPORT_PATIENCE_S = 10.0  # the report is worth a wait
_TICK_S = 0.1
_REFRESH_S = 0.5  # between looks at Redis
_FULL_DISK_BYTES = 8 * 2**20
_TOLD_POLICIES = ("agreement", "breaker", "drift", "regression")  # whose decisions say that something is wrong


def new_run(config: Config, *, dry_run: bool = False) -> int:
    """Starts a run in a directory of its own and stays until it ends.

    Returns:
      The exit code.
    """
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{config.mode}-{config.seed}"
    run_dir = Path(config.run_dir or Path("runs") / name).absolute()
    return _checked_run(config, run_dir, own_server=not config.redis.url, resume=False, dry_run=dry_run)


def resume_run(run_dir: Path, changes: dict[str, Any], *, dry_run: bool = False) -> int:
    """Goes on with a run that was stopped, killed or finished.

    Args:
      changes: settings that differ from the run's config.json, by dotted name.

    Returns:
      The exit code.
    """
    run_dir = run_dir.resolve()  # runs/latest is a link that may point elsewhere later
    own_server = (run_dir / "redis").is_dir()
    try:
        config = override(read_config(run_dir / "config.json"), changes)
    except ValueError as error:
        return _mistake(f"--resume={run_dir}: {error}")
    if own_server:
        config = override(config, {"redis.url": "", "redis.password_file": ""})
    if (done := _finished_updates(run_dir)) >= config.learner.num_updates:
        print(f"{run_dir} is finished, with {done} updates; for more: --config.learner.num_updates={2 * done}")
        return exit_codes.FINISHED
    return _checked_run(config, run_dir, own_server=own_server, resume=True, dry_run=dry_run)


def _finished_updates(run_dir: Path) -> int:
    """Updates of a run that has its report; 0 for one that has not come to its end."""
    path = run_dir / "summary.json"
    return int(json.loads(path.read_text())["updates"]) if path.exists() else 0


def _checked_run(config: Config, run_dir: Path, *, own_server: bool, resume: bool, dry_run: bool) -> int:
    checks = preflight.check_all(config, run_dir, own_server=own_server, resume=resume)
    for check in checks:
        if check.warning:
            print(f"warning: {check.problem}", file=sys.stderr)
    failed = [check for check in checks if check.failed]
    if dry_run:
        for check in checks:
            print(f"{'FAILED' if check.failed else 'ok':>6}  {check.name}: {check.problem or check.found}")
        return exit_codes.USER_ERROR if failed else exit_codes.FINISHED
    if failed:
        return _mistake(failed[0].problem)
    try:
        with _locked(run_dir):
            return LocalRun(config, run_dir, own_server=own_server, resume=resume).execute()
    except ValueError as error:
        return _mistake(str(error))
    except OSError as error:  # the launcher's own files; a part's errors end that part
        return _mistake(f"{error.filename or run_dir}: {error.strerror}")


def _mistake(message: str) -> int:
    print(f"{Path(sys.argv[0]).name}: error: {message}", file=sys.stderr)
    return exit_codes.USER_ERROR


@contextlib.contextmanager
def _locked(run_dir: Path) -> Iterator[None]:
    """Holds the run directory against a second launcher.

    Raises:
      ValueError: if another launcher holds it.
    """
    run_dir.mkdir(parents=True, exist_ok=True)
    with (run_dir / "launcher.lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"{run_dir}: another asyncrl-local is running this run") from error
        yield


class LocalRun:
    """One session of a run: its processes, from start to end."""

    def __init__(self, config: Config, run_dir: Path, *, own_server: bool, resume: bool):
        self._config = config
        self._run_dir = run_dir
        self._own_server = own_server
        self._resume = resume
        self._signal: int | None = None
        self._console = Console()
        self._environment = child_environment(os.environ)
        self._learner_cores, self._other_cores = divide_cores(config.learner.cpu_cores)
        self._supervisor = Supervisor(notify=self._say)
        self._supervisor.restarts.update(read_restarts(run_dir))
        self._fleet = LocalFleet(self._supervisor, self._actor)
        self._told = "0"  # the newest decision that the console has been told, or that is of an earlier session
        self._copies: int | None = None  # of the weights, in the mesh of the learner that runs

    def execute(self) -> int:
        """Runs the session; every process that it started has ended when it returns."""
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(number, self._on_signal)
        if self._other_cores:
            os.sched_setaffinity(0, self._other_cores)  # whatever it starts inherits them
        try:
            return self._session()
        except (PartFailed, RedisUnavailable) as error:
            self._supervisor.stop()
            print(f"error: {self._disk_hint()}{error}", file=sys.stderr)
            print(f"The run can be resumed: --resume={self._run_dir}", file=sys.stderr)
            return exit_codes.FAILED
        finally:
            self._supervisor.stop()

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number
        signal.signal(number, signal.SIG_DFL)  # asked a second time, it ends at once, and its children with it

    def _say(self, message: str) -> None:
        self._console.print(message, highlight=False, markup=False, soft_wrap=True)

    def _disk_hint(self) -> str:
        full = shutil.disk_usage(self._run_dir).free < _FULL_DISK_BYTES
        return f"the disk of {self._run_dir} is full. " if full else ""

    # -- start -------------------------------------------------------------------------------------------------------

    def _session(self) -> int:
        self._say(f"run directory {self._run_dir}")
        point_latest(self._run_dir)
        if self._own_server:
            self._start_server()
        config = self._config = override(self._config, {"run_dir": str(self._run_dir)})
        write_config(self._run_dir / "config.json", config)
        password = redis_password(config.redis)
        if password and not config.redis.password_file:
            self._environment[PASSWORD_VARIABLE] = password
        self._make_demonstrations()
        patient = connect(dataclasses.replace(config.redis, outage_s=_REPORT_PATIENCE_S), password)
        keys = Keys(config.redis.namespace)
        Control(patient, keys).reopen(by_hand=True)
        client = connect(dataclasses.replace(config.redis, outage_s=_PATIENCE_S), password, answer_s=_ANSWER_S)
        for part in self._parts():
            self._supervisor.start(part)
        self._follow_orders(patient)
        for one in Steering(patient, keys).newest_decisions(1):
            self._told = one.entry_id
        write_record(self._run_dir, config, self._environment)
        why = self._watch(client)
        if self._signal is not None or why is not None:
            return self._stopped(why)
        self._supervisor.stop_roles()
        from asyncrl_jax.observe.report import print_summary, write_report  # matplotlib: not before there is a picture

        summary = write_report(self._run_dir, collect_run(self._run_dir, config, patient, self._supervisor.restarts))
        print_summary(self._console, self._run_dir, summary)
        return exit_codes.FINISHED

    def _start_server(self) -> None:
        """Starts Redis under the supervisor and puts its address into the config."""
        directory, settings = self._run_dir / "redis", self._config.redis
        servers: list[Server] = []

        def start() -> subprocess.Popen[bytes]:
            port = servers[0].port if servers else settings.port  # the roles know the first one
            servers.append(start_server(directory, dataclasses.replace(settings, port=port)))
            return servers[-1].process

        self._supervisor.start(Part("redis", start, directory / "redis.log", foundation=True))
        changes = {"redis.url": servers[-1].url, "redis.password_file": str(directory / "redis.password")}
        self._config = override(self._config, changes)

    def _parts(self) -> list[Part]:
        """All but learner and actors, which follow orders."""
        standbys = range(1, self._config.orchestrator.num_instances)
        orchestrators = ["orchestrator", *(f"orchestrator-{index}" for index in standbys)]
        return [self._part(name, "orchestrator") for name in orchestrators]

    def _actor(self, name: str) -> Part:
        return self._part(name, "actor", f"--actor_id={name}")

    def _part(self, name: str, role: str, *arguments: str) -> Part:
        path = self._run_dir / "logs" / f"{name}.log"
        command = role_command(role, self._run_dir / "config.json", *arguments)
        environment, cores = self._environment, frozenset[int]()
        if role == "learner":
            environment, cores = learner_environment(environment), self._learner_cores
        return Part(name, lambda: spawn(command, environment, path, cores), path)

    def _follow_orders(self, client: redis_client.Redis) -> None:
        """Has the learner and as many actors as the orchestrator asks for; before it asked, as the settings say."""
        asked = Steering(client, Keys(self._config.redis.namespace)).directives()
        self._run_learner(asked.learner_copies or self._config.mesh.data)
        fleet = self._config.orchestrator.fleet
        if fleet.kind != "local":
            return  # the orchestrator asks a cluster for them
        members = fleet.members(self._config.actor.num_hosts if asked.fleet_size is None else asked.fleet_size)
        if members != (before := self._fleet.sizes()):
            self._fleet.resize(members)
            if before:
                self._say(f"the fleet is to have {', '.join(f'{size} × {name}' for name, size in members.items())}")

    def _run_learner(self, copies: int) -> None:
        """Starts it, or starts it again on another mesh: it resumes from its checkpoint."""
        if copies == self._copies:
            return
        if self._copies is not None:
            self._say(f"the learner is started again with mesh.data = {copies}")
            self._supervisor.retire("learner")
        self._copies = copies
        self._supervisor.start(self._part("learner", "learner", f"--config.mesh.data={copies}"))

    def _make_demonstrations(self) -> None:
        """Writes the demonstrations that the config asks for and that aren't there yet."""
        settings, path = self._config.warm_start, self._run_dir / "demonstrations.avro"
        if settings.demonstrations or settings.num_steps == 0 or path.exists():
            return
        self._say(f"writing {settings.num_demonstrations} demonstrations")
        log_path = self._run_dir / "logs" / "demonstrations.log"
        command = role_command("demonstrations", self._run_dir / "config.json", f"--output={path}")
        process = spawn(command, self._environment, log_path)
        deadline = time.monotonic() + DEMONSTRATIONS_LIMIT_S
        while process.poll() is None and self._signal is None and time.monotonic() < deadline:
            time.sleep(_TICK_S)
        process.kill()
        code = process.wait()
        if self._signal is None and code != 0:
            raise PartFailed(failure("demonstrations", log_path, code))

    # -- run ---------------------------------------------------------------------------------------------------------

    def _watch(self, client: redis_client.Redis) -> str | None:
        """Shows the run until it is finished or stopped. Returns why it stopped early, if nobody asked it to here."""
        snapshot: Snapshot | None = None
        looked_at, ending_since = -_REFRESH_S, 0.0
        with Display(self._config, self._console) as display:
            while self._signal is None:
                now = time.monotonic()
                if now - looked_at >= _REFRESH_S:
                    snapshot, looked_at = self._look(client) or snapshot, now
                    display.show(snapshot, self._supervisor.restarts)
                ending = snapshot is not None and snapshot.ending(self._config.learner.num_updates)
                closed = self._poll(ending)
                if closed is not None:
                    newest = self._look(client)  # the run may have ended since the last look
                    if newest is None or not newest.ending(self._config.learner.num_updates):
                        return (
                            "drained" if newest is not None and newest.phase == "stopping" else f"{closed} was closed"
                        )
                    snapshot = newest
                if snapshot is not None and snapshot.finished:
                    ending_since = ending_since or now
                    if self._supervisor.all_ended() or now - ending_since > CLOSING_LIMIT_S:
                        return None
                time.sleep(_TICK_S)
        return None

    def _poll(self, ending: bool) -> str | None:
        """Lets the supervisor act, and keeps what it restarted for the report."""
        before = sum(self._supervisor.restarts.values())
        try:
            return self._supervisor.poll(ending=ending)
        finally:
            if sum(self._supervisor.restarts.values()) != before:
                write_restarts(self._run_dir, self._supervisor.restarts)

    def _look(self, client: redis_client.Redis) -> Snapshot | None:
        """What Redis knows of the run; None while it is away, since then it must be started again first."""
        try:
            snapshot = read_snapshot(client, Keys(self._config.redis.namespace))
            if not snapshot.ending(self._config.learner.num_updates):
                self._follow_orders(client)
                self._tell_decisions(Steering(client, Keys(self._config.redis.namespace)))
            return snapshot
        except (RedisUnavailable, redis_client.RedisError):
            return None

    def _tell_decisions(self, steering: Steering) -> None:
        """Says what the orchestrator found wrong, why episodes fail for instance, since the last look."""
        for one in steering.decisions(self._told, 100):
            self._told = one.entry_id
            if one.decision.policy in _TOLD_POLICIES and one.decision.action != "pass":  # of an evaluation
                self._say(f"{one.decision.policy}: {one.decision.action} {one.decision.subject}, {one.decision.reason}")

    def _stopped(self, why: str | None) -> int:
        self._supervisor.stop()
        number = self._signal or signal.SIGTERM
        self._say(f"stopped ({why or signal.Signals(number).name}); go on with --resume={self._run_dir}")
        return exit_codes.INTERRUPTED if number == signal.SIGINT else exit_codes.TERMINATED


def role_command(role: str, config_file: Path, *arguments: str) -> list[str]:
    """What starts a role. No secret stands in it: any user of the machine can read command lines.

    -P: what is installed runs, also where the working directory is a checkout, which has no `asyncrl_jax/launchers`.
    """
    return [sys.executable, "-P", "-m", f"asyncrl_jax.launchers.{role}", f"--config_file={config_file}", *arguments]


def read_restarts(run_dir: Path) -> dict[str, int]:
    """Restarts by part in the sessions so far."""
    path = run_dir / "restarts.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_restarts(run_dir: Path, restarts: Mapping[str, int]) -> None:
    """Writes the file that `read_restarts` reads, whole or not at all."""
    draft = run_dir / "restarts.tmp"
    draft.write_text(json.dumps(restarts) + "\n")
    os.replace(draft, run_dir / "restarts.json")


def point_latest(run_dir: Path) -> None:
    """Makes `runs/latest` point at a run that is in `runs/`."""
    if run_dir.parent.name != "runs":
        return
    draft = run_dir.parent / f".latest-{os.getpid()}"
    draft.symlink_to(run_dir.name)
    os.replace(draft, run_dir.parent / "latest")
