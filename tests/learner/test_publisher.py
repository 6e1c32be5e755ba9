"""From the learner's weights to an actor's engine: what a version holds, when it is announced, and how it is proven."""

from __future__ import annotations

import asyncio
import dataclasses
import time
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from asyncrl_jax.actor.engines.jax_engine import JaxEngine
from asyncrl_jax.config import WeightsConfig
from asyncrl_jax.learner.publisher import Publisher
from asyncrl_jax.learner.trainer import Trainer
from asyncrl_jax.models.hf_names import to_tensors
from asyncrl_jax.types import EvaluationRequest, WeightVersion
from asyncrl_jax.weights.manifest import Canary, WeightsMismatch, content_digest
from asyncrl_jax.weights.publish import committed, publish
from asyncrl_jax.weights.read import describe, read, read_manifest

from .run_fixture import ScriptedRun, small_config

pytestmark = [pytest.mark.timeout(240), pytest.mark.usefixtures("compile_once")]


class Announcements:
    """Stands for Redis: what is leased and asked for, and what was on disk when a version was announced."""

    def __init__(self, directory, leased, evaluated):
        self._directory, self._leased, self._evaluated = directory, leased, evaluated
        self.on_disk = []

    def announce(self, version):
        assert describe(self._directory, version.number).manifest_digest == version.manifest_digest  # committed
        assert time.time() - 60 < version.announced_at <= time.time()
        self.on_disk.append(committed(self._directory))

    def leased(self):
        return self._leased

    def pending_evaluations(self):
        return [EvaluationRequest(f"e{number}", number, number, 1, 0) for number in self._evaluated]


def test_wgt_01_a_version_is_announced_once_committed_and_retired_only_when_nobody_needs_it(tmp_path):
    control = Announcements(tmp_path, leased={1}, evaluated=[2])
    publisher = Publisher(str(tmp_path), WeightsConfig(keep_versions=2), control)
    canary = Canary(np.zeros((1, 2), np.int32), np.zeros((1, 1), np.float32))
    for number in range(7):
        publisher.start({"w": np.float32([number])}, number=number, parent=None, line=0, update=number, canary=canary)
        with pytest.raises(RuntimeError, match="still being published"):
            publisher.start({}, number=9, parent=None, line=0, update=9, canary=canary)
        assert publisher.wait().number == number
    assert control.on_disk[5:] == [[0, 1, 2, 3, 4, 5], [0, 1, 2, 4, 5, 6]]  # old ones go after the announcement
    assert committed(tmp_path) == [0, 1, 2, 5, 6]
    publisher.close()


def test_publishing_is_timed_up_to_the_announcement(tmp_path, monkeypatch):
    now = [0.0]

    def takes(seconds):
        return lambda *_args, **_kwargs: now.__setitem__(0, now[0] + seconds)

    control = Announcements(tmp_path, leased=set(), evaluated=[])
    written = WeightVersion(0, None, 0, 0, "0" * 32)
    clock = SimpleNamespace(monotonic=lambda: now[0], time=lambda: 1.0)
    monkeypatch.setattr("asyncrl_jax.learner.publisher.time", clock)
    monkeypatch.setattr("asyncrl_jax.learner.publisher.retain", takes(10.0))
    monkeypatch.setattr(control, "announce", takes(0.5))
    publisher = Publisher(str(tmp_path), WeightsConfig(), control)
    monkeypatch.setattr(publisher._writer, "publish", lambda *_args, **_kwargs: takes(2.0)() or written)
    publisher.start({}, number=0, parent=None, line=0, update=0, canary=None)
    publisher.close()
    assert publisher.seconds == 2.5


@pytest.fixture(scope="module")
def published(server, tmp_path_factory, compile_once):
    """A run of three updates: (its learner, its versions, digests of its weights and of its reference by update)."""
    config = small_config(tmp_path_factory.mktemp("published"), server, num_updates=3)
    weights, references = {}, {}
    with ScriptedRun(config, server) as run:
        learner = run.make_learner()
        real = learner.publish

        def publish(wait=False):
            weights[learner.update] = learner.trainer.weights_digest()
            leaves = jax.tree.leaves(learner.trainer._reference)
            references[learner.update] = [np.asarray(leaf).tobytes() for leaf in leaves]
            real(wait)

        learner.publish = publish
        run.drive(learner)
        versions = run.control.versions()
    return learner, versions, weights, references


def test_wgt_05_version_n_holds_the_weights_after_exactly_n_updates(published):
    learner, versions, weights, _ = published
    assert [(v.number, v.line, v.update) for v in versions.values()] == [(n, 0, n) for n in range(4)]
    assert [v.parent for v in versions.values()] == [None, 0, 1, 2]
    assert {n: content_digest(read_manifest(learner.weights_dir, n)) for n in versions} == weights
    assert len(set(weights.values())) == 4
    assert int(learner.trainer.state.update) == 3


