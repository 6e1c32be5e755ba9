import numpy as np
import pytest

from asyncrl_jax.laws import measured, parse
from asyncrl_jax.simulate.inputs import Draws, Inputs


def test_a_law_has_the_median_and_the_tail_that_it_says():
    values = parse("lognormal:10:0.99").sample(np.random.default_rng(0), (200_000,))
    assert np.median(values) == pytest.approx(10, rel=0.02)
    assert np.quantile(values, 0.99) == pytest.approx(100, rel=0.05)
    assert parse("exponential:3").sample(np.random.default_rng(0), (100_000,)).mean() == pytest.approx(3, rel=0.02)
    assert parse("pareto:2:3").sample(np.random.default_rng(0), (100_000,)).min() == pytest.approx(2, rel=0.01)


def test_measured_values_come_back_as_they_were():
    values = np.random.default_rng(1).gamma(2.0, 3.0, 5000)
    law = parse(str(measured(values)))
    drawn = law.sample(np.random.default_rng(2), (50_000,))
    assert drawn.mean() == pytest.approx(values.mean(), rel=0.03)
    assert np.quantile(drawn, 0.9) == pytest.approx(np.quantile(values, 0.9), rel=0.03)


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("gauss:1:2", "unknown law"),
        ("lognormal:1", "takes 2"),
        ("constant:x", "numbers are expected"),
        ("constant:-1", "at least 0"),
        ("quantiles:2,1", "must rise"),
        ("pareto:1:0", "alpha"),
        ("constant:nan", "finite"),
    ],
)
def test_a_law_that_is_none_is_refused_with_its_flag(text, what):
    with pytest.raises(ValueError, match=rf"--simulate.episode_s=.*{what}"):
        Inputs(episode_s=text)


@pytest.mark.parametrize(
    "wrong",
    [
        {"slow_share": 1.5},
        {"publish_s": -1.0},
        {"slow_factor": 0.0},
        {"update_s": "constant:1;constant:2"},  # one load
        *({"update_load": text, "update_s": "constant:1;constant:2"} for text in ("1;2", "0;x", "0;0", "0;inf", "")),
    ],
)
def test_a_setting_out_of_range_is_refused_with_its_flag(wrong):
    with pytest.raises(ValueError, match=f"--simulate.{next(iter(wrong))}="):
        Inputs(**wrong)


def test_a_ticket_draws_the_same_in_whatever_order_it_comes():
    inputs = Inputs(episode_s="exponential:1;exponential:9")
    forward, backward = Draws(inputs, 3, 4), Draws(inputs, 3, 4)
    first = [forward.episodes(number, 2) for number in (5, 3000)]
    second = [backward.episodes(number, 2) for number in (3000, 5)]
    assert first == second[::-1]
    assert forward.episodes(5, 1) != forward.episodes(5, 2)


def test_the_environments_delay_is_added_for_every_turn():
    inputs = Inputs(episode_s="constant:5", turns="constant:1;constant:3")
    assert Draws(inputs, 0, 2).episodes(0, 2)[0] == [5.0, 5.0]
    assert Draws(inputs, 0, 2, "constant:0.5").episodes(0, 1)[0] == [5.5, 5.5]
    assert Draws(inputs, 0, 2, "constant:0.5").episodes(0, 2)[0] == [6.5, 6.5]
    drawn = [Draws(inputs, 0, 2, "exponential:2").episodes(ticket, 2)[0][0] for ticket in range(1000)]
    assert np.mean(drawn) == pytest.approx(5 + 3 * 2, rel=0.05)


def test_an_updates_law_is_that_of_what_is_under_way_beside_it():
    draws = Draws(Inputs(update_s="constant:3;constant:4;constant:5", update_load="0;10;20.5"), 0, 1)
    assert [draws.update_s(0, lambda _, load=load: load) for load in (0.0, 9.9, 10.0, 20.4, 21.0)] == [3, 3, 4, 4, 5]
    asked = []
    draws.update_s(7, lambda seconds: asked.append(seconds) or 0.0)
    assert asked == [3]  # how far ahead it looks: what an undisturbed update takes
