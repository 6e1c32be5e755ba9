import asyncio

import jax
import numpy as np
import pytest
from engine_setup import MAX_TOKENS, MODEL, full_logits, full_logprobs, make_engine, make_version, running

from asyncrl_jax.actor.engines.jax_engine import _gumbel
from asyncrl_jax.weights.manifest import WeightsMismatch

NEVER = frozenset()


async def converse(engine, seed, temperature=1.0, turns=((5, 6, 7), (8, 9), (3,)), length=6):
    """(tokens, log-probs, versions) of a session with forced tokens between its turns; 0 and -1 where forced."""
    session = await engine.open(seed, temperature)
    tokens, logprobs, versions = [], [], []
    try:
        for forced in turns:
            completion = await session.generate(forced, NEVER, length)
            tokens += [*forced, *completion.tokens.tolist()]
            logprobs += [0.0] * len(forced) + completion.logprobs.tolist()
            versions += [-1] * len(forced) + completion.versions.tolist()
    finally:
        session.close()
    return tokens, np.array(logprobs, np.float32), np.array(versions)


async def load(engine, number):
    _, manifest, tensors = make_version(number)
    await engine.load(manifest, tensors)


def test_logprobs_are_those_of_the_distribution_sampled():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            return await asyncio.gather(*(converse(engine, seed, temperature=0.7) for seed in range(6)))

    for tokens, logprobs, versions in asyncio.run(run()):
        sampled = versions[1:] >= 0
        expected = full_logprobs(make_version(0)[0], tokens, temperature=0.7)
        np.testing.assert_allclose(logprobs[1:][sampled], expected[sampled], atol=2e-5)
        assert sampled.sum() == 18


@pytest.mark.parametrize("temperature", [0.6, 1.3])
def test_tokens_are_drawn_from_that_distribution(temperature):
    prompt, num_samples = (5, 6, 7), 1500

    async def run():
        engine = make_engine()
        await load(engine, 1)
        async with running(engine):
            drawn = await asyncio.gather(
                *(converse(engine, seed, temperature, turns=[prompt], length=1) for seed in range(num_samples))
            )
        return [tokens[-1] for tokens, _, _ in drawn]

    counts = np.bincount(asyncio.run(run()), minlength=MODEL.vocab_size)
    expected = num_samples * np.asarray(jax.nn.softmax(full_logits(make_version(1)[0], prompt)[-1] / temperature))
    deviations = (counts - expected) / np.sqrt(np.maximum(expected, 1.0))
    assert np.abs(deviations).max() < 5.0


def test_noise_is_fresh_at_every_position_of_a_sequence():
    seed_2, positions_N = np.array([0, 3], np.uint32), np.arange(3200)
    noise_NV = jax.vmap(lambda position: _gumbel(seed_2, position, size=32))(positions_N)
    counts = np.bincount(np.argmax(noise_NV, axis=1), minlength=32)
    assert np.abs(counts - 100).max() < 50  # five standard deviations of equal chances


def test_mis_09_a_sample_does_not_depend_on_its_batch_mates():
    async def run(num_others):
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            others = [
                asyncio.create_task(converse(engine, 100 + i, turns=((1,),), length=9)) for i in range(num_others)
            ]
            await asyncio.sleep(0.01)
            result = await converse(engine, 7)
            await asyncio.gather(*others)
        return result

    alone, crowded = asyncio.run(run(0)), asyncio.run(run(9))
    assert alone[0] == crowded[0]
    np.testing.assert_allclose(alone[1], crowded[1], atol=1e-5)


def test_seeds_differ_and_repeat():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            return [(await converse(engine, seed))[0] for seed in (1, 2, 1, 1 + 2**32)]

    first, second, again, high_bits = asyncio.run(run())
    assert first == again
    assert first != second
    assert first != high_bits


def test_wgt_04_wgt_08_refuses_to_sample_before_proven_weights():
    async def run():
        engine = make_engine()
        session = await engine.open(0, 1.0)
        with pytest.raises(RuntimeError, match="no weights are proven"):
            await session.generate((1,), NEVER, 1)
        _, manifest, _ = make_version(0)
        with pytest.raises(WeightsMismatch):
            await engine.load(manifest, make_version(1)[2])
        assert engine.version is None
        with pytest.raises(RuntimeError, match="no weights are proven"):
            await session.generate((1,), NEVER, 1)

    asyncio.run(run())


def permuted_experts(tensors):
    name = "model.layers.0.mlp.experts.down_proj"
    return tensors | {name: tensors[name][::-1].copy()}


def transposed(tensors):
    name = "model.layers.1.self_attn.q_proj.weight"
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
                await engine.load(manifest, mutate(tensors))
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


