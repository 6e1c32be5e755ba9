"""Whether held-out tasks are in the training set, exactly or nearly: a score on tasks that were trained on means
nothing."""

from __future__ import annotations

import asyncio
import collections
import dataclasses
from collections.abc import Sequence

from asyncrl_jax.actor.envs.base import EnvironmentMaker
from asyncrl_jax.types import Task

NGRAM = 4  # tokens
NEAR = 0.8  # Jaccard similarity from which two prompts are near

Prompt = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class Overlap:
    """What two sets of prompts share."""

    num_train: int  # distinct prompts
    num_heldout: int  # distinct prompts
    exact: tuple[Prompt, ...]  # held-out prompts that are in the training set
    near: tuple[tuple[Prompt, Prompt, float], ...]  # held-out prompt, the training prompt nearest to it, similarity
    lengths: tuple[int, int] = (0, 0)  # of the shortest and the longest prompt of both, in tokens

    @property
    def near_share(self) -> float:
        return len(self.near) / self.num_heldout if self.num_heldout else 0.0


def find_overlap(train: Sequence[Prompt], heldout: Sequence[Prompt], *, n: int = NGRAM, near: float = NEAR) -> Overlap:
    """Compares two sets of prompts; a pure function.

    Two prompts are near when the Jaccard similarity of their sets of token n-grams is at least `near` and they are not
    equal. A prompt shorter than n is one n-gram. Cost: the number of pairs that share an n-gram.

    Args:
      train: prompts, token ids.
      heldout: prompts, token ids.
      n: length of an n-gram, in tokens.
      near: similarity in (0, 1].
    """
    train_set, heldout_set = set(train), set(heldout)
    grams = {prompt: _ngrams(prompt, n) for prompt in train_set | heldout_set}
    holders: dict[Prompt, list[Prompt]] = collections.defaultdict(list)
    for prompt in sorted(train_set):
        for gram in grams[prompt]:
            holders[gram].append(prompt)
    found = []
    for prompt in sorted(heldout_set - train_set):
        shared = collections.Counter(other for gram in sorted(grams[prompt]) for other in holders.get(gram, ()))
        similar = {o: count / (len(grams[prompt]) + len(grams[o]) - count) for o, count in shared.items()}
        nearest = max(similar, key=lambda other: (similar[other], other), default=None)
        if nearest is not None and similar[nearest] >= near:
            found.append((prompt, nearest, similar[nearest]))
    sizes = [len(prompt) for prompt in grams] or [0]
    exact = tuple(sorted(train_set & heldout_set))
    return Overlap(len(train_set), len(heldout_set), exact, tuple(found), (min(sizes), max(sizes)))


def check_splits(environment: EnvironmentMaker, levels: Sequence[int], num_tasks_per_level: int) -> Overlap:
    """The overlap of the first tasks of every level, of train and held-out split, of all levels together."""

    async def prompt(split: str, level: int, index: int) -> Prompt:
        instance = environment()
        try:
            return tuple(await instance.reset(Task(environment.name, split, level, index)))
        finally:
            await instance.close()

    async def prompts(split: str) -> list[Prompt]:
        return [await prompt(split, level, i) for level in levels for i in range(num_tasks_per_level)]

    async def both() -> tuple[list[Prompt], list[Prompt]]:
        return await prompts("train"), await prompts("heldout")

    return find_overlap(*asyncio.run(both()))


def _ngrams(prompt: Prompt, n: int) -> set[Prompt]:
    if len(prompt) <= n:
        return {prompt}
    return {prompt[i : i + n] for i in range(len(prompt) - n + 1)}
