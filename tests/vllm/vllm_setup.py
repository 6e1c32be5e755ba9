"""A real vLLM on the CPU, of the tiny model that the tests of engines share."""

from engine_setup import MAX_TOKENS, MODEL

from asyncrl_jax.actor.engines.vllm_engine import VllmEngine
from asyncrl_jax.actor.engines.vllm_process import VllmProcess
from asyncrl_jax.config import VllmConfig

NUM_SLOTS = 4


def make_engine(model=MODEL, tolerance=1e-3, swap_at="token", **config):
    backend = VllmProcess(model, VllmConfig(routed_experts=True, **config), num_slots=NUM_SLOTS, max_tokens=MAX_TOKENS)
    return VllmEngine(
        backend,
        num_slots=NUM_SLOTS,
        max_tokens=MAX_TOKENS,
        canary_tolerance=tolerance,
        swap_at=swap_at,
        routed_experts=True,
    )
