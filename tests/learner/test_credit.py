"""From rewards to the advantage of each token, and who is left out."""

import dataclasses

import numpy as np
import pytest
from update_setup import group, random_groups, tiny_config, trajectory, zero_lags

from asyncrl_jax.config_environment import ProcessRewardConfig
from asyncrl_jax.learner.advantages import (
    discounted_over_turns,
    leave_one_out_advantages,
    spread_over_turns,
    turn_advantages,
)
from asyncrl_jax.learner.credit import assign_credit
from asyncrl_jax.learner.packing import pack_update
from asyncrl_jax.learner.shaping import normalised_rewards, overlong_penalty
from asyncrl_jax.learner.trainer import Trainer
from asyncrl_jax.types import FinishReason


def members(rewards, lengths=None, cut_off=()):
    rng = np.random.default_rng(0)
    made = [trajectory(rng, length) for length in lengths or [10] * len(rewards)]
    return group(
        0,
        [
            dataclasses.replace(
                t, reward=reward, finish_reason=FinishReason.LENGTH if i in cut_off else FinishReason.ANSWERED
            )
            for i, (t, reward) in enumerate(zip(made, rewards, strict=True))
        ],
    )


def credit(groups, **settings):
    config = tiny_config(**{f"advantage.{name}": value for name, value in settings.items()})
    masks = [[t.loss_mask for t in g.trajectories] for g in groups]
    rewards = [np.array([t.reward for t in g.trajectories]) for g in groups]
    return assign_credit(config, groups, masks, rewards)


def of_trajectories(found):
    """The one advantage of every trajectory."""
    assert all((a == a[0]).all() for of_group in found.advantages for a in of_group)
    return [[float(a[0]) for a in of_group] for of_group in found.advantages]


def test_loss_16_a_cut_off_trajectory_leaves_mask_baseline_rewards_and_length_together():
    """LOSS-16. Rewards 1, 0 and, cut off, 9: the baseline is 0.5, and nothing of the third is seen."""
    groups = [members([1.0, 0.0, 9.0], lengths=[10, 12, 16], cut_off=[2])]
    trajectories = groups[0].trajectories
    found = credit(groups, truncated="mask", std="none")
    assert of_trajectories(found) == [[0.5, -0.5, 0.0]]
    assert not found.loss_masks[0][2].any()
    np.testing.assert_array_equal(found.loss_masks[0][1], trajectories[1].loss_mask)
    assert found.statistics["reward_kept"] == 0.5
    assert found.statistics["length_kept"] == np.mean([t.loss_mask.sum() for t in trajectories[:2]])
    assert found.statistics["truncated_share"] == pytest.approx(1 / 3)


def test_loss_16_trained_on_it_is_in_all_of_them():
    """LOSS-16. The other rule, which is the default: the same trajectory counts everywhere."""
    groups = [members([1.0, 0.0, 2.0], cut_off=[2])]
    found = credit(groups, std="none")
    assert of_trajectories(found) == [[0.0, -1.0, 1.0]]
    np.testing.assert_array_equal(found.loss_masks[0][2], groups[0].trajectories[2].loss_mask)
    assert found.statistics["reward_kept"] == 1.0


@pytest.mark.parametrize("estimator", ["grpo", "rloo"])
def test_loss_16_with_all_members_cut_off_nothing_is_left_and_nothing_is_nan(estimator):
    found = credit([members([1.0, 0.0], cut_off=[0, 1])], truncated="mask", estimator=estimator)
    assert of_trajectories(found) == [[0.0, 0.0]]
    assert found.statistics["reward_kept"] == found.statistics["length_kept"] == 0
    assert found.statistics["zero_advantage"] == 1


def test_loss_06_groups_without_variance_are_counted():
    """LOSS-06."""
    found = credit([members([0.7] * 7), members([1.0, 0.0]), members([0.0] * 3)])
    assert found.statistics["zero_advantage_groups"] == 2
    assert found.statistics["zero_advantage"] == 0
    assert of_trajectories(found)[0] == [0.0] * 7


def test_loss_17_lone_members_give_no_advantage_and_that_is_counted():
    """LOSS-17. A trajectory cut into steps, each alone in its group, centres to 0; see also the config's refusal."""
    found = credit([members([1.0])] * 4, estimator="rloo")
    assert of_trajectories(found) == [[0.0]] * 4
    assert found.statistics["zero_advantage"] == 1


