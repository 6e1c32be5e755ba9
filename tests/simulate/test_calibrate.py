import dataclasses
import json

import numpy as np
import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import read_config, write_config
from asyncrl_jax.laws import Delays, parse
from asyncrl_jax.seeds import member_seed
from asyncrl_jax.simulate.calibrate import calibrate
from asyncrl_jax.simulate.simulation import simulate
from asyncrl_jax.transport.archive import ArchivedGroup, read_groups, write_groups
from asyncrl_jax.types import FinishReason, Group, Task, Ticket, Trajectory

UPDATES, UPDATE_S, EPISODE_S, PUBLISH_S, LOOK_S, START_S, HANDOVER_S = 20, 2.0, 0.75, 0.5, 0.375, 0.125, 0.125


def trajectory(version, start):
    return Trajectory(
        tokens=np.arange(5, dtype=np.int32),
        loss_mask=np.asarray([0, 1, 1, 0, 1], np.uint8),
        behaviour_logprobs=np.zeros(5, np.float32),
        policy_versions=np.asarray([-1, version, version, -1, version], np.int32),
        reward=1.0,
        reward_parts=np.asarray([1.0, 0.0, 0.0, 0.0], np.float32),
        success=True,
        finish_reason=FinishReason.ANSWERED,
        num_turns=1,
        sampling_started_at=start,
        sampling_ended_at=start + EPISODE_S,
    )


