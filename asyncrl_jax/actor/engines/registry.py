"""The engine that a config asks for."""

from __future__ import annotations

import importlib.util
import math

from asyncrl_jax.actor.engines.base import Engine
from asyncrl_jax.actor.engines.sharing import SlotSharing
from asyncrl_jax.config import Config


def check_installed(config: Config) -> None:
    """Raises: ValueError: if a package of the engine is not there; it names what installs it."""
    if config.actor.engine == "jax":
        return
    servers = config.vllm.servers
    if servers and importlib.util.find_spec("httpx") is None:
        raise ValueError(f"--config.vllm.servers={','.join(servers)}: needs pip install 'asyncrl-jax[vllm-server]'")
    if not servers and importlib.util.find_spec("vllm") is None:
        raise ValueError(
            "--config.actor.engine=vllm: needs vLLM; `make run-vllm` brings it for CPUs, "
            "pip install 'asyncrl-jax[vllm]' for GPUs"
        )


def make_engine(config: Config, *, num_sessions: int = 0, number: int = 0) -> Engine:
    """A fresh engine without weights. Imports JAX or vLLM, whichever it is; the other need not be installed.

    Args:
      config: of the run.
      num_sessions: that may be open at once; those beyond the slots wait between turns without one.
      number: of the engine in its host, which says whose server of `vllm.servers` it is; one beyond them has its own.

    Raises:
      ValueError: if the engine cannot serve the model.
    """
    slots, max_tokens, swap_at = config.actor.slots, config.environment.max_tokens, config.actor.swap_at
    if config.actor.engine == "jax":
        from asyncrl_jax.actor.engines.jax_engine import JaxEngine

        engine = JaxEngine(
            config.model,
            num_slots=slots,
            max_tokens=max_tokens,
            canary_tolerance=config.weights.canary_tolerance,
            swap_at=swap_at,
            block_steps=config.actor.block_steps,
            prefill_tokens=config.actor.prefill_tokens,
            share_prefixes=config.actor.prefix_reuse,
            batch_invariant=config.deterministic,
        )
        return SlotSharing(engine) if num_sessions > slots else engine
    from asyncrl_jax.actor.engines.vllm_backend import Backend
    from asyncrl_jax.actor.engines.vllm_engine import VllmEngine
    from asyncrl_jax.actor.engines.vllm_process import VllmProcess
    from asyncrl_jax.actor.engines.vllm_proof import Tolerance
    from asyncrl_jax.actor.engines.vllm_server import VllmServer

    worst = config.weights.canary_tolerance
    tolerance = Tolerance(worst, worst)
    if config.vllm.dtype == "bfloat16":
        tolerance = Tolerance(config.vllm.canary_tolerance_bf16, math.inf)
    backend: Backend
    if number < len(config.vllm.servers):
        backend = VllmServer(config.vllm.servers[number], start_timeout_s=config.vllm.start_timeout_s)
    else:
        backend = VllmProcess(config.model, config.vllm, num_slots=slots, max_tokens=max_tokens)
    return VllmEngine(
        backend,
        num_slots=slots,
        num_sessions=num_sessions,
        max_tokens=max_tokens,
        tolerance=tolerance,
        swap_at=swap_at,
        routed_experts=config.vllm.routed_experts,
    )
