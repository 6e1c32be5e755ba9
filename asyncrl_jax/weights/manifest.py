"""What a published version holds, leaf by leaf, and the log-probs that prove it was loaded. No JAX.

Dimensions: C canary rows, T tokens of one row.

The manifest is the last file of a version to be written, so a version with one is complete. Its digest is announced
with the version; a reader that checks it, and then every leaf against it, cannot be served anything else.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Mapping
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 and the float8 types with NumPy by name
import numpy as np
import xxhash

FORMAT = 1  # of a version that is whole
DELTA_FORMAT = 2  # of one that is a delta
MAX_MANIFEST_BYTES = 64 * 2**20

_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.\-]*")  # no separator: a name is one segment of a path in the store
_DIGEST = re.compile(r"[0-9a-f]{32}")
_INTEGERS = ("bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64")
_DTYPES = frozenset((*_INTEGERS, "float16", "float32", "float64", "bfloat16", "float8_e4m3fn", "float8_e5m2"))


class WeightsMismatch(ValueError):
    """Weights, or the manifest that describes them, are not what was announced. `reason` is a short stable name."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(f"{reason}: {detail}")
        self.reason = reason


class VersionGone(LookupError):
    """The version was deleted by retention, or never committed. Ask for the latest one instead."""


def digest(data: bytes | memoryview) -> str:
    """xxh3_128 of `data`, 32 hex digits. It detects accidents, not forgery."""
    return xxhash.xxh3_128_hexdigest(data)


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One array of a version."""

    name: str  # Hugging Face's
    shape: tuple[int, ...]
    dtype: str  # NumPy's name
    digest: str  # xxh3_128 hex of the little-endian bytes in C order

    def __post_init__(self) -> None:
        if not _NAME.fullmatch(self.name):
            raise ValueError(f"leaf name {self.name!r}: use letters, digits, '_', '.' and '-'")
        if any(dim < 1 for dim in self.shape) or math.prod(self.shape) >= 2**60:
            raise ValueError(f"leaf {self.name}: shape {self.shape} cannot be stored")  # Orbax refuses empty arrays too
        if self.dtype not in _DTYPES:
            raise ValueError(f"leaf {self.name}: dtype {self.dtype!r} is not one of {', '.join(sorted(_DTYPES))}")
        if not _DIGEST.fullmatch(self.digest):
            raise ValueError(f"leaf {self.name}: digest {self.digest!r} is not 32 hex digits")

    @classmethod
    def of(cls, name: str, array: np.ndarray) -> Leaf:
        """The leaf that describes `array`.

        Raises:
          ValueError: for a name or dtype that cannot be stored.
        """
        flat = np.ascontiguousarray(array).reshape(-1)
        return cls(name, array.shape, array.dtype.name, digest(flat.view(np.uint8).data))


@dataclasses.dataclass(frozen=True, eq=False)
class Canary:
    """Teacher-forced rows and the log-probs the publisher's weights give them, at temperature 1."""

    tokens: np.ndarray  # int32 [C, T]
    logprobs: np.ndarray  # float32 [C, T - 1]; entry t is of token t + 1 given tokens up to t

    def __post_init__(self) -> None:
        if (
            self.tokens.dtype != np.int32
            or self.tokens.ndim != 2
            or self.tokens.shape[0] < 1
            or self.tokens.shape[1] < 2
        ):
            raise ValueError(f"canary tokens are {self.tokens.dtype} {self.tokens.shape}, not int32 [C >= 1, T >= 2]")
        expected = (self.tokens.shape[0], self.tokens.shape[1] - 1)
        if self.logprobs.dtype != np.float32 or self.logprobs.shape != expected:
            raise ValueError(f"canary logprobs are {self.logprobs.dtype} {self.logprobs.shape}, not float32 {expected}")
        if not np.isfinite(self.logprobs).all():
            raise ValueError("canary logprobs are not all finite: these weights are broken")


