"""Settings that make no sense together are refused by name, before anything starts."""

import pytest

from asyncrl_jax.config import RENAMED, Config, flatten, from_json, override, to_json

OBJECTIVE, ADVANTAGE, KL = "learner.objective.", "learner.advantage.", "learner.kl."

REFUSED = {
    "an asynchronous run without a correction": ({OBJECTIVE + "correction": "none"}, "lag.token_updates = 4"),
    "and in mode semi_async": ({OBJECTIVE + "correction": "none", "mode": "semi_async"}, "lag.token_updates = 3"),
    "an asynchronous run without behaviour log-probs": (
        {OBJECTIVE + "behaviour_logprobs": "absent"},
        "needs those of the sampler",
    ),
    "and with the correction off": (
        {OBJECTIVE + "behaviour_logprobs": "absent", OBJECTIVE + "correction": "none"},
        "learner.objective.correction=none",
    ),
    "reinforce with PPO's ratio": ({OBJECTIVE + "loss": "reinforce"}, "takes importance, none"),
    "ppo with weights to the target": (
        {OBJECTIVE + "correction": "importance"},
        "takes ratio, decoupled, interpolated, none",
    ),
    "a bound on weights that are not there": (
        {OBJECTIVE + "weight_bound": "mask"},
        "has no importance weights to bound",
    ),
    "a level of weights that are not there": ({OBJECTIVE + "weight_level": "sequence"}, "has no importance weights"),
    "a floor without a mask": (
        {
            OBJECTIVE + "correction": "decoupled",
            OBJECTIVE + "weight_floor": 0.5,
            OBJECTIVE + "weight_bound": "truncate",
        },
        "only learner.objective.weight_bound = mask",
    ),
    "a floor above the cap": (
        {OBJECTIVE + "correction": "decoupled", OBJECTIVE + "weight_bound": "mask", OBJECTIVE + "weight_floor": 3.0},
        "below learner.objective.weight_cap = 2.0",
    ),
    "dual clip of another loss": (
        {OBJECTIVE + "loss": "cispo", OBJECTIVE + "dual_clip": 3.0},
        "with learner.objective.loss = ppo",
    ),
    "dual clip below 1": ({OBJECTIVE + "dual_clip": 0.5}, "learner.objective.dual_clip=0.5"),
    "no clip": ({OBJECTIVE + "clip_range": 0.0}, "learner.objective.clip_range=0.0"),
    "an unknown loss": ({OBJECTIVE + "loss": "dpo"}, "use one of ppo, gspo, cispo, reinforce"),
    "an unknown aggregation": ({OBJECTIVE + "aggregation": "mean"}, "use one of token_mean"),
    "a reference that follows without a KL": (
        {KL + "coefficient": 0.0, KL + "reference": "ema", KL + "reference_decay": 0.9},
        "needs learner.kl.coefficient above 0",
    ),
    "a KL target without a KL": ({KL + "coefficient": 0.0, KL + "target": 0.1}, "learner.kl.target=0.1"),
    "a response to lag without a KL": ({KL + "coefficient": 0.0, KL + "lag_gain": 0.1}, "learner.kl.lag_gain=0.1"),
    "k3 as a reward": ({KL + "placement": "reward"}, "k1 with learner.kl.placement = reward"),
    "a period of a fixed reference": ({KL + "reference_every_updates": 5}, "learner.kl.reference = periodic"),
    "a periodic reference without a period": ({KL + "reference": "periodic"}, "learner.kl.reference_every_updates=0"),
    "an averaged reference without a decay": ({KL + "reference": "ema"}, "learner.kl.reference_decay=0.0"),
    "groups of one with a group baseline": ({"learner.group_size": 1}, "compares members"),
    "groups of one with rloo": ({"learner.group_size": 1, ADVANTAGE + "estimator": "rloo"}, "compares members"),
    "a deviation that nobody divides by": (
        {ADVANTAGE + "estimator": "rloo", ADVANTAGE + "std": "none"},
        "only learner.advantage",
    ),
    "turn discount beside a critic": (
        {ADVANTAGE + "estimator": "gae", ADVANTAGE + "turn_discount": 0.9},
        "1 with learner.advantage",
    ),
    "what is left out is punished too": (
        {ADVANTAGE + "truncated": "mask", ADVANTAGE + "overlong_buffer_tokens": 8},
        "0 with learner.advantage.truncated = mask",
    ),
    "a buffer longer than the budget": (
        {ADVANTAGE + "overlong_buffer_tokens": 65},
        "at most environment.max_tokens = 64",
    ),
    "an unknown optimizer": ({"learner.optimizer": "sgd"}, "use one of adamw, adafactor, muon"),
    "fewer groups at most than at least": ({"learner.groups_per_update_max": 8}, "learner.groups_per_update = 16"),
    "larger updates from a pool that is kept full": (
        {"learner.groups_per_update_max": 32, "pool.size_updates": 2},
        "0 with pool.size_updates = 2",
    ),
    "a negative slowdown": ({"learner.lr_lag_slowdown": -1.0}, "learner.lr_lag_slowdown=-1.0"),
    "a lead of a policy that waits": ({"lag.straggler_lead_updates": 1}, "lag.straggler_policy is expire"),
    "a lead as long as a ticket's life": (
        {"lag.straggler_lead_updates": 2, "lag.straggler_policy": "partial"},
        "less than N - A = 2",
    ),
    "a lead as long as the least N leaves": (
        {
            "lag.straggler_lead_updates": 1,
            "lag.straggler_policy": "partial",
            "orchestrator.tuning.enabled": True,
            "orchestrator.tuning.min_token_updates": 3,
        },
        "less than N - A = 1",
    ),
    "an N that is negative": ({"lag.token_updates": -1}, "lag.token_updates"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_ux_03_a_bad_combination_is_refused_by_name(name):
    """UX-03, LOSS-14, LOSS-17."""
    changes, message = REFUSED[name]
    with pytest.raises(ValueError, match="--config") as refused:
        override(Config(), changes)
    assert message in str(refused.value)


ACCEPTED = {
    "synchronous, without a correction": {OBJECTIVE + "correction": "none", "mode": "sync"},
    "synchronous, without behaviour log-probs": {
        OBJECTIVE + "correction": "none",
        OBJECTIVE + "behaviour_logprobs": "absent",
        "mode": "sync",
    },
    "groups of one with a critic": {"learner.group_size": 1, ADVANTAGE + "estimator": "gae"},
    "IcePop": {
        OBJECTIVE + "correction": "decoupled",
        OBJECTIVE + "weight_bound": "mask",
        OBJECTIVE + "weight_floor": 0.5,
        OBJECTIVE + "weight_cap": 5.0,
    },
    "CISPO without a lower bound": {
        OBJECTIVE + "loss": "cispo",
        OBJECTIVE + "clip_range": 1.0,
        OBJECTIVE + "clip_range_high": 0.3,
    },
    "off-policy REINFORCE": {
        OBJECTIVE + "loss": "reinforce",
        OBJECTIVE + "correction": "importance",
        OBJECTIVE + "weight_bound": "truncate",
    },
}


@pytest.mark.parametrize("name", ACCEPTED)
def test_what_makes_sense_is_accepted(name):
    leaves = flatten(override(Config(), ACCEPTED[name]))
    assert leaves.items() >= ACCEPTED[name].items()


def test_the_config_of_an_older_run_directory_is_read_under_the_new_names():
    leaves = to_json(Config())
    for old, new in RENAMED.items():
        leaves[old] = leaves.pop(new)
    leaves["learner.kl_coefficient"] = 0.05
    assert from_json(leaves).learner.kl.coefficient == 0.05
