"""Deltas: exact to the bit, refused when they do not fit, and versions like any other for who reads and keeps them."""

from __future__ import annotations

import json
import shutil

import ml_dtypes
import numpy as np
import orbax.checkpoint as ocp
import pytest

from asyncrl_jax.weights import delta
from asyncrl_jax.weights.manifest import Manifest, VersionGone, WeightsMismatch, content_digest, digest
from asyncrl_jax.weights.publish import VersionWriter, committed, publish, retain, sweep
from asyncrl_jax.weights.read import DELTA, MANIFEST, WeightsReader, describe, read, read_manifest


def bits(arrays) -> dict[str, bytes]:
    return {name: np.asarray(array).tobytes() for name, array in arrays.items()}


def copied(arrays) -> dict[str, np.ndarray]:
    return {name: np.array(array, copy=True) for name, array in arrays.items()}


def large(seed: int, dtype="bfloat16") -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {f"leaf_{i}": rng.normal(size=(64, 33 + i)).astype(dtype) for i in range(3)}


def nudged(arrays, share: float, seed: int = 0) -> dict[str, np.ndarray]:
    """A copy in which about `share` of the elements have moved by one unit in the last place, up or down."""
    rng = np.random.default_rng(seed)
    moved = copied(arrays)
    for array in moved.values():
        flat = array.reshape(-1).view(f"u{array.itemsize}")
        where = rng.random(flat.shape) < share
        flat[where] += rng.choice(np.array([1, -1]).astype(flat.dtype), where.sum())
    return moved


def pairs():
    rng = np.random.default_rng(0)
    arrays = large(0)
    yield "nothing", arrays, copied(arrays)
    yield "few", arrays, nudged(arrays, 0.02)
    yield "half", arrays, nudged(arrays, 0.5)
    yield "all", arrays, large(1)
    long = {"w": np.zeros(100_000, "float32")}
    for name, where in (("first and last", [0, 99_999]), ("far apart", [255, 256, 511, 767, 70_000]), ("254", [254])):
        new = copied(long)
        new["w"][where] = rng.normal(size=len(where))
        yield name, long, new
    odd = {"scalar": np.array(1.5, "float64"), "int": np.arange(9, dtype="int32"), "bool": np.zeros(5, bool)}
    yield "odd", odd, {"scalar": np.array(-0.0, "float64"), "int": -odd["int"], "bool": ~odd["bool"]}
    special = {"w": np.array([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, 3.0, 4.0], "float32")}
    yield "special", special, {"w": special["w"][::-1].copy()}
    payload = special["w"].copy()
    payload.view("u4")[0] ^= 1  # another NaN
    yield "one bit of a NaN", special, {"w": payload}


@pytest.mark.parametrize(("base", "new"), [pair[1:] for pair in pairs()], ids=[pair[0] for pair in pairs()])
def test_a_delta_is_exact_to_the_bit_and_can_be_taken_back(base, new):
    encoded = delta.encode(base, new)
    arrays = copied(base)
    done = delta.apply(encoded, arrays)
    assert bits(arrays) == bits(new)
    delta.undo(done)
    assert bits(arrays) == bits(base)


def test_a_small_step_takes_a_small_part_of_the_bytes():
    rng = np.random.default_rng(0)
    master = rng.normal(size=400_000).astype(np.float32) * np.float32(0.02)
    base = {"w": master.astype(ml_dtypes.bfloat16)}
    master += np.float32(1e-6) * np.sign(rng.normal(size=master.shape)).astype(np.float32)
    new = {"w": master.astype(ml_dtypes.bfloat16)}
    assert bits(new) != bits(base)
    assert len(delta.encode(base, new)) * 5 < base["w"].nbytes


def test_other_leaves_have_no_delta():
    base = large(0)
    for other in (base | {"x": base["leaf_0"]}, {n: a.T.copy() for n, a in base.items()}, large(0, "float16")):
        assert delta.encode(base, other) is None


def test_a_delta_that_does_not_fit_is_named():
    base = large(0)
    encoded = delta.encode(base, nudged(base, 0.1))
    smaller = {name: array[:2].copy() for name, array in base.items()}
    for data, arrays in (
        (encoded[:-1], base),
        (encoded + b"x", base),
        (encoded, {}),
        (encoded, smaller),
        (b"", base),
        (b"\0" * 8 + encoded[8:], base),
        (delta.encode(base, large(1)), smaller),
    ):
        with pytest.raises(WeightsMismatch, match="delta: it does not fit"):
            delta.apply(data, copied(arrays))


