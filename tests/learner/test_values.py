import jax
import jax.numpy as jnp
import numpy as np
import pytest

from asyncrl_jax.learner.values import critic_values, gae, init_critic, suffix_sums, value_terms


def numpy_gae(rewards, values, discount, decay):
    """One sequence of actions, by the definition: a sum over all later deltas."""
    following = [*values[1:], 0.0]
    deltas = [r + discount * n - v for r, v, n in zip(rewards, values, following, strict=True)]
    return [sum((discount * decay) ** (j - i) * deltas[j] for j in range(i, len(deltas))) for i in range(len(deltas))]


@pytest.mark.parametrize(("discount", "decay"), [(1.0, 0.95), (0.9, 0.5), (1.0, 1.0), (1.0, 0.0)])
def test_gae_is_its_definition_over_the_actions_of_each_sequence(discount, decay):
    """Two sequences and padding in one row; tool tokens lie between the actions of the first."""
    rng = np.random.default_rng(0)
    segments = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 0, 0]])
    mask = np.array([[0, 1, 0, 1, 1, 1, 0, 1, 0, 0]], bool)
    rewards, values = (rng.normal(size=(1, 10)).astype(np.float32) for _ in range(2))
    found = gae(
        rewards=jnp.asarray(rewards),
        values=jnp.asarray(values),
        loss_mask=jnp.asarray(mask),
        segment_ids=jnp.asarray(segments),
        discount=discount,
        decay=decay,
    )
    expected = np.zeros((1, 10))
    for actions in ([1, 3, 4], [5, 7]):
        expected[0, actions] = numpy_gae(rewards[0, actions], values[0, actions], discount, decay)
    np.testing.assert_allclose(found.advantages, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(found.returns, np.where(mask, expected + values, 0), rtol=1e-5, atol=1e-6)


def test_tok_03_tool_tokens_padding_and_neighbours_enter_no_return():
    """TOK-03. Whatever stands outside the mask, advantages and returns are bit-identical."""
    segments, mask = jnp.array([[1, 1, 1, 2, 0]]), jnp.array([[True, False, True, True, False]])
    given = {"loss_mask": mask, "segment_ids": segments, "discount": 1.0, "decay": 0.95}
    clean = gae(rewards=jnp.ones((1, 5)), values=jnp.full((1, 5), 0.5), **given)
    dirty = gae(rewards=jnp.where(mask, 1.0, jnp.nan), values=jnp.where(mask, 0.5, jnp.inf), **given)
    for x, y in zip(clean, dirty, strict=True):
        np.testing.assert_array_equal(x, y)
    assert clean.returns[0, 3] == pytest.approx(1.0)  # the lone action of its sequence


def test_suffix_sums_start_at_each_action():
    found = suffix_sums(
        jnp.array([[1.0, 2.0, 4.0, 8.0]]), jnp.array([[True, False, True, True]]), jnp.array([[1, 1, 1, 2]])
    )
    assert found.tolist() == [[5, 0, 4, 8]]


@pytest.mark.parametrize(
    ("value", "loss", "slope"),
    [(0.5, 0.125, -0.5), (0.3, 0.245, 0.0), (-0.5, 1.125, -1.5)],
)
def test_a_value_that_leaves_the_old_one_towards_the_return_by_more_than_the_clip_has_no_gradient(value, loss, slope):
    """Old value 0.1, return 1, clip 0.2: from 0.3 on, nothing is gained. Away from the return it is pulled back."""

    def of(values):
        return value_terms(
            values=values,
            old_values=jnp.full((1, 1), 0.1),
            returns=jnp.ones((1, 1)),
            loss_mask=jnp.ones((1, 1), bool),
            clip_range=0.2,
        ).sum()

    found = jax.value_and_grad(of)(jnp.full((1, 1), value))
    if value == 0.5:  # clipped at 0.3: ½ · 0.7² and no gradient
        loss, slope = 0.245, 0.0
    elif value == 0.3:  # on the edge: either side is right
        slope = found[1][0, 0]
    np.testing.assert_allclose([found[0], found[1][0, 0]], [loss, slope], rtol=1e-5)


def test_a_new_critic_says_0_and_never_pulls_at_the_trunk():
    critic, x_BTD = init_critic(8, seed=0), jnp.ones((1, 2, 8))
    np.testing.assert_array_equal(critic_values(critic, x_BTD), np.zeros((1, 2)))
    critic["critic.out"] = jnp.ones((8, 1))
    assert critic_values(critic, x_BTD).any()
    assert not jax.grad(lambda x_BTD: critic_values(critic, x_BTD).sum())(x_BTD).any()
