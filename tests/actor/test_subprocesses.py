"""The end of child processes."""

import asyncio
import sys
import time

from asyncrl_jax.actor.subprocesses import reap


def test_a_process_that_was_killed_says_so_also_if_its_end_is_heard_late(monkeypatch, caplog):
    watcher = getattr(asyncio, "ThreadedChildWatcher", None)
    if hasattr(watcher, "_do_waitpid"):  # else another one watches here
        wait = watcher._do_waitpid

        def late(self, *args):
            time.sleep(0.2)
            wait(self, *args)

        monkeypatch.setattr(watcher, "_do_waitpid", late)

    async def run():
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-c", "import time; time.sleep(60)", stdin=asyncio.subprocess.PIPE
        )
        process.kill()
        await asyncio.sleep(0.1)  # it has ended, and nobody has heard
        await reap(process)
        return process.returncode

    assert asyncio.run(run()) == -9
    assert caplog.records == []
