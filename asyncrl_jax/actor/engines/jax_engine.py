"""The built-in engine: continuous batching in JAX over a fixed number of slots, with static shapes.

Every step feeds one token to every slot, at the slot's own position. While a slot still has known tokens to feed
(prompt, tool results) the sample is thrown away; at its last known token the sample becomes the next one. So sessions
start, talk to their environment and end at different times in one compiled program.

Dimensions: B slots, S positions of a slot, C rows of a prefill, V vocabulary.
"""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.actor.engines.base import Completion, EngineCounters
from asyncrl_jax.actor.engines.gate import SwapGate
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models import KVCache, Params, decode_step, from_tensors, graph_of, init_cache, merge, prefill
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import Manifest, WeightsMismatch, check_canary
from asyncrl_jax.weights.read import WeightsReader

_PREFILL_ROWS = 16  # more rows fall out of a CPU's cache: 4 × 16 rows take half the time of 64
_PROOF_TEMPERATURE = 0.7  # not 1, so that a temperature applied twice or never shows
_PROOF_TOKENS = 8  # sampled in a proof


class _Programs(NamedTuple):
    """What is compiled once for a shape and shared by all engines of a process."""

    step: Callable[..., tuple[jax.Array, jax.Array, KVCache]]
    prefill: Callable[..., tuple[jax.Array, KVCache]]
    insert: Callable[[KVCache, KVCache, int], KVCache]


@functools.cache
def _programs(config: ModelConfig) -> _Programs:
    graph = graph_of(config)

    def step(
        params: Params,
        cache: KVCache,
        tokens_B: jax.Array,
        positions_B: jax.Array,
        seeds_B2: jax.Array,
        temperature_B: jax.Array,
    ) -> tuple[jax.Array, jax.Array, KVCache]:
        """One token of every slot: (sampled_B, logprobs_B of them, cache)."""
        logits_BV, cache = decode_step(merge(graph, params), tokens_B, positions_B, cache)
        scaled_BV = logits_BV.astype(jnp.float32) / temperature_B[:, None]  # fp32: log-probs enter ratios
        gumbel_BV = jax.vmap(functools.partial(_gumbel, size=scaled_BV.shape[1]))(seeds_B2, positions_B)
        sampled_B = jnp.argmax(scaled_BV + gumbel_BV, axis=-1).astype(jnp.int32)
        logprobs_BV = jax.nn.log_softmax(scaled_BV)
        return sampled_B, jnp.take_along_axis(logprobs_BV, sampled_B[:, None], axis=1)[:, 0], cache

    def score(
        params: Params, tokens_CS: jax.Array, lengths_C: jax.Array, temperature: jax.Array
    ) -> tuple[jax.Array, KVCache]:
        """(log-probs [C, S - 1] of tokens 1 to S - 1 given those before, cache of C rows)."""
        logits_CSV, cache = prefill(merge(graph, params), tokens_CS, lengths_C)
        logprobs_CSV = jax.nn.log_softmax(logits_CSV[:, :-1].astype(jnp.float32) / temperature)
        return jnp.take_along_axis(logprobs_CSV, tokens_CS[:, 1:, None], axis=2)[..., 0], cache

    def insert(cache: KVCache, rows: KVCache, start: jax.Array) -> KVCache:
        """Puts a cache of C rows into a cache of B, from slot `start` on."""
        return jax.tree.map(lambda whole, part: jax.lax.dynamic_update_slice_in_dim(whole, part, start, 0), cache, rows)

    return _Programs(jax.jit(step, donate_argnums=1), jax.jit(score), jax.jit(insert, donate_argnums=0))


def _gumbel(seed_2: jax.Array, position: jax.Array, *, size: int) -> jax.Array:
    """Gumbel noise [V] of one slot, from its own seed and position: batch-mates cannot change it."""
    key = jax.random.wrap_key_data(seed_2, impl="threefry2x32")
    return jax.random.gumbel(jax.random.fold_in(key, position), (size,))


