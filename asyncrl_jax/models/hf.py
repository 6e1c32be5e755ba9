"""Hugging Face checkpoints: `from_hf(directory)` gives a decoder, `to_hf(decoder, directory)` writes one.

Reading streams: weight by weight, and of each weight only the parts that this host's devices hold, straight from the
files to the devices. So memory grows with one weight and not with the checkpoint. Writing fills one file at a time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from asyncrl_jax.config_hf import hf_config, read_hf_config
from asyncrl_jax.config_model import ModelConfig, differences
from asyncrl_jax.models import hf_names
from asyncrl_jax.models.hf_names import Part
from asyncrl_jax.models.sharding import param_shardings
from asyncrl_jax.models.transformer import Decoder, Params, abstract_params, graph_of, merge, params_of

log = logging.getLogger(__name__)

INDEX, SINGLE = "model.safetensors.index.json", "model.safetensors"
SHARD_BYTES = 2**30  # of one file that is written

# Beside the weights: what a server needs to turn text into tokens and back.
TOKENIZER_FILES = (
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "generation_config.json",
    "merges.txt",
    "tokenizer.model",
    "vocab.json",
)
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")


# ------------------------------------------------------------------------------------------------------------- reading


class Tensors:
    """The tensors of a Hugging Face directory, by the hub's names. Nothing is read before it is asked for."""

    def __init__(self, directory: str | Path, config: ModelConfig):
        """Raises: ValueError if there are no safetensors files, or they are not those of this model."""
        self._directory = Path(directory)
        self._file_of = _files(self._directory)
        self._open: dict[str, Any] = {}
        self._name_in_file = hf_names.hub_names(config, list(self._file_of))
        shapes = {hub: tuple(self._slice(hub).get_shape()) for hub in self._name_in_file}
        if config.tie_embeddings and "lm_head.weight" in shapes:
            self._check_tied(shapes)
        try:
            hf_names.check_shapes(config, shapes)
        except ValueError as error:
            raise ValueError(f"{self._directory}: {error}") from error
        self.stacked = hf_names.is_stacked(shapes)

    def read(self, hub_name: str, part: Part) -> np.ndarray:
        """A part of a tensor."""
        values: np.ndarray = self._slice(hub_name)[part]
        return values

    def _slice(self, hub_name: str) -> Any:
        name = self._name_in_file[hub_name]
        file = self._file_of[name]
        if file not in self._open:
            path = self._directory / file
            try:
                self._open[file] = safe_open(path, framework="numpy")
            except (OSError, SafetensorError) as error:
                raise ValueError(f"{path}: {error}") from error
        return self._open[file].get_slice(name)

    def _check_tied(self, shapes: dict[str, tuple[int, ...]]) -> None:
        """Some files hold a tied head a second time: it must be the same, and is left out."""
        head, embedding = "lm_head.weight", "model.embed_tokens.weight"
        if not np.array_equal(self._slice(head)[:], self._slice(embedding)[:]):
            raise ValueError(
                f"{self._directory}: {head!r} differs from {embedding!r}, though tie_word_embeddings is set"
            )
        del shapes[head], self._name_in_file[head]


def _files(directory: Path) -> dict[str, str]:
    """File of every tensor, by its name in the file."""
    index = directory / INDEX
    if index.is_file():
        return dict(json.loads(index.read_text())["weight_map"])
    if not (directory / SINGLE).is_file():
        raise ValueError(f"{directory}: neither {SINGLE} nor {INDEX} is there")
    with safe_open(directory / SINGLE, framework="numpy") as tensors:
        return dict.fromkeys(tensors.keys(), SINGLE)


def load_params(directory: str | Path, config: ModelConfig, mesh: Mesh | None = None) -> Params:
    """float32 weights of a Hugging Face directory, laid out on the mesh (None: on one device).

    Args:
      directory: with config.json and safetensors files.
      config: what the directory's config.json must agree with; settings of a run may differ.
      mesh: its devices.

    Raises:
      ValueError: for a directory that is not a checkpoint of this model; it names what differs.
    """
    found = read_hf_config(directory)
    if differing := differences(config, found):
        raise ValueError(f"{directory} is another model than configured: {'; '.join(differing)}")
    tensors = Tensors(directory, config)
    shardings: Mapping[str, Any] = {}
    if mesh is not None:
        shardings = param_shardings(config, mesh)
    on_one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    params: Params = {}
    for name, leaf in abstract_params(config).items():
        part = functools.partial(_read_weight, config, tensors, name, leaf)
        params[name] = jax.make_array_from_callback(leaf.shape, shardings.get(name, on_one), part)
        params[name].block_until_ready()  # or the copies of many weights would be under way at once
    return params


def _read_weight(
    config: ModelConfig, tensors: Tensors, name: str, leaf: jax.ShapeDtypeStruct, index: Any
) -> np.ndarray:
    """The part of weight `name` that one device holds."""
    part = tuple(slice(*of_dim.indices(size)[:2]) for of_dim, size in zip(index, leaf.shape, strict=True))
    values = hf_names.read_part(config, name, leaf.shape, part, tensors.read, stacked=tensors.stacked)
    return np.asarray(values, leaf.dtype)