@pytest.fixture
def line(tmp_path, canary):
    """(directory, arrays by number, versions by number): v1 whole, v2 and v3 deltas on it, v4 whole, v5 on v4."""
    arrays = {1: large(1)}
    arrays[2] = nudged(arrays[1], 0.02, seed=2)
    arrays[3] = nudged(arrays[2], 0.02, seed=3)
    arrays[4] = large(4)
    arrays[5] = nudged(arrays[4], 0.02, seed=5)
    writer = VersionWriter(tmp_path, deltas=True)
    versions = {
        number: writer.publish(arrays[number], number=number, parent=None, line=0, update=number, canary=canary)
        for number in arrays
    }
    return tmp_path, arrays, versions


def test_a_delta_is_on_the_last_whole_version_and_a_whole_one_comes_when_it_does_not_pay(line):
    directory, arrays, versions = line
    bases = {number: read_manifest(directory, number).delta for number in versions}
    assert {number: how and how.base for number, how in bases.items()} == {1: None, 2: 1, 3: 1, 4: None, 5: 4}
    for number in (1, 4):
        with ocp.PyTreeCheckpointer() as checkpointer:
            restored = checkpointer.restore(directory / f"v{number:06d}")
        assert bits(restored) == bits(arrays[number])
    assert [path.name for path in sorted((directory / "v000003").iterdir())] == [DELTA, MANIFEST]
    assert describe(directory, 3) == versions[3]


@pytest.mark.parametrize("order", [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1], [3], [2, 3, 2, 5, 3], [3, 1, 3, 4, 3]])
def test_readers_get_every_version_to_the_bit_in_any_order(line, order):
    directory, arrays, versions = line
    reader = WeightsReader(directory)
    for number in order:
        manifest, found = reader.read(versions[number])
        assert bits(found) == bits(arrays[number])
        assert manifest.number == number
        assert bits(read(directory, versions[number])[1]) == bits(arrays[number])


def test_a_reader_that_has_the_base_reads_the_delta_alone(line):
    directory, arrays, versions = line
    reader = WeightsReader(directory)
    reader.read(versions[1])
    shutil.rmtree(directory / "v000001")
    for number in (2, 3):
        assert bits(reader.read(versions[number])[1]) == bits(arrays[number])
    with pytest.raises(VersionGone, match="v1"):
        WeightsReader(directory).read(versions[2])


def test_wgt_01_a_reader_goes_on_after_a_version_that_it_refused(line):
    directory, arrays, versions = line
    reader = WeightsReader(directory)
    reader.read(versions[1])
    path = directory / "v000002" / DELTA
    data = path.read_bytes()
    for damage, reason in ((data[:-1], "checksum"), (data[:-1] + b"\0", "checksum"), (None, "unreadable")):
        path.unlink()
        if damage is not None:
            path.write_bytes(damage)
        with pytest.raises(WeightsMismatch) as caught:
            reader.read(versions[2])
        assert caught.value.reason == reason
        path.write_bytes(data)
    assert bits(reader.read(versions[2])[1]) == bits(arrays[2])
    assert bits(reader.read(versions[1])[1]) == bits(arrays[1])


def test_memory_that_went_wrong_under_a_reader_is_found_and_read_anew(line):
    directory, arrays, versions = line
    reader = WeightsReader(directory)
    _, found = reader.read(versions[1])
    found["leaf_0"][0, 0] = 7  # what a caller must not do
    with pytest.raises(WeightsMismatch, match="leaf_0"):
        reader.read(versions[2])
    assert bits(reader.read(versions[2])[1]) == bits(arrays[2])


def forged(directory, version, **changes):
    """The version announced with another manifest: (directory, version)."""
    path = directory / f"v{version.number:06d}" / MANIFEST
    fields = json.loads(path.read_bytes())
    fields["delta"] |= changes
    path.write_bytes(json.dumps(fields).encode())
    return describe(directory, version.number)


def test_a_chain_of_deltas_is_refused(line):
    directory, _, versions = line
    with pytest.raises(WeightsMismatch, match="which is one itself"):
        read(directory, forged(directory, versions[3], base=2, base_digest=versions[2].manifest_digest))


def test_a_delta_on_another_base_is_refused(line):
    directory, _, versions = line
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, forged(directory, versions[3], base=4, base_digest=versions[4].manifest_digest))
    assert caught.value.reason == "checksum"
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, forged(directory, versions[3], base=1))
    assert caught.value.reason == "manifest_digest"


