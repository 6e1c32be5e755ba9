"""Reads versions with TensorStore and NumPy, and believes nothing that the manifest does not confirm. No JAX."""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import tensorstore as ts
from etils import epath

from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights import commit
from asyncrl_jax.weights.manifest import MAX_MANIFEST_BYTES, Leaf, Manifest, VersionGone, WeightsMismatch, digest

MANIFEST = "manifest.json"
READ_TIMEOUT_S = 600.0

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
    """Reads an announced version, and verifies every byte of it.

    Args:
      directory: of all versions; a path, gs:// or s3://.
      version: as announced.
      timeout_s: longest wait for the store.

    Returns:
      The manifest, and the arrays by Hugging Face name.

    Raises:
      VersionGone: if it was deleted, also while it was being read.
      WeightsMismatch: if manifest, leaves, shapes, dtypes or bytes are not those announced.
      TimeoutError: if the store does not answer in time.
    """
    manifest = announced_manifest(directory, version)
    path = version_path(commit.root_path(directory), version.number)
    try:
        return manifest, read_arrays(path, manifest.leaves, timeout_s)
    except WeightsMismatch:
        _manifest_bytes(path, version.number)  # deleted under the reader: retention removes the manifest first
        raise


def announced_manifest(directory: str | os.PathLike[str], version: WeightVersion) -> Manifest:
    """The manifest of an announced version, checked against the announcement. Raises as `read`, but never times out."""
    data = _manifest_bytes(version_path(commit.root_path(directory), version.number), version.number)
    if digest(data) != version.manifest_digest:
        raise WeightsMismatch(
            "manifest_digest", f"v{version.number}: {digest(data)}, announced {version.manifest_digest}"
        )
    manifest = Manifest.from_json(data)
    for field in ("number", "parent", "line", "update"):
        if getattr(manifest, field) != getattr(version, field):
            here, announced = getattr(manifest, field), getattr(version, field)
            raise WeightsMismatch("version", f"v{version.number}: {field} is {here}, announced {announced}")
    return manifest


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


def read_arrays(path: epath.Path, leaves: Sequence[Leaf], timeout_s: float = READ_TIMEOUT_S) -> dict[str, np.ndarray]:
    """Reads all arrays of the Orbax checkpoint at `path`, concurrently, and verifies them against `leaves`.

    TensorStore delivers a flipped bit or a lost chunk without a word; only the digests catch it.

    Raises:
      WeightsMismatch: with reason "leaves", "shape", "dtype", "checksum" or "unreadable".
      TimeoutError: if the store does not answer in time.
    """
    base = {"driver": "ocdbt", "base": commit.url(path)}
    context = ts.Context()  # fresh: a cache shared between reads could deliver bytes that are no longer there
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
        for leaf, store in zip(leaves, stores, strict=True):
            _check_kind(leaf, store.shape, store.dtype.name)
        reading = [store.read() for store in stores]
        arrays = {leaf.name: future.result(timeout_s) for leaf, future in zip(leaves, reading, strict=True)}
    except TimeoutError as error:
        raise TimeoutError(f"reading {path}: no answer from the store within {timeout_s:g} s") from error
    except WeightsMismatch:
        raise
    except _STORE_ERRORS as error:
        raise WeightsMismatch("unreadable", f"{path}: {str(error)[:500]}") from error
    for leaf in leaves:
        found = Leaf.of(leaf.name, arrays[leaf.name])
        if found != leaf:
            raise WeightsMismatch("checksum", f"{path}: the bytes of {leaf.name} are not those that were published")
    return arrays


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
