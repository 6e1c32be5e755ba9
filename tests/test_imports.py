"""The import contracts of pyproject.toml, and what the wheel must hold."""

import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_the_import_contracts_hold():
    command = "import sys; from importlinter.cli import lint_imports; sys.exit(lint_imports(no_cache=True))"
    done = subprocess.run([sys.executable, "-c", command], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_every_folder_of_the_package_is_listed_for_the_wheel():
    listed = set(tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"])
    folders = {".".join(path.parent.relative_to(ROOT).parts) for path in (ROOT / "asyncrl_jax").rglob("*.py")}
    assert listed == folders | {"asyncrl_jax.launchers"}


def test_settings_flags_and_launcher_start_without_jax():
    script = """
import sys
import asyncrl_jax.flags, asyncrl_jax.local.run
assert "jax" not in sys.modules, "the launcher would take seconds longer to start"
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)
