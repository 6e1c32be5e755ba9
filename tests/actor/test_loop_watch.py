"""How late an event loop is, and who held it up."""

import asyncio
import logging
import time

from asyncrl_jax.actor import loop_watch
from asyncrl_jax.actor.loop_watch import LoopWatch


def blocks_the_loop(seconds):
    time.sleep(seconds)


def test_orch_06_what_blocks_the_event_loop_is_measured_and_named(caplog, monkeypatch):
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 0.2)

    async def run():
        with LoopWatch() as watch:
            looking = asyncio.create_task(watch.run())
            await asyncio.sleep(0.1)
            watch.take_worst_s()
            blocks_the_loop(0.6)
            await asyncio.sleep(0.1)
            looking.cancel()
            return watch.take_worst_s(), watch.take_worst_s(), watch.p99_s, watch.num_blocked

    with caplog.at_level(logging.ERROR):
        worst, again, p99, blocked = asyncio.run(run())
    assert worst > 0.5
    assert again == 0
    assert p99 > 0
    assert blocked == 1
    assert "blocks_the_loop" in caplog.text


def test_a_loop_that_turns_is_not_accused(caplog, monkeypatch):
    monkeypatch.setattr(loop_watch, "BLOCKED_S", 1.0)

    async def run():
        with LoopWatch() as watch:
            looking = asyncio.create_task(watch.run())
            await asyncio.sleep(0.5)
            looking.cancel()
            return watch.num_blocked

    assert asyncio.run(run()) == 0
    assert "stood still" not in caplog.text
