"""The learner as a library: the page about it runs, and what it imports is free of queue, engine and flags."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = Path(__file__).parents[2] / "docs" / "research.md"

PURE = [
    "advantages",
    "aggregation",
    "balance",
    "credit",
    "importance",
    "kl",
    "logprobs",
    "objective",
    "optimizer",
    "packing",
    "policy_losses",
    "shaping",
    "state",
    "step",
    "supervised",
    "values",
]


@pytest.mark.timeout(300)  # it compiles a loop and a step
def test_every_block_of_the_page_runs(capsys):
    blocks = re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert len(blocks) == 5
    names = {"__name__": "research"}
    for number, block in enumerate(blocks, start=1):
        exec(compile(block, f"{PAGE.name}, block {number}", "exec"), names)
    assert "grad_norm" in capsys.readouterr().out


def test_the_learners_mathematics_imports_neither_queue_nor_engine_nor_flags():
    modules = ", ".join(f"asyncrl_jax.learner.{name}" for name in PURE)
    script = f"import sys, {modules}\nprint(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=110, check=True)
    loaded = set(done.stdout.split())
    assert "asyncrl_jax.learner.step" in loaded
    forbidden = {"redis", "vllm", "asyncrl_jax.flags", "asyncrl_jax.transport", "asyncrl_jax.actor", "torch"}
    assert not forbidden & loaded
