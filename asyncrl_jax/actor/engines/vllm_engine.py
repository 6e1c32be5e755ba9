"""Samples with vLLM: sessions, swaps and proofs in front of a backend that does nothing but continue token ids.

A swap, or a pause, ends every request under way where it stands; each session keeps what it got and asks again, with
the longer prompt, when the engine is open again. So what is sampled after a swap attends to nothing of the old weights,
and a request that vLLM has forgotten is the same as one that waits.

    closed      requests under way come back with what they have; new ones wait
    swapping    the staged weights go in, the prefix cache is emptied, the weights get their label
    proving     canary and continuation, alone in the engine
    open        sessions ask again; their prefixes are computed anew
"""

from __future__ import annotations

import asyncio
import dataclasses
import itertools
import time
from collections.abc import Sequence

import numpy as np

from asyncrl_jax.actor.engines.base import Completion, EngineCounters
from asyncrl_jax.actor.engines.gate import SwapGate
from asyncrl_jax.actor.engines.vllm_backend import Backend, Sampled, SamplingRequest
from asyncrl_jax.actor.engines.vllm_proof import Tolerance, prove
from asyncrl_jax.actor.engines.vllm_worker import ROUTED_PREFIX, error_of
from asyncrl_jax.seeds import derive_seed
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import Manifest, VersionGone, WeightsMismatch
from asyncrl_jax.weights.read import READ_TIMEOUT_S, announced_manifest

_STAGE_POLL_S = 0.02
_DRAIN_POLL_S = 0.001


