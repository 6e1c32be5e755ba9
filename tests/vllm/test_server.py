"""The contract of engines, kept by a real vLLM server of its own."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import pytest
from engine_contract import EngineContract, EngineHost
from engine_setup import MAX_TOKENS, MODEL
from vllm_setup import NUM_SLOTS, TOLERANCES

from asyncrl_jax.actor.engines.vllm_engine import VllmEngine
from asyncrl_jax.actor.engines.vllm_server import VllmServer, serve_arguments, server_environment
from asyncrl_jax.config import VllmConfig

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def url(tmp_path_factory):
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    directory = tmp_path_factory.mktemp("model")
    arguments = serve_arguments(MODEL, VllmConfig(), directory, num_slots=NUM_SLOTS, max_tokens=MAX_TOKENS, on_cpu=True)
    command = [sys.executable, *arguments, f"--port={port}"]
    environment = server_environment(VllmConfig(), on_cpu=True) | os.environ
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--host=127.0.0.1"], env=environment, stdout=log, stderr=log, start_new_session=True
        )
        try:
            yield f"http://127.0.0.1:{port}"
        finally:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            print((directory / "log").read_text()[-3000:])


@pytest.fixture(scope="module")
def host(url, tmp_path_factory):
    engine = VllmEngine(
        VllmServer(url, start_timeout_s=200.0),
        num_slots=NUM_SLOTS,
        max_tokens=MAX_TOKENS,
        tolerance=TOLERANCES["float32"],
    )
    host = EngineHost(engine, tmp_path_factory.mktemp("weights"))
    yield host
    host.close()


class TestContract(EngineContract):
    pass


def test_a_server_that_is_not_there_is_named():

    with pytest.raises(TimeoutError, match=r"no vLLM server at http://127.0.0.1:9 within vllm.start_timeout_s=0"):
        asyncio.run(VllmServer("http://127.0.0.1:9", start_timeout_s=0.0).start())
