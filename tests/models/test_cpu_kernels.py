"""The kernels for one CPU core against the plain functions: values and all gradients, for shapes that fit nothing."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import AxisType, PartitionSpec

from asyncrl_jax.config import Config, override
from asyncrl_jax.models.attention import Attention, AttentionSpec, attend_einsum, packed_mask, rms_norm
from asyncrl_jax.models.cpu.attention import MOST_BLOCKS, SMALLEST_BLOCK, attend_rows, query_blocks
from asyncrl_jax.models.cpu.experts import FEW_ASSIGNMENTS, block_rows, run_sorted
from asyncrl_jax.models.cpu.norm import normalise
from asyncrl_jax.models.experts import Experts, run_blocks, run_experts
from asyncrl_jax.models.router import NO_EXPERT

N, D, E, A, F = 75, 10, 5, 2, 7
TOLERANCE = 1e-5  # of the largest entry


def assert_same(got, expected):
    for one, other in zip(jax.tree.leaves(got), jax.tree.leaves(expected), strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(one, other, rtol=0, atol=TOLERANCE * float(jnp.max(jnp.abs(other))) + 1e-30)


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng([seed, *shape]).normal(size=shape), jnp.float32)


def with_gradients(function, argnums):
    """Output, and gradients of a sum in which every entry has its own weight."""

    def run(*arrays):
        y, pull = jax.vjp(lambda *wanted: function(*put(arrays, argnums, wanted)), *(arrays[i] for i in argnums))
        return y, pull(normal(*y.shape, seed=9))

    return jax.jit(run)


def put(arrays, argnums, wanted):
    arrays = list(arrays)
    for i, array in zip(argnums, wanted, strict=True):
        arrays[i] = array
    return arrays


@functools.cache
def sorted_rows(rows):
    return with_gradients(lambda x, w, g, u, d, ids: run_sorted(x, ids, w, g, u, d, rows), (0, 1, 2, 3, 4))


@functools.cache
def plain_experts(name):
    def dense(x, w, g, u, d, ids):
        return run_experts(x, ids, w, Experts(g, u, d), dispatch="dense")

    def blocks(x, w, g, u, d, ids):
        return run_blocks(x, ids, w, Experts(g, u, d), 4)

    return with_gradients({"dense": dense, "blocks": blocks}[name], (0, 1, 2, 3, 4))


@functools.cache
def row_attention():
    return with_gradients(attend_rows, (0, 1, 2))


@functools.cache
def plain_attention():
    return with_gradients(lambda q, k, v, ids: attend_einsum(q, k, v, packed_mask(ids), None), (0, 1, 2))


@pytest.fixture(scope="module")
def layer():
    return normal(N, D), jax.nn.softmax(normal(N, A)), normal(E, D, F), normal(E, D, F, seed=1), normal(E, F, D)


def choices(kind):
    """int32 [N, A] of different experts; 1 gets nothing in any of them, and every fifth row is padding."""
    rng = np.random.default_rng(3)
    ids = np.stack([rng.permutation([0, 2, 3, 4])[:A] for _ in range(N)]).astype(np.int32)
    if kind == "skewed":  # one expert has a row of each token, the last expert a single one
        ids[:] = [0, 3]
        ids[7] = [4, 0]
    ids[::5] = NO_EXPERT
    ids[3, 1] = NO_EXPERT  # capacity took one of two
    if kind == "nobody":
        ids[:] = NO_EXPERT
    return jnp.asarray(ids)


@pytest.mark.parametrize("rows", [1, 16, 128])
def test_sorted_experts_equal_the_plain_ones(layer, rows):
    """Blocks of one row, blocks that no share is a multiple of, and blocks larger than all rows."""
    for kind in ("even", "skewed", "nobody"):
        ids = choices(kind)
        got = sorted_rows(rows)(*layer, ids)
        assert_same(got, plain_experts("dense")(*layer, ids))
        assert_same(got, plain_experts("blocks")(*layer, ids))
    assert sorted_rows(rows)._cache_size() == 1  # another load compiles nothing


@functools.cache
def without_gradient(few):
    def run(x, w, g, u, d, ids):
        if not few:  # the same rows four times over, which are not few
            x, w, ids = (jnp.tile(array, (4, 1)) for array in (x, w, ids))
        return run_sorted(x, ids, w, g, u, d, 16)[:N]

    return jax.jit(run)


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("kind", ["even", "skewed", "nobody"])
def test_sorted_experts_without_a_gradient_equal_the_plain_ones(layer, kind, few):
    """Few rows go through one product of all experts, as far as shares are even, and through blocks beyond that."""
    assert N * A < FEW_ASSIGNMENTS * E <= 4 * N * A
    ids = choices(kind)
    assert_same(without_gradient(few)(*layer, ids), plain_experts("dense")(*layer, ids)[0])
    x, *rest = layer
    nobody = jnp.all(ids == NO_EXPERT, axis=1)[:, None]
    again = without_gradient(few)(jnp.where(nobody, jnp.nan, x), *rest, ids)  # may hold anything
    np.testing.assert_array_equal(again, without_gradient(few)(*layer, ids))


def test_an_expert_without_rows_gets_no_gradient_and_padding_gives_none(layer):
    ids = choices("even")
    y, (dx, dweights, *dexperts) = sorted_rows(128)(*layer, ids)
    nobody = np.asarray(ids == NO_EXPERT)
    assert not np.any(y[::5])
    assert not np.any(dx[::5])
    assert not np.any(np.asarray(dweights)[nobody])
    for gradient in dexperts:
        assert not np.any(gradient[1])
        assert np.any(gradient[0])


def test_rows_of_no_expert_may_hold_anything(layer):
    """The last expert's block runs over into them."""
    x, *rest = layer
    ids = choices("even")
    kernel = sorted_rows(128)
    expected = kernel(x, *rest, ids)
    y, (dx, *others) = kernel(x.at[::5].set(1e30), *rest, ids)
    assert_same((y, dx, others), (expected[0], expected[1][0], list(expected[1][1:])))


