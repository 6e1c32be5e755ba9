"""The built-in engine: continuous batching in JAX over a fixed number of slots, with static shapes.

    a turn asks ─▶ slot (jax_slots.py) ─▶ prefix copied from another row, or the wait for one that is on its way
                                      ─▶ chunks of the prompt, between blocks of the others' decode steps
                                      ─▶ blocks of decode steps ─▶ the turn's tokens

Everything that runs on the device (jax_programs.py) is awaited on another thread, so that sessions, environments and
heartbeats go on meanwhile. A block ends on the device, when its steps are done or rows that have ended would rest too
long; the next one is planned when it has.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import jax
import numpy as np

from asyncrl_jax.actor.engines.base import Completion, EngineCounters
from asyncrl_jax.actor.engines.gate import SwapGate
from asyncrl_jax.actor.engines.jax_programs import Programs, Sampled, Shapes, on_device, programs_for, warm_up
from asyncrl_jax.actor.engines.jax_proof import prove
from asyncrl_jax.actor.engines.jax_slots import Slots
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import KVCache, Params
from asyncrl_jax.models.decoding import shortest_memory
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import Manifest
from asyncrl_jax.weights.read import WeightsReader

_CHUNKS_IN_A_ROW = 4  # of prompts before those that decode get a block; one where few wait
_FEW = 8  # those that decode are more than so many times those that wait
_PATIENCE = 0.1  # steps: what a return to the host costs, in steps of all rows


class JaxEngine:
    """See `Engine`. All methods belong to one event loop; proofs and waits for the device run on other threads.

    A load proves the new weights on a cache of its own while the old ones go on sampling. Then, between two blocks,
    they take the old ones' place, and what the cache holds is forgotten: sequences under way are prefilled anew like
    prompts, so that none attends to keys of the old weights.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        num_slots: int,
        max_tokens: int,
        canary_tolerance: float,
        swap_at: str = "token",
        block_steps: int = 8,
        prefill_tokens: int = 256,
        share_prefixes: bool = True,
        batch_invariant: bool = False,
    ) -> None:
        """Args:
        config: of the model.
        num_slots: sequences that are decoded together.
        max_tokens: longest sequence.
        canary_tolerance: largest log-prob difference that proves weights, in nats.
        swap_at: token, turn or episode.
        block_steps: decode steps on the device before the host looks at its requests again.
        prefill_tokens: tokens of prompts computed at a time.
        share_prefixes: whether a slot takes over what another row of the cache holds.
        batch_invariant: a sample's bits depend on no other session and on no timing; slower.
        """
        self.counters = EngineCounters()
        self._gate = SwapGate(swap_at)
        self._config = config
        self._programs: Programs = programs_for(config)
        self._shapes = Shapes(
            num_slots,
            max_tokens,
            block_steps,
            prefill_tokens,
            shortest_memory(config, max_tokens),
            share_prefixes,
            batch_invariant,
        )
        self._slots = Slots(self._shapes, config.vocab_size)
        self._canary_tolerance = canary_tolerance
        self._reader: WeightsReader | None = None
        self._params: Params | None = None
        self._cache: KVCache | None = None
        self._stop_BV: jax.Array | None = None
        self._version: int | None = None
        self._num_proofs = 0
        self._paused = False
        self._wake = asyncio.Event()
        self._between = asyncio.Lock()  # held while the device works for `run`
        self._waiter = ThreadPoolExecutor(1, thread_name_prefix="jax-engine")
        self._num_chunks = 0  # since the last block
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(num_slots):
            self._free.put_nowait(slot)
        self._answers: list[asyncio.Future[bool] | None] = [None] * num_slots

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def num_slots(self) -> int:
        return self._shapes.num_slots

    @property
    def num_busy_slots(self) -> int:
        return self.num_slots - self._free.qsize()

    @property
    def paused(self) -> bool:
        return self._paused

    @property
    def num_compiled(self) -> int:
        """Programs of this model that were compiled in this process; after the first load it does not grow."""
        return self._programs.num_compiled()

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> JaxSession:
        if not 0 < temperature < math.inf:  # NaN is not
            raise ValueError(f"temperature={temperature}: more than 0")
        if routed_experts:
            raise ValueError("routed_experts=True: the JAX engine does not say which experts served a token")
        slot = await self._free.get()
        try:
            await self._gate.enter("episode")
        except asyncio.CancelledError:
            self._free.put_nowait(slot)
            raise
        self._slots.open(slot, seed, temperature)
        return JaxSession(self, slot)

    async def pause(self) -> None:
        self._paused = True
        self._gate.set_paused(True)
        async with self._between:  # what is under way on the device still counts
            pass

    async def resume(self) -> None:
        self._paused = False
        self._gate.set_paused(False)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if self._paused or not self._slots.generating_B.any():
                self._wake.clear()
                await self._wake.wait()
                continue
            async with self._between:
                if not self._paused:
                    await self._advance()
            await asyncio.sleep(0)  # sessions that ended talk to their environments and come back for the next block

    async def _advance(self) -> None:
        """One chunk of prompts, or one block of decode steps."""
        assert self._version is not None
        copies = self._slots.plan_copies()
        if copies is not None:
            sources, targets, saved = copies
            self._cache = self._programs.copy(self._cache, sources, targets)
            self.counters.num_reused_tokens += saved
        if self._is_chunk_due():
            await self._prefill()
        elif self._slots.num_to_decode():
            await self._decode()

    def _is_chunk_due(self) -> bool:
        waiting, decoding = self._slots.num_to_prefill(), self._slots.num_to_decode()
        if not waiting or not decoding:
            return waiting > 0
        return self._num_chunks < (_CHUNKS_IN_A_ROW if decoding <= _FEW * waiting else 1)

    async def _prefill(self) -> None:
        started_at = time.monotonic()
        plan = self._slots.plan_chunk()
        computing_from = time.monotonic()
        self._cache = self._programs.prefill(self._params, self._cache, plan.work)
        await self._on_device(jax.block_until_ready, self._cache[-1])
        self.counters.compute_s += time.monotonic() - computing_from
        num_again = self._slots.chunk_done(plan)
        self._num_chunks += 1
        share = num_again / int(plan.work.lengths_P.sum())
        self.counters.rebuild_s += share * (time.monotonic() - started_at)

    async def _decode(self) -> None:
        slots, plan = self._slots, self._slots.plan_block()
        if self._stop_BV is None or slots.stop_changed:
            self._stop_BV, slots.stop_changed = on_device(slots.stop_BV), False
        version, length = self._version, self._shapes.length_for(plan.work)
        patience = np.int32(_PATIENCE * self.num_slots)
        computing_from = time.monotonic()
        sampled, self._cache = self._programs.decode(
            self._params, self._cache, plan.work, self._stop_BV, patience, length=length
        )
        done: Sampled = await self._on_device(jax.device_get, sampled)
        self.counters.compute_s += time.monotonic() - computing_from
        assert version is not None
        ended, num_sampled = slots.block_done(plan, done.tokens_NR, done.logprobs_NR, done.fed_R, version)
        for slot, stopped in ended:
            self._answer(slot, stopped=stopped)
        self._num_chunks = 0
        self.counters.num_steps += int(done.num_steps)
        self.counters.num_fed_tokens += int(done.fed_R.sum())
        self.counters.num_sampled_tokens += num_sampled

    async def _on_device(self, wait: Callable[[Any], Any], result: Any) -> Any:
        """What `wait` makes of a result, when the device has it."""
        return await asyncio.get_running_loop().run_in_executor(self._waiter, wait, result)

    def _answer(self, slot: int, *, stopped: bool) -> None:
        answer = self._answers[slot]
        assert answer is not None
        if not answer.done():  # the caller may have been cancelled
            answer.set_result(stopped)

    async def generate(
        self, session: JaxSession, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int
    ) -> Completion:
        """`JaxSession.generate`."""
        await self._gate.enter("turn")
        try:
            if session.slot is None:  # and may be another session's by now
                raise RuntimeError("the session was closed while it waited for a swap")
            return await self._generate(session.slot, new_tokens, stop_tokens, max_tokens)
        finally:
            self._gate.leave("turn")

    async def _generate(
        self, slot: int, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int
    ) -> Completion:
        slots, known = self._slots, int(self._slots.known_B[slot])
        start = known + len(new_tokens)
        if self._version is None:
            raise RuntimeError("no weights are proven yet: load a version before sampling")
        if start == 0 or max_tokens < 1 or start + max_tokens > self._shapes.max_tokens:
            raise ValueError(
                f"{known} tokens and {len(new_tokens)} new ones leave no room to sample {max_tokens} of "
                f"{self._shapes.max_tokens}"
            )
        self.counters.num_prompt_tokens += start
        self.counters.num_reused_tokens += int(slots.fed_B[slot])
        slots.begin(slot, new_tokens, stop_tokens, max_tokens)
        answer = self._answers[slot] = asyncio.get_running_loop().create_future()
        self._wake.set()
        stopped = await answer
        turn = slice(start, int(slots.known_B[slot]))
        return Completion(
            tokens=slots.tokens_BS[slot, turn].copy(),
            logprobs=slots.logprobs_BS[slot, turn].copy(),
            versions=slots.versions_BS[slot, turn].copy(),
            finish="stop" if stopped else "length",
        )

    def release(self, slot: int) -> None:
        """Frees a slot for the next session."""
        self._slots.release(slot)
        answer, self._answers[slot] = self._answers[slot], None
        if answer is not None and not answer.done():
            answer.set_exception(RuntimeError("the session was closed while it was sampling"))
        self._gate.leave("episode")
        self._free.put_nowait(slot)

    async def load(self, directory: str, version: WeightVersion) -> None:
        if self._reader is None or self._reader.directory != directory:
            self._reader = WeightsReader(directory)
        await self.adopt(*await asyncio.to_thread(self._reader.read, version))

    async def adopt(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> None:
        """Proves and swaps in weights that were read.

        Args:
          manifest: of the version.
          tensors: its arrays by Hugging Face name.

        Raises:
          WeightsMismatch: as `load`.
        """
        # A proof takes tens of milliseconds, and seconds when it compiles: on a thread, so that heartbeats go on.
        started_at = time.monotonic()
        params, cache = await asyncio.to_thread(self._prove, manifest, tensors)
        self.counters.proof_s += time.monotonic() - started_at
        async with self._gate.swap(), self._between:
            started_at = time.monotonic()
            self._params, self._cache, self._version = params, cache, manifest.number
            self._slots.forget_caches()
            self.counters.swap_s += time.monotonic() - started_at
        self.counters.num_loads += 1
        self._wake.set()

    def _prove(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> tuple[Params, KVCache]:
        """See `prove`. After the first one every shape is compiled."""
        self._num_proofs += 1
        params, cache = prove(
            self._config,
            self._programs,
            self._shapes,
            manifest,
            tensors,
            tolerance=self._canary_tolerance,
            attempt=self._num_proofs,
        )
        if self._version is None:
            cache = warm_up(self._programs, self._shapes, params, cache, self._config.vocab_size)
        return params, cache


class JaxSession:
    """See `Session`."""

    def __init__(self, engine: JaxEngine, slot: int) -> None:
        self.slot: int | None = slot  # None once it is closed
        self._engine = engine

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        if self.slot is None:
            raise RuntimeError("the session is closed")
        return await self._engine.generate(self, new_tokens, stop_tokens, max_tokens)

    def close(self) -> None:
        if self.slot is not None:
            slot, self.slot = self.slot, None
            self._engine.release(slot)
