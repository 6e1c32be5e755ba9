"""The distance between weights, on one line and across forks."""

import pytest

from asyncrl_jax.types import EvaluationResult, Line, WeightVersion, update_distance

# line 1 leaves line 0 at update 10, line 2 leaves line 1 at update 12, line 3 leaves line 0 at update 4
LINES = {0: Line(0), 1: Line(1, 0, 10), 2: Line(2, 1, 12), 3: Line(3, 0, 4)}


def version(line: int, update: int) -> WeightVersion:
    return WeightVersion(number=0, parent=None, line=line, update=update, manifest_digest="")


@pytest.mark.parametrize(
    ("sampled", "line", "update", "distance"),
    [
        ((0, 5), 0, 9, 4),  # one line: the difference of update counts
        ((0, 9), 0, 9, 0),
        ((0, 8), 1, 13, 5),  # sampled before the fork, trained after it
        ((0, 14), 1, 12, 6),  # sampled on the abandoned branch: 4 beyond the fork and 2 on the new line
        ((0, 14), 1, 10, 4),
        ((0, 11), 2, 15, 6),  # two forks on: 1 beyond update 10, then 5
        ((1, 14), 2, 15, 5),  # 2 beyond update 12, then 3
        ((1, 14), 3, 6, 12),  # branches that left line 0 at 10 and at 4: 10 + 2
        ((2, 13), 0, 10, 3),  # trained on the parent line
    ],
)
def test_distance_counts_updates_on_both_branches_since_the_common_ancestor(sampled, line, update, distance):
    assert update_distance(version(*sampled), line, update, LINES) == distance


def test_distance_on_an_unknown_line_is_an_error():
    with pytest.raises(KeyError):
        update_distance(version(7, 3), 0, 5, LINES)


def test_success_is_of_the_levels_asked_for():
    result = EvaluationResult("e", 3, 3, num_tasks={1: 10, 2: 30}, num_successes={1: 5, 2: 30}, mean_reward=1.0)
    assert result.success((1,)) == 0.5
    assert result.success((1, 2)) == 35 / 40
    with pytest.raises(ValueError, match=r"levels \(3,\)"):
        result.success((3,))
