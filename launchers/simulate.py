"""asyncrl-simulate: what a run would cost, before a machine is paid for. Discrete events, the run's own policies.

asyncrl-simulate                                                   N = 2, 4, 8 at 1,000 actors, as table and picture
asyncrl-simulate --calibrate_from=runs/latest --sweep=lag.token_updates=0,2,8
"""

import json
from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags
from asyncrl_jax.config import override
from asyncrl_jax.simulate.inputs import Inputs

_SWEEP = absl_flags.DEFINE_string("sweep", "lag.token_updates=2,4,8", "Setting and values, as lag.token_updates=2,4,8.")
_CALIBRATE = absl_flags.DEFINE_string("calibrate_from", None, "Directory of a run whose settings and times are taken.")
_OUTPUT = absl_flags.DEFINE_string("output", "simulate.png", "Picture to write; empty for none.")
_PREFIX = "simulate."


def main() -> int:
    """Simulates every value; prints the table, the picture's path, and all figures as one line of JSON."""
    from rich.console import Console

    from asyncrl_jax.presets import preset
    from asyncrl_jax.simulate import sweep
    from asyncrl_jax.simulate.calibrate import calibrate

    given = flags.changes(cls=Inputs, prefix=_PREFIX)
    try:
        flags.check_output(_OUTPUT.value)
        if _CALIBRATE.value:
            config, measured = calibrate(Path(_CALIBRATE.value))
            config, inputs = override(config, flags.changes()), override(measured, given)
        else:
            named = absl_flags.FLAGS.preset or absl_flags.FLAGS.config_file
            config = flags.config_from_flags() if named else override(preset("thousand"), flags.changes())
            inputs = override(Inputs(), given)
        name, settings = sweep.parse_sweep(_SWEEP.value)
        outcomes = sweep.run_sweep(config, inputs, name, settings)
    except ValueError as error:
        flags.exit_with(str(error))
    Console().print(sweep.as_table(name, outcomes))
    if _OUTPUT.value:
        title = f"{config.actor.num_hosts:,} actors × {config.actor.slots} slots, mode {config.mode}"
        sweep.draw(name, outcomes, title).savefig(_OUTPUT.value, dpi=110)
        print(_OUTPUT.value)
    print(json.dumps({"sweep": name, "outcomes": {value: one.to_json() for value, one in outcomes.items()}}))
    return 0


def run() -> None:
    """Console entry point."""
    flags.define_settings(Inputs, _PREFIX)
    flags.run(main)


if __name__ == "__main__":
    run()
