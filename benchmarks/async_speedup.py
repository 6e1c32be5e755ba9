"""What asynchrony gains with environments that take their time: wall-clock to the same success, `sync` ÷ `async`.

    python -m benchmarks.async_speedup [--seeds 1 2 3] [--delays 0 0.1 0.3 1] [--pairs 10] [--keep DIRECTORY]

Whole local runs of the quickstart's task (levels 1 and 2, two to four turns) on one actor host, 16 groups of 8 an
update. Every turn's answer takes a lognormal time whose 99th percentile is ten times its median; the median is a
multiple of the time of one update, which is measured first, in a sync run without delay. Delays are drawn from an
episode's seed, so they do not depend on the mode.

* Both modes start from the same weights: one supervised warm start for all runs, not counted.
* The gate is success of what was sampled by the weights of `WINDOW` updates in a row, and it is passed when the last of
  these weights are made: a trajectory says how good the weights were that sampled it, not those that train on it. One
  that several weights sampled counts for the newest.
* Wall-clock is from the end of update `FIRST` (everything is compiled by then) to the gate, samples are all that the
  learner had been given by then. A sync run is stopped at the gate; an async one goes on to its end, for the figures of
  a learner in motion.
* In async the learner has a core for itself, as it has an accelerator elsewhere; in sync, where each side waits for the
  other, both have all cores. The learner that is fed from an archive has all as well.
* Where a turn takes an update's time or longer, the sync runs of all seeds are made at once: each of them computes for
  a tenth of its time, and together they need less than half of the machine. All other runs have it for themselves.
* Slots are as many as an update has trajectories, in both; hosts play more episodes than that in async, where an
  episode whose environment thinks lends its slot.
* N follows how long episodes take, or their late members would be given up, and those that are left are the short and
  easy ones: 10, and 30 where a turn takes an update's time or longer.

One JSON line last. `ratio_at_D`: median over seeds of wall-clock sync ÷ async at a delay of D updates
(`ratio_no_delay` for 0), and `discarded_at_D`: sampled tokens that the async runs never trained on. Of the async runs
at `--main_delay`: `discarded_share` again; `learner_busy_async`; `tokens_to_archive`: tokens a second of a busy
learner, waits left out, against the same updates made again from its archive with nothing beside;
`throughput_to_archive`: the same with the waits; `samples_ratio`: trajectories to the gate, async ÷ sync, with the
90 % interval of the mean log ratio over `--pairs` seeds. What a sync run samples does not depend on how long it takes,
so it is paired with the sync run without delay.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from asyncrl_jax.config_file import read_config
from asyncrl_jax.learner.checkpoint import Checkpoints
from asyncrl_jax.learner.replay import archived_groups, replay
from asyncrl_jax.local.environment import child_environment, learner_environment
from asyncrl_jax.observe.metrics import read_rows
from benchmarks._runs import interval, run

GATE, WINDOW, FIRST = 0.7, 8, 3
UPDATES = 110
ABREAST = 1.0  # median delay, in updates, from which sync runs are made at once
SIGMA = math.log(10) / 2.3263  # the 99th percentile is ten times the median
LIMIT_S, STOP_LIMIT_S = 1800.0, 60.0  # of one run, and of its stop

MODEL = ["--config.model.num_layers=6", "--config.model.hidden_dim=128", "--config.model.head_dim=32"]
TASK = ["--config.environment.level_weights=1,1", "--config.environment.call_timeout_s=600"]
COMMON = [
    *MODEL,
    *TASK,
    "--config.warm_start.num_steps=0",
    "--config.actor.num_hosts=1",
    "--config.actor.slots=128",
    "--config.actor.heartbeat_s=0.25",
    "--config.evaluation.every_updates=1000",
    "--config.evaluation.num_tasks_per_level=20",
    f"--config.learner.num_updates={UPDATES}",
    "--config.learner.learning_rate=5e-5",
    "--config.learner.lr_decay_updates=0",
]
MODES = {
    "sync": ["--config.mode=sync", "--config.lag.straggler_wait_s=600"],
    "async": [
        "--config.mode=async",
        "--config.learner.cpu_cores=1",
        "--config.lag.actor_updates=1",
        "--config.lag.straggler_policy=partial",
        "--config.lag.straggler_wait_s=0.1",
        "--config.lag.straggler_lead_updates=1",
        "--config.lag.slack_groups=12",
        "--config.weights.publish_every_updates=2",
    ],
}
SHORT, LONG = (
    (10, 512),
    (30, 1280),
)  # N, and episodes at once, for turns that take less than an update and for longer ones


class Measured(NamedTuple):
    """One run. Times in s."""

    wall_s: float  # to the gate
    samples: float  # trajectories to the gate
    step_s: float  # median update


def start_weights(directory: Path) -> Path:
    """A Hugging Face directory with the weights that every run starts from."""
    exported = directory / "start"
    if not exported.exists():
        flags = [*MODEL, *TASK, "--config.actor.num_hosts=1", "--config.warm_start.num_steps=1000"]
        flags += ["--config.learner.num_updates=1", "--config.evaluation.num_tasks_per_level=20"]
        run(directory / "warm", flags)
        convert = [sys.executable, "-m", "asyncrl_jax.launchers.convert", "--version=0"]
        subprocess.run([*convert, f"--source={directory / 'warm'}", f"--output={exported}"], check=True)
    return exported


class Sampled(NamedTuple):
    """What the weights after one update count sampled."""

    trajectories: float
    successes: float


def gate_passed(sampled: Sequence[Sampled]) -> int | None:
    """The first update count whose weights, with those of the counts before it, reach the gate; None if none do.

    Args:
      sampled: by update count, from 0 on.
    """
    for update in range(max(WINDOW - 1, FIRST), len(sampled)):
        last = sampled[update + 1 - WINDOW : update + 1]
        trajectories = sum(one.trajectories for one in last)
        if trajectories and sum(one.successes for one in last) >= GATE * trajectories:
            return update
    return None


def sampled_in_sync(rows: Sequence[dict[str, Any]]) -> list[Sampled]:
    """Of the learner's metrics: what an update trains on was sampled by the weights before it."""
    counts = [row.get("trajectories_all", 0.0) for row in rows]
    return [Sampled(count, row.get("success_all", 0.0) * count) for row, count in zip(rows, counts, strict=True)]


