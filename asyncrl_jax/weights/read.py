"""Reads versions with TensorStore and NumPy, and believes nothing that the manifest does not confirm. No JAX."""

from __future__ import annotations

import concurrent.futures
import os
from collections.abc import Mapping, Sequence

import numpy as np
import tensorstore as ts
from etils import epath

from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights import commit, delta
from asyncrl_jax.weights.manifest import MAX_MANIFEST_BYTES, Delta, Leaf, Manifest, VersionGone, WeightsMismatch, digest

MANIFEST = "manifest.json"
DELTA = "delta.bin"
READ_TIMEOUT_S = 600.0

_HASH_THREADS = 4

_STORE_ERRORS = (
    ValueError,
    KeyError,
    OSError,
    RuntimeError,
)  # what TensorStore raises for bytes that are wrong or missing


def version_path(root: epath.Path, number: int) -> epath.Path:
    """Where version `number` is in the directory `root`."""
    return root / f"v{number:06d}"


def read(
    directory: str | os.PathLike[str], version: WeightVersion, timeout_s: float = READ_TIMEOUT_S
) -> tuple[Manifest, dict[str, np.ndarray]]:
    """Reads one announced version; see `WeightsReader.read`. The arrays are the caller's."""
    return WeightsReader(directory, timeout_s).read(version)


class WeightsReader:
    """Reads version after version into host memory that it keeps.

    Memory that was touched before takes a version in a fraction of the time that fresh memory takes, and a version
    that is a delta needs only what changed, when the whole version it is made against is still here: it is applied in
    place, and taken back before the next one.
    """

    def __init__(self, directory: str | os.PathLike[str], timeout_s: float = READ_TIMEOUT_S) -> None:
        """Args:
        directory: of all versions; a path, gs:// or s3://.
        timeout_s: longest wait for the store.
        """
        self.directory = os.fspath(directory)
        self._root = commit.root_path(directory)
        self._timeout_s = timeout_s
        self._arrays: dict[str, np.ndarray] = {}
        self._held: tuple[int, str] | None = None  # whole version in `_arrays`, but for `_applied`: (number, digest)
        self._applied: delta.Undo = []

    def read(self, version: WeightVersion) -> tuple[Manifest, dict[str, np.ndarray]]:
        """Reads an announced version, and verifies every byte of it.

        Returns:
          The manifest, and the arrays by Hugging Face name; they change with the next call, so copy what is to stay.

        Raises:
          VersionGone: if it was deleted, also while it was being read.
          WeightsMismatch: if manifest, leaves, shapes, dtypes or bytes are not those announced.
          TimeoutError: if the store does not answer in time.
        """
        manifest = announced_manifest(self._root, version)
        if manifest.delta is None:
            self._read_whole(manifest, version.manifest_digest)
        else:
            self._read_delta(manifest, manifest.delta)
        return manifest, dict(self._arrays)

    def _read_whole(self, manifest: Manifest, manifest_digest: str) -> None:
        path = version_path(self._root, manifest.number)
        self._held, self._applied = None, []
        try:
            self._arrays = read_arrays(path, manifest.leaves, self._timeout_s, into=self._arrays)
        except WeightsMismatch:
            _manifest_bytes(path, manifest.number)  # deleted under the reader: retention removes the manifest first
            raise
        self._held = (manifest.number, manifest_digest)

    def _read_delta(self, manifest: Manifest, how: Delta) -> None:
        base = (how.base, how.base_digest)
        if self._held != base:
            whole = _verified_manifest(self._root, *base)
            if whole.delta is not None:
                raise WeightsMismatch("delta", f"v{manifest.number} is a delta on v{how.base}, which is one itself")
            self._read_whole(whole, how.base_digest)
        delta.undo(self._applied)
        self._held, self._applied = None, []  # until all of it is well
        applied = delta.apply(self._delta_bytes(manifest.number, how), self._arrays)
        _check_names(set(self._arrays), {leaf.name for leaf in manifest.leaves})
        for leaf in manifest.leaves:
            array = self._arrays[leaf.name]
            _check_kind(leaf, array.shape, array.dtype.name)
        _check_bytes(manifest.leaves, self._arrays, f"v{manifest.number}, a delta on v{how.base}")
        self._held, self._applied = base, applied

    def _delta_bytes(self, number: int, how: Delta) -> bytes:
        path = version_path(self._root, number)
        try:
            size = (path / DELTA).stat().length
            data = (path / DELTA).read_bytes() if size == how.size_bytes else b""
        except OSError as error:
            _manifest_bytes(path, number)  # deleted under the reader
            raise WeightsMismatch("unreadable", f"{path / DELTA}: {error}") from error
        if digest(data) != how.digest:
            _manifest_bytes(path, number)
            raise WeightsMismatch("checksum", f"{path / DELTA}: not the bytes that were published")
        return data


def announced_manifest(directory: str | os.PathLike[str], version: WeightVersion) -> Manifest:
    """The manifest of an announced version, checked against the announcement. Raises as `read`, but never times out."""
    manifest = _verified_manifest(commit.root_path(directory), version.number, version.manifest_digest)
    for field in ("number", "parent", "line", "update"):
        if getattr(manifest, field) != getattr(version, field):
            here, announced = getattr(manifest, field), getattr(version, field)
            raise WeightsMismatch("version", f"v{version.number}: {field} is {here}, announced {announced}")
    return manifest


