"""Where the bytes of groups are, from submission to settlement: in Redis, or beside it when they are large.

A writer stages a payload first, under a name of its own; the script that queues the group then makes it lasting, in the
step that makes it known. What was staged for nothing disappears by itself: keys expire, files are swept.

<directory>/<ticket id>.<submission>    one group's encoded bytes

What Redis holds of a payload in a file is a reference: name, size and xxh3_128, the checksum that weights use too. It
detects accidents, and that is all a checksum can do here: whoever can write files beside the stream can write the
stream.
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Collection

import xxhash
from etils import epath

from asyncrl_jax.transport.codec import InvalidGroup

STAGED_S = 600  # seconds a staged payload lives, unless its group is queued; many times the longest script
SWEEP_AGE_S = 3600.0  # files younger than this may be on their way into the ledger

_REFERENCE = b"\xc3\x02"  # no Avro message starts so: those have C3 01
_MAX_REFERENCE_BYTES = 1024
_NAME = re.compile(r"[0-9]{1,12}-[0-9]{1,15}\.[0-9a-f]{32}")
_DRAFT = ".draft"


class PayloadStore:
    """Payloads as files of one directory: a path, gs:// or s3://."""

    def __init__(self, directory: str | os.PathLike[str]) -> None:
        self._directory = epath.Path(os.fspath(directory))
        self._local = "://" not in os.fspath(directory)
        if self._local:
            self._directory.mkdir(parents=True, exist_ok=True)

    def put(self, ticket_id: str, submission: str, data: bytes) -> bytes:
        """Stores `data` durably. Returns the reference."""
        name = f"{ticket_id}.{submission}"
        path = self._directory / name
        if self._local:
            draft = self._directory / (name + _DRAFT)
            with open(draft, "wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(draft, path)
            self._sync()
        else:
            path.write_bytes(data)  # one object appears whole
        fields = {"name": name, "size": len(data), "digest": xxhash.xxh3_128_hexdigest(data)}
        return _REFERENCE + json.dumps(fields).encode()

    def get(self, reference: bytes, max_bytes: int) -> bytes:
        """The payload, verified.

        Raises:
          InvalidGroup: reasons "bad_reference", "too_large", "payload_missing" and "payload_damaged".
        """
        name, size, digest = _parse(reference)
        if size > max_bytes:
            raise InvalidGroup("too_large", f"payload {name} has {size} bytes, limit {max_bytes}")
        path = self._directory / name
        try:
            found = path.stat().length
            data = path.read_bytes() if found == size else b""
        except OSError as error:  # FileNotFoundError included; a store that is away for good costs its groups only
            raise InvalidGroup("payload_missing", f"payload {name}: {error}") from error
        if found != size or xxhash.xxh3_128_hexdigest(data) != digest:
            raise InvalidGroup("payload_damaged", f"payload {name} has not the bytes that were stored")
        return data

    def delete(self, reference: bytes) -> None:
        """Deletes the payload, if it is there."""
        (self._directory / _parse(reference)[0]).unlink(missing_ok=True)

    def sweep(self, queued: Collection[str], age_s: float = SWEEP_AGE_S) -> int:
        """Deletes payloads that belong to no queued group, and are older than `age_s`.

        Args:
          queued: "<ticket id>.<submission>" of every queued group.

        Returns the number deleted.
        """
        deleted = 0
        for path in self._directory.iterdir() if self._directory.exists() else ():
            name = path.name.removesuffix(_DRAFT)
            if not _NAME.fullmatch(name) or path.name in queued:
                continue
            try:
                if time.time() - path.stat().mtime >= age_s:
                    path.unlink()
                    deleted += 1
            except FileNotFoundError:  # settled meanwhile
                continue
        return deleted

    def _sync(self) -> None:
        descriptor = os.open(self._directory, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def is_reference(data: bytes) -> bool:
    """Whether `data` stands for a payload in a file."""
    return data.startswith(_REFERENCE)


def _parse(reference: bytes) -> tuple[str, int, str]:
    """(name, size, digest) of a reference, none of which is trusted before."""
    try:
        if len(reference) > _MAX_REFERENCE_BYTES:
            raise ValueError(f"{len(reference)} bytes")
        fields = json.loads(reference.removeprefix(_REFERENCE))
        name, size, digest = fields["name"], fields["size"], fields["digest"]
        if not (isinstance(name, str) and _NAME.fullmatch(name) and type(size) is int and isinstance(digest, str)):
            raise ValueError(f"fields {str(fields)[:80]}")
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise InvalidGroup("bad_reference", f"not a reference to a payload: {error}") from error
    return name, size, digest
