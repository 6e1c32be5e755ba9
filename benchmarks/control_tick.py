"""CPU time of one control tick, all policies and admission over what they observe, by number of actors. No Redis.

The scene of each tick has a heartbeat and a record of observations of every actor, a breaker of every actor, and the
tickets to issue that this many actors need. One JSON line last: `ms` (median) by actors, `states_ms` (what it takes
to write the states as JSON, which follows each round), `growth` (exponent of `ms` over actors from 1,000 to the most: 1
is linear), `at_most_50_ms`, `at_most_linear`.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import time
from typing import Any

from asyncrl_jax.config import Config, override
from asyncrl_jax.orchestrator import memory
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.policies import admission, curriculum
from asyncrl_jax.types import LearnerState

LIMIT_MS = 50.0
LINEAR = 1.1  # exponent up to which growth counts as linear: timing is noisy


def scene(actors: int, tick: int) -> rounds.Scene:
    """What all actors of a healthy run say in one second."""
    target = {"successes": 8.0, "seconds": 80.0, "infrastructure": {}, "data": {}}
    sums = {"groups": 1.0, "episodes": 8.0, "tokens": 8000.0, "reward": 4.0, "reward_squared": 4.0, "successes": 4.0}
    observations: tuple[dict[str, Any], ...] = tuple(
        {
            "buckets": {f"arithmetic/{1 + number % 3}": sums | {"group_variance": 0.25, "surprisal": 4000.0}},
            "targets": {"environment:arithmetic": target, f"actor:actor-{number}": target},
        }
        for number in range(actors)
    )
    beats = {f"actor-{number}": {"tokens_sampled": 8000.0 * tick, "generating": 8} for number in range(actors)}
    return rounds.Scene(
        now=float(tick),
        learner=LearnerState(line=0, update=tick, version=tick, phase="training"),
        learner_beat={"idle_share": 0.05, "step_s": 20.0, "service_s": 60.0, "by_lag": {"1": [1e6, 0.99, 0.001]}},
        actor_beats=beats,
        backlog_groups=actors // 8,
        observations=observations,
    )


def tick_ms(actors: int, ticks: int) -> tuple[float, float]:
    """(median time of one tick, of writing its states as JSON), in ms, once every actor is known."""
    config = override(
        Config(), {"actor.num_hosts": actors, "learner.groups_per_update": max(actors // 4, 1), "actor.slots": 8}
    )
    states, times, written = rounds.initial_states(config), [], []
    for tick in range(1, ticks + 2):
        seen = scene(actors, tick)
        started = time.process_time()
        states, plan, _ = rounds.decide(states, seen, config)
        observed = admission.Observed(tick, 0, actors // 2, 20.0, 60.0, plan.factor, plan.fresh, plan.probe_groups)
        admission.decide(
            observed,
            config.effective_lag,
            mode=config.mode,
            groups_per_update=config.learner.groups_per_update,
            replay_ratio=1,
            num_updates=10**6,
        )
        for number in range(actors // 80):  # groups that this many actors end in a tick, at 80 s a group
            curriculum.draw_task(plan.weights, config.seed, number)
        ended = time.process_time()
        json.dumps(memory.dump(states))
        times.append(1000 * (ended - started))
        written.append(1000 * (time.process_time() - ended))
    return statistics.median(times[1:]), statistics.median(written[1:])  # the first tick meets every actor


def main() -> None:
    """Prints a table and the JSON line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--ticks", type=int, default=15)
    parser.add_argument("--actors", type=int, nargs="+", default=[100, 1000, 3000, 10_000])
    given = parser.parse_args()
    both = {actors: tick_ms(actors, given.ticks) for actors in sorted(given.actors)}
    found, written = ({actors: pair[which] for actors, pair in both.items()} for which in (0, 1))
    for actors, ms in found.items():
        print(f"{actors:>7,} actors  {ms:8.2f} ms, and {written[actors]:.2f} ms to write the states")
    large = [actors for actors in found if actors >= 1000] or list(found)
    least, most = large[0], large[-1]
    growth = math.log(found[most] / found[least]) / math.log(most / least) if most > least else 0.0
    verdict = {"at_most_50_ms": found[most] <= LIMIT_MS, "at_most_linear": growth <= LINEAR}
    ms, states_ms = ({str(n): round(value, 3) for n, value in of.items()} for of in (found, written))
    print(json.dumps({"ms": ms, "states_ms": states_ms, "growth": round(growth, 3), **verdict}))


if __name__ == "__main__":
    main()
