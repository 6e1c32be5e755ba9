"""Intake: what arrives is counted whole; what is left out is named, and there is an end to leaving out."""

import dataclasses

import numpy as np
import pytest

from asyncrl_jax.config_data import PoolConfig
from asyncrl_jax.learner.intake import Intake, traits_of
from asyncrl_jax.learner.pool import Pool
from asyncrl_jax.transport.codec import Limits
from asyncrl_jax.types import Exploration, Group, Outcome, Trajectory
from tests.builders import make_ticket, make_trajectory


def member(reward: float, length: int = 6) -> Trajectory:
    return make_trajectory(np.ones(length), [-1, -1] + [0] * (length - 2), reward=reward, success=reward >= 1)


def group(count: int, rewards: list[float]) -> Group:
    ticket = make_ticket(f"1-{count}", index=count, group_size=len(rewards))
    return Group(ticket, tuple(map(member, rewards)), "actor-0", enqueued_at=3.0)


@dataclasses.dataclass
class Queue:
    """Stands for the reader: what it hands out, and what it was told to settle."""

    groups: list[Group]
    settled: list[tuple[str, Outcome, str]] = dataclasses.field(default_factory=list)

    def read(self, count, block_ms):
        @dataclasses.dataclass
        class Read:
            group: Group
            partition: int = 0
            entry_id: str = "1-0"

            def decode(self, limits):
                return self.group

        handed, self.groups = self.groups, []
        return [Read(group) for group in handed]

    def complete(self, pairs, outcome, update, reason=""):
        self.settled += [(ticket_id, outcome, reason) for _, ticket_id in pairs]


def intake_of(groups: list[Group], refill: int) -> tuple[Intake, Pool, Queue]:
    queue, pool = Queue(groups), Pool(1, PoolConfig())
    limits = Limits(max_message_bytes=10**6, max_tokens=64, vocab_size=32, max_group_size=8)
    return Intake(queue, limits, pool, lambda version: True, refill_groups=refill, explores=True), pool, queue


HOPELESS, SOLVED, MIXED = [0.0, 0.0], [1.0, 1.0], [1.0, 0.0]


def test_zero_variance_groups_are_filtered_until_the_updates_share_is_used_up():
    groups = [group(n, rewards) for n, rewards in enumerate([HOPELESS, MIXED, SOLVED, HOPELESS, MIXED])]
    intake, pool, queue = intake_of(groups, refill=2)
    intake.pool_new(0)
    assert queue.settled == [("1-0", Outcome.FILTERED, "zero_variance"), ("1-2", Outcome.FILTERED, "zero_variance")]
    assert [p.ticket_id for p in pool.all()] == ["1-1", "1-3", "1-4"]
    assert (intake.progress.groups_arrived, intake.progress.groups_filtered) == (5, 2)
    intake.next_update()
    queue.groups = [group(9, HOPELESS)]
    intake.pool_new(0)
    assert queue.settled[-1][0] == "1-9"


def test_without_refill_everything_is_trained_on():
    intake, pool, queue = intake_of([group(0, HOPELESS), group(1, SOLVED)], refill=0)
    intake.pool_new(0)
    assert len(pool) == 2
    assert queue.settled == []


def test_obs_02_the_reward_of_all_samples_is_logged_beside_that_of_the_kept_ones():
    """Half is left out: both are exact."""
    groups = [group(0, SOLVED), group(1, [1.0, 0.5]), group(2, SOLVED), group(3, [0.25, 0.0])]
    intake, pool, _ = intake_of(groups, refill=4)
    intake.pool_new(0)
    arrived = intake.next_update().means()
    assert arrived == {"reward_all": 5.75 / 8, "success_all": 5 / 8, "trajectories_all": 8.0}
    kept = [t.reward for p in pool.all() for t in p.group.trajectories]
    assert sum(kept) / len(kept) == 1.75 / 4
    assert intake.next_update().means() == {}


def test_tokens_are_counted_once_a_ticket_whatever_a_resume_reads_again():
    intake, *_ = intake_of([group(0, MIXED), group(1, MIXED)], refill=0)
    intake.pool_new(0)
    assert intake.progress.tokens_generated == 16
    resumed, _, _ = intake_of([group(1, MIXED), group(2, MIXED)], refill=0)
    resumed.resume(dataclasses.replace(intake.progress), counted=["1-0", "1-1"])
    for pooled in resumed.drain():
        resumed.count(pooled)
    assert resumed.progress.tokens_generated == 24


def test_traits_are_of_the_whole_group():
    traits = traits_of(group(0, [1.0, 0.0, 0.0, 0.0]), 1e-6)
    assert traits.signal == pytest.approx(2 * np.sqrt(0.25 * 0.75), rel=1e-5)  # mean |advantage| of 1 of 4
    assert (traits.reward, traits.success, traits.length, traits.sampled_tokens) == (0.25, 0.25, 6.0, 16)
    assert not traits.zero_variance
    assert traits_of(group(0, [0.7] * 7), 1e-6).signal == 0


def test_what_another_policy_sampled_is_trained_on_and_says_nothing_of_this_one():
    plain = group(0, [1.0, 0.0, 0.0])
    first, second, third = plain.trajectories
    old = dataclasses.replace(third, exploration=Exploration.OLDER, policy_versions=third.policy_versions * 0 - 1)
    old.policy_versions[third.loss_mask.astype(bool)] = 9
    intake, pool, _ = intake_of([dataclasses.replace(plain, trajectories=(first, second, old))], refill=0)
    seen = []
    intake._known_version = lambda version: seen.append(version) or True
    intake.pool_new(0)
    (pooled,) = pool.all()
    assert pooled.versions == (0,), "the bound on lag holds for its own policy"
    assert sorted(seen) == [0, 9], "an unknown version would be let in"
    assert intake.next_update().means() == {"reward_all": 0.5, "success_all": 0.5, "trajectories_all": 2.0}


def test_a_group_of_an_older_policy_alone_is_held_to_the_bound_as_any_other():
    plain = group(0, [1.0, 0.0])
    old = tuple(dataclasses.replace(t, exploration=Exploration.OLDER) for t in plain.trajectories)
    intake, pool, _ = intake_of([dataclasses.replace(plain, trajectories=old, partial=True)], refill=0)
    intake.pool_new(0)
    (pooled,) = pool.all()
    assert pooled.versions == (0,), "it has no age, and never expires"


def test_a_sample_of_another_policy_is_refused_where_none_was_asked_for():
    """Its tag would take it out of the bound on lag, and nothing would weigh it."""
    plain = group(0, [1.0, 0.0])
    tagged = dataclasses.replace(plain.trajectories[1], exploration=Exploration.OLDER)
    one = dataclasses.replace(plain, trajectories=(plain.trajectories[0], tagged))
    queue, pool, refused = Queue([one]), Pool(1, PoolConfig()), []
    queue.dead_letter = lambda entry, reason, detail, ticket_id: refused.append((reason, ticket_id))
    limits = Limits(max_message_bytes=10**6, max_tokens=64, vocab_size=32, max_group_size=8)
    Intake(queue, limits, pool, lambda version: True).pool_new(0)
    assert refused == [("bad_exploration", "1-0")]
    assert not pool.all()
