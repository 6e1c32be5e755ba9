"""One orchestrator as a process of its own: `candidate.py CONFIG RUN_DIR`."""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path

from asyncrl_jax.config_file import read_config
from asyncrl_jax.orchestrator.loop import run_orchestrator

if __name__ == "__main__":
    sys.exit(
        run_orchestrator(
            read_config(Path(sys.argv[1])), Path(sys.argv[2]), os.environ.get("PASSWORD"), threading.Event()
        )
    )
