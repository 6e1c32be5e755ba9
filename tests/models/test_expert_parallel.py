"""The model on every mesh of 2, 4 and 8 devices equals the model on one."""

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

NUM_DEVICES = 8
SHAPES = [shape for shape in itertools.product((1, 2, 4, 8), repeat=4) if math.prod(shape) in (2, 4, 8)]
# Compiling, not computing, takes the time here.
QUICK_COMPILE = "--xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"


def name_of(shape):
    return "x".join(map(str, shape))  # data, fsdp, expert, tensor


@pytest.fixture(scope="module")
def report():
    """Errors by mesh, from two processes that share the meshes."""
    flags = f"--xla_force_host_platform_device_count={NUM_DEVICES} {QUICK_COMPILE}"
    environment = os.environ | {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
    script, names = Path(__file__).with_name("every_mesh.py"), [name_of(shape) for shape in SHAPES]
    running = [
        subprocess.Popen(
            [sys.executable, script, *names[half::2]],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for half in (0, 1)
    ]
    errors = {}
    for process in running:
        output, problem = process.communicate(timeout=900)
        assert process.returncode == 0, problem[-3000:]
        errors |= json.loads(output.splitlines()[-1])
    return errors


@pytest.mark.timeout(1000)
@pytest.mark.parametrize("shape", SHAPES, ids=name_of)
def test_moe_08_every_mesh_equals_one_device(report, shape):
    """MOE-08. Outputs, loss and all gradients; one expert is idle, another has more than its share."""
    assert len(SHAPES) == 4 + 10 + 20
    errors = report[name_of(shape)]
    assert errors.pop("counts") == 0
    worst = errors.pop("worst")
    assert max(errors.values()) < 1e-5, (errors, worst)
