"""Train and held-out tasks: what is shared exactly and nearly is found, and the built-in splits share nothing."""

from asyncrl_jax.actor.envs.arithmetic import Arithmetic
from asyncrl_jax.actor.envs.overlap import check_splits, find_overlap


def words(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def test_equal_prompts_are_exact_and_not_near():
    found = find_overlap([words("12+34="), words("1+1=")], [words("12+34="), words("9-9=")])
    assert found.exact == (words("12+34="),)
    assert found.near == ()
    assert (found.num_train, found.num_heldout) == (2, 2)


def test_a_prompt_that_differs_by_a_word_is_near_and_names_its_twin():
    train = [words("if a train leaves at noon and goes west, where is it at one?"), words("nothing of the kind")]
    held = [words("if a train leaves at noon and goes east, where is it at one?"), words("something else altogether")]
    found = find_overlap(train, held)
    assert found.exact == ()
    ((prompt, twin, similarity),) = found.near
    assert (prompt, twin) == (held[0], train[0])
    # 57 and 57 n-grams of 4, of which those that touch the changed letters differ: computed by sets
    grams = [{t[i : i + 4] for i in range(len(t) - 3)} for t in (held[0], train[0])]
    assert similarity == len(grams[0] & grams[1]) / len(grams[0] | grams[1])
    assert found.near_share == 0.5


def test_nearness_has_a_threshold_and_short_prompts_are_one_ngram():
    assert find_overlap([words("abcdefgh")], [words("abcdefxy")], near=0.9).near == ()
    assert find_overlap([words("ab")], [words("abc")]).near == ()
    assert find_overlap([], [words("abc")]).exact == ()


def test_the_built_in_splits_share_no_task():
    found = check_splits(Arithmetic, (1, 2, 3), 60)
    assert found.exact == ()
    assert found.num_train > 100


class Leaky(Arithmetic):
    """Held-out tasks are those of the training split."""

    async def reset(self, task):
        import dataclasses

        return await super().reset(dataclasses.replace(task, split="train"))


def test_a_leak_between_the_splits_is_found():
    found = check_splits(Leaky, (1, 2), 20)
    assert len(found.exact) == found.num_heldout
