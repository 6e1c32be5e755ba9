import asyncio

import jax
import numpy as np
import pytest
from engine_contract import NEVER, EngineContract, EngineHost, converse
from engine_setup import full_logprobs, make_engine, make_version, running

from asyncrl_jax.actor.engines.jax_engine import _gumbel
from asyncrl_jax.weights.manifest import WeightsMismatch


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = EngineHost(make_engine(), tmp_path_factory.mktemp("weights"))
    yield host
    host.close()


class TestContract(EngineContract):
    pass


async def load(engine, number):
    _, manifest, tensors = make_version(number)
    await engine.adopt(manifest, tensors)


def test_noise_is_fresh_at_every_position_of_a_sequence():
    seed_2, positions_N = np.array([0, 3], np.uint32), np.arange(3200)
    noise_NV = jax.vmap(lambda position: _gumbel(seed_2, position, size=32))(positions_N)
    counts = np.bincount(np.argmax(noise_NV, axis=1), minlength=32)
    assert np.abs(counts - 100).max() < 50  # five standard deviations of equal chances


def test_wgt_04_wgt_08_refuses_to_sample_before_proven_weights():
    async def run():
        engine = make_engine()
        session = await engine.open(0, 1.0)
        with pytest.raises(RuntimeError, match="no weights are proven"):
            await session.generate((1,), NEVER, 1)
        _, manifest, _ = make_version(0)
        with pytest.raises(WeightsMismatch):
            await engine.adopt(manifest, make_version(1)[2])
        assert engine.version is None
        with pytest.raises(RuntimeError, match="no weights are proven"):
            await session.generate((1,), NEVER, 1)

    asyncio.run(run())


def permuted_experts(tensors):
    name = "model.layers.0.mlp.experts.down_proj"
    return tensors | {name: tensors[name][::-1].copy()}


def transposed(tensors):
    name = "model.layers.1.self_attn.k_proj.weight"  # square
    return tensors | {name: tensors[name].T.copy()}


def dropped(tensors):
    return {name: value for name, value in tensors.items() if name != "model.norm.weight"}


def extra(tensors):
    return tensors | {"model.layers.9.input_layernorm.weight": np.ones(16, np.float32)}


def not_finite(tensors):
    return tensors | {"lm_head.weight": np.full_like(tensors["lm_head.weight"], np.nan)}


def old_version(_tensors):
    return make_version(0)[2]


def one_weight_off(tensors):
    name = "model.layers.1.mlp.gate.weight"
    changed = tensors[name].copy()
    changed[0] += 1.0
    return tensors | {name: changed}


@pytest.mark.parametrize(
    ("mutate", "reason"),
    [
        (permuted_experts, "canary"),
        (transposed, "canary"),
        (dropped, "leaves"),
        (extra, "leaves"),
        (not_finite, "canary"),
        (old_version, "canary"),
        (one_weight_off, "canary"),
    ],
)
def test_wgt_05_wgt_07_wrong_weights_are_refused_and_the_old_ones_go_on(mutate, reason):
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            before = await converse(engine, 3)
            _, manifest, tensors = make_version(1)
            with pytest.raises(WeightsMismatch) as caught:
                await engine.adopt(manifest, mutate(tensors))
            assert caught.value.reason == reason
            assert engine.version == 0
            after = await converse(engine, 3)
        assert before[0] == after[0]
        assert set(after[2]) == {-1, 0}

    asyncio.run(run())


@pytest.mark.parametrize("fault", ["temperature ignored", "log-probs of the step before", "stale weights"])
def test_a_serving_program_that_lies_is_refused(monkeypatch, fault):
    engine = make_engine()
    step, stale = engine._programs.step, make_version(0)[0]

    def lie(params, cache, tokens_B, positions_B, seeds_B2, temperature_B):
        if fault == "temperature ignored":
            return step(params, cache, tokens_B, positions_B, seeds_B2, np.ones_like(temperature_B))
        if fault == "stale weights":
            return step(stale, cache, tokens_B, positions_B, seeds_B2, temperature_B)
        sampled, logprobs, cache = step(params, cache, tokens_B, positions_B, seeds_B2, temperature_B)
        return sampled, np.roll(np.asarray(logprobs), 1), cache

    monkeypatch.setattr(engine, "_programs", engine._programs._replace(step=lie))
    with pytest.raises(WeightsMismatch) as caught:
        asyncio.run(load(engine, 1))
    assert caught.value.reason == "continuation"


def test_wgt_10_a_swap_while_paused_aborts_nothing():
    """3 requests in flight at each of two swaps: 3 completed, none aborted, each with tokens of all 3 versions."""

    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            requests = [
                asyncio.create_task(converse(engine, seed, turns=((5, 6), (7, 8, 9)), length=13)) for seed in range(3)
            ]
            for number in (1, 2):
                while engine.counters.num_sampled_tokens < 25 * number:
                    await asyncio.sleep(0)
                await engine.pause()
                await load(engine, number)
                await engine.resume()
            return await asyncio.gather(*requests, return_exceptions=True)

    results = asyncio.run(run())
    assert [len(tokens) for tokens, _, _ in results] == [31] * 3
    assert [set(versions.tolist()) for _, _, versions in results] == [{-1, 0, 1, 2}] * 3


def test_two_engines_of_one_model_share_programs_and_nothing_else():
    async def run():
        first, second = make_engine(), make_engine()
        assert first._programs.step is second._programs.step
        await load(first, 0)
        await load(second, 1)
        async with running(first, second):
            return await asyncio.gather(converse(first, 4), converse(second, 4))

    for number, (tokens, logprobs, versions) in enumerate(asyncio.run(run())):
        made = versions[1:] == number
        assert made.sum() == 18
        np.testing.assert_allclose(logprobs[1:][made], full_logprobs(make_version(number)[0], tokens)[made], atol=2e-5)


def test_shapes_are_compiled_once():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            await asyncio.gather(*(converse(engine, seed) for seed in range(5)))
            compiled = [program._cache_size() for program in engine._programs]
            await load(engine, 1)
            await asyncio.gather(*(converse(engine, seed, turns=((1,),), length=20) for seed in range(7)))
        return compiled, [program._cache_size() for program in engine._programs]

    before, after = asyncio.run(run())
    assert before == after