def sampled_in_async(directory: Path) -> list[Sampled]:
    """Of the archive of a run that went to its end. A trajectory counts for the newest weights that sampled in it."""
    updates = {
        number: update for number, _, _, update, *_ in Checkpoints(directory / "checkpoints", 1).meta()["versions"]
    }
    counts = [[0.0, 0.0] for _ in range(UPDATES + 1)]
    for group in archived_groups(directory / "archive").values():
        for trajectory in group.trajectories:
            count = counts[updates[int(trajectory.policy_versions.max())]]
            count[0] += 1.0
            count[1] += trajectory.success
    return [Sampled(*count) for count in counts]


def to_the_gate(directory: Path, flags: list[str]) -> None:
    """A whole sync run that is stopped when it has passed the gate.

    Raises:
      RuntimeError: if it ends otherwise.
    """
    command = [sys.executable, "-m", "asyncrl_jax.launchers.local", f"--config.run_dir={directory}", *flags]
    metrics = directory / "metrics" / "learner.jsonl"

    def passed() -> bool:
        return gate_passed(sampled_in_sync(read_rows(metrics))) is not None

    with (directory.parent / f"{directory.name}.out").open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)
        until = time.monotonic() + LIMIT_S
        while process.poll() is None and time.monotonic() < until:
            if passed():
                break
            time.sleep(1.0)
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
        try:
            process.wait(STOP_LIMIT_S)
        except subprocess.TimeoutExpired:
            process.kill()  # its parts end with it
            raise RuntimeError(f"{directory}: did not stop within {STOP_LIMIT_S:g} s") from None
    if not passed():
        raise RuntimeError(f"{directory}: success of {GATE} was not reached; exit code {process.returncode}")


def measure(directory: Path, mode: str) -> Measured:
    """Of a run that reached the gate.

    Raises:
      RuntimeError: if it did not.
    """
    rows = read_rows(directory / "metrics" / "learner.jsonl")
    update = gate_passed(sampled_in_sync(rows) if mode == "sync" else sampled_in_async(directory))
    if update is None:
        raise RuntimeError(f"{directory}: success of {GATE} was not reached")
    return Measured(
        wall_s=rows[update - 1]["time"] - rows[FIRST - 1]["time"],
        samples=sum(row.get("trajectories_all", 0.0) for row in rows[:update]),
        step_s=statistics.median(row["step_s"] for row in rows[FIRST:update]),
    )


class Steady(NamedTuple):
    """A learner in motion, between its first updates and the last that tickets were issued for."""

    busy: float
    tokens_per_busy_s: float
    tokens_per_s: float
    discarded: float


def steady(directory: Path) -> Steady:
    """Of a run that went to its end."""
    rows = read_rows(directory / "metrics" / "learner.jsonl")
    # While the last tickets are played nothing new is issued: the end of a run is no part of its motion.
    span = rows[FIRST : UPDATES - 9]
    tokens, busy_s = sum(row["tokens"] for row in span), sum(row["step_s"] for row in span)
    wall_s = span[-1]["time"] - rows[FIRST - 1]["time"]
    summary = json.loads((directory / "summary.json").read_text())
    sampled = max(row["tokens_sampled"] for row in read_rows(directory / "metrics" / "actor-0.jsonl"))
    return Steady(busy_s / wall_s, tokens / busy_s, tokens / wall_s, 1.0 - summary["tokens_trained"] / sampled)


def archive_tokens_per_s(directory: Path) -> float:
    """Trained tokens a second of the same learner, fed from the run's archive, with nothing beside it."""
    environment = learner_environment(child_environment(os.environ))
    command = [sys.executable, "-m", "benchmarks.async_speedup", "--replay", str(directory)]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds = json.loads(done.stdout.strip().splitlines()[-1])
    rows = read_rows(directory / "metrics" / "learner.jsonl")[FIRST : UPDATES - 9]
    return float(statistics.fmean(row["tokens"] for row in rows) / statistics.fmean(seconds))


