"""Rejection sampling: from the archive of a run to demonstrations, and what the supervised step makes of them."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.config import Config, override
from asyncrl_jax.config_file import write_config
from asyncrl_jax.learner.canary import canary_logprobs
from asyncrl_jax.learner.quality import quality_filter
from asyncrl_jax.learner.rejection import archived_samples, demonstrations_of, filter_run
from asyncrl_jax.learner.state import create_state
from asyncrl_jax.learner.supervised import imitation_terms
from asyncrl_jax.learner.warm_start import warm_start
from asyncrl_jax.transport.archive import ArchivedGroup, write_groups
from asyncrl_jax.transport.demonstrations import read_demonstrations
from asyncrl_jax.types import Exploration, Group
from tests.builders import make_ticket, make_trajectory

REWARDS = (1.0, 0.75, 0.0, 0.0)


@pytest.fixture
def run_dir(tmp_path):
    """A run of two checkpoints: twelve groups of four, whose members differ."""
    config = override(Config(), {"learner.group_size": 4, "run_dir": str(tmp_path)})
    write_config(tmp_path / "config.json", config)
    (tmp_path / "archive").mkdir()
    for update in (0, 1):
        write_groups(
            tmp_path / "archive" / f"groups-0-{update + 1}.avro",
            [archived(6 * update + index, update) for index in range(6)],
        )
    return tmp_path


def archived(index, update):
    members = [
        make_trajectory([1, 2 + index, 3 + member], [-1, 0, 0], reward=reward, success=reward == 1)
        for member, reward in enumerate(REWARDS)
    ]
    ticket = make_ticket(f"1-{index + 1}", group_size=4, index=index)
    return ArchivedGroup(Group(ticket, tuple(members), "actor-0"), 1.0, 2.0, 0, (update,))


def test_the_best_of_a_run_become_demonstrations_with_their_weights(run_dir):
    counts = filter_run(run_dir, run_dir / "kept.avro", 20, identity="what-tasks", negative_weight=0.25, per_task=3)
    assert counts["sampled"] == 48
    assert counts["offered"] == {"high": 12, "middle": 12, "low": 24}
    assert counts["kept"] == {"high": 10, "middle": 6, "low": 4}
    kept = read_demonstrations(run_dir / "kept.avro")
    assert (kept.environment, kept.identity, kept.vocab_size) == ("arithmetic", "what-tasks", Config().model.vocab_size)
    weights = [row.weight for row in kept.rows]
    assert weights == [1.0] * 10 + [0.75] * 6 + [-0.25] * 4
    assert all(row.success == (row.weight == 1) for row in kept.rows)
    assert all(row.loss_mask == (0, 1, 1) for row in kept.rows)


def test_the_filter_depends_on_the_archive_alone_and_can_leave_out_its_beginning(run_dir):
    archive = run_dir / "archive"
    assert [s.task.index for s in archived_samples(archive, from_update=1)[::4]] == list(range(6, 12))
    outputs = [run_dir / name for name in ("a.avro", "b.avro")]
    for output in outputs:
        filter_run(run_dir, output, 20, identity="what-tasks")
    assert read_demonstrations(outputs[0]) == read_demonstrations(outputs[1])


def test_what_a_uniform_policy_said_is_neither_imitated_nor_avoided(run_dir):
    row = archived(20, 2)
    first, *others = row.group.trajectories
    group = dataclasses.replace(
        row.group,
        trajectories=(
            dataclasses.replace(first, exploration=Exploration.UNIFORM),
            dataclasses.replace(others[0], exploration=Exploration.OLDER),
            *others[1:],
        ),
    )
    write_groups(run_dir / "archive" / "groups-0-3.avro", [dataclasses.replace(row, group=group)])
    samples = archived_samples(run_dir / "archive", from_update=2)
    assert [s.trajectory.reward for s in samples] == list(REWARDS[1:])


def test_without_negatives_nothing_is_avoided(run_dir):
    kept = quality_filter(archived_samples(run_dir / "archive"), 20, per_task=3)
    assert min(row.weight for row in demonstrations_of(kept, 0.0)) == 0.75


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"high_reward": 2.0, "low_reward": 2.0}, "48 trajectories, none with a reward to imitate"),
        ({"negative_weight": -1.0}, "negative_weight=-1.0: at least 0"),
        ({"from_update": 9}, "0 trajectories, none with a reward"),
        ({"per_task": 0}, "per_task=0"),
    ],
)
def test_what_leaves_nothing_to_imitate_is_refused_and_writes_nothing(run_dir, settings, message):
    with pytest.raises(ValueError, match=message):
        filter_run(run_dir, run_dir / "kept.avro", 20, identity="what-tasks", **settings)
    assert not (run_dir / "kept.avro").exists()


def test_a_directory_that_is_no_run_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"config\.json"):
        filter_run(tmp_path, tmp_path / "kept.avro", 20, identity="what-tasks")


def test_imitation_raises_wanted_tokens_and_lowers_unwanted_ones_within_bounds():
    logprobs = jnp.log(jnp.array([[0.25, 0.25, 1e-9, 1.0]]))
    weights = jnp.array([[2.0, -0.5, -1.0, -1.0]])
    terms, gradient = jax.value_and_grad(lambda x: jnp.sum(imitation_terms(x, weights)))(logprobs)
    expected = -2 * np.log(0.25) - 0.5 * np.log(0.75)
    np.testing.assert_allclose(terms - imitation_terms(logprobs, weights)[0, 3], expected, rtol=1e-5)
    assert gradient[0, 0] == -2
    np.testing.assert_allclose(gradient[0, 1], 0.5 * 0.25 / 0.75, rtol=1e-5)
    assert 0 <= gradient[0, 2] < 1e-8  # it is unlikely already
    assert np.isfinite(gradient).all()


def test_what_not_to_say_becomes_less_likely_and_the_rest_is_learnt():
    config = override(
        Config(),
        {
            "model.num_layers": 1,
            "model.hidden_dim": 16,
            "model.num_heads": 2,
            "model.num_kv_heads": 1,
            "model.head_dim": 8,
            "model.num_experts": 4,
            "model.expert_dim": 16,
            "warm_start.num_steps": 60,
            "warm_start.batch_rows": 4,
            "warm_start.learning_rate": 1e-2,
        },
    )
    mask = np.array([0, 1, 1], np.uint8)
    good, bad = np.array([1, 4, 5], np.int32), np.array([1, 4, 6], np.int32)
    chances = {}
    for name, rows in {
        "imitated": [(good, mask), (bad, mask)],
        "avoided": [(good, mask), (bad, np.array([0, 0, 1], np.uint8), -1.0)],
    }.items():
        accuracy = []
        report = lambda step, metrics, accuracy=accuracy: accuracy.append(metrics["accuracy"])  # noqa: E731
        state = warm_start(config, create_state(config, 0), rows, report)
        chances[name] = np.exp(canary_logprobs(config, state.params, bad[None])[0, 1])
        assert accuracy[-1] > 0.6
    assert chances["imitated"] > 0.3
    assert chances["avoided"] < 0.1
