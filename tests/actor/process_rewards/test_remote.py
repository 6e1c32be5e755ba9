"""An endpoint that scores steps, well and badly, over real HTTP on loopback."""

import asyncio
import json
import logging
import os
import threading
import time

import pytest

fastapi = pytest.importorskip("fastapi")
uvicorn = pytest.importorskip("uvicorn")
pytest.importorskip("httpx")

from fastapi.responses import RedirectResponse, Response, StreamingResponse  # noqa: E402

from asyncrl_jax.actor.process_rewards.base import checked  # noqa: E402
from asyncrl_jax.actor.process_rewards.remote import RETRY_BURST, RemoteProcessModel  # noqa: E402
from asyncrl_jax.actor.process_rewards.steps import Step  # noqa: E402
from asyncrl_jax.actor.rewards import InvalidReward  # noqa: E402
from asyncrl_jax.actor.verifiers import ScoreFailed  # noqa: E402
from asyncrl_jax.config import Config, override  # noqa: E402
from asyncrl_jax.config_environment import ProcessRewardConfig  # noqa: E402

STEPS = [Step("1+1=", "2;", 6), Step("", "2+1=3", 11), Step(" next ", "3", 14)]
SECRET = "key-of-the-test-7261"


class Endpoint:
    """`/good` scores by the length of a step; every other path misbehaves as its name says."""

    def __init__(self):
        self.heard, self.keys, self.num_open, self.most_open, self.failing = [], [], 0, 0, 0
        app = fastapi.FastAPI()
        app.post("/good")(self.good)
        app.post("/{fault}")(self.bad)
        config = uvicorn.Config(app, host="127.0.0.1", port=0, log_level="error", lifespan="off")
        self.server = uvicorn.Server(config)
        self.thread = threading.Thread(target=self.server.run, daemon=True)
        self.thread.start()
        deadline = time.monotonic() + 20
        while not self.server.started:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        self.port = self.server.servers[0].sockets[0].getsockname()[1]

    def close(self):
        self.server.force_exit = True
        self.server.should_exit = True
        self.thread.join(20)

    async def good(self, request: fastapi.Request):
        self.num_open += 1
        self.most_open = max(self.most_open, self.num_open)
        try:
            body = await request.json()
            self.heard.append(body)
            self.keys.append(request.headers.get("authorization"))
            if self.failing > 0:
                self.failing -= 1
                return Response(status_code=503)
            await asyncio.sleep(0.01)
            return {"scores": [min(len(step["text"]) / 10, 1.0) for step in body["steps"]]}
        finally:
            self.num_open -= 1

    async def bad(self, fault: str, request: fastapi.Request):
        self.heard.append(fault)
        self.keys.append(request.headers.get("authorization"))
        return FAULTS[fault](self)


async def endless():
    while True:
        yield b" " * 65536
        await asyncio.sleep(0.001)  # or the server would never see that nobody reads


async def drip():
    yield b'{"scores": [0.5, 0.5, 0.5'
    while True:
        await asyncio.sleep(0.02)
        yield b" "


def raw(text, **headers):
    return lambda _self: Response(text, media_type="application/json", headers=headers)


FAULTS = {
    "endless": lambda _self: StreamingResponse(endless(), media_type="application/json"),
    "drip": lambda _self: StreamingResponse(drip(), media_type="application/json"),
    "too_few": raw('{"scores": [0.5, 0.5]}'),
    "too_many": raw('{"scores": [0.5, 0.5, 0.5, 0.5]}'),
    "none": raw('{"scores": []}'),
    "nan": raw('{"scores": [0.5, NaN, 0.5]}'),
    "infinite": raw('{"scores": [0.5, -Infinity, 0.5]}'),
    "overflow": raw('{"scores": [0.5, 1e999, 0.5]}'),
    "strings": raw(f'{{"scores": ["{SECRET}", "0.5", "0.5"]}}'),
    "booleans": raw('{"scores": [true, true, true]}'),
    "nulls": raw('{"scores": [null, 0.5, 0.5]}'),
    "above": raw('{"scores": [0.5, 1.0001, 0.5]}'),
    "below": raw('{"scores": [0.5, -0.0001, 0.5]}'),
    "number": raw('{"scores": 0.5}'),
    "list": raw("[0.5, 0.5, 0.5]"),
    "no_json": raw(f"0.5 {SECRET}"),
    "bad_utf8": raw(b'{"scores": "\xff\xfe"}'),
    "nested": raw("[" * 4000),
    "digits": raw('{"scores": [' + "1" * 4200 + "]}"),
    "huge": raw(json.dumps({"scores": [0.5] * 100_000})),
    "gzip": raw(b"\x1f\x8b", **{"Content-Encoding": "gzip"}),
    "elsewhere": lambda self: RedirectResponse(f"http://localhost:{self.port}/good"),
    "forbidden": lambda _self: Response(status_code=403),
    "empty": lambda _self: Response(status_code=204),
    "broken": lambda _self: Response(status_code=500),
}


