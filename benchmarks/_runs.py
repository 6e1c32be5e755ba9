"""Whole local runs, and what is made of several of them."""

from __future__ import annotations

import itertools
import math
import statistics
import subprocess
import sys
from pathlib import Path

# Two-sided 90 % quantiles of Student's t by degrees of freedom.
_T90 = {1: 6.314, 2: 2.920, 3: 2.353, 4: 2.132, 5: 2.015, 6: 1.943, 7: 1.895, 8: 1.860, 9: 1.833}


def run(directory: Path, flags: list[str]) -> None:
    """One whole local run.

    Raises:
      RuntimeError: if it does not finish.
    """
    command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--config.run_dir={directory}", *flags]
    done = subprocess.run(command, check=False, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)}: exit code {done.returncode}\n{done.stdout[-2000:]}")


def crossing(curve: list[tuple[int, float]], gate: float) -> float | None:
    """The update at which a piecewise linear curve first reaches the gate; None if it never does."""
    for (before, below), (after, above) in itertools.pairwise(curve):
        if below < gate <= above:
            return before + (after - before) * (gate - below) / (above - below)
    return float(curve[0][0]) if curve and curve[0][1] >= gate else None


def interval(ratios: list[float]) -> tuple[float, float, float]:
    """(geometric mean, lower, upper end of the 90 % interval); a lone ratio has no interval."""
    logs = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logs)
    if len(logs) < 2:
        return math.exp(mean), math.nan, math.nan
    half = _T90.get(len(logs) - 1, 1.645) * statistics.stdev(logs) / math.sqrt(len(logs))
    return math.exp(mean), math.exp(mean - half), math.exp(mean + half)
