"""Scorers that loop, die, lie or print, in real processes."""

import asyncio
import os
import signal
import sys
import time

import psutil
import pytest

from asyncrl_jax.actor.verifiers import ScoreFailed, VerifierPool, check_math

HERE = "tests.actor.test_verifiers"


def right(value):
    return float(value == 4)


def loop():
    while True:
        pass


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def chatty():
    print("1.0")
    sys.stdout.write('{"score": 1}\n')
    return 0.25


def raises():
    raise KeyError("what")


def pause(seconds):
    time.sleep(seconds)
    return 1.0


def give(value):
    return {"nan": float("nan"), "inf": float("inf"), "text": "1", "none": None, "bool": True, "set": {1}}[value]


def _with_pool(scenario, **settings):
    async def main():
        pool = VerifierPool(**settings)
        try:
            return await scenario(pool)
        finally:
            await pool.close()

    result = asyncio.run(main())
    assert [c for c in psutil.Process().children(recursive=True) if "verifier_process" in " ".join(c.cmdline())] == []
    return result


@pytest.mark.parametrize(("function", "reason"), [("loop", "timeout"), ("die", "died"), ("raises", "raised")])
def test_env_02_a_scorer_that_hangs_or_dies_costs_one_score_and_is_no_zero(function, reason):
    async def scenario(pool):
        with pytest.raises(ScoreFailed) as failed:
            await pool.score(f"{HERE}:{function}", [])
        return failed.value.reason, await pool.score(f"{HERE}:right", [4])

    assert _with_pool(scenario, timeout_s=1.0) == (reason, 1.0)


def test_env_04_time_spent_waiting_does_not_count():
    async def scenario(pool):
        await pool.score(f"{HERE}:right", [4])
        return await asyncio.gather(*[pool.score(f"{HERE}:pause", [0.1]) for _ in range(15)])

    assert _with_pool(scenario, timeout_s=1.0, num_processes=1) == [1.0] * 15


def test_env_07_every_score_comes_back_to_its_own_answer():
    async def scenario(pool):
        answers = [4, "x", 5, None, 4]
        return await asyncio.gather(*[pool.score(f"{HERE}:right", [a]) for a in answers]), pool.num_started

    scores, started = _with_pool(scenario, num_processes=2)
    assert scores == [1.0, 0.0, 0.0, 0.0, 1.0]
    assert started <= 2


@pytest.mark.parametrize("value", ["nan", "inf", "text", "none", "bool", "set"])
def test_what_is_no_score_is_none(value):
    async def scenario(pool):
        with pytest.raises(ScoreFailed) as failed:
            await pool.score(f"{HERE}:give", [value])
        return failed.value.reason

    assert _with_pool(scenario) == "not_a_score"


def test_what_a_scorer_prints_is_not_its_answer():
    assert _with_pool(lambda pool: pool.score(f"{HERE}:chatty", [])) == 0.25


def test_a_cancelled_score_ends_its_process():
    async def scenario(pool):
        await pool.score(f"{HERE}:right", [4])
        task = asyncio.create_task(pool.score(f"{HERE}:loop", []))
        await asyncio.sleep(0.2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        return pool.num_started, await pool.score(f"{HERE}:right", [4]), pool.num_started

    assert _with_pool(scenario) == (1, 1.0, 2)


def test_env_03_math_verify_scores_known_pairs_where_it_runs():
    pytest.importorskip("math_verify")

    async def scenario(pool):
        right = await pool.score("asyncrl_jax.actor.verifiers:math_score", [r"$\frac{1}{2}$", "$0.5$"])
        return right, await pool.score("asyncrl_jax.actor.verifiers:math_score", ["$3$", "$4$"])

    assert _with_pool(scenario, timeout_s=30.0) == (1.0, 0.0)
    check_math()
