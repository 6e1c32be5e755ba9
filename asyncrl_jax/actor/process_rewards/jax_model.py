"""A process reward model on the actor host: a decoder of this package that says "good" or "bad" behind each step.

The score of a step is the probability of the good token against the bad one, a softmax over these two logits, at the
last token of the step, or of the tag that the model expects behind it (Wang et al. 2024, "Math-Shepherd", arXiv
2312.08935, whose published models read "+" and "-" at "ки"). One forward pass scores all steps of an episode: attention
is causal, so nothing that comes later is seen.

A thread computes, not a process: XLA leaves the interpreter to the event loop while it does, and an accelerator belongs
to one process. What is asked for meanwhile becomes the next batch. Weights are loaded, and every shape is compiled,
when the first episode is scored; from then on nothing is compiled.

Dimensions: B episodes of a batch, T tokens of one, padding included.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.actor.process_rewards.annotated import Annotated, Annotator, read_model
from asyncrl_jax.actor.process_rewards.steps import Step
from asyncrl_jax.actor.rewards import InvalidReward
from asyncrl_jax.config import ModelConfig
from asyncrl_jax.config_environment import ProcessRewardConfig
from asyncrl_jax.models import Params, graph_of, merge
from asyncrl_jax.models.hf import load_params

log = logging.getLogger(__name__)

_NARROWEST = 64  # tokens of the shortest shape


class JaxProcessModel:
    """See `ProcessRewardModel`.

    Invariants:
      * An episode's scores depend on it alone, up to rounding.
      * After the first batch nothing is compiled.
    """

    def __init__(self, config: ProcessRewardConfig, *, one_at_a_time: bool = False) -> None:
        """Args: one_at_a_time: no batches, so that also the rounding depends on nothing else.

        Raises:
          ValueError: for a directory that holds no model that is supported, or tokens that it doesn't have.
        """
        self.num_compiled = 0
        model = read_model(config)
        self._config = config
        self._model = dataclasses.replace(model, max_positions=min(model.max_positions, config.max_tokens))
        self._one_at_a_time = one_at_a_time
        self._annotator = Annotator(config, model.vocab_size)
        self._thread = concurrent.futures.ThreadPoolExecutor(1, "process reward model")
        self._waiting: list[tuple[Sequence[Step], asyncio.Future[list[float]]]] = []
        self._serving: asyncio.Task[None] | None = None
        self._run: Callable[[list[Annotated]], list[np.ndarray]] | None = None

    async def score(self, steps: Sequence[Step]) -> Sequence[Any]:
        """As the model says. An episode longer than the model's context, or `max_tokens`, is refused."""
        future: asyncio.Future[list[float]] = asyncio.get_running_loop().create_future()
        self._waiting.append((steps, future))
        if self._serving is None or self._serving.done():
            self._serving = asyncio.create_task(self._serve(), name="process reward model")
        return await future

    async def close(self) -> None:
        if self._serving is not None:
            self._serving.cancel()
            await asyncio.gather(self._serving, return_exceptions=True)
        await asyncio.to_thread(self._thread.shutdown)  # after the batch under way: XLA can't be interrupted

    async def _serve(self) -> None:
        """Scores what waits, all of it at a time, until nothing does."""
        loop = asyncio.get_running_loop()
        while self._waiting:
            batch, self._waiting = [one for one in self._waiting if not one[1].done()], []
            episodes = [steps for steps, _ in batch]
            try:
                results = await loop.run_in_executor(self._thread, self._score_all, episodes)
            except Exception as error:  # noqa: BLE001, whoever waits is told
                results = [error] * len(batch)
            for (_, future), result in zip(batch, results, strict=True):
                if future.done():  # given up
                    continue
                if isinstance(result, Exception):
                    future.set_exception(result)
                else:
                    future.set_result(result)

    def _score_all(self, episodes: Sequence[Sequence[Step]]) -> list[list[float] | Exception]:
        """In the thread: the scores of each episode, or why it has none."""
        if self._run is None:
            self._run = self._load()
        results: list[list[float] | Exception] = [InvalidReward("too_long", "") for _ in episodes]
        fitting: list[tuple[int, Annotated]] = []
        for at, steps in enumerate(episodes):
            try:
                annotated = self._annotator.annotate(steps)
            except Exception as error:  # noqa: BLE001, of this episode alone
                results[at] = error
                continue
            if len(annotated.tokens) <= self._model.max_positions:
                fitting.append((at, annotated))
            else:
                size, most = len(annotated.tokens), self._model.max_positions
                results[at] = InvalidReward("too_long", f"{size} tokens, and the process reward model reads {most}")
        probabilities = self._run([annotated for _, annotated in fitting])
        for (at, annotated), of_token_T in zip(fitting, probabilities, strict=True):
            results[at] = of_token_T[annotated.positions].tolist()
        return results

    def _load(self) -> Callable[[list[Annotated]], list[np.ndarray]]:
        started_at = time.monotonic()
        params = load_params(self._config.model, self._model)
        rows = 1 if self._one_at_a_time else None
        shapes = shapes_of(self._model.max_positions, self._config.batch_tokens, rows)
        programs = compiled(self._model, params, self._annotator.pair, shapes)
        self.num_compiled = len(programs)
        log.info("process reward model: %d shapes in %.1f s", len(programs), time.monotonic() - started_at)
        return functools.partial(run_batches, params, programs)


