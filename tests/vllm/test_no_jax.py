"""An actor with vLLM imports no JAX, neither in its own process nor where weights are loaded."""

import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # a start alone may take a minute on a busy machine

SCRIPT = """
import asyncio, sys
import asyncrl_jax.actor.loop  # everything of an actor
from asyncrl_jax.actor.engines.registry import make_engine
from asyncrl_jax.presets import preset
from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import VersionGone

async def run():
    engine = make_engine(preset("vllm"))
    running = asyncio.create_task(engine.run())
    try:
        await engine.load(sys.argv[1], WeightVersion(0, None, 0, 0, "0" * 32))
    except VersionGone:
        pass  # the reader was there
    (attached,) = await engine._backend.call("asyncrl_attach", routed_experts=False)
    running.cancel()
    await asyncio.wait([running])
    return attached["jax"]

if __name__ == "__main__":
    assert not asyncio.run(run()), "the worker has imported JAX"
    assert "jax" not in sys.modules, "the actor has imported JAX"
"""


def test_weights_come_without_jax(tmp_path):
    script = tmp_path / "actor_without_jax.py"
    script.write_text(SCRIPT)
    subprocess.run(
        [sys.executable, str(script), str(tmp_path)],
        check=True,
        timeout=500,
        cwd=Path(__file__).parents[2],
        env={"PYTHONPATH": str(Path(__file__).parents[2]), "PATH": "/usr/bin:/bin"},
    )
