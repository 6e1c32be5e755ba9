"""Writes versions of the weights, and deletes old ones. One process publishes; readers never look at a listing.

<directory>/v000007/            an Orbax checkpoint (OCDBT, zarr3) of the parameters under Hugging Face's names
<directory>/v000007/manifest.json   written last: the version is complete when it is there
<directory>/v000008/delta.bin       instead of a checkpoint, in a version that is a delta on a whole one
"""

from __future__ import annotations

import dataclasses
import os
import re
import time
from collections.abc import Collection, Mapping

import jax
import numpy as np
from etils import epath

from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights import commit, delta, manifest, read, save

WORTH = 3  # a delta is written when it has at most this part of the whole version's bytes

_VERSION = re.compile(r"v(\d{6,})")
_LEFTOVER = re.compile(r"v\d{6,}(\.orbax-checkpoint-tmp.*)?")


def publish(
    directory: str | os.PathLike[str],
    params: Mapping[str, jax.Array | np.ndarray],
    *,
    number: int,
    parent: int | None,
    line: int,
    update: int,
    canary: manifest.Canary,
) -> WeightVersion:
    """Writes one whole version; see `VersionWriter.publish`."""
    writer = VersionWriter(directory, deltas=False)
    return writer.publish(params, number=number, parent=parent, line=line, update=update, canary=canary)


@dataclasses.dataclass(frozen=True)
class _Base:
    """The last whole version, which deltas are made against."""

    number: int
    manifest_digest: str
    arrays: Mapping[str, np.ndarray]


class VersionWriter:
    """Writes the versions of one directory.

    With `deltas`, a version is written as its difference to the last whole one when that has a third of the bytes or
    less: a chain is never longer than one delta, and a writer begins with a whole version. It costs a copy of the
    weights in host memory, and pays when readers are far from the store.
    """

    def __init__(self, directory: str | os.PathLike[str], *, deltas: bool) -> None:
        self._root = commit.root_path(directory)
        self._deltas = deltas
        self._base: _Base | None = None

    def publish(
        self,
        params: Mapping[str, jax.Array | np.ndarray],
        *,
        number: int,
        parent: int | None,
        line: int,
        update: int,
        canary: manifest.Canary,
    ) -> WeightVersion:
        """Writes and commits one version; it is durable when this returns, and the caller announces it.

        A leftover of the same number is replaced. A committed version is never changed: publishing the same weights
        under the same number again, as after a crash between commit and announcement, returns the version that is
        there.

        Args:
          params: arrays by Hugging Face name. NumPy arrays are not copied: nobody may change them any more, as they
            may become the base of deltas. No step may donate jax arrays meanwhile: pass `save.host_copy` of them when
            this runs beside training.
          number: of the version; v0 is the weights before the first update.
          parent: version it was trained from; None for v0.
          line: of weights.
          update: optimizer updates since v0 on the line.
          canary: rows with their log-probs under `params`.

        Raises:
          ValueError: if the number is committed with other weights, or a name or dtype cannot be stored.
          RuntimeError: if it cannot be written; nothing is left of it.
        """
        arrays = save.host_arrays(params)
        made = manifest.Manifest(
            number=number,
            parent=parent,
            line=line,
            update=update,
            leaves=tuple(manifest.Leaf.of(name, arrays[name]) for name in sorted(arrays)),
            canary=canary,
            created_at=time.time(),
        )
        path = read.version_path(self._root, number)
        data = commit.read_commit(path, read.MANIFEST, manifest.MAX_MANIFEST_BYTES)
        if data is not None:
            _require_same(made, manifest.Manifest.from_json(data))
        else:
            self._root.mkdir(parents=True, exist_ok=True)
            data = self._write_delta(path, made, arrays) or self._write_whole(path, made, arrays)
        return WeightVersion(number, parent, line, update, manifest.digest(data))

    def _write_whole(self, path: epath.Path, made: manifest.Manifest, arrays: Mapping[str, np.ndarray]) -> bytes:
        """Returns the bytes of the manifest."""
        data = made.to_json()
        save.save_arrays(path, arrays, read.MANIFEST, data)
        if self._deltas:
            self._base = _Base(made.number, manifest.digest(data), arrays)
        return data

    def _write_delta(self, path: epath.Path, made: manifest.Manifest, arrays: Mapping[str, np.ndarray]) -> bytes | None:
        """Returns the bytes of the manifest; None if a delta does not pay, or its base is gone."""
        base = self._base
        if base is None or not (read.version_path(self._root, base.number) / read.MANIFEST).exists():
            return None
        encoded = delta.encode(base.arrays, arrays)
        if encoded is None or len(encoded) * WORTH > sum(array.nbytes for array in arrays.values()):
            return None
        how = manifest.Delta(base.number, base.manifest_digest, len(encoded), manifest.digest(encoded))
        data = dataclasses.replace(made, delta=how).to_json()
        save.save_file(path, read.DELTA, encoded, read.MANIFEST, data)
        return data


