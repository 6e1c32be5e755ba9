"""What the JAX engine knows of its slots, on the host: sequences, what the cache holds of them, and what to do next.

A generating slot has tokens that are known and not fed yet; feeding the last of them samples the next one. A long
stretch of them is prefilled in chunks, a short one goes through decode steps beside the others' sampling. Before a
prefill a slot looks for another row of the cache that holds the same prefix, also one whose session is gone, and copies
it; where a slot of the same prefix is about to be prefilled, it waits for that one. So the members of a group compute
their prompt once.

Dimensions: B slots, S positions, N steps of a block, R rows of one, P rows of a chunk, T tokens of one of them, V
vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Generic, NamedTuple, TypeVar

import numpy as np

from asyncrl_jax.actor.engines.jax_programs import COPIED_ROWS, Block, Chunk, Shapes

_FED_BY_DECODE = 8  # known tokens that take less in decode steps than in a chunk of their own
_WORTH_A_COPY = (4, 16)  # tokens: at least, and at most; between them a share of the row, which is copied as a whole
_SHARE_OF_A_ROW = 16


Work = TypeVar("Work", Block, Chunk)


class Ended(NamedTuple):
    """A turn that is over."""

    slot: int
    stopped: bool  # by a stop token


class Plan(NamedTuple, Generic[Work]):
    """A block or chunk, and the turns it belongs to: a slot may have changed hands when it is done."""

    work: Work
    slots: np.ndarray
    turns: np.ndarray
    columns: np.ndarray  # where each of the slots stands in the work


class Slots:
    """See the module. A plan is applied before the next one is made."""

    def __init__(self, shapes: Shapes, vocab_size: int) -> None:
        num_slots, shape_BS = shapes.num_slots, (shapes.num_slots, shapes.max_tokens)
        self._shapes = shapes
        self._memory = shapes.memory or shapes.max_tokens
        fewest, most = _WORTH_A_COPY
        self._worth_a_copy = min(most, max(fewest, shapes.max_tokens // _SHARE_OF_A_ROW))
        self.tokens_BS = np.zeros(shape_BS, np.int32)
        self.logprobs_BS = np.zeros(shape_BS, np.float32)
        self.versions_BS = np.zeros(shape_BS, np.int32)
        self.known_B = np.zeros(num_slots, np.int32)  # tokens of the sequence
        self.fed_B = np.zeros(num_slots, np.int32)  # of these, in the cache
        self.generating_B = np.zeros(num_slots, bool)
        self.stop_BV = np.zeros((num_slots, vocab_size), bool)
        self.stop_changed = True
        self._limit_B = np.zeros(num_slots, np.int32)  # generation ends when so many are known
        self._seeds_B2 = np.zeros((num_slots, 2), np.uint32)
        self._temperature_B = np.ones(num_slots, np.float32)
        self._turn_B = np.zeros(num_slots, np.int64)  # counts turns and sessions
        self._working_B = np.zeros(num_slots, bool)  # in the plan under way
        self._stop_tokens: list[frozenset[int]] = [frozenset()] * num_slots
        self._kept_BS = np.full(shape_BS, -1, np.int32)  # tokens that a row of the cache holds; its session may be gone
        self._kept_B = np.zeros(num_slots, np.int32)
        self._sought_B = np.zeros(num_slots, bool)  # whether this turn has looked for its prefix
        self._leader_B = np.full(num_slots, -1)  # slot whose prefill this one waits for
        self._led_B = np.zeros(num_slots, np.int32)  # tokens it waits for
        self._led_turn_B = np.zeros(num_slots, np.int64)  # and the leader's turn
        self.stale_B = np.zeros(num_slots, bool)  # whose cache a swap has emptied, and that is not computed anew yet

    # ------------------------------------------------------------------------------------------------------ sessions

    def open(self, slot: int, seed: int, temperature: float) -> None:
        """A session takes the slot."""
        self.known_B[slot] = self.fed_B[slot] = 0
        self._seeds_B2[slot] = (seed >> 32) & 0xFFFFFFFF, seed & 0xFFFFFFFF
        self._temperature_B[slot] = temperature

    def begin(self, slot: int, new_tokens: Sequence[int], stop_tokens: frozenset[int], max_tokens: int) -> None:
        """A turn begins, with tokens that fit."""
        known = int(self.known_B[slot])
        start = known + len(new_tokens)
        self.tokens_BS[slot, known:start] = new_tokens
        self.known_B[slot] = start
        self._limit_B[slot] = start + max_tokens
        self.generating_B[slot] = True
        self._turn_B[slot] += 1
        self._sought_B[slot] = False
        self._leader_B[slot] = -1
        if stop_tokens != self._stop_tokens[slot]:
            self._stop_tokens[slot] = stop_tokens
            self.stop_BV[slot] = False
            self.stop_BV[slot, list(stop_tokens)] = True
            self.stop_changed = True

    def release(self, slot: int) -> None:
        """The session is gone. What the cache holds of it stays, for sequences that start alike."""
        self.generating_B[slot] = False
        self._turn_B[slot] += 1
        self.known_B[slot] = self.fed_B[slot] = 0
        self.stale_B[slot] = False
        if self._working_B[slot]:
            self._kept_B[slot] = 0  # the device may write over any of it

    def forget_caches(self) -> None:
        """What the cache holds was made by other weights."""
        self.stale_B = self.fed_B > 0
        self.fed_B[:] = 0
        self._kept_B[:] = 0
        self._sought_B[:] = False
        self._leader_B[:] = -1

    # -------------------------------------------------------------------------------------------------------- prefixes

    @property
    def _prefilling_B(self) -> np.ndarray:
        if self._shapes.batch_invariant:
            return np.zeros_like(self.generating_B)
        return self.generating_B & (self.known_B - 1 - self.fed_B > _FED_BY_DECODE)

    def plan_copies(self) -> tuple[np.ndarray, np.ndarray, int] | None:
        """(rows to copy from, rows to copy to (B for none), tokens that need not be computed), or None.

        Counts as done from here on.
        """
        if not self._shapes.share_prefixes:
            return None
        copies: dict[int, int] = {}  # by target
        saved = 0
        for slot in map(int, np.flatnonzero(self._prefilling_B)):
            if self._is_led(slot) or (self._sought_B[slot] and self._leader_B[slot] < 0):
                continue
            saved += self._seek(slot, copies)
            if len(copies) == COPIED_ROWS:
                break
        if not copies and not saved:
            return None
        sources, targets = np.zeros(COPIED_ROWS, np.int32), np.full(COPIED_ROWS, len(self.known_B), np.int32)
        targets[: len(copies)], sources[: len(copies)] = list(copies), list(copies.values())
        return sources, targets, saved

    def _is_led(self, slot: int) -> bool:
        """Whether the slot goes on waiting for another's prefill."""
        leader = self._leader_B[slot]
        if leader < 0:
            return False
        on_its_way = self.generating_B[leader] and self._turn_B[leader] == self._led_turn_B[slot]
        return bool(on_its_way and self.fed_B[leader] < self._led_B[slot])

    def _seek(self, slot: int, copies: dict[int, int]) -> int:
        """Takes over the longest prefix that a row holds, or finds a slot to wait for; returns the tokens gained."""
        self._sought_B[slot], self._leader_B[slot] = True, -1
        wanted = self.tokens_BS[slot, : self.known_B[slot] - 1]
        held_B = np.minimum(_agreeing(self._kept_BS, wanted), self._kept_B)
        # A sliding layer has only the newest positions, and wants all those of its window before the next one.
        held_B[(self._kept_B > self._memory) & (held_B + 1 < self._kept_B)] = 0
        held_B[list(copies)] = 0  # not there yet
        before = int(self.fed_B[slot])
        best = int(np.argmax(held_B))
        length = max(int(held_B[slot]), before)
        if held_B[best] >= length + self._worth_a_copy:
            copies[slot] = best
            length = int(held_B[best])
        if length > before:
            self._hold(slot, wanted[:length])
        self._find_leader(slot, wanted, length)
        return length - before

    def _find_leader(self, slot: int, wanted: np.ndarray, length: int) -> None:
        leads_B = self._prefilling_B & self._sought_B & (self._leader_B < 0)
        leads_B[slot] = False
        if not leads_B.any():
            return
        coming_B = np.minimum(_agreeing(self.tokens_BS, wanted), self.known_B - 1) * leads_B
        leader = int(np.argmax(coming_B))
        if coming_B[leader] >= length + self._worth_a_copy:
            self._leader_B[slot], self._led_B[slot] = leader, coming_B[leader]
            self._led_turn_B[slot] = self._turn_B[leader]

    def _hold(self, slot: int, tokens: np.ndarray) -> None:
        """The slot's row holds these and no others."""
        self.fed_B[slot] = self._kept_B[slot] = len(tokens)
        self._kept_BS[slot, : len(tokens)] = tokens

    # ----------------------------------------------------------------------------------------------------------- plans

    def num_to_prefill(self) -> int:
        """Slots that a chunk would advance."""
        return int(np.count_nonzero(self._prefilling_B & (self._leader_B < 0)))

    def num_to_decode(self) -> int:
        """Slots that a block would advance."""
        return int(np.count_nonzero(self.generating_B & ~self._prefilling_B))

    def plan_chunk(self) -> Plan[Chunk]:
        """The chunk, of the shape that advances most."""
        slots = np.flatnonzero(self._prefilling_B & (self._leader_B < 0))
        missing = self.known_B[slots] - 1 - self.fed_B[slots]
        slots = slots[np.argsort(-missing, kind="stable")]
        missing = self.known_B[slots] - 1 - self.fed_B[slots]
        useful = [int(np.minimum(missing[:num_rows], width).sum()) for num_rows, width in self._shapes.chunks]
        num_rows, width = self._shapes.chunks[int(np.argmax(useful))]
        slots, lengths = slots[:num_rows], np.minimum(missing[:num_rows], width)
        chunk = Chunk(
            np.zeros((num_rows, width), np.int32),
            np.full(num_rows, len(self.known_B), np.int32),
            np.zeros(num_rows, np.int32),
            np.zeros(num_rows, np.int32),
        )
        for row, (slot, length) in enumerate(zip(slots, lengths, strict=True)):
            start = self.fed_B[slot]
            chunk.tokens_PT[row, :length] = self.tokens_BS[slot, start : start + length]
        used = slice(len(slots))
        chunk.rows_P[used], chunk.starts_P[used], chunk.lengths_P[used] = slots, self.fed_B[slots], lengths
        return self._planned(chunk, slots, np.arange(len(slots)))

    def plan_block(self) -> Plan[Block]:
        """As many steps as there are to do, of as few rows as there is a program for."""
        num_steps, num_slots = self._shapes.num_steps, len(self.fed_B)
        slots = np.flatnonzero(self.generating_B & ~self._prefilling_B)
        num_rows = next(count for count in self._shapes.row_counts if count >= len(slots))
        rows_R = np.arange(num_slots)
        columns = slots
        if num_rows < num_slots:
            rows_R = np.full(num_rows, num_slots)
            rows_R[: len(slots)] = slots
            columns = np.arange(len(slots))
        fed = self.fed_B[slots]
        steps_R = np.zeros(num_rows, np.int32)
        steps_R[columns] = np.minimum(num_steps, self._limit_B[slots] - 1 - fed)
        given_NR = np.full((num_steps, num_rows), -1, np.int32)
        waiting = self.known_B[slots] - 1 > fed
        for slot, column in zip(slots[waiting], columns[waiting], strict=True):
            start = self.fed_B[slot] + 1
            tokens = self.tokens_BS[slot, start : min(start + num_steps, self.known_B[slot])]
            given_NR[: len(tokens), column] = tokens
        from_R = np.minimum(rows_R, num_slots - 1)
        positions_R = self.fed_B[from_R]
        block = Block(
            rows_R.astype(np.int32),
            self.tokens_BS[from_R, np.minimum(positions_R, self.tokens_BS.shape[1] - 1)],
            positions_R,
            steps_R,
            given_NR,
            self._seeds_B2[from_R],
            self._temperature_B[from_R],
        )
        return self._planned(block, slots, columns)

    def _planned(self, work: Work, slots: np.ndarray, columns: np.ndarray) -> Plan[Work]:
        self._working_B[slots] = True
        return Plan(work, slots, self._turn_B[slots], columns)

    # --------------------------------------------------------------------------------------------------------- results

    def chunk_done(self, plan: Plan[Chunk]) -> int:
        """The chunk's tokens are in the cache; returns how many of them a swap had taken out of it."""
        self._working_B[:] = False
        recomputed = 0
        for row, slot in enumerate(plan.slots):
            if self._turn_B[slot] == plan.turns[row]:
                self._feed(int(slot), int(plan.work.lengths_P[row]))
                recomputed += int(plan.work.lengths_P[row]) * bool(self.stale_B[slot])
        self.stale_B &= self._prefilling_B
        return recomputed

    def _feed(self, slot: int, count: int) -> None:
        start = self.fed_B[slot]
        self.fed_B[slot] = self._kept_B[slot] = start + count
        self._kept_BS[slot, start : start + count] = self.tokens_BS[slot, start : start + count]

    def block_done(
        self, plan: Plan[Block], tokens_NR: np.ndarray, logprobs_NR: np.ndarray, fed_R: np.ndarray, version: int
    ) -> tuple[list[Ended], int]:
        """Takes what the block sampled; returns (turns that are over, number of tokens sampled)."""
        self._working_B[:] = False
        current = self._turn_B[plan.slots] == plan.turns
        slots, columns = plan.slots[current], plan.columns[current]
        starts, counts = self.fed_B[slots], fed_R[columns]
        given = np.minimum(self.known_B[slots] - 1 - starts, counts)
        steps_N1 = np.arange(len(tokens_NR))[:, None]
        # [N, slots]: steps whose token was sampled, and where it goes
        new = (steps_N1 >= given[None]) & (steps_N1 < counts[None])
        step, index = np.nonzero(new)
        rows, positions = slots[index], starts[index] + 1 + step
        self.tokens_BS[rows, positions] = tokens_NR[step, columns[index]]
        self.logprobs_BS[rows, positions] = logprobs_NR[step, columns[index]]
        self.versions_BS[rows, positions] = version
        self.known_B[slots] += counts - given
        for slot, count in zip(slots, counts, strict=True):
            self._feed(int(slot), int(count))
        self.stale_B &= self._prefilling_B
        sampled = counts > given
        last = self.tokens_BS[slots, self.known_B[slots] - 1]
        stopped = sampled & self.stop_BV[slots, last]
        over = stopped | (self.known_B[slots] >= self._limit_B[slots])
        self.generating_B[slots[over]] = False
        ended = [Ended(int(slot), bool(stop)) for slot, stop in zip(slots[over], stopped[over], strict=True)]
        return ended, int((counts - given).sum())


def _agreeing(rows_BS: np.ndarray, tokens: np.ndarray) -> np.ndarray:
    """[B]: how many tokens each row starts with that are the first of `tokens`."""
    same = rows_BS[:, : len(tokens)] == tokens[None]
    return np.where(same.all(axis=1), len(tokens), same.argmin(axis=1))