@pytest.fixture(scope="module")
def running():
    endpoint = Endpoint()
    yield endpoint
    endpoint.close()


@pytest.fixture
def endpoint(running):
    running.heard, running.keys, running.most_open, running.failing = [], [], 0, 0
    return running


def ask(endpoint, path, steps=STEPS, **settings):
    """The checked scores of one episode."""

    async def run():
        url = f"http://127.0.0.1:{endpoint.port}/{path}"
        model = RemoteProcessModel(ProcessRewardConfig(url=url, **{"timeout_s": 5.0} | settings))
        try:
            return checked(await model.score(steps), len(steps)).tolist()
        finally:
            await model.close()

    return asyncio.run(run())


def test_one_request_carries_all_steps_of_an_episode_with_what_stood_before_each(endpoint):
    assert ask(endpoint, "good") == pytest.approx([0.2, 0.5, 0.1])
    assert endpoint.heard == [
        {
            "steps": [
                {"before": "1+1=", "text": "2;"},
                {"before": "", "text": "2+1=3"},
                {"before": " next ", "text": "3"},
            ]
        }
    ]
    assert endpoint.keys == [None]


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        ("endless", "too_long"),
        ("huge", "too_long"),
        ("too_few", "wrong_count"),
        ("too_many", "wrong_count"),
        ("none", "wrong_count"),
        ("nan", "not_finite"),
        ("infinite", "not_finite"),
        ("overflow", "not_finite"),
        ("strings", "not_a_number"),
        ("booleans", "not_a_number"),
        ("nulls", "not_a_number"),
        ("above", "out_of_range"),
        ("below", "out_of_range"),
        ("digits", "wrong_count"),
        ("number", "no_scores"),
        ("list", "no_scores"),
        ("no_json", "not_json"),
        ("bad_utf8", "not_json"),
        ("nested", "not_json"),
        ("gzip", "compressed"),
        ("elsewhere", "redirected"),
        ("forbidden", "refused"),
        ("empty", "refused"),
    ],
)
def test_env_07_an_answer_that_is_no_score_for_every_step_is_refused_by_name_and_not_asked_for_again(
    endpoint, fault, reason
):
    with pytest.raises(InvalidReward) as caught:
        ask(endpoint, fault)
    assert caught.value.reason == reason
    assert SECRET not in str(caught.value)
    assert endpoint.heard == [fault], "neither again nor elsewhere"


@pytest.mark.parametrize(("fault", "reason"), [("drip", "timeout"), ("broken", "refused")])
def test_env_02_what_may_be_better_a_moment_later_is_asked_again_and_then_failed(endpoint, fault, reason):
    with pytest.raises(ScoreFailed) as caught:
        ask(endpoint, fault, timeout_s=0.3, max_attempts=2)
    assert caught.value.reason == reason
    assert endpoint.heard == [fault] * 2


def test_nobody_there_is_a_failure_of_the_infrastructure(endpoint):
    free = type("Nobody", (), {"port": 1})
    with pytest.raises(ScoreFailed, match="no_connection"):
        ask(free, "good", max_attempts=2)


