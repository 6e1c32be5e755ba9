"""A real vLLM on the CPU, of the tiny model that the tests of engines share."""

import math

from engine_setup import MAX_TOKENS, MODEL

from asyncrl_jax.actor.engines.vllm_engine import VllmEngine
from asyncrl_jax.actor.engines.vllm_process import VllmProcess
from asyncrl_jax.actor.engines.vllm_proof import Tolerance
from asyncrl_jax.config import VllmConfig

NUM_SLOTS = 4


# As the registry gives them.
TOLERANCES = {"float32": Tolerance(1e-3, 1e-3), "bfloat16": Tolerance(VllmConfig().canary_tolerance_bf16, math.inf)}


def make_engine(model=MODEL, dtype="float32", swap_at="token", **config):
    backend = VllmProcess(
        model, VllmConfig(routed_experts=True, dtype=dtype, **config), num_slots=NUM_SLOTS, max_tokens=MAX_TOKENS
    )
    return VllmEngine(
        backend,
        num_slots=NUM_SLOTS,
        max_tokens=MAX_TOKENS,
        tolerance=TOLERANCES[dtype],
        swap_at=swap_at,
        routed_experts=True,
    )
