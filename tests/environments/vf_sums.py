"""Environments of the package, by its own classes: one kind an argument."""

import asyncio
import os
import time
from pathlib import Path

import verifiers as vf
from datasets import Dataset

ADD = {"a": "first", "b": "second"}


def rows(name, count, start=0):
    numbers = range(start, start + count)
    return Dataset.from_dict(
        {
            "question": [f"{name} {n}" for n in numbers],
            "answer": [str(n) for n in numbers],
            "info": [{"n": n} for n in numbers],
        }
    )


def right(completion, answer):
    return float(completion[-1].content.strip() == answer)


def short(completion):
    return float(len(completion[-1].content) < 20)


def odd(completion, answer, info):
    """What a reward function may do wrong, by the row."""
    said = completion[-1].content
    if said == "raise":
        raise KeyError("lost")
    return {"nan": float("nan"), "none": None, "big": 7.0}.get(said, right(completion, answer))


async def dies():
    os._exit(3)


async def rough(completion, answer):
    said = completion[-1].content
    if said == "die":
        await asyncio.create_task(dies())  # as the package itself plays, in tasks of its own
    if said == "block":
        time.sleep(60)
    try:
        await asyncio.sleep(60 if said in ("hang", "wait") else 0)
    except asyncio.CancelledError:
        Path(os.environ["VF_SUMS_CANCELLED"]).touch()
        raise
    return right(completion, answer)


def by_group(completions, **named):
    return [0.0 for _ in completions]


class Countdown(vf.MultiTurnEnv):
    """Asks for the number, then for one less, until zero."""

    async def setup_state(self, state):
        state["left"] = int(state["answer"]) % 3
        return state

    @vf.stop
    async def at_zero(self, state):
        return bool(state["trajectory"]) and state["left"] < 0

    async def env_response(self, messages, state, **named):
        if messages[-1].content == "break":
            raise vf.InfraError("no sandbox")
        state["left"] -= 1
        if state["left"] < 0:
            state["final_env_response"] = [vf.UserMessage(content="done")]
            return state["final_env_response"]
        return [vf.UserMessage(content=f"and {state['left']}?")]


def add(a: int, b: int) -> int:
    """Adds two numbers.

    Args:
        a: the first
        b: the second
    """
    return a + b


def called(state):
    return float(len(state["trajectory"]) == 2)


def load_environment(kind="single", num_rows=40, own_heldout=True, leak=False):
    train = rows("say", num_rows)
    data = {"dataset": train}
    if own_heldout:
        data["eval_dataset"] = rows("say", num_rows, 0 if leak else 1000)
    if kind == "single":
        return vf.SingleTurnEnv(**data, system_prompt="Answer.", rubric=vf.Rubric([right, short], [1.0, 0.25]))
    if kind == "multi":
        return Countdown(**data, max_turns=8, rubric=vf.Rubric([right]))
    if kind == "tool":
        return vf.ToolEnv(**data, tools=[add], max_turns=4, rubric=vf.Rubric([right, called], [0.75, 0.25]))
    functions = {"odd": odd, "rough": rough, "group": by_group}
    return vf.SingleTurnEnv(**data, rubric=vf.Rubric([functions[kind]]))
