"""What every engine promises. A subclass gives the `host` fixture, module-wide: an `EngineHost` with three versions."""

import asyncio
import contextlib
import time

import jax
import numpy as np
import pytest
from engine_setup import MAX_TOKENS, MODEL, full_logits, full_logprobs, make_version, publish_versions

from asyncrl_jax.actor.engines.gate import SwapGate
from asyncrl_jax.weights.manifest import VersionGone

NEVER = frozenset()
TOLERANCE = 1e-4  # nats, between the engine and the learner's model, in fp32


class EngineHost:
    """An engine, the event loop it lives on, and published versions 0, 1 and 2. Starting one may take seconds."""

    def __init__(self, engine, directory, publish=publish_versions):
        self.engine = engine
        self.directory = str(directory)
        self.versions = publish(self.directory)
        self.loop = asyncio.new_event_loop()
        self.running = self.loop.create_task(engine.run())
        self.loop.run_until_complete(self.load(0))

    def run(self, coroutine):
        return self.loop.run_until_complete(asyncio.wait_for(coroutine, 60))

    async def load(self, number):
        await self.engine.load(self.directory, self.versions[number])

    async def until_sampled(self, count):
        """Waits until so many more tokens were sampled."""
        target = self.engine.counters.num_sampled_tokens + count
        while self.engine.counters.num_sampled_tokens < target:
            await asyncio.sleep(0)

    def close(self):
        self.running.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            self.loop.run_until_complete(self.running)
        self.loop.close()


async def converse(engine, seed, temperature=1.0, turns=((5, 6, 7), (8, 9), (3,)), length=6, **kwargs):
    """(tokens, log-probs, versions) of a session with forced tokens between its turns; 0 and -1 where forced."""
    session = await engine.open(seed, temperature, **kwargs)
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


def check_against_learner(result, temperature=1.0, tolerance=TOLERANCE):
    """Every sampled token has the log-prob that the version it is tagged with gives it, over the whole sequence."""
    tokens, logprobs, versions = result
    for number in set(versions.tolist()) - {-1}:
        made = versions[1:] == number
        expected = full_logprobs(make_version(number)[0], tokens, temperature)
        np.testing.assert_allclose(logprobs[1:][made], expected[made], atol=tolerance)


