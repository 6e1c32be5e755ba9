"""The operator's command line: what it sets is obeyed, logged, and refused with a way out when it is wrong."""

from __future__ import annotations

import dataclasses
import json
import re
import socket
import subprocess
import sys
import time
from types import SimpleNamespace

import pytest
import redis
from asyncrl_jax.launchers import operate

from asyncrl_jax.config import Config, LearnerConfig, RedisConfig, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.flags import parse_words
from asyncrl_jax.observe.metrics import read_rows
from asyncrl_jax.orchestrator import console, memory
from asyncrl_jax.orchestrator import round as rounds
from asyncrl_jax.orchestrator.console import run_command
from asyncrl_jax.orchestrator.loop import Orchestrator
from asyncrl_jax.transport import wrong_types
from asyncrl_jax.transport.fencing import Deposed, Fence, Leadership
from asyncrl_jax.transport.groups import GroupWriter
from asyncrl_jax.transport.keys import Keys
from asyncrl_jax.transport.shared_settings import SharedSettings
from asyncrl_jax.transport.tasks import TaskStream
from asyncrl_jax.transport.wrong_types import explained
from asyncrl_jax.types import LearnerState, Outcome, WeightVersion


class Operated:
    def __init__(self, space):
        self.space = space
        self.config = dataclasses.replace(
            Config(), learner=LearnerConfig(groups_per_update=4, group_size=2, num_updates=50)
        )
        space.control.announce(WeightVersion(0, None, 0, 0, "0" * 32))
        space.control.set_learner(LearnerState(0, 5, 0, "training"))

    def __call__(self, line):
        space = self.space
        shared = SharedSettings(space.client, space.keys)
        return run_command(line.split(), self.config, space.control, space.ledger, space.steering, shared)

    def tick(self):
        return Orchestrator.on(self.space.client, self.space.keys, self.config, None).tick()

    def tickets(self):
        return [live.ticket for live in self.space.ledger.live().values()]

    def last(self):
        return self.space.steering.newest_decisions(1)[0].decision


@pytest.fixture
def asyncrl(space):
    return Operated(space)


def test_n_set_by_hand_is_in_the_next_tickets_and_in_the_log(asyncrl):
    asyncrl.tick()
    assert {ticket.deadline - ticket.min_update for ticket in asyncrl.tickets()} == {4}
    asyncrl("set N=6")
    assert (asyncrl.last().policy, asyncrl.last().action, asyncrl.last().reason) == ("operator", "set", "N=6")
    asyncrl.space.control.set_learner(LearnerState(0, 9, 0, "training", 50, 50))
    asyncrl.tick()
    assert asyncrl.space.steering.directives().token_updates == 6
    assert {t.deadline - t.min_update for t in asyncrl.tickets()} == {4, 6} or {
        t.deadline - t.min_update for t in asyncrl.tickets()
    } == {6}
    assert (asyncrl.last().policy, asyncrl.last().subject) == ("lag", "N")
    asyncrl("set N=auto")
    asyncrl.tick()
    assert asyncrl.space.steering.directives().token_updates == 4


def test_each_class_of_hosts_has_a_line_where_there_are_several(asyncrl):
    def beat(name, **values):
        asyncrl.space.control.beat("actor", name, {"version": 3, **values}, 60)

    for name, busy in (("cheap-0", 0.5), ("cheap-1", 0.7), ("dear-0", 0.25)):
        beat(name, running=4, tokens_per_s=100.0, accelerator_busy=busy)
    assert "class " not in asyncrl("status")
    asyncrl.config = override(
        asyncrl.config,
        {
            "orchestrator.fleet.classes": ("cheap:2-3", "dear"),
            "orchestrator.fleet.class_settings": ("dear.slots=512",),
            "actor.num_hosts": 4,
        },
    )
    lines = asyncrl("status").splitlines()
    assert (
        "class      cheap: 2 of 3 actors, at most 3, 64 slots each, 8 episodes, 200 tok/s, accelerator busy 60%"
        in lines
    )
    assert "class      dear: 1 of 1 actors, 512 slots each, 4 episodes, 100 tok/s, accelerator busy 25%" in lines
    assert "actor      dear-0: v3, 4 episodes, accelerator busy 25%" in lines


