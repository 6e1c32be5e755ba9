"""More sessions than slots: a session has a slot while it samples, and lends it while its environment thinks."""

from __future__ import annotations

import asyncio
import collections
import math
from collections.abc import Sequence

from asyncrl_jax.actor.engines.base import Completion, Engine, EngineCounters, Session
from asyncrl_jax.types import WeightVersion


class SlotSharing:
    """See `Engine`; in front of an engine whose sessions hold a slot from `open` to `close`.

    A session that lost its slot asks for its whole sequence anew at its next turn. What the engine still has of it (a
    prefix that it keeps) need not be computed again; the rest is.

    Invariants:
      * A slot stands idle only while no session waits for one.
      * Sessions wait first come, first served.
      * What a session samples is what it would have sampled in a slot of its own.
    """

    def __init__(self, engine: Engine) -> None:
        """Args: engine: not to be used by anyone else; it swaps between tokens or turns, not episodes."""
        self.num_lent = 0  # times a session gave up its slot to another
        self._engine = engine
        self._slots = asyncio.Semaphore(engine.num_slots)
        self._num_waiting = 0
        self._idle: collections.OrderedDict[_SharedSession, None] = collections.OrderedDict()  # longest idle first

    @property
    def version(self) -> int | None:
        return self._engine.version

    @property
    def counters(self) -> EngineCounters:
        return self._engine.counters

    @property
    def num_slots(self) -> int:
        return self._engine.num_slots

    @property
    def num_busy_slots(self) -> int:
        return self._engine.num_busy_slots

    async def open(self, seed: int, temperature: float, *, routed_experts: bool = False) -> Session:
        if not 0 < temperature < math.inf:  # NaN is not
            raise ValueError(f"temperature={temperature}: more than 0")
        if routed_experts:
            raise ValueError("routed_experts=True: not with more episodes than slots, whose sequences are fed anew")
        return _SharedSession(self, seed, temperature)

    async def load(self, directory: str, version: WeightVersion) -> None:
        await self._engine.load(directory, version)

    async def pause(self) -> None:
        await self._engine.pause()

    async def resume(self) -> None:
        await self._engine.resume()

    async def run(self) -> None:
        await self._engine.run()

    async def take(self, seed: int, temperature: float) -> Session:
        """A session of the engine, in a slot that is free or was lent by the session that was idle for longest."""
        if self._slots.locked() and self._idle:
            self._lend(next(iter(self._idle)))
        self._num_waiting += 1
        try:
            await self._slots.acquire()
        finally:
            self._num_waiting -= 1
        try:
            return await self._engine.open(seed, temperature)
        except BaseException:
            self._slots.release()
            raise

    def use(self, session: _SharedSession) -> None:
        """The session samples again in the slot that it still has."""
        self._idle.pop(session, None)

    def rest(self, session: _SharedSession) -> None:
        """The session samples no more for now."""
        self._idle[session] = None
        if self._num_waiting:
            self._lend(session)

    def leave(self, session: _SharedSession) -> None:
        """The session's slot is free again."""
        self._idle.pop(session, None)
        self._slots.release()

    def _lend(self, session: _SharedSession) -> None:
        self.num_lent += 1
        session.give_up()


class _SharedSession:
    """See `Session`."""

    def __init__(self, engine: SlotSharing, seed: int, temperature: float) -> None:
        self._engine = engine
        self._seed = seed
        self._temperature = temperature
        self._inner: Session | None = None  # while it has a slot
        self._tokens: list[int] = []
        self._closed = False

    async def generate(self, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> Completion:
        self._require_open()
        feed = list(new_tokens)
        if self._inner is None:
            inner = await self._engine.take(self._seed, self._temperature)
            self._inner = inner
            if self._closed:
                self.give_up()
                raise RuntimeError("the session was closed while it waited for a slot")
            feed = [*self._tokens, *feed]
        else:
            self._engine.use(self)
        completion = await self._inner.generate(feed, stop_tokens, max_tokens)
        self._tokens += [*new_tokens, *completion.tokens.tolist()]
        if self._inner is not None:  # else closed meanwhile
            self._engine.rest(self)
        return completion

    def _require_open(self) -> None:
        if self._closed:
            raise RuntimeError("the session is closed")

    def give_up(self) -> None:
        """Frees the slot; the session goes on in another."""
        if self._inner is not None:
            inner, self._inner = self._inner, None
            inner.close()
            self._engine.leave(self)

    def close(self) -> None:
        self._closed = True
        self.give_up()
