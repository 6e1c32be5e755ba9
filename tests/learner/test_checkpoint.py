import os
import pathlib
import resource
import runpy
import subprocess
import sys
import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from asyncrl_jax.learner import checkpoint
from asyncrl_jax.learner.checkpoint import CheckpointFailed, Checkpoints
from asyncrl_jax.weights import save
from asyncrl_jax.weights.manifest import WeightsMismatch

KILLED_SAVER = pathlib.Path(__file__).with_name("killed_saver.py")
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}


@pytest.fixture(autouse=True)
def _no_rank_promotion():
    with jax.numpy_rank_promotion("raise"):
        yield


@pytest.fixture
def checkpoints(tmp_path):
    opened = Checkpoints(tmp_path / "checkpoints", keep=2)
    yield opened
    opened.close()


def save_now(checkpoints, step, tree, meta=None):
    checkpoints.save(step, tree, meta or {})
    checkpoints.wait()


def bits(tree):
    """Every leaf as (dtype, shape, bytes); of a random key its data."""

    def of(leaf):
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            return str(leaf.dtype), leaf.shape, np.asarray(jax.random.key_data(leaf)).tobytes()
        return str(leaf.dtype), leaf.shape, np.asarray(leaf).tobytes()

    return jax.tree.map(of, tree)


def make_trainer():
    """(initial state, donating jitted step): noisy regression with AdamW and a schedule."""
    optimizer = optax.adamw(optax.linear_schedule(1e-2, 1e-3, 6))

    def init():
        params = {"w": jnp.ones((8, 4)), "b": jnp.zeros(4)}
        return {"params": params, "optimizer": optimizer.init(params), "key": jax.random.key(7), "update": jnp.int32(0)}

    def step(state):
        key, noise_key = jax.random.split(state["key"])
        x = jax.random.normal(noise_key, (16, 8))

        def loss(params):
            return jnp.mean((x @ params["w"] + params["b"][None] - 1.0) ** 2)

        updates, optimizer_state = optimizer.update(
            jax.grad(loss)(state["params"]), state["optimizer"], state["params"]
        )
        params = optax.apply_updates(state["params"], updates)
        return {"params": params, "optimizer": optimizer_state, "key": key, "update": state["update"] + 1}

    return init, jax.jit(step, donate_argnums=0)


def test_ckpt_05_a_resumed_run_is_bit_equal_to_an_uninterrupted_one(checkpoints, tmp_path):
    init, step = make_trainer()
    state = init()
    for _ in range(3):
        state = step(state)
    checkpoints.save(3, state, {"cursor": 12})
    for _ in range(3):
        state = step(state)  # donates what is being saved

    like = jax.eval_shape(init)
    resumed, meta = Checkpoints(tmp_path / "checkpoints", keep=2), None
    checkpoints.wait()
    again, meta = resumed.restore(None, like)
    assert jax.tree.structure(again) == jax.tree.structure(state)
    assert int(again["update"]) == 3
    for _ in range(3):
        again = step(again)
    assert bits(again) == bits(state)
    assert meta == {"cursor": 12}


@pytest.mark.parametrize("kind", ["threefry2x32", "rbg"])
def test_ckpt_05_typed_random_keys_round_trip(checkpoints, kind):
    tree = {"one": jax.random.key(3, impl=kind), "many": jax.random.split(jax.random.key(4, impl=kind), 5)}
    save_now(checkpoints, 1, tree)
    restored, _ = checkpoints.restore(1, tree)
    assert restored["many"].shape == (5,)
    assert bits(restored) == bits(tree)
    other = {"one": jax.random.key(3, impl="unsafe_rbg"), "many": tree["many"]}
    with pytest.raises(WeightsMismatch, match="one was saved as key"):
        checkpoints.restore(1, other)


def test_wgt_12_masters_stay_fp32_and_nothing_is_cast(checkpoints):
    step = jax.jit(lambda w: w - jnp.asarray(1e-3, w.dtype))
    fp32, bf16 = jnp.float32(1), jnp.bfloat16(1)
    for update in range(1, 101):
        fp32, bf16 = step(fp32), step(bf16)
        if update % 50 == 0:
            save_now(checkpoints, update, {"w": fp32, "half": bf16})
            restored, _ = checkpoints.restore(update, {"w": fp32, "half": bf16})
            fp32, bf16 = restored["w"], restored["half"]
    assert fp32.dtype == jnp.float32
    assert float(fp32) == pytest.approx(0.9, abs=1e-5)
    assert (bf16.dtype, float(bf16)) == (jnp.bfloat16, 1.0)  # why masters are fp32
    for wrong in ({"w": bf16, "half": bf16}, {"w": fp32, "half": fp32}):
        with pytest.raises(WeightsMismatch, match="nothing is cast"):
            checkpoints.restore(100, wrong)