def test_the_success_of_a_bucket_is_not_known_before_its_first_group(asyncrl):
    asyncrl.tick()
    (line,) = [line for line in asyncrl("status").splitlines() if line.startswith("bucket     arithmetic/1:")]
    assert line.startswith("bucket     arithmetic/1: success –, ")
    states = memory.load(rounds.initial_states(asyncrl.config), asyncrl.space.steering.states())
    bucket = dataclasses.replace(states.curriculum.buckets["arithmetic/1"], success=0.25, groups=1.0)
    seen = dataclasses.replace(states.curriculum, buckets={"arithmetic/1": bucket})
    (line,) = console._buckets(dataclasses.replace(states, curriculum=seen), {})
    assert line.startswith("bucket     arithmetic/1: success 0.25, ")


def test_metrics_have_a_row_of_each_class_where_there_are_several(asyncrl, tmp_path):
    asyncrl.config = override(asyncrl.config, {"orchestrator.fleet.classes": ("cheap:1", "dear")})
    asyncrl.space.control.beat("actor", "dear-0", {"running": 2, "tokens_per_s": 9.0, "accelerator_busy": 0.5}, 60)
    orchestrator = Orchestrator.on(asyncrl.space.client, asyncrl.space.keys, asyncrl.config, None, tmp_path)
    orchestrator.tick()
    orchestrator.close()
    (row,) = read_rows(tmp_path / "metrics" / "orchestrator.jsonl")
    assert row["dear"] == {"wanted": 1, "actors": 1, "episodes": 2, "tokens_per_s": 9.0, "accelerator_busy": 0.5}
    assert row["cheap"]["actors"] == 0


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("set N=99", "between 2"),
        ("set N=many", "number of updates"),
        ("set speed=1", "settings are N="),
        ("set temperature=0", "between 0.01"),
        ("set weight.chess/1=1", "there are arithmetic/1"),
        ("set breaker.environment:arithmetic=ajar", "one of open, closed"),
        ("review release chess/1", "no bucket"),
        ("set N=\u0663", "number of updates"),
        ("set N=5 N=6", "N is given twice"),
        ("set actors=1000", "at most 8, orchestrator.autoscale.max_actors"),
        ("set archive_reset=" + "9" * 400, "number of updates"),
        ("explode", "There are:"),
        ("set", "'set' needs NAME=VALUE; settings are N="),
        ("set temperature=hot", "'temperature=hot': a number, between 0.01 and 10"),
        ("set temperature=nan", "'temperature=nan': a finite number"),
        ("set weight.arithmetic/1=inf", "'weight.arithmetic/1=inf': a finite number, at least 0"),
        ("set N=²", "'N=²': a number of updates, 0 or more"),
        (f"set actors={'9' * 5000}", "a number of actors, 1 or more"),
        ("set N=99", "the larger of lag.token_updates and orchestrator.tuning.max_token_updates"),
        ("set breaker.foo=open", "'foo' is no target; there are environment:arithmetic, reward:arithmetic"),
        ("set breaker.environment:other=open", "'environment:other' is no target"),
        ("set breaker.actor:=open", "'actor:' is no target"),
    ],
)
def test_a_mistake_changes_nothing_and_names_the_way_out(asyncrl, line, why):
    with pytest.raises(ValueError, match=re.escape(why)):
        asyncrl(line)
    assert asyncrl.space.steering.operator() == {}
    assert asyncrl.space.steering.num_decisions() == 0


def test_pause_and_resume(asyncrl):
    asyncrl("pause")
    asyncrl.tick()
    assert asyncrl.tickets() == []
    assert "run        running, paused by hand until `asyncrl resume`" in asyncrl("status")
    assert asyncrl.space.control.heartbeat("orchestrator", "0")["halt"] == "paused by hand until `asyncrl resume`"
    asyncrl("resume")
    asyncrl.tick()
    assert asyncrl.tickets()


def test_temperature_weights_and_learning_rate(asyncrl):
    asyncrl("set temperature=0.7 weight.arithmetic/1=0 weight.arithmetic/2=0 learning_rate_scale=0.5")
    asyncrl.tick()
    assert {(ticket.temperature, ticket.task.level) for ticket in asyncrl.tickets()} == {(0.7, 3)}
    assert asyncrl.space.steering.directives().learning_rate_scale == 0.5


def test_drain_of_an_actor_and_of_the_run(asyncrl):
    asyncrl("drain actor-1")
    asyncrl.tick()
    assert asyncrl.space.steering.directives().actors["actor-1"].drain
    asyncrl("resume actor-1")
    asyncrl.tick()
    assert "actor-1" not in asyncrl.space.steering.directives().actors
    asyncrl("drain")
    assert not asyncrl.tick()  # tickets are outstanding
    asyncrl.space.ledger.settle_many(list(asyncrl.space.ledger.live()), outcome=Outcome.FAILED)
    assert asyncrl.tick()
    assert asyncrl.space.control.phase() == "stopping"


