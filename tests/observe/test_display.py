import contextlib
import dataclasses
import io

import pytest
from rich.console import Console

from asyncrl_jax.config import Config, override
from asyncrl_jax.observe.display import Display, Snapshot, panel, plain_line, read_snapshot
from asyncrl_jax.transport.connection import connect
from asyncrl_jax.transport.control import Control
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.server import start_server
from asyncrl_jax.types import LearnerState
from tests.observe.synthetic import evaluation

LEARNER = {
    "lag_mean": 1.25,
    "lag_p95": 3.0,
    "lag_max": 4.0,
    "over_bound_tokens": 0,
    "busy": 0.7,
    "tokens_trained": 12_345,
    "tokens_per_s": 5000.0,
    "reward": 0.9,
    "success_train": 0.6,
    "queue_depth": 3,
    "checkpoint_update": 10,
}
LEDGER = {"issued": 40, "trained": 30, "expired": 2, "filtered": 0, "pending": 8}


def snapshot(phase: str = "training", run_phase: str = "running", **learner: object) -> Snapshot:
    return Snapshot(
        phase=run_phase,
        state=LearnerState(line=0, update=12, version=12, phase=phase),
        learner=LEARNER | learner,
        orchestrator={"ledger": LEDGER},
        actors={"actor-0": {"version": 11, "tokens_per_s": 900.0, "running": 60, "busy": 0.9, "accelerator_busy": 0.4}},
        evaluations=(
            evaluation(0, {1: 0.4, 2: 0.2, 3: 0.1}, 10, 1.0),
            evaluation(10, {1: 0.8, 2: 0.6, 3: 0.3}, 10, 2.0),
        ),
    )


def drawn(shown: Snapshot | None, restarts: dict[str, int] | None = None) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(panel(Config(), shown, restarts or {}, 75.0))
    return console.export_text()


def test_how_busy_accelerators_are_is_shown_by_actor_and_by_class_where_there_are_several():
    shown = dataclasses.replace(
        snapshot(),
        actors={
            "cheap-0": {"accelerator_busy": 0.5, "running": 1},
            "cheap-1": {"accelerator_busy": 0.9, "running": 2},
            "dear-0": {"accelerator_busy": 0.1, "running": 4},
        },
    )
    assert "accelerators busy 50%" in plain_line(Config(), shown, 1.0)
    console = Console(width=160, record=True, file=io.StringIO())
    console.print(panel(override(Config(), {"orchestrator.fleet.classes": ("cheap:2", "dear")}), shown, {}, 1.0))
    text = console.export_text()
    assert [" ".join(line.split()) for line in text.splitlines() if "-*" in line] == [
        "cheap-* 2 actors 0 tok/s accelerator busy 70% 3 episodes in hand",
        "dear-* 1 actors 0 tok/s accelerator busy 10% 4 episodes in hand",
    ]


@pytest.mark.parametrize("draw", [drawn, lambda shown: plain_line(Config(), shown, 75.0)])
def test_lag_stands_beside_the_bound_that_holds_now(draw):
    shown = dataclasses.replace(snapshot(), orchestrator={"ledger": LEDGER, "token_updates": 6})
    assert "max 4 of 6" in draw(shown)


@pytest.mark.parametrize("draw", [drawn, lambda shown: plain_line(Config(), shown, 75.0)])
def test_a_run_that_waits_for_a_human_says_so_and_how_it_goes_on(draw):
    assert "paused" not in draw(snapshot())
    why = "paused by regression until `asyncrl resume`"
    shown = dataclasses.replace(snapshot(), orchestrator={"ledger": LEDGER, "halt": why})
    assert f"training, {why}" in draw(shown)


@pytest.mark.parametrize("draw", [drawn, lambda shown: plain_line(Config(), shown, 75.0)])
def test_freshness_success_and_tickets_are_always_in_view(draw):
    text = draw(snapshot())
    assert "lag mean 1.25 p95 3 max 4 of 4" in text
    assert "0.30 → 0.70 (update 10)" in text
    assert "undemonstrated 0.10 → 0.30" in text
    assert "40 issued = 30 trained + 2 expired + 8 pending" in text
    assert f"12/{Config().learner.num_updates}" in text


def test_tokens_over_the_bound_are_said():
    assert "7 tokens over" in plain_line(Config(), snapshot(over_bound_tokens=7), 1.0)
    assert "7 tokens over" in drawn(snapshot(over_bound_tokens=7))