def test_ckpt_07_killed_at_any_moment_the_last_durable_step_is_whole(tmp_path):
    subprocess.run(
        [sys.executable, "-W", "ignore", KILLED_SAVER, tmp_path, "0"], check=True, timeout=100, env=ENVIRONMENT
    )
    tree = runpy.run_path(str(KILLED_SAVER))["tree"]
    unfinished = 0
    for directory in tmp_path.iterdir():
        told = int((directory / "durable").read_text().split()[-1])
        checkpoints = Checkpoints(directory / "checkpoints", keep=1)
        step = checkpoints.latest()
        assert told <= step <= told + 1
        restored, meta = checkpoints.restore(None, tree(0))
        assert meta == {"step": step}
        assert bits(restored) == bits(tree(step))
        unfinished += len(os.listdir(directory / "checkpoints")) > 1
        save_now(checkpoints, step + 1, tree(step + 1))
        assert os.listdir(directory / "checkpoints") == [f"{step + 1:08d}"]  # no leftover survives the next save
    assert unfinished >= 3  # the kills did fall into saves


@pytest.fixture(params=["small disk", "file size limit"])
def full_disk(request, tmp_path):
    """A directory that has room for 1 MB of checkpoints, not for 6."""
    if request.param == "file size limit":  # a write past it fails as one on a full disk does, and needs no privileges
        soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (2**21, hard))
        yield tmp_path
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        return
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4m", "tmpfs", tmp_path], capture_output=True, text=True
    )
    if mounted.returncode != 0:
        pytest.skip(f"a small file system cannot be mounted here: {mounted.stderr.strip()}")
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_ckpt_07_a_full_disk_is_one_clear_error_and_the_previous_checkpoint_stands(full_disk):
    small = {"x": np.random.default_rng(0).normal(size=2**17)}
    large = {"x": np.random.default_rng(1).normal(size=2**20)}
    checkpoints = Checkpoints(full_disk / "checkpoints", keep=2)
    save_now(checkpoints, 1, small, {"cursor": 1})
    checkpoints.save(2, large, {})
    with pytest.raises(CheckpointFailed, match=r"cannot write .*00000002.*the last complete checkpoint is 1") as caught:
        checkpoints.wait()
    assert len(str(caught.value)) < 1500
    checkpoints.wait()  # said once
    assert checkpoints.durable() == 1
    assert os.listdir(full_disk / "checkpoints") == ["00000001"]  # the room is given back
    restored, meta = checkpoints.restore(None, small)
    assert bits(restored) == bits(small)
    assert meta == {"cursor": 1}
    save_now(checkpoints, 3, small)
    assert checkpoints.durable() == 3


def test_save_returns_before_the_write_and_durable_only_after_it(checkpoints, monkeypatch):
    released, write = threading.Event(), save.save_arrays

    def slow(*args):
        assert released.wait(30)
        write(*args)

    monkeypatch.setattr(save, "save_arrays", slow)
    tree = {"x": jnp.arange(4.0)}
    checkpoints.save(5, tree, {})
    assert checkpoints.durable() is None
    with pytest.raises(TimeoutError, match=r"not written after 0\.01 s"):
        checkpoints.wait(timeout_s=0.01)
    released.set()
    checkpoints.wait()
    assert checkpoints.durable() == 5


@pytest.mark.parametrize("heard_by", ["save", "wait", "durable", "close"])
def test_a_failure_in_the_background_is_heard(tmp_path, monkeypatch, heard_by):
    def fail(*args):
        raise RuntimeError("the disk is on fire")

    monkeypatch.setattr(save, "save_arrays", fail)
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    tree = {"x": jnp.ones(2)}
    checkpoints.save(1, tree, {})
    checkpoints._writer.shutdown(wait=True)
    arguments = {"save": (2, tree, {})}.get(heard_by, ())
    with pytest.raises(CheckpointFailed, match="on fire; the last complete checkpoint is None"):
        getattr(checkpoints, heard_by)(*arguments)


def test_retention_keeps_the_newest_complete_ones(checkpoints, tmp_path):
    tree = {"x": jnp.ones(2)}
    for step in (1, 3, 7, 12):
        save_now(checkpoints, step, tree)
    assert checkpoints.steps() == [7, 12]
    (tmp_path / "checkpoints" / "00000012" / checkpoint.COMMIT_FILE).unlink()  # as a kill in the middle leaves it
    reopened = Checkpoints(tmp_path / "checkpoints", keep=1)
    assert reopened.latest() == reopened.durable() == 7
    assert (tmp_path / "checkpoints" / "00000012").exists()  # opening changes nothing: a reader may do it
    save_now(reopened, 13, tree)
    assert reopened.steps() == [13]
    assert os.listdir(tmp_path / "checkpoints") == ["00000013"]