def _verified_manifest(root: epath.Path, number: int, announced: str) -> Manifest:
    data = _manifest_bytes(version_path(root, number), number)
    if digest(data) != announced:
        raise WeightsMismatch("manifest_digest", f"v{number}: {digest(data)}, announced {announced}")
    return Manifest.from_json(data)


def read_manifest(directory: str | os.PathLike[str], number: int) -> Manifest:
    """The manifest of a committed version, as it stands, checked against no announcement.

    Raises:
      VersionGone: if the version is not there.
      WeightsMismatch: if the manifest is malformed.
    """
    return Manifest.from_json(_manifest_bytes(version_path(commit.root_path(directory), number), number))


def describe(directory: str | os.PathLike[str], number: int) -> WeightVersion:
    """A committed version as its publisher would announce it again. Raises as `read_manifest`."""
    data = _manifest_bytes(version_path(commit.root_path(directory), number), number)
    manifest = Manifest.from_json(data)
    return WeightVersion(number, manifest.parent, manifest.line, manifest.update, digest(data))


def read_arrays(
    path: epath.Path,
    leaves: Sequence[Leaf],
    timeout_s: float = READ_TIMEOUT_S,
    into: Mapping[str, np.ndarray] | None = None,
) -> dict[str, np.ndarray]:
    """Reads all arrays of the Orbax checkpoint at `path`, concurrently, and verifies them against `leaves`.

    TensorStore delivers a flipped bit or a lost chunk without a word; only the digests catch it.

    Args:
      into: arrays to read into, by name, where shape and dtype fit.

    Raises:
      WeightsMismatch: with reason "leaves", "shape", "dtype", "checksum" or "unreadable".
      TimeoutError: if the store does not answer in time.
    """
    base = {"driver": "ocdbt", "base": commit.url(path)}
    # Fresh: a cache shared between reads could deliver bytes that are no longer there.
    context = ts.Context({"file_io_mode": {"mode": "memmap"}})
    try:
        keys = ts.KvStore.open(base, context=context).result(timeout_s).list().result(timeout_s)
        _check_names({key.decode().split("/")[0] for key in keys}, {leaf.name for leaf in leaves})
        opening = [
            ts.open(
                {"driver": "zarr3", "kvstore": base | {"path": f"{leaf.name}/"}}, context=context, open=True, read=True
            )
            for leaf in leaves
        ]
        stores = [future.result(timeout_s) for future in opening]
        arrays, reading = {}, []
        for leaf, store in zip(leaves, stores, strict=True):
            _check_kind(leaf, store.shape, store.dtype.name)
            arrays[leaf.name] = _memory(leaf, into or {})
            reading.append(ts.array(arrays[leaf.name], copy=False).write(store))
        for future in reading:
            future.result(timeout_s)
    except TimeoutError as error:
        raise TimeoutError(f"reading {path}: no answer from the store within {timeout_s:g} s") from error
    except WeightsMismatch:
        raise
    except _STORE_ERRORS as error:
        raise WeightsMismatch("unreadable", f"{path}: {str(error)[:500]}") from error
    _check_bytes(leaves, arrays, os.fspath(path))
    return arrays


def _memory(leaf: Leaf, into: Mapping[str, np.ndarray]) -> np.ndarray:
    """An array for the leaf: that of `into`, if it fits."""
    there = into.get(leaf.name)
    if there is not None and (there.shape, there.dtype.name) == (leaf.shape, leaf.dtype):
        return there
    return np.empty(leaf.shape, np.dtype(leaf.dtype))


def _check_bytes(leaves: Sequence[Leaf], arrays: Mapping[str, np.ndarray], where: str) -> None:
    """Raises WeightsMismatch, with reason "checksum", for the first array that is not what its leaf says."""

    def matches(leaf: Leaf) -> bool:
        return Leaf.of(leaf.name, arrays[leaf.name]) == leaf

    with concurrent.futures.ThreadPoolExecutor(_HASH_THREADS) as pool:  # xxhash works without the GIL
        for leaf, ok in zip(leaves, pool.map(matches, leaves), strict=True):
            if not ok:
                raise WeightsMismatch(
                    "checksum", f"{where}: the bytes of {leaf.name} are not those that were published"
                )


def _manifest_bytes(path: epath.Path, number: int) -> bytes:
    try:
        data = commit.read_commit(path, MANIFEST, MAX_MANIFEST_BYTES)
    except ValueError as error:
        raise WeightsMismatch("malformed", str(error)) from error
    if data is None:
        raise VersionGone(f"v{number} is not in {path.parent}: deleted by retention, or never committed")
    return data


def _check_names(found: set[str], expected: set[str]) -> None:
    if found != expected:
        missing, unexpected = sorted(expected - found), sorted(found - expected)
        raise WeightsMismatch(
            "leaves", f"missing {missing[:5]} ({len(missing)}), unexpected {unexpected[:5]} ({len(unexpected)})"
        )


def _check_kind(leaf: Leaf, shape: tuple[int, ...], dtype: str) -> None:
    if tuple(shape) != leaf.shape:
        raise WeightsMismatch("shape", f"{leaf.name} has shape {tuple(shape)}, the manifest says {leaf.shape}")
    if dtype != leaf.dtype:
        raise WeightsMismatch("dtype", f"{leaf.name} is {dtype}, the manifest says {leaf.dtype}")
