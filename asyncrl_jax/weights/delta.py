"""What changed between two sets of weights, bit for bit, in few bytes. No JAX.

A step of reinforcement learning at a small rate moves few bf16 values, and those by few units in the last place. So a
delta holds, for each leaf that changed, the gaps between the changed elements and the differences of their bit
patterns, zigzag-coded so that small ones of either sign have zero high bytes, one byte plane after another; both
compressed by zstd at level 1. A leaf of which more than half changed is held whole.

    u64 length of the index | index, JSON: [[name, mode, elements, bytes of gaps, length, length], ...] | frames

Differences are of integers and wrap around, so applying them is exact; and the manifest states the digest of what must
come out.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from typing import Any

import numpy as np
import zstandard

from asyncrl_jax.weights.manifest import WeightsMismatch

_LENGTH = struct.Struct("<Q")
_ESCAPE = 255  # a gap byte that says: 255 more, and no element yet
_LEVEL = 1
_DENSE = 0.5  # share of changed elements above which a leaf is held whole

Undo = list[tuple[np.ndarray, Any, np.ndarray]]  # (flat leaf, positions, what was there)


def encode(base: Mapping[str, np.ndarray], arrays: Mapping[str, np.ndarray]) -> bytes | None:
    """The delta from `base` to `arrays`; None if they do not have the same leaves, shapes and dtypes."""
    if {name: (a.shape, a.dtype) for name, a in base.items()} != {n: (a.shape, a.dtype) for n, a in arrays.items()}:
        return None
    index: list[list[str | int]] = []
    frames: list[bytes] = []
    compress = zstandard.ZstdCompressor(level=_LEVEL).compress
    for name in sorted(arrays):
        old, new = _bits(base[name]), _bits(arrays[name])
        changed = np.flatnonzero(old != new)
        if len(changed) == 0:
            continue
        if len(changed) > _DENSE * len(new):
            index.append([name, "whole", len(new), 0, 0, new.nbytes])
            frames.append(new.tobytes())
            continue
        gaps = _gap_bytes(changed).tobytes()
        difference = new[changed] - old[changed]
        packed = compress(gaps), compress(_planes(difference))
        index.append([name, "sparse", len(changed), len(gaps), len(packed[0]), len(packed[1])])
        frames += packed
    head = json.dumps(index).encode()
    return b"".join([_LENGTH.pack(len(head)), head, *frames])


def apply(delta: bytes, arrays: Mapping[str, np.ndarray]) -> Undo:
    """Turns `arrays`, which hold the base, into the new version, in place.

    Returns:
      What `undo` needs to make them the base again.

    Raises:
      WeightsMismatch: with reason "delta", if it does not fit. `arrays` may have changed in part.
    """
    done: Undo = []
    try:
        (length,) = _LENGTH.unpack_from(delta)
        at = _LENGTH.size + length
        for name, mode, count, num_gap_bytes, first, second in json.loads(delta[_LENGTH.size : at]):
            flat = _bits(arrays[name])
            frames = delta[at : at + first], delta[at + first : at + first + second]
            at += first + second
            if mode == "whole":
                where: Any = slice(None)
                values = np.frombuffer(frames[1], flat.dtype)
                if values.shape != flat.shape:
                    raise ValueError(f"{values.size} elements of {flat.size}")
            else:
                where = _positions(_decompress(frames[0], num_gap_bytes), count)
                values = flat[where] + _from_planes(_decompress(frames[1], count * flat.itemsize), flat.dtype)
            done.append((flat, where, flat[where].copy()))
            flat[where] = values
        if at != len(delta):
            raise ValueError(f"{len(delta) - at} bytes are left over")
    except (struct.error, ValueError, KeyError, IndexError, TypeError, zstandard.ZstdError) as error:
        raise WeightsMismatch("delta", f"it does not fit its base: {error}") from error
    return done


def undo(done: Undo) -> None:
    """Makes the arrays that `apply` changed what they were."""
    for flat, where, values in done:
        flat[where] = values


def _bits(array: np.ndarray) -> np.ndarray:
    """The elements of a contiguous array as unsigned integers, flat; a view."""
    flat = array.reshape(-1)
    assert np.shares_memory(flat, array)
    return flat.view(f"u{array.itemsize}")


def _gap_bytes(changed: np.ndarray) -> np.ndarray:
    """Elements skipped before each changed one, a byte each, with `_ESCAPE` as often as a gap is longer."""
    gaps = np.diff(changed, prepend=-1) - 1
    escapes, rest = np.divmod(gaps, _ESCAPE)
    if not escapes.any():
        return rest.astype(np.uint8)
    coded = np.full(len(gaps) + int(escapes.sum()), _ESCAPE, np.uint8)
    coded[np.cumsum(escapes + 1) - 1] = rest
    return coded


def _positions(coded: bytes, count: int) -> np.ndarray:
    gaps = np.frombuffer(coded, np.uint8)
    skipped = np.cumsum(gaps, dtype=np.int64)[gaps != _ESCAPE]
    if len(skipped) != count:
        raise ValueError(f"{len(skipped)} elements where the index says {count}")
    return skipped + np.arange(count)


def _planes(difference: np.ndarray) -> bytes:
    signed = difference.view(f"i{difference.itemsize}")
    zigzag = (signed << 1) ^ (signed >> (8 * signed.itemsize - 1))
    return np.ascontiguousarray(zigzag.view(np.uint8).reshape(-1, signed.itemsize).T).tobytes()


def _from_planes(data: bytes, dtype: np.dtype[Any]) -> np.ndarray:
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    zigzag = np.ascontiguousarray(planes.T).reshape(-1).view(dtype)
    return (zigzag >> 1) ^ (0 - (zigzag & 1)).astype(dtype)


def _decompress(frame: bytes, size: int) -> bytes:
    stated = zstandard.get_frame_parameters(frame).content_size
    if stated != size:
        raise ValueError(f"a frame of {stated} bytes where the index says {size}")
    return zstandard.ZstdDecompressor().decompress(frame)
