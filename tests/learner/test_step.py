"""The compiled update against the objective written out for whole, unpacked trajectories."""

import functools
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from update_setup import ramp_advantages, random_groups, tiny_config, zero_lags

from asyncrl_jax.learner.canary import canary_logprobs
from asyncrl_jax.learner.optimizer import learning_rate_at
from asyncrl_jax.learner.packing import pack_update
from asyncrl_jax.learner.state import copy_params, create_state
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models import graph_of, init_params, merge
from asyncrl_jax.models.mesh import make_mesh

RATE = np.float32(1e-3)
BETA1 = 0.9  # of Adam
# Compiling, not computing, takes the time on them.
FOUR_DEVICES = (
    "--xla_force_host_platform_device_count=4 --xla_backend_optimization_level=0 "
    "--xla_llvm_disable_expensive_passes=true"
)


def packed_update(groups, config=None, **changes):
    packed = pack_update(groups, ramp_advantages(groups), zero_lags(groups), config or tiny_config())
    return packed._replace(**changes)


@functools.cache
def compiled(**changes):
    config = tiny_config(**changes)
    return config, make_train_step(config, make_mesh(config.mesh))


@functools.cache
def reference_params():
    return init_params(tiny_config().model, 1)


def run(packed, **changes):
    """(gradient, metrics, state) of the first update: Adam's first moment is (1 − β₁) · gradient."""
    config, step = compiled(**changes)
    state, metrics = step(create_state(config, 0), reference_params(), packed, RATE)
    gradient = {name: np.asarray(moment) / (1 - BETA1) for name, moment in state.opt_state[1].mu.items()}
    return gradient, {name: float(value) for name, value in metrics.items() if value.ndim == 0}, state


def written_out_loss(params, groups, config):
    """The objective of a step, one trajectory a row, with nothing packed, split or shared."""
    graph, learner = graph_of(config.model), config.learner
    trajectories = [(t, g.ticket.temperature) for g in groups for t in g.trajectories]
    advantages = np.concatenate(ramp_advantages(groups))
    width = config.environment.max_tokens
    tokens, mask, behaviour = (np.zeros((len(trajectories), width), np.float32) for _ in range(3))
    for i, (t, _) in enumerate(trajectories):
        for array, value in [(tokens, t.tokens), (mask, t.loss_mask), (behaviour, t.behaviour_logprobs)]:
            array[i, : len(value)] = value
    tokens = tokens.astype(np.int32)
    lengths = np.array([len(t.tokens) - 1 for t, _ in trajectories])
    segments = (np.arange(width)[None] < lengths[:, None]).astype(np.int32)
    temperatures = np.array([temperature for _, temperature in trajectories], np.float32)

    def logprobs(params):
        output = merge(graph, params).forward(tokens, np.tile(np.arange(width), (len(tokens), 1)), segments)
        scaled = jax.nn.log_softmax(output.logits_BTV / temperatures[:, None, None])[:, :-1]
        return jnp.take_along_axis(scaled, tokens[:, 1:, None], axis=-1)[..., 0], output.routing

    (target, routing), (reference, _) = logprobs(params), logprobs(reference_params())
    mask, behaviour = mask[:, 1:], behaviour[:, 1:]
    ratio = jnp.exp(jnp.where(mask > 0, target - behaviour, 0.0))
    clipped = jnp.clip(ratio, 1 - learner.objective.clip_range, 1 + learner.objective.clip_range)
    policy = -jnp.minimum(ratio * advantages[:, None], clipped * advantages[:, None])
    d = reference - target
    kl = jnp.minimum(ratio, 2.0) * (jnp.exp(d) - 1 - d)
    token_mean = jnp.sum(mask * (policy + learner.kl.coefficient * kl)) / mask.sum()
    share = routing.counts_E / routing.counts_E.sum(axis=1, keepdims=True)
    mean_prob = routing.prob_sums_E / lengths.sum()
    balance = config.model.num_experts * jnp.mean(jnp.sum(share * mean_prob, axis=1))
    return token_mean + learner.balance_coefficient * balance


def assert_same_gradient(actual, expected):
    """Within 1e-5 of the largest element of the leaf."""
    assert actual.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(actual[name], value, rtol=1e-4, atol=1e-5 * np.abs(value).max(), err_msg=name)


def test_loss_and_gradient_are_those_of_the_objective_written_out():
    groups = random_groups()
    gradient, metrics, _ = run(packed_update(groups))
    params = create_state(tiny_config(), 0).params
    objective = functools.partial(written_out_loss, groups=groups, config=tiny_config())
    expected, expected_gradient = jax.jit(jax.value_and_grad(objective))(params)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)
    assert_same_gradient(gradient, expected_gradient)
    parts = metrics["policy_loss"] + 0.1 * metrics["kl"] + 0.1 * metrics["balance_loss"]
    np.testing.assert_allclose(metrics["loss"], parts, rtol=1e-5)
    np.testing.assert_allclose(metrics["grad_norm"], optax.tree.norm(expected_gradient), rtol=1e-4)


