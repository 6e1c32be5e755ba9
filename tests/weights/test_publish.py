import os
import pathlib
import resource
import runpy
import shutil
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from asyncrl_jax.weights.manifest import VersionGone, content_digest
from asyncrl_jax.weights.publish import VersionWriter, committed, publish, retain, sweep
from asyncrl_jax.weights.read import MANIFEST, describe, read, read_manifest
from asyncrl_jax.weights.save import host_copy

KILLED_PUBLISHER = pathlib.Path(__file__).with_name("killed_publisher.py")


def same(arrays, params) -> bool:
    return arrays.keys() == params.keys() and all(
        arrays[name].dtype == array.dtype and arrays[name].tobytes() == np.asarray(array).tobytes()
        for name, array in params.items()
    )


def publish_line(directory, params, canary, numbers):
    return [
        publish(directory, params, number=n, parent=n - 1 if n else None, line=0, update=n, canary=canary)
        for n in numbers
    ]


def test_wgt_13_a_hundred_round_trips_are_bit_identical(tmp_path, params, canary):
    arrays, contents = params, set()
    for number in range(100):
        version = publish(tmp_path, arrays, number=number, parent=None, line=0, update=number, canary=canary)
        manifest, arrays = read(tmp_path, version)
        contents.add(content_digest(manifest))
        retain(tmp_path, keep=2, protected=set())
    assert same(arrays, params)
    assert len(contents) == 1


def test_a_version_is_an_orbax_checkpoint(tmp_path, params, canary):
    publish_line(tmp_path, params, canary, [0])
    with ocp.PyTreeCheckpointer() as checkpointer:
        restored = checkpointer.restore(tmp_path / "v000000")
    assert same({name: np.asarray(array) for name, array in restored.items()}, params)


def test_jax_arrays_and_host_copies_publish_the_same(tmp_path, params, canary):
    on_device = jax.tree.map(jnp.asarray, params)
    publish_line(tmp_path / "device", on_device, canary, [0])
    publish_line(tmp_path / "host", host_copy(on_device), canary, [0])
    one, other = (read_manifest(tmp_path / where, 0) for where in ("device", "host"))
    assert one.leaves == other.leaves


def test_host_copy_neither_hinders_donation_nor_suffers_from_it():
    step = jax.jit(lambda x: x + 1, donate_argnums=0)
    x = jnp.zeros((1024, 64))
    copy = host_copy({"x": x})
    step(x).block_until_ready()
    assert x.is_deleted()  # donated: a view on its buffer would have made the step allocate another
    assert isinstance(copy["x"], np.ndarray)
    assert not copy["x"].any()


def test_committed_versions_never_change(tmp_path, params, canary, make):
    version = publish_line(tmp_path, params, canary, [0])[0]
    before = (tmp_path / "v000000" / MANIFEST).read_bytes()
    assert publish_line(tmp_path, params, canary, [0])[0] == version  # after a crash between commit and announcement
    for change in ({"params": make(1)}, {"line": 1}, {"update": 2}, {"parent": 0}):
        arguments = {"params": params, "number": 0, "parent": None, "line": 0, "update": 0, "canary": canary} | change
        with pytest.raises(ValueError, match="numbers never repeat"):
            publish(tmp_path, **arguments)
    assert (tmp_path / "v000000" / MANIFEST).read_bytes() == before
    read(tmp_path, version)


def test_a_leaf_that_cannot_be_stored_leaves_nothing(tmp_path, canary):
    for bad in ({"a/b": np.ones(1)}, {"x": np.ones((0, 2))}, {}):
        with pytest.raises(ValueError, match=r"leaf|leaves"):
            publish_line(tmp_path, bad, canary, [0])
    assert list(tmp_path.iterdir()) == []


def test_directories_with_odd_names_work(tmp_path, params, canary, monkeypatch):
    monkeypatch.chdir(tmp_path)
    version = publish_line("run é%20 #1?", params, canary, [0])[0]  # relative, and nothing that is safe in a URL
    assert same(read(tmp_path / "run é%20 #1?", version)[1], params)


@pytest.mark.parametrize(("how", "least"), [("whole", 10), ("delta", 4)])
def test_wgt_01_a_publisher_killed_anywhere_leaves_the_old_version_or_the_new(tmp_path, how, least):
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-W", "ignore", KILLED_PUBLISHER, tmp_path, how]
    subprocess.run(command, check=True, timeout=100, env=environment)
    script = runpy.run_path(str(KILLED_PUBLISHER))
    old, new = (script["params"](number, near=how == "delta") for number in (0, 1))
    outcomes = {"old": 0, "new": 0}
    for directory in tmp_path.iterdir():
        assert same(read(directory, describe(directory, 0))[1], old)
        try:
            version = describe(directory, 1)
            outcomes["new"] += 1
        except VersionGone:
            outcomes["old"] += 1
        else:
            assert same(read(directory, version)[1], new)
            assert (read_manifest(directory, 1).delta is not None) == (how == "delta")
        writer = VersionWriter(directory, deltas=False)
        script["write"](writer, 1, near=how == "delta")  # the restarted publisher needs no help
        assert same(read(directory, describe(directory, 1))[1], new)
        sweep(directory)
        assert sorted(os.listdir(directory)) == ["v000000", "v000001"]
        assert not list(directory.rglob("*tmp*"))
    assert outcomes["old"] >= least  # killed at that many distinct moments before the commit
    assert outcomes["new"] >= 1


