"""A scoring process: reads requests as JSON lines, answers with JSON lines. See `verifiers`."""

import functools
import importlib
import json
import os
import sys
from collections.abc import Callable
from typing import Any

from asyncrl_jax.lifetime import die_with_parent


@functools.cache
def _function(address: str) -> Callable[..., Any]:
    module, _, name = address.partition(":")
    function: Callable[..., Any] = getattr(importlib.import_module(module), name)
    return function


def _answer(request: dict[str, Any]) -> dict[str, Any]:
    if not request:  # asks whether the process is ready
        return {"ready": True}
    try:
        return {"score": _function(request["address"])(*request["arguments"])}
    except Exception as error:  # noqa: BLE001, whatever a scorer raises is an answer
        return {"error": repr(error)}


def main() -> None:
    """Serves until its input ends."""
    die_with_parent()
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a scorer prints must not look like an answer
    for line in sys.stdin:
        result = _answer(json.loads(line))
        try:
            text = json.dumps(result)
        except (TypeError, ValueError):
            text = json.dumps({"score": repr(result.get("score"))})  # a string, which is no score
        answers.write(text + "\n")
        answers.flush()


if __name__ == "__main__":
    main()
