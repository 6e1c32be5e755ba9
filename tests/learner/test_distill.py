"""On-policy distillation. Every value is computed here again from whole arrays of logits."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from update_setup import TINY, ramp_advantages, random_groups, tiny_config, zero_lags

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_distill import DistillConfig
from asyncrl_jax.config_hf import read_teachers
from asyncrl_jax.learner.distill import load_teachers, mixture_logprobs, sampled_divergence, whole_divergence
from asyncrl_jax.learner.forward import Forward
from asyncrl_jax.learner.packing import pack_update
from asyncrl_jax.learner.state import copy_params, create_state
from asyncrl_jax.learner.step import make_train_step
from asyncrl_jax.models import graph_of, init_params, save_params
from asyncrl_jax.models.mesh import make_mesh
from asyncrl_jax.models.transformer import merge

SHARES = (0.75, 0.25)
RATE = np.float32(1e-2)


@pytest.fixture(scope="module")
def teacher_dirs(tmp_path_factory):
    """Two teachers: one like the student, one that is wider and has another number of experts."""
    like = tiny_config().model
    other = override(Config(), TINY | {"model.hidden_dim": 24, "model.num_experts": 3, "model.num_layers": 2}).model
    directories = []
    for seed, model in ((11, like), (12, other)):
        directory = tmp_path_factory.mktemp(f"teacher{seed}")
        save_params(model, init_params(model, seed), directory)
        directories.append(str(directory))
    return tuple(directories)


def logits_of(model, params, packed):
    return merge(graph_of(model), params)(packed.tokens, packed.positions, packed.segment_ids)


def packed_rows(config, seed=0):
    groups = random_groups(seed)
    return pack_update(groups, ramp_advantages(groups), zero_lags(groups), config)


def test_a_mixture_of_teachers_is_the_log_of_their_mean():
    probs = np.random.default_rng(0).dirichlet(np.ones(7), size=(2, 5)).astype(np.float32)
    mixed = mixture_logprobs(list(np.log(probs)), SHARES)
    np.testing.assert_allclose(np.exp(mixed), SHARES[0] * probs[0] + SHARES[1] * probs[1], rtol=1e-6)
    assert np.isclose(np.exp(mixed).sum(axis=-1), 1, rtol=1e-6).all()


@pytest.mark.parametrize("chunk_tokens", [10, 1000])
def test_the_whole_divergence_and_its_gradient_are_those_of_the_formula(chunk_tokens):
    config = tiny_config()
    student, *teachers = (init_params(config.model, seed) for seed in range(3))
    packed = packed_rows(config)
    batch = packed._replace(**{name: array[0] for name, array in packed._asdict().items() if np.ndim(array) >= 3})
    forward = Forward(graph_of(config.model))
    temperature, mask = jnp.asarray(batch.temperature), jnp.asarray(batch.loss_mask)

    def ours(params):
        placed = [(forward, forward.trunk(p, batch)[0], p) for p in teachers]
        own = forward, forward.trunk(params, batch)[0], params
        terms = whole_divergence(own, placed, SHARES, temperature, mask, chunk_tokens)
        assert terms.shape == mask.shape
        return jnp.sum(terms * jnp.arange(mask.size).reshape(mask.shape)), terms

    def formula(params):
        logprobs = [
            jax.nn.log_softmax(forward.logits(p, batch)[0] / temperature[..., None]) for p in (params, *teachers)
        ]
        mixture = jnp.log(SHARES[0] * jnp.exp(logprobs[1]) + SHARES[1] * jnp.exp(logprobs[2]))
        terms = jnp.where(mask, jnp.sum(jnp.exp(logprobs[0]) * (logprobs[0] - mixture), axis=-1), 0)
        return jnp.sum(terms * jnp.arange(mask.size).reshape(mask.shape)), terms

    (_, terms), gradient = jax.jit(jax.value_and_grad(ours, has_aux=True))(student)
    (_, expected), expected_gradient = jax.jit(jax.value_and_grad(formula, has_aux=True))(student)
    np.testing.assert_allclose(terms, expected, rtol=1e-4, atol=1e-6)
    assert (terms >= -1e-6).all()
    assert (np.asarray(terms)[np.asarray(mask)] > 0).all()
    for name, value in gradient.items():
        np.testing.assert_allclose(
            value, expected_gradient[name], rtol=1e-3, atol=1e-5 * np.abs(value).max(), err_msg=name
        )


def test_the_sampled_divergence_has_the_gradient_of_the_whole_one_on_average():
    """Summed over every token with its probability, the estimator's gradient is that of the KL, on policy and off."""
    rng = np.random.default_rng(3)
    logits, behaviour_logits = rng.standard_normal((2, 6)).astype(np.float32) * np.float32(0.1)  # no ratio is truncated
    teachers = [jax.nn.log_softmax(row) for row in rng.standard_normal((2, 6)).astype(np.float32)]
    behaviour = jax.nn.log_softmax(behaviour_logits)
    mask = jnp.ones((1, 6), bool)

    def estimate(logits):
        terms = sampled_divergence(
            target_logprobs=jax.nn.log_softmax(logits)[None],
            behaviour_logprobs=behaviour[None],
            teacher_logprobs=[of_one[None] for of_one in teachers],
            shares=SHARES,
            loss_mask=mask,
        )
        return jnp.sum(jnp.exp(behaviour) * terms[0])

    def whole(logits):
        own = jax.nn.log_softmax(logits)
        return jnp.sum(
            jnp.exp(own) * (own - jnp.log(sum(s * jnp.exp(t) for s, t in zip(SHARES, teachers, strict=True))))
        )

    np.testing.assert_allclose(estimate(logits), whole(logits), rtol=1e-5)
    np.testing.assert_allclose(jax.grad(estimate)(logits), jax.grad(whole)(logits), rtol=1e-4, atol=1e-6)