def test_sorted_experts_are_those_of_one_device_inside_of_shard_map(layer):
    """Expert parallelism runs them there, where a loop's start must vary over the devices as its end does."""
    mesh = jax.make_mesh((1, 1), ("rows", "expert"), axis_types=(AxisType.Auto,) * 2)
    rows, experts = PartitionSpec(("rows", "expert")), PartitionSpec("expert")

    def local(x, w, g, u, d, ids):
        g, u, d = (jax.lax.pcast(leaf, ("rows",), to="varying") for leaf in (g, u, d))
        return run_sorted(x, ids, w, g, u, d, 16)

    specs = (rows, rows, experts, experts, experts, rows)
    sharded = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=rows)
    ids = choices("even")
    assert_same(with_gradients(sharded, (0, 1, 2, 3, 4))(*layer, ids), sorted_rows(16)(*layer, ids))


def test_blocks_are_smaller_where_experts_get_little():
    sizes = {(E, k): block_rows(4096 * k, E) for E, k in [(8, 2), (32, 4), (128, 8), (128, 2)]}
    assert sizes == {(8, 2): 128, (32, 4): 64, (128, 8): 64, (128, 2): 32}
    assert block_rows(2, 8) == 32


def segments(lengths, length):
    ids = np.zeros(length, np.int32)
    for i, (start, size) in enumerate(zip(np.cumsum([0, *lengths]), lengths, strict=False)):
        ids[start : start + size] = i + 1
    return ids


def normal_heads(length, heads, kv_heads):
    return normal(3, length, heads, 6), normal(3, length, kv_heads, 6), normal(3, length, kv_heads, 6, seed=1)


@pytest.mark.parametrize(("length", "heads", "kv_heads"), [(9, 3, 1), (SMALLEST_BLOCK + 33, 4, 2)])
def test_attention_by_rows_equals_the_plain_one(length, heads, kv_heads):
    """One segment, several and padding, and nothing but padding: in one batch."""
    ids = np.stack([segments([length], length), segments([2, length // 2, 1], length), segments([], length)])
    arrays = normal_heads(length, heads, kv_heads)
    assert_same(row_attention()(*arrays, ids), plain_attention()(*arrays, ids))


def test_attention_survives_large_scores():
    """Weights are relative to the largest score, so that no exponential overflows and no sum vanishes."""
    q, k, v = normal_heads(9, 3, 1)
    ids = np.ones((3, 9), np.int32)
    y, (_, _, dv) = row_attention()(q * 100, k * 100, v, ids)
    expected, (_, _, expected_dv) = plain_attention()(q * 100, k * 100, v, ids)
    assert_same((y, dv), (expected, expected_dv))


def test_long_rows_are_cut_into_no_more_blocks_than_are_worth_compiling():
    for length in (1, 128, 129, 4096, 4097):
        blocks = query_blocks(length)
        assert len(blocks) <= MOST_BLOCKS
        assert [i for block in blocks for i in range(block.start, block.stop)] == list(range(length))


LAYERS = {  # one of each kind that the kernels serve
    "norm of each head, partial rotation": {"attention.qk_norm": "head", "attention.rotary_share": 0.7},
    "norm of all heads, clipped": {"attention.qk_norm": "full", "attention.clip": 0.8},
    "biases, scaled values": {
        "attention.qk_norm": "none",
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.value_scale": 0.7,
    },
}


@pytest.mark.parametrize("kind", LAYERS)
def test_a_layer_of_attention_by_features_equals_the_plain_one(kind):
    """Output, and the gradients of inputs and all weights; query heads in groups, and two blocks of queries."""
    sizes = {"hidden_dim": 5, "num_heads": 6, "num_kv_heads": 2, "head_dim": 6}
    settings = {f"model.{name}": value for name, value in (sizes | LAYERS[kind]).items()}
    spec = AttentionSpec.of(override(Config(), settings).model, 0)
    graph, weights = nnx.split(Attention(spec, nnx.Rngs(0)))
    weights = jax.tree.map(lambda leaf: leaf + normal(*leaf.shape), weights)
    length = SMALLEST_BLOCK + 5
    segment_ids = jnp.asarray(np.stack([segments([length], length), segments([50, 70], length)]))
    positions = jnp.arange(length)[None] % jnp.array([[length], [50]])

    def by_features(attention, x):
        return attention(x, positions, segment_ids)

    def plain(attention, x):
        heads = attend_einsum(*attention.project(x, positions), packed_mask(segment_ids), None)
        return attention.output(heads)

    def run(function):
        y, pull = jax.vjp(lambda weights, x: function(nnx.merge(graph, weights), x), weights, normal(2, length, 5))
        return y, pull(normal(*y.shape, seed=1))

    assert_same(jax.jit(run, static_argnums=0)(by_features), jax.jit(run, static_argnums=0)(plain))


def test_the_norm_equals_its_equation():
    x, scale = normal(N, D), normal(D)

    def plain(x, scale):
        return x / jnp.sqrt(jnp.mean(x**2, axis=1, keepdims=True) + 0.1) * scale[None]

    kernel = with_gradients(lambda x, scale: normalise(x, scale, 0.1), (0, 1))
    assert_same(kernel(x, scale), with_gradients(plain, (0, 1))(x, scale))
    assert_same(rms_norm(x, scale, 0.1), plain(x, scale))