def test_a_drained_run_that_is_started_again_issues_tickets(asyncrl):
    """Its drain is over; one that is only taken up again, as after a crash, still drains."""
    space = asyncrl.space
    asyncrl("drain")
    space.control.reopen()
    assert asyncrl.tick()
    assert (space.control.phase(), asyncrl.tickets()) == ("stopping", [])
    space.control.reopen()
    assert not asyncrl.tick()
    assert (space.control.phase(), bool(asyncrl.tickets())) == ("running", True)
    resumed = [one.decision for one in space.steering.decisions() if one.decision.subject == "draining"]
    assert [one.action for one in resumed] == ["drain", "resume"]


def test_a_human_who_starts_a_run_again_calls_its_drain_off(asyncrl):
    asyncrl("drain")
    asyncrl.space.control.reopen(by_hand=True)
    assert not asyncrl.tick()
    assert asyncrl.tickets()


def test_a_run_drains_although_nobody_is_left_to_play_its_tickets(asyncrl):
    asyncrl.tick()
    assert asyncrl.tickets()
    asyncrl.space.control.beat("actor", "actor-0", {"drained": False}, 60)
    asyncrl("drain")
    assert not asyncrl.tick(), "an actor may claim them yet"
    asyncrl.space.control.beat("actor", "actor-0", {"drained": True}, 60)
    assert asyncrl.tick()
    assert asyncrl.space.control.phase() == "stopping"


def test_a_drained_run_stops_with_groups_that_are_too_few_for_an_update(asyncrl):
    """They wait in the learner's pool, and are there when the run is resumed."""
    asyncrl.tick()
    space, address = asyncrl.space, RedisConfig(url="redis://unused", partitions=1)
    tasks = TaskStream(space.client, space.keys, "a", address)
    (delivery,) = tasks.claim(1, 0)
    others = [name for name in space.ledger.live() if name != delivery.ticket.ticket_id]
    space.ledger.settle_many(others, outcome=Outcome.FAILED)
    asyncrl("drain")
    assert not asyncrl.tick(), "an actor has a ticket left"
    GroupWriter(space.client, space.keys, address, limits=None).submit_encoded(delivery, b"group")
    assert asyncrl.tick()
    assert space.control.phase() == "stopping"


def test_a_breaker_by_hand_and_a_review(asyncrl):
    asyncrl("set breaker.environment:arithmetic=open")
    asyncrl.tick()
    assert asyncrl.tickets() == []
    assert "breaker    environment:arithmetic is open" in asyncrl("status")
    asyncrl("set breaker.environment:arithmetic=closed")
    asyncrl("review hold arithmetic/3")
    asyncrl.tick()
    assert 3 not in {ticket.task.level for ticket in asyncrl.tickets()}
    assert "arithmetic/3: by_hand" in asyncrl("review")
    asyncrl("review release arithmetic/3")
    asyncrl.tick()
    assert asyncrl("review") == "no bucket is held"


def test_an_actor_that_gives_no_sign_of_life_is_named(asyncrl):
    asyncrl.space.control.beat("actor", "actor-0", {}, 60)
    assert asyncrl("drain actor-0 nosuch").endswith("; no sign of life of nosuch, only of actor-0")
    assert asyncrl("set breaker.actor:actor-0=open") == "breaker.actor:actor-0=open"


def test_a_learner_that_gives_no_sign_of_life_does_not_look_well(asyncrl):
    asyncrl.tick()
    shown = asyncrl("status")
    assert "update 5 of line 0, training; no sign of life" in shown
    assert "mean" not in shown
    assert "of what was trained" not in shown
    asyncrl.space.control.beat("learner", "0", {"busy": 0.5, "starved_s": 12, "queue_depth": 3, "lag_mean": 1.5}, 60)
    shown = asyncrl("status")
    assert "training; busy 50%, starved for 12 s, 3 groups pooled" in shown
    assert "N = 4, mean 1.50" in shown
    assert re.search(r"tickets    \d+ outstanding, \d+ uses aimed at", shown)


