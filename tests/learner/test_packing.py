"""Dimensions: M microbatches, R rows, L positions."""

import dataclasses

import numpy as np
import pytest
from update_setup import group, ramp_advantages, random_groups, tiny_config, trajectory, zero_lags

from asyncrl_jax.config import override
from asyncrl_jax.learner.packing import groups_for_update, max_rows, pack_update
from asyncrl_jax.types import Exploration


def pack(groups, config=None, advantages=None, lags=None, masks=None):
    advantages = ramp_advantages(groups) if advantages is None else advantages
    return pack_update(groups, advantages, zero_lags(groups) if lags is None else lags, config or tiny_config(), masks)


def segments(packed):
    """Fields of every trajectory in the rows: (tokens and first target joined, mask, log-probs, …)."""
    names = ("loss_mask", "behaviour_logprobs", "advantages", "temperature", "token_lag", "positions")
    for row in range(packed.tokens.shape[0] * packed.tokens.shape[1]):
        fields = {
            name: np.asarray(getattr(packed, name)).reshape(-1, packed.tokens.shape[2])[row]
            for name in ("tokens", "targets", "segment_ids", *names)
        }
        for segment in range(1, fields["segment_ids"].max(initial=0) + 1):
            at = fields["segment_ids"] == segment
            tokens = np.append(fields["tokens"][at], fields["targets"][at][-1])
            np.testing.assert_array_equal(fields["tokens"][at][1:], fields["targets"][at][:-1])
            yield tokens, {name: fields[name][at] for name in names}


def test_tok_06_every_token_keeps_what_belongs_to_it():
    """TOK-06, TOK-07. A value per token that names the token: nothing is shifted, lost, doubled or mixed."""
    groups = random_groups(temperatures=(1.0, 0.5))
    lags = [[np.arange(len(t.tokens), dtype=np.int32) + 100 * i for i, t in enumerate(g.trajectories)] for g in groups]
    advantages = ramp_advantages(groups)
    packed = {tokens.tobytes(): fields for tokens, fields in segments(pack(groups, advantages=advantages, lags=lags))}
    assert len(packed) == 16
    for g, of_group, lags_of_group in zip(groups, advantages, lags, strict=True):
        for t, advantage, lag in zip(g.trajectories, of_group, lags_of_group, strict=True):
            fields = packed[t.tokens.tobytes()]
            np.testing.assert_array_equal(fields["loss_mask"], t.loss_mask[1:].astype(bool))
            np.testing.assert_array_equal(fields["behaviour_logprobs"], t.behaviour_logprobs[1:])
            np.testing.assert_array_equal(fields["token_lag"], lag[1:])
            np.testing.assert_array_equal(fields["positions"], np.arange(len(t.tokens) - 1))
            np.testing.assert_array_equal(fields["advantages"], np.full(len(t.tokens) - 1, advantage))
            np.testing.assert_array_equal(fields["temperature"], np.full(len(t.tokens) - 1, g.ticket.temperature))


def test_tok_03_the_mask_is_the_callers_and_covers_only_sampled_tokens():
    """TOK-03. A caller may leave tokens out, never add one."""
    groups = random_groups()
    own = [[t.loss_mask for t in g.trajectories] for g in groups]
    sampled = sum(int(mask.sum()) for masks in own for mask in masks)
    assert pack(groups).num_tokens == sampled
    own[1] = [np.zeros_like(mask) for mask in own[1]]
    assert pack(groups, masks=own).num_tokens == sampled - sum(int(t.loss_mask.sum()) for t in groups[1].trajectories)
    own[2] = [np.ones_like(mask) for mask in own[2]]
    with pytest.raises(ValueError, match="ticket 0-2: the mask covers a token that the policy did not sample"):
        pack(groups, masks=own)


def test_the_shape_is_fixed_and_num_microbatches_counts_the_rows_in_use():
    config = tiny_config()
    full, short = pack(random_groups()), pack(random_groups(num=1))
    assert full.tokens.shape == short.tokens.shape == (4, 2, 32)
    for packed in (full, short):
        used = (packed.segment_ids > 0).any(axis=(1, 2))
        assert packed.num_microbatches == used.sum() > 0
        assert used[: packed.num_microbatches].all()
    assert short.num_microbatches < full.num_microbatches
    empty = pack([], config)
    assert (empty.num_microbatches, empty.num_tokens, empty.tokens.shape) == (0, 0, (4, 2, 32))


def test_any_update_fits_into_the_fixed_rows():
    """Trajectories of the worst length: each row holds as few as it can."""
    config = tiny_config(pack_tokens=44)
    rng = np.random.default_rng(0)
    for length in (16, 15, 12, 9):
        groups = [group(i, [trajectory(rng, length) for _ in range(4)]) for i in range(4)]
        packed = pack(groups, config)
        assert sum(1 for _ in segments(packed)) == 16
    assert max_rows(config) == 8


def test_short_trajectories_fill_the_gaps_of_all_rows():
    """Eight of 15 positions leave 2 positions free in each of four rows of 32; four of 2 positions go there."""
    rng = np.random.default_rng(0)
    groups = [group(i, [trajectory(rng, length) for _ in range(4)]) for i, length in enumerate((3, 16, 16))]
    packed = pack(groups)
    assert (packed.segment_ids > 0).any(axis=-1).sum() == 4
    assert sum(1 for _ in segments(packed)) == 12


