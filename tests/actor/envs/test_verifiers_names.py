"""What is said of environments of the package verifiers where the package, or the environment, is not installed."""

import importlib.util

import pytest

from asyncrl_jax.actor.envs import verifiers_env
from asyncrl_jax.actor.envs.registry import make_environments
from asyncrl_jax.actor.envs.verifiers_env import RubricMeans, module_name
from asyncrl_jax.config import Config, override


def refused(monkeypatch, changes, installed=True):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        verifiers_env.importlib.util, "find_spec", lambda name: object() if name == "verifiers" and installed else None
    )
    with pytest.raises(ValueError, match=r"--config\.environment") as error:
        make_environments(override(Config(), {"environment.name": "verifiers:someone/no-such", **changes}))
    monkeypatch.setattr(verifiers_env.importlib.util, "find_spec", find)
    return str(error.value)


def test_what_is_missing_is_named_with_the_way_out(monkeypatch):
    assert "pip install 'asyncrl-jax[verifiers]'" in refused(monkeypatch, {}, installed=False)
    assert "no module no_such here; install the environment" in refused(monkeypatch, {})
    for wrong in ("{", "[1]"):
        assert "--config.environment.arguments=" in refused(monkeypatch, {"environment.arguments": wrong})


@pytest.mark.parametrize("environment_id", ["", "no_such.inner"])
def test_an_id_that_names_no_module_is_refused_in_words(environment_id):
    with pytest.raises(ValueError, match=rf"environment.name=verifiers:{environment_id}: no module"):
        verifiers_env._source(f"verifiers:{environment_id}", module_name(environment_id))


def test_an_id_names_a_module_as_the_package_finds_it():
    assert module_name("owner/word-le@0.2") == module_name("word-le") == "word_le"


def test_means_are_of_the_episodes_since_they_were_last_asked_for():
    means = RubricMeans()
    means.add({"right": 1.0, "odd": float("nan")})
    means.add({"right": 0.0, "odd": None, "words": "many"})
    assert means.take() == {"rubric/right": 0.5}
    assert means.take() == {}