def test_mis_04_wgt_06_a_swap_leaves_nothing_stale_and_tags_every_token():
    """Tokens after a swap have the log-probs of the new weights over the whole sequence, old tokens included."""

    async def run():
        engine = make_engine()
        await load(engine, 0)

        async def swap():
            for number in (1, 2):
                while engine.counters.num_sampled_tokens < 25 * number:
                    await asyncio.sleep(0)
                engine.pause()  # or the rest would be sampled while the new weights are being proven
                await load(engine, number)
                engine.resume()

        async with running(engine):
            turns = ((5, 6), (7, 8, 9))
            conversations = [asyncio.create_task(converse(engine, seed, turns=turns, length=13)) for seed in range(4)]
            await swap()
            return await asyncio.gather(*conversations)

    results = asyncio.run(run())
    seen = set()
    for tokens, logprobs, versions in results:
        assert list(versions[versions >= 0]) == sorted(versions[versions >= 0])
        seen |= set(versions.tolist())
        for number in set(versions.tolist()) - {-1}:
            made = versions[1:] == number
            expected = full_logprobs(make_version(number)[0], tokens)
            np.testing.assert_allclose(logprobs[1:][made], expected[made], atol=2e-5)
    assert seen == {-1, 0, 1, 2}


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
                engine.pause()
                await load(engine, number)
                engine.resume()
            return await asyncio.gather(*requests, return_exceptions=True)

    results = asyncio.run(run())
    assert [len(tokens) for tokens, _, _ in results] == [31] * 3
    assert [set(versions.tolist()) for _, _, versions in results] == [{-1, 0, 1, 2}] * 3


def test_wgt_10_a_swap_beside_sampling_aborts_nothing():
    """3 callers that never stop asking, through four swaps: every request is completed."""

    async def run():
        engine = make_engine()
        await load(engine, 0)
        swapped = False

        async def keep_asking(seed):
            results = [await converse(engine, seed)]
            while not swapped:
                results.append(await converse(engine, seed))
            return results

        async with running(engine):
            callers = [asyncio.create_task(keep_asking(seed)) for seed in range(3)]
            for number in (1, 2, 1, 2):
                await load(engine, number)
            swapped = True
            return await asyncio.gather(*callers)

    for results in asyncio.run(run()):
        assert {len(tokens) for tokens, _, _ in results} == {24}
        assert set.union(*(set(versions.tolist()) for _, _, versions in results)) >= {-1, 0, 2}


def test_wgt_13_reloading_one_version_drifts_by_nothing():
    async def run():
        engine = make_engine()
        async with running(engine):
            results = []
            for _ in range(3):
                await load(engine, 1)
                results.append(await converse(engine, 5))
                await load(engine, 2)
        return results

    first, *others = asyncio.run(run())
    for other in others:
        assert other[0] == first[0]
        np.testing.assert_array_equal(other[1], first[1])


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


def test_stop_tokens_end_a_turn_and_are_part_of_it():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            session = await engine.open(1, 1.0)
            completion = await session.generate((5, 6), frozenset(range(0, 32, 4)), 28)
            full = await session.generate((7,), NEVER, 2)
        return completion, full

    completion, full = asyncio.run(run())
    assert completion.finish == "stop"
    assert [token % 4 == 0 for token in completion.tokens] == [False] * (len(completion.tokens) - 1) + [True]
    assert (full.finish, len(full.tokens)) == ("length", 2)
    assert completion.tokens.dtype == completion.versions.dtype == np.int32
    assert completion.logprobs.dtype == np.float32


def test_paused_engine_samples_nothing_and_keeps_its_sessions():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            conversation = asyncio.create_task(converse(engine, 1))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            engine.pause()
            steps = engine.counters.num_steps
            await asyncio.sleep(0.05)
            assert engine.counters.num_steps == steps
            assert not conversation.done()
            engine.resume()
            return await conversation

    assert len(asyncio.run(run())[0]) == 24


def test_orch_11_cancelled_sessions_free_their_slots():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        async with running(engine):
            doomed = [asyncio.create_task(converse(engine, seed)) for seed in range(6)]  # two of them wait for a slot
            await asyncio.sleep(0)
            engine.pause()
            await asyncio.sleep(0.02)
            assert engine.num_busy_slots == 4
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            return engine

    assert asyncio.run(run()).num_busy_slots == 0


def test_closed_sessions():
    async def run():
        engine = make_engine()
        await load(engine, 0)
        session = await engine.open(0, 1.0)
        sampling = asyncio.create_task(session.generate((1,), NEVER, 5))
        await asyncio.sleep(0)
        session.close()
        session.close()
        with pytest.raises(RuntimeError, match="closed while it was sampling"):
            await sampling
        with pytest.raises(RuntimeError, match="the session is closed"):
            await session.generate((1,), NEVER, 5)
        assert engine.num_busy_slots == 0
        async with running(engine):  # five conversations need the slot again, and it is as good as new
            again = await asyncio.gather(*(converse(engine, 1) for _ in range(5)))
            assert len({tuple(tokens) for tokens, _, _ in again}) == 1

    asyncio.run(run())


@pytest.mark.parametrize(("new_tokens", "max_tokens"), [((), 5), ((1,), 0), ((1,), MAX_TOKENS)])
def test_requests_that_cannot_be_served(new_tokens, max_tokens):
    async def run():
        engine = make_engine()
        await load(engine, 0)
        session = await engine.open(0, 1.0)
        with pytest.raises(ValueError, match="no room"):
            await session.generate(new_tokens, NEVER, max_tokens)

    asyncio.run(run())
