import dataclasses
import json
import re

import pytest
from rich.console import Console

from asyncrl_jax.config import Config, override
from asyncrl_jax.observe import picture
from asyncrl_jax.observe.report import headline, page, print_summary, write_report
from asyncrl_jax.observe.summary import read_sessions, summarise, wilson_interval
from tests.observe.synthetic import evaluation, run_data

KEYS = {
    "success_before",
    "success_after",
    "success_by_level_before",
    "success_by_level_after",
    "success_undemonstrated_before",
    "success_undemonstrated_after",
    "updates",
    "versions",
    "wall_s",
    "mode",
    "seed",
    "learner_busy",
    "tokens_trained",
    "lag",
    "ledger",
    "mixed_version_trajectories",
    "restarts",
    "evaluation_tasks_before",
    "evaluation_tasks_after",
}


def test_the_keys_of_summary_json_are_fixed():
    summary = summarise(run_data())
    assert summary.keys() >= KEYS
    assert set(summary["lag"]) == {"bound", "mean", "p95", "max", "over_bound_tokens"}
    ends = {"trained", "expired", "filtered", "quarantined", "failed", "undone", "pending"}
    assert set(summary["ledger"]) == {"issued", *ends}


def test_success_counts_demonstrated_levels_and_keeps_the_others_apart():
    results = [evaluation(0, {1: 0.4, 2: 0.2, 3: 0.0}, 10, 1.0), evaluation(5, {1: 1.0, 2: 0.8, 3: 0.5}, 10, 2.0)]
    summary = summarise(dataclasses.replace(run_data(num_updates=5), evaluations=results))
    assert (summary["success_before"], summary["success_after"]) == (0.3, 0.9)
    assert (summary["success_undemonstrated_before"], summary["success_undemonstrated_after"]) == (0.0, 0.5)
    assert summary["success_by_level_after"] == {"1": 1.0, "2": 0.8, "3": 0.5}
    assert summary["evaluation_tasks_after"] == {"1": 10, "2": 10, "3": 10}


def test_reward_on_held_out_tasks_stands_beside_success_where_nothing_counts_as_one():
    """A task that pays by parts may be learnt without one whole success."""
    results = [evaluation(0, {1: 0.0}, 10, 1.0), evaluation(5, {1: 0.0}, 10, 2.0)]
    results = [dataclasses.replace(one, mean_reward=reward) for one, reward in zip(results, (0.02, 0.31), strict=True)]
    data = dataclasses.replace(run_data(num_updates=5), evaluations=results)
    assert ("reward, held-out", "0.020 → 0.310") in headline(summarise(data))
    assert ("reward, held-out", "– → –") in headline(summarise(dataclasses.replace(data, evaluations=[])))


def test_of_two_evaluations_of_one_version_the_larger_counts():
    small, large = evaluation(0, {1: 0.1, 2: 0.1, 3: 0.1}, 10, 1.0), evaluation(0, {1: 0.5, 2: 0.5, 3: 0.5}, 40, 2.0)
    for results in ([small, large], [large, small]):
        data = dataclasses.replace(run_data(num_updates=1), evaluations=results)
        assert data.before is large
        assert data.after is large


def test_lag_is_computed_from_the_histogram_of_all_trained_tokens():
    data = run_data(num_updates=3)
    audit = dataclasses.replace(data.audit, lag_histogram={0: 50, 1: 44, 4: 5, 7: 1})
    lag = summarise(dataclasses.replace(data, audit=audit))["lag"]
    assert lag == {"bound": 4, "mean": pytest.approx(0.71), "p95": 4.0, "max": 7.0, "over_bound_tokens": 1}


def test_a_run_that_ended_before_its_first_update_has_a_summary_and_a_picture():
    data = run_data(num_updates=0)
    data = dataclasses.replace(data, evaluations=[], audit=dataclasses.replace(data.audit, lag_histogram={}))
    summary = summarise(data)
    assert (summary["success_before"], summary["learner_busy"], summary["lag"]["mean"]) == (None, None, None)
    picture.draw(data)


def test_a_config_without_undemonstrated_levels_has_none():
    data = run_data(config=override(Config(), {"environment.demonstrated_levels": (1, 2, 3)}))
    assert summarise(data)["success_undemonstrated_after"] is None


def test_a_session_that_was_killed_ends_with_its_last_row(tmp_path):
    (tmp_path / "record.json").write_text(json.dumps({"sessions": [{"started_at": 100.0}, {"started_at": 500.0}]}))
    rows = [{"time": 120.0}, {"time": 150.0}, {"time": 510.0}]
    assert read_sessions(tmp_path, rows, ended_at=560.0) == [(100.0, 150.0), (500.0, 560.0)]


def test_the_pause_between_sessions_is_not_running_time():
    data = dataclasses.replace(run_data(num_updates=1), sessions=[(100.0, 150.0), (500.0, 560.0)])
    assert data.wall_s == 110.0
    assert [data.active_s(moment) for moment in (100.0, 140.0, 300.0, 510.0)] == [0.0, 40.0, 50.0, 60.0]


def test_the_interval_holds_the_share_and_stays_inside_0_and_1():
    assert wilson_interval(5, 10) == pytest.approx((0.2366, 0.7634), abs=1e-4)  # the value in Wilson's tables
    for successes in (0, 1, 9, 10):
        low, high = wilson_interval(successes, 10)
        assert 0 <= low <= successes / 10 <= high <= 1
    with pytest.raises(ValueError, match="no trials"):
        wilson_interval(0, 0)


def test_the_axes_of_the_picture_are_honest():
    data = run_data()
    success, freshness, throughput, busy = picture.draw(data).axes
    assert success.get_ylim() == (0.0, 1.0)
    assert busy.get_ylim() == (0.0, 1.0)
    assert throughput.get_ylim()[0] == 0.0
    bounds = [line for line in freshness.lines if line.get_label() == "bound N = 4"]
    assert bounds[0].get_ydata() == [4, 4]
    labels = success.get_legend_handles_labels()[1]
    assert "levels 1, 2, demonstrated" in labels
    assert "level 3, never demonstrated" in labels


def test_an_evaluation_stands_where_its_weights_came_to_be():
    data = run_data()
    points = picture.draw(data).axes[0].containers[0].lines[0].get_xdata()
    assert points[1] == pytest.approx(data.active_s(data.rows[19]["time"]) / 60)  # update 20 is row 20
    assert points[0] < data.active_s(data.rows[0]["time"]) / 60


def test_the_report_is_whole_and_loads_nothing_from_elsewhere(tmp_path):
    summary = write_report(tmp_path, run_data())
    assert json.loads((tmp_path / "summary.json").read_text()) == json.loads(json.dumps(summary))
    assert (tmp_path / "run.png").read_bytes().startswith(b"\x89PNG")
    text = (tmp_path / "run.html").read_text()
    assert "<svg" in text
    assert not re.search(r"(src|href)=.?https?:", text)


def test_the_page_escapes_what_it_shows(tmp_path):
    data = run_data(num_updates=1, config=override(Config(), {"run_dir": "<script>x</script>"}))
    assert "<script>" not in page(tmp_path / "a<b", data, summarise(data), "<svg></svg>")


def test_a_ledger_that_does_not_balance_is_said_on_console_and_page(tmp_path):
    data = run_data(num_updates=1)
    data = dataclasses.replace(data, audit=dataclasses.replace(data.audit, problems=("ended more than once: 1-7",)))
    console = Console(record=True, width=120)
    print_summary(console, tmp_path, summary := summarise(data))
    assert "ended more than once: 1-7" in console.export_text()
    assert "does not balance" in page(tmp_path, data, summary, "")
