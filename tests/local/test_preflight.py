import contextlib
import shutil
import socket
import subprocess
import sys

import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.local import preflight
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.server import start_server


def problems(config: Config, run_dir, *, own_server: bool = True, resume: bool = False) -> list[str]:
    checks = preflight.check_all(config, run_dir, own_server=own_server, resume=resume)
    return [check.problem for check in checks if check.failed]


def test_nothing_is_wrong_with_the_defaults(tmp_path):
    assert problems(Config(), tmp_path / "new") == []


def test_a_directory_with_another_run_is_refused_and_resume_is_named(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (problem,) = problems(Config(), tmp_path)
    assert f"--resume={tmp_path}" in problem
    assert problems(Config(), tmp_path, resume=True) == []


def test_a_run_directory_below_a_file_is_refused(tmp_path):
    (tmp_path / "file").write_text("")
    (problem,) = problems(Config(), tmp_path / "file" / "run")
    assert "not a directory" in problem


def test_a_run_directory_without_the_right_to_write_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(preflight.os, "access", lambda *_: False)  # root may write anywhere
    (problem,) = problems(Config(), tmp_path / "run")
    assert "no right to write" in problem


def test_a_full_disk_is_named(tmp_path, monkeypatch):
    usage = shutil.disk_usage(tmp_path)._replace(free=100 * 2**20)
    monkeypatch.setattr(preflight.shutil, "disk_usage", lambda path: usage)
    (problem,) = problems(Config(), tmp_path / "run")
    assert "0.1 GiB free" in problem


def test_a_port_in_use_is_named_with_its_flag(tmp_path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        (problem,) = problems(override(Config(), {"redis.port": port}), tmp_path / "run")
    assert f"--config.redis.port={port}" in problem


def test_demonstrations_that_do_not_exist_are_named(tmp_path):
    missing = {"warm_start.demonstrations": str(tmp_path / "none.avro")}
    (problem,) = problems(override(Config(), missing), tmp_path / "run")
    assert "none.avro" in problem
    assert problems(override(Config(), missing | {"warm_start.num_steps": 0}), tmp_path / "run") == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"url": "https://scores.example/", "key_variable": "NO_SUCH_KEY"}, "NO_SUCH_KEY"),
        ({"model": "/nowhere", "tokenizer": "byte"}, "--config.reward.process.model=/nowhere: "),
    ],
)
def test_a_process_reward_model_that_can_not_be_had_is_named(tmp_path, changes, named):
    changes = {f"reward.process.{name}": value for name, value in changes.items()}
    (problem,) = problems(override(Config(), changes), tmp_path / "run")
    assert named in problem


def test_a_wrong_redis_password_is_one_clear_line(tmp_path):
    server = start_server(tmp_path / "redis", Config().redis)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(server.stop)
        wrong = tmp_path / "wrong"
        wrong.write_text("guess")
        changes = {"redis.url": server.url, "redis.password_file": str(wrong)}
        (problem,) = problems(override(Config(), changes), tmp_path / "run", own_server=False)
        assert "password" in problem
        assert "\n" not in problem
        right = changes | {"redis.password_file": str(tmp_path / "redis" / "redis.password")}
        assert problems(override(Config(), right), tmp_path / "run", own_server=False) == []


def test_an_unreachable_redis_is_named(tmp_path):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{free.getsockname()[1]}/0"
    (problem,) = problems(override(Config(), {"redis.url": url}), tmp_path / "run", own_server=False)
    assert url in problem


_MY_TASKS = """
import os, random

def few(seed, level):
    return f"What is 2 * {random.Random(seed).randrange(9)}?", lambda answer: 1.0

def raises(seed, level):
    return os.environ["NO_SUCH_VARIABLE"]

def long(seed, level):
    return f"{random.Random(seed).random()}" * 9, lambda answer: 1.0

def sometimes_long(seed, level):
    return f"{random.Random(seed).random()}" * (9 if level > 1 else 1), lambda answer: 1.0

def right(seed, level):
    return f"{random.Random(seed).random()}", lambda answer: 1.0
"""