def test_loss_17_update_after_update_without_an_advantage_is_said_once(caplog):
    """LOSS-17."""
    trainer = object.__new__(Trainer)
    trainer._taught_nothing = 0
    for update in range(12):
        trainer._watch_credit({"zero_advantage": 1.0}, update)
    assert [record.getMessage() for record in caplog.records] == [
        "update 9: every advantage of the last 10 updates is 0; rewards within each group are all equal"
    ]
    trainer._watch_credit({"zero_advantage": 0.0}, 12)
    assert trainer._taught_nothing == 0


def test_rloo_compares_with_the_others():
    """Rewards 0, 0, 0, 4: the others of the last have mean 0, those of the first 4/3."""
    np.testing.assert_allclose(leave_one_out_advantages(np.array([0, 0, 0, 4.0])), [-4 / 3] * 3 + [4.0], rtol=1e-6)


def test_reinforce_pp_leaves_the_reward_to_be_whitened_in_the_step():
    assert of_trajectories(credit([members([1.0, 0.25])], estimator="reinforce_pp")) == [[1.0, 0.25]]


@pytest.mark.parametrize(("length", "penalty"), [(8, 0.0), (12, 0.0), (14, -0.5), (16, -1.0), (20, -1.0)])
def test_the_overlong_penalty_sets_in_before_the_budget(length, penalty):
    """DAPO: budget 16, buffer 4."""
    assert overlong_penalty(length, max_length=16, buffer=4) == penalty
    assert overlong_penalty(length, max_length=16, buffer=0) == 0


def test_the_overlong_penalty_enters_the_advantage_and_not_the_reward_statistics():
    found = credit([members([1.0, 1.0], lengths=[8, 14])], overlong_buffer_tokens=4, std="none")
    assert of_trajectories(found) == [[0.25, -0.25]]
    assert found.statistics["reward_kept"] == 1.0
    assert found.rewards == [[1.0, 0.5]]


def test_rewards_are_normalised_over_the_batch():
    found = normalised_rewards([np.array([0.0, 2.0]), np.array([2.0, 4.0])], eps=0.0)
    np.testing.assert_allclose(np.concatenate(found), np.array([-2, 0, 0, 2]) / np.sqrt(2))
    assert not np.concatenate(normalised_rewards([np.full(7, np.float32(0.7))])).any()


def test_credit_per_turn_is_what_is_still_to_come():
    """Turn rewards (0, 1) and (0): mean 1/3, deviation √2/3; a turn's credit is its own and all later ones'."""
    first, second = turn_advantages([np.array([0.0, 1.0]), np.array([0.0])], eps=0.0)
    low, high = -1 / np.sqrt(2), np.sqrt(2)
    np.testing.assert_allclose(first, [low + high, high], rtol=1e-6)
    np.testing.assert_allclose(second, [low], rtol=1e-6)
    discounted = turn_advantages([np.array([0.0, 1.0]), np.array([0.0])], eps=0.0, discount=0.1)[0]
    np.testing.assert_allclose(discounted, [low + 0.1 * high, high], rtol=1e-6)


def test_tok_03_credit_of_a_turn_lies_on_its_own_tokens():
    """TOK-03. Prompt, turn of two tokens, tool of one, turn of one."""
    mask = np.array([0, 0, 1, 1, 0, 1], np.uint8)
    turns = discounted_over_turns(2.0, 2, 0.5)
    assert turns.tolist() == [1.0, 2.0]
    assert spread_over_turns(turns, mask).tolist() == [0, 0, 1, 1, 0, 2]
    with pytest.raises(ValueError, match="1 advantages for a mask of 2 turns"):
        spread_over_turns(turns[:1], mask)


