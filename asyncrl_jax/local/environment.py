"""What processes inherit through their environment, and the password that must not stand anywhere else."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from asyncrl_jax.config import RedisConfig
from asyncrl_jax.lifetime import PARENT_VARIABLE

PASSWORD_VARIABLE = "ASYNCRL_REDIS_PASSWORD"  # noqa: S105 - the name of a variable

# The arrays of a training step are allocated anew each time. By default glibc hands them back to the system and every
# page of them faults again; so keep them, in one heap of huge pages. Another allocator ignores this.
LARGE_TEMPORARIES = {
    "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    "MALLOC_ARENA_MAX": "1",
    "MALLOC_MMAP_MAX_": "0",
    "MALLOC_TRIM_THRESHOLD_": "16000000000",
    "MALLOC_TOP_PAD_": "67108864",
}


def redis_password(config: RedisConfig) -> str | None:
    """The password from `password_file`, else from the environment, else None.

    Raises:
      ValueError: if the file can't be read or is empty.
    """
    if not config.password_file:
        return os.environ.get(PASSWORD_VARIABLE) or None
    try:
        password = Path(config.password_file).read_text().strip()
    except OSError as error:
        raise ValueError(f"--config.redis.password_file={config.password_file}: {error.strerror}") from error
    if not password:
        raise ValueError(f"--config.redis.password_file={config.password_file}: the file is empty")
    return password


def take_redis_password(config: RedisConfig) -> str | None:
    """The password, which from here on no child inherits: an actor's run other people's environments and tools.

    Raises:
      ValueError: as `redis_password`.
    """
    password = redis_password(config)
    os.environ.pop(PASSWORD_VARIABLE, None)
    return password


def child_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with what the roles of a local run need; whatever the user has set stays as it is.

    Several processes share this machine, so each computes on one thread, and on the CPU unless JAX_PLATFORMS says
    otherwise. Compiled programs are kept in the user's cache, so that the second run starts sooner.
    """
    environment = dict(base)
    environment[PARENT_VARIABLE] = str(os.getpid())
    environment["PYTHONUNBUFFERED"] = "1"  # a log's last lines must be there when a part dies
    environment.setdefault("JAX_PLATFORMS", "cpu")
    if environment["JAX_PLATFORMS"] == "cpu":
        environment.setdefault("OMP_NUM_THREADS", "1")
        threads = "--xla_cpu_multi_thread_eigen"
        if threads not in environment.get("XLA_FLAGS", ""):
            environment["XLA_FLAGS"] = f"{environment.get('XLA_FLAGS', '')} {threads}=false".strip()
    else:
        environment.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # learner and actors share the accelerator
    cache = Path(base.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache / "asyncrl_jax" / "jit"))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.5")
    return environment


def learner_environment(base: Mapping[str, str]) -> dict[str, str]:
    """`base` with the allocator settings of `LARGE_TEMPORARIES` where the learner computes on the CPU.

    Whatever the user has set stays as it is.
    """
    return {**LARGE_TEMPORARIES, **base} if base.get("JAX_PLATFORMS") == "cpu" else dict(base)


def divide_cores(learner_cores: int) -> tuple[frozenset[int], frozenset[int]]:
    """The cores of this process, divided between the learner and the rest; both empty if they share all.

    Args:
      learner_cores: `learner.cpu_cores`.

    Raises:
      ValueError: if the system can't bind a process to cores, or none would be left for the rest.
    """
    if not learner_cores:
        return frozenset(), frozenset()
    flag = f"--config.learner.cpu_cores={learner_cores}"
    if not hasattr(os, "sched_getaffinity"):
        raise ValueError(f"{flag}: this system can't bind a process to cores; use 0")
    cores = sorted(os.sched_getaffinity(0))
    if learner_cores >= len(cores):
        raise ValueError(f"{flag}: {len(cores)} cores are there and the rest of the run needs one; use less")
    return frozenset(cores[:learner_cores]), frozenset(cores[learner_cores:])
