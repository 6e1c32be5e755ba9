"""Roles that were started with different settings are told so by name, without their values being given away."""

from asyncrl_jax.config import Config, override
from asyncrl_jax.transport.shared_settings import SharedSettings


def test_a_role_started_otherwise_is_told_which_setting_and_where(run):
    shared = SharedSettings(run.client, run.keys)
    assert shared.state("learner", Config()) == []
    assert shared.state("actor", Config()) == []
    standby = override(Config(), {"lag.token_updates": 6, "environment.level_weights": (1.0, 2.0)})
    lines = shared.state("orchestrator", standby)
    assert [line.split(" here, and otherwise where the ")[1].split()[0] for line in lines] == ["actor", "learner"]
    for line in lines:
        assert "--config.lag.token_updates=6, --config.environment.level_weights=1.0,2.0 here" in line
    assert list(shared.differing(Config())) == ["orchestrator"]


def test_a_second_instance_of_a_role_is_held_against_the_first(run):
    shared = SharedSettings(run.client, run.keys)
    shared.state("orchestrator", Config())
    assert "--config.seed=7 here, and otherwise where the orchestrator" in " ".join(
        shared.state("orchestrator", override(Config(), {"seed": 7}))
    )
    assert shared.state("orchestrator", override(Config(), {"seed": 7})) == []  # its own statement is the newest


def test_what_belongs_to_one_role_or_machine_may_differ(run):
    shared = SharedSettings(run.client, run.keys)
    shared.state("learner", Config())
    own = {"run_dir": "/elsewhere", "learner.learning_rate": 1.0, "actor.slots": 3, "model.dispatch": "dense"}
    assert shared.state("actor", override(Config(), own)) == []


def test_values_are_not_in_redis_and_garbage_there_is_no_statement(run):
    shared = SharedSettings(run.client, run.keys)
    secret = {"environment.name": "gymnasium:Taxi-v3", "environment.arguments": '{"key": "s3cret"}'}
    shared.state("learner", override(Config(), secret))
    assert b"s3cret" not in run.client.hget(run.keys.settings, "learner")
    shared.state("actor", Config())
    (line,) = shared.state("learner", override(Config(), secret | {"environment.arguments": '{"key": "s3cret2"}'}))[-1:]
    assert "--config.environment.arguments" in line
    assert "s3cret" not in line
    for garbage in (b"\xff", b"[]", b"7", b'{"seed": [1, {}]}', b"[" * 2000):
        run.client.hset(run.keys.settings, b"\xfeactor", garbage)
        assert set(shared.differing(Config())) <= {"learner", "\ufffdactor"}


def test_settings_of_an_older_or_newer_release_that_only_one_knows_are_no_difference(run):
    shared = SharedSettings(run.client, run.keys)
    run.client.hset(run.keys.settings, "learner", '{"lag.gone_since": "0"}')
    assert shared.differing(Config()) == {}