def test_orch_13_every_reward_stays_with_its_own_tokens_through_reordering_and_packing():
    """ORCH-13. The reward names prompt and member; groups in another order, filtered and packed: the pairs match."""
    groups = [
        dataclasses.replace(
            g,
            trajectories=tuple(
                dataclasses.replace(t, reward=10.0 * i + j, tokens=np.where(t.loss_mask, i, j + 8).astype(np.int32))
                for j, t in enumerate(g.trajectories)
            ),
        )
        for i, g in enumerate(random_groups())
    ]
    groups = [groups[i] for i in (2, 0, 3)]
    found = credit(groups, estimator="reinforce_pp")
    packed = pack_update(groups, found.advantages, zero_lags(groups), tiny_config(), found.loss_masks, found.rewards)
    prompt, member = packed.targets[packed.loss_mask], (packed.advantages[packed.loss_mask] % 10).astype(int)
    np.testing.assert_array_equal(packed.advantages[packed.loss_mask] // 10, prompt)
    for row in range(packed.tokens.shape[0]):
        for line in range(packed.tokens.shape[1]):
            for segment in range(1, packed.segment_ids[row, line].max() + 1):
                at = packed.segment_ids[row, line] == segment
                own = set(packed.tokens[row, line][at][packed.tokens[row, line][at] >= 8] - 8)
                trained = packed.loss_mask[row, line] & at
                assert set((packed.advantages[row, line][trained] % 10).astype(int)) <= own
    assert len(set(zip(prompt, member, strict=True))) > 6


def test_tok_06_the_reward_of_a_critic_lies_on_the_last_trained_token_and_nowhere_for_an_empty_answer():
    """TOK-06. An answer of length 0 puts it on no other trajectory's token."""
    rng = np.random.default_rng(0)
    silent = dataclasses.replace(trajectory(rng, 6, sampled=0.0), reward=7.0)
    spoken = trajectory(rng, 8, sampled=1.0)
    closed_by_a_tool = np.append(spoken.loss_mask[:-1], 0).astype(np.uint8)
    spoken = dataclasses.replace(spoken, reward=0.5, loss_mask=closed_by_a_tool)
    groups = [group(0, [silent, spoken])]
    found = credit(groups, estimator="gae")
    packed = pack_update(groups, found.advantages, zero_lags(groups), tiny_config(), found.loss_masks, found.rewards)
    at = np.argwhere(packed.rewards)
    assert len(at) == 1
    where = tuple(at[0])
    assert packed.rewards[where] == 0.5
    assert packed.positions[where] == 5  # position t predicts token t + 1, and the last of 8 is a tool's


def scored_members(success, between=0):
    """Two members of 6 tokens, two steps each that end after 3 and 6, scored 0.9 and 0.7, and 0.5 and 0.1."""
    mask = np.array([0, 1, 1, between, 1, 1], np.uint8)
    return group(
        0,
        [
            dataclasses.replace(
                trajectory(np.random.default_rng(0), 6),
                loss_mask=mask,
                reward=0.0,
                success=success and first == 0.9,
                step_scores=np.array([first, second], np.float32),
                step_ends=np.array([3, 6], np.int32),
            )
            for first, second in ((0.9, 0.7), (0.5, 0.1))
        ],
    )


@pytest.mark.parametrize("between", [0, 1])  # steps of two turns, or of one
def test_each_steps_tokens_get_what_its_score_and_later_ones_are_worth(between):
    """Mean 0.55, population deviation √0.0875: normalised scores, summed to the end, times the factor."""
    found = credit([scored_members(success=True, between=between)], step_credit=0.5)
    z = (np.array([0.9, 0.7, 0.5, 0.1]) - 0.55) / np.sqrt(0.0875)
    for advantages, (first, second) in zip(found.advantages[0], ((z[0], z[1]), (z[2], z[3])), strict=True):
        expected = 0.5 * np.array([0, first + second, first + second, between * second, second, second])
        np.testing.assert_allclose(advantages, expected, rtol=1e-4)
    assert found.statistics["zero_advantage"] == 0


def test_a_group_that_fails_gets_no_credit_from_a_process_model_unless_asked():
    failing = scored_members(success=False)
    assert not any(a.any() for a in credit([failing], step_credit=0.5).advantages[0])
    config = tiny_config(**{"advantage.step_credit": 0.5})
    config = dataclasses.replace(
        config, reward=dataclasses.replace(config.reward, process=ProcessRewardConfig(all_fail=True))
    )
    asked = assign_credit(config, [failing], [[t.loss_mask for t in failing.trajectories]], [np.zeros(2)])
    assert all(a.any() for a in asked.advantages[0])
    unscored = group(0, [dataclasses.replace(t, step_scores=None, step_ends=None) for t in failing.trajectories])
    found = assign_credit(config, [unscored], [[t.loss_mask for t in failing.trajectories]], [np.zeros(2)])
    assert not any(a.any() for a in found.advantages[0])
