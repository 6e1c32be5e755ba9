"""`asyncrl-local` with the fake roles: launch.py new|resume RUN_DIR NUM_UPDATES [dotted.name=value ...]"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from asyncrl_jax.config import Config, override
from asyncrl_jax.local import run

FAKE_ROLE = str(Path(__file__).with_name("fake_role.py"))


def main() -> int:
    how, run_dir, num_updates, *settings = sys.argv[1:]
    run.role_command = lambda role, config_file, *rest: [
        sys.executable,
        FAKE_ROLE,
        role,
        f"--config_file={config_file}",
        *rest,
    ]
    changes = {"learner.num_updates": int(num_updates)}
    if how == "resume":
        return run.resume_run(Path(run_dir), changes)
    given = {name: json.loads(value) for name, value in (setting.split("=", 1) for setting in settings)}
    return run.new_run(override(Config(), {"run_dir": run_dir, **changes, **given}))


if __name__ == "__main__":
    sys.exit(main())