def test_a_damaged_checkpoint_is_refused_and_an_older_one_can_be_asked_for(checkpoints, tmp_path):
    tree = {"x": jnp.arange(1024.0), "y": jnp.ones((3, 3))}
    save_now(checkpoints, 1, tree)
    save_now(checkpoints, 2, tree)
    needle = np.asarray(tree["x"]).tobytes()
    holding = next(path for path in (tmp_path / "checkpoints" / "00000002").rglob("d/*") if needle in path.read_bytes())
    data = holding.read_bytes()
    at = data.index(needle) + 9
    holding.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
    with pytest.raises(WeightsMismatch, match="the bytes of x"):
        checkpoints.restore(None, tree)
    restored, _ = checkpoints.restore(1, tree)
    assert bits(restored) == bits(tree)


def test_restoring_into_another_tree_is_refused(checkpoints):
    save_now(checkpoints, 1, {"x": jnp.ones(4), "y": jnp.ones(2)})
    for like in (
        {"x": jnp.ones(4)},
        {"x": jnp.ones(4), "y": jnp.ones(2), "z": jnp.ones(1)},
        {"x": jnp.ones(4), "w": jnp.ones(2)},
    ):
        with pytest.raises(WeightsMismatch, match="leaves"):
            checkpoints.restore(1, like)
    with pytest.raises(WeightsMismatch, match=r"x was saved as float32 \(4,\)"):
        checkpoints.restore(1, {"x": jnp.ones((2, 2)), "y": jnp.ones(2)})


def test_what_cannot_be_saved_exactly_is_refused_at_once(checkpoints):
    tree = {"x": jnp.ones(2)}
    for bad in ({"x": 3}, {"x": jnp.ones((0, 2))}, {"a.b": jnp.ones(1), "a": {"b": jnp.ones(1)}}):
        with pytest.raises(ValueError, match=r"leaf|leaves"):
            checkpoints.save(1, bad, {})
    for bad in ({"uses": {3: 1}}, {"at": (1, 2)}, {"loss": float("nan")}):
        with pytest.raises(ValueError, match="JSON"):
            checkpoints.save(1, tree, bad)
    save_now(checkpoints, 4, tree)
    for step in (4, 3):
        with pytest.raises(ValueError, match="4 is there already"):
            checkpoints.save(step, tree, {})
    assert checkpoints.steps() == [4]


def test_meta_is_the_one_at_the_time_of_save_and_readable_alone(checkpoints):
    meta = {"tickets": {"1-3": 2}, "low_water": None, "share": 0.1}
    checkpoints.save(1, {"x": jnp.ones(2)}, meta)
    meta["tickets"]["1-3"] = 99
    checkpoints.wait()
    assert checkpoints.meta() == checkpoints.meta(1) == {"tickets": {"1-3": 2}, "low_water": None, "share": 0.1}


def test_a_checkpoint_that_is_not_there_is_named(checkpoints):
    with pytest.raises(FileNotFoundError, match="no complete checkpoint in"):
        checkpoints.restore(None, {})
    save_now(checkpoints, 4, {"x": jnp.ones(2)})
    with pytest.raises(FileNotFoundError, match=r"no complete checkpoint 3 in .*there are \[4\]"):
        checkpoints.restore(3, {})
    with pytest.raises(ValueError, match="keep=0"):
        Checkpoints("x", keep=0)


def test_going_back_discards_what_came_after(checkpoints):
    for step in (1, 2):
        save_now(checkpoints, step, {"x": jnp.full(2, float(step))})
    assert checkpoints.discard_newer(1) == [2]
    assert checkpoints.latest() == checkpoints.durable() == 1
    save_now(checkpoints, 2, {"x": jnp.full(2, 9.0)})
    assert checkpoints.restore(2, {"x": np.ones(2, np.float32)})[0]["x"].tolist() == [9.0, 9.0]


RESHARD = """
import sys
import jax, jax.numpy as jnp, numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from asyncrl_jax.learner.checkpoint import Checkpoints
def sharded(devices, axes):
    mesh = jax.make_mesh((devices,), ("fsdp",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    return NamedSharding(mesh, PartitionSpec(*axes))
x = jnp.arange(32.0).reshape(8, 4)
checkpoints = Checkpoints(sys.argv[1], keep=1)
checkpoints.save(1, {"x": jax.device_put(x, sharded(2, ("fsdp",)))}, {})
checkpoints.wait()
wanted = sharded(4, (None, "fsdp"))
restored, _ = checkpoints.restore(1, {"x": jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=wanted)})
assert restored["x"].sharding == wanted
assert len(restored["x"].addressable_shards) == 4
np.testing.assert_array_equal(restored["x"], x)
"""


def test_a_checkpoint_restores_onto_another_mesh(tmp_path):
    environment = ENVIRONMENT | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    subprocess.run([sys.executable, "-c", RESHARD, tmp_path], check=True, timeout=100, env=environment)