def test_loss_01_the_batch_is_the_batch():
    """LOSS-01, MOE-04. Microbatch size, row length, and order of groups change neither loss nor gradient."""
    groups = random_groups()
    gradient, metrics, _ = run(packed_update(groups))
    one_by_one = tiny_config(microbatch_rows=1, pack_tokens=16)
    others = [run(packed_update(groups, one_by_one), microbatch_rows=1, pack_tokens=16)]
    order = [2, 0, 3, 1]
    advantages = ramp_advantages(groups)
    shuffled = [groups[i] for i in order]
    packed = pack_update(shuffled, [advantages[i] for i in order], zero_lags(shuffled), tiny_config())
    others.append(run(packed))
    for other, other_metrics, _ in others:
        assert_same_gradient(other, gradient)
        for name in ("loss", "policy_loss", "kl", "balance_loss", "entropy", "tokens", "clip_fraction"):
            np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=1e-4, err_msg=name)


def test_the_step_is_compiled_once_for_any_number_of_trajectories():
    config, step = compiled()
    state = create_state(config, 0)
    for num in (1, 4, 2):
        state, _ = step(state, reference_params(), packed_update(random_groups(num=num)), RATE)
    assert step.num_traces == 1


def test_loss_02_values_outside_of_the_mask_change_nothing():
    """LOSS-02, TOK-03. Log-probs, advantages and lags of prompt and tool tokens."""
    packed = packed_update(random_groups())
    gradient, metrics, _ = run(packed)
    mask = packed.loss_mask
    spoilt = packed._replace(
        behaviour_logprobs=np.where(mask, packed.behaviour_logprobs, -np.inf).astype(np.float32),
        advantages=np.where(mask, packed.advantages, np.nan).astype(np.float32),
        token_lag=np.where(mask, packed.token_lag, 99).astype(np.int32),
    )
    of_spoilt, spoilt_metrics, _ = run(spoilt)
    assert spoilt_metrics == metrics
    for name, value in gradient.items():
        np.testing.assert_array_equal(of_spoilt[name], value)


@pytest.mark.parametrize("what", ["behaviour_logprobs", "advantages", "empty", "learning_rate_0"])
def test_an_update_that_cannot_be_applied_changes_nothing_and_is_counted(what):
    """LOSS-03. A NaN inside of the mask, a batch with nothing to train on; a rate of 0 is applied and moves nothing."""
    config, step = compiled()
    packed = packed_update(random_groups())
    rate = RATE
    if what == "empty":
        packed = packed._replace(loss_mask=np.zeros_like(packed.loss_mask))
    elif what == "learning_rate_0":
        rate = np.float32(0)
    else:
        packed = packed._replace(**{what: np.where(packed.loss_mask, np.nan, 0).astype(np.float32)})
    state = create_state(config, 0)
    before = copy_params(state.params)
    state, metrics = step(state, reference_params(), packed, rate)
    for name, value in before.items():
        np.testing.assert_array_equal(state.params[name], value)
    assert what != "empty" or all(np.all(np.isfinite(value)) for value in metrics.values())
    applied = what == "learning_rate_0"
    assert (int(state.update), int(state.skipped), int(metrics["skipped"])) == (applied, not applied, not applied)
    assert applied or not any(np.any(moment) for moment in state.opt_state[1].mu.values())
    state, metrics = step(state, reference_params(), packed_update(random_groups()), RATE)
    assert (int(state.update), int(metrics["skipped"])) == (1 + applied, 0)
    assert not np.array_equal(state.params["lm_head"], before["lm_head"])


def test_mis_03_tokens_sampled_by_these_weights_have_ratio_1():
    """MIS-03. At lag 0 the gap is below 1e-5 and nothing is clipped; other weights, or a missing temperature, show."""
    config, groups = tiny_config(), random_groups()
    packed = packed_update(groups)
    state = create_state(config, 0)

    @jax.jit
    def sampled_logprobs(params, temperature):
        shape = (-1, packed.tokens.shape[-1])
        inputs = (jnp.reshape(x, shape) for x in (packed.tokens, packed.positions, packed.segment_ids))
        logits = merge(graph_of(config.model), params)(*inputs)
        scaled = jax.nn.log_softmax(logits / jnp.reshape(temperature, (*logits.shape[:2], 1)))
        return jnp.take_along_axis(scaled, jnp.reshape(packed.targets, (*logits.shape[:2], 1)), axis=-1)

    def metrics_with(params, temperature, lag=0):
        behaviour = np.asarray(sampled_logprobs(params, temperature)).reshape(packed.tokens.shape)
        lags = np.full_like(packed.token_lag, lag)
        return run(packed._replace(behaviour_logprobs=behaviour, token_lag=lags))[1]

    metrics = metrics_with(state.params, packed.temperature)
    assert metrics["logprob_gap_lag0"] < 1e-5
    assert metrics["tokens_lag0"] == metrics["tokens"] == packed.num_tokens
    assert metrics["clip_fraction"] == 0
    np.testing.assert_allclose([metrics["ratio_mean"], metrics["ratio_max"], metrics["ess"]], 1.0, atol=1e-5)
    assert metrics_with(state.params, np.ones_like(packed.temperature))["logprob_gap_lag0"] > 1e-2
    assert metrics_with(reference_params(), packed.temperature)["logprob_gap_lag0"] > 1e-2
    stale = metrics_with(reference_params(), packed.temperature, lag=3)
    assert (stale["logprob_gap_lag0"], stale["tokens_lag0"], stale["lag_mean"]) == (0, 0, 3)