def test_wgt_12_masters_moments_versions_and_checkpoints_are_float32(published):
    learner = published[0]
    before = jax.device_get(learner.trainer.state)
    for leaf in jax.tree.leaves(before):
        assert leaf.dtype in (np.float32, np.int32)
    assert {leaf.dtype for leaf in read_manifest(learner.weights_dir, 3).leaves} == {"float32"}
    learner.trainer.restore(learner.checkpoints, 3)
    after = jax.device_get(learner.trainer.state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b, strict=True), after, before)


def test_wgt_12_weights_published_as_bfloat16_are_the_rounded_masters_and_prove_themselves(server, tmp_path):
    """The canary is computed with the rounded weights, so an engine of float32 arithmetic confirms it as closely."""
    config = small_config(tmp_path, server)
    published = dataclasses.replace(config.weights, publish_dtype="bfloat16")
    trainer, other = (Trainer(dataclasses.replace(config, weights=published, seed=seed)) for seed in (0, 1))
    masters = to_tensors(config.model, jax.device_get(trainer.state.params))
    assert {leaf.dtype for leaf in jax.tree.leaves(masters)} == {np.dtype(np.float32)}
    version = publish(
        tmp_path, trainer.host_weights(), number=0, parent=None, line=0, update=0, canary=trainer.canary()
    )
    manifest, tensors = read(tmp_path, version)
    assert content_digest(manifest) == trainer.weights_digest()  # what a resumed learner compares
    for name, master in masters.items():
        assert tensors[name].tobytes() == np.asarray(master).astype("bfloat16").tobytes()
    assert any(np.any(tensors[name].astype(np.float32) != master) for name, master in masters.items())

    async def load_all():
        engine = JaxEngine(config.model, num_slots=2, max_tokens=12, canary_tolerance=config.weights.canary_tolerance)
        await engine.adopt(manifest, tensors)
        with pytest.raises(WeightsMismatch, match="canary"):
            await engine.adopt(manifest, other.host_weights())

    asyncio.run(load_all())


def test_an_engine_keeps_its_weights_when_the_readers_memory_changes(server, tmp_path):
    config = small_config(tmp_path, server)
    trainer = Trainer(config)
    version = publish(
        tmp_path, trainer.host_weights(), number=0, parent=None, line=0, update=0, canary=trainer.canary()
    )
    manifest, tensors = read(tmp_path, version)

    async def load_and_overwrite():
        engine = JaxEngine(config.model, num_slots=2, max_tokens=12, canary_tolerance=1e-3)
        await engine.adopt(manifest, tensors)
        before = jax.tree.map(lambda leaf: np.array(leaf, copy=True), engine._params)
        for tensor in tensors.values():
            tensor[...] = 0
        jax.tree.map(np.testing.assert_array_equal, jax.device_get(engine._params), before)

    asyncio.run(load_and_overwrite())


@pytest.mark.parametrize(
    ("deltas", "directory", "made"),
    [("auto", "here", False), ("always", "here", True), ("never", "gs://b/w", False), ("auto", "gs://b/w", True)],
)
def test_deltas_are_made_for_readers_that_are_far_away(deltas, directory, made):
    publisher = Publisher(directory, WeightsConfig(deltas=deltas), control=None)
    assert publisher._writer._deltas == made
    publisher.close()


def test_wgt_13_the_reference_is_that_of_v0_all_run(published):
    _, _, _, references = published
    assert sorted(references) == [0, 1, 2, 3]
    assert all(reference == references[0] for reference in references.values())


def test_wgt_08_an_engine_confirms_the_learners_fingerprint_of_each_version_and_of_no_other(published):
    learner, versions, _, _ = published
    config = learner.config

    async def run():
        engine = JaxEngine(
            config.model,
            num_slots=2,
            max_tokens=config.environment.max_tokens,
            canary_tolerance=config.weights.canary_tolerance,
        )
        with pytest.raises(RuntimeError, match="no weights are proven"):  # as after any start without a load
            await (await engine.open(0, 1.0)).generate((1,), frozenset(), 1)
        read_back = {n: read(learner.weights_dir, version) for n, version in versions.items()}
        for number, (manifest, tensors) in read_back.items():
            await engine.adopt(manifest, tensors)
            assert engine.version == number
        with pytest.raises(WeightsMismatch, match="canary"):
            await engine.adopt(read_back[3][0], read_back[0][1])
        garbage = {name: np.zeros_like(array) for name, array in read_back[3][1].items()}
        with pytest.raises(WeightsMismatch, match="canary"):
            await engine.adopt(read_back[3][0], garbage)
        assert engine.version == 3

    asyncio.run(run())
