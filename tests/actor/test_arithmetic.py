import asyncio
import random
import subprocess
import sys

import pytest

from asyncrl_jax.actor.envs import arithmetic
from asyncrl_jax.actor.envs.arithmetic import LEVELS, SPLITS, Arithmetic, decode, encode, is_heldout, make_problem
from asyncrl_jax.types import Task


def play(turns, *, split="train", level=1, index=0):
    """(observations, score) of one episode in which the policy says `turns`."""

    async def run():
        environment = Arithmetic()
        await environment.reset(Task("arithmetic", split, level, index))
        observations = [await environment.step(encode(turn)) for turn in turns]
        return observations, await environment.score()

    return asyncio.run(run())


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("split", SPLITS)
def test_answers_agree_with_reasoning_gym(split, level):
    from reasoning_gym.factory import create_dataset  # after `arithmetic`, which makes it importable everywhere

    scorer = create_dataset("chain_sum", seed=0)
    for index in range(100):
        problem = make_problem(split, level, index)
        answer = problem.running[-1]
        assert answer == eval(problem.expression)
        assert scorer.score_answer(str(answer), problem.entry) == 1.0
        assert scorer.score_answer(str(answer + 1), problem.entry) < 1.0


@pytest.mark.parametrize("level", LEVELS)
def test_flawless_solution_fits_and_earns_every_part(level):
    for index in range(100):
        problem = make_problem("train", level, index)
        turns = [*problem.calls, f"#{problem.running[-1]}$"]
        observations, score = play(turns, level=level, index=index)
        assert score.success
        assert set(score.parts.values()) == {1.0}
        assert [o.done for o in observations] == [False] * len(problem.calls) + [True]
        num_tokens = len(f"^{problem.expression}=") + sum(map(len, turns)) + sum(len(o.tokens) for o in observations)
        assert num_tokens == problem.solution_tokens <= arithmetic.SOLUTION_TOKENS
        assert len(turns) <= arithmetic.SOLUTION_TURNS


def test_level_shapes():
    for level, shape in LEVELS.items():
        problems = [make_problem("train", level, index) for index in range(200)]
        assert {len(p.terms) for p in problems} == set(range(shape.min_terms, shape.max_terms + 1))
        assert {p.entry["metadata"]["num_digits"] for p in problems} == set(
            range(shape.min_digits, shape.max_digits + 1)
        )


def test_every_process_makes_the_same_tasks():
    # Golden: [make_problem(split, level, 0).expression for level in LEVELS for split in SPLITS], reasoning-gym 0.1.25.
    golden = ["9+8-1", "5-6-4", "43+50+67+48", "5+5+7", "72-26+22+81+13", "6-8-2+5-6"]
    assert [make_problem(split, level, 0).expression for level in LEVELS for split in SPLITS] == golden


def test_cost_of_a_task_does_not_grow_with_its_index(monkeypatch):
    draws = []
    dataset = arithmetic._dataset(2)

    class Counting:
        def __getitem__(self, item):
            draws.append(item)
            return dataset[item]

    monkeypatch.setattr(arithmetic, "_dataset", lambda level: Counting())
    for index in range(10**15, 10**15 + 50):
        make_problem("heldout", 2, index)
    assert len(draws) < 50 * 40  # 10 a task on average


def test_splits_share_no_expression(monkeypatch):
    assert arithmetic.shared_expressions(400) == set()
    make_problem.cache_clear()
    monkeypatch.setattr(arithmetic, "is_heldout", lambda expression: random.random() < 0.5)
    assert arithmetic.shared_expressions(400)  # the check itself can fail
    make_problem.cache_clear()


def test_heldout_share_is_a_tenth():
    share = sum(is_heldout(f"{a}+{b}") for a in range(100) for b in range(100)) / 10_000
    assert 0.09 < share < 0.115


