"""One CPU core, the same for everybody that is measured on it."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple


def pin_to_one_core() -> int:
    """Keeps this process and its children on one core, the last that it may use; returns its number."""
    core = max(os.sched_getaffinity(0))
    os.sched_setaffinity(0, {core})
    return core


def one_thread(base: Mapping[str, str]) -> dict[str, str]:
    """`base` for a child that computes on one thread, with the allocator settings of the local launcher."""
    from asyncrl_jax.local.environment import LARGE_TEMPORARIES  # not there in the environments of peers

    flags = f"{base.get('XLA_FLAGS', '')} --xla_cpu_multi_thread_eigen=false"
    return {**base, **LARGE_TEMPORARIES, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": flags.strip(), "OMP_NUM_THREADS": "1"}


def cpu_seconds() -> float:
    """CPU time that this process and all below it have had so far, on Linux."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    family = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in family} - family:
        family |= more
    total = 0
    for pid in family:
        for task in Path(f"/proc/{pid}/task").glob("*/schedstat"):
            with contextlib.suppress(OSError):
                total += int(task.read_text().split()[0])
    return total / 1e9


class Seconds(NamedTuple):
    """What one call took. On an idle core both are the same; CPU time leaves out what others had of a busy one."""

    cpu: float
    wall: float


def timed(call: Callable[[], Any]) -> tuple[Any, Seconds]:
    """(what the call returns, its time). It must be done when it returns."""
    cpu, wall = time.process_time(), time.perf_counter()
    result = call()
    return result, Seconds(time.process_time() - cpu, time.perf_counter() - wall)
