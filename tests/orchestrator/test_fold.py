"""The sums of what actors saw: those of adding records one by one, whatever is no record."""

import functools
import math

from hypothesis import given, settings
from hypothesis import strategies as st

from asyncrl_jax.orchestrator.policies import breaker, drift
from asyncrl_jax.orchestrator.round import fold

COUNTS = st.integers(0, 50).map(float)
FAULTS = st.dictionaries(st.sampled_from("xyz"), COUNTS, max_size=2)
TARGETS = st.fixed_dictionaries(
    {"successes": COUNTS}, optional={"seconds": COUNTS, "infrastructure": FAULTS, "data": FAULTS}
)
BUCKETS = st.fixed_dictionaries({"groups": COUNTS, "episodes": COUNTS}, optional={"reward": COUNTS})
RECORDS = st.fixed_dictionaries(
    {},
    optional={
        "buckets": st.dictionaries(st.sampled_from(["a/1", "a/2"]), BUCKETS),
        "targets": st.dictionaries(st.sampled_from(["environment:a", "actor:1", "actor:2"]), TARGETS),
    },
)
NO_RECORDS = [
    {"buckets": {"a/1": {"episodes": "3"}}},
    {"buckets": {"a/1": {"episodes": math.nan}}},
    {"buckets": {"a/1": {"unknown": 1.0}}},
    {"buckets": {"a/1": None}},
    {"buckets": {"a/1": []}},  # nothing in it, and no record either
    {"buckets": {"a/1": ""}},
    {"targets": {"actor:1": []}},
    {"targets": {"actor:1": ""}},
    {"buckets": [1]},
    {"targets": {"actor:1": {"successes": math.inf}}},
    {"targets": {"actor:1": {"seconds": None}}},
    {"targets": {"actor:1": {"unknown": 1.0}}},
    {"targets": {"actor:1": {"infrastructure": None}}},
    {"targets": {"actor:1": {"data": {"x": "many"}}}},
    {"targets": {"actor:1": {"data": ["x"]}}},
    {"targets": "all"},
]


def one_by_one(records):
    samples, tallies = {}, {}
    for record in records:
        for name, sums in record.get("buckets", {}).items():
            samples.setdefault(name, []).append(drift.Sample(**sums))
        for name, sums in record.get("targets", {}).items():
            tallies.setdefault(name, []).append(breaker.Tally(**sums))
    return (
        {name: functools.reduce(drift.Sample.plus, parts) for name, parts in samples.items()},
        {name: functools.reduce(breaker.Tally.plus, parts) for name, parts in tallies.items()},
    )


@settings(max_examples=200, deadline=None)
@given(st.lists(RECORDS, max_size=6), st.lists(st.sampled_from(NO_RECORDS), max_size=3), st.randoms())
def test_the_sums_are_those_of_adding_one_by_one_and_what_is_no_record_is_left_out(records, bad, random):
    mixed = [*records, *bad]
    random.shuffle(mixed)
    assert fold(mixed) == one_by_one([record for record in mixed if record not in bad])


def test_each_thing_that_is_no_record_is_left_out():
    good = {"targets": {"actor:1": {"successes": 1.0}}, "buckets": {"a/1": {"groups": 1.0}}}
    for bad in NO_RECORDS:
        assert fold([bad]) == ({}, {}), bad
        assert fold([good, bad]) == ({"a/1": drift.Sample(1.0)}, {"actor:1": breaker.Tally(1.0)}), bad
