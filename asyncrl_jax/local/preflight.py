"""What can be known to be wrong before anything is started. Each finding is one line that names the remedy."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import shutil
import socket
import subprocess
import sys
import traceback
from collections.abc import Callable
from pathlib import Path

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_hf import read_teachers
from asyncrl_jax.local.environment import child_environment, divide_cores, redis_password
from asyncrl_jax.observe.writers import PACKAGES

MIN_FREE_BYTES = 512 * 2**20  # a quickstart run leaves well under this
MEMORY_PER_PROCESS_BYTES = 700 * 2**20  # of the learner and of each actor

_PACKAGES = (
    "fastavro",
    "flax",
    "grain",
    "jax",
    "matplotlib",
    "optax",
    "orbax",
    "reasoning_gym",
    "redis",
    "tensorstore",
)


_STORES = {"": ("", ""), "file": ("", ""), "gs": ("gcsfs", "gcs"), "s3": ("s3fs", "s3")}  # package, and our extra
DEVICES_LIMIT_S = 120.0
OVERLAP_TASKS_PER_LEVEL = 100  # that the splits are compared on
MOST_NEAR = 0.05  # share of held-out prompts that may be nearly the same as a training prompt


@dataclasses.dataclass(frozen=True)
class Check:
    """A thing looked at. `problem` is empty when it is in order; a warning does not stop the run."""

    name: str
    found: str
    problem: str = ""
    warning: bool = False

    @property
    def failed(self) -> bool:
        return bool(self.problem) and not self.warning


def check_all(config: Config, run_dir: Path, *, own_server: bool, resume: bool) -> list[Check]:
    """Every check, in the order in which a user would mend things.

    Args:
      own_server: the launcher will start a Redis of its own.
      resume: the run directory exists and is gone on with.
    """
    checks: list[Callable[[], Check]] = [
        _packages,
        lambda: _environment(config),
        lambda: _engines(config),
        lambda: _splits(config),
        lambda: _devices(config),
        lambda: _cores(config),
        lambda: _writers(config),
        lambda: _fleet(config),
        lambda: _weights(config),
        lambda: _directory(run_dir, resume),
        lambda: _disk(run_dir),
        lambda: _port(config) if own_server else _server(config, resume),
        lambda: _demonstrations(config),
        lambda: _teachers(config),
        lambda: _process_model(config),
        lambda: _memory(config),
    ]
    return [check() for check in checks]


def _packages() -> Check:
    missing = [name for name in _PACKAGES if importlib.util.find_spec(name) is None]
    problem = f"not installed: {', '.join(missing)}; run `make install`" if missing else ""
    return Check("packages", "all there", problem)


def _environment(config: Config) -> Check:
    from asyncrl_jax.actor.envs.registry import make_environments

    try:
        make_environments(config)
    except ValueError as error:
        return Check("environment", config.environment.name, str(error))
    return Check("environment", config.environment.name)


def _engines(config: Config) -> Check:
    """Where actors run here: elsewhere they have packages of their own."""
    from asyncrl_jax.actor.engines.registry import check_installed

    fleet = config.orchestrator.fleet
    engines = sorted({config.actor_of(one.name).engine for one in fleet.host_classes})
    for engine in engines if fleet.kind == "local" else ():
        try:
            check_installed(override(config, {"actor.engine": engine}))
        except ValueError as error:
            return Check("engine", engine, str(error))
    return Check("engine", ", ".join(engines))


def _splits(config: Config) -> Check:
    """Looks for held-out tasks among the training tasks, in the first of each level."""
    from asyncrl_jax.actor.envs.overlap import check_splits
    from asyncrl_jax.actor.envs.registry import make_environments

    if config.environment.name.startswith("agent:"):
        return Check("task splits", "not looked at: the agent makes its own tasks")
    if config.environment.name.startswith("verifiers:"):
        return _verifiers_splits(config)
    try:
        environment = make_environments(config)
    except ValueError:
        return Check("task splits", "not looked at: the environment can't be made")
    levels = range(1, len(config.environment.level_weights) + 1)
    try:
        found = check_splits(environment, levels, OVERLAP_TASKS_PER_LEVEL)
    except Exception as error:  # noqa: BLE001 - whatever an environment of others does
        reason = f"its first tasks can't be made: {type(error).__name__}: {error} ({_place(error)})"
        return Check("task splits", "", f"--config.environment.name={config.environment.name}: {reason}")
    (shortest, longest), most = found.lengths, config.environment.max_tokens
    if longest >= most:
        problem = (
            f"--config.environment.max_tokens={most}: a prompt has {longest} tokens, and no answer fits behind it; "
            "raise it, with --config.model.max_positions and --config.learner.pack_tokens"
        )
        return Check("task splits", f"prompts of {shortest} to {longest} tokens", problem, warning=shortest < most)
    counts = f"{found.num_train} training and {found.num_heldout} held-out prompts"
    if found.exact:
        problem = (
            f"{len(found.exact)} of {counts} are in both: success on held-out tasks would mean nothing; have tasks "
            "drawn from more, or leave out levels that have few: --config.environment.level_weights=0,1"
        )
        return Check("task splits", counts, problem)
    if found.near_share > MOST_NEAR:
        problem = f"{len(found.near)} of {counts} are nearly the same as a training prompt"
        return Check("task splits", counts, problem, warning=True)
    return Check("task splits", f"{counts}, {len(found.near)} nearly the same")


def _place(error: Exception) -> str:
    """Where it was raised: file and line of the innermost code that is not of an installed package."""
    frames = traceback.extract_tb(error.__traceback__)
    installed = (sys.base_prefix, sys.prefix, "<")
    own = [frame for frame in frames if not frame.filename.startswith(installed)] or frames
    return f"{own[-1].filename}:{own[-1].lineno}"


def _verifiers_splits(config: Config) -> Check:
    """Loads the environment in a process, which compares the splits itself, of all tasks."""
    from asyncrl_jax.actor.envs.registry import make_environments
    from asyncrl_jax.actor.envs.verifiers_env import check_starts

    try:
        make_environments(config)
    except ValueError:
        return Check("task splits", "not looked at: the environment can't be made")
    return Check("task splits", "compared by the environment's process", check_starts(config.environment))


def _writers(config: Config) -> Check:
    missing = [name for name in config.observe.writers if importlib.util.find_spec(PACKAGES[name]) is None]
    extras = ",".join(missing)
    problem = f"--config.observe.writers={extras}: needs pip install 'asyncrl-jax[{extras}]'" if missing else ""
    return Check("metric writers", ", ".join(config.observe.writers) or "none besides the files", problem)


def _fleet(config: Config) -> Check:
    from asyncrl_jax.orchestrator.fleets.opening import check_installed

    kind = config.orchestrator.fleet.kind
    try:
        check_installed(config.orchestrator.fleet)
    except ValueError as error:
        return Check("fleet", kind, str(error))
    return Check("fleet", kind)


def _devices(config: Config) -> Check:
    """Asks a process of its own, as the learner will see them: looking at an accelerator takes hold of it."""
    mesh = config.mesh
    needed = mesh.data * mesh.fsdp * mesh.expert * mesh.tensor
    if needed == 1:
        return Check("devices", "one is enough")
    command = [sys.executable, "-c", "import jax; print(jax.device_count())"]
    asked = subprocess.run(
        command, check=False, env=child_environment(os.environ), capture_output=True, text=True, timeout=DEVICES_LIMIT_S
    )
    found = asked.stdout.strip() if asked.returncode == 0 else "0"
    problem = f"--config.mesh asks for {needed} devices, JAX sees {found}" if int(found) < needed else ""
    return Check("devices", f"{found} devices for a mesh of {needed}", problem)


def _cores(config: Config) -> Check:
    try:
        learner, rest = divide_cores(config.learner.cpu_cores)
    except ValueError as error:
        return Check("cores", "", str(error))
    return Check("cores", f"{len(learner)} for the learner, {len(rest)} for the rest" if learner else "shared by all")


def _weights(config: Config) -> Check:
    scheme = config.weights.directory.partition("://")[0] if "://" in config.weights.directory else ""
    package, extra = _STORES.get(scheme, ("", ""))
    problem = ""
    if scheme not in _STORES:
        problem = f"--config.weights.directory={config.weights.directory}: use a path, gs:// or s3://"
    elif package and importlib.util.find_spec(package) is None:
        problem = f"--config.weights.directory={config.weights.directory}: needs pip install 'asyncrl-jax[{extra}]'"
    return Check("weights", config.weights.directory or "in the run directory", problem)


def _directory(run_dir: Path, resume: bool) -> Check:
    if not resume and run_dir.exists() and any(run_dir.iterdir()):
        problem = f"{run_dir} is not empty: go on with it by --resume={run_dir}, or name another by --config.run_dir"
        return Check("run directory", str(run_dir), problem)
    existing = _nearest_existing(run_dir)
    problem = ""
    if not existing.is_dir():
        problem = f"--config.run_dir={run_dir}: {existing} is not a directory"
    elif not os.access(existing, os.W_OK | os.X_OK):
        problem = f"--config.run_dir={run_dir}: no right to write in {existing}"
    return Check("run directory", str(run_dir), problem)


def _disk(run_dir: Path) -> Check:
    free = shutil.disk_usage(_nearest_existing(run_dir)).free
    found = f"{free / 2**30:.1f} GiB free"
    if free >= MIN_FREE_BYTES:
        return Check("disk", found)
    return Check("disk", found, f"{found} for {run_dir}, at least {MIN_FREE_BYTES / 2**30:.1f} GiB is needed")


def _port(config: Config) -> Check:
    port = config.redis.port
    if port == 0:
        return Check("redis", "own server on a free loopback port")
    with socket.socket() as probe:
        probe.setsockopt(
            socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
        )  # as the server does: a closed one does not block it
        try:
            probe.bind(("127.0.0.1", port))
        except OSError as error:
            problem = f"--config.redis.port={port}: {error.strerror}; choose another, or 0 for any free one"
            return Check("redis", f"port {port}", problem)
    return Check("redis", f"own server on loopback port {port}")


def _server(config: Config, resume: bool) -> Check:
    from asyncrl_jax.transport.connection import RedisUnavailable, connect
    from asyncrl_jax.transport.keys import Keys

    found = f"server at {config.redis.url}"
    try:
        with connect(dataclasses.replace(config.redis, outage_s=3.0), redis_password(config.redis)) as client:
            used = client.exists(Keys(config.redis.namespace).epoch)
    except (RedisUnavailable, ValueError) as error:
        return Check("redis", found, str(error))
    if used and not resume:
        problem = f"--config.redis.namespace={config.redis.namespace}: {config.redis.url} holds a run of this name"
        return Check("redis", found, f"{problem}; choose another, or go on with that run by --resume")
    return Check("redis", found)


def _demonstrations(config: Config) -> Check:
    path = config.warm_start.demonstrations
    if config.warm_start.num_steps == 0:
        return Check("demonstrations", "none needed")
    if path and not Path(path).is_file():
        return Check("demonstrations", path, f"--config.warm_start.demonstrations={path}: no such file")
    if not path and config.environment.name != "arithmetic":
        problem = (
            f"--config.warm_start.num_steps={config.warm_start.num_steps}: 0, since {config.environment.name} has no "
            "scripted policy; or name a file, --config.warm_start.demonstrations"
        )
        return Check("demonstrations", "none", problem)
    return Check("demonstrations", path or "written at the start of the run")


def _process_model(config: Config) -> Check:
    process, problem = config.reward.process, ""
    if process.url and importlib.util.find_spec("httpx") is None:
        problem = f"--config.reward.process.url={process.url}: needs pip install 'asyncrl-jax[process]'"
    elif process.url and process.key_variable and not os.environ.get(process.key_variable):
        problem = f"--config.reward.process.key_variable={process.key_variable}: the variable is not set"
    elif process.model:
        from asyncrl_jax.actor.process_rewards.annotated import Annotator, read_model

        try:
            Annotator(process, read_model(process).vocab_size)
        except ValueError as error:
            problem = str(error)
    return Check("process reward model", process.url or process.model or "none", problem)


def _teachers(config: Config) -> Check:
    teachers = config.learner.distill.teachers
    names = ", ".join(teachers)
    try:
        read_teachers(teachers, config.model.vocab_size)
    except ValueError as error:
        return Check("teachers", names, str(error))
    return Check("teachers", names or "none needed")


def _memory(config: Config) -> Check:
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    scale = config.orchestrator.autoscale
    most = scale.max_actors if scale.enabled and config.orchestrator.fleet.kind == "local" else config.actor.num_hosts
    needed = MEMORY_PER_PROCESS_BYTES * (1 + most)
    found = f"{total / 2**30:.1f} GiB of memory, {os.cpu_count()} cores"
    if total >= needed:
        return Check("machine", found)
    flag = "orchestrator.autoscale.max_actors" if most != config.actor.num_hosts else "actor.num_hosts"
    problem = f"{found}: {most} actors may not fit, lower --config.{flag}"
    return Check("machine", found, problem, warning=True)


def _nearest_existing(path: Path) -> Path:
    path = path.absolute()
    while not path.exists():
        path = path.parent
    return path
