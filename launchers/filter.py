"""asyncrl-filter: the best of what a run sampled, as demonstrations for the next stage.

asyncrl-filter --run=runs/latest --output=kept.avro --num=4000
"""

import json
from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.observe.record import read_record

_RUN = absl_flags.DEFINE_string("run", None, "Directory of the run, as runs/latest.", required=True)
_OUTPUT = absl_flags.DEFINE_string("output", None, "Avro file of demonstrations to write.", required=True)
_NUM = absl_flags.DEFINE_integer("num", 4000, "Trajectories to keep, at most.", lower_bound=1)
_SHARES = absl_flags.DEFINE_list("shares", ["5", "3", "2"], "Of high, middle and low rewards; low ones are negatives.")
_HIGH = absl_flags.DEFINE_float("high_reward", 1.0, "From here on a reward is high.")
_LOW = absl_flags.DEFINE_float("low_reward", 0.5, "Below this a reward is low.")
_NEGATIVE = absl_flags.DEFINE_float("negative_weight", 0.1, "Weight of low ones as examples of what not to say.")
_PER_TASK = absl_flags.DEFINE_integer("per_task", 2, "Trajectories of one task, at most.", lower_bound=1)
_FROM_UPDATE = absl_flags.DEFINE_integer("from_update", 0, "Leave out what earlier updates trained on.", lower_bound=0)


def main() -> int:
    """Reads the archive, filters, writes; prints one JSON line with what was kept of what."""
    from asyncrl_jax.learner.rejection import filter_run

    run_dir = Path(_RUN.value).resolve()
    try:
        sessions = read_record(run_dir)
        if not sessions:
            raise ValueError(f"--run={_RUN.value}: no record of its tasks there; asyncrl-local writes record.json")
        if len(_SHARES.value) != 3:
            raise ValueError(f"--shares={','.join(_SHARES.value)}: three whole numbers, as 5,3,2")
        counts = filter_run(
            run_dir,
            Path(_OUTPUT.value),
            _NUM.value,
            identity=sessions[-1]["tasks"]["identity"],
            from_update=_FROM_UPDATE.value,
            shares=tuple(int(share) for share in _SHARES.value),
            high_reward=_HIGH.value,
            low_reward=_LOW.value,
            per_task=_PER_TASK.value,
            negative_weight=_NEGATIVE.value,
        )
    except ValueError as error:
        flags.exit_with(str(error))
    print(json.dumps(counts))
    return 0


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