def test_wgt_01_a_leftover_of_the_same_number_is_replaced_whole(tmp_path, params, canary):
    fewer = {"lm_head.weight": params["lm_head.weight"]}
    publish_line(tmp_path, params, canary, [0])
    (tmp_path / "v000000" / MANIFEST).unlink()
    (tmp_path / "v000000" / "d" / "stray").write_bytes(b"from the killed writer")
    shutil.copytree(tmp_path / "v000000", tmp_path / "v000000.orbax-checkpoint-tmp")
    version = publish_line(tmp_path, fewer, canary, [0])[0]
    assert same(read(tmp_path, version)[1], fewer)
    assert os.listdir(tmp_path) == ["v000000"]
    assert not list(tmp_path.rglob("stray"))


def test_sweep_deletes_leftovers_and_what_was_never_announced(tmp_path, params, canary):
    publish_line(tmp_path, params, canary, range(4))
    (tmp_path / "v000002" / MANIFEST).unlink()
    (tmp_path / "v000009.orbax-checkpoint-tmp").mkdir()
    (tmp_path / "notes").mkdir()
    (tmp_path / "v1.txt").write_text("mine")
    assert sweep(tmp_path) == ["v000002", "v000009.orbax-checkpoint-tmp"]
    assert committed(tmp_path) == [0, 1, 3]
    assert sweep(tmp_path, announced={0, 1}) == ["v000003"]
    assert committed(tmp_path) == [0, 1]
    assert sorted(os.listdir(tmp_path)) == ["notes", "v000000", "v000001", "v1.txt"]
    assert sweep(tmp_path / "absent") == []


def test_every_file_is_durable_before_the_manifest_appears(tmp_path, params, canary, monkeypatch):
    events = []
    fsync, replace = os.fsync, os.replace

    def record_fsync(descriptor):
        fsync(descriptor)
        events.append(("sync", os.readlink(f"/proc/self/fd/{descriptor}")))

    def record_replace(source, target):
        replace(source, target)
        events.append(("replace", str(target)))

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(os, "replace", record_replace)
    publish_line(tmp_path, params, canary, [0])
    version = tmp_path / "v000000"
    commit = events.index(("replace", str(version / MANIFEST)))
    before = {path for kind, path in events[:commit] if kind == "sync"}
    data = {str(path) for path in version.rglob("*")} - {str(version / MANIFEST)}
    assert before >= data | {str(version), str(version / MANIFEST) + ".tmp"}
    after = {path for kind, path in events[commit:] if kind == "sync"}
    assert after == {str(version), str(tmp_path)}


def test_a_manifest_too_large_for_readers_is_not_published(tmp_path, params, canary, monkeypatch):
    monkeypatch.setattr("asyncrl_jax.weights.save.MAX_MANIFEST_BYTES", 100)
    with pytest.raises(ValueError, match="more than 100"):
        publish_line(tmp_path, params, canary, [0])
    assert committed(tmp_path) == []


def test_retention_spares_v0_and_leased_versions(tmp_path, params, canary):
    small = {"x": params["model.norm.weight"]}
    versions = publish_line(tmp_path, small, canary, range(7))
    assert retain(tmp_path, keep=2, protected={1, 3}) == [2, 4]
    assert committed(tmp_path) == [0, 1, 3, 5, 6]
    assert same(read(tmp_path, versions[3])[1], small)
    assert retain(tmp_path, keep=2, protected={1}) == [3]  # its lease is over
    assert retain(tmp_path, keep=9, protected=set()) == []
    with pytest.raises(VersionGone):
        read(tmp_path, versions[3])
    with pytest.raises(ValueError, match="keep=0"):
        retain(tmp_path, keep=0, protected=set())


def test_retention_takes_the_manifest_first(tmp_path, params, canary, monkeypatch):
    versions = publish_line(tmp_path, params, canary, [1, 2])
    monkeypatch.setattr(type(tmp_path / "x"), "rmdir", lambda self: None)  # the rest of the deletion never comes
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)
    retain(tmp_path, keep=1, protected=set())
    assert (tmp_path / "v000001").exists()
    with pytest.raises(VersionGone):
        read(tmp_path, versions[0])
    assert committed(tmp_path) == [2]


def test_a_full_disk_is_one_clear_error_and_harms_nothing(tmp_path, params, canary):
    version = publish_line(tmp_path, params, canary, [0])[0]
    big = {"x": np.random.default_rng(0).normal(size=2**18)}
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2**19, hard))  # a write past it fails as one on a full disk does
    try:
        with pytest.raises(RuntimeError, match=r"cannot write .*/v000001: "):
            publish_line(tmp_path, big, canary, [1])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert os.listdir(tmp_path) == ["v000000"]
    assert same(read(tmp_path, version)[1], params)
    publish_line(tmp_path, big, canary, [1])


def test_publishers_of_two_directories_run_beside_a_donating_step(tmp_path, make, canary):
    failures = []

    def keep_publishing(where):
        try:
            for number in range(6):
                version = publish_line(tmp_path / where, make(number), canary, [number])[0]
                assert same(read(tmp_path / where, version)[1], make(number))
        except BaseException as error:
            failures.append(error)
            raise

    threads = [threading.Thread(target=keep_publishing, args=(where,)) for where in ("a", "b")]
    for thread in threads:
        thread.start()
    step = jax.jit(lambda x: x * 1.5, donate_argnums=0)
    x = jnp.ones((64, 64))
    while any(thread.is_alive() for thread in threads):
        x = step(x) / 1.5
    for thread in threads:
        thread.join()
    assert not failures
