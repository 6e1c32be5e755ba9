"""Classes of hosts: what they may say, and what their actors get."""

import pytest

from asyncrl_jax.config import Config, from_json, override, to_json

CLASSES = {"orchestrator.fleet.classes": ("cheap:2-16:0.4", "dear:8:2.5"), "actor.num_hosts": 4}


def fleet(*settings, **changes):
    return override(Config(), CLASSES | {"orchestrator.fleet.class_settings": settings} | changes)


def test_actors_of_a_class_have_its_settings_and_all_others_those_of_the_run():
    config = fleet(
        "cheap.slots=16", "cheap.episodes=64", "dear.engine=vllm", "dear.prefix_reuse=false", "dear.ray_gpus=1"
    )
    cheap, dear, run = config.actor_of("cheap"), config.actor_of("dear"), config.actor
    assert (cheap.slots, cheap.episodes, cheap.engine, cheap.prefix_reuse) == (16, 64, "jax", True)
    assert (dear.slots, dear.engine, dear.prefix_reuse) == (run.slots, "vllm", False)
    assert config.actor_of("") == config.actor_of("elsewhere") == run
    assert [(one.ray_cpus, one.ray_gpus) for one in config.orchestrator.fleet.host_classes] == [(1.0, 0.0), (1.0, 1.0)]
    assert from_json(to_json(config)) == config


def test_an_actor_sees_its_own_settings_alone():
    seen = fleet("cheap.slots=4", "cheap.episodes=8", "dear.slots=64").as_seen_by("cheap-3")
    assert (seen.actor.slots, seen.actor.episodes) == (4, 8)
    assert fleet("cheap.slots=4").as_seen_by("dear-0").actor == fleet().actor


def test_an_actors_id_names_its_class():
    names = {"cheap-0": "cheap", "dear-11": "dear", "my-host-3": "", "cheap": "", "cheap-x": "", "": ""}
    assert {name: fleet().orchestrator.fleet.class_of(name) for name in names} == names


@pytest.mark.parametrize(
    ("settings", "why"),
    [
        (("cheap.slots",), "class_settings=cheap.slots: as cheap.slots=16: a class .cheap, dear."),
        (("gold.slots=1",), "class_settings=gold.slots=1: as cheap.slots=16"),
        (("cheap.temperature=2",), "a setting .engine, slots, episodes"),
        (("cheap.slots=many",), "class_settings=cheap.slots=many: invalid literal"),
        (("cheap.slots=0",), "class_settings=cheap.slots=0: --config.actor.slots=0: at least 1"),
        (("cheap.episodes=8",), "--config.actor.episodes=8: 0, or at least actor.slots = 64"),
        (("cheap.prefix_reuse=yes",), "yes is not true or false"),
        (("cheap.ray_gpus=-1",), "class_settings=cheap.ray_gpus=-1: a number, at least 0"),
        (("cheap.slots=1", "cheap.slots=2"), "each setting once"),
    ],
)
def test_a_setting_that_is_none_is_refused_by_name(settings, why):
    with pytest.raises(ValueError, match=why):
        fleet(*settings)


def test_a_class_is_checked_with_the_settings_of_the_run_that_its_actors_have():
    hot = {"actor.exploration.temperature_jitter": 0.8}
    assert fleet("cheap.slots=4", **hot).actor.exploration.temperature_jitter == 0.8
    with pytest.raises(ValueError, match=r"temperatures reach 0\.45 and 2\.23; engine vllm takes"):
        fleet("dear.engine=vllm", **hot)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"orchestrator.fleet.classes": ("cheap:3-2",)}, "classes=cheap:3-2: as actor, cheap:16, cheap:2-16"),
        ({"orchestrator.fleet.classes": ("cheap", "cheap:2")}, "each name once"),
        ({"actor.num_hosts": 1}, "actor.num_hosts=1: at least what orchestrator.fleet.classes ask for, together: 2"),
        (
            {"actor.num_hosts": 4, "orchestrator.fleet.classes": ("cheap:2", "dear:1-1")},
            "actor.num_hosts=4: at most what orchestrator.fleet.classes allow, together: 3",
        ),
        ({"orchestrator.autoscale.enabled": True}, "autoscale.min_actors=1: at least what .* together: 2"),
    ],
)
def test_limits_that_do_not_fit_are_refused_by_name(changes, why):
    with pytest.raises(ValueError, match=why):
        fleet(**changes)