def test_an_endpoint_that_fails_once_is_asked_again_within_a_budget(endpoint):
    endpoint.failing = 1
    assert ask(endpoint, "good") == pytest.approx([0.2, 0.5, 0.1])
    assert len(endpoint.heard) == 2

    async def many():
        """200 episodes at an endpoint that always fails: one request each, and the budget's share of second ones."""
        url = f"http://127.0.0.1:{endpoint.port}/broken"
        model = RemoteProcessModel(ProcessRewardConfig(url=url, max_attempts=5))
        results = await asyncio.gather(*[model.score(STEPS) for _ in range(200)], return_exceptions=True)
        await model.close()
        return results

    endpoint.heard = []
    assert {type(result) for result in asyncio.run(many())} == {ScoreFailed}
    assert 200 < len(endpoint.heard) <= 200 * 1.2 + RETRY_BURST


def test_env_04_waiting_for_a_connection_is_no_part_of_a_requests_time(endpoint):
    """40 requests of 10 ms over 2 connections take longer than the limit of each."""

    async def many():
        url = f"http://127.0.0.1:{endpoint.port}/good"
        config = ProcessRewardConfig(url=url, max_connections=2, timeout_s=0.15, max_attempts=1)
        model = RemoteProcessModel(config)
        started = time.monotonic()
        await asyncio.gather(*[model.score(STEPS) for _ in range(40)])
        await model.close()
        return time.monotonic() - started

    assert asyncio.run(many()) > 0.15
    assert endpoint.most_open <= 2


def test_the_key_goes_to_the_endpoint_and_nowhere_else(endpoint, monkeypatch, caplog):
    caplog.set_level(logging.DEBUG)
    monkeypatch.setenv("TEST_KEY", SECRET)
    assert ask(endpoint, "good", key_variable="TEST_KEY") == pytest.approx([0.2, 0.5, 0.1])
    assert endpoint.keys == [f"Bearer {SECRET}"]
    assert "TEST_KEY" not in os.environ, "no child inherits it"
    monkeypatch.setenv("TEST_KEY", SECRET)
    with pytest.raises(InvalidReward) as caught:
        ask(endpoint, "elsewhere", key_variable="TEST_KEY")
    assert SECRET not in repr(caught.value)
    logged = [r for r in caplog.records if not r.name.startswith(("httpcore", "hpack"))]
    assert not any(SECRET in record.getMessage() for record in logged)


@pytest.mark.parametrize("key", ["", "line\nbreak", "ключ"])
def test_a_key_that_is_none_is_refused_without_being_told(monkeypatch, key):
    monkeypatch.setenv("TEST_KEY", key)
    with pytest.raises(ValueError, match="key_variable=TEST_KEY") as caught:
        RemoteProcessModel(ProcessRewardConfig(url="https://x.invalid/", key_variable="TEST_KEY"))
    assert not key or key not in str(caught.value)


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"url": "ftp://x/"}, "process.url"),
        ({"url": "https://user:word@x/"}, r"process\.url=…@…"),
        ({"url": "http://scores.example/", "key_variable": "K"}, "https"),
        ({"url": "https://x/", "model": "y"}, "not both"),
        ({"aggregate": "sum"}, "aggregate"),
        ({"good": "+", "bad": "+"}, "process.good"),
        ({"timeout_s": 0.0}, "timeout_s"),
        ({"max_attempts": 0}, "max_attempts"),
    ],
)
def test_settings_that_make_no_sense_are_refused_by_name(settings, match):
    with pytest.raises(ValueError, match=match):
        ProcessRewardConfig(**settings)


def test_a_run_that_is_to_be_repeated_depends_on_no_server_and_on_no_moment():
    repeated = {"deterministic": True, "mode": "sync", "actor.num_hosts": 1}
    with pytest.raises(ValueError, match=r"reward\.process\.url"):
        override(Config(), repeated | {"reward.process.url": "https://x/"})
    with pytest.raises(ValueError, match=r"orchestrator\.agreement\.action=alarm"):
        override(Config(), repeated | {"reward.process.model": "/x"})
    override(Config(), repeated | {"reward.process.model": "/x", "orchestrator.agreement.action": "alarm"})
