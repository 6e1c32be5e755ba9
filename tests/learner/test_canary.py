"""A canary must not hang on the last bits of a router, or engines would refuse good weights for ever."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from update_setup import tiny_config

from asyncrl_jax.learner.canary import canary_logprobs, candidate_rows, make_canary
from asyncrl_jax.learner.state import create_state

JUMP = 1e-3  # nats; `weights.canary_tolerance`


def between(share: float, start, end):
    return {
        name: ((1 - share) * np.float64(start[name]) + share * np.float64(end[name])).astype(np.float32)
        for name in start
    }


@pytest.fixture(scope="module")
def tied():
    """(config, weights with a tie in a router at one candidate row, the same just beyond it, the rows, that row)."""
    config = tiny_config()
    start, end = (
        {name: np.asarray(leaf) * 4 for name, leaf in create_state(config, seed).params.items()} for seed in (1, 2)
    )
    rows = candidate_rows(7, config.model.vocab_size, 12)

    def logprobs(share):
        return canary_logprobs(config, as_jax(between(share, start, end)), rows)

    shares = np.linspace(0.0, 1.0, 501)
    steps_SC = np.abs(np.diff([logprobs(share) for share in shares], axis=0)).max(axis=2)
    for index in np.argsort(-steps_SC, axis=None)[:100]:
        place, row = np.unravel_index(index, steps_SC.shape)
        low, high = shares[place], shares[place + 1]
        at_low, at_high = logprobs(low), logprobs(high)
        for _ in range(26):  # to where neighbours differ in the last bits alone
            middle = (low + high) / 2
            at_middle = logprobs(middle)
            if np.abs(at_middle - at_low)[row].max() > np.abs(at_high - at_middle)[row].max():
                high, at_high = middle, at_middle
            else:
                low, at_low = middle, at_middle
        if np.abs(at_high - at_low)[row].max() > 10 * JUMP:
            return config, as_jax(between(low, start, end)), as_jax(between(high, start, end)), rows, row
    raise AssertionError("no tie found")


def as_jax(params):
    return jax.tree.map(jax.numpy.asarray, params)


def test_wgt_rows_in_which_a_choice_of_experts_is_a_tie_are_in_no_canary(tied):
    config, params, same_but_for_the_last_bits, rows, row = tied
    rows, row = np.roll(rows, -row, axis=0), 0  # where it would be taken if it were not for the tie
    before, after = (canary_logprobs(config, one, rows) for one in (params, same_but_for_the_last_bits))
    assert np.abs(before - after)[row].max() > 10 * JUMP  # what an engine would have refused
    canary = make_canary(config, params, rows)
    assert not any(np.array_equal(rows[row], tokens) for tokens in canary.tokens)
    again = canary_logprobs(config, same_but_for_the_last_bits, canary.tokens)
    assert np.abs(again - canary.logprobs).max() < JUMP / 10


def test_a_canary_is_four_of_the_candidates_in_their_order_with_the_weights_own_logprobs():
    config = tiny_config()
    params, rows = create_state(config, 3).params, candidate_rows(5, config.model.vocab_size, 9)
    assert rows.shape == (8, 9)
    canary = make_canary(config, params, rows)
    places = [next(place for place, row in enumerate(rows) if np.array_equal(row, one)) for one in canary.tokens]
    assert len(places) == 4
    assert places == sorted(set(places))
    np.testing.assert_allclose(canary.logprobs, canary_logprobs(config, params, canary.tokens), atol=1e-6)
    assert np.array_equal(make_canary(config, params, rows).logprobs, canary.logprobs)
