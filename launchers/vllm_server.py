"""asyncrl-vllm-server: starts `vllm serve` so that one actor, anywhere, can sample with it and swap its weights.

asyncrl-vllm-server --config_file=runs/latest/config.json --port=8000
asyncrl-actor … --config.actor.engine=vllm --config.vllm.servers=http://127.0.0.1:8000

It reads weights where the actor says, so it must see the same directory or bucket.
"""

import os
import sys
import tempfile
from pathlib import Path

from absl import flags as absl_flags

from asyncrl_jax import flags

_HOST = absl_flags.DEFINE_string(
    "host", "127.0.0.1", "Address to listen at. Whoever reaches it can replace the weights."
)
_PORT = absl_flags.DEFINE_integer("port", 8000, "Port to listen at.")


def main() -> int:
    """Becomes the server."""
    config = flags.config_from_flags()
    from vllm.platforms import current_platform

    from asyncrl_jax.actor.engines.vllm_server import serve_arguments, server_environment

    on_cpu = current_platform.is_cpu()
    directory = Path(tempfile.mkdtemp(prefix="asyncrl-model-"))
    arguments = serve_arguments(
        config.model,
        config.vllm,
        directory,
        num_slots=config.actor.slots,
        max_tokens=config.environment.max_tokens,
        on_cpu=on_cpu,
    )
    environment = server_environment(config.vllm, on_cpu=on_cpu) | os.environ
    command = [sys.executable, *arguments, f"--host={_HOST.value}", f"--port={_PORT.value}"]
    os.execve(sys.executable, command, environment)  # noqa: S606


def run() -> None:
    """Console entry point."""
    flags.run(main)


if __name__ == "__main__":
    run()