def shapes_of(max_tokens: int, batch_tokens: int, rows: int | None = None) -> list[tuple[int, int]]:
    """[B, T] of all batches: T doubles up to `max_tokens`, B is 1 or as many as `batch_tokens` hold (or `rows`)."""
    widths = [_NARROWEST]
    while widths[-1] < max_tokens:
        widths.append(2 * widths[-1])
    widths[-1] = max_tokens
    return sorted({(n, t) for t in widths for n in ({rows} if rows else {1, max(1, batch_tokens // t)})})


Programs = dict[tuple[int, int], Callable[..., jax.Array]]  # by [B, T]


def compiled(model: ModelConfig, params: Params, pair: tuple[int, int], shapes: Sequence[tuple[int, int]]) -> Programs:
    """A program for each shape: (params, tokens_BT, lengths_B) → probability [B, T] of a good step that ends there.

    Args:
      pair: the good token and the bad one.
    """
    graph = graph_of(model)

    def probabilities(params: Params, tokens_BT: jax.Array, lengths_B: jax.Array) -> jax.Array:
        decoder = merge(graph, params)
        positions_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1], dtype=jnp.int32)[None], tokens_BT.shape)
        segments_BT = (positions_BT < lengths_B[:, None]).astype(jnp.int32)
        x_BTD = decoder.trunk(tokens_BT, positions_BT, segments_BT).x_BTD
        head_D2 = decoder.head_DV[:, jnp.array(pair)].astype(x_BTD.dtype)
        logits_BT2 = jnp.matmul(x_BTD, head_D2, preferred_element_type=jnp.float32)
        return jax.nn.softmax(logits_BT2, axis=-1)[..., 0]

    program = jax.jit(probabilities)
    programs: Programs = {}
    for shape in shapes:
        tokens_BT = jax.ShapeDtypeStruct(shape, jnp.int32)
        lengths_B = jax.ShapeDtypeStruct(shape[:1], jnp.int32)
        programs[shape] = program.lower(params, tokens_BT, lengths_B).compile()
    return programs


def run_batches(params: Params, programs: Programs, episodes: list[Annotated]) -> list[np.ndarray]:
    """For each episode the probability of a good step that ends at its token, float32 [its tokens]."""
    results: dict[int, np.ndarray] = {}
    widths = sorted({width for _, width in programs})
    by_width: dict[int, list[int]] = {}
    for at, episode in enumerate(episodes):
        width = next(width for width in widths if len(episode.tokens) <= width)
        by_width.setdefault(width, []).append(at)
    for width, members in by_width.items():
        most = max(rows for rows, of_width in programs if of_width == width)
        for first in range(0, len(members), most):
            batch = members[first : first + most]
            rows = min(rows for rows, of_width in programs if of_width == width and rows >= len(batch))
            tokens_BT, lengths_B = np.zeros((rows, width), np.int32), np.zeros(rows, np.int32)
            for row, at in enumerate(batch):
                lengths_B[row] = len(episodes[at].tokens)
                tokens_BT[row, : lengths_B[row]] = episodes[at].tokens
            found_BT = np.asarray(programs[rows, width](params, tokens_BT, lengths_B))
            for row, at in enumerate(batch):
                results[at] = found_BT[row, : lengths_B[row]]
    return [results[at] for at in range(len(episodes))]
