"""Durable checkpoints of everything the learner needs to go on: complete or absent, verified when restored.

<directory>/00000040/                  an Orbax checkpoint (OCDBT, zarr3) of the arrays, by their path in the tree
<directory>/00000040/checkpoint.json   written last: step, array digests, kinds of random keys, and `meta`
"""

from __future__ import annotations

import concurrent.futures
import json
import os
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from etils import epath

from asyncrl_jax.models.mesh import to_mesh
from asyncrl_jax.weights import commit, manifest, read, save

COMMIT_FILE = "checkpoint.json"
FORMAT = 1
WAIT_TIMEOUT_S = 600.0

_STEP = re.compile(r"\d{8,}")
_LEFTOVER = re.compile(r"\d{8,}(\.orbax-checkpoint-tmp.*)?")
_FIELDS = {"format": (int,), "step": (int,), "leaves": (list,), "keys": (dict,), "meta": (dict,)}


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written. The ones before it are whole."""


class Checkpoints:
    """Checkpoints of one run. One process saves; steps only grow.

    * A step is complete or absent, whatever was killed, and the newest complete one is never deleted.
    * `protected` names update counts: the newest step at or before each is kept beside the `keep` newest.
    * `durable` names a step only after its bytes are on disk.
    * `save` returns once the arrays are copied to host memory, so the next step may donate them.
    * A failure in the background is raised once, by the next call of `save`, `wait` or `durable`.
    """

    def __init__(self, directory: str | os.PathLike[str], keep: int) -> None:
        """Opens `directory` without changing it.

        Args:
          directory: a path, gs:// or s3://.
          keep: complete checkpoints kept, at least 1.

        Raises:
          ValueError: if `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(f"keep={keep}: at least 1 checkpoint is kept")
        self.protected: frozenset[int] = frozenset()
        self._root = commit.root_path(directory)
        self._keep = keep
        self._swept = False
        self._writer = concurrent.futures.ThreadPoolExecutor(max_workers=1, thread_name_prefix="checkpoint")
        self._pending: concurrent.futures.Future[None] | None = None
        self._durable = self.latest()

    @property
    def directory(self) -> str:
        """Where they are."""
        return str(self._root)

    def save(self, step: int, tree: Any, meta: dict[str, Any]) -> None:
        """Starts saving in the background; waits first for the save before it.

        Args:
          step: optimizer updates done; more than that of any checkpoint there.
          tree: arrays, typed random keys included.
          meta: anything that JSON holds exactly.

        Raises:
          ValueError: if the step does not grow, a leaf cannot be stored, or JSON would change `meta`.
          CheckpointFailed: if the save before it failed.
        """
        self.wait()
        if self._durable is not None and step <= self._durable:
            raise ValueError(f"checkpoint {step}: {self._durable} is there already; call discard_newer to go back")
        keys, arrays = _named_arrays(tree)
        arrays = save.host_copy(arrays)
        leaves = tuple(manifest.Leaf.of(name, arrays[name]) for name in sorted(arrays))
        fields = {
            "format": FORMAT,
            "step": step,
            "leaves": manifest.leaves_to_json(leaves),
            "keys": keys,
            "meta": _exact_json(meta),
        }
        self._pending = self._writer.submit(self._write, step, arrays, json.dumps(fields).encode())

    def wait(self, timeout_s: float = WAIT_TIMEOUT_S) -> None:
        """Waits until nothing is being saved.

        Raises:
          CheckpointFailed: if the save failed.
          TimeoutError: if it is not done in time.
        """
        if self._pending is None:
            return
        done, _ = concurrent.futures.wait([self._pending], timeout_s)
        if not done:
            raise TimeoutError(f"checkpoint in {self._root}: not written after {timeout_s:g} s")
        self._take_result()

    def durable(self) -> int | None:
        """The newest step whose checkpoint is complete and on disk; never waits.

        Raises:
          CheckpointFailed: if the last save failed.
        """
        if self._pending is not None and self._pending.done():
            self._take_result()
        return self._durable

    @property
    def last_durable(self) -> int | None:
        """The step that the owner's thread last saw durable: for other threads, which must not take its result."""
        return self._durable

    def steps(self) -> list[int]:
        """Complete steps in the directory, ascending."""
        if not self._root.exists():
            return []
        names = [path.name for path in self._root.iterdir() if _STEP.fullmatch(path.name)]
        return sorted(int(name) for name in names if (self._root / name / COMMIT_FILE).exists())

    def latest(self) -> int | None:
        """The newest complete step in the directory."""
        return max(self.steps(), default=None)

    def meta(self, step: int | None = None) -> dict[str, Any]:
        """`meta` of a step, the newest by default, without its arrays. Raises as `restore`."""
        return self._read_commit(step)["meta"]

    def restore(self, step: int | None, like: Any) -> tuple[Any, dict[str, Any]]:
        """Reads a checkpoint and verifies every byte. Nothing is cast or skipped.

        Args:
          step: to restore; None for the newest complete one.
          like: tree of arrays or `jax.ShapeDtypeStruct`s with the structure, shapes, dtypes and, where they have one,
            shardings to restore to. The mesh may be another than the one saved from. Where `like` has a NumPy array, so
            has the result.

        Returns:
          The tree, and `meta`.

        Raises:
          FileNotFoundError: if there is no such checkpoint.
          weights.manifest.WeightsMismatch: if the checkpoint is damaged, or `like` has other leaves, shapes or dtypes.
        """
        fields = self._read_commit(step)
        path = self._path(fields["step"])
        leaves = manifest.leaves_from_json(fields["leaves"])
        found = {leaf.name: leaf for leaf in leaves}
        wanted, structure = jax.tree_util.tree_flatten_with_path(like)
        names = [_name(path) for path, _ in wanted]
        if set(names) != found.keys():
            missing, unexpected = sorted(set(names) - found.keys()), sorted(found.keys() - set(names))
            raise manifest.WeightsMismatch(
                "leaves", f"{path}: without {missing[:5]}, and with unknown {unexpected[:5]}"
            )
        arrays = read.read_arrays(path, leaves)
        restored = [
            _placed(name, arrays[name], fields["keys"].get(name), leaf)
            for name, (_, leaf) in zip(names, wanted, strict=True)
        ]
        return jax.tree.unflatten(structure, restored), fields["meta"]

    def discard_newer(self, step: int) -> list[int]:
        """Deletes the checkpoints after `step`, before training goes on from it; returns their steps."""
        self.wait()
        newer = [other for other in self.steps() if other > step]
        for other in reversed(newer):
            commit.delete(self._path(other), COMMIT_FILE)
        self._durable = self.latest()
        return newer

    def close(self) -> None:
        """Waits for the last save. Raises as `wait`."""
        self._writer.shutdown(wait=False)
        self.wait()

    def _write(self, step: int, arrays: dict[str, np.ndarray], commit_data: bytes) -> None:
        if not self._swept:
            self._sweep()
        save.save_arrays(self._path(step), arrays, COMMIT_FILE, commit_data)
        for old in self._expendable():
            commit.delete(self._path(old), COMMIT_FILE)

    def _expendable(self) -> list[int]:
        steps = self.steps()
        kept = {max((step for step in steps if step <= limit), default=-1) for limit in self.protected}
        return [step for step in steps[: -self._keep] if step not in kept]

    def _sweep(self) -> None:
        """Deletes what a killed learner left. Not on opening: a reader may open the directory of a running learner."""
        self._root.mkdir(parents=True, exist_ok=True)
        complete = {self._path(step).name for step in self.steps()}
        for path in self._root.iterdir():
            if _LEFTOVER.fullmatch(path.name) and path.name not in complete:
                commit.delete(path, COMMIT_FILE)
        self._swept = True

    def _take_result(self) -> None:
        pending, self._pending = self._pending, None
        assert pending is not None
        error = pending.exception()
        self._durable = self.latest()
        if error is not None:
            raise CheckpointFailed(f"{error}; the last complete checkpoint is {self._durable}") from error

    def _path(self, step: int) -> epath.Path:
        return self._root / f"{step:08d}"

    def _read_commit(self, step: int | None) -> dict[str, Any]:
        if step is None:
            step = self.latest()
        if step is None:
            raise FileNotFoundError(f"no complete checkpoint in {self._root}")
        data = commit.read_commit(self._path(step), COMMIT_FILE, manifest.MAX_MANIFEST_BYTES)
        if data is None:
            raise FileNotFoundError(f"no complete checkpoint {step} in {self._root}; there are {self.steps()}")
        fields = manifest.parse_object(data, _FIELDS)
        if fields["format"] != FORMAT or fields["step"] != step:
            raise manifest.WeightsMismatch("malformed", f"{self._path(step)} holds another format or step")
        return fields


def _name(path: tuple[Any, ...]) -> str:
    return jax.tree_util.keystr(path, simple=True, separator=".")


def _is_key(leaf: Any) -> bool:
    return jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)


def _named_arrays(tree: Any) -> tuple[dict[str, str], dict[str, Any]]:
    """(kind of every random key, arrays) by name; of a random key the array is its data."""
    keys: dict[str, str] = {}
    arrays: dict[str, Any] = {}
    for path, leaf in jax.tree_util.tree_flatten_with_path(tree)[0]:
        name = _name(path)
        if not isinstance(leaf, jax.Array | np.ndarray):
            raise ValueError(
                f"checkpoint leaf {name!r} is a {type(leaf).__name__}, not an array; scalars belong in meta"
            )
        if name in arrays:
            raise ValueError(f"two checkpoint leaves are named {name!r}")
        if _is_key(leaf):
            keys[name] = str(jax.random.key_impl(leaf))
        arrays[name] = jax.random.key_data(leaf) if name in keys else leaf
    return keys, arrays


def _placed(name: str, array: np.ndarray, key_kind: str | None, like: Any) -> Any:
    """`array` as `like` has it: on its devices, as a random key if it was one."""
    value = array if key_kind is None else jax.random.wrap_key_data(jnp.asarray(array), impl=key_kind)
    if value.shape != like.shape or value.dtype != like.dtype:
        saved, wanted = f"{value.dtype} {value.shape}", f"{like.dtype} {like.shape}"
        raise manifest.WeightsMismatch(
            "leaves", f"{name} was saved as {saved}, to be restored as {wanted}; nothing is cast"
        )
    if isinstance(like, np.ndarray):
        return array
    if key_kind is None and like.sharding is not None and not like.sharding.is_fully_addressable:
        return to_mesh(array, like.sharding)
    return jax.device_put(value, like.sharding)


def _exact_json(meta: dict[str, Any]) -> dict[str, Any]:
    """A copy of `meta` as JSON will give it back."""
    copy = json.loads(json.dumps(meta, allow_nan=False))
    if copy != meta:
        changed = sorted(str(key) for key in meta if copy.get(key) != meta[key])
        raise ValueError(f"JSON would change meta {changed}: use string keys, and lists for tuples")
    return copy
