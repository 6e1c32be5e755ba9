import dataclasses
import json
import os
import shutil
import subprocess
import sys
import threading

import numpy as np
import pytest
import tensorstore as ts

from asyncrl_jax.weights import commit
from asyncrl_jax.weights.manifest import VersionGone, WeightsMismatch, digest
from asyncrl_jax.weights.publish import publish, retain
from asyncrl_jax.weights.read import MANIFEST, describe, read, read_manifest, version_path


@pytest.fixture
def published(tmp_path, params, canary):
    """(directory, version) of v0."""
    directory = tmp_path / "weights"
    return directory, publish(directory, params, number=0, parent=None, line=0, update=0, canary=canary)


def test_reader_gets_what_was_published_to_the_bit(published, params, canary):
    manifest, arrays = read(*published)
    assert arrays.keys() == params.keys()
    for name, array in params.items():
        assert (arrays[name].dtype, arrays[name].shape) == (array.dtype, array.shape)
        assert arrays[name].tobytes() == array.tobytes()
    np.testing.assert_array_equal(manifest.canary.logprobs, canary.logprobs)
    assert read_manifest(published[0], 0).to_json() == manifest.to_json()


def test_a_committed_version_is_described_as_it_was_published(tmp_path, params, canary):
    version = publish(tmp_path, params, number=9, parent=4, line=2, update=6, canary=canary)
    assert describe(tmp_path, 9) == version
    with pytest.raises(VersionGone):
        describe(tmp_path, 4)


@pytest.mark.parametrize("bucket", ["gs://bucket", "s3://bucket"])
def test_tensorstore_understands_the_urls_of_object_stores(bucket):
    path = version_path(commit.root_path(f"{bucket}/runs/7/weights"), 3)
    spec = ts.KvStore.Spec({"driver": "ocdbt", "base": commit.url(path)})
    assert spec.base.url == f"{bucket}/runs/7/weights/v000003/"
    assert not commit.is_local(path)


def rename(params):
    params["renamed"] = params.pop("lm_head.weight")


def drop(params):
    del params["lm_head.weight"]


def add(params):
    params["added"] = np.ones(3, np.float32)


def transpose_square(params):
    name = "model.layers.0.self_attn.q_proj.weight"
    params[name] = params[name].T.copy()


def transpose_oblong(params):
    params["lm_head.weight"] = params["lm_head.weight"].T.copy()


def permute_experts(params):
    name = "model.layers.0.mlp.experts.down_proj"
    params[name] = params[name][[1, 0, 2, 3]]


def cast(params):
    params["lm_head.weight"] = params["lm_head.weight"].astype("bfloat16")


MUTATIONS = [
    (rename, "leaves"),
    (drop, "leaves"),
    (add, "leaves"),
    (transpose_oblong, "shape"),
    (cast, "dtype"),
    (transpose_square, "checksum"),
    (permute_experts, "checksum"),
]


@pytest.mark.parametrize(("mutate", "reason"), MUTATIONS)
def test_wgt_07_other_leaves_than_announced_are_refused(published, params, canary, tmp_path, mutate, reason):
    directory, version = published
    mutate(params)
    publish(tmp_path / "other", params, number=0, parent=None, line=0, update=0, canary=canary)
    announced = (directory / "v000000" / MANIFEST).read_bytes()
    shutil.rmtree(directory / "v000000")
    shutil.copytree(tmp_path / "other" / "v000000", directory / "v000000")
    (directory / "v000000" / MANIFEST).write_bytes(announced)
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, version)
    assert caught.value.reason == reason


