"""Hostile code and hostile environments among ordinary episodes: each is contained, counted, laid to its own task."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import psutil
import pytest

from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer
from asyncrl_jax.actor.tools.sandbox import FIRST_USER, Sandbox, SandboxUnavailable
from asyncrl_jax.config import RedisConfig
from asyncrl_jax.transport.server import start_server

from . import hostile

# Task index of a hostile environment, and what the ledger's reason says of it.
ENVIRONMENTS = {
    1: "step: ValueError('no such move')",
    2: "Odd: broken",
    3: "out_of_range",
    4: "not_finite",
    5: "exit code 7",
    6: "exit code -11",
    7: "exit code -9",  # blocked its process, which was killed
    8: "no answer within 3 s",
    12: "success='yes' is no bool",
}


@pytest.fixture
def server(tmp_path):
    started = start_server(tmp_path / "redis", RedisConfig())
    yield started
    started.stop()


@pytest.fixture(autouse=True)
def _needs_bubblewrap():
    try:
        Sandbox()
    except SandboxUnavailable as error:
        pytest.skip(str(error))


def _present() -> set[str]:
    scratch = {path.name for path in Path(tempfile.gettempdir()).glob("asyncrl-sandbox-*")}
    mine = {str(child.pid) for child in psutil.Process().children(recursive=True) if "redis" not in child.name()}
    users = psutil.process_iter(["uids"])
    return scratch | mine | {str(p.pid) for p in users if p.info["uids"] and p.info["uids"].real >= FIRST_USER}


def _check(played: hostile.Played, num_fine: int) -> None:
    programs = hostile.programs()
    assert set(played.failed) == set(ENVIRONMENTS)
    for index, reason in ENVIRONMENTS.items():
        assert reason in played.failed[index], (index, played.failed[index])
    assert set(played.groups) == {*programs, *range(hostile.FIRST_FINE, hostile.FIRST_FINE + num_fine)}
    for index, group in played.groups.items():
        (member,) = group.trajectories
        text = ByteTokenizer().decode(member.tokens.tolist())
        assert member.success
        assert hostile.SECRET not in text
        if index in programs and programs[index][0] != "parents_environment":  # that one may print what it has
            assert "error: " in text, programs[index]
            assert member.reward_parts[-1] == 0.0
        if "network" in programs.get(index, ()):
            assert "\nconnected" not in text
        if index >= hostile.FIRST_FINE and index % hostile.EVERY == 0:
            assert "42" in text
            assert member.reward_parts[-1] == 1.0
    beat = played.beat
    # Once each, and again for episodes that another's environment took with it.
    assert beat["tools/python/timeout"] >= 2  # the fork bomb, and the program that never returns
    assert beat["tools/python/output_limit"] >= 1
    assert beat["tools/python/failed"] >= 4  # allocation, disk, network, the parent's file
    assert beat["environments_died"] >= 2
    assert beat["environments_stuck"] >= 1
    assert beat["tickets_failed"] == len(ENVIRONMENTS)
    assert beat["loop_blocked"] == 0


def _play(server, tmp_path, monkeypatch, num_fine, limit_s):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "actor"))  # for the environment, here and there
    monkeypatch.setenv("PYTHONPATH", str(Path(__file__).parents[1] / "actor"))
    sys.modules.pop("rough", None)
    before = _present()
    indices = [*range(hostile.FIRST_FINE, hostile.FIRST_FINE + num_fine)]
    for place, index in enumerate([*ENVIRONMENTS, *hostile.programs()]):  # spread among the others
        indices.insert(place * len(indices) // 20, index)
    played = hostile.play(server, tmp_path, monkeypatch, indices, limit_s)
    print(
        f"{len(indices)} episodes in {played.seconds:.1f} s, loop lag p99 {played.worst_lag_p99_s:.3f} s, {played.beat}"
    )
    _check(played, num_fine)
    assert _present() - before == set()


def test_hostile_episodes_of_every_kind_among_a_few_others(server, tmp_path, monkeypatch):
    _play(server, tmp_path, monkeypatch, num_fine=40, limit_s=120)


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_hostile_episodes_of_every_kind_among_a_thousand(server, tmp_path, monkeypatch):
    _play(server, tmp_path, monkeypatch, num_fine=1000 - len(ENVIRONMENTS) - len(hostile.programs()), limit_s=800)
