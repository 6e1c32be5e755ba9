"""Runs every benchmark in a process of its own; each prints one JSON line last. `python -m benchmarks [NAME …]`."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

OF_WHOLE_RUNS = {"async_speedup", "foresight", "pool_ablation"}  # take minutes to hours; only when they are named


def main(names: list[str]) -> int:
    """Runs the named benchmarks, or all; exit code 1 if one fails."""
    here = Path(__file__).parent
    known = sorted(path.stem for path in here.glob("[!_]*.py"))
    if unknown := sorted(set(names) - set(known)):
        print(f"unknown benchmarks: {', '.join(unknown)}; known: {', '.join(known)}", file=sys.stderr)
        return 2
    failed = 0
    for name in names or [name for name in known if name not in OF_WHOLE_RUNS]:
        command = [sys.executable, "-m", f"benchmarks.{name}"]
        run = subprocess.run(command, check=False, stdout=subprocess.PIPE, text=True)
        last = (run.stdout.strip().splitlines() or ["null"])[-1]
        print(
            json.dumps({name: json.loads(last) if run.returncode == 0 else f"exit code {run.returncode}"}), flush=True
        )
        failed += run.returncode != 0
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