class VllmEngine:
    """See `Engine`. All methods belong to one event loop.

    Invariants:
      * The order of a swap is close, load, empty the cache, label, prove, open; a step that fails opens nothing new.
      * A token's version is the label that vLLM itself gave the weights that made it.
      * After a failed proof the version before is loaded and proven again; if it cannot be, the engine is dead.
    """

    def __init__(
        self,
        backend: Backend,
        *,
        num_slots: int,
        max_tokens: int,
        tolerance: Tolerance,
        num_sessions: int = 0,
        swap_at: str = "token",
        routed_experts: bool = False,
    ) -> None:
        """Args:
        num_sessions: open at once, where that is more than `num_slots`; between turns a session is nothing to vLLM.
        routed_experts: whether the backend can say which experts served a token.
        """
        self._backend = backend
        self._num_slots = num_slots
        self.max_tokens = max_tokens
        self._tolerance = tolerance
        self._routed_experts = routed_experts
        self._gate = SwapGate(swap_at)
        self._sessions = asyncio.Semaphore(max(num_slots, num_sessions))
        self._num_open = 0
        self._counters = EngineCounters()
        self._started = False
        self._loaded: tuple[str, WeightVersion] | None = None  # (directory, version) that is proven
        self._paused = False
        self._open = asyncio.Event()
        self._num_requests = 0  # under way in the backend
        self._computing_from = 0.0  # while there are some, monotonic seconds until which `compute_s` has counted
        self._ids = itertools.count()
        self._changing = asyncio.Lock()  # held by whoever closes or opens the engine

    @property
    def version(self) -> int | None:
        return None if self._loaded is None else self._loaded[1].number

    @property
    def counters(self) -> EngineCounters:
        work = self._backend.counters
        counters = self._counters
        self._count_compute()
        counters.num_steps, counters.num_fed_tokens = work.num_steps, work.num_running
        counters.num_sampled_tokens = work.num_sampled
        return counters

    @property
    def num_slots(self) -> int:
        return self._num_slots

    @property
    def num_busy_slots(self) -> int:
        return self._num_open

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> VllmSession:
        if not 0.01 <= temperature <= 2:
            raise ValueError(f"temperature={temperature}: vLLM samples at temperatures from 0.01 to 2")
        if routed_experts and not self._routed_experts:
            raise ValueError("routed_experts=True: set --config.vllm.routed_experts")
        await self._sessions.acquire()
        try:
            await self._gate.enter("episode")
        except asyncio.CancelledError:
            self._sessions.release()
            raise
        self._num_open += 1
        return VllmSession(self, seed, temperature, next(self._ids), routed_experts)

    def release(self) -> None:
        """Makes room for another session."""
        self._num_open -= 1
        self._gate.leave("episode")
        self._sessions.release()

    async def pause(self) -> None:
        self._paused = True
        self._gate.set_paused(True)
        async with self._changing:
            await self._close()

    async def resume(self) -> None:
        self._paused = False
        self._gate.set_paused(False)
        async with self._changing:
            await self._reopen()

    async def run(self) -> None:
        try:
            await asyncio.Event().wait()  # the backend works by itself; it starts with the first weights
        finally:
            await asyncio.shield(self._backend.close())

    async def generate(self, session: VllmSession, stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        """Continues the session's tokens, in as many requests as swaps and pauses make of one."""
        await self._gate.enter("turn")
        try:
            parts: list[Sampled] = []
            length = 0
            while not parts or (parts[-1].finish == "abort" and length < max_tokens):
                parts.append(await self._sample(session.request(stop_tokens, max_tokens - length)))
                session.extend(parts[-1])
                length += len(parts[-1].tokens)
        finally:
            self._gate.leave("turn")
        if session.routed_experts:
            await self._take_routing(session, parts)
        return Completion(
            tokens=np.concatenate([part.tokens for part in parts]),
            logprobs=np.concatenate([part.logprobs for part in parts]),
            versions=np.concatenate([np.full(len(part.tokens), _number(part), np.int32) for part in parts]),
            finish="stop" if parts[-1].finish == "stop" else "length",
            routed_experts=session.routing,
        )

    async def _sample(self, request: SamplingRequest) -> Sampled:
        await self._open.wait()
        self._count_compute()
        self._num_requests += 1
        try:
            sampled = await self._backend.sample(request)
        finally:
            self._count_compute()
            self._num_requests -= 1
        self._counters.num_prompt_tokens += len(request.prompt)
        self._counters.num_reused_tokens += sampled.num_cached
        return sampled

    def _count_compute(self) -> None:
        """vLLM makes steps without a break while it has requests."""
        now = time.monotonic()
        if self._num_requests:
            self._counters.compute_s += now - self._computing_from
        self._computing_from = now

    async def _take_routing(self, session: VllmSession, parts: list[Sampled]) -> None:
        """Stitches the experts of this turn's requests to what the session has."""
        for request_id, sampled in zip(session.take_request_ids(), parts, strict=True):
            if sampled.routed_experts is not None:
                session.stitch(*sampled.routed_experts)
                continue
            (taken, *_) = await self._backend.call("asyncrl_take_routing", request_id=request_id)
            if taken is not None:  # a request that was aborted before its first step has none
                first, shape, data = taken
                session.stitch(first, np.frombuffer(data, np.int16).reshape(shape))

    async def load(self, directory: str, version: WeightVersion) -> None:
        if not self._started:
            await self._backend.start()
            self._started = True
        manifest = await asyncio.to_thread(announced_manifest, directory, version)
        await self._stage(directory, version)
        async with self._gate.swap(), self._changing:
            started_at, proof_before = time.monotonic(), self._counters.proof_s
            await self._close()
            try:
                await self._swap_and_prove(version, manifest)
            except WeightsMismatch:
                await self._restore()
                raise
            finally:
                proof_s = self._counters.proof_s - proof_before
                self._counters.swap_s += time.monotonic() - started_at - proof_s
            self._loaded = (directory, version)
            self._counters.num_loads += 1
            await self._reopen()

    async def _stage(self, directory: str, version: WeightVersion) -> None:
        """Returns when every worker has read and verified the version, into its own memory."""
        await self._backend.call("asyncrl_stage", directory=directory, version=dataclasses.asdict(version))
        async with asyncio.timeout(READ_TIMEOUT_S):
            while True:
                results = await self._backend.call("asyncrl_staged")
                for result in results:
                    if (error := error_of(result)) is not None:
                        raise error
                if all(result is not None for result in results):
                    return
                await asyncio.sleep(_STAGE_POLL_S)

    async def _swap_and_prove(self, version: WeightVersion, manifest: Manifest) -> None:
        """Raises WeightsMismatch: the engine's weights then mean nothing."""
        where = f"v{version.number}"
        for result in await self._backend.call("asyncrl_swap"):
            if (error := error_of(result)) is not None:
                raise error
            echo = (result["number"], result["manifest_digest"])
            if echo != (version.number, version.manifest_digest):
                raise WeightsMismatch("version", f"{where} ({version.manifest_digest}): the worker has loaded {echo}")
        if not await self._backend.reset_prefix_cache():
            raise WeightsMismatch("prefix_cache", f"{where}: the prefix cache could not be emptied")
        await self._backend.label(str(version.number))
        await self._backend.resume()
        started_at = time.monotonic()
        try:
            await prove(
                self._backend,
                manifest,
                tolerance=self._tolerance,
                max_tokens=self.max_tokens,
                attempt=next(self._ids),
            )
        finally:
            self._counters.proof_s += time.monotonic() - started_at

    async def _restore(self) -> None:
        """Loads the version before again, after one was refused."""
        if self._loaded is None:
            return
        directory, version = self._loaded
        try:
            await self._backend.pause()
            await self._stage(directory, version)
            await self._swap_and_prove(version, await asyncio.to_thread(announced_manifest, directory, version))
        except (VersionGone, WeightsMismatch) as error:
            raise RuntimeError(f"the engine has no weights: v{version.number} cannot be restored") from error
        await self._reopen()

    async def _close(self) -> None:
        """Holds back sessions, and returns when nothing is under way."""
        self._open.clear()
        if not self._started:
            return
        await self._backend.pause()
        while self._num_requests:  # one that was just being handed over comes too late for the first call
            await asyncio.sleep(_DRAIN_POLL_S)
            await self._backend.pause()

    async def _reopen(self) -> None:
        if self._loaded is not None and not self._paused:
            await self._backend.resume()
            self._open.set()


class VllmSession:
    """See `Session`."""

    def __init__(self, engine: VllmEngine, seed: int, temperature: float, number: int, routed_experts: bool) -> None:
        self.routed_experts = routed_experts
        self.routing: np.ndarray | None = None  # int16 [S - 1, L, K] of the tokens so far
        self._engine = engine
        self._seed = seed
        self._temperature = temperature
        self._name = f"{ROUTED_PREFIX if routed_experts else ''}{number}"
        self._tokens: list[int] = []
        self._request_ids: list[str] = []  # whose routing was not taken yet
        self._closed = False
        self._turn: asyncio.Task[Completion] | None = None

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        self._require_open()
        if self._engine.version is None:
            raise RuntimeError("no weights are proven yet: load a version before sampling")
        known, start = len(self._tokens), len(self._tokens) + len(new_tokens)
        if start == 0 or max_tokens < 1 or start + max_tokens > self._engine.max_tokens:
            raise ValueError(
                f"{known} tokens and {len(new_tokens)} new ones leave no room to sample {max_tokens} of "
                f"{self._engine.max_tokens}"
            )
        self._tokens.extend(map(int, new_tokens))
        self._turn = asyncio.create_task(self._engine.generate(self, stop_tokens, max_tokens))
        try:
            return await self._turn
        except asyncio.CancelledError:
            self._turn.cancel()
            task = asyncio.current_task()
            if self._closed and task is not None and not task.cancelling():  # nobody cancelled the caller
                raise RuntimeError("the session was closed while it was sampling") from None
            raise

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the session is closed")

    def close(self) -> None:
        if not self._closed:
            self._closed = True
            if self._turn is not None:
                self._turn.cancel()  # vLLM is told to abort the request
            self._engine.release()

    def request(self, stop_tokens: frozenset[int], max_tokens: int) -> SamplingRequest:
        """Asks for the continuation of what there is. Its seed depends on the session and the position alone."""
        start = len(self._tokens)
        request_id = f"{self._name}/{start}"
        self._request_ids.append(request_id)
        return SamplingRequest(
            request_id=request_id,
            prompt=tuple(self._tokens),
            max_tokens=max_tokens,
            temperature=self._temperature,
            seed=derive_seed(self._seed, "position", start),
            stop_tokens=tuple(sorted(stop_tokens)),
            # Experts of a prefix that another session computed are not known here.
            cache_salt=self._name if self.routed_experts else None,
        )

    def extend(self, sampled: Sampled) -> None:
        """Appends what was sampled."""
        self._tokens.extend(map(int, sampled.tokens))

    def take_request_ids(self) -> list[str]:
        """Requests since the last call."""
        ids, self._request_ids = self._request_ids, []
        return ids

    def stitch(self, first: int, rows_SLK: np.ndarray) -> None:
        """Adds the experts of positions from `first` on; those that are known stay: they made what was sampled."""
        known = 0 if self.routing is None else len(self.routing)
        assert first <= known, "experts of a position are missing"
        new = rows_SLK[known - first :]
        self.routing = new if self.routing is None else np.concatenate([self.routing, new])


def _number(sampled: Sampled) -> int:
    """The version that made the tokens, as vLLM says; -1 when there are none."""
    if not len(sampled.tokens):
        return -1
    if sampled.version is None:
        raise RuntimeError(f"{len(sampled.tokens)} tokens of one request were made by several versions")
    return int(sampled.version)
