"""The binaries of the roles, up to the point where a role begins."""

import contextlib
import subprocess
import sys

import pytest

from asyncrl_jax.config import Config
from asyncrl_jax.local.run import role_command
from asyncrl_jax.transport.server import start_server


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    server = start_server(tmp_path_factory.mktemp("redis"), Config().redis)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(server.stop)
        yield server


def start(role: str, *flags: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", f"asyncrl_jax.launchers.{role}", *flags]
    return subprocess.run(command, capture_output=True, text=True, timeout=30)


def test_a_wrong_password_is_one_clear_line(tmp_path, server):
    wrong = tmp_path / "password"
    wrong.write_text("guess")
    flags = [f"--config.redis.url={server.url}", f"--config.redis.password_file={wrong}"]
    done = start("actor", *flags, f"--config.run_dir={tmp_path / 'run'}")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "the password was refused" in done.stderr
    assert "guess" not in done.stderr


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ([], "--config.run_dir"),
        (["--config.run_dir=/proc/run"], "/proc/run"),
        (["--config.run_dir=RUN", "--config.redis.password_file=/nowhere"], "--config.redis.password_file=/nowhere"),
        (["--config.run_dir=RUN"], "--config.redis.url is empty"),
    ],
)
def test_a_mistake_is_one_clear_line_and_exit_code_2(tmp_path, flags, named):
    done = start("orchestrator", *(flag.replace("RUN", str(tmp_path / "run")) for flag in flags))
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert named in done.stderr


@pytest.mark.parametrize("role", ["learner", "actor", "orchestrator", "demonstrations", "local"])
def test_help_shows_settings_and_the_flags_of_the_binary(role):
    done = start(role, "--help")
    own = {"actor": "--actor_id", "demonstrations": "--output", "local": "--resume"}
    assert "--config.learner.learning_rate: learning rate" in done.stdout
    assert own.get(role, "--preset") in done.stdout


def test_a_resumed_run_keeps_its_settings(tmp_path):
    done = start("local", f"--resume={tmp_path}", "--config.seed=3")
    assert done.returncode == 2
    assert "--config.seed: a resumed run keeps its settings" in done.stderr
    done = start("local", f"--resume={tmp_path / 'none'}")
    assert done.returncode == 2
    assert "config.json: No such file" in done.stderr


def test_a_learner_without_demonstrations_says_so_and_asks_for_no_restart(tmp_path, server):
    password = tmp_path / "password"
    password.write_text(server.password)
    flags = [f"--config.redis.url={server.url}", f"--config.redis.password_file={password}"]
    done = start("learner", *flags, f"--config.run_dir={tmp_path / 'run'}")
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1
    assert f"{tmp_path / 'run' / 'demonstrations.avro'}: no such file" in done.stderr


@pytest.mark.parametrize(
    ("role", "changes", "named"),
    [
        ("actor", ["--config.environment.name=chess"], "--config.environment.name=chess: not known"),
        ("actor", ["--config.environment.name=function:nosuch:f"], "is its directory on PYTHONPATH?"),
        ("demonstrations", ["--config.environment.name=code", "--config.model.vocab_size=258"], "no scripted policy"),
    ],
)
def test_what_can_not_be_had_here_is_one_line_and_asks_for_no_restart(role, changes, named, tmp_path, server):
    password = tmp_path / "password"
    password.write_text(server.password)
    flags = [f"--config.redis.url={server.url}", f"--config.redis.password_file={password}"]
    flags += [f"--config.redis.namespace={tmp_path.name}"]
    output = [f"--output={tmp_path / 'x.avro'}"] if role == "demonstrations" else []
    done = start(role, *flags, f"--config.run_dir={tmp_path / 'run'}", *changes, *output)
    assert (done.returncode, done.stderr.count("\n")) == (2, 1), done.stderr
    assert named in done.stderr


def test_a_role_with_another_bound_than_the_rest_says_so(tmp_path, server):
    password = tmp_path / "password"
    password.write_text(server.password)
    flags = [f"--config.redis.url={server.url}", f"--config.redis.password_file={password}"]
    flags += ["--config.redis.namespace=differing", f"--config.run_dir={tmp_path / 'run'}"]
    start("actor", *flags, "--config.environment.name=function:nosuch:f")
    done = start("actor", *flags, "--config.environment.name=function:nosuch:f", "--config.lag.token_updates=6")
    assert "--config.lag.token_updates=6 here, and otherwise where the actor was last started" in done.stderr


def test_a_role_is_what_is_installed_also_in_a_directory_that_has_a_package_of_the_name(tmp_path):
    """As a checkout has, beside an installed wheel: its `asyncrl_jax` has no `launchers`."""
    (tmp_path / "asyncrl_jax").mkdir()
    (tmp_path / "asyncrl_jax" / "__init__.py").touch()
    command = role_command("orchestrator", tmp_path / "config.json", "--no_such_flag")
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, "unknown flag --no_such_flag" in done.stderr) == (2, True), done.stderr
