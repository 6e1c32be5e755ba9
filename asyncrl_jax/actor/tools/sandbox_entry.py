"""First program inside a sandbox: sets the limits of the process, gives up all rights, and becomes the code.

Standard library only: it is copied into the sandbox and started with `python -I -S`. Arguments, all integers: user id
to become or -1, CPU seconds, bytes of address space, processes, bytes of a file, open files. The code comes in the file
`code.py` of the working directory.
"""

import os
import resource
import sys


def main() -> None:
    """Limits, then `exec`: what runs afterwards can't raise them."""
    user, cpu_s, memory_bytes, processes, file_bytes, open_files = map(int, sys.argv[1:7])
    if user >= 0:
        os.setgroups([])
        os.setresgid(user, user, user)
        os.setresuid(user, user, user)
    for limit, value in (
        (resource.RLIMIT_CPU, cpu_s),
        (resource.RLIMIT_AS, memory_bytes),
        (resource.RLIMIT_NPROC, processes),
        (resource.RLIMIT_FSIZE, file_bytes),
        (resource.RLIMIT_NOFILE, open_files),
        (resource.RLIMIT_CORE, 0),
    ):
        resource.setrlimit(limit, (value, value))
    os.write(1, b"\x06")  # `STARTED` of sandbox.py
    os.execv(sys.executable, [sys.executable, "-I", "-S", "code.py"])  # noqa: S606, there is no shell here


main()
