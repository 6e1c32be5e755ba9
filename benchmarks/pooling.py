"""What it is worth to keep environments' processes: episodes a second, pooled ÷ a process for each episode.

    python -m benchmarks.pooling [--episodes 60] [--at_once 8]

The same episodes of a `text:` environment (four turns, answered at once, no engine) are played in both ways through the
actor's own `IsolatedTasks`. Pooled: one process plays all of them, as `environment.processes` has it. Not pooled: each
episode starts a process that imports the environment, and ends it. Both have the whole machine; wall time. An engine
and an environment that think make the ratio smaller, imports that are heavier than this package's make it larger. One
JSON line last.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Awaitable, Callable

from asyncrl_jax.actor.envs.isolated import EnvironmentProcesses, IsolatedTasks, IsolationLimits, Known
from asyncrl_jax.types import Task
from benchmarks._slow_environment import SLOW


def one_process() -> IsolatedTasks:
    """The environment in one process, which starts with its first episode."""
    return IsolatedTasks(SLOW, EnvironmentProcesses(Known(SLOW.name, SLOW.num_levels), 1, IsolationLimits()))


async def episode(tasks: IsolatedTasks, index: int) -> None:
    """One, from its prompt to its score."""
    environment = tasks()
    try:
        await environment.reset(Task(SLOW.name, "train", 1, index))
        while not (await environment.step("on")).done:
            pass
        await environment.score()
    finally:
        await environment.close()


async def pooled(episodes: int, at_once: int) -> None:
    """One process for all."""
    tasks = one_process()
    try:
        await _all(lambda index: episode(tasks, index), episodes, at_once)
    finally:
        await tasks.processes.close()


async def one_each(episodes: int, at_once: int) -> None:
    """A process for each."""

    async def alone(index: int) -> None:
        tasks = one_process()
        try:
            await episode(tasks, index)
        finally:
            await tasks.processes.close()

    await _all(alone, episodes, at_once)


async def _all(play: Callable[[int], Awaitable[None]], episodes: int, at_once: int) -> None:
    room = asyncio.Semaphore(at_once)

    async def one(index: int) -> None:
        async with room:
            await play(index)

    await asyncio.gather(*(one(index) for index in range(episodes)))


async def best_of(repeats: int, episodes: int, at_once: int) -> dict[str, float]:
    """Seconds of each way, which take turns."""
    best = {"pooled": float("inf"), "one_each": float("inf")}
    for _ in range(repeats):
        for name, way in (("pooled", pooled), ("one_each", one_each)):
            started_at = time.perf_counter()
            await way(episodes, at_once)
            best[name] = min(best[name], time.perf_counter() - started_at)
    return best


def main() -> None:
    """Prints both rates."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=60)
    parser.add_argument("--at_once", type=int, default=8)
    parser.add_argument("--repeats", type=int, default=2)
    given = parser.parse_args()
    best = asyncio.run(best_of(given.repeats, given.episodes, given.at_once))
    rates = {name: round(given.episodes / seconds, 2) for name, seconds in best.items()}
    print(json.dumps({"episodes_per_s": rates, "ratio": round(best["one_each"] / best["pooled"], 1)}))


if __name__ == "__main__":
    main()