@pytest.mark.parametrize(
    ("turns", "parts", "success"),
    [
        # Task: 9+8-1, flawless: <9+8> <17-1> #16$
        (["<9+8>", "<17-1>", "#16$"], (1, 1, 1, 1), True),
        (["#16$"], (1, 0, 1, 0), True),
        (["<9+8>", "#17$"], (0, 0.5, 1, 1), False),
        (["<9+8>", "<9+8>", "<9+8>", "#16$"], (1, 0.5, 1, 1), True),  # repeating gains nothing
        (["<17-1>", "<9+8>", "#16$"], (1, 0.5, 1, 1), True),  # out of order
        (["<9+>", "<9+8>", "<17-1>", "#16$"], (1, 1, 0, 2 / 3), True),
        (["<9+8>", "<17-1>", "16$"], (0, 1, 0, 1), False),  # an answer wants its #
        (["<9+8>", "<17-1>", "#1-6$"], (0, 1, 0, 1), False),
        (["<9+8>", "<17-1>"], (0, 1, 0, 1), False),  # cut off before the answer
        (["+<9+8>", "#16$"], (1, 0, 0, 0), True),
        (["#016$"], (1, 0, 1, 0), True),  # reasoning-gym tolerates leading zeros
        (["#116$"], (0, 0, 1, 0), False),  # reasoning-gym's part marks for containing the answer do not count
    ],
)
def test_reward_parts(turns, parts, success):
    _, score = play(turns)
    assert tuple(score.parts[name] for name in ("final", "step", "format", "tool")) == pytest.approx(parts)
    assert score.success is success


@pytest.mark.parametrize(
    ("call", "answer"),
    [
        ("<9+8>", "17;"),
        ("<17-99>", "-82;"),
        ("<-5-6>", "-11;"),
        ("<9+>", "!;"),
        ("<9>", "!;"),
        ("<9+-8>", "!;"),
        (">", "!;"),
    ],
)
def test_calculator(call, answer):
    (observation,), _ = play([call])
    assert decode(observation.tokens) == answer


def test_ids_outside_the_alphabet_are_malformed_not_fatal():
    async def run():
        environment = Arithmetic()
        await environment.reset(Task("arithmetic", "train", 1, 0))
        return decode((await environment.step([31, *encode("9+8>")])).tokens)

    assert asyncio.run(run()) == "!;"
    assert decode([31, -1]) == "??"
    with pytest.raises(ValueError, match="'x'"):
        encode("x")


def test_env_12_episodes_share_no_state():
    async def run():
        first, second = Arithmetic(), Arithmetic()
        await first.reset(Task("arithmetic", "train", 1, 0))
        await second.reset(Task("arithmetic", "train", 1, 1))
        await first.step(encode("<9+8>"))
        await second.step(encode("#-3$"))
        return await first.score(), await second.score()

    first, second = asyncio.run(run())
    assert (first.parts["tool"], first.success) == (1.0, False)
    assert (second.parts["tool"], second.success) == (0.0, True)


@pytest.mark.parametrize(("split", "level", "index"), [("test", 1, 0), ("train", 9, 0), ("train", 1, -1)])
def test_tasks_that_do_not_exist(split, level, index):
    with pytest.raises(ValueError, match=str(split if split == "test" else 9 if level == 9 else -1)):
        make_problem(split, level, index)


def test_a_task_of_another_environment_is_refused():
    with pytest.raises(ValueError, match="chess"):
        asyncio.run(Arithmetic().reset(Task("chess", "train", 1, 0)))


def test_sums_need_no_sat_solver():
    """reasoning-gym imports one that has no wheel; a machine without a C compiler has none."""
    program = (
        "import importlib.util, sys\n"
        "find_spec = importlib.util.find_spec\n"
        "importlib.util.find_spec = lambda name, *rest: None if name == 'pycosat' else find_spec(name, *rest)\n"
        "from asyncrl_jax.actor.envs.arithmetic import make_problem\n"
        "assert sys.modules['pycosat'].__spec__ is None\n"
        "assert make_problem('train', 1, 0).calls\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)
