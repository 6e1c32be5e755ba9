"""The decoder: against a NumPy forward pass, and its invariances.

Dimensions: B rows, T positions, V vocabulary.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import Decoder, decode_step, extend, graph_of, init_cache, init_params, merge, params_of

CONFIG = ModelConfig(
    num_layers=2, hidden_dim=16, num_heads=4, num_kv_heads=2, head_dim=8, num_experts=4, expert_dim=12, vocab_size=11,
    max_positions=12, init_std=0.3,
)  # fmt: skip
T = 9


@pytest.fixture(scope="module")
def params():
    return init_params(CONFIG, 3)


@pytest.fixture(scope="module")
def tokens_BT():
    return np.random.default_rng(0).integers(0, CONFIG.vocab_size, (3, T)).astype(np.int32)


@functools.partial(jax.jit, static_argnames="config")
def forward(params, tokens_BT, positions_BT, segment_ids_BT, config=CONFIG):
    return merge(graph_of(config), params).forward(tokens_BT, positions_BT, segment_ids_BT)


def logits_of(params, tokens_BT, config=CONFIG):
    positions_BT = np.tile(np.arange(tokens_BT.shape[1]), (len(tokens_BT), 1))
    return forward(params, tokens_BT, positions_BT, np.ones_like(positions_BT), config).logits_BTV


def numpy_logits(params, tokens_T, config):
    """Qwen3-MoE of one sequence in float64, one head, one position, one expert at a time."""
    p = {name: np.asarray(value, np.float64) for name, value in params.items()}

    def norm(x, scale):
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + config.norm_eps) * scale

    def turn(x, position):
        half = len(x) // 2
        angle = position * config.rope_theta ** (-np.arange(half) / half)
        a, b = x[:half], x[half:]
        return np.concatenate([a * np.cos(angle) - b * np.sin(angle), b * np.cos(angle) + a * np.sin(angle)])

    def softmax(x):
        e = np.exp(x - x.max())
        return e / e.sum()

    x = p["embedding"][tokens_T]
    for i in range(config.num_layers):
        w = {name.removeprefix(f"layers.{i}."): value for name, value in p.items()}
        h, out = norm(x, w["attention_norm"]), np.zeros_like(x)
        for head in range(config.num_heads):
            kv = head // (config.num_heads // config.num_kv_heads)
            q = [turn(norm(h[t] @ w["attention.q_proj"][:, head], w["attention.q_norm"]), t) for t in range(len(x))]
            k = [turn(norm(h[t] @ w["attention.k_proj"][:, kv], w["attention.k_norm"]), t) for t in range(len(x))]
            v = h @ w["attention.v_proj"][:, kv]
            for t in range(len(x)):
                probs = softmax(np.array([q[t] @ k[s] for s in range(t + 1)]) / np.sqrt(config.head_dim))
                out[t] += probs @ v[: t + 1] @ w["attention.o_proj"][head]
        x = x + out
        h = norm(x, w["moe_norm"])
        for t in range(len(x)):
            probs = softmax(h[t] @ w["moe.router"])
            chosen = np.argsort(-probs)[: config.experts_per_token]
            for e in chosen:
                gate = h[t] @ w["moe.gate_proj"][e]
                hidden = gate / (1 + np.exp(-gate)) * (h[t] @ w["moe.up_proj"][e])
                x[t] = x[t] + probs[e] / probs[chosen].sum() * hidden @ w["moe.down_proj"][e]
    return norm(x, p["norm"]) @ p["lm_head"]


@pytest.mark.parametrize("dispatch", ["dense", "blocked"])
def test_logits_equal_the_numpy_decoder(params, tokens_BT, dispatch):
    scales = np.random.default_rng(1)  # the norms start at 1, where a missing or swapped one would not show
    params = dict(params)
    for name, value in params.items():
        if value.ndim == 1:
            params[name] = scales.uniform(0.5, 1.5, value.shape).astype(np.float32)
    logits = logits_of(params, tokens_BT, config=dataclasses.replace(CONFIG, dispatch=dispatch))
    for row, expected in zip(logits, (numpy_logits(params, row, CONFIG) for row in tokens_BT), strict=True):
        np.testing.assert_allclose(row, expected, rtol=1e-4, atol=1e-4)


@functools.cache
def compiled():
    """(extend with logits, decode_step) of the model, compiled."""

    def extended(params, *args):
        decoder = merge(graph_of(CONFIG), params)
        x_NTD, cache = extend(decoder, *args)
        return decoder.head(x_NTD), cache

    return jax.jit(extended), jax.jit(lambda params, *args: decode_step(merge(graph_of(CONFIG), params), *args))


def test_decoding_through_the_cache_equals_the_whole_sequence(params, tokens_BT):
    """Every slot is at its own position: row b starts b steps later than row 0, and rests at the end."""
    expected, (_, step) = logits_of(params, tokens_BT), compiled()
    cache = init_cache(CONFIG, 3, CONFIG.max_positions)
    for tick in range(T + 2):
        at = np.clip(tick - np.arange(3), 0, T - 1)
        active = (tick >= np.arange(3)) & (tick - np.arange(3) < T)
        logits, cache = step(params, tokens_BT[np.arange(3), at], at, active, cache)
        for row in np.flatnonzero(active):
            np.testing.assert_allclose(logits[row], expected[row, at[row]], rtol=1e-4, atol=1e-5)


def test_a_row_that_rests_keeps_its_cache(params, tokens_BT):
    _, step = compiled()
    cache = jax.tree.map(lambda zeros: zeros + 1.0, init_cache(CONFIG, 3, CONFIG.max_positions))
    _, after = step(params, tokens_BT[:, 0], np.array([2, 2, 2]), np.array([True, False, True]), cache)
    for leaf in jax.tree.leaves(after):
        assert np.all(leaf[1] == 1.0)
        assert not np.all(leaf[0] == 1.0)


def test_chunks_of_any_size_leave_a_cache_to_decode_on_from(params, tokens_BT):
    """Row 0 of the cache gets 4 tokens and then none, row 2 gets 3 and then 4, and row 1 nothing."""
    expected, (chunk, step) = logits_of(params, tokens_BT), compiled()
    cache = init_cache(CONFIG, 3, CONFIG.max_positions)
    filled = {0: 0, 2: 0}
    for rows, lengths in (([0, 2], [4, 3]), ([2, 3], [4, 0])):  # row 3 is none
        starts = np.array([filled.get(row, 0) for row in rows])
        tokens = np.full((2, 5), 5)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            tokens[i, :length] = tokens_BT[row % 3, starts[i] : starts[i] + length]
        logits, cache = chunk(params, tokens, np.array(rows), starts, np.array(lengths), cache)
        for i, (row, length) in enumerate(zip(rows, lengths, strict=True)):
            wanted = expected[row % 3, starts[i] : starts[i] + length]
            np.testing.assert_allclose(logits[i, :length], wanted, rtol=1e-4, atol=1e-5)
            if row in filled:
                filled[row] += length
    at = np.array([filled[0], 0, filled[2]])
    logits, _ = step(params, tokens_BT[np.arange(3), at], at, np.ones(3, bool), cache)
    np.testing.assert_allclose(logits, expected[np.arange(3), at], rtol=1e-4, atol=1e-5)


def test_a_position_depends_on_no_later_token(params, tokens_BT):
    def at_4(embedded):
        return jnp.sum(logits_of(params | {"embedding": embedded}, jnp.arange(T)[None])[0, 4])

    gradient = jax.grad(at_4)(params["embedding"])  # token t is row t of the embedding
    assert np.all(np.abs(gradient[:5]).sum(axis=1) > 0)
    assert not np.any(gradient[5:])


def test_tok_07_packed_sequences_equal_separate_ones_and_do_not_see_each_other(params):
    """TOK-07. Two sequences and padding in one row."""
    rng = np.random.default_rng(2)
    a, b = rng.integers(0, CONFIG.vocab_size, 5), rng.integers(0, CONFIG.vocab_size, 4)
    segments, positions = np.array([[1] * 5 + [2] * 4 + [0] * 3]), np.array([[*range(5), *range(4), 0, 0, 0]])
    packed = np.array([[*a, *b, 0, 0, 0]], np.int32)
    logits = forward(params, packed, positions, segments).logits_BTV
    np.testing.assert_allclose(logits[0, :5], logits_of(params, a[None])[0], atol=1e-5)
    np.testing.assert_allclose(logits[0, 5:9], logits_of(params, b[None])[0], atol=1e-5)
    packed[0, :5] = (a + 1) % CONFIG.vocab_size
    np.testing.assert_array_equal(forward(params, packed, positions, segments).logits_BTV[0, 5:9], logits[0, 5:9])


def test_mis_09_a_row_is_the_same_alone_and_in_a_batch(params, tokens_BT):
    together = logits_of(params, tokens_BT)
    for row in range(3):
        np.testing.assert_allclose(logits_of(params, tokens_BT[row : row + 1])[0], together[row], atol=1e-5)


def test_padding_is_routed_nowhere_and_counted_nowhere(params, tokens_BT):
    segments = np.ones((3, T), np.int32)
    segments[1, 3:] = segments[2] = 0
    positions = np.tile(np.arange(T), (3, 1))
    routing = forward(params, tokens_BT, positions, segments).routing
    alone = forward(params, tokens_BT[:1], positions[:1], segments[:1]).routing
    short = forward(params, tokens_BT[1:2, :3], positions[1:2, :3], segments[1:2, :3]).routing
    np.testing.assert_array_equal(routing.num_tokens, [T + 3] * CONFIG.num_layers)
    np.testing.assert_array_equal(routing.counts_E, alone.counts_E + short.counts_E)
    np.testing.assert_allclose(routing.prob_sums_E, alone.prob_sums_E + short.prob_sums_E, rtol=1e-5)


def test_params_go_out_of_a_decoder_and_back_unchanged(params):
    decoder = Decoder(CONFIG, rngs=nnx.Rngs(3))
    again = params_of(merge(graph_of(CONFIG), params_of(decoder)))
    assert again.keys() == params.keys()
    for name, value in params.items():
        np.testing.assert_array_equal(again[name], value)


def test_the_seed_alone_makes_the_weights():
    first, same, other = init_params(CONFIG, 3), init_params(CONFIG, 3), init_params(CONFIG, 4)
    assert all(np.array_equal(first[name], same[name]) for name in first)
    assert not np.array_equal(first["embedding"], other["embedding"])