@functools.cache
def compiled(teachers, **changes):
    settings = {"distill.teachers": teachers, "distill.shares": SHARES, "objective.coefficient": 0.0}
    config = tiny_config(**settings | {"kl.coefficient": 0.0, "balance_coefficient": 0.0} | changes)
    mesh = make_mesh(config.mesh)
    return config, make_train_step(config, mesh), load_teachers(config, mesh)


def update(teacher_dirs, state=None, **changes):
    config, step, teachers = compiled(teacher_dirs, **changes)
    state = create_state(config, 0) if state is None else state
    state, metrics = step(state, copy_params(state.params), packed_rows(config), RATE, *teachers)
    assert step.num_traces == 1
    return state, metrics


def test_the_step_learns_the_mixture_of_unlike_teachers(teacher_dirs):
    """With no weight on the reward, the loss is the mean KL per token, and it falls."""
    config, _, teachers = compiled(teacher_dirs)
    packed = packed_rows(config)
    state = create_state(config, 0)
    models = (config.model, *read_teachers(config.learner.distill.teachers, config.model.vocab_size))
    kls = []
    for m in range(int(packed.num_microbatches)):
        batch = packed._replace(**{name: array[m] for name, array in packed._asdict().items() if np.ndim(array) >= 3})
        logprobs = [
            jax.nn.log_softmax(logits_of(model, params, batch) / batch.temperature[..., None])
            for model, params in zip(models, (state.params, *teachers), strict=True)
        ]
        mixture = mixture_logprobs(logprobs[1:], SHARES)
        kl_BT = jnp.sum(jnp.exp(logprobs[0]) * (logprobs[0] - mixture), axis=-1)
        kls.append(np.asarray(kl_BT)[batch.loss_mask])
    expected = np.concatenate(kls).mean()
    losses = []
    for _ in range(12):
        state, metrics = update(teacher_dirs, state)
        losses.append(float(metrics["distill_loss"]))
        np.testing.assert_allclose(metrics["loss"], metrics["distill_loss"], rtol=1e-5)
    np.testing.assert_allclose(losses[0], expected, rtol=1e-4)
    assert losses[-1] < 0.6 * losses[0]


def test_neither_microbatches_nor_packing_change_the_gradient(teacher_dirs):
    gradient, other = (
        update(teacher_dirs, **cut)[0].opt_state[1].mu for cut in ({}, {"microbatch_rows": 1, "pack_tokens": 16})
    )
    for name, value in gradient.items():
        np.testing.assert_allclose(other[name], value, rtol=1e-3, atol=1e-4 * np.abs(value).max(), err_msg=name)


def test_sampled_tokens_alone_serve_too_and_join_the_reward(teacher_dirs):
    changes = {"distill.match": "logprobs", "objective.coefficient": 1.0, "distill.coefficient": 0.5}
    _, metrics = update(teacher_dirs, **changes)
    assert float(metrics["distill_loss"]) != 0
    np.testing.assert_allclose(metrics["loss"], metrics["policy_loss"] + 0.5 * metrics["distill_loss"], rtol=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"match": "tokens"}, r"learner.distill.match=tokens: use one of logits, logprobs"),
        ({"teachers": ("a", "b"), "shares": (1.0,)}, r"learner.distill.shares=\(1.0,\): empty, or a number above 0"),
        ({"teachers": ("a",), "shares": (0.0,)}, "learner.distill.shares"),
        ({"coefficient": 0.0}, "learner.distill.coefficient=0.0: more than 0"),
        ({"teachers": ("",)}, "learner.distill.teachers"),
    ],
)
def test_settings_without_sense_are_named(changes, message):
    with pytest.raises(ValueError, match=message):
        DistillConfig(**changes)


def test_a_run_that_learns_from_nothing_is_refused():
    with pytest.raises(ValueError, match=r"learner.objective.coefficient=0.0: 0 needs learner.distill.teachers"):
        tiny_config(**{"objective.coefficient": 0.0, "kl.coefficient": 0.0})


def test_a_teacher_with_other_tokens_is_refused(teacher_dirs):
    config = override(tiny_config(**{"distill.teachers": teacher_dirs[:1]}), {"model.vocab_size": 15})
    with pytest.raises(ValueError, match=r"teachers=.*: it knows 16 tokens and model.vocab_size is 15"):
        make_train_step(config, make_mesh(config.mesh))
