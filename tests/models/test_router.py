"""Which experts are chosen, and with what weight, against the numbers of the equations."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.models.router import RouterOptions, route

ONE = jnp.ones(1, bool)
LOGITS = jnp.array([[2.0, 1.0, 0.0]])


def weights_of(logits, options, **given):
    choice, _ = route(logits, jnp.ones(len(logits), bool), options, **given)
    return choice


def test_the_router_learns_through_the_weights_of_its_choice():
    choice = weights_of(LOGITS, RouterOptions(2))
    np.testing.assert_array_equal(choice.ids_NA, [[0, 1]])
    np.testing.assert_allclose(choice.weights_NA, [[0.7310586, 0.2689414]], rtol=1e-6)  # renormalised over the choice
    gradient = jax.grad(lambda x: weights_of(x, RouterOptions(2)).weights_NA[0, 1])(LOGITS)
    np.testing.assert_allclose(gradient, [[-0.1966119, 0.1966119, 0.0]], atol=1e-6)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (RouterOptions(2), [0.7310586, 0.2689414]),  # Qwen3-MoE and Mixtral
        (RouterOptions(2, renormalise=False), [0.6652410, 0.2447285]),  # OLMoE
        (RouterOptions(2, score="sigmoid"), [0.5464490, 0.4535510]),  # MiMo-V2 and DeepSeek-V3
        (RouterOptions(2, score="sigmoid", renormalise=False, scale=2.5), [2.2019927, 1.8276464]),
    ],
)
def test_each_kind_of_router_has_its_weights(options, expected):
    np.testing.assert_allclose(weights_of(LOGITS, options).weights_NA, [expected], rtol=1e-6)


def test_a_bias_changes_the_selection_and_not_the_weights():
    options = RouterOptions(1, score="sigmoid", renormalise=False, selection_bias=True)
    choice = weights_of(LOGITS, options, bias_E=jnp.array([0.0, 0.0, 0.5]))
    np.testing.assert_array_equal(choice.ids_NA, [[2]])
    np.testing.assert_allclose(choice.weights_NA, [[0.5]])


@pytest.mark.parametrize(("renormalise", "weight"), [(False, 0.2447285), (True, 1.0)])
def test_moe_01_a_replayed_choice_has_the_weights_of_the_current_logits(renormalise, weight):
    """MOE-01. Id 1 of logits [2, 1, 0]; the gradient reaches the router unless there is but one weight, which is 1."""
    options = RouterOptions(1, renormalise=renormalise)

    def replayed(logits):
        return weights_of(logits, options, replay_NA=jnp.array([[1]])).weights_NA[0, 0]

    assert weights_of(LOGITS, options, replay_NA=jnp.array([[1]])).ids_NA == 1
    np.testing.assert_allclose(replayed(LOGITS), weight, rtol=1e-6)
    assert bool(np.any(jax.grad(replayed)(LOGITS))) != renormalise
    two = jax.grad(
        lambda x: weights_of(x, RouterOptions(2), replay_NA=jnp.array([[2, 1]])).weights_NA[0, 0],
    )(LOGITS)
    np.testing.assert_allclose(two, [[0.0, -0.1966119, 0.1966119]], atol=1e-6)


def test_moe_02_rows_without_ids_are_routed_live_and_counted():
    """MOE-02. A sentinel in any place of a row, or an id that is no expert; padding counts nowhere."""
    logits = jnp.tile(LOGITS, (5, 1))
    replay = jnp.array([[2, 1], [-1, -1], [2, -1], [2, 3], [-1, -1]])
    valid = jnp.array([True, True, True, True, False])
    choice, routing = route(logits, valid, RouterOptions(2), replay_NA=replay)
    np.testing.assert_array_equal(choice.ids_NA, [[2, 1], [0, 1], [0, 1], [0, 1], [-1, -1]])
    assert routing.unreplayed == 3
    np.testing.assert_array_equal(routing.counts_E, [3, 4, 1])


def test_capacity_drops_the_latest_choices_and_counts_them():
    """MOE-06. 8 tokens want expert 0 first: capacity 1 keeps the first of them."""
    options = RouterOptions(1, capacity_factor=3 / 8)
    choice, routing = route(jnp.tile(LOGITS, (8, 1)), jnp.ones(8, bool), options)
    np.testing.assert_array_equal(choice.ids_NA[:, 0], [0] + [-1] * 7)
    np.testing.assert_array_equal(choice.weights_NA[:, 0], [1] + [0] * 7)
    assert (routing.dropped, routing.counts_E[0]) == (7, 8)


def test_noise_moves_the_selection_alone_and_needs_a_key():
    logits = jnp.tile(LOGITS, (400, 1))
    options = RouterOptions(1, renormalise=False, noise=1.0)
    choice = weights_of(logits, options, noise_key=jax.random.key(0))
    chosen, counts = np.unique(choice.ids_NA, return_counts=True)
    np.testing.assert_array_equal(chosen, [0, 1, 2])
    assert counts[0] > counts[1] > counts[2]
    np.testing.assert_allclose(
        choice.weights_NA[:, 0], np.array([0.665241, 0.244728, 0.090031])[choice.ids_NA[:, 0]], rtol=1e-5
    )
    np.testing.assert_array_equal(weights_of(logits, options).ids_NA, 0)


def test_an_unknown_score_is_refused():
    with pytest.raises(ValueError, match="'tanh'"):
        weights_of(LOGITS, RouterOptions(1, score="tanh"))


def test_what_the_router_did_is_summed_over_its_tokens():
    """MOE-10. Entropy in nats, and the squared logsumexp of the z-loss."""
    valid = jnp.array([True, True, False])
    _, routing = route(jnp.concatenate([LOGITS, jnp.zeros((1, 3)), LOGITS]), valid, RouterOptions(1))
    p = np.exp([2.0, 1.0, 0.0]) / np.exp([2.0, 1.0, 0.0]).sum()
    np.testing.assert_allclose(routing.entropy_sum, -(p * np.log(p)).sum() + np.log(3), rtol=1e-6)
    np.testing.assert_allclose(routing.z_sum, np.log(np.exp([2.0, 1.0, 0.0]).sum()) ** 2 + np.log(3) ** 2, rtol=1e-6)
    np.testing.assert_array_equal(routing.counts_E, [2, 0, 0])
