"""More sessions than slots: the engine's whole contract, and who gives up a slot to whom."""

import asyncio

import numpy as np
import pytest
from engine_contract import NEVER, EngineContract, EngineHost, converse
from engine_setup import make_engine

from asyncrl_jax.actor.engines.sharing import SlotSharing


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = EngineHost(SlotSharing(make_engine()), tmp_path_factory.mktemp("weights"))
    yield host
    host.close()


class TestContract(EngineContract):
    # An episode holds no slot from start to end, so a config with swaps between episodes is refused.
    test_swap_at_a_boundary_keeps_turns_or_episodes_of_one_version = None


def test_many_sessions_share_few_slots_and_sample_what_they_would_have_sampled_alone(host):
    async def run(seeds):
        await host.load(0)
        return await asyncio.gather(*(converse(host.engine, seed) for seed in seeds))

    alone = [host.run(run([seed]))[0] for seed in range(12)]
    lent_before = host.engine.num_lent
    for (tokens, logprobs, _), (expected, expected_logprobs, _) in zip(host.run(run(range(12))), alone, strict=True):
        assert tokens == expected
        np.testing.assert_allclose(logprobs, expected_logprobs, atol=1e-5)
    assert host.engine.num_lent > lent_before
    assert host.engine.num_busy_slots == 0


def test_a_session_keeps_its_slot_while_nobody_waits(host):
    async def run():
        lent, reused = host.engine.num_lent, host.engine.counters.num_reused_tokens
        await asyncio.gather(*(converse(host.engine, seed) for seed in range(4)))
        return host.engine.num_lent - lent, host.engine.counters.num_reused_tokens - reused

    lent, reused = host.run(run())
    assert lent == 0
    assert reused > 0


def test_the_session_that_was_idle_for_longest_lends_its_slot(host):
    async def run():
        sessions = [await host.engine.open(seed, 1.0) for seed in range(5)]
        for session in sessions:
            await session.generate((5,), NEVER, 2)
        holding = [session._inner is not None for session in sessions]
        for session in sessions:
            session.close()
        return holding

    assert host.run(run()) == [False, True, True, True, True]


def test_orch_11_a_session_that_is_closed_while_it_waits_takes_no_slot(host):
    async def run():
        sessions = [await host.engine.open(seed, 1.0) for seed in range(6)]
        turns = [asyncio.create_task(session.generate((5,), NEVER, 20)) for session in sessions]
        await asyncio.sleep(0)
        turns[4].cancel()  # waits
        sessions[5].close()  # waits too
        with pytest.raises(asyncio.CancelledError):
            await turns[4]
        with pytest.raises(RuntimeError, match="closed"):
            await turns[5]
        await asyncio.gather(*turns[:4])
        for session in sessions:
            session.close()
        return host.engine.num_busy_slots

    assert host.run(run()) == 0
    assert host.run(converse(host.engine, 3))[0]  # all slots are there again


def test_what_it_cannot_do_is_refused(host):
    with pytest.raises(ValueError, match="routed_experts"):
        host.run(host.engine.open(0, 1.0, routed_experts=True))
    for temperature in (0.0, -1.0, float("nan"), float("inf")):
        with pytest.raises(ValueError, match="temperature"):
            host.run(host.engine.open(0, temperature))
