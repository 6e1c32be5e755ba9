"""What is needed to know later what a run was: settings, code, packages, data and machine, once for every session."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from asyncrl_jax.config import Config, to_json

RECORD_FILE = "record.json"

# Variables that change what is computed or how fast; no others are recorded, since they may hold secrets.
_VARIABLES = (
    "GLIBC_TUNABLES",
    "JAX_COMPILATION_CACHE_DIR",
    "JAX_DEFAULT_MATMUL_PRECISION",
    "JAX_ENABLE_X64",
    "JAX_PLATFORMS",
    "LIBTPU_INIT_ARGS",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "XLA_FLAGS",
)


def write_record(run_dir: Path, config: Config, environment: Mapping[str, str]) -> None:
    """Adds this session to `<run_dir>/record.json`.

    Args:
      environment: variables that the roles are started with.
    """
    demonstrations = Path(config.warm_start.demonstrations or run_dir / "demonstrations.avro")
    session = {
        "started_at": time.time(),
        "command": sys.argv,
        "config": to_json(config),
        "seed": config.seed,
        "code": code_revision(),
        "python": sys.version,
        "packages": dict(sorted((d.name, d.version) for d in importlib.metadata.distributions())),
        "tasks": {
            "environment": config.environment.name,
            "identity": task_identity(config),
            "demonstrations_sha256": _sha256(demonstrations),
        },
        "variables": {name: environment[name] for name in _VARIABLES if name in environment},
        "hardware": hardware(),
    }
    sessions = [*read_record(run_dir), session]
    draft = run_dir / f"{RECORD_FILE}.tmp"
    draft.write_text(json.dumps({"sessions": sessions}, indent=1) + "\n")
    os.replace(draft, run_dir / RECORD_FILE)


def read_record(run_dir: Path) -> list[dict[str, Any]]:
    """Sessions of a run, oldest first; none if it has no record."""
    path = run_dir / RECORD_FILE
    return json.loads(path.read_text())["sessions"] if path.exists() else []


def code_revision() -> dict[str, Any]:
    """Version of the package; commit and whether there are changes where it runs from a work tree."""
    source = Path(__file__).parent
    revision: dict[str, Any] = {"version": importlib.metadata.version("asyncrl-jax")}
    # Only where git tracks this very file: an installed package may lie inside somebody else's repository.
    if shutil.which("git") and _git(source, "ls-files", Path(__file__).name):
        revision["commit"] = _git(source, "rev-parse", "HEAD")
        revision["changed"] = bool(_git(source, "status", "--porcelain", "--untracked-files=no"))
    return revision


def task_identity(config: Config) -> str:
    """What names the environment's tasks, protocol and tokens: it changes whenever they do."""
    from asyncrl_jax.actor.envs.registry import make_environments

    return make_environments(config).identity


def hardware() -> dict[str, Any]:
    """The machine, found without starting an accelerator's runtime."""
    return {
        "host": platform.node(),
        "system": platform.platform(),
        "processor": _processor(),
        "cores": os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "accelerators": _accelerators(),
    }


def _git(directory: Path, *arguments: str) -> str:
    command = ["git", "-C", str(directory), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=10, check=False)
    return done.stdout.strip() if done.returncode == 0 else ""


def _processor() -> str:
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.exists():
        for line in cpuinfo.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _accelerators() -> list[str]:
    found = [str(path) for path in sorted(Path("/dev").glob("accel[0-9]*"))]  # TPU
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader"]
        done = subprocess.run(query, capture_output=True, text=True, timeout=10, check=False)
        if done.returncode == 0:
            found += [line.strip() for line in done.stdout.splitlines() if line.strip()]
    return found


def _sha256(path: Path) -> str | None:
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
