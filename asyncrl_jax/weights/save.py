"""Saves named arrays with Orbax, as a directory that is complete or absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp
from etils import epath

from asyncrl_jax.weights import commit
from asyncrl_jax.weights.manifest import MAX_MANIFEST_BYTES

DATA_FILE_BYTES = 32 * 2**20  # target size of one data file: large files read fastest, several are read at once


def host_copy(tree: Any) -> Any:
    """`tree` with its arrays copied to host memory, so that a step may donate the originals.

    Every array must be addressable by this process.
    """
    for leaf in jax.tree.leaves(tree):
        if isinstance(leaf, jax.Array):
            leaf.copy_to_host_async()
    # Copied, not viewed: on CPU np.asarray shares the device's buffer, and JAX does not donate a buffer that is shared.
    return jax.tree.map(lambda leaf: np.array(leaf, order="C", copy=True), tree)


def host_arrays(tree: Mapping[str, Any]) -> dict[str, np.ndarray]:
    """`tree` in host memory: NumPy arrays as they are, others copied."""
    ready = {name: leaf for name, leaf in tree.items() if isinstance(leaf, np.ndarray) and leaf.flags.c_contiguous}
    return ready | host_copy({name: leaf for name, leaf in tree.items() if name not in ready})


def save_file(path: epath.Path, name: str, data: bytes, commit_name: str, commit_data: bytes) -> None:
    """Writes one file to the directory `path`, then commits it. A leftover at `path` is replaced.

    Raises:
      RuntimeError: if it cannot be written. Nothing is left at `path`.
    """
    discard(path, commit_name)
    try:
        path.mkdir(parents=True)
        (path / name).write_bytes(data)
        commit.commit(path, commit_name, commit_data)
    except OSError as error:
        discard(path, commit_name)
        raise RuntimeError(f"cannot write {path}: {error}") from error


def save_arrays(path: epath.Path, arrays: Mapping[str, np.ndarray], commit_name: str, commit_data: bytes) -> None:
    """Writes `arrays` to `path` as an Orbax checkpoint, then commits it. A leftover at `path` is replaced.

    Arrays in host memory are saved in half the time that jax arrays take, and nothing runs on the device. Uncompressed:
    compression of weights costs more time than the bytes it saves.

    Raises:
      ValueError: if the commit file is larger than readers accept.
      RuntimeError: if it cannot be written, for instance because the disk is full. Nothing is left at `path`.
    """
    if len(commit_data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"{path / commit_name} would have {len(commit_data)} bytes, more than {MAX_MANIFEST_BYTES}")
    discard(path, commit_name)
    # This process saves alone, also where it is one of several: Orbax would wait for the others.
    alone = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}, barrier_sync_key_prefix=path.name
    )
    handler = ocp.PyTreeCheckpointHandler(
        use_ocdbt=True, use_zarr3=True, use_compression=False, multiprocessing_options=alone
    )
    arguments = ocp.args.PyTreeSave(dict(arrays), ocdbt_target_data_file_size=DATA_FILE_BYTES)
    try:
        with ocp.Checkpointer(handler, multiprocessing_options=alone) as checkpointer:
            checkpointer.save(path, args=arguments)
        commit.commit(path, commit_name, commit_data)
    except Exception as error:  # Orbax, TensorStore and the system each have their own types for a full disk
        discard(path, commit_name)
        raise RuntimeError(f"cannot write {path}: {error}") from error


def discard(path: epath.Path, commit_name: str) -> None:
    """Deletes `path` and whatever a killed writer left beside it."""
    commit.delete(path, commit_name)
    for leftover in path.parent.glob(f"{path.name}.orbax-checkpoint-tmp*"):
        leftover.rmtree()