def test_an_update_takes_the_backlog_within_its_bounds_in_the_same_shape():
    """Two groups at least, four at most; and whatever it takes, the arrays are those of four."""
    config = tiny_config(groups_per_update=2, groups_per_update_max=4)
    assert [groups_for_update(backlog, config.learner) for backlog in (2, 3, 9)] == [2, 3, 4]
    assert groups_for_update(9, tiny_config().learner) == 4
    shapes = {pack(random_groups(num=num), config).tokens.shape for num in (2, 3, 4)}
    assert shapes == {(4, 2, 32)}


EOS, LOG_OF_A_HUNDREDTH = 15, -4.60517


def answer(*parts):
    """A trajectory of a prompt of two tokens and then (token, sampled, log-prob) each."""
    tokens, sampled, logprobs = zip((1, 0, 0.0), (2, 0, 0.0), *parts, strict=True)
    base = trajectory(np.random.default_rng(0), len(tokens))
    return dataclasses.replace(
        base,
        tokens=np.array(tokens, np.int32),
        loss_mask=np.array(sampled, np.uint8),
        behaviour_logprobs=np.array(logprobs, np.float32),
    )


def test_tok_04_a_sampled_eos_is_trained_with_its_own_logprob_and_a_synthetic_one_is_not():
    """TOK-04. Sampled at p = 0.01; appended by someone else; an answer that is only an EOS; and no answer at all."""
    sampled = answer((3, 1, -1.0), (EOS, 1, LOG_OF_A_HUNDREDTH))
    appended = answer((4, 1, -1.0), (EOS, 0, 0.0))
    only = answer((EOS, 1, LOG_OF_A_HUNDREDTH))
    silent = answer()
    packed = pack([group(0, [sampled, appended, only, silent])])
    of_eos = packed.loss_mask & (packed.targets == EOS)
    np.testing.assert_array_equal(packed.behaviour_logprobs[of_eos], np.float32([LOG_OF_A_HUNDREDTH] * 2))
    assert packed.num_tokens == 4
    assert not packed.targets[packed.segment_ids == 0].any()  # what follows is padding, not EOS


def test_loss_21_a_second_use_of_a_group_keeps_the_samplers_logprobs():
    """LOSS-21. What an update trains on is the trajectory as sampled, however often the optimizer has moved since."""
    groups = random_groups()
    first, second = pack(groups), pack(groups, lags=[[lag + 1 for lag in of] for of in zero_lags(groups)])
    np.testing.assert_array_equal(first.behaviour_logprobs, second.behaviour_logprobs)
    assert (second.token_lag[second.loss_mask] == 1).all()


def test_the_same_groups_give_the_same_rows():
    for x, y in zip(pack(random_groups(3)), pack(random_groups(3)), strict=True):
        np.testing.assert_array_equal(x, y, strict=True)


def test_an_empty_answer_and_a_lone_token_are_harmless():
    rng = np.random.default_rng(0)
    lone = dataclasses.replace(trajectory(rng, 1), tokens=np.array([3], np.int32), loss_mask=np.zeros(1, np.uint8))
    unanswered = trajectory(rng, 6, sampled=0.0)
    packed = pack([group(0, [lone, unanswered, trajectory(rng, 8)])])
    assert sum(1 for _ in segments(packed)) == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"tokens": np.zeros(17, np.int32)}, "trajectory of 17 tokens"),
        ({"behaviour_logprobs": np.zeros(7, np.float32)}, r"different lengths \[7, 8\]"),
        ({"loss_mask": np.ones(8, np.uint8)}, "nothing predicts it"),
    ],
)
def test_inputs_that_do_not_match_are_refused(change, message):
    bad = dataclasses.replace(trajectory(np.random.default_rng(0), 8), **change)
    with pytest.raises(ValueError, match=message):
        pack([group(0, [bad])])


def test_more_trajectories_than_the_config_allows_are_refused():
    with pytest.raises(ValueError, match="20 trajectories in one update: the config allows 16"):
        pack(random_groups(num=5))


def test_a_row_has_the_temperature_that_it_was_sampled_at():
    (first, *_) = groups = random_groups(temperatures=(1.0, 0.5))
    hot = dataclasses.replace(first.trajectories[0], temperature=1.75)
    groups[0] = dataclasses.replace(first, trajectories=(hot, *first.trajectories[1:]))
    found = {tokens.tobytes(): set(fields["temperature"].tolist()) for tokens, fields in segments(pack(groups))}
    assert found[hot.tokens.tobytes()] == {1.75}
    assert found[first.trajectories[1].tokens.tobytes()] == {first.ticket.temperature}


def test_a_sample_of_another_policy_is_marked_where_any_may_come():
    (first, *_) = groups = random_groups()
    other = dataclasses.replace(first.trajectories[0], exploration=Exploration.UNIFORM)
    groups[0] = dataclasses.replace(first, trajectories=(other, *first.trajectories[1:]))
    config = tiny_config()
    assert pack(groups, config).explored is None
    exploring = override(
        config,
        {
            "actor.exploration.share": 0.05,
            "learner.objective.correction": "interpolated",
            "learner.objective.weight_bound": "truncate",
        },
    )
    packed = pack(groups, exploring)
    assert packed.explored.sum() == len(other.tokens) - 1
    at = packed.explored.reshape(-1, packed.tokens.shape[2])
    assert packed.tokens.reshape(at.shape)[at].tolist() == other.tokens[:-1].tolist()
