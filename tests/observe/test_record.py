import json

from asyncrl_jax.config import Config, override, to_json
from asyncrl_jax.observe.record import read_record, write_record


def test_a_record_holds_what_is_needed_to_run_it_again(tmp_path):
    (tmp_path / "demonstrations.avro").write_bytes(b"abc")
    config = override(Config(), {"seed": 7})
    write_record(tmp_path, config, {"XLA_FLAGS": "--x", "AWS_SECRET_ACCESS_KEY": "secret"})
    (session,) = read_record(tmp_path)
    assert session["config"] == json.loads(json.dumps(to_json(config)))
    assert session["seed"] == 7
    assert session["packages"]["jax"]
    assert session["code"]["version"]
    assert session["tasks"]["identity"]
    assert session["tasks"]["demonstrations_sha256"].startswith("ba7816bf")  # SHA-256 of abc
    assert session["hardware"]["cores"] >= 1
    assert session["variables"] == {"XLA_FLAGS": "--x"}
    assert "secret" not in (tmp_path / "record.json").read_text()


def test_every_session_is_added(tmp_path):
    for seed in (1, 1):
        write_record(tmp_path, override(Config(), {"seed": seed}), {})
    assert len(read_record(tmp_path)) == 2


def test_no_record_is_no_session(tmp_path):
    assert read_record(tmp_path) == []
