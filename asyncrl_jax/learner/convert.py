"""Weights from one place to another: Hugging Face directories, published versions and checkpoints of runs."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import numpy as np

from asyncrl_jax.config import Config, from_json
from asyncrl_jax.config_hf import read_hf_config
from asyncrl_jax.config_model import ModelConfig
from asyncrl_jax.models.hf import load_params
from asyncrl_jax.models.hf_names import from_tensors, to_tensors
from asyncrl_jax.models.transformer import Params
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.publish import committed, publish
from asyncrl_jax.weights.read import describe, read

from .canary import candidate_rows, make_canary
from .checkpoint import Checkpoints
from .state import create_state

NEWEST = -1


def read_weights(source: Path, *, version: int = NEWEST, checkpoint: int | None = None) -> tuple[ModelConfig, Params]:
    """(settings, weights) of a Hugging Face directory or a run's directory.

    Args:
      source: the directory; its config.json says which of the two it is.
      version: published version of the run to read.
      checkpoint: update whose checkpoint is read instead of a version; NEWEST for the last.

    Raises:
      ValueError: if there is no config.json, no such version or checkpoint, or the weights are not the model's.
    """
    path = source / "config.json"
    try:
        raw = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError(f"{path}: {getattr(error, 'strerror', None) or error}") from error
    if "model_type" in raw:
        model = read_hf_config(source)
        return model, load_params(source, model)
    config = from_json(raw)
    if checkpoint is not None:
        return config.model, _of_checkpoint(config, source / "checkpoints", checkpoint)
    directory = config.weights.directory or str(source / "weights")
    found = committed(directory)
    number = found[-1] if version == NEWEST and found else version
    if number not in found:
        raise ValueError(f"{directory}: no version {number}; there are {', '.join(map(str, found)) or 'none'}")
    _, tensors = read(directory, describe(directory, number))
    return config.model, from_tensors(config.model, tensors)


def _of_checkpoint(config: Config, directory: Path, step: int) -> Params:
    saved = Checkpoints(directory, config.learner.keep_checkpoints)
    newest = saved.latest()
    if newest is None:
        raise ValueError(f"{directory}: no checkpoint")
    if step != NEWEST and step not in saved.steps():
        raise ValueError(f"{directory}: no checkpoint {step}; there are {', '.join(map(str, saved.steps()))}")
    state, _ = saved.restore(newest if step == NEWEST else step, create_state(config, config.seed))
    saved.close()
    params: Params = state.params
    return params


def publish_weights(directory: Path, model: ModelConfig, params: Params, number: int = 0) -> WeightVersion:
    """Publishes weights as a version without a parent, with a canary, as a learner does."""
    config = dataclasses.replace(Config(), model=model)
    canary = make_canary(config, params, candidate_rows(0, model.vocab_size, model.max_positions))
    tensors = to_tensors(model, {name: np.asarray(value) for name, value in params.items()})
    directory.mkdir(parents=True, exist_ok=True)
    return publish(directory, tensors, number=number, parent=None, line=0, update=0, canary=canary)
