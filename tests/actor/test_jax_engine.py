import asyncio
import dataclasses
import threading

import jax
import numpy as np
import pytest
from engine_contract import NEVER, EngineContract, EngineHost, check_against_learner, converse
from engine_setup import MAX_TOKENS, MODEL, full_logprobs, make_engine, make_version, running, version_of

from asyncrl_jax.actor.engines.jax_engine import JaxEngine
from asyncrl_jax.actor.engines.jax_sampling import sample, uniform
from asyncrl_jax.config_model import AttentionConfig
from asyncrl_jax.models import init_params
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
    numbers_N = np.asarray(jax.vmap(lambda position: uniform(seed_2, position))(positions_N))
    assert numbers_N.min() > 0
    assert numbers_N.max() <= 1
    counts = np.bincount((numbers_N * 32).astype(int).clip(0, 31), minlength=32)
    assert np.abs(counts - 100).max() < 50  # five standard deviations of equal chances


@pytest.mark.parametrize("vocab_size", [2, 31, 32, 33, 300])
def test_samples_are_of_the_distribution_and_never_of_a_token_without_probability(vocab_size):
    logits_V = np.random.default_rng(vocab_size).normal(size=vocab_size).astype(np.float32) * 2
    logits_V[vocab_size // 2 :: 3] = -np.inf
    positions_N = np.arange(20_000)
    uniform_N = jax.vmap(uniform)(np.zeros((len(positions_N), 2), np.uint32), positions_N)
    temperature_N = np.full(len(positions_N), 0.7, np.float32)
    logits_NV = np.broadcast_to(logits_V, (len(positions_N), vocab_size))
    tokens_N, logprobs_N = map(np.asarray, jax.jit(sample)(logits_NV, temperature_N, uniform_N))
    expected_V = np.asarray(jax.nn.log_softmax(logits_V / 0.7))
    np.testing.assert_allclose(logprobs_N, expected_V[tokens_N], atol=2e-6)
    expected = len(positions_N) * np.exp(expected_V)
    deviations = (np.bincount(tokens_N, minlength=vocab_size) - expected) / np.sqrt(np.maximum(expected, 1.0))
    assert np.abs(deviations).max() < 5.0
    assert np.isfinite(logprobs_N).all()


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


@pytest.mark.parametrize(
    "fault",
    [
        "temperature ignored",
        "log-probs of the step before",
        "stale weights",
        "stale prompts",
        "prompts of the wrong slots",
        "a block's keys are lost",
    ],
)
def test_a_serving_program_that_lies_is_refused(monkeypatch, fault):
    engine = make_engine()
    decode, prefill, stale = engine._programs.decode, engine._programs.prefill, make_version(0)[0]

    def lie(params, cache, block, *args, **kwargs):
        if fault == "temperature ignored":
            block = block._replace(temperature_R=np.ones_like(block.temperature_R))
        if fault == "stale weights":
            params = stale
        before = jax.tree.map(lambda array: array.copy(), cache)
        sampled, cache = decode(params, cache, block, *args, **kwargs)
        if fault == "a block's keys are lost":
            cache = before
        if fault == "log-probs of the step before":
            sampled = sampled._replace(logprobs_NR=np.roll(np.asarray(sampled.logprobs_NR), 1, axis=0))
        return sampled, cache

    def lie_about_prompts(params, cache, chunk):
        if fault == "stale prompts":
            params = stale
        if fault == "prompts of the wrong slots":
            chunk = chunk._replace(rows_P=np.roll(chunk.rows_P, 1))
        return prefill(params, cache, chunk)

    programs = engine._programs._replace(decode=lie, prefill=lie_about_prompts)
    monkeypatch.setattr(engine, "_programs", programs)
    with pytest.raises(WeightsMismatch) as caught:
        asyncio.run(load(engine, 1))
    assert caught.value.reason == "continuation"


def test_a_version_that_is_tried_again_is_proven_with_other_samples(monkeypatch):
    """A tie in a router refuses good weights by chance; it must not refuse them at every try."""
    engine, sampled = make_engine(), []
    decode = engine._programs.decode

    def spied(*args, **kwargs):
        answer = decode(*args, **kwargs)
        sampled[-1].append(np.asarray(answer[0].tokens_NR).copy())
        return answer

    monkeypatch.setattr(engine, "_programs", engine._programs._replace(decode=spied))
    for _ in range(2):
        sampled.append([])
        asyncio.run(load(engine, 1))
    first, second = sampled
    assert first
    assert any(not np.array_equal(one, other) for one, other in zip(first, second, strict=True))


@pytest.mark.parametrize("fault", ["", "temperature", "weights"])
def test_a_proof_of_an_engine_whose_sequences_hardly_hold_the_canary(monkeypatch, fault):
    """14 tokens: the continuation goes on from 10 of the canary's 12, and takes a pass of its own."""
    engine = JaxEngine(MODEL, num_slots=2, max_tokens=14, canary_tolerance=1e-3)
    decode = engine._programs.decode

    def served(params, cache, block, *args, **kwargs):
        if fault == "temperature":
            block = block._replace(temperature_R=np.ones_like(block.temperature_R))
        return decode(params, cache, block, *args, **kwargs)

    monkeypatch.setattr(engine, "_programs", engine._programs._replace(decode=served))
    _, manifest, tensors = make_version(1)
    tensors = old_version(tensors) if fault == "weights" else tensors
    if not fault:
        asyncio.run(engine.adopt(manifest, tensors))
        assert engine.version == 1
        return
    with pytest.raises(WeightsMismatch) as caught:
        asyncio.run(engine.adopt(manifest, tensors))
    assert caught.value.reason == {"temperature": "continuation", "weights": "canary"}[fault]


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
        assert first._programs.decode is second._programs.decode
        await load(first, 0)
        await load(second, 1)
        async with running(first, second):
            return await asyncio.gather(converse(first, 4), converse(second, 4))

    for number, (tokens, logprobs, versions) in enumerate(asyncio.run(run())):
        made = versions[1:] == number
        assert made.sum() == 18
        np.testing.assert_allclose(logprobs[1:][made], full_logprobs(make_version(number)[0], tokens)[made], atol=2e-5)


def test_nothing_is_compiled_after_the_first_load():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        compiled = engine.num_compiled
        async with running(engine):
            await asyncio.gather(*(converse(engine, seed) for seed in range(5)))
            await load(engine, 1)
            long = (tuple(range(20)), (3,), tuple(range(12)))
            await asyncio.gather(*(converse(engine, seed, turns=long, length=3) for seed in range(7)))
        return compiled, engine.num_compiled

    with jax.numpy_rank_promotion("allow"):  # else this thread and the proofs' differ in what they compile for
        before, after = asyncio.run(run())
    assert before == after > 0


PROMPT = tuple(range(1, 30))


@pytest.mark.parametrize("prompt", [PROMPT, PROMPT[:11]])
@pytest.mark.parametrize("share", [True, False])
def test_a_group_computes_its_prompt_once(monkeypatch, share, prompt):
    async def run():
        engine = make_engine(share_prefixes=share)
        await load(engine, 0)
        prefilled, prefill = [], engine._programs.prefill

        def counted(params, cache, chunk):
            prefilled.append(int(chunk.lengths_P.sum()))
            return prefill(params, cache, chunk)

        monkeypatch.setattr(engine, "_programs", engine._programs._replace(prefill=counted))
        async with running(engine):
            results = await asyncio.gather(*(converse(engine, seed, turns=(prompt,), length=4) for seed in range(4)))
        return results, sum(prefilled), engine.counters.num_reused_tokens

    results, prefilled, reused = asyncio.run(run())
    for result in results:
        check_against_learner(result)
    assert len({tuple(result[0]) for result in results}) > 1
    needed = len(prompt) - 1
    assert reused == (3 * needed if share else 0)
    assert needed - 8 <= prefilled <= (1 if share else 4) * needed


def test_few_sequences_are_decoded_by_fewer_rows_to_the_same_tokens(monkeypatch):
    """32 slots: three sessions fill no more than a quarter of them; among twelve, they are rows of a whole block."""

    async def run():
        engine, rows = make_engine(num_slots=32), []
        await load(engine, 0)
        decode = engine._programs.decode

        def watched(params, cache, block, *args, **kwargs):
            rows.append(len(block.rows_R))
            return decode(params, cache, block, *args, **kwargs)

        monkeypatch.setattr(engine, "_programs", engine._programs._replace(decode=watched))
        async with running(engine):
            for seed in range(20):  # hold slots and rest
                await engine.open(seed, 1.0)
            sessions = [converse(engine, 100 + seed, turns=((5, 6), (7, 8, 9)), length=9) for seed in range(3)]
            few = await asyncio.gather(*sessions)
            assert set(rows) == {8}
            sessions = [converse(engine, 100 + seed, turns=((5, 6), (7, 8, 9)), length=9) for seed in range(12)]
            many = await asyncio.gather(*sessions)
            assert 32 in rows
        for alone, among in zip(few, many[:3], strict=True):
            assert alone[0] == among[0]
            np.testing.assert_allclose(alone[1], among[1], atol=1e-5)

    asyncio.run(run())


def test_a_prefix_outlives_its_session_but_not_its_weights():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            reused = []
            for seed, number in ((1, 0), (2, 0), (3, 1)):
                if number:
                    await load(engine, number)
                before = engine.counters.num_reused_tokens
                check_against_learner(await converse(engine, seed, turns=(PROMPT,), length=4))
                reused.append(engine.counters.num_reused_tokens - before)
        return reused

    assert asyncio.run(run()) == [0, len(PROMPT) - 1, 0]


def test_an_aborted_turn_leaves_nothing_that_another_could_take_for_its_prefix():
    """The slot is taken by another session while the device still works on the turn that was given up."""

    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            for seed in range(6):
                doomed = [asyncio.create_task(converse(engine, i, turns=(PROMPT,), length=15)) for i in range(4)]
                target = engine.counters.num_sampled_tokens + 5 * seed
                while engine.counters.num_sampled_tokens < target or not engine._slots._working_B.any():
                    await asyncio.sleep(0)
                for task in doomed:
                    task.cancel()
                await asyncio.gather(*doomed, return_exceptions=True)
                for result in await asyncio.gather(*(converse(engine, i, turns=(PROMPT[::-1],)) for i in range(4))):
                    check_against_learner(result)

    asyncio.run(run())


def test_a_session_that_is_closed_while_it_waits_for_a_swap_samples_in_nobodys_slot():
    async def run():
        engine = make_engine(num_slots=1, swap_at="turn")
        async with running(engine):
            await load(engine, 0)
            alone = await converse(engine, 3)
            session = await engine.open(1, 1.0)
            async with engine._gate.swap():
                waiting = asyncio.create_task(session.generate((1, 2, 3), NEVER, 5))
                await asyncio.sleep(0)
                session.close()
                other = asyncio.create_task(converse(engine, 3))
                await asyncio.sleep(0.01)
            with pytest.raises(RuntimeError, match="closed while it waited"):
                await waiting
            return alone, await other

    (tokens, *_), (again, *_) = asyncio.run(run())
    assert tokens == again


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan"), float("inf")])
def test_temperatures_that_no_softmax_takes_are_refused(temperature):
    with pytest.raises(ValueError, match="temperature"):
        asyncio.run(make_engine().open(0, temperature))


def test_bits_depend_on_no_other_session_when_that_is_asked_for():
    async def run(num_others):
        engine = make_engine(batch_invariant=True)
        await load(engine, 0)
        async with running(engine):
            others = [
                asyncio.create_task(converse(engine, 100 + i, turns=(PROMPT, (1,)), length=5))
                for i in range(num_others)
            ]
            await asyncio.sleep(0.005 * num_others)
            result = await converse(engine, 7, turns=(PROMPT, (4, 5)), length=5)
            await asyncio.gather(*others)
        return result

    alone, crowded = asyncio.run(run(0)), asyncio.run(run(3))
    assert alone[0] == crowded[0]
    np.testing.assert_array_equal(alone[1], crowded[1])


def test_the_device_is_waited_for_without_blocking_the_event_loop():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        decode, entered, leave = engine._programs.decode, threading.Event(), threading.Event()

        def slow(*args, **kwargs):
            sampled, cache = decode(*args, **kwargs)
            return sampled, cache

        def wait(result):
            entered.set()
            assert leave.wait(20)
            return jax.device_get(result)

        engine._programs = engine._programs._replace(decode=slow)
        on_device = engine._on_device
        engine._on_device = lambda _, result: on_device(wait, result)
        async with running(engine):
            turn = asyncio.create_task(converse(engine, 1, turns=((5,),), length=3))
            while not entered.is_set():
                await asyncio.sleep(0)
            paused = asyncio.create_task(engine.pause())
            await asyncio.sleep(0.02)
            assert not paused.done()  # it is still being sampled
            leave.set()
            await paused
            sampled = engine.counters.num_sampled_tokens
            await engine.resume()
            await turn
        return sampled

    assert asyncio.run(run()) == 3


SLIDING = dataclasses.replace(
    MODEL, attention=AttentionConfig(pattern="sg", window=6), num_layers=2, family="mimo_v2_flash"
)


def test_sliding_layers_share_prefixes_only_where_they_still_have_them():
    params = init_params(SLIDING, 0)

    async def run():
        engine = JaxEngine(SLIDING, num_slots=4, max_tokens=MAX_TOKENS, canary_tolerance=1e-3)
        await engine.adopt(*version_of(SLIDING, params, 0))
        async with running(engine):
            together = await asyncio.gather(*(converse(engine, i, turns=(PROMPT, (4, 5)), length=5) for i in range(6)))
            return [*together, await converse(engine, 9, turns=(PROMPT, tuple(range(10))), length=3)]

    for tokens, logprobs, versions in asyncio.run(run()):
        made = versions[1:] == 0
        expected = full_logprobs(params, tokens, model=SLIDING)
        np.testing.assert_allclose(logprobs[1:][made], expected[made], atol=1e-4)
