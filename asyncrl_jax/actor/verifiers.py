"""Scores answers in processes of their own, so that a scorer that loops, grows or dies costs one score.

A thread can't be stopped and a signal needs the main thread, so each scorer is a child that is killed when its time is
up and started again. Requests and results are JSON lines. The time of a request counts from when a process starts on
it, not from when it was asked for.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

from asyncrl_jax.actor.subprocesses import reap
from asyncrl_jax.lifetime import PARENT_VARIABLE

START_LIMIT_S = 60.0  # for a process to import what it scores with
_LINE_BYTES = 16 * 2**20


class ScoreFailed(RuntimeError):
    """No score: the scorer raised, took too long, died, or returned what is no score. Never taken for a 0."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason  # raised, timeout, died or not_a_score


class VerifierPool:
    """Scorers by address, `module:function`, of this package or of the operator's config; never from the wire.

    Invariant: the number of processes is back at `num_processes` or below after every request, whatever it did.
    """

    def __init__(self, num_processes: int = 1, timeout_s: float = 10.0) -> None:
        """Args: timeout_s: of one score."""
        self._timeout_s = timeout_s
        self._free = asyncio.Semaphore(num_processes)
        self._idle: list[asyncio.subprocess.Process] = []
        self.num_started = 0

    async def score(self, address: str, arguments: Sequence[Any]) -> float:
        """`function(*arguments)`, in [0, 1].

        Args:
          address: of the function.
          arguments: that JSON can carry.

        Raises:
          ScoreFailed: if there is no score.
        """
        async with self._free:
            process = self._idle.pop() if self._idle else await self._start()
            healthy = False
            try:
                result = await self._ask(process, {"address": address, "arguments": list(arguments)}, self._timeout_s)
                healthy = True
            finally:
                if healthy:
                    self._idle.append(process)
                else:
                    await _kill(process)
        if "error" in result:
            raise ScoreFailed("raised", str(result["error"])[:500])
        value = result.get("score")
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
            raise ScoreFailed("not_a_score", repr(value)[:100])
        return float(value)

    async def close(self) -> None:
        """Ends all processes."""
        while self._idle:
            await _kill(self._idle.pop())

    async def _start(self) -> asyncio.subprocess.Process:
        self.num_started += 1
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "asyncrl_jax.actor.verifier_process",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=os.environ | {PARENT_VARIABLE: str(os.getpid())},
            start_new_session=True,
            limit=_LINE_BYTES,
        )
        try:
            await self._ask(process, {}, START_LIMIT_S)
        except BaseException:
            await _kill(process)
            raise
        return process

    async def _ask(
        self, process: asyncio.subprocess.Process, request: dict[str, Any], limit_s: float
    ) -> dict[str, Any]:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(limit_s):
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise ScoreFailed("timeout", f"no score within {limit_s:g} s") from None
        except (ConnectionError, ValueError) as error:
            raise ScoreFailed("died", repr(error)) from None
        if not line:
            raise ScoreFailed("died", f"the scoring process ended with {process.returncode}")
        result: dict[str, Any] = json.loads(line)
        return result


async def _kill(process: asyncio.subprocess.Process) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    await reap(process)


def math_score(answer: str, gold: str) -> float:
    """1 if math-verify finds the answers equal, else 0. For a scoring process: it needs the main thread."""
    from math_verify import parse, verify

    return float(verify(parse(gold), parse(answer)))


def check_math() -> None:
    """Five known pairs.

    Raises:
      RuntimeError: if one is scored wrongly, as when math-verify does not work where it runs.
    """
    pairs = [("$4$", "$2+2$", 1.0), (r"$\frac{1}{2}$", "$0.5$", 1.0), ("$x+1$", "$1+x$", 1.0), ("$3$", "$4$", 0.0)]
    for (gold, answer, expected), number in zip([*pairs, ("$10$", "$10$", 1.0)], itertools.count(1), strict=False):
        if math_score(answer, gold) != expected:
            raise RuntimeError(f"math-verify fails its known pair {number}: {answer} against {gold}")
