"""Rollout: tokens a second of each engine, same checkpoint, 64 sequences, one thread; prefix reuse; swaps in flight.

    python -m benchmarks.rollout [--vllm .venv-vllm/bin/python] [--tunix PYTHON] [--repeats 3]

Every engine runs in processes of its own, pinned to one core, with the interpreter of an environment that has it; one
that is not named is left out. Tokens a second are those of a CPU second of all of an engine's processes: on an idle
core the same as those of the clock, or more where an engine waits, and what others have of a busy core counts for
nobody. The engines take turns twice, and the better rate of each counts. `ratio_to_vllm` and `ratio_to_tunix` are the
JAX engine's over theirs. The last line is JSON.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks._core import pin_to_one_core

ROOT = Path(__file__).parents[1]
ROUNDS = 2  # in which the engines take turns: a core's clock drifts by a tenth within minutes
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1",
}


def measure(python: str, engine: str, directory: str, repeats: int) -> dict[str, Any]:
    """What `rollout_peer` prints for one engine."""
    command = [python, "-m", "benchmarks.peers.rollout_peer", engine, directory, str(repeats)]
    environment = os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)}
    run = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, cwd=ROOT, env=environment)
    result: dict[str, Any] = json.loads(run.stdout.strip().splitlines()[-1])
    print(json.dumps({engine: result}), flush=True)
    return result


def better(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """The higher rates of two rounds; what is no rate is the later one's."""
    return other | {name: max(one[name], rate) for name, rate in other.items() if isinstance(rate, float)}


def main() -> int:
    """Measures every engine that has an environment."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    default = ROOT / ".venv-vllm" / "bin" / "python"
    parser.add_argument("--vllm", default=str(default) if default.exists() else "", help="interpreter that has vLLM")
    parser.add_argument("--tunix", default="", help="interpreter that has google-tunix")
    parser.add_argument("--repeats", type=int, default=3, help="runs of which the best counts")
    args = parser.parse_args()
    pin_to_one_core()  # what JAX is told of threads does not hold for all of its kernels
    with tempfile.TemporaryDirectory(prefix="rollout-") as directory:
        subprocess.run(
            [sys.executable, "-m", "benchmarks.peers.rollout_peer", "publish", directory, "0"],
            check=True,
            cwd=ROOT,
            env=os.environ | ONE_THREAD | {"PYTHONPATH": str(ROOT)},
        )
        results: dict[str, dict[str, Any]] = {}
        for _ in range(ROUNDS):
            for engine, python in (("jax", sys.executable), ("vllm", args.vllm), ("tunix", args.tunix)):
                if python:
                    found = measure(python, engine, directory, args.repeats)
                    results[engine] = better(results[engine], found) if engine in results else found
    own = results["jax"]["tokens_per_s"]
    ratios = {f"ratio_to_{name}": own / other["tokens_per_s"] for name, other in results.items() if name != "jax"}
    print(json.dumps(ratios | results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