def test_the_table_shows_actors_and_restarts():
    text = drawn(snapshot(), {"actor-0": 2})
    assert "v11   900 tok/s   slots busy 90%   accelerator busy 40%   60 episodes" in text
    assert "actor-0 2" in text
    assert "1:15" in text


def test_the_warm_start_shows_its_steps():
    shown = snapshot("warm_start", warm_start_step=300)
    shown = dataclasses.replace(shown, state=LearnerState(line=0, update=0, version=0, phase="warm_start"))
    text = plain_line(Config(), shown, 9.0)
    assert text == f"[    9 s] warm start step 300/{Config().warm_start.num_steps}"
    assert f"300/{Config().warm_start.num_steps} warm-start steps" in drawn(shown)


def test_an_evaluation_whose_episodes_all_failed_has_no_success():
    nothing = evaluation(0, {}, 0, 1.0)
    shown = dataclasses.replace(snapshot(), evaluations=(nothing,))
    assert "| success – |" in plain_line(Config(), shown, 9.0)
    shown = dataclasses.replace(snapshot(), evaluations=(nothing, evaluation(10, {1: 0.5, 2: 0.5, 3: 0.0}, 10, 2.0)))
    assert "success – → 0.50 (update 10), undemonstrated – → 0.00 |" in plain_line(Config(), shown, 9.0)
    drawn(shown)


def test_a_learner_that_resumes_does_not_warm_up_again():
    shown = snapshot("warm_start", warm_start_step=0)
    assert plain_line(Config(), shown, 9.0).startswith("[    9 s] resuming update 12/160 | ")
    assert "12/160 updates" in drawn(shown)


def test_a_redis_that_is_away_is_said():
    assert "redis is away" in plain_line(Config(), None, 1.0)
    assert "redis is away" in drawn(None)


def test_before_the_first_heartbeat_nothing_is_made_up():
    empty = Snapshot(phase="running", state=None, learner={}, orchestrator={}, actors={}, evaluations=())
    assert plain_line(Config(), empty, 1.0) == "[    1 s] starting"
    assert "lag – of 4" in drawn(empty)


@pytest.mark.parametrize(
    ("phase", "run_phase", "num_updates", "ending"),
    [
        ("training", "running", 12, False),
        ("done", "running", 12, True),
        ("done", "running", 13, False),  # of a session before, which was shorter
        ("training", "finished", 12, True),
    ],
)
def test_parts_may_close_once_the_learner_is_done(phase, run_phase, num_updates, ending):
    assert snapshot(phase, run_phase).ending(num_updates) is ending


def test_plain_lines_come_at_news_and_else_every_few_seconds():
    output = io.StringIO()
    with Display(Config(), Console(file=output, force_terminal=False)) as display:
        for _ in range(5):
            display.show(snapshot(), {})
        display.show(snapshot("done"), {})
    first, second = output.getvalue().splitlines()
    assert "training" in first
    assert "last evaluation" in second


def test_a_terminal_gets_a_live_table():
    output = io.StringIO()
    with Display(Config(), Console(file=output, force_terminal=True, width=120)) as display:
        display.show(snapshot(), {})
    assert "freshness" in output.getvalue()


def test_a_snapshot_is_what_redis_holds(tmp_path):
    server = start_server(tmp_path, Config().redis)
    with contextlib.closing(contextlib.ExitStack()) as stack:
        stack.callback(server.stop)
        client = connect(override(Config(), {"redis.url": server.url}).redis, server.password)
        stack.callback(client.close)
        keys = Keys("asyncrl")
        control = Control(client, keys)
        control.set_phase("running")
        control.set_learner(LearnerState(line=0, update=3, version=3, phase="training"))
        control.beat("learner", "0", {"lag_mean": 1.0}, 10.0)
        control.beat("actor", "actor-1", {"version": 3}, 10.0)
        control.beat("orchestrator", "0", {"ledger": LEDGER}, 10.0)
        for update in (20, 0):
            control.report_evaluation(evaluation(update, {1: 0.5}, 10, 1.0))
        shown = read_snapshot(client, keys)
    assert shown.state.update == 3
    assert shown.learner == {"lag_mean": 1.0}
    assert shown.actors == {"actor-1": {"version": 3}}
    assert shown.orchestrator == {"ledger": LEDGER}
    assert [result.update for result in shown.evaluations] == [0, 20]
