"""What members of a group are sampled with, drawn from the ticket's seed."""

import asyncio
import collections
import math
from types import SimpleNamespace

import numpy as np
import pytest

from asyncrl_jax.actor.exploration import Explorer, UniformEngine
from asyncrl_jax.config import Config, override
from asyncrl_jax.config_actor import ExplorationConfig
from asyncrl_jax.types import Exploration
from tests.builders import make_ticket

NEWEST, OLDER = SimpleNamespace(version=7), SimpleNamespace(version=3)
TICKETS = [make_ticket(f"1-{n}", seed=n, temperature=0.9) for n in range(500)]


def choices(older=OLDER, **settings):
    explorer = Explorer(ExplorationConfig(**settings), NEWEST, older, 16)
    return [explorer.choose(ticket, member) for ticket in TICKETS for member in range(8)]


def test_nothing_is_explored_unless_asked():
    assert all((c.source, c.temperature, c.exploration) == (NEWEST, None, None) for c in choices())


def test_each_sample_has_a_temperature_of_its_own_and_the_same_in_every_attempt():
    made = choices(temperature_jitter=0.2)
    factors = np.log([c.temperature / 0.9 for c in made])
    assert np.abs(factors).max() <= 0.2 + 1e-6
    assert len(set(factors)) > 3900, "members share temperatures"
    assert abs(factors.mean()) < 0.02
    assert np.abs(factors).mean() == pytest.approx(0.1, abs=0.01)  # uniform
    assert all(c.temperature == np.float32(c.temperature) for c in made), "the wire would round it"
    assert [c.temperature for c in choices(temperature_jitter=0.2)] == [c.temperature for c in made]


@pytest.mark.parametrize("policy", ["uniform", "older"])
def test_a_share_of_samples_is_another_policys_and_says_so(policy):
    made = choices(share=0.05, policy=policy, temperature_jitter=0.1)
    kinds = collections.Counter(c.exploration for c in made)
    assert kinds[Exploration(policy)] == pytest.approx(0.05 * len(made), rel=0.25)
    for choice in made:
        assert (choice.source is NEWEST) == (choice.exploration is None)
        assert (choice.temperature is None) == (choice.exploration is not None)


def test_without_older_weights_the_newest_policy_samples():
    for older in (SimpleNamespace(version=None), SimpleNamespace(version=7)):
        assert not any(c.exploration for c in choices(older, share=0.05))


def test_a_uniform_policy_states_the_probabilities_that_it_samples_with():
    async def turns():
        session = await UniformEngine(NEWEST, 16).open(seed=1, temperature=0.3)
        return [await session.generate([1, 2], frozenset({5, 9}), 12) for _ in range(4000)]

    made = asyncio.run(turns())
    counts = np.bincount(np.concatenate([turn.tokens for turn in made]), minlength=16)
    assert counts.min() > 0.9 * counts.mean()
    for turn in made:
        assert turn.tokens.dtype == np.int32
        assert np.isin(turn.tokens[:-1], (5, 9)).sum() == 0, "it goes on behind a stop token"
        assert (turn.finish == "stop") == (turn.tokens[-1] in (5, 9))
        assert len(turn.tokens) == 12 or turn.finish == "stop"
        assert turn.logprobs == pytest.approx(-math.log(16))
        assert set(turn.versions.tolist()) == {7}


VLLM = {"actor.engine": "vllm"}


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"actor.exploration.share": 0.06}, "actor.exploration.share=0.06"),
        ({"actor.exploration.share": 0.05}, "weight_bound=truncate"),
        ({"actor.exploration.temperature_jitter": 1.5}, "temperature_jitter=1.5"),
        ({"actor.exploration.policy": "best"}, "actor.exploration.policy=best"),
        ({**VLLM, "actor.exploration.temperature_jitter": 0.8}, "reach 0.45 and 2.23"),
        (
            {"actor.engine": "vllm", "actor.temperature": 0.01, "actor.exploration.temperature_jitter": 0.1},
            "reach 0.009",
        ),
        ({"actor.temperature": 1e-3, "actor.exploration.temperature_jitter": 0.1}, "reach 0.0009"),
        ({"actor.temperature": float("inf")}, "actor.temperature=inf"),
        ({"actor.temperature": float("nan")}, "actor.temperature=nan"),
    ],
)
def test_a_setting_that_cannot_be_is_named_with_the_way_out(changes, named):
    with pytest.raises(ValueError, match=named):
        override(Config(), changes)


def test_another_policy_is_let_in_where_its_weight_is_truncated():
    weighed = {"learner.objective.correction": "interpolated", "learner.objective.weight_bound": "truncate"}
    override(Config(), {"actor.exploration.share": 0.05, **weighed})