def with_function(name, tmp_path, monkeypatch, **changes) -> Config:
    """The config of a function of `_MY_TASKS`."""
    module = f"my_{name}"  # an import lasts
    (tmp_path / f"{module}.py").write_text(_MY_TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    plain = {"environment.name": f"function:{module}:{name}", "model.vocab_size": 258, "warm_start.num_steps": 0}
    return override(Config(), plain | changes)


@pytest.mark.parametrize(
    ("name", "named"),
    [
        ("few", "are in both: success on held-out tasks would mean nothing; have tasks drawn from more"),
        ("long", "--config.environment.max_tokens=64: a prompt has "),
        ("raises", "name=function:my_raises:raises: its first tasks can't be made: KeyError: 'NO_SUCH_VARIABLE' ("),
    ],
)
def test_tasks_of_the_users_own_that_are_wrong_are_named_with_the_way_out(name, named, tmp_path, monkeypatch):
    (problem,) = problems(with_function(name, tmp_path, monkeypatch), tmp_path / "run")
    assert named in problem
    assert name != "raises" or f"{tmp_path}/my_raises.py:8)" in problem, "where"


def test_tasks_of_which_only_some_are_too_long_are_a_warning(tmp_path, monkeypatch):
    config = with_function("sometimes_long", tmp_path, monkeypatch)
    checks = preflight.check_all(config, tmp_path / "run", own_server=True, resume=False)
    assert ["max_tokens=64: a prompt has" in check.problem for check in checks if check.warning] == [True]
    assert not any(check.failed for check in checks)


def test_a_warm_start_needs_an_environment_that_can_play_itself_or_a_file(tmp_path, monkeypatch):
    config = with_function("right", tmp_path, monkeypatch)
    assert problems(config, tmp_path / "run") == []
    config = override(config, {"warm_start.num_steps": 5})
    (problem,) = problems(config, tmp_path / "run")
    assert "--config.warm_start.num_steps=5: 0, since function:my_right:right has no scripted policy" in problem
    (tmp_path / "kept.avro").touch()
    config = override(config, {"warm_start.demonstrations": str(tmp_path / "kept.avro")})
    assert problems(config, tmp_path / "run") == []


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"actor.engine": "vllm"}, "`make run-vllm` brings it for CPUs"),
        ({"actor.engine": "vllm", "vllm.servers": ("http://127.0.0.1:1",)}, "pip install 'asyncrl-jax[vllm-server]'"),
        ({"orchestrator.fleet.class_settings": ("actor.engine=vllm",)}, "`make run-vllm` brings it for CPUs"),
    ],
)
def test_an_engine_that_is_not_installed_is_named_with_what_installs_it(changes, named, tmp_path, monkeypatch):
    find = preflight.importlib.util.find_spec
    missing = ("vllm", "httpx")
    monkeypatch.setattr(preflight.importlib.util, "find_spec", lambda name: None if name in missing else find(name))
    (problem,) = problems(override(Config(), changes), tmp_path / "run")
    assert named in problem


@pytest.mark.parametrize(("content", "code"), [("", 0), ("x", 2)])
def test_dry_run_says_what_it_found_and_starts_nothing(tmp_path, content, code):
    run_dir = tmp_path / "run"
    if content:
        run_dir.mkdir()
        (run_dir / "file").write_text(content)
    script = (
        "import sys; from asyncrl_jax.config import Config, override; from asyncrl_jax.local import run\n"
        f"sys.exit(run.new_run(override(Config(), {{'run_dir': {str(run_dir)!r}}}), dry_run=True))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert done.returncode == code
    assert ("FAILED  run directory" in done.stdout) == bool(content)
    assert run_dir.exists() == bool(content)


def test_a_namespace_that_holds_a_run_is_refused_for_a_new_one(tmp_path):
    server = start_server(tmp_path / "redis", Config().redis)
    try:
        password_file = str(tmp_path / "redis" / "redis.password")
        config = override(Config(), {"redis.url": server.url, "redis.password_file": password_file})
        client = connect(config.redis, server.password)
        Control(client, Keys(config.redis.namespace)).ensure_epoch()
        client.close()
        (problem,) = problems(config, tmp_path / "run", own_server=False)
        assert "--config.redis.namespace=asyncrl" in problem
        assert problems(config, tmp_path / "run", own_server=False, resume=True) == []
    finally:
        server.stop()


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"environment.name": "chess", "warm_start.num_steps": 0}, "--config.environment.name=chess"),
        ({"model.vocab_size": 4}, "--config.model.vocab_size=4"),
        ({"weights.directory": "ftp://host/weights"}, "use a path, gs:// or s3://"),
        ({"weights.directory": "s3://bucket/weights"}, "asyncrl-jax[s3]"),
        ({"mesh.expert": 4}, "--config.mesh asks for 4 devices, JAX sees 1"),
        ({"learner.cpu_cores": 4096}, "--config.learner.cpu_cores=4096"),
    ],
)
def test_what_a_role_would_refuse_is_refused_before_anything_is_started(changes, named, tmp_path, monkeypatch):
    monkeypatch.setattr(preflight, "_STORES", preflight._STORES | {"s3": ("no_such_package", "s3")})
    monkeypatch.delenv("XLA_FLAGS", raising=False)
    (problem,) = problems(override(Config(), changes), tmp_path / "new")
    assert named in problem
