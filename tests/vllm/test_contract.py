"""The contract of engines, kept by a real vLLM. Run by `make test-vllm`, in an environment that has it."""

import pytest
from engine_contract import EngineContract, EngineHost
from vllm_setup import make_engine

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # a start alone may take a minute on a busy machine


@pytest.fixture(scope="module")
def host(tmp_path_factory):
    host = EngineHost(make_engine(), tmp_path_factory.mktemp("weights"))
    yield host
    host.close()


class TestContract(EngineContract):
    pass