@pytest.fixture
def run_dir(tmp_path):
    """A run of known times: update u ends at 100 + 2 u, a ticket follows 0.375 s later, and v_u samples 0.5 s later."""
    config = override(Config(), {"learner.groups_per_update": 1, "learner.group_size": 2, "learner.num_updates": 20})
    write_config(tmp_path / "config.json", config)
    (tmp_path / "metrics").mkdir()
    (tmp_path / "archive").mkdir()
    rows = [{"time": 100.0 + 2 * u, "step": u, "step_s": UPDATE_S, "zero_variance_share": 0.5} for u in range(1, 21)]
    (tmp_path / "metrics" / "learner.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    groups = []
    for update in range(UPDATES):
        start = 100.0 + 2 * update + PUBLISH_S
        task = Task("arithmetic", "train", 1 + update % 3, update)
        ticket = Ticket(f"1-{update}", task, 2, 0, 0, 4, 1.0, 1, issued_at=start - START_S)
        group = Group(ticket, (trajectory(update, start), trajectory(update, start)), "actor-0")
        groups.append(ArchivedGroup(group, start + EPISODE_S + HANDOVER_S, 300.0, 0, (update,)))
    write_groups(tmp_path / "archive" / "groups-000-00000020.avro", groups)
    return tmp_path


def test_the_times_of_a_run_are_read_back(run_dir):
    config, inputs = calibrate(run_dir)
    assert config.learner.num_updates == 20
    assert set(parse(inputs.update_s).numbers) == {UPDATE_S}
    for level in (1, 2, 3):
        assert set(np.round(inputs.law("episode_s", level).numbers, 3)) == {EPISODE_S}
        assert set(inputs.law("episode_tokens", level).numbers) == {3.0}
    assert inputs.publish_s == pytest.approx(PUBLISH_S, abs=1e-3)
    assert inputs.dispatch_s == pytest.approx(LOOK_S + START_S, abs=1e-3)
    assert inputs.handover_s == pytest.approx(HANDOVER_S, abs=1e-3)
    assert inputs.zero_variance_share == 0.5


def test_an_episode_under_way_tells_when_it_went_over_to_a_version(run_dir):
    """Also where no episode began as soon as it could: a first token comes 0.9 s later than the version here."""
    (path,) = (run_dir / "archive").glob("groups-*.avro")
    rows = []
    for row in read_groups(path):
        (update,) = row.updates
        arrived = 100.0 + 2 * update + PUBLISH_S
        late, crossing = trajectory(update, arrived + 0.9), trajectory(update, arrived - EPISODE_S * 2 / 3)
        crossing.policy_versions[1:3] = max(update - 1, 0)  # two tokens of three
        rows.append(dataclasses.replace(row, group=dataclasses.replace(row.group, trajectories=(late, crossing))))
    write_groups(path, rows)
    _, inputs = calibrate(run_dir)
    assert inputs.publish_s == pytest.approx(PUBLISH_S, abs=1e-3)


def change_rows(run_dir, change):
    path = run_dir / "metrics" / "learner.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps(row | change(row)) + "\n" for row in rows))


def test_what_the_learner_says_of_publishing_is_told_from_what_actors_make_of_it(run_dir):
    change_rows(run_dir, lambda row: {"publish_s": 0.125, "publish_wait_s": 0.25})
    _, inputs = calibrate(run_dir)
    assert inputs.publish_s == 0.125
    assert inputs.publish_s + inputs.swap_s == pytest.approx(PUBLISH_S, abs=1e-3)
    assert set(parse(inputs.update_s).numbers) == {UPDATE_S - 0.25}  # an update waits for the version before by itself


def test_updates_with_few_episodes_beside_them_have_a_law_of_their_own(run_dir):
    """Every update but four has two episodes of 0.75 s beside it, and takes longer."""
    (path,) = (run_dir / "archive").glob("groups-*.avro")
    alone = (8, 11, 14, 17)
    write_groups(path, [row for row in read_groups(path) if row.updates[0] + 1 not in alone])
    change_rows(run_dir, lambda row: {"step_s": 1.0 if row["step"] in alone else UPDATE_S})
    _, inputs = calibrate(run_dir)
    assert [set(inputs.law("update_s", level).numbers) for level in (1, 2)] == [{1.0}, {UPDATE_S}]
    assert inputs.update_loads == (0.0, pytest.approx(2 * EPISODE_S / UPDATE_S))


def test_a_version_is_of_as_many_updates_as_are_published_together(run_dir):
    """Taken for one update each, versions seem to come later and later: by 2 s each here."""
    config = read_config(run_dir / "config.json")
    write_config(run_dir / "config.json", override(config, {"weights.publish_every_updates": 2}))
    (path,) = (run_dir / "archive").glob("groups-*.avro")
    rows = []
    for row in read_groups(path):
        (update,) = row.updates
        start = 100.0 + 2 * update + PUBLISH_S
        sampled = (trajectory(update // 2, start), trajectory(update // 2, start))
        rows.append(dataclasses.replace(row, group=dataclasses.replace(row.group, trajectories=sampled)))
    write_groups(path, rows)
    _, inputs = calibrate(run_dir)
    assert inputs.publish_s == pytest.approx(PUBLISH_S, abs=1e-3)


def test_an_added_delay_is_taken_out_of_what_was_measured(run_dir):
    """It is drawn anew by the simulation, so that it can be another one there."""
    config, law = read_config(run_dir / "config.json"), "lognormal:0.05:1.0"
    write_config(run_dir / "config.json", override(config, {"environment.turn_delay_s": law}))
    (path,) = (run_dir / "archive").glob("groups-*.avro")
    rows = []
    for row in read_groups(path):
        delayed = [
            dataclasses.replace(
                one,
                sampling_ended_at=one.sampling_ended_at
                + Delays(law, member_seed(row.group.ticket.seed, member, 1)).next_s(),
            )
            for member, one in enumerate(row.group.trajectories)
        ]
        rows.append(dataclasses.replace(row, group=dataclasses.replace(row.group, trajectories=tuple(delayed))))
    # Whose members are missing is not said, and so not what they waited: a partial group must not count.
    group = dataclasses.replace(rows[-1].group, trajectories=rows[-1].group.trajectories[1:], partial=True)
    write_groups(path, [*rows[:-1], dataclasses.replace(rows[-1], group=group)])
    config, inputs = calibrate(run_dir)
    assert config.environment.turn_delay_s == law
    assert set(np.round(inputs.law("episode_s").numbers, 3)) == {EPISODE_S}
    assert set(inputs.law("turns").numbers) == {1.0}


def test_a_calibrated_simulation_runs_as_long_as_its_learner_does(run_dir):
    outcome = simulate(*calibrate(run_dir))
    assert outcome.updates == 20
    assert outcome.wall_s == pytest.approx(20 * UPDATE_S, rel=0.1)


def test_too_little_of_a_run_is_refused_by_name(run_dir, tmp_path_factory):
    with pytest.raises(ValueError, match=r"config\.json"):
        calibrate(tmp_path_factory.mktemp("empty"))
    rows = (run_dir / "metrics" / "learner.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "metrics" / "learner.jsonl").write_text("".join(rows[:5]))
    with pytest.raises(ValueError, match="5 updates are too few"):
        calibrate(run_dir)
