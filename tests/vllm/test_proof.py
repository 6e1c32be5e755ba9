"""Weights in a live vLLM: what is loaded is what a fresh engine would have, and whatever is wrong has a check."""

import pytest
from engine_contract import EngineHost, converse
from vllm_setup import make_engine

from asyncrl_jax.actor.engines import vllm_process
from asyncrl_jax.weights.manifest import WeightsMismatch

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]  # a start alone may take a minute on a busy machine


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def host(tmp_path_factory, request):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(vllm_process, "WORKER_EXTENSION", "mutants.MutantWorker")
        host = EngineHost(make_engine(dtype=request.param), tmp_path_factory.mktemp("weights"))
    host.dtype = request.param
    yield host
    host.close()


@pytest.mark.parametrize(
    ("mutant", "reason"),
    [
        ("old version", "version"),
        ("old version, lying", "canary"),
        ("dropped leaf", "leaves"),
        ("dropped expert leaf", "leaves"),
        ("renamed leaf", "leaves"),
        ("permuted experts", "canary"),
        ("skipped repacking", "canary"),
        ("temperature ignored", "continuation"),
    ],
)
def test_wgt_05_wgt_07_what_is_wrong_is_refused_by_its_check_and_the_old_weights_go_on(host, mutant, reason):
    backend = host.engine._backend

    async def run():
        await host.load(0)
        before = await converse(host.engine, 3)
        staged, calls = host.engine._stage, []

        async def stage(directory, version):
            calls.append(version.number)
            if len(calls) == 2:  # the version before comes back: by then the worker is well again
                await backend.call("mutate", name="")
            await staged(directory, version)

        host.engine._stage = stage
        await backend.call("mutate", name=mutant)
        try:
            with pytest.raises(WeightsMismatch) as caught:
                await host.load(1)
        finally:
            host.engine._stage = staged
            await backend.call("mutate", name="")
        assert caught.value.reason == reason
        assert calls == [1, 0]
        assert host.engine.version == 0
        return before, await converse(host.engine, 3)

    before, after = host.run(run())
    assert before[0] == after[0]
    assert set(after[2].tolist()) == {-1, 0}