class JaxEngine:
    """See `Engine`. All methods belong to one event loop; only a load's proof runs on another thread.

    A load proves the new weights on a cache of its own while the old ones go on sampling: the canary's log-probs by
    prefill, and a continuation sampled by the very program that serves, whose reported log-probs a prefill must
    confirm. Then, between two steps, the cache of every slot in use is rebuilt with the new weights: none attends to
    keys of the old ones.
    """

    def __init__(
        self, config: ModelConfig, *, num_slots: int, max_tokens: int, canary_tolerance: float, swap_at: str = "token"
    ) -> None:
        self.counters = EngineCounters()
        self._gate = SwapGate(swap_at)
        self._config = config
        self._programs = _programs(config)
        self._canary_tolerance = canary_tolerance
        self._reader: WeightsReader | None = None
        self._params: Params | None = None
        self._cache: KVCache | None = None
        self._version: int | None = None
        self._paused = False
        self._wake = asyncio.Event()
        self._free: asyncio.Queue[int] = asyncio.Queue()
        for slot in range(num_slots):
            self._free.put_nowait(slot)
        shape_BS = (num_slots, max_tokens)
        self._rows_B = np.arange(num_slots)
        self._tokens_BS = np.zeros(shape_BS, np.int32)
        self._logprobs_BS = np.zeros(shape_BS, np.float32)
        self._versions_BS = np.zeros(shape_BS, np.int32)
        self._known_B = np.zeros(num_slots, np.int32)  # tokens of the sequence
        self._fed_B = np.zeros(num_slots, np.int32)  # of these, in the cache
        self._limit_B = np.zeros(num_slots, np.int32)  # generation ends when so many are known
        self._generating_B = np.zeros(num_slots, bool)
        self._stop_BV = np.zeros((num_slots, config.vocab_size), bool)
        self._seeds_B2 = np.zeros((num_slots, 2), np.uint32)
        self._temperature_B = np.ones(num_slots, np.float32)
        self._answers: list[asyncio.Future[bool] | None] = [None] * num_slots

    @property
    def version(self) -> int | None:
        return self._version

    @property
    def num_slots(self) -> int:
        return len(self._rows_B)

    @property
    def num_busy_slots(self) -> int:
        return self.num_slots - self._free.qsize()

    @property
    def paused(self) -> bool:
        return self._paused

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> JaxSession:
        if temperature <= 0:
            raise ValueError(f"temperature={temperature}: more than 0")
        if routed_experts:
            raise ValueError("routed_experts=True: the JAX engine does not say which experts served a token")
        slot = await self._free.get()
        try:
            await self._gate.enter("episode")
        except asyncio.CancelledError:
            self._free.put_nowait(slot)
            raise
        self._known_B[slot] = self._fed_B[slot] = 0
        self._seeds_B2[slot] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
        self._temperature_B[slot] = temperature
        return JaxSession(self, slot)

    async def pause(self) -> None:
        self._paused = True
        self._gate.set_paused(True)

    async def resume(self) -> None:
        self._paused = False
        self._gate.set_paused(False)
        self._wake.set()

    async def run(self) -> None:
        while True:
            if self._paused or not self._generating_B.any():
                self._wake.clear()
                await self._wake.wait()
            else:
                self._step()
                await asyncio.sleep(0)  # sessions that ended talk to their environments and come back for the next step

    def _step(self) -> None:
        """Feeds one token to every slot; slots that are not generating feed one that nobody will attend to."""
        assert self._version is not None
        sampled_B, logprobs_B, self._cache = self._programs.step(
            self._params,
            self._cache,
            self._tokens_BS[self._rows_B, self._fed_B],
            self._fed_B,
            self._seeds_B2,
            self._temperature_B,
        )
        # Waits for the step to end, so that the arguments may change in place from here on.
        sampled_B, logprobs_B = jax.device_get((sampled_B, logprobs_B))
        generating = np.flatnonzero(self._generating_B)
        self._fed_B[generating] += 1
        slots = generating[self._fed_B[generating] == self._known_B[generating]]
        ends, new = self._known_B[slots], sampled_B[slots]
        self._tokens_BS[slots, ends] = new
        self._logprobs_BS[slots, ends] = logprobs_B[slots]
        self._versions_BS[slots, ends] = self._version
        self._known_B[slots] = ends + 1
        stopped = self._stop_BV[slots, new]
        for i in np.flatnonzero(stopped | (ends + 1 >= self._limit_B[slots])):
            self._answer(int(slots[i]), stopped=bool(stopped[i]))
        self.counters.num_steps += 1
        self.counters.num_fed_tokens += len(generating)
        self.counters.num_sampled_tokens += len(slots)

    def _answer(self, slot: int, *, stopped: bool) -> None:
        self._generating_B[slot] = False
        answer = self._answers[slot]
        assert answer is not None
        if not answer.done():  # the caller may have been cancelled
            answer.set_result(stopped)

    async def generate(
        self, slot: int, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int
    ) -> Completion:
        """`JaxSession.generate` of the session in `slot`."""
        await self._gate.enter("turn")
        try:
            return await self._generate(slot, new_tokens, stop_tokens, max_tokens)
        finally:
            self._gate.leave("turn")

    async def _generate(
        self, slot: int, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int
    ) -> Completion:
        known, max_positions = int(self._known_B[slot]), self._tokens_BS.shape[1]
        start = known + len(new_tokens)
        if self._version is None:
            raise RuntimeError("no weights are proven yet: load a version before sampling")
        if start == 0 or max_tokens < 1 or start + max_tokens > max_positions:
            raise ValueError(
                f"{known} tokens and {len(new_tokens)} new ones leave no room to sample {max_tokens} of {max_positions}"
            )
        self.counters.num_prompt_tokens += start
        self.counters.num_reused_tokens += int(self._fed_B[slot])
        self._tokens_BS[slot, known:start] = new_tokens
        self._known_B[slot] = start
        self._limit_B[slot] = start + max_tokens
        self._stop_BV[slot] = False
        self._stop_BV[slot, list(stop_tokens)] = True
        self._generating_B[slot] = True
        answer = self._answers[slot] = asyncio.get_running_loop().create_future()
        self._wake.set()
        stopped = await answer
        turn = slice(start, int(self._known_B[slot]))
        return Completion(
            tokens=self._tokens_BS[slot, turn].copy(),
            logprobs=self._logprobs_BS[slot, turn].copy(),
            versions=self._versions_BS[slot, turn].copy(),
            finish="stop" if stopped else "length",
        )

    def release(self, slot: int) -> None:
        """Frees a slot for the next session."""
        self._generating_B[slot] = False
        answer, self._answers[slot] = self._answers[slot], None
        if answer is not None and not answer.done():
            answer.set_exception(RuntimeError("the session was closed while it was sampling"))
        self._known_B[slot] = self._fed_B[slot] = 0
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
        async with self._gate.swap():
            started_at = time.monotonic()
            cache = self._rebuild(params, cache)
            self._params, self._cache, self._version = params, cache, manifest.number
            self.counters.rebuild_s += time.monotonic() - started_at
        self.counters.num_loads += 1
        self._wake.set()

    def _prove(self, manifest: Manifest, tensors: Mapping[str, np.ndarray]) -> tuple[Params, KVCache]:
        """The weights on the device, proven, and a cache of the engine's shape whose contents mean nothing.

        Raises:
          WeightsMismatch: with reason "leaves", "canary" or "continuation".
        """
        try:
            params = from_tensors(self._config, tensors)
        except ValueError as error:
            raise WeightsMismatch("leaves", f"v{manifest.number}: {error}") from error
        canary_CT = manifest.canary.tokens
        num_rows, length = canary_CT.shape
        if length > self._tokens_BS.shape[1] or canary_CT.max() >= self._config.vocab_size:
            raise WeightsMismatch("canary", f"v{manifest.number}: its canary {canary_CT.shape} does not fit the engine")
        size = self._prefill_rows
        logprobs = [self._score(params, canary_CT[start : start + size], 1.0)[0] for start in range(0, num_rows, size)]
        check_canary(manifest, np.concatenate(logprobs)[:, : length - 1], self._canary_tolerance)
        return params, self._prove_sampling(params, manifest, canary_CT[:size])

    def _prove_sampling(self, params: Params, manifest: Manifest, tokens_CT: np.ndarray) -> KVCache:
        """Continues rows of the canary by the serving program, and has a prefill confirm the log-probs it reports."""
        num_rows, max_positions = len(tokens_CT), self._tokens_BS.shape[1]
        start = max(1, min(tokens_CT.shape[1], max_positions - _PROOF_TOKENS))
        end = min(start + _PROOF_TOKENS, max_positions)
        tokens_CS = np.zeros((num_rows, max_positions), np.int32)
        tokens_CS[:, :start] = tokens_CT[:, :start]
        _, rows = self._score(params, tokens_CS[:, :start], 1.0)
        cache = self._programs.insert(init_cache(self._config, self.num_slots, max_positions), rows, 0)
        reported_CS = np.zeros((num_rows, max_positions), np.float32)
        seeds_B2 = np.stack([np.full(self.num_slots, manifest.number), self._rows_B], axis=1).astype(np.uint32)
        temperature_B = np.full(self.num_slots, _PROOF_TEMPERATURE, np.float32)
        for position in range(start, end):
            fed_B = np.zeros(self.num_slots, np.int32)
            fed_B[:num_rows] = tokens_CS[:, position - 1]
            positions_B = np.full(self.num_slots, position - 1, np.int32)
            sampled_B, logprobs_B, cache = self._programs.step(
                params, cache, fed_B, positions_B, seeds_B2, temperature_B
            )
            tokens_CS[:, position] = np.asarray(sampled_B)[:num_rows]
            reported_CS[:, position] = np.asarray(logprobs_B)[:num_rows]
        confirmed, _ = self._score(params, tokens_CS[:, :end], _PROOF_TEMPERATURE)
        worst = float(np.abs(confirmed[:, start - 1 : end - 1] - reported_CS[:, start:end]).max())
        if not worst <= self._canary_tolerance:  # written so that NaN fails
            detail = f"v{manifest.number}: sampling reports log-probs that differ by {worst:.3g} nats from prefill's"
            raise WeightsMismatch("continuation", detail)
        return cache

    def _rebuild(self, params: Params, cache: KVCache) -> KVCache:
        """Fills `cache` with what slots in use have been fed, as `params` see it."""
        size = self._prefill_rows
        for first in range(0, self.num_slots, size):
            start = min(first, self.num_slots - size)
            chunk = slice(start, start + size)
            if self._fed_B[chunk].any():
                # Copies: JAX may read its arguments after the call returns, and sessions write to these.
                tokens_CS, fed_C = self._tokens_BS[chunk].copy(), self._fed_B[chunk].copy()
                _, rows = self._programs.prefill(params, tokens_CS, fed_C, np.float32(1.0))
                cache = self._programs.insert(cache, rows, start)
        return cache

    @property
    def _prefill_rows(self) -> int:
        return min(_PREFILL_ROWS, self.num_slots)

    def _score(self, params: Params, tokens_CT: np.ndarray, temperature: float) -> tuple[np.ndarray, KVCache]:
        """Log-probs float32 [C, S - 1] of up to `_prefill_rows` rows, and their cache; padding has no meaning."""
        num_rows, length = tokens_CT.shape
        padded = np.zeros((self._prefill_rows, self._tokens_BS.shape[1]), np.int32)
        padded[:num_rows, :length] = tokens_CT
        lengths = np.zeros(self._prefill_rows, np.int32)
        lengths[:num_rows] = length
        logprobs, cache = self._programs.prefill(params, padded, lengths, np.float32(temperature))
        return np.asarray(logprobs)[:num_rows], cache


class JaxSession:
    """See `Session`."""

    def __init__(self, engine: JaxEngine, slot: int) -> None:
        self._engine = engine
        self._slot: int | None = slot

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        if self._slot is None:
            raise RuntimeError("the session is closed")
        return await self._engine.generate(self._slot, new_tokens, stop_tokens, max_tokens)

    def close(self) -> None:
        if self._slot is not None:
            slot, self._slot = self._slot, None
            self._engine.release(slot)
