"""The compiled update with what the default leaves out: critic, KL as a reward, moving policies, whitening."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from update_setup import ramp_advantages, random_groups, tiny_config, zero_lags

from asyncrl_jax.learner.forward import Forward
from asyncrl_jax.learner.packing import PackedUpdate, pack_update
from asyncrl_jax.learner.state import copy_params, create_state
from asyncrl_jax.learner.step import _Scored, _Step, make_train_step
from asyncrl_jax.models import graph_of, init_params
from asyncrl_jax.models.mesh import make_mesh

RATE = np.float32(1e-2)
BETA1 = 0.9  # of Adam

EVERYTHING = {
    "advantage.estimator": "gae",
    "advantage.whiten": True,
    "kl.placement": "reward",
    "kl.estimator": "k1",
    "kl.target": 0.05,
    "kl.reference": "ema",
    "kl.reference_decay": 0.75,
    "kl.lag_gain": 0.5,
    "objective.correction": "decoupled",
    "objective.proximal_decay": 0.5,
    "objective.weight_bound": "truncate",
    "objective.aggregation": "sequence_mean",
    "objective.entropy_coefficient": 0.01,
    "critic.slow_decay": 0.5,
    "lr_lag_slowdown": 0.25,
}


def packed_update(groups, config, lag=2):
    rewards = [[t.reward for t in g.trajectories] for g in groups]
    lags = [[np.full(len(t.tokens), lag, np.int32) for t in g.trajectories] for g in groups]
    return pack_update(groups, ramp_advantages(groups), lags, config, rewards=rewards)


@functools.cache
def compiled(**changes):
    config = tiny_config(**changes)
    return config, make_train_step(config, make_mesh(config.mesh))


def start(config):
    """A state whose critic says something, and whose reference and proximal policy are other weights."""
    state = create_state(config, 0)
    critic = state.critic | {"critic.out": jnp.full_like(state.critic["critic.out"], 0.1)}
    moving = state.moving | {
        "reference": init_params(config.model, 1),
        "proximal": jax.tree.map(lambda leaf: 1.02 * leaf, copy_params(state.params)),
        "critic": copy_params(critic),
    }
    return state._replace(critic=critic, moving=moving)


def run(groups, **changes):
    config, step = compiled(**(EVERYTHING | changes))
    before = jax.tree.map(np.array, start(config))
    state, metrics = step(start(config), init_params(config.model, 2), packed_update(groups, config), RATE)
    assert step.num_traces == 1
    return before, state, {name: float(value) for name, value in metrics.items() if value.ndim == 0}


def test_loss_01_with_critic_and_kl_as_a_reward_the_batch_is_still_the_batch():
    """LOSS-01. Advantages are estimated and whitened over the whole step, however it is cut."""
    _, state, metrics = run(random_groups())
    _, other, other_metrics = run(random_groups()[::-1], microbatch_rows=1, pack_tokens=16)
    gradient, other_gradient = (s.opt_state[1].mu for s in (state, other))
    assert any(np.any(gradient[name]) for name in state.critic)
    for name, value in gradient.items():
        scale = 1e-4 * np.abs(value).max()
        np.testing.assert_allclose(other_gradient[name], value, rtol=1e-3, atol=scale, err_msg=name)
    for name in ("loss", "policy_loss", "value_loss", "kl", "entropy", "weight_mean", "clip_fraction"):
        np.testing.assert_allclose(other_metrics[name], metrics[name], rtol=1e-4, err_msg=name)


def test_what_follows_the_weights_moves_after_each_update_as_the_config_says():
    before, state, metrics = run(random_groups())
    name = "lm_head"
    assert np.any(state.params[name] != before.params[name])
    np.testing.assert_allclose(
        state.moving["reference"][name], 0.75 * before.moving["reference"][name] + 0.25 * state.params[name], rtol=1e-5
    )
    np.testing.assert_allclose(
        state.moving["proximal"][name], 0.5 * before.moving["proximal"][name] + 0.5 * state.params[name], rtol=1e-5
    )
    name = "critic.out"
    np.testing.assert_allclose(
        state.moving["critic"][name], 0.5 * before.moving["critic"][name] + 0.5 * state.critic[name], rtol=1e-5
    )
    assert metrics["kl"] > 0.06  # above the target of 0.05 by more than the clip
    np.testing.assert_allclose(state.moving["kl_coefficient"], 0.1 * 1.02, rtol=1e-5)


def test_step_and_coefficient_respond_to_the_lag_of_the_batch():
    """Lag 2: the rate is divided by 1 + 0.25 · 2, the coefficient multiplied by 1 + 0.5 · 2."""
    _, _, metrics = run(random_groups())
    np.testing.assert_allclose(
        [metrics["lag_mean"], metrics["learning_rate"], metrics["kl_coefficient"]], [2, 1e-2 / 1.5, 0.2], rtol=1e-6
    )


def test_a_skipped_update_moves_nothing_that_follows_the_weights():
    config, step = compiled(**EVERYTHING)
    packed = packed_update(random_groups(), config)
    packed = packed._replace(rewards=np.where(packed.loss_mask, np.nan, 0).astype(np.float32))
    before = jax.tree.map(np.array, start(config))
    state, metrics = step(start(config), init_params(config.model, 2), packed, RATE)
    assert metrics["skipped"] == state.skipped == 1
    jax.tree.map(np.testing.assert_array_equal, state._replace(skipped=before.skipped), before)


def test_reinforce_pp_does_not_depend_on_the_scale_of_rewards():
    """Whitened over the tokens of the step: 3 · reward + 1 gives the same gradient."""
    config, step = compiled(**{"advantage.estimator": "reinforce_pp", "objective.loss": "gspo"})
    packed = packed_update(random_groups(), config)
    moments = []
    for scale, shift in ((1.0, 0.0), (3.0, 1.0)):
        scaled = packed._replace(advantages=(scale * packed.advantages + shift).astype(np.float32))
        state, _ = step(create_state(config, 0), init_params(config.model, 1), scaled, RATE)
        moments.append(state.opt_state[1].mu)
    for name, value in moments[0].items():
        scale = 1e-4 * np.abs(value).max()
        np.testing.assert_allclose(moments[1][name], value, rtol=1e-3, atol=scale, err_msg=name)


def small_step(**changes):
    """One row of two sequences: actions at 0, 2 | 3, and a tool token at 1."""
    config = tiny_config(**changes)
    row = {name: np.zeros((1, 1, 4), np.float32) for name in PackedUpdate._fields}
    packed = PackedUpdate(**row)._replace(
        segment_ids=np.array([[[1, 1, 1, 2]]]),
        loss_mask=np.array([[[True, False, True, True]]]),
        advantages=np.array([[[1.0, 9.0, 1.0, -1.0]]], np.float32),
        rewards=np.array([[[0.0, 0.0, 1.0, 0.5]]], np.float32),
    )
    scored = _Scored(
        logprobs=np.array([[[-1.0, 7.0, -2.0, -3.0]]], np.float32),
        reference=np.array([[[-1.5, np.nan, -1.0, -3.0]]], np.float32),
        values=np.array([[[0.5, 9.0, 0.25, 0.0]]], np.float32),
    )
    return _Step(config, Forward(None)), packed, scored


def test_the_kl_as_a_reward_is_taken_from_every_token_up_to_the_end_of_its_sequence():
    """k1 of the actions is (0.5, −1 | 0); coefficient 0.1: what is still to come costs (−0.05, −0.1 | 0)."""
    step, packed, scored = small_step(**{"kl.placement": "reward", "kl.estimator": "k1"})
    advantages, _ = step.credited(packed, scored, 0.1)
    np.testing.assert_allclose(advantages[packed.loss_mask], [1.05, 1.1, -1.0], rtol=1e-6)


def test_with_a_critic_the_kl_enters_the_reward_that_it_learns():
    """γ = λ = 1: returns are the rewards still to come, less the KL; advantages are returns less values."""
    changes = {"kl.placement": "reward", "kl.estimator": "k1", "advantage.estimator": "gae", "advantage.decay": 1.0}
    step, packed, scored = small_step(**changes)
    advantages, returns = step.credited(packed, scored, 0.1)
    np.testing.assert_allclose(returns[packed.loss_mask], [1.05, 1.1, 0.5], rtol=1e-6)
    np.testing.assert_allclose(advantages[packed.loss_mask], [0.55, 0.85, 0.5], rtol=1e-6)


def test_mis_11_the_same_tokens_have_the_same_logprobs_twice():
    """MIS-11. Nothing random in the forward pass: no dropout, no router noise unless asked for."""
    config = tiny_config()
    forward = Forward(graph_of(config.model))
    groups = [random_groups()[0]]
    packed = pack_update(groups, ramp_advantages(groups), zero_lags(groups), config)
    batch = jax.tree.map(lambda array: array[0], packed._replace(num_microbatches=np.zeros(1)))
    params = init_params(config.model, 0)
    logprobs = jax.jit(forward.logprobs)
    np.testing.assert_array_equal(logprobs(params, batch), logprobs(params, batch))
