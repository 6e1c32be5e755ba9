"""One process of a learner, as its binary runs it.

python learner_process.py <run directory> <file with the password of Redis> <host:port or nothing> <processes> <number>
"""

import faulthandler
import logging
import signal
import sys
import threading
from pathlib import Path

from asyncrl_jax.config import override
from asyncrl_jax.config_file import read_config
from asyncrl_jax.learner.loop import run_learner


def main():
    run_dir, password_file, coordinator, num_processes, process_id = sys.argv[1:]
    faulthandler.register(signal.SIGUSR1)  # says where it stands
    logging.basicConfig(force=True, level=logging.INFO, format=f"%(asctime)s process {process_id}: %(message)s")
    config = override(
        read_config(Path(run_dir) / "config.json"),
        {
            "distributed.coordinator": coordinator,
            "distributed.num_processes": int(num_processes),
            "distributed.process_id": int(process_id),
        },
    )
    return run_learner(config, Path(run_dir), Path(password_file).read_text(), threading.Event())


if __name__ == "__main__":
    sys.exit(main())
