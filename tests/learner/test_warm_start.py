import numpy as np
import pytest
from update_setup import tiny_config

from asyncrl_jax.config import override
from asyncrl_jax.learner.canary import canary_logprobs
from asyncrl_jax.learner.state import copy_params, create_state
from asyncrl_jax.learner.warm_start import warm_start


def counting_demonstrations(num=12):
    """Each token is one more than the last; the first two are given."""
    rows = []
    for i in range(num):
        tokens = (np.arange(6 + i % 3) + i).astype(np.int32) % 16
        mask = np.ones(len(tokens), np.uint8)
        mask[:2] = 0
        rows.append((tokens, mask))
    return rows


def config_of(steps):
    changes = {"warm_start.num_steps": steps, "warm_start.batch_rows": 4, "warm_start.learning_rate": 1e-2}
    return override(tiny_config(), changes)


@pytest.fixture(scope="module")
def trained():
    """(state, reports) of one warm start."""
    config, reports = config_of(120), []
    state = warm_start(config, create_state(config, 0), counting_demonstrations(), lambda *args: reports.append(args))
    return state, reports


def test_warm_start_learns_the_demonstrations_and_starts_rl_afresh(trained):
    state, reports = trained
    assert [step for step, _ in reports] == [50, 100, 120]
    assert reports[0][1]["accuracy"] < reports[-1][1]["accuracy"]
    assert reports[-1][1]["accuracy"] > 0.95
    assert reports[-1][1]["skipped"] == 0
    assert (int(state.update), int(state.skipped)) == (0, 0)
    assert not any(np.any(moment) for moment in state.opt_state[1].mu.values())
    one_of_them = np.array([[3, 4, 5, 6, 7, 8]])
    assert canary_logprobs(config_of(120), state.params, one_of_them)[0, 1:].min() > np.log(0.5)


def test_warm_start_is_a_function_of_config_state_and_demonstrations(trained):
    config = config_of(120)
    again = warm_start(config, create_state(config, 0), counting_demonstrations(), lambda *_: None)
    for name, value in trained[0].params.items():
        np.testing.assert_array_equal(again.params[name], value)


def test_no_steps_leave_the_state_alone():
    config = config_of(0)
    state = create_state(config, 0)
    before = copy_params(state.params)
    after = warm_start(config, state, [], lambda *_: None)
    for name, value in before.items():
        np.testing.assert_array_equal(after.params[name], value)


@pytest.mark.parametrize(
    ("demonstrations", "message"),
    [
        ([], "0 demonstrations, none with a token to train on"),
        ([(np.arange(4), np.zeros(4))], "1 demonstrations, none"),
        ([(np.arange(4), np.ones(5))], "demonstration 0 has 4 tokens and a mask of 5"),
        ([(np.zeros(17), np.ones(17))], "17 tokens; model.max_positions is 16"),
    ],
)
def test_unusable_demonstrations_are_refused(demonstrations, message):
    config = config_of(3)
    with pytest.raises(ValueError, match=message):
        warm_start(config, create_state(config, 0), demonstrations, lambda *_: None)