class EngineContract:
    def test_logprobs_are_those_of_the_distribution_sampled(self, host):
        async def run():
            await host.load(0)
            return await asyncio.gather(*(converse(host.engine, seed, temperature=0.7) for seed in range(6)))

        for result in host.run(run()):
            check_against_learner(result, temperature=0.7)
            assert (result[2] == 0).sum() == 18

    @pytest.mark.parametrize("temperature", [0.6, 1.3])
    def test_tokens_are_drawn_from_that_distribution(self, host, temperature):
        prompt, num_samples = (5, 6, 7), 1500

        async def run():
            await host.load(1)
            drawn = await asyncio.gather(
                *(converse(host.engine, seed, temperature, turns=[prompt], length=1) for seed in range(num_samples))
            )
            return [tokens[-1] for tokens, _, _ in drawn]

        counts = np.bincount(host.run(run()), minlength=MODEL.vocab_size)
        logits_V = full_logits(make_version(1)[0], prompt)[-1]
        expected = num_samples * np.asarray(jax.nn.softmax(logits_V / temperature))
        deviations = (counts - expected) / np.sqrt(np.maximum(expected, 1.0))
        assert np.abs(deviations).max() < 5.0

    def test_noise_is_fresh_at_every_turn(self, host):
        """Else two turns that start alike would go on alike."""

        async def run():
            await host.load(1)
            return await asyncio.gather(
                *(converse(host.engine, seed, 2.0, turns=((5,), (5,), (5,)), length=1) for seed in range(60))
            )

        agreeing = sum(tokens[1] == tokens[3] for tokens, _, _ in host.run(run()))
        assert agreeing < 20

    def test_mis_09_a_sample_does_not_depend_on_its_batch_mates(self, host):
        async def run(num_others):
            await host.load(0)
            others = [
                asyncio.create_task(converse(host.engine, 100 + i, turns=((1,),), length=9)) for i in range(num_others)
            ]
            await asyncio.sleep(0.01)
            result = await converse(host.engine, 7)
            await asyncio.gather(*others)
            return result

        alone, crowded = host.run(run(0)), host.run(run(9))
        assert alone[0] == crowded[0]
        np.testing.assert_allclose(alone[1], crowded[1], atol=1e-5)

    def test_seeds_differ_and_repeat(self, host):
        async def run():
            await host.load(0)
            return [(await converse(host.engine, seed))[0] for seed in (1, 2, 1, 1 + 2**32)]

        first, second, again, high_bits = host.run(run())
        assert first == again
        assert first != second
        assert first != high_bits

    def test_mis_04_wgt_06_a_swap_leaves_nothing_stale_and_tags_every_token(self, host):
        """Tokens after a swap have the log-probs of the new weights over the whole sequence, old tokens included."""

        async def run():
            await host.load(0)
            turns = ((5, 6), (7, 8, 9))
            conversations = [
                asyncio.create_task(converse(host.engine, seed, turns=turns, length=13)) for seed in range(4)
            ]
            for number in (1, 2):
                await host.until_sampled(24)
                await host.engine.pause()  # or the rest would be sampled while the new weights are being proven
                await host.load(number)
                await host.engine.resume()
            return await asyncio.gather(*conversations)

        seen = set()
        for result in host.run(run()):
            sampled = result[2][result[2] >= 0].tolist()
            assert sampled == sorted(sampled)
            seen |= set(sampled)
            check_against_learner(result)
        assert seen == {0, 1, 2}

    def test_wgt_10_a_swap_beside_sampling_aborts_nothing(self, host):
        """3 callers that never stop asking, through four swaps: every request is completed, none is cut short."""

        async def run():
            await host.load(0)
            swapped, answers = False, [[], [], []]

            async def keep_asking(seed):
                while not swapped:
                    answers[seed].append(await converse(host.engine, seed))

            async def more(count):
                wanted = [len(results) + count for results in answers]
                while any(len(results) < least for results, least in zip(answers, wanted, strict=True)):
                    await asyncio.sleep(0.001)

            callers = [asyncio.create_task(keep_asking(seed)) for seed in range(3)]
            await more(1)
            for number in (1, 2, 1, 2):
                await host.load(number)
            await more(2)  # the first may have been sampled before the last swap
            swapped = True
            await asyncio.gather(*callers)
            return answers

        for results in host.run(run()):
            assert {len(tokens) for tokens, _, _ in results} == {24}
            assert set.union(*(set(versions.tolist()) for _, _, versions in results)) >= {-1, 0, 2}
            for result in results[:: max(1, len(results) // 5)]:
                check_against_learner(result)

    def test_wgt_13_reloading_one_version_drifts_by_nothing(self, host):
        async def run():
            results = []
            for _ in range(3):
                await host.load(1)
                results.append(await converse(host.engine, 5))
                await host.load(2)
            return results

        first, *others = host.run(run())
        for other in others:
            assert other[0] == first[0]
            np.testing.assert_array_equal(other[1], first[1])

    def test_wgt_01_a_version_that_is_gone_leaves_the_old_one(self, host):
        async def run():
            await host.load(1)
            with pytest.raises(VersionGone):
                await host.engine.load(host.directory + "/elsewhere", host.versions[2])
            return await converse(host.engine, 1)

        assert set(host.run(run())[2].tolist()) == {-1, 1}

    @pytest.mark.parametrize("boundary", ["turn", "episode"])
    def test_swap_at_a_boundary_keeps_turns_or_episodes_of_one_version(self, host, monkeypatch, boundary):
        monkeypatch.setattr(host.engine, "_gate", SwapGate(boundary))

        async def run():
            await host.load(0)
            swapped = False

            async def keep_asking(seed):
                results = []
                while not swapped or not results:
                    results.append(await converse(host.engine, seed, turns=((5, 6), (7, 8)), length=13))
                return results

            callers = [asyncio.create_task(keep_asking(seed)) for seed in range(6)]
            await host.until_sampled(20)
            for number in (1, 2):
                await host.load(number)
            swapped = True
            return [result for results in await asyncio.gather(*callers) for result in results]

        results = host.run(run())
        turns = [[set(versions[:15]) - {-1}, set(versions[15:]) - {-1}] for _, _, versions in results]
        assert all(len(turn) == 1 for episode in turns for turn in episode)
        assert boundary == "turn" or all(first == second for first, second in turns)
        assert {0, 1} <= set.union(*(turn for episode in turns for turn in episode))
        for result in results[:: max(1, len(results) // 10)]:
            check_against_learner(result)

    def test_later_turns_reuse_what_earlier_ones_computed(self, host):
        prompt, counters = (*range(1, 32), *range(1, 7)), host.engine.counters

        async def run():
            await host.load(0)
            before = counters.num_reused_tokens
            await converse(host.engine, 1, turns=(prompt, (5,)), length=4)
            return host.engine.counters.num_reused_tokens - before

        assert host.run(run()) >= 16

    def test_stop_tokens_end_a_turn_and_are_part_of_it(self, host):
        async def run():
            await host.load(0)
            session = await host.engine.open(1, 1.0)
            completion = await session.generate((5, 6), frozenset(range(0, 32, 4)), 28)
            full = await session.generate((7,), NEVER, 2)
            session.close()
            return completion, full

        completion, full = host.run(run())
        assert completion.finish == "stop"
        assert [token % 4 == 0 for token in completion.tokens] == [False] * (len(completion.tokens) - 1) + [True]
        assert (full.finish, len(full.tokens)) == ("length", 2)
        assert completion.tokens.dtype == completion.versions.dtype == np.int32
        assert completion.logprobs.dtype == np.float32

    def test_paused_engine_samples_nothing_and_keeps_its_sessions(self, host):
        async def run():
            await host.load(0)
            conversation = asyncio.create_task(converse(host.engine, 1))
            await host.until_sampled(2)
            await host.engine.pause()
            sampled = host.engine.counters.num_sampled_tokens
            await asyncio.sleep(0.05)
            assert host.engine.counters.num_sampled_tokens == sampled
            assert not conversation.done()
            await host.engine.resume()
            return await conversation

        assert len(host.run(run())[0]) == 24

    def test_time_of_computing_is_counted_while_sessions_sample_and_not_while_they_rest(self, host):
        async def run():
            await host.load(0)
            counted, started_at = host.engine.counters.compute_s, time.monotonic()
            await asyncio.gather(*(converse(host.engine, seed) for seed in range(3)))
            sampling_s, sampled_s = time.monotonic() - started_at, host.engine.counters.compute_s - counted
            await asyncio.sleep(0.2)
            return sampling_s, sampled_s, host.engine.counters.compute_s - counted

        sampling_s, sampled_s, later_s = host.run(run())
        assert 0 < sampled_s <= sampling_s
        assert later_s == sampled_s

    def test_orch_11_cancelled_sessions_free_their_slots_and_stop(self, host):
        async def run():
            await host.load(0)
            doomed = [  # two of them wait for a slot
                asyncio.create_task(converse(host.engine, seed, turns=((5,),), length=MAX_TOKENS - 1))
                for seed in range(6)
            ]
            await host.until_sampled(4)
            assert host.engine.num_busy_slots == 4
            for task in doomed:
                task.cancel()
            await asyncio.gather(*doomed, return_exceptions=True)
            assert host.engine.num_busy_slots == 0
            await asyncio.sleep(0.05)  # an abort is on its way
            sampled = host.engine.counters.num_sampled_tokens
            await asyncio.sleep(0.05)
            assert host.engine.counters.num_sampled_tokens == sampled

        host.run(run())

    def test_closed_sessions(self, host):
        async def run():
            await host.load(0)
            session = await host.engine.open(0, 1.0)
            sampling = asyncio.create_task(session.generate((1,), NEVER, 5))
            await asyncio.sleep(0)
            session.close()
            session.close()
            with pytest.raises(RuntimeError, match="closed while it was sampling"):
                await sampling
            with pytest.raises(RuntimeError, match="the session is closed"):
                await session.generate((1,), NEVER, 5)
            assert host.engine.num_busy_slots == 0
            # Five conversations need the slot again, and it is as good as new.
            again = await asyncio.gather(*(converse(host.engine, 1) for _ in range(5)))
            assert len({tuple(tokens) for tokens, _, _ in again}) == 1

        host.run(run())

    @pytest.mark.parametrize(("new_tokens", "max_tokens"), [((), 5), ((1,), 0), ((1,), MAX_TOKENS)])
    def test_requests_that_cannot_be_served(self, host, new_tokens, max_tokens):
        async def run():
            await host.load(0)
            session = await host.engine.open(0, 1.0)
            try:
                with pytest.raises(ValueError, match="no room"):
                    await session.generate(new_tokens, NEVER, max_tokens)
            finally:
                session.close()
            with pytest.raises(ValueError, match="temperature=0"):
                await host.engine.open(0, 0.0)

        host.run(run())
