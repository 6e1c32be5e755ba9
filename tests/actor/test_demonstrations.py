import contextlib
import re

import fastavro
import pytest

from asyncrl_jax.actor.demonstrations import write_demonstrations
from asyncrl_jax.actor.envs.arithmetic import Arithmetic, decode, is_heldout
from asyncrl_jax.config import Config, override
from asyncrl_jax.transport.demonstrations import (
    Demonstration,
    DemonstrationSet,
    read_demonstrations,
    save_demonstrations,
)

CONFIG = override(Config(), {"warm_start.num_demonstrations": 400})


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    path = tmp_path_factory.mktemp("demonstrations") / "demonstrations.avro"
    return path, write_demonstrations(CONFIG, path)


def test_round_trip(written):
    path, demonstrations = written
    assert read_demonstrations(path) == demonstrations
    assert len(demonstrations.rows) == 400
    assert demonstrations.identity == Arithmetic.identity


def test_any_avro_reader_opens_it(written):
    path, demonstrations = written
    with path.open("rb") as file:
        rows = list(fastavro.reader(file))
    assert [tuple(row["tokens"]) for row in rows] == [row.tokens for row in demonstrations.rows]


def test_the_file_depends_on_the_config_alone(written, tmp_path):
    assert write_demonstrations(CONFIG, tmp_path / "again.avro") == written[1]
    assert write_demonstrations(override(CONFIG, {"seed": 1}), tmp_path / "other.avro") != written[1]


def test_mask_covers_exactly_what_the_policy_says(written):
    for row in written[1].rows:
        text = decode(row.tokens)
        spoken = "".join(symbol if said else " " for symbol, said in zip(text, row.loss_mask, strict=True))
        forced = "".join(" " if said else symbol for symbol, said in zip(text, row.loss_mask, strict=True))
        assert re.fullmatch(r" +(<[-+0-9]+> +)*#-?\d+\$", spoken), spoken
        assert re.fullmatch(r"\^[-+0-9]+= *((-?\d+|!); *)*", forced), forced


def test_only_demonstrated_levels_of_the_training_split(written):
    for row in written[1].rows:
        expression = decode(row.tokens).split("=")[0][1:]
        assert not is_heldout(expression)
        assert len(re.findall(r"\d+", expression)) <= 4  # level 3 has 5 terms
    assert {row.level for row in written[1].rows} == {1, 2}


def test_solver_is_careless_as_stated(written):
    rows = written[1].rows
    flawed = sum(not row.success for row in rows) / len(rows)
    assert 0.4 < flawed < 0.7  # some careless endings are right by chance: one call solves a sum of two terms
    assert any("!;" in decode(row.tokens) for row in rows)
    assert any("<" not in decode(row.tokens) for row in rows)


def test_limits_too_tight_for_any_episode(tmp_path):
    config = override(CONFIG, {"environment.max_tokens": 4})
    with pytest.raises(ValueError, match="max_tokens=4"):
        write_demonstrations(config, tmp_path / "none.avro")


@pytest.mark.parametrize(
    "row",
    [
        Demonstration(level=1, tokens=(1, 2), loss_mask=(0,), success=True),
        Demonstration(level=1, tokens=(1, 2), loss_mask=(0, 2), success=True),
        Demonstration(level=1, tokens=(1, 2), loss_mask=(0, 0), success=True),
        Demonstration(level=1, tokens=(1, 21), loss_mask=(0, 1), success=True),
        Demonstration(level=1, tokens=(1, -1), loss_mask=(0, 1), success=True),
        Demonstration(level=1, tokens=(), loss_mask=(), success=True),
    ],
)
def test_malformed_rows_are_refused(row, tmp_path):
    with pytest.raises(ValueError, match="demonstration 0"):
        save_demonstrations(tmp_path / "bad.avro", DemonstrationSet("arithmetic", "x", 21, (row,)))
    assert list(tmp_path.iterdir()) == []


def test_damaged_files_are_refused_by_name(written, tmp_path):
    data = written[0].read_bytes()
    damaged = tmp_path / "damaged.avro"
    for cut in (0, 1, 10, 100, len(data) // 2, len(data) - 1):
        damaged.write_bytes(data[:cut])
        with pytest.raises(ValueError, match="is not a file of demonstrations"):
            read_demonstrations(damaged)
    damaged.write_bytes(b"not avro at all")
    with pytest.raises(ValueError, match="is not a file of demonstrations"):
        read_demonstrations(damaged)
    for position in range(0, len(data), 997):
        flipped = bytearray(data)
        flipped[position] ^= 0xFF
        damaged.write_bytes(flipped)
        with contextlib.suppress(ValueError):  # any other exception fails the test
            read_demonstrations(damaged)