def test_a_flipped_bit_anywhere_in_the_weights_is_caught(published, params):
    directory, version = published
    needle = params["model.layers.0.mlp.experts.down_proj"].tobytes()
    holding = [path for path in directory.rglob("d/*") if needle in path.read_bytes()]
    assert holding  # stored uncompressed, so the very bytes can be found and hit
    data = holding[0].read_bytes()
    for offset in (0, len(needle) // 2, len(needle) - 1):
        at = data.index(needle) + offset
        holding[0].write_bytes(data[:at] + bytes([data[at] ^ 0x10]) + data[at + 1 :])
        with pytest.raises(WeightsMismatch) as caught:
            read(directory, version)
        assert caught.value.reason == "checksum"
        assert "down_proj" in str(caught.value)


@pytest.mark.parametrize("damage", ["truncate", "delete", "garbage"])
def test_any_damaged_data_file_is_caught_or_harmless(published, params, damage):
    directory, version = published
    files = [path for path in directory.rglob("*") if path.is_file() and path.name != MANIFEST]
    refused = 0
    for path in files:
        data = path.read_bytes()
        if damage == "delete":
            path.unlink()
        else:
            path.write_bytes(data[: len(data) // 2] if damage == "truncate" else bytes(255 - byte for byte in data))
        try:
            _, arrays = read(directory, version)
        except WeightsMismatch:
            refused += 1
        else:  # a file that Orbax alone reads
            assert all(arrays[name].tobytes() == array.tobytes() for name, array in params.items())
        path.write_bytes(data)
    assert refused >= 3
    read(directory, version)


def test_only_the_announced_manifest_is_believed(published):
    directory, version = published
    path = directory / "v000000" / MANIFEST
    path.write_bytes(path.read_bytes() + b" ")  # the same JSON
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, version)
    assert caught.value.reason == "manifest_digest"


@pytest.mark.parametrize("change", [{"update": 1}, {"line": 1}, {"parent": 0}])
def test_an_announcement_that_disagrees_with_its_manifest_is_refused(published, change):
    directory, version = published
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, dataclasses.replace(version, **change))
    assert caught.value.reason == "version"


def test_a_manifest_of_another_number_is_refused(published):
    directory, version = published
    shutil.copytree(directory / "v000000", directory / "v000005")
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, dataclasses.replace(version, number=5))
    assert caught.value.reason == "version"


def test_an_oversized_manifest_is_not_read(published, monkeypatch):
    directory, version = published
    monkeypatch.setattr("asyncrl_jax.weights.read.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(WeightsMismatch, match="more than 100"):
        read(directory, version)


def test_a_hostile_manifest_that_was_announced_is_malformed(published):
    directory, version = published
    path = directory / "v000000" / MANIFEST
    fields = json.loads(path.read_bytes())
    fields["leaves"][0]["name"] = "../../secret"
    data = json.dumps(fields).encode()
    path.write_bytes(data)
    with pytest.raises(WeightsMismatch) as caught:
        read(directory, dataclasses.replace(version, manifest_digest=digest(data)))
    assert caught.value.reason == "malformed"


def test_a_version_that_is_not_there_is_gone(published):
    directory, version = published
    with pytest.raises(VersionGone, match="v7"):
        read(directory, dataclasses.replace(version, number=7))
    with pytest.raises(VersionGone):
        read_manifest(directory, 7)


def test_wgt_01_data_without_a_manifest_is_not_a_version(published):
    directory, version = published
    (directory / "v000000" / MANIFEST).unlink()
    with pytest.raises(VersionGone):
        read(directory, version)


def test_wgt_01_a_version_deleted_under_a_slow_reader_is_gone_not_wrong(tmp_path, make, canary):
    """Readers race a publisher that keeps one version: each read is whole and right, or says that it is gone."""
    directory, announced, stop = tmp_path / "weights", [], threading.Event()
    outcomes = {"whole": 0, "gone": 0}
    failures = []

    def keep_reading():
        while not stop.is_set():
            for version in announced[-3:]:
                try:
                    _, arrays = read(directory, version)
                except VersionGone:
                    outcomes["gone"] += 1
                    continue
                except WeightsMismatch as error:  # handed to the main thread
                    failures.append(error)
                    return
                outcomes["whole"] += 1
                expected = make(version.number)
                if any(arrays[name].tobytes() != expected[name].tobytes() for name in expected):
                    failures.append(AssertionError(f"v{version.number} is torn"))

    readers = [threading.Thread(target=keep_reading) for _ in range(2)]
    for reader in readers:
        reader.start()
    for number in range(1, 13):
        announced.append(
            publish(directory, make(number), number=number, parent=None, line=0, update=number, canary=canary)
        )
        retain(directory, keep=1, protected=set())
    stop.set()
    for reader in readers:
        reader.join()
    assert not failures, failures
    assert min(outcomes.values()) > 0, outcomes


def test_a_store_that_does_not_answer_is_named(published):
    with pytest.raises(TimeoutError, match=r"v000000: no answer from the store within 0 s"):
        read(*published, timeout_s=0)


def test_reading_imports_no_jax(published):
    directory, version = published
    code = f"""
import sys
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.read import read
read({str(directory)!r}, {version!r})
print([name for name in sys.modules if name.split(".")[0] in ("jax", "jaxlib", "orbax", "flax", "tensorflow")])
"""
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60, env=environment
    )
    assert done.stdout.strip() == "[]"
