"""A run whose step part comes from a process reward model, from the actor to what the learner trained on."""

from __future__ import annotations

import json
import threading
from http.server import ThreadingHTTPServer

import numpy as np
import pytest

from asyncrl_jax.actor.envs.arithmetic import decode
from asyncrl_jax.config_model import ModelConfig
from asyncrl_jax.models.hf import save_params
from asyncrl_jax.models.transformer import init_params
from asyncrl_jax.transport.archive import read_groups
from examples.step_scores import Endpoint, scores

from .test_small_run import SMALL
from .whole_run import run_local

pytestmark = pytest.mark.timeout(280)
UPDATES = 3


def trained(run, tmp_path):
    """Trajectories of the archive with what arithmetic's text says of each step."""
    assert run.code == 0, run.output[-3000:]
    assert run.audited.sound, run.audited.problems
    files = sorted((tmp_path / "run" / "archive").glob("groups-*.avro"))
    groups = [row.group for path in files for row in read_groups(path)]
    assert len(groups) == UPDATES * 4
    for group in groups:
        some = any(t.success for t in group.trajectories)
        for t in group.trajectories:
            assert len(t.step_scores) == len(t.step_ends) == t.num_turns
            part = t.step_scores.min() if some else 0.0  # where all fail, it is no signal
            assert t.reward_parts[1] == np.float32(part)
            assert t.reward == pytest.approx(float(np.dot(t.reward_parts, [1.0, 0.4, 0.1, 0.1])), abs=1e-6)
    return [t for group in groups for t in group.trajectories]


def test_scores_of_an_endpoint_reach_the_learner(tmp_path):
    pytest.importorskip("httpx")
    from tests.actor.process_rewards import test_remote

    endpoint = test_remote.Endpoint()
    try:
        url = f"--config.reward.process.url=http://127.0.0.1:{endpoint.port}/good"
        run = run_local(tmp_path / "run", [*SMALL, f"--config.learner.num_updates={UPDATES}", url])
    finally:
        endpoint.close()
    for t in trained(run, tmp_path):
        mask = t.loss_mask.astype(bool)
        starts = np.flatnonzero(mask & ~np.concatenate([[False], mask[:-1]]))
        said = [decode(t.tokens[start:end].tolist()) for start, end in zip(starts, t.step_ends, strict=True)]
        assert t.step_scores.tolist() == pytest.approx([min(len(text) / 10, 1.0) for text in said])
    bodies = {json.dumps(body) for body in endpoint.heard}
    assert len(bodies) > UPDATES * 4


@pytest.mark.acceptance
def test_scores_of_a_model_on_the_host_reach_the_learner(tmp_path):
    model = ModelConfig(vocab_size=258, num_layers=1, hidden_dim=16, num_heads=2, num_kv_heads=1, max_positions=128)
    save_params(model, init_params(model, 0), tmp_path / "model")
    flags = [f"--config.reward.process.model={tmp_path / 'model'}", "--config.reward.process.tokenizer=byte"]
    run = run_local(tmp_path / "run", [*SMALL, f"--config.learner.num_updates={UPDATES}", *flags])
    scores = np.concatenate([t.step_scores for t in trained(run, tmp_path)])
    assert 0 < scores.min() < scores.max() < 1
    assert f"process reward model: {4} shapes" in run.log("actor-0")


@pytest.mark.acceptance
@pytest.mark.timeout(900)
def test_a_model_that_prefers_failures_is_named_and_its_scores_stop_counting(tmp_path):
    """The quickstart, scored by the example's endpoint turned upside down."""
    endpoint = ThreadingHTTPServer(("127.0.0.1", 0), Upside)
    thread = threading.Thread(target=endpoint.serve_forever, daemon=True)
    thread.start()
    try:
        url = f"--config.reward.process.url=http://127.0.0.1:{endpoint.server_port}/"
        short = ["--config.learner.num_updates=60", "--config.evaluation.num_tasks_per_level=20"]
        run = run_local(tmp_path / "run", [*short, url])
    finally:
        endpoint.shutdown()
        endpoint.server_close()
    assert run.code == 0, run.output[-3000:]
    assert run.audited.sound, run.audited.problems
    files = (tmp_path / "run" / "decisions").glob("*.jsonl")
    lines = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    alarms = [line for line in lines if line["policy"] == "agreement"]
    assert alarms, "named in the decision log"
    assert {line["action"] for line in alarms} == {"hold_out"}
    assert all(line["numbers"]["gap"] < 0 for line in alarms)
    assert any(line["reason"].startswith("prefers_failures") for line in alarms)
    alarmed = {line["subject"].removeprefix("bucket:") for line in alarms}
    files = sorted((tmp_path / "run" / "archive").glob("groups-*.avro"))
    rows = sorted((row for path in files for row in read_groups(path)), key=lambda row: row.group.enqueued_at)
    held = [t.step_scores is None for row in rows for t in row.group.trajectories if bucket(row) in alarmed]
    assert not held[0], "counted at first"
    assert all(held[-64:]), "and no more at the end"
    kept = [t for row in rows for t in row.group.trajectories if t.step_scores is None]
    assert {float(t.reward_parts[1]) for t in kept} == {0.0}


def bucket(row):
    return f"{row.group.ticket.task.environment}/{row.group.ticket.task.level}"


class Upside(Endpoint):
    """Scores as the example's endpoint does, 1 for 0."""

    def do_POST(self):
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = json.dumps({"scores": [1 - score for score in scores(body["steps"])]}).encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)