@dataclasses.dataclass(frozen=True, slots=True)
class Delta:
    """How a version follows from another, which is whole."""

    base: int  # number of that version
    base_digest: str  # of its manifest
    size_bytes: int  # of the delta's file
    digest: str  # of the delta's file

    def __post_init__(self) -> None:
        if self.base < 0 or self.size_bytes < 1 or not all(map(_DIGEST.fullmatch, (self.base_digest, self.digest))):
            raise ValueError(f"{self} describes no delta")


@dataclasses.dataclass(frozen=True, eq=False)
class Manifest:
    """A version as committed. Fields shared with `types.WeightVersion` mean the same here."""

    number: int
    parent: int | None
    line: int
    update: int
    leaves: tuple[Leaf, ...]  # sorted by name
    canary: Canary
    created_at: float  # unix seconds
    delta: Delta | None = None  # None: the version is whole

    def __post_init__(self) -> None:
        if min(self.number, self.line, self.update, self.parent or 0) < 0:
            raise ValueError(f"v{self.number}: number, parent, line and update are at least 0")
        check_names(self.leaves)

    def to_json(self) -> bytes:
        """The bytes of the manifest file."""
        fields: dict[str, Any] = {
            "format": FORMAT,
            "number": self.number,
            "parent": self.parent,
            "line": self.line,
            "update": self.update,
            "created_at": self.created_at,
            "canary": {"tokens": self.canary.tokens.tolist(), "logprobs": self.canary.logprobs.tolist()},
            "leaves": leaves_to_json(self.leaves),
        }
        if self.delta is not None:
            fields |= {"format": DELTA_FORMAT, "delta": dataclasses.asdict(self.delta)}
        return json.dumps(fields, allow_nan=False, separators=(",", ":")).encode()

    @classmethod
    def from_json(cls, data: bytes) -> Manifest:
        """The manifest that `to_json` wrote.

        Raises:
          WeightsMismatch: with reason "malformed", for anything else.
        """
        fields = parse_object(data, _FIELDS, optional={"delta": (dict,)})
        delta = fields.pop("delta", None)
        known = FORMAT if delta is None else DELTA_FORMAT
        if fields.pop("format") != known:
            raise WeightsMismatch("malformed", f"this reader knows formats {FORMAT} and {DELTA_FORMAT}, with a delta")
        canary = _object(fields.pop("canary"), {"tokens": (list,), "logprobs": (list,)})
        leaves = leaves_from_json(fields.pop("leaves"))
        try:
            tokens = _array(canary["tokens"], np.int32, "i", 0, 2**31 - 1)
            logprobs = _array(canary["logprobs"], np.float32, "fi", -1e30, 1e30)
            made = None if delta is None else Delta(**_object(delta, _DELTA_FIELDS))
            return cls(leaves=leaves, canary=Canary(tokens, logprobs), delta=made, **fields)
        except ValueError as error:
            raise WeightsMismatch("malformed", str(error)) from error


_FIELDS: dict[str, tuple[type, ...]] = {
    "format": (int,),
    "number": (int,),
    "parent": (int, type(None)),
    "line": (int,),
    "update": (int,),
    "created_at": (float, int),
    "canary": (dict,),
    "leaves": (list,),
}
_DELTA_FIELDS: dict[str, tuple[type, ...]] = {
    "base": (int,),
    "base_digest": (str,),
    "size_bytes": (int,),
    "digest": (str,),
}


def check_names(leaves: tuple[Leaf, ...]) -> None:
    """Raises ValueError unless there are leaves and their names are sorted and distinct."""
    names = [leaf.name for leaf in leaves]
    if not names or names != sorted(set(names)):
        raise ValueError(f"{len(names)} leaves: names must be distinct, sorted, and at least one")


def leaves_to_json(leaves: tuple[Leaf, ...]) -> list[dict[str, Any]]:
    """JSON-ready fields of every leaf."""
    return [dataclasses.asdict(leaf) for leaf in leaves]


