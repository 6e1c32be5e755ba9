"""Samples to the gate, pool with strata and priority ÷ plain FIFO, on whole quickstart runs, paired by seed.

    python -m benchmarks.pool_ablation [--seeds 1 2 3] [--keep DIRECTORY] [-- FLAGS OF asyncrl-local]

The gate is held-out success of the demonstrated levels, interpolated between evaluations; samples are the trajectories
that had arrived at the learner by then, whatever became of them. A run that never reaches the gate counts with all its
samples, and is named. The interval is that of the mean log ratio over seeds, by Student's t, 90 %. Prints one JSON line
last. A run takes minutes, so `make bench` leaves this one out unless it is named.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from pathlib import Path
from typing import Any

from asyncrl_jax.observe.metrics import read_rows
from benchmarks._runs import crossing, interval, run

ARMS = {
    "fifo": ["--config.pool.draw=fifo"],
    "strata": ["--config.pool.draw=strata"],
}


def samples_to_gate(directory: Path, gate: float) -> tuple[float, bool]:
    """(trajectories that had arrived when held-out success passed the gate, whether it did)."""
    summary = json.loads((directory / "summary.json").read_text())
    levels = [str(level) for level in summary["success_levels"]]
    curve = []
    for result in sorted(json.loads((directory / "evaluations.json").read_text()), key=lambda r: r["update"]):
        total = sum(result["num_tasks"].get(level, 0) for level in levels)
        if total:
            curve.append((result["update"], sum(result["num_successes"].get(level, 0) for level in levels) / total))
    arrived, samples = 0.0, {0: 0.0}
    for row in read_rows(directory / "metrics" / "learner.jsonl"):
        arrived += row.get("trajectories_all", 0.0)
        samples[row["step"]] = arrived
    update = crossing(curve, gate)
    if update is None:
        return arrived, False
    low, high = math.floor(update), math.ceil(update)
    return samples[low] + (samples[high] - samples[low]) * (update - low), True


def main() -> None:
    """Runs the arms by turns, so that a machine that gets busier slows both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--gate", type=float, default=0.9)
    parser.add_argument("--keep", type=Path, help="where the runs stay; by default they are deleted")
    parser.add_argument("flags", nargs="*")
    given = parser.parse_args()
    found: dict[str, dict[int, Any]] = {arm: {} for arm in ARMS}
    missed: list[str] = []
    with tempfile.TemporaryDirectory() as temporary:
        root = given.keep or Path(temporary)
        for seed in given.seeds:
            for arm, flags in ARMS.items():
                directory = root / f"{arm}-{seed}"
                if not (directory / "summary.json").exists():
                    common = [f"--config.seed={seed}", "--config.evaluation.every_updates=10"]
                    run(directory, [*common, *flags, *given.flags])
                found[arm][seed], reached = samples_to_gate(directory, given.gate)
                if not reached:
                    missed.append(directory.name)
                print(f"{arm}, seed {seed}: {found[arm][seed]:.0f} samples to {given.gate}", flush=True)
    ratios = [found["strata"][seed] / found["fifo"][seed] for seed in given.seeds]
    mean, low, high = interval(ratios)
    print(
        json.dumps(
            {
                "gate": given.gate,
                "samples": {
                    arm: {str(seed): round(n) for seed, n in by_seed.items()} for arm, by_seed in found.items()
                },
                "ratios": [round(ratio, 3) for ratio in ratios],
                "ratio": round(mean, 3),
                "interval_90": [round(low, 3), round(high, 3)] if len(ratios) > 1 else None,
                "never_reached": missed,
            }
        )
    )


if __name__ == "__main__":
    main()