def committed(directory: str | os.PathLike[str]) -> list[int]:
    """Numbers of the complete versions, ascending: for the publisher's own housekeeping, never for readers."""
    root = commit.root_path(directory)
    if not root.exists():
        return []
    found = (_VERSION.fullmatch(path.name) for path in root.iterdir())
    numbers = sorted(int(match[1]) for match in found if match)
    return [number for number in numbers if (read.version_path(root, number) / read.MANIFEST).exists()]


def sweep(directory: str | os.PathLike[str], announced: Collection[int] | None = None) -> list[str]:
    """Deletes what a killed publisher left; call it before the first publish, never beside one.

    Args:
      directory: of all versions.
      announced: numbers that were announced. When given, complete versions that never were are deleted too, since no
        reader can know them and a resumed learner may need their numbers.

    Returns:
      Names of what was deleted.
    """
    root = commit.root_path(directory)
    if not root.exists():
        return []
    complete = committed(root)
    known = [number for number in complete if announced is None or number in announced]
    kept = {
        read.version_path(root, n).name for number in known for n in (number, _base_of(root, number)) if n is not None
    }
    leftovers = sorted(path.name for path in root.iterdir() if _LEFTOVER.fullmatch(path.name) and path.name not in kept)
    for name in leftovers:
        commit.delete(root / name, read.MANIFEST)
    return leftovers


def retain(directory: str | os.PathLike[str], keep: int, protected: Collection[int]) -> list[int]:
    """Deletes old versions: all but v0, the protected ones, and the newest `keep` of the others.

    The base of a delta that stays stays too. A reader that took its lease too late for `protected` finds the manifest
    gone, and takes the latest version.

    Args:
      directory: of all versions.
      keep: newest versions to keep, at least 1.
      protected: numbers under a live lease.

    Returns:
      Numbers that were deleted, ascending.

    Raises:
      ValueError: if `keep` is less than 1.
    """
    if keep < 1:
        raise ValueError(f"keep={keep}: at least 1, or readers have nothing to read")
    root = commit.root_path(directory)
    numbers = committed(root)
    candidates = [number for number in numbers if number != 0 and number not in protected]
    bases = {_base_of(root, number) for number in numbers if number not in candidates[:-keep]}
    deleted = [number for number in candidates[:-keep] if number not in bases]
    for number in deleted:
        commit.delete(read.version_path(root, number), read.MANIFEST)
    return deleted


def _base_of(root: epath.Path, number: int) -> int | None:
    how = read.read_manifest(root, number).delta
    return None if how is None else how.base


def _require_same(made: manifest.Manifest, there: manifest.Manifest) -> None:
    def identity(m: manifest.Manifest) -> tuple[int, int | None, int, int, str]:
        return m.number, m.parent, m.line, m.update, manifest.content_digest(m)

    if identity(made) != identity(there):
        raise ValueError(
            f"v{made.number} is committed with other weights: (number, parent, line, update, content) is "
            f"{identity(there)} there and {identity(made)} here; numbers never repeat"
        )
