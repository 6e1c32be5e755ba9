"""Directories that are complete or absent, on a local file system, gs:// or s3://. No JAX.

The data of a directory is written and made durable first, its commit file last. A directory with a commit file is
complete, whatever was killed; one without is a leftover. Deleting goes the other way round, so that a reader who finds
its data missing can ask whether the commit file still stands.
"""

from __future__ import annotations

import os
from urllib.parse import quote

from etils import epath

_TEMPORARY = ".tmp"


def root_path(directory: str | os.PathLike[str]) -> epath.Path:
    """`directory` as an absolute path or a URL."""
    text = os.fspath(directory)
    return epath.Path(text if "://" in text else os.path.abspath(text))


def is_local(path: epath.Path) -> bool:
    """Whether `path` is on a file system, so that it must be synced and can be renamed atomically."""
    return "://" not in os.fspath(path)


def url(path: epath.Path) -> str:
    """The URL by which TensorStore opens the directory `path`."""
    text = os.fspath(path)
    return f"file://{quote(text)}/" if is_local(path) else f"{text}/"


def sync(path: epath.Path) -> None:
    """Makes every file and directory below `path` durable; object stores are so by themselves."""
    if not is_local(path):
        return
    for directory, _, files in os.walk(path):
        for name in [*files, "."]:
            _sync_one(os.path.join(directory, name))


def commit(path: epath.Path, name: str, data: bytes) -> None:
    """Makes the directory `path` complete: its data durable, then the commit file `name` in one atomic step."""
    if not is_local(path):
        (path / name).write_bytes(data)  # one object appears whole
        return
    sync(path)
    temporary = path / (name + _TEMPORARY)
    with open(temporary, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path / name)
    _sync_one(path)
    _sync_one(path.parent)


def read_commit(path: epath.Path, name: str, max_bytes: int) -> bytes | None:
    """The commit file of `path`; None when the directory is not complete.

    Raises:
      ValueError: if it is larger than `max_bytes`.
    """
    try:
        size_bytes = (path / name).stat().length
        if size_bytes > max_bytes:
            raise ValueError(f"{path / name} has {size_bytes} bytes, more than {max_bytes}")
        return (path / name).read_bytes()
    except FileNotFoundError:
        return None


def delete(path: epath.Path, name: str) -> None:
    """Deletes the directory `path`, complete or not: its commit file first."""
    (path / name).unlink(missing_ok=True)
    if path.exists():
        path.rmtree()


def _sync_one(path: str | os.PathLike[str]) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
