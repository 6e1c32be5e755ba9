"""The update that every peer makes, and how the parent tells it when. NumPy alone: peers import it too.

A peer is a process that loads a directory (`problem.npz`, `model/` in Hugging Face's layout), makes one update of each
batch from the initial weights and reports its loss and gradient norm; then, for each line with a batch's name on its
standard input, it makes another and answers with its time.

Dimensions: B sequences, T tokens of the longest.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np

from benchmarks._core import timed

NUM_LAYERS, HIDDEN_DIM, NUM_EXPERTS, EXPERT_DIM, CHOICES, VOCAB_SIZE = 4, 128, 8, 256, 2, 512
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM, NORM_EPS = 4, 2, 32, 1e-6
ROPE_THETA = 1_000_000.0  # google-tunix 0.1.7 knows no other, whatever its config says
NUM_SEQUENCES, LENGTH, MEAN_LENGTH, SIGMA = 16, 256, 110, 0.6
CLIP_RANGE, LEARNING_RATE, MAX_GRAD_NORM = 0.2, 1e-5, 1.0
BATCHES = ("even", "uneven")


class Batch(NamedTuple):
    """Sequences padded with token 0, which stands for nothing else. Every token but the first is trained on."""

    tokens_BT: np.ndarray  # int32
    lengths_B: np.ndarray  # int32
    behaviour_BT: np.ndarray  # float32; log-prob of the sampler
    advantages_B: np.ndarray  # float32

    @property
    def mask_BT(self) -> np.ndarray:
        """bool; tokens trained on."""
        positions = np.arange(self.tokens_BT.shape[1])[None]
        return (positions > 0) & (positions < self.lengths_B[:, None])


class FirstUpdate(NamedTuple):
    """What an update says about the weights that it started from."""

    loss: float
    grad_norm: float


def make_batches(directory: Path) -> None:
    """Writes the batches: all of the full length, and lengths of a lognormal distribution."""
    rng = np.random.default_rng(0)
    uneven = rng.lognormal(sigma=SIGMA, size=NUM_SEQUENCES)
    lengths = {"even": np.full(NUM_SEQUENCES, LENGTH), "uneven": uneven * MEAN_LENGTH / uneven.mean()}
    arrays = {}
    for name in BATCHES:
        shape = (NUM_SEQUENCES, LENGTH)
        lengths_B = np.clip(lengths[name].round(), 2, LENGTH).astype(np.int32)
        behaviour = -np.log(VOCAB_SIZE) + 0.1 * rng.normal(size=shape)
        tokens = rng.integers(1, VOCAB_SIZE, shape) * (np.arange(LENGTH)[None] < lengths_B[:, None])
        batch = Batch(tokens.astype(np.int32), lengths_B, behaviour.astype(np.float32), rng.normal(size=NUM_SEQUENCES))
        arrays |= {f"{name}.{field}": value for field, value in batch._asdict().items()}
    np.savez(directory / "problem.npz", **arrays)


def read_batch(directory: Path, name: str) -> Batch:
    arrays = np.load(directory / "problem.npz")
    return Batch(*(arrays[f"{name}.{field}"] for field in Batch._fields))


def serve(versions: dict[str, str], update: Callable[[str], FirstUpdate]) -> None:
    """Answers the parent until it closes the pipe. `update(batch)` must be done when it returns."""
    first = {name: update(name)._asdict() for name in BATCHES}
    for name in BATCHES:
        update(name)  # whatever is done only once or twice is done by now
    print(json.dumps({"versions": versions, "first": first}), flush=True)
    for line in sys.stdin:
        _, seconds = timed(lambda: update(line.strip()))  # noqa: B023
        print(json.dumps(seconds._asdict()), flush=True)
