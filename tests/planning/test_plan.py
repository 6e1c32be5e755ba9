"""Plans against what the compiler says, against worked examples, and as a binary."""

import dataclasses
import json
import math
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.learner.packing import PackedUpdate, max_rows
from asyncrl_jax.learner.state import abstract_state
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models.mesh import make_mesh
from asyncrl_jax.planning import rates, size
from asyncrl_jax.planning.devices import DEVICES
from asyncrl_jax.planning.plan import as_dict, make_plan

WORKLOAD = rates.Workload(
    episodes=1024,
    turns=16,
    tokens=64.0,
    sampled_tokens=32.0,
    environments=512,
    environment_step_s=0.05,
    effective_share=0.8,
)
FLEET = rates.Fleet(DEVICES["h100"], 1, 2, learner_mfu=0.35, decode_share=0.6, slots=64, price_per_device_hour=2.0)

INTEGERS = {"tokens", "targets", "segment_ids", "positions", "token_lag"}


def _compiled_bytes(config):
    """What the compiler gives the learner's own step: arguments, temporaries, and results that replace no argument."""
    state = abstract_state(config)
    rows = config.learner.microbatch_rows
    shape = (math.ceil(max_rows(config) / rows), rows, config.learner.pack_tokens)
    required = [name for name in PackedUpdate._fields if name not in PackedUpdate._field_defaults]
    dtypes = {name: jnp.int32 if name in INTEGERS else jnp.float32 for name in required}
    leaves = {name: jax.ShapeDtypeStruct(shape, dtype) for name, dtype in dtypes.items()}
    leaves |= {"loss_mask": jax.ShapeDtypeStruct(shape, bool), "num_microbatches": jax.ShapeDtypeStruct((), jnp.int32)}
    step = make_train_step(config, make_mesh(config.mesh))
    arguments = (state, state.params, PackedUpdate(**leaves), jax.ShapeDtypeStruct((), jnp.float32))
    found = step.lower(*arguments).compile().memory_analysis()
    return (
        found.argument_size_in_bytes + found.temp_size_in_bytes + found.output_size_in_bytes - found.alias_size_in_bytes
    )


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model.hidden_dim": 256, "model.expert_dim": 512, "model.vocab_size": 2048, "learner.groups_per_update": 2},
        {
            "model.hidden_dim": 128,
            "learner.pack_tokens": 512,
            "learner.microbatch_rows": 4,
            "learner.groups_per_update": 4,
        },
    ],
    ids=["quickstart", "wide", "long"],
)
def test_bytes_are_within_a_tenth_of_the_compilers(changes):
    config = override(Config(), changes)
    assert size.learner_bytes(config).total == pytest.approx(_compiled_bytes(config), rel=0.10)


def test_worked_example_64_experts_of_which_2_serve_a_token():
    assert size.active_share(0.80, num_experts=64, experts_per_token=2) == pytest.approx(0.225)


def test_worked_example_2048_episodes_over_512_environments():
    seconds = rates.environment_s(0.050, turns=16, episodes=2048, environments=512)
    assert seconds == pytest.approx(3.2)


def test_active_parameters_are_those_of_the_chosen_experts():
    config = override(Config(), {"model.num_experts": 8, "model.experts_per_token": 2})
    found = size.parameters(config.model)
    experts = 2 * 8 * 3 * 64 * 64  # layers, experts, matrices, hidden × expert width
    assert found.in_experts == experts
    assert found.active == pytest.approx(found.total - experts * 6 / 8)


def test_a_mesh_divides_what_lies_on_it():
    whole, cut = (
        size.learner_bytes(override(Config(), {"mesh.fsdp": fsdp, "mesh.expert": expert}))
        for fsdp, expert in ((1, 1), (2, 4))
    )
    assert whole.masters / 8 < cut.masters < whole.masters / 3  # norms and routers lie everywhere
    assert cut.activations < whole.activations / 6
    with pytest.raises(ValueError, match=r"mesh axis fsdp = 3 does not divide .* --config.mesh.fsdp"):
        size.learner_bytes(
            override(Config(), {"mesh.fsdp": 3, "learner.microbatch_rows": 6, "warm_start.batch_rows": 6})
        )


def test_the_pace_is_that_of_the_slowest_part_and_money_follows_it():
    plan = make_plan(Config(), WORKLOAD, FLEET)
    assert plan.rates.bound_by == "environments"
    assert plan.rates.batch_s == pytest.approx(0.05 * 16 * 1024 / 512)
    effective = WORKLOAD.episodes * WORKLOAD.sampled_tokens * WORKLOAD.effective_share
    assert plan.rates.cost_per_hour == 6.0
    expected = 6.0 / 3600 * plan.rates.batch_s / effective * 1e6
    assert plan.rates.cost_per_million_effective_tokens == pytest.approx(expected)
    slow = dataclasses.replace(FLEET, learner_mfu=1e-9)
    assert make_plan(Config(), WORKLOAD, slow).rates.bound_by in ("learner", "rollout")


def test_an_update_costs_three_forwards_and_those_of_counting_and_reference():
    with_reference = make_plan(Config(), WORKLOAD, FLEET)
    without = make_plan(override(Config(), {"learner.kl.coefficient": 0.0}), WORKLOAD, FLEET)
    assert with_reference.update_flops == pytest.approx(5 * with_reference.forward_flops)
    assert without.update_flops == pytest.approx(4 * without.forward_flops)
    assert without.learner_bytes.reference == 0 < with_reference.learner_bytes.reference


def test_decoding_is_bound_by_bytes_for_few_sequences_and_grows_with_them():
    device, few = FLEET.device, dataclasses.replace(FLEET, slots=1)
    rate = rates.decode_tokens_per_s(
        device, weight_bytes=1e9, cache_bytes_per_sequence=0.0, flops_per_token=1e9, fleet=few
    )
    assert rate == pytest.approx(device.memory_bytes_per_s * few.decode_share / 1e9)
    many = dataclasses.replace(FLEET, slots=16)
    more = rates.decode_tokens_per_s(
        device, weight_bytes=1e9, cache_bytes_per_sequence=0.0, flops_per_token=1e9, fleet=many
    )
    assert more == pytest.approx(16 * rate)


def test_what_does_not_fit_is_said_with_a_way_out():
    small = dataclasses.replace(FLEET, device=dataclasses.replace(FLEET.device, memory_bytes=1e6))
    problems = make_plan(Config(), WORKLOAD, small).problems
    assert len(problems) == 2
    assert "--config.mesh.fsdp" in problems[0]
    assert "--config.actor.slots" in problems[1]
    assert make_plan(Config(), WORKLOAD, FLEET).problems == []


def test_the_binary_prints_a_table_and_one_line_of_json():
    command = [sys.executable, "-m", "asyncrl_jax.launchers.plan", "--price_per_device_hour=2", "--actor_devices=2"]
    done = subprocess.run([*command, "--episodes=2048"], capture_output=True, text=True, check=True, timeout=100)
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["rates"]["environment_s"] == pytest.approx(3.2)
    assert figures["parameters"]["total"] == as_dict(make_plan(Config(), WORKLOAD, FLEET))["parameters"]["total"]
    assert "bound by" in done.stdout
    wrong = subprocess.run([*command, "--device=abacus"], capture_output=True, text=True, check=False, timeout=100)
    assert wrong.returncode == 2
    assert "--device=abacus: use one of" in wrong.stderr