def test_archive_reset_acts_once(asyncrl):
    asyncrl.tick()
    issued = len(asyncrl.tickets())
    asyncrl.space.control.set_learner(LearnerState(0, 7, 0, "training"))
    asyncrl("set archive_reset=1")
    asyncrl.tick()
    assert asyncrl.space.steering.directives().expire_before == (0, 6)
    assert asyncrl.space.ledger.counts()["expired"] == issued, "all were issued with weights of update 3 allowed"
    asyncrl.space.control.set_learner(LearnerState(0, 8, 0, "training"))
    asyncrl.tick()
    assert asyncrl.space.steering.directives().expire_before == (0, 6)
    actions = [one.decision.action for one in asyncrl.space.steering.decisions()]
    assert actions.count("archive_reset") == 1


def test_fresh_data_only(asyncrl):
    asyncrl("set mode=fresh")
    asyncrl.tick()
    assert {(ticket.min_update, ticket.deadline) for ticket in asyncrl.tickets()} == {(5, 5)}
    assert len(asyncrl.tickets()) == 4


def test_garbage_in_the_steering_keys_ends_nothing(asyncrl):
    client, keys = asyncrl.space.client, asyncrl.space.keys
    client.set(keys.directives, b"\xff{")
    client.hset(keys.operator, mapping={"N": "many", "paused": b"\x00", "temperature": '"hot"', "mode": "[1]"})
    client.hset(keys.state, mapping={"breaker": '{"breakers": 7}', "lag": '"x"', "curriculum": b"\xfe"})
    client.xadd(keys.observations, {"record": '{"buckets": {"x": {"what": 1}}}'})
    client.xadd(keys.observations, {"other": b"\x00"})
    client.xadd(keys.decisions, {"decision": "[]"})
    client.hset(keys.heartbeats, mapping={"actor x": "nonsense", "odd": "{}"})
    client.hset(keys.versions, "7", "{}")
    client.hset(keys.evaluation_results, "e", '{"evaluation_id": 3}')
    client.hset(keys.lines, "1", "null")
    client.hset(keys.operator, "actors", "[" * 100_000)
    client.hset(keys.evaluation_results, "f", _RESULT.replace("COUNTS", '{"a": 1}'))
    client.hset(keys.evaluation_results, "g", _RESULT.replace("COUNTS", '{"1": 1%s}' % ("0" * 400)))
    asyncrl.space.control.beat("learner", "0", {"step_s": "x", "lag_mean": [], "groups_by_bucket": {"a": "x"}}, 60)
    asyncrl.space.control.beat("actor", "actor-0", {"running": "x", "accelerator_busy": None}, 60)
    asyncrl.space.control.beat("actor", "\x1b[2Jz", {}, 60)
    client.xadd(
        keys.decisions, {"decision": '{"policy": "a", "action": "b", "subject": "c", "reason": "", "numbers": 3}'}
    )
    asyncrl.tick()
    assert asyncrl.tickets()
    assert "update 5" in asyncrl("status")
    assert "\x1b" not in asyncrl("status")


_RESULT = (
    '{"evaluation_id": "f", "version": 0, "update": 0, "num_tasks": COUNTS, "num_successes": {}, "mean_reward": 0.5, '
    '"finished_at": 1.0}'
)


def test_a_run_of_which_no_bucket_weighs_anything_says_so_and_goes_on_when_one_does(asyncrl):
    asyncrl("set weight.arithmetic/1=0 weight.arithmetic/2=0 weight.arithmetic/3=0")
    asyncrl.tick()
    assert asyncrl.tickets() == []
    assert "every bucket weighs 0 until `asyncrl set weight.<bucket>=auto`" in asyncrl("status")
    asyncrl("set weight.arithmetic/2=auto")
    asyncrl.tick()
    assert {ticket.task.level for ticket in asyncrl.tickets()} == {2}


def test_a_ticket_is_overdue_by_the_clock_of_redis_alone(asyncrl, monkeypatch):
    now = time.time()
    monkeypatch.setattr(time, "time", lambda: now - 10_000)  # that of this host is slow
    asyncrl.tick()
    asyncrl.tick()
    assert asyncrl.space.ledger.counts()["failed"] == 0


def test_a_key_of_the_wrong_type_is_named(asyncrl):
    space = asyncrl.space
    space.client.hset(space.keys.phase, "a", "b")
    with pytest.raises(redis.ResponseError) as error:
        asyncrl.tick()
    told = explained(error.value, space.client, space.keys)
    assert f"{space.keys.phase} is a hash, not a string" in told
    assert "redis-cli DEL" in told


def test_the_type_of_every_key_is_known():
    names = {name for name, value in vars(Keys).items() if isinstance(value, property)} - {"group_prefix"}
    assert sorted(names) == sorted(name for names in wrong_types._TYPES.values() for name in names)


