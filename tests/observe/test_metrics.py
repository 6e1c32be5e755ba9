import json

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from asyncrl_jax.observe.metrics import Metrics, read_rows


def test_rows_are_read_back_and_tensorboard_holds_the_same(tmp_path):
    metrics = Metrics(tmp_path, "learner")
    metrics.write(1, {"reward": 0.25, "tokens": np.int64(7), "load": {"layer0": np.float32(1.5)}, "phase": "training"})
    metrics.write(2, {"reward": 0.5})
    metrics.close()
    first, second = read_rows(tmp_path / "metrics" / "learner.jsonl")
    assert first["reward"] == 0.25
    assert first["tokens"] == 7
    assert first["load"] == {"layer0": 1.5}
    assert first["phase"] == "training"
    assert second["step"] == 2
    events = EventAccumulator(str(tmp_path / "metrics" / "learner"))
    events.Reload()
    assert [(e.step, e.value) for e in events.Scalars("reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("load/layer0")] == [(1, 1.5)]


def test_what_is_not_finite_is_null_and_the_line_stays_json(tmp_path):
    metrics = Metrics(tmp_path, "learner")
    metrics.write(1, {"loss": float("nan"), "norm": np.float32("inf"), "loads": [1.0, float("inf")]})
    metrics.close()
    row = json.loads((tmp_path / "metrics" / "learner.jsonl").read_text(), parse_constant=pytest.fail)
    assert (row["loss"], row["norm"], row["loads"]) == (None, None, [1.0, None])


def test_a_resumed_writer_appends_and_the_last_row_of_a_step_counts(tmp_path):
    for value in (1.0, 2.0):
        metrics = Metrics(tmp_path, "learner")
        metrics.write(3, {"reward": value})
        metrics.close()
    (row,) = read_rows(tmp_path / "metrics" / "learner.jsonl")
    assert row["reward"] == 2.0


def test_a_line_cut_off_by_a_kill_costs_only_itself(tmp_path):
    metrics = Metrics(tmp_path, "learner")
    metrics.write(1, {"reward": 1.0})
    metrics.close()
    path = tmp_path / "metrics" / "learner.jsonl"
    with path.open("a") as file:
        file.write('{"step": 2, "rew')
    assert [row["step"] for row in read_rows(path)] == [1]
    metrics = Metrics(tmp_path, "learner")
    metrics.write(2, {"reward": 2.0})
    metrics.close()
    assert [row["step"] for row in read_rows(path)] == [1, 2]


def test_any_other_damaged_line_is_named(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"step": 1}\nnonsense\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"rows\.jsonl:2"):
        read_rows(path)


def test_no_file_is_no_rows(tmp_path):
    assert read_rows(tmp_path / "none.jsonl") == []
