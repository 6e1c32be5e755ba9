"""An episode as steps: what the policy wrote, cut where steps end, with what stood before each.

A step is a turn of the policy, or a part of one that ends with a given text. It ends with a token, so that what a step
is worth can be given to its tokens.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np


class Step(NamedTuple):
    """One step of an episode."""

    before: str  # between the step before and this one: the prompt, an answer of the environment, or nothing
    text: str  # what the policy wrote
    end: int  # tokens of the trajectory up to its end


def steps_of(
    tokens_T: np.ndarray, loss_mask_T: np.ndarray, text: Callable[[Sequence[int]], str], step_end: str
) -> list[Step]:
    """The steps of a trajectory, in order.

    Args:
      tokens_T: int32.
      loss_mask_T: uint8; 1 where the policy sampled the token. A turn is a run of such tokens.
      text: what tokens say.
      step_end: text that ends a step within a turn; the token that completes it is the step's last. "" for none.
    """
    tokens, steps, done = tokens_T.tolist(), list[Step](), 0
    edges = np.flatnonzero(np.diff(loss_mask_T.astype(np.int8), prepend=0, append=0)).tolist()
    for start, stop in zip(edges[::2], edges[1::2], strict=True):
        before, done = text(tokens[done:start]), start
        for end in _ends(tokens, start, stop, text, step_end):
            steps.append(Step(before, text(tokens[done:end]), end))
            before, done = "", end
    return steps


def _ends(tokens: list[int], start: int, stop: int, text: Callable[[Sequence[int]], str], step_end: str) -> list[int]:
    """Where the steps of the turn [start, stop) end. Blanks and ends alone are no step of their own."""
    if not step_end or step_end not in text(tokens[start:stop]):
        return [stop]
    ends = []
    while (end := _next_end(tokens, start, stop, text, step_end)) is not None:
        ends.append(end)
        start = end
    if start < stop and (not ends or text(tokens[start:stop]).strip()):
        ends.append(stop)
    elif start < stop:
        ends[-1] = stop
    return ends


def _next_end(
    tokens: list[int], start: int, stop: int, text: Callable[[Sequence[int]], str], step_end: str
) -> int | None:
    """The first end from `start` at which a step is over, None if there is none.

    More tokens leave a step that is over as it is, so the end is first run up to in ever longer strides and then
    bisected: a turn of T tokens costs about T log T tokens made into text, and not T².
    """

    def is_over(end: int) -> bool:
        said = text(tokens[start:end]).lstrip()
        while said.startswith(step_end):
            said = said.removeprefix(step_end).lstrip()
        return step_end in said

    before, end = start, min(start + 1, stop)
    while not is_over(end):
        if end == stop:
            return None
        before, end = end, min(end + 2 * (end - before), stop)
    return bisect_left(range(before + 1, end), True, key=is_over) + before + 1