def from_hf(directory: str | Path, *, mesh: Mesh | None = None, **settings: Any) -> Decoder:
    """The decoder of a Hugging Face directory, of any supported family.

    `from_hf(path)(tokens_BT)` gives float32 logits [B, T, V].

    Args:
      directory: with config.json and safetensors files.
      mesh: devices to lay the weights out on; None: one device.
      **settings: of a run, such as `compute_dtype="bfloat16"` or `remat="layers"`.

    Raises:
      ValueError: for a directory that is not a checkpoint, a family or a setting that is not supported.
    """
    config = dataclasses.replace(read_hf_config(directory), **settings)
    return merge(graph_of(config), load_params(directory, config, mesh))


# ------------------------------------------------------------------------------------------------------------- writing


def to_hf(
    decoder: Decoder,
    directory: str | Path,
    *,
    dtype: str = "float32",
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes what transformers and vLLM load; see `save_params`."""
    save_params(
        decoder.config,
        params_of(decoder),
        directory,
        dtype=dtype,
        tokenizer_from=tokenizer_from,
        shard_bytes=shard_bytes,
    )


def save_params(
    config: ModelConfig,
    params: Mapping[str, Any],
    directory: str | Path,
    *,
    dtype: str = "float32",
    tokenizer_from: str | Path | None = None,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Writes config.json and safetensors files under the hub's names, each expert's matrices apart.

    Args:
      config: the model.
      params: weights, as arrays that this process can read whole.
      directory: made if it is not there; files of these names in it are replaced.
      dtype: of the files: float32 or bfloat16. Router and selection bias stay float32 where transformers keeps them so.
      tokenizer_from: Hugging Face directory whose tokenizer and token ids are taken along.
      shard_bytes: a file is closed before it would grow beyond this; at least one weight goes into each.

    Raises:
      ValueError: for a dtype or a model that can't be written; it names what can't.
    """
    if dtype not in ("float32", "bfloat16"):
        raise ValueError(f"dtype {dtype!r}: use float32 or bfloat16")
    contents = hf_config(config) | {"dtype": dtype, "torch_dtype": dtype}
    directory = Path(directory)
    directory.mkdir(parents=True, exist_ok=True)
    if tokenizer_from is not None:
        contents |= _take_tokenizer(Path(tokenizer_from), directory)
    for stale in [*directory.glob("model*.safetensors"), directory / INDEX]:
        stale.unlink(missing_ok=True)
    files: dict[str, list[str]] = {}
    total_bytes = 0
    for number, shard in enumerate(_shards(config, params, dtype, shard_bytes)):
        draft = f"shard-{number:05d}.tmp"
        save_file(shard, directory / draft, metadata={"format": "pt"})
        files[draft] = list(shard)
        total_bytes += sum(tensor.nbytes for tensor in shard.values())
    _name_files(directory, files, total_bytes)
    (directory / "config.json").write_text(json.dumps(contents, indent=2) + "\n")


def _shards(
    config: ModelConfig, params: Mapping[str, Any], dtype: str, shard_bytes: int
) -> Iterator[dict[str, np.ndarray]]:
    """Tensors by the hub's name, one file's at a time, layer by layer."""
    shard: dict[str, np.ndarray] = {}
    size = 0
    for name in sorted(params, key=_reading_order):
        weight = np.asarray(params[name])
        keep = config.family == "mimo_v2_flash" and name.endswith(("moe.router", "moe.router_bias"))
        for hub_name, tensor in hf_names.separate_tensors(config, name, weight):
            part = np.ascontiguousarray(tensor.astype("float32" if keep else jax.numpy.dtype(dtype)))
            if shard and size + part.nbytes > shard_bytes:
                yield shard
                shard, size = {}, 0
            shard[hub_name] = part
            size += part.nbytes
    yield shard


def _reading_order(name: str) -> tuple[int, str]:
    """Embedding, layers by number, then norm and head: as a server reads."""
    if name.startswith("layers."):
        return int(name.split(".")[1]), name
    return (-1, name) if name == "embedding" else (2**31, name)


def _name_files(directory: Path, files: Mapping[str, list[str]], total_bytes: int) -> None:
    """Renames the written files, whose number is known now; several get an index."""
    if len(files) == 1:
        os.replace(directory / next(iter(files)), directory / SINGLE)
        return
    weight_map: dict[str, str] = {}
    for number, (draft, tensors) in enumerate(files.items(), start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        os.replace(directory / draft, directory / name)
        weight_map |= dict.fromkeys(tensors, name)
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    (directory / INDEX).write_text(json.dumps(index, indent=2) + "\n")


def _take_tokenizer(source: Path, directory: Path) -> dict[str, Any]:
    """Copies the tokenizer; returns the token ids of the source's config.json."""
    for name in TOKENIZER_FILES:
        if (source / name).is_file() and source.resolve() != directory.resolve():
            shutil.copyfile(source / name, directory / name)
    raw = json.loads((source / "config.json").read_text())
    return {name: raw.get(name) for name in TOKEN_IDS}