def leaves_from_json(values: list[Any]) -> tuple[Leaf, ...]:
    """Raises WeightsMismatch, with reason "malformed", for what `leaves_to_json` did not write."""
    kinds = {"name": (str,), "shape": (list,), "dtype": (str,), "digest": (str,)}
    leaves = []
    for value in values:
        fields = _object(value, kinds)
        if any(type(dim) is not int for dim in fields["shape"]):
            raise WeightsMismatch("malformed", f"shape {str(fields['shape'])[:80]} is not a list of integers")
        try:
            leaves.append(Leaf(fields["name"], tuple(fields["shape"]), fields["dtype"], fields["digest"]))
        except ValueError as error:
            raise WeightsMismatch("malformed", str(error)) from error
    return tuple(leaves)


def parse_object(
    data: bytes, kinds: Mapping[str, tuple[type, ...]], optional: Mapping[str, tuple[type, ...]] | None = None
) -> dict[str, Any]:
    """A JSON object with the fields of `kinds`, perhaps those of `optional`, and no others, each of one of its types.

    Raises:
      WeightsMismatch: with reason "malformed", for anything else, repeated fields and NaN included.
    """

    def refuse_constant(name: str) -> None:
        raise ValueError(f"{name} is not JSON")

    def refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        if len({key for key, _ in pairs}) != len(pairs):
            raise ValueError("a field is repeated")
        return dict(pairs)

    if len(data) > MAX_MANIFEST_BYTES:
        raise WeightsMismatch("malformed", f"{len(data)} bytes, more than {MAX_MANIFEST_BYTES}")
    try:
        value = json.loads(data, parse_constant=refuse_constant, object_pairs_hook=refuse_repeats)
    except (ValueError, RecursionError) as error:
        raise WeightsMismatch("malformed", f"not JSON: {error}") from error
    present = {name: types for name, types in (optional or {}).items() if type(value) is dict and name in value}
    return _object(value, {**kinds, **present})


def _object(value: Any, kinds: Mapping[str, tuple[type, ...]]) -> dict[str, Any]:
    if type(value) is not dict or value.keys() != kinds.keys():
        raise WeightsMismatch("malformed", f"expected an object with fields {', '.join(kinds)}, got {str(value)[:80]}")
    for name, types in kinds.items():
        if type(value[name]) not in types:  # exact: a bool is not an int here
            raise WeightsMismatch("malformed", f"{name} is {str(value[name])[:80]}")
    return value


def _array(value: list[Any], dtype: type, kinds: str, low: float, high: float) -> np.ndarray:
    array = np.array(value)
    if array.dtype.kind not in kinds or array.size == 0:
        raise ValueError(f"an array of {array.size} {array.dtype} where {dtype.__name__} belongs")
    if not (low <= array.min() and array.max() <= high):
        raise ValueError(f"an array with values outside [{low}, {high}]")
    return array.astype(dtype)


def content_digest(manifest: Manifest) -> str:
    """Digest of the leaves alone: the same weights give the same value, whatever version carries them."""
    return leaves_digest(manifest.leaves)


def leaves_digest(leaves: tuple[Leaf, ...]) -> str:
    """`content_digest` of weights that no manifest describes yet; leaves sorted by name."""
    return digest(json.dumps(leaves_to_json(leaves), separators=(",", ":")).encode())


def check_canary(manifest: Manifest, logprobs: np.ndarray, tolerance: float) -> float:
    """Proves that the weights that made `logprobs` are the manifest's.

    Args:
      manifest: of the version that was loaded.
      logprobs: float [C, T - 1], of `manifest.canary.tokens`, from the engine's own weights and path.
      tolerance: largest difference allowed, in nats.

    Returns:
      The largest difference, in nats.

    Raises:
      WeightsMismatch: with reason "canary", when a difference is larger, or anything is not finite.
    """
    expected = manifest.canary.logprobs
    if logprobs.shape != expected.shape:
        raise WeightsMismatch("canary", f"v{manifest.number}: log-probs {logprobs.shape}, not {expected.shape}")
    worst = float(np.abs(logprobs.astype(np.float64) - expected).max())
    if not worst <= tolerance:  # written so that NaN fails
        raise WeightsMismatch(
            "canary", f"v{manifest.number}: log-probs differ by {worst:.3g} nats, more than {tolerance:g}"
        )
    return worst