def replay_seconds(directory: Path) -> list[float]:
    """Seconds of every update that `steady` counts, made again in this process."""
    ended = [time.perf_counter()]
    replay(read_config(directory / "config.json"), directory, UPDATES - 9, lambda *_: ended.append(time.perf_counter()))
    return [after - before for before, after in zip(ended[FIRST:], ended[FIRST + 1 :], strict=False)]


class Runs:
    """All runs of a benchmark, each made once and kept below a directory."""

    def __init__(self, root: Path, first_seed: int) -> None:
        self._root = root
        self._weights = start_weights(root)
        self.update_s = self("sync", 0.0, first_seed).step_s

    def directory(self, mode: str, delay: float, seed: int) -> Path:
        return self._root / f"{mode}-{delay:g}-{seed}"

    def __call__(self, mode: str, delay: float, seed: int) -> Measured:
        directory = self.directory(mode, delay, seed)
        if not (directory / "metrics" / "learner.jsonl").exists():
            flags = [*COMMON, *MODES[mode], f"--config.model.checkpoint={self._weights}", f"--config.seed={seed}"]
            if mode == "async":
                updates, episodes = LONG if delay >= ABREAST else SHORT
                flags += [f"--config.lag.token_updates={updates}", f"--config.weights.keep_versions={updates + 4}"]
                flags.append(f"--config.actor.episodes={episodes}")
            if delay:
                law = f"lognormal:{delay * self.update_s:.4g}:{SIGMA:.4g}"
                flags.append(f"--config.environment.turn_delay_s={law}")
            (run if mode == "async" else to_the_gate)(directory, flags)
        found = measure(directory, mode)
        print(f"{directory.name}: {found.wall_s:.1f} s and {found.samples:.0f} samples to {GATE}", flush=True)
        return found


def main() -> None:
    """Modes take turns within a seed, where they are made one by one: a machine that gets busier slows both."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3, 4, 5])
    parser.add_argument("--delays", type=float, nargs="+", default=[0.0, 0.1, 0.3, 1.0])
    parser.add_argument("--main_delay", type=float, default=0.3)
    parser.add_argument(
        "--pairs", type=int, default=10, help="seeds, from the first on, that samples are compared over"
    )
    parser.add_argument("--keep", type=Path, help="where the runs stay, and are found again; by default they go")
    parser.add_argument("--replay", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.replay:
        print(json.dumps(replay_seconds(given.replay)))
        return
    with tempfile.TemporaryDirectory() as temporary:
        root = (given.keep or Path(temporary)).absolute()
        root.mkdir(parents=True, exist_ok=True)
        print(json.dumps(report(Runs(root, given.seeds[0]), given)))


def report(runs: Runs, given: argparse.Namespace) -> dict[str, Any]:
    """The figures; see the module."""
    found: dict[str, Any] = {"gate": GATE, "seeds": given.seeds, "update_s": round(runs.update_s, 3)}
    for delay in given.delays:
        if delay >= ABREAST:
            with ThreadPoolExecutor(len(given.seeds)) as abreast:
                list(abreast.map(lambda seed, delay=delay: runs("sync", delay, seed), given.seeds))
        pairs = [(runs("sync", delay, seed), runs("async", delay, seed)) for seed in given.seeds]
        ratios = [sync.wall_s / free.wall_s for sync, free in pairs]
        name = f"ratio_at_{delay:g}" if delay else "ratio_no_delay"
        found[name] = round(statistics.median(ratios), 2)
        found[name.replace("ratio", "ratios")] = [round(ratio, 2) for ratio in ratios]
        lost = [steady(runs.directory("async", delay, seed)).discarded for seed in given.seeds]
        found[name.replace("ratio", "discarded")] = round(statistics.median(lost), 4)
    seeds = range(given.seeds[0], given.seeds[0] + given.pairs)
    pairs = [(runs("sync", 0.0, seed), runs("async", given.main_delay, seed)) for seed in seeds]
    mean, low, high = interval([free.samples / sync.samples for sync, free in pairs])
    found["samples_ratio"] = round(mean, 3)
    found["samples_ratio_90"] = [round(low, 3), round(high, 3)] if len(pairs) > 1 else None
    directories = [runs.directory("async", given.main_delay, seed) for seed in given.seeds]
    motion = [steady(directory) for directory in directories]
    alone = archive_tokens_per_s(directories[0])
    found["learner_busy_async"] = round(statistics.median(one.busy for one in motion), 3)
    found["tokens_to_archive"] = round(motion[0].tokens_per_busy_s / alone, 3)
    found["throughput_to_archive"] = round(motion[0].tokens_per_s / alone, 3)
    found["discarded_share"] = round(statistics.median(one.discarded for one in motion), 4)
    return found


if __name__ == "__main__":
    main()