@pytest.mark.parametrize("changes", [{"base": -1}, {"digest": "x"}, {"base": "1"}, {"size_bytes": 0}, {"more": 1}])
def test_a_malformed_delta_of_a_manifest_is_named(line, changes):
    directory, _, versions = line
    with pytest.raises(WeightsMismatch) as caught:
        forged(directory, versions[3], **changes)
    assert caught.value.reason == "malformed"


def test_a_manifest_with_a_delta_is_written_and_read_alike(line):
    directory, _, _ = line
    data = (directory / "v000003" / MANIFEST).read_bytes()
    assert Manifest.from_json(data).to_json() == data
    fields = json.loads(data)
    for wrong in ({"format": 1}, {"format": 3}):  # format 1 has no delta: readers of the first release refuse it
        with pytest.raises(WeightsMismatch, match="malformed"):
            Manifest.from_json(json.dumps(fields | wrong).encode())


def test_retention_keeps_the_base_of_what_it_keeps(line):
    directory, arrays, versions = line
    assert retain(directory, keep=1, protected={3}) == [2]  # v1 is the base of v3, v4 of v5
    assert bits(read(directory, versions[3])[1]) == bits(arrays[3])
    assert bits(read(directory, versions[5])[1]) == bits(arrays[5])
    assert retain(directory, keep=1, protected=set()) == [1, 3]
    assert committed(directory) == [4, 5]


def test_the_sweep_keeps_the_base_of_what_was_announced(line):
    directory, arrays, versions = line
    assert sweep(directory, announced=[2]) == ["v000003", "v000004", "v000005"]
    assert bits(read(directory, versions[2])[1]) == bits(arrays[2])


def test_a_writer_whose_base_is_gone_writes_a_whole_version(tmp_path, canary):
    writer = VersionWriter(tmp_path, deltas=True)
    arrays = large(0)
    for number, gone in ((1, False), (2, True), (3, False)):
        if gone:
            shutil.rmtree(tmp_path / "v000001")
        version = writer.publish(
            nudged(arrays, 0.02, number), number=number, parent=None, line=0, update=0, canary=canary
        )
        how = read_manifest(tmp_path, number).delta
        assert (how and how.base) == {1: None, 2: None, 3: 2}[number]
        read(tmp_path, version)


def test_a_new_writer_begins_with_a_whole_version(tmp_path, canary):
    for number in (1, 2):
        VersionWriter(tmp_path, deltas=True).publish(
            large(0), number=number, parent=None, line=0, update=0, canary=canary
        )
        assert read_manifest(tmp_path, number).delta is None


def test_the_same_weights_have_one_content_digest_however_they_are_written(line, tmp_path, canary):
    directory, arrays, versions = line
    whole = publish(tmp_path / "whole", arrays[3], number=3, parent=None, line=0, update=3, canary=canary)
    assert content_digest(read_manifest(tmp_path / "whole", 3)) == content_digest(read_manifest(directory, 3))
    assert whole.manifest_digest != versions[3].manifest_digest
    republished = VersionWriter(directory, deltas=False).publish(
        arrays[3], number=3, parent=None, line=0, update=3, canary=canary
    )
    assert republished == versions[3]  # as after a crash between commit and announcement


def test_wgt_13_a_hundred_deltas_are_bit_identical(tmp_path, canary):
    writer, reader = VersionWriter(tmp_path, deltas=True), WeightsReader(tmp_path)
    arrays, deltas = large(0), 0
    for number in range(100):
        arrays = nudged(arrays, 0.02, number)
        version = writer.publish(arrays, number=number, parent=None, line=0, update=number, canary=canary)
        manifest, found = reader.read(version)
        assert bits(found) == bits(arrays)
        deltas += manifest.delta is not None
        retain(tmp_path, keep=2, protected=set())
    assert 50 < deltas < 100
    assert digest(b"") != content_digest(manifest)


def test_readers_keep_their_memory(line):
    directory, _, versions = line
    reader = WeightsReader(directory)
    first = reader.read(versions[1])[1]
    second = reader.read(versions[4])[1]
    assert all(np.shares_memory(first[name], second[name]) for name in first)
    assert not np.shares_memory(read(directory, versions[1])[1]["leaf_0"], read(directory, versions[1])[1]["leaf_0"])
