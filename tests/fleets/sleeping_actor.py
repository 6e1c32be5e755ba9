"""Stands for an actor: it says under which pid it runs, and sleeps until SIGTERM."""

import os
import signal
import sys
from pathlib import Path

given = dict(word.lstrip("-").split("=", 1) for word in sys.argv[1:])
note = Path(given["config_file"]).parent / "pids" / given["actor_id"]
note.parent.mkdir(exist_ok=True)
draft = note.with_name(f".{note.name}.{os.getpid()}")
draft.write_text(str(os.getpid()))
draft.replace(note)
signal.sigwait({signal.SIGTERM})
note.unlink()
