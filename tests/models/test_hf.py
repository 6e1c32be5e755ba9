"""Checkpoints of every family: transformers → here → transformers, the same function and the same gradients in fp32.

Dimensions: B rows, T positions, E experts, V vocabulary.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.balance import switch_balance_loss
from asyncrl_jax.models import (
    decode_step,
    extend,
    from_hf,
    from_tensors,
    graph_of,
    init_cache,
    merge,
    params_of,
    to_hf,
)

torch = pytest.importorskip("torch", reason="the extra `hf` is not installed")
from hf_setup import FAMILIES, checkpoint, load_model  # noqa: E402, needs torch

TOKENS_BT = np.random.default_rng(0).integers(0, 37, (2, 11))
BALANCE = 0.02
LIMIT = 1e-5  # relative


@pytest.fixture(scope="module", params=FAMILIES)
def given(request, tmp_path_factory):
    """(transformers' model, directory, our decoder)."""
    base = tmp_path_factory.getbasetemp() / "hf"
    model, directory = checkpoint(request.param, str(base))
    return model, directory, from_hf(directory)


@functools.cache
def _forward(config):
    return jax.jit(lambda params, tokens: merge(graph_of(config), params)(tokens))


def logits_of(decoder, tokens_BT=TOKENS_BT):
    return np.asarray(_forward(decoder.config)(params_of(decoder), tokens_BT))


def difference(ours, theirs):
    """Of the norms, relative."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    return np.linalg.norm(ours - theirs) / max(np.linalg.norm(theirs), 1e-12)


def torch_logits(model, tokens_BT=TOKENS_BT):
    with torch.no_grad():
        return model(torch.tensor(tokens_BT)).logits.numpy()


def test_logits_equal_those_of_transformers(given):
    model, _, decoder = given
    assert difference(logits_of(decoder), torch_logits(model)) < LIMIT


def torch_balance(router_logits, config):
    """Mean over layers of E · Σ_e f_e · p_e, f_e the share of assignments and p_e the mean probability of expert e."""
    losses = []
    for logits_NE in router_logits:
        sigmoid = config.model_type == "mimo_v2_flash"
        scores_NE = logits_NE.sigmoid() if sigmoid else logits_NE.softmax(-1)
        choice_NE = scores_NE + (config.bias_E[len(losses)] if sigmoid else 0.0)
        chosen = choice_NE.topk(config.num_experts_per_tok).indices
        f_E = torch.nn.functional.one_hot(chosen, logits_NE.shape[1]).float().mean((0, 1))
        p_E = (scores_NE / scores_NE.sum(-1, keepdim=True)).mean(0)
        losses.append(logits_NE.shape[1] * (f_E * p_E).sum())
    return torch.stack(losses).mean()


def test_gradients_of_the_loss_equal_those_of_transformers(given):
    """Cross-entropy and, with experts, the balance loss at a coefficient above 0."""
    model, _, decoder = given
    config, has_experts = decoder.config, decoder.config.num_moe_layers > 0
    model.zero_grad()
    tokens = torch.tensor(TOKENS_BT)
    output = model(tokens, **({"output_router_logits": True} if has_experts else {}))
    loss = torch.nn.functional.cross_entropy(output.logits[:, :-1].reshape(-1, 37), tokens[:, 1:].reshape(-1))
    if has_experts:
        biases = [value for name, value in model.named_buffers() if "correction_bias" in name]
        model.config.bias_E = biases
        loss = loss + BALANCE * torch_balance(output.router_logits, model.config)
    loss.backward()
    theirs = {name: np.zeros(value.shape) for name, value in model.named_buffers() if "inv_freq" not in name}
    theirs |= {name: value.grad.numpy() for name, value in model.named_parameters()}
    theirs = from_tensors(config, theirs)

    @jax.jit
    @jax.value_and_grad
    def ours(params):
        shape = TOKENS_BT.shape
        output = merge(graph_of(config), params).forward(TOKENS_BT, np.tile(np.arange(11), (2, 1)), np.ones(shape, int))
        logprobs = jax.nn.log_softmax(output.logits_BTV[:, :-1])
        loss = -jnp.mean(jnp.take_along_axis(logprobs, TOKENS_BT[:, 1:, None], axis=2))
        if has_experts:
            routing = output.routing
            loss += BALANCE * switch_balance_loss(
                counts_LE=routing.counts_E,
                prob_sums_LE=routing.prob_sums_E,
                num_tokens=routing.num_tokens[0],
                experts_per_token=config.experts_per_token,
            )
        return loss

    value, gradients = ours(params_of(decoder))
    np.testing.assert_allclose(value, loss.item(), rtol=LIMIT)
    worst = {name: difference(gradients[name], theirs[name]) for name in theirs if np.any(theirs[name])}
    assert max(worst.values()) < LIMIT, worst
    assert not any(np.any(gradients[name]) for name in theirs.keys() - worst.keys())  # the selection bias


def test_what_is_exported_transformers_loads_with_the_same_logits(given, tmp_path):
    *_, decoder = given
    to_hf(decoder, tmp_path, shard_bytes=20_000)
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    assert difference(torch_logits(load_model(tmp_path)), logits_of(decoder)) < LIMIT
    again, params = params_of(from_hf(tmp_path)), params_of(decoder)
    assert again.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value, strict=True)


def test_cached_decoding_equals_the_whole_sequence(given):
    """Rows are at positions of their own, and run past the sliding window; the second starts from two chunks."""
    *_, decoder = given
    config, params, expected = decoder.config, params_of(decoder), logits_of(decoder)
    graph, length = graph_of(config), TOKENS_BT.shape[1]

    def chunk(params, *args):
        decoder = merge(graph, params)
        x_NTD, cache = extend(decoder, *args)
        return decoder.head(x_NTD), cache

    cache, fed, chunk = init_cache(config, 2, length), np.zeros(2, int), jax.jit(chunk)
    for lengths in (np.array([1, 4]), np.array([0, 5])):
        at = np.minimum(fed[:, None] + np.arange(5)[None], length - 1)
        logits, cache = chunk(params, np.take_along_axis(TOKENS_BT, at, 1), np.arange(2), fed, lengths, cache)
        for row in range(2):
            wanted = expected[row, fed[row] : fed[row] + lengths[row]]
            assert not len(wanted) or difference(logits[row, : lengths[row]], wanted) < LIMIT
        fed = fed + lengths
    step = jax.jit(lambda params, *args: decode_step(merge(graph, params), *args))
    while fed.min() < length:
        at = np.minimum(fed, length - 1)
        logits, cache = step(params, TOKENS_BT[[0, 1], at], at, fed < length, cache)
        for row in np.flatnonzero(fed < length):
            assert difference(logits[row], expected[row, at[row]]) < LIMIT
        fed = fed + 1
