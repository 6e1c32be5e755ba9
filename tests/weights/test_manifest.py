import dataclasses
import json

import numpy as np
import pytest

from asyncrl_jax.weights.manifest import (
    Canary,
    Leaf,
    Manifest,
    WeightsMismatch,
    check_canary,
    content_digest,
    leaves_digest,
)


def make_manifest(params, canary, **changes) -> Manifest:
    leaves = tuple(Leaf.of(name, params[name]) for name in sorted(params))
    made = Manifest(number=3, parent=2, line=0, update=3, leaves=leaves, canary=canary, created_at=1764.25)
    return dataclasses.replace(made, **changes)


@pytest.fixture
def manifest(params, canary):
    return make_manifest(params, canary)


def test_json_gives_back_the_manifest_to_the_bit(manifest):
    back = Manifest.from_json(manifest.to_json())
    assert back.to_json() == manifest.to_json()
    assert back.leaves == manifest.leaves
    assert back.canary.tokens.dtype == np.int32
    np.testing.assert_array_equal(back.canary.logprobs, manifest.canary.logprobs, strict=True)


def changed(path, value):
    """A manifest's JSON fields with the one at `path` replaced, or removed when `value` is None."""

    def change(fields):
        node = fields
        for key in path[:-1]:
            node = node[key]
        node[path[-1]] = value
        return json.dumps(fields).encode()

    return change


HOSTILE = {
    "empty": lambda fields: b"",
    "not utf-8": lambda fields: b"\xff\xfe\x00",
    "truncated": lambda fields: json.dumps(fields).encode()[:-9],
    "a list": lambda fields: b"[]",
    "deep": lambda fields: b"[" * 200_000,
    "huge number": lambda fields: json.dumps(fields).replace('"update": 3', '"update": ' + "9" * 5000).encode(),
    "repeated field": lambda fields: json.dumps(fields).replace('"line"', '"number": 4, "line"').encode(),
    "missing field": lambda fields: json.dumps({k: v for k, v in fields.items() if k != "line"}).encode(),
    "unknown field": changed(["pickle"], "x"),
    "other format": changed(["format"], 2),
    "bool for a number": changed(["number"], True),
    "string for a number": changed(["number"], "3"),
    "fraction for a number": changed(["update"], 3.5),
    "negative number": changed(["number"], -1),
    "negative parent": changed(["parent"], -1),
    "NaN": changed(["created_at"], float("nan")),
    "no leaves": changed(["leaves"], []),
    "leaf that is not an object": changed(["leaves", 0], "x"),
    "path traversal": changed(["leaves", 0, "name"], "../../etc/passwd"),
    "absolute path": changed(["leaves", 0, "name"], "/etc/passwd"),
    "dot dot": changed(["leaves", 0, "name"], ".."),
    "empty name": changed(["leaves", 0, "name"], ""),
    "trailing newline in a name": changed(["leaves", 0, "name"], "lm_head.weight\n"),
    "repeated leaf": changed(["leaves", 1, "name"], "lm_head.weight"),
    "unsorted leaves": changed(["leaves", 0, "name"], "zzz"),
    "negative dimension": changed(["leaves", 0, "shape"], [-1, 4]),
    "impossible size": changed(["leaves", 0, "shape"], [2**40, 2**40]),
    "shape of strings": changed(["leaves", 0, "shape"], ["4"]),
    "object dtype": changed(["leaves", 0, "dtype"], "object"),
    "short digest": changed(["leaves", 0, "digest"], "00"),
    "digest of other letters": changed(["leaves", 0, "digest"], "z" * 32),
    "ragged canary": changed(["canary", "tokens"], [[1, 2, 3], [1, 2]]),
    "canary of strings": changed(["canary", "tokens"], [["1", "2"]]),
    "token beyond int32": changed(["canary", "tokens"], [[2**31] * 6] * 3),
    "token beyond int64": changed(["canary", "tokens"], [[2**70] * 6] * 3),
    "negative token": changed(["canary", "tokens"], [[-1] * 6] * 3),
    "fractional token": changed(["canary", "tokens"], [[0.5] * 6] * 3),
    "canary of another shape": changed(["canary", "logprobs"], [[-1.0] * 6] * 3),
    "infinite log-prob": changed(["canary", "logprobs"], [[-1e300] * 5] * 3),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_manifest_is_malformed(manifest, name):
    data = HOSTILE[name](json.loads(manifest.to_json()))
    with pytest.raises(WeightsMismatch) as caught:
        Manifest.from_json(data)
    assert caught.value.reason == "malformed"


def test_content_digest_is_of_the_weights_alone(params, canary, make):
    here = content_digest(make_manifest(params, canary))
    assert leaves_digest(tuple(Leaf.of(name, params[name]) for name in sorted(params))) == here
    assert content_digest(make_manifest(params, canary, number=9, parent=None, update=7, created_at=0.0)) == here
    one_bit = {name: array.copy() for name, array in params.items()}
    one_bit["lm_head.weight"].view(np.uint32)[0, 0] ^= 1
    assert content_digest(make_manifest(one_bit, canary)) != here


def test_leaf_digest_is_of_the_bytes_in_c_order():
    array = np.arange(12, dtype=np.float32).reshape(3, 4)
    assert Leaf.of("x", array) == Leaf.of("x", np.asfortranarray(array))
    assert Leaf.of("x", array[:, :3]).digest != Leaf.of("x", array[:, :3].T).digest


def test_leaf_that_cannot_be_stored_is_refused():
    for name, array in {"a/b": np.ones(1), "ok": np.array(["x"]), "empty": np.ones((0, 2))}.items():
        with pytest.raises(ValueError, match=name):
            Leaf.of(name, array)


def test_canary_passes_within_the_tolerance(manifest):
    shifted = manifest.canary.logprobs.astype(np.float64)
    shifted[1, 2] += 5e-4
    assert check_canary(manifest, shifted, 1e-3) == pytest.approx(5e-4)


@pytest.mark.parametrize("wrong", [2e-3, -2e-3, np.nan, np.inf, -np.inf])
def test_canary_fails_beyond_the_tolerance(manifest, wrong):
    shifted = manifest.canary.logprobs.astype(np.float64)
    shifted[1, 2] += wrong
    with pytest.raises(WeightsMismatch, match="v3") as caught:
        check_canary(manifest, shifted, 1e-3)
    assert caught.value.reason == "canary"


def test_canary_of_another_shape_fails(params, canary):
    flat = Canary(canary.tokens, np.full_like(canary.logprobs, -1.5))
    with pytest.raises(WeightsMismatch) as caught:
        check_canary(make_manifest(params, flat), flat.logprobs[:1], 1e-3)  # would broadcast to a perfect match
    assert caught.value.reason == "canary"


def test_broken_weights_make_no_canary(canary):
    logprobs = canary.logprobs.copy()
    logprobs[0, 0] = np.nan
    with pytest.raises(ValueError, match="not all finite"):
        Canary(canary.tokens, logprobs)
    with pytest.raises(ValueError, match="int32"):
        Canary(canary.tokens.astype(np.int64), canary.logprobs)
