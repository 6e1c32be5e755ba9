"""Does the simulator foresee? Calibrated on one real run at N = 4, against real runs of other settings.

    python -m benchmarks.foresight [--updates 60] [--median_s 0.1] [--keep DIRECTORY]

Whole local runs of the quickstart's task on one actor host, with a lognormal delay in every turn whose 99th percentile
is ten times its median. Calibration sees the run at N = 4 and nothing else; then the simulator is asked for N = 0 (mode
sync), 2 and 8, and for a delay twice as long. Each answer stands beside the real run's: wall-clock from the first
update's end to the last's, mean lag of trained tokens, busy shares of the learner and of the slots. N = 4 itself is
there too: what calibration alone misses.

Learner and actor share a machine here, and a setting that lets one wait less makes the other slower; calibration knows
how much slower an update is beside episodes, and not how much slower these are. One JSON line last: (foreseen, real) of
each, and `worst`, the largest relative error over all but N = 4.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_jax.config import Config
from asyncrl_jax.config_file import read_config
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.simulate.calibrate import calibrate
from asyncrl_jax.simulate.inputs import Inputs
from asyncrl_jax.simulate.simulation import simulate
from asyncrl_jax.transport.archive import read_groups
from benchmarks._runs import run
from benchmarks.async_speedup import SIGMA

SLOTS = 320  # more than are ever needed: nobody waits for one


class Figures(NamedTuple):
    """Of one run, real or foreseen."""

    wall_s: float  # from the first update's end to the last's
    lag_mean: float  # updates
    learner_busy: float
    slots_busy: float


def settings(updates: int, median_s: float) -> dict[str, list[str]]:
    """Flags of every run, by name."""
    common = [
        f"--config.learner.num_updates={updates}",
        "--config.environment.level_weights=1,1",
        "--config.warm_start.num_steps=300",
        "--config.environment.call_timeout_s=600",
        "--config.lag.straggler_wait_s=600",
        "--config.actor.num_hosts=1",
        f"--config.actor.slots={SLOTS}",
        "--config.evaluation.every_updates=1000",
        "--config.evaluation.num_tasks_per_level=10",
        "--config.weights.keep_versions=12",
    ]
    delay = f"--config.environment.turn_delay_s=lognormal:{median_s:g}:{SIGMA:.4g}"
    doubled = f"--config.environment.turn_delay_s=lognormal:{2 * median_s:g}:{SIGMA:.4g}"
    lags = {
        name: [f"--config.lag.token_updates={name}", f"--config.lag.actor_updates={min(name, 2)}"] for name in (2, 4, 8)
    }
    return {
        "N=4": [*common, delay, *lags[4]],
        "N=0": [*common, delay, "--config.mode=sync"],
        "N=2": [*common, delay, *lags[2]],
        "N=8": [*common, delay, *lags[8]],
        "delay×2": [*common, doubled, *lags[4]],
    }


def real(directory: Path) -> Figures:
    """Of a run that is over."""
    rows = read_rows(directory / "metrics" / "learner.jsonl")
    summary = json.loads((directory / "summary.json").read_text())
    wall_s = rows[-1]["time"] - rows[0]["time"]
    archived = [row for path in (directory / "archive").glob("groups-*.avro") for row in read_groups(path)]
    slot_s = sum(
        max(one.sampling_ended_at - max(one.sampling_started_at, rows[0]["time"]), 0.0)
        for row in archived
        for one in row.group.trajectories
    )
    return Figures(
        wall_s,
        summary["lag"]["mean"],
        sum(row["step_s"] for row in rows[1:]) / wall_s,
        slot_s / (SLOTS * wall_s),
    )


def foreseen(config: Config, inputs: Inputs) -> Figures:
    """Of the same settings, simulated."""
    outcome = simulate(config, inputs)
    first_s = outcome.wall_s / outcome.updates  # about what a simulated run takes to its first update
    return Figures(outcome.wall_s - first_s, outcome.lag_mean, outcome.learner_busy, outcome.actor_busy)


def error(expected: Figures, seen: Figures) -> dict[str, float]:
    """Each relative to what was real."""
    return {
        name: abs(foretold - value) / max(value, 1e-9)
        for name, foretold, value in zip(Figures._fields, expected, seen, strict=True)
    }


def main() -> None:
    """Makes the runs, or takes those that are kept; asks the simulator for each."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--updates", type=int, default=60)
    parser.add_argument("--median_s", type=float, default=0.1, help="median delay of a turn, in s")
    parser.add_argument("--keep", type=Path, help="where the runs stay, and are found again; by default they go")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        root = (given.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        found: dict[str, Any] = {}
        inputs = Inputs()
        worst = 0.0
        for name, flags in settings(given.updates, given.median_s).items():
            directory = root / name.replace("=", "").replace("×", "x")
            if not (directory / "summary.json").exists():
                run(directory, flags)
            if name == "N=4":
                inputs = calibrate(directory)[1]
            seen, expected = real(directory), foreseen(read_config(directory / "config.json"), inputs)
            pairs = {key: (round(getattr(expected, key), 3), round(getattr(seen, key), 3)) for key in seen._fields}
            found[name] = pairs
            if name != "N=4":
                worst = max(worst, *error(expected, seen).values())
            print(f"{name}: " + ", ".join(f"{key} {a} (real {b})" for key, (a, b) in pairs.items()), flush=True)
        print(json.dumps({**found, "worst": round(worst, 3)}))


if __name__ == "__main__":
    main()
