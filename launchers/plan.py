"""asyncrl-plan: memory, arithmetic, time and cost of a config on a mesh, before any machine is paid for."""

import json

from absl import flags as absl_flags

from asyncrl_jax import flags

_DEVICE = absl_flags.DEFINE_string("device", "h100", "Accelerator: a100, h100, h200, b200, v5e, v5p or v6e.")
_ACTORS = absl_flags.DEFINE_integer("actor_devices", 8, "Devices that sample.")
_MFU = absl_flags.DEFINE_float("learner_mfu", 0.35, "Share of the peak arithmetic that updates reach; measure yours.")
_DECODE = absl_flags.DEFINE_float("decode_share", 0.6, "Share of the memory bandwidth that decoding reaches.")
_PRICE = absl_flags.DEFINE_float("price_per_device_hour", 0.0, "Price of one device for an hour, in your currency.")
_EPISODES = absl_flags.DEFINE_integer("episodes", 1024, "Trajectories in a batch.")
_TURNS = absl_flags.DEFINE_integer("turns", 16, "Environment steps of an episode.")
_ENVIRONMENTS = absl_flags.DEFINE_integer("environments", 512, "Environments that run at once.")
_STEP_S = absl_flags.DEFINE_float("environment_step_s", 0.05, "Seconds of one environment step.")
_SAMPLED = absl_flags.DEFINE_float("sampled_share", 0.5, "Share of a trajectory's tokens that the policy samples.")
_EFFECTIVE = absl_flags.DEFINE_float("effective_share", 0.8, "Share of sampled tokens that have an advantage.")


def main() -> int:
    """Prints the plan as a table, what does not fit, and all figures as one line of JSON."""
    from rich.console import Console

    from asyncrl_jax.planning import plan
    from asyncrl_jax.planning.devices import DEVICES
    from asyncrl_jax.planning.rates import Fleet, Workload

    config = flags.config_from_flags()
    if _DEVICE.value not in DEVICES:
        flags.exit_with(f"--device={_DEVICE.value}: use one of {', '.join(DEVICES)}")
    mesh, tokens = config.mesh, float(config.environment.max_tokens)
    learner_devices = mesh.data * mesh.fsdp * mesh.expert * mesh.tensor
    fleet = Fleet(
        DEVICES[_DEVICE.value],
        learner_devices,
        _ACTORS.value,
        _MFU.value,
        _DECODE.value,
        config.actor.slots,
        _PRICE.value,
    )
    sampled = tokens * _SAMPLED.value
    workload = Workload(
        _EPISODES.value, _TURNS.value, tokens, sampled, _ENVIRONMENTS.value, _STEP_S.value, _EFFECTIVE.value
    )
    made = plan.make_plan(config, workload, fleet)
    Console().print(plan.as_table(made), *[f"does not fit: {problem}" for problem in made.problems], sep="\n")
    print(json.dumps(plan.as_dict(made)))
    return 0


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