def test_the_installed_command(asyncrl, server, tmp_path):
    config = override(asyncrl.config, {"redis.url": server.url, "redis.namespace": asyncrl.space.keys.namespace})
    password = tmp_path / "password"
    password.write_text(server.password or "")
    password.chmod(0o600)
    if server.password:
        config = override(config, {"redis.password_file": str(password)})
    write_config(tmp_path / "config.json", config)

    def call(*words):
        command = [sys.executable, "-m", "asyncrl_jax.launchers.operate", f"--run_dir={tmp_path}", *words]
        return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    done = call("set", "N=5")
    assert done.returncode == 0, done.stderr
    assert json.loads(asyncrl.space.client.hget(asyncrl.space.keys.operator, "N")) == 5
    wrong = call("set", "N=1")
    assert (wrong.returncode, wrong.stdout) == (2, "")
    assert "between 2" in wrong.stderr


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (["status"], "unreachable for"),
        (["stauts"], "'stauts' is no command. There are:\nstatus"),
        (["set", "N=1"], "error: N=1: between 2"),
        (["--run_dri=x"], "unknown flag --run_dri: did you mean --run_dir"),
    ],
)
def test_a_run_that_is_over_is_named_soon_and_a_wrong_word_at_once(words, complaint, tmp_path, monkeypatch, capsys):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        url = f"redis://127.0.0.1:{free.getsockname()[1]}/0"
    write_config(tmp_path / "config.json", override(Config(), {"redis.url": url}))
    (tmp_path / "redis").mkdir()
    monkeypatch.setattr(operate, "_PATIENCE_S", 0.1)
    monkeypatch.setattr(sys, "argv", ["asyncrl", f"--run_dir={tmp_path}", *words])
    with pytest.raises(SystemExit) as ended:
        operate.main(parse_words(sys.argv))
    errors = capsys.readouterr().err
    assert ended.value.code == 2
    assert complaint in errors
    assert ("--resume=" in errors) == (words == ["status"])


def test_the_number_of_actors_by_hand_drains_the_last_ones_before_the_fleet_shrinks(asyncrl):
    """Each leader of this test is a new one: what drains is in Redis."""
    space = asyncrl.space
    space.control.beat("actor", "actor-1", {"drained": False}, 60)
    asyncrl("set actors=1")
    asyncrl.tick()
    assert space.steering.directives().fleet_size == 2
    assert space.steering.directives().actors["actor-1"].drain
    assert "fleet      1 actors, 1 more drain" in asyncrl("status")
    space.control.beat("actor", "actor-1", {"drained": True, "evaluating": 3}, 60)
    asyncrl.tick()
    assert space.steering.directives().fleet_size == 2, "it evaluates"
    space.control.beat("actor", "actor-1", {"drained": True, "evaluating": 0}, 60)
    asyncrl.tick()
    assert space.steering.directives().fleet_size == 1
    assert space.steering.directives().actors["actor-1"].drain, "until it is gone"
    assert (asyncrl.last().policy, asyncrl.last().action) == ("autoscale", "remove")
    asyncrl("set actors=5")
    asyncrl.tick()
    assert space.steering.directives().fleet_size == 5
    assert not space.steering.directives().actors
    with pytest.raises(ValueError, match="a number of actors, 1 or more"):
        asyncrl("set actors=0")


def test_a_cluster_is_asked_only_after_redis_has_taken_the_round(asyncrl):
    """A leader that has been succeeded is refused the write, and then asks for nothing."""
    space, asked = asyncrl.space, []
    keeper = SimpleNamespace(ask=asked.append)
    Orchestrator.on(space.client, space.keys, asyncrl.config, None, None, keeper).tick()
    assert asked == [{"actor": 2}]
    assert Leadership(space.client, space.keys, "another").acquire(60.0) is not None
    stale = Orchestrator.on(space.client, space.keys, asyncrl.config, Fence(space.keys.leader, "stale"), None, keeper)
    with pytest.raises(Deposed):
        stale.tick()
    assert len(asked) == 1


def test_status_names_a_role_that_was_started_with_other_settings(asyncrl):
    shared = SharedSettings(asyncrl.space.client, asyncrl.space.keys)
    shared.state("learner", asyncrl.config)
    assert "settings " not in asyncrl("status")
    shared.state("actor", override(asyncrl.config, {"lag.token_updates": 6}))
    assert "settings   the actor was last started with another lag.token_updates than config.json" in asyncrl("status")
