"""Episodes as a process reward model of tokens reads them: one text, and the token at which each step is judged.

    before₀ text₀ tag before₁ text₁ tag …
                   ↑                 ↑        judged here

The text becomes tokens as a whole, as in the model's training; where a step ends is then looked up by characters. So
only the places that end steps are judged, also if the policy writes the tag.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np

from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer, HuggingFaceTokenizer
from asyncrl_jax.actor.process_rewards.steps import Step
from asyncrl_jax.config_environment import ProcessRewardConfig
from asyncrl_jax.config_hf import read_hf_config
from asyncrl_jax.config_model import ModelConfig


class Annotated(NamedTuple):
    """One episode."""

    tokens: np.ndarray  # int32 [T]
    positions: np.ndarray  # int64 [K]; tokens at which steps are judged


def read_model(config: ProcessRewardConfig) -> ModelConfig:
    """Settings of the model that `reward.process.model` names.

    Raises:
      ValueError: if there is none; it names the setting.
    """
    try:
        return read_hf_config(config.model)
    except ValueError as error:
        raise ValueError(f"--config.reward.process.model={config.model}: {error}") from error


class Annotator:
    """Makes episodes into tokens."""

    def __init__(self, config: ProcessRewardConfig, vocab_size: int) -> None:
        """Args: vocab_size: of the model.

        Raises:
          ValueError: if there is no tokenizer, or the good or bad token is not one token.
        """
        self._tag = config.step_tag
        self._bytes = config.tokenizer == "byte"
        directory = config.tokenizer or config.model
        if not self._bytes and not (Path(directory) / "tokenizer.json").is_file():
            raise ValueError(
                f"--config.reward.process.tokenizer={config.tokenizer}: no tokenizer.json in {directory}; name byte, "
                "or a directory"
            )
        self._tokenizer = ByteTokenizer() if self._bytes else HuggingFaceTokenizer(directory)
        most = 256 if self._bytes else self._tokenizer.vocab_size
        if most > vocab_size:
            raise ValueError(f"--config.reward.process.model={config.model}: {vocab_size} tokens, its tokenizer {most}")
        self.pair = self._one("good", config.good), self._one("bad", config.bad)

    def annotate(self, steps: Sequence[Step]) -> Annotated:
        """The episode of these steps."""
        text, ends = "", []
        for step in steps:
            text += step.before + step.text + self._tag
            ends.append(len(text))
        if self._bytes:
            tokens = np.array(self._tokenizer.encode(text), np.int32)
            sizes = np.array([len(self._tokenizer.encode(character)) for character in text])
            return Annotated(tokens, np.cumsum(sizes)[np.array(ends) - 1] - 1)
        assert isinstance(self._tokenizer, HuggingFaceTokenizer)
        found = self._tokenizer.inner(text, return_offsets_mapping=True)
        offsets = np.array(found["offset_mapping"]).reshape(-1, 2)
        of_text = np.flatnonzero(offsets[:, 1] > offsets[:, 0])  # others are marks that the tokenizer added
        last = np.searchsorted(offsets[of_text, 0], ends, side="left") - 1  # that begins before the end
        return Annotated(np.array(found["input_ids"], np.int32), of_text[last])

    def _one(self, name: str, text: str) -> int:
        tokens = self._tokenizer.encode(text)
        if len(tokens) != 1:
            raise ValueError(f"--config.reward.process.{name}={text}: {len(tokens)} tokens, and it must be one")
        return tokens[0]