def test_moe_10_expert_load_is_measured_per_layer():
    """MOE-10. Counts of a step are those of its tokens."""
    _, metrics, _ = run(packed_update(random_groups()))
    largest, smallest = metrics["expert_load_max/layer_0"], metrics["expert_load_min/layer_0"]
    assert smallest < 1 < largest
    np.testing.assert_allclose(metrics["expert_load_max_over_min/layer_0"], largest / smallest, rtol=1e-5)


def test_updates_are_adamw_at_the_rate_given():
    gradient, _, state = run(packed_update(random_groups()))
    before = create_state(tiny_config(), 0).params
    for name, value in gradient.items():
        expected = before[name] - RATE * value / (np.abs(value) + 1e-8)  # the first step of Adam
        large = np.abs(value) > 1e-6
        np.testing.assert_allclose(state.params[name][large], expected[large], rtol=1e-4, atol=1e-6, err_msg=name)


def test_the_learning_rate_rises_linearly_then_stays_or_falls():
    learner = tiny_config(learning_rate=1.0, lr_warmup_updates=4, lr_decay_updates=0).learner
    assert [learning_rate_at(learner, update) for update in (0, 1, 3, 4, 100)] == [0.25, 0.5, 1.0, 1.0, 1.0]
    learner = tiny_config(learning_rate=1.0, lr_warmup_updates=4, lr_decay_updates=14).learner
    rates = [learning_rate_at(learner, update) for update in (0, 1, 3, 8, 13, 100)]
    assert rates == pytest.approx([0.25, 0.5, 1.0, 0.55, 0.1, 0.1])


def test_a_canary_is_the_logprob_of_each_next_token():
    """Each from a forward pass over the tokens before it alone."""
    params, tokens = reference_params(), np.array([[1, 5, 2, 9], [0, 0, 3, 3]])
    forward = jax.jit(lambda *args: merge(graph_of(tiny_config().model), params)(*args))
    expected = np.zeros((2, 3))
    for t in range(3):
        before = np.tile(np.arange(4) <= t, (2, 1))
        logits = forward(np.where(before, tokens, 7), np.tile(np.arange(4), (2, 1)), before.astype(np.int32))
        expected[:, t] = jax.nn.log_softmax(logits[:, t])[np.arange(2), tokens[:, t + 1]]
    np.testing.assert_allclose(canary_logprobs(tiny_config(), params, tokens), expected, atol=1e-5)


@pytest.mark.timeout(400)
def test_moe_08_a_mesh_of_four_devices_gives_the_same_update(tmp_path):
    """LOSS-01, MOE-08. Rows over fsdp, experts over expert, on forced host devices in a process of its own."""
    gradient, metrics, _ = run(packed_update(random_groups()))
    script, output = pathlib.Path(__file__).with_name("sharded_update.py"), tmp_path / "update.npz"
    environment = os.environ | {"XLA_FLAGS": FOUR_DEVICES, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script, output], env=environment, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stderr[-2000:]
    sharded = dict(np.load(output))
    assert sharded.pop("num_devices") == 4
    assert sharded.pop("num_expert_shards") == 2
    np.testing.assert_allclose(sharded.pop("loss"), metrics["loss"], rtol=1e-5)
    assert_same_gradient({name: moment / (1 - BETA1) for name, moment in sharded.items()}, gradient)


@pytest.mark.timeout(400)
def test_ckpt_05_an_update_goes_on_where_it_stood_on_a_larger_and_a_smaller_mesh(tmp_path):
    """1, then 4, then 2 devices: weights, moments and counts restored to the bit, and the updates those of one."""
    script = pathlib.Path(__file__).with_name("changing_meshes.py")
    environment = os.environ | {"XLA_FLAGS": FOUR_DEVICES, "JAX_PLATFORMS": "cpu"}
    done = subprocess.run(
        [sys.executable, script, tmp_path], env=environment, capture_output=True, text=True, timeout=350
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert float(done.stdout.splitlines()[-1]) < 1e-5
