import os

import pytest

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.local.environment import (
    LARGE_TEMPORARIES,
    PASSWORD_VARIABLE,
    child_environment,
    divide_cores,
    learner_environment,
    redis_password,
    take_redis_password,
)
from asyncrl_jax.local.tail import last_lines


def test_roles_share_a_small_machine_by_default():
    made = child_environment({"HOME": "/home/someone"})
    assert made["JAX_PLATFORMS"] == "cpu"
    assert made["OMP_NUM_THREADS"] == "1"
    assert made["XLA_FLAGS"] == "--xla_cpu_multi_thread_eigen=false"


def test_what_the_user_has_set_stays():
    given = {"JAX_PLATFORMS": "cpu", "OMP_NUM_THREADS": "4", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=true"}
    given |= {"JAX_COMPILATION_CACHE_DIR": "/cache"}
    made = child_environment(given)
    assert {name: made[name] for name in given} == given


def test_other_xla_flags_are_kept_beside_ours():
    made = child_environment({"XLA_FLAGS": "--xla_force_host_platform_device_count=4"})
    assert made["XLA_FLAGS"] == "--xla_force_host_platform_device_count=4 --xla_cpu_multi_thread_eigen=false"


def test_an_accelerator_is_shared_and_not_pinned():
    made = child_environment({"JAX_PLATFORMS": "cuda"})
    assert "OMP_NUM_THREADS" not in made
    assert "XLA_FLAGS" not in made
    assert made["XLA_PYTHON_CLIENT_PREALLOCATE"] == "false"


def test_compiled_programs_are_kept_in_the_users_cache():
    made = child_environment({"XDG_CACHE_HOME": "/caches"})
    assert made["JAX_COMPILATION_CACHE_DIR"] == "/caches/asyncrl_jax/jit"


def test_a_learner_on_the_cpu_keeps_its_temporaries_unless_the_user_decides():
    made = learner_environment(child_environment({"MALLOC_ARENA_MAX": "4"}))
    assert {name: made[name] for name in LARGE_TEMPORARIES} == LARGE_TEMPORARIES | {"MALLOC_ARENA_MAX": "4"}
    assert not LARGE_TEMPORARIES.keys() & learner_environment({"JAX_PLATFORMS": "cuda"}).keys()
    assert not LARGE_TEMPORARIES.keys() & child_environment({}).keys()


def test_the_password_comes_from_the_file_else_from_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv(PASSWORD_VARIABLE, "from the environment")
    path = tmp_path / "password"
    path.write_text("from the file\n")
    assert redis_password(RedisConfig(password_file=str(path))) == "from the file"
    assert redis_password(RedisConfig()) == "from the environment"
    monkeypatch.delenv(PASSWORD_VARIABLE)
    assert redis_password(RedisConfig()) is None


def test_a_role_takes_the_password_so_that_none_of_its_children_has_it(monkeypatch):
    monkeypatch.setenv(PASSWORD_VARIABLE, "secret")
    assert take_redis_password(RedisConfig()) == "secret"
    assert PASSWORD_VARIABLE not in os.environ


@pytest.mark.parametrize("content", [None, "\n"])
def test_a_password_file_that_is_missing_or_empty_is_named(tmp_path, content):
    path = tmp_path / "password"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ValueError, match=r"--config\.redis\.password_file"):
        redis_password(RedisConfig(password_file=str(path)))


def test_the_last_lines_of_a_long_log(tmp_path):
    path = tmp_path / "log"
    path.write_text("".join(f"line {number}\n" for number in range(100_000)))
    assert last_lines(path, 2) == ["line 99998", "line 99999"]
    assert last_lines(tmp_path / "none") == []


def test_cores_are_divided_or_the_setting_is_refused(monkeypatch):
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: {2, 3, 5}, raising=False)
    assert divide_cores(0) == (frozenset(), frozenset())
    assert divide_cores(2) == ({2, 3}, {5})
    with pytest.raises(ValueError, match=r"learner.cpu_cores=3: 3 cores are there"):
        divide_cores(3)
    monkeypatch.delattr(os, "sched_getaffinity")
    with pytest.raises(ValueError, match="this system can't bind"):
        divide_cores(1)
