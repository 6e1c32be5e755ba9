"""vLLM beside the actor: `AsyncLLM` in this process, its engine core in a child of it."""

from __future__ import annotations

import asyncio
import gc
import json
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_jax.actor.engines.vllm_backend import TOP, BackendCounters, Sampled, SamplingRequest
from asyncrl_jax.config import ModelConfig, VllmConfig
from asyncrl_jax.config_hf import hf_config

WORKER_EXTENSION = "asyncrl_jax.actor.engines.vllm_worker.WorkerExtension"

# Read when vLLM is imported, here and in its child. What the user has set wins.
ENVIRONMENT = {
    "HF_HUB_OFFLINE": "1",  # there is nothing to fetch: the config is written here and weights come from versions
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",  # the actor has threads, which fork does not copy
}
CPU_ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # or the CPU platform puts the worker in yet another process
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # OMP_NUM_THREADS decides, not the number of cores
    "TORCHDYNAMO_DISABLE": "1",
    "OMP_NUM_THREADS": "1",
}


def model_fields(model: ModelConfig, max_tokens: int) -> dict[str, Any]:
    """The model's config.json, as vLLM is to read it."""
    # One position more than a sequence has: scoring a whole one samples a token that nobody reads.
    fields = hf_config(model) | {"max_position_embeddings": max_tokens + 1}
    if "sliding_window_size" in fields:  # the hub does not count the current token, vLLM does
        fields["sliding_window_size"] = model.attention.window
    return fields


class VllmProcess:
    """See `Backend`. Nothing of vLLM is imported before `start`."""

    def __init__(self, model: ModelConfig, config: VllmConfig, *, num_slots: int, max_tokens: int) -> None:
        """Args: max_tokens: of the longest sequence."""
        self.counters = BackendCounters()
        self._model = model
        self._config = config
        self._num_slots = num_slots
        self._max_tokens = max_tokens
        self._llm: Any = None
        self._captures_here = False

    async def start(self) -> None:
        try:
            async with asyncio.timeout(self._config.start_timeout_s):
                self._llm = await asyncio.to_thread(self._start)
                await self.call("asyncrl_attach", routed_experts=self._captures_here)
        except TimeoutError as error:
            limit_s = self._config.start_timeout_s
            raise TimeoutError(f"vLLM did not start within vllm.start_timeout_s={limit_s:g}") from error

    def _start(self) -> Any:
        for name, value in ENVIRONMENT.items():
            os.environ.setdefault(name, value)
        from vllm.platforms import current_platform

        on_cpu = current_platform.is_cpu()
        if on_cpu:
            for name, value in CPU_ENVIRONMENT.items():
                os.environ.setdefault(name, value)
            os.environ["VLLM_CPU_KVCACHE_SPACE"] = str(self._config.kv_cache_gib)
        self._captures_here = on_cpu and self._config.routed_experts
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        with tempfile.TemporaryDirectory(prefix="asyncrl-model-") as directory:
            (Path(directory) / "config.json").write_text(json.dumps(model_fields(self._model, self._max_tokens)))
            args = AsyncEngineArgs(
                model=directory,
                load_format="dummy",  # no weights but published ones ever sample
                skip_tokenizer_init=True,
                generation_config="vllm",
                dtype=self._config.dtype,
                max_model_len=self._max_tokens + 1,
                max_num_seqs=self._num_slots,
                max_num_batched_tokens=max(self._config.max_batched_tokens, self._num_slots, self._max_tokens + 1),
                block_size=self._config.block_size,
                enable_prefix_caching=self._config.prefix_reuse,
                logprobs_mode="processed_logprobs",  # of the distribution sampled from, temperature included
                max_logprobs=TOP,
                worker_extension_cls=WORKER_EXTENSION,
                disable_log_stats=True,
                seed=0,
                **self._device_arguments(on_cpu),
            )
            return AsyncLLM.from_engine_args(args, stat_loggers=[self._stat_logger])

    def _device_arguments(self, on_cpu: bool) -> dict[str, Any]:
        if on_cpu:
            return {
                "enforce_eager": True,
                "distributed_executor_backend": "uni",
                "gpu_memory_utilization": 0.2,
                # A split prompt of a request with a seed kills the engine: it rewinds the generator, which CPUs cannot.
                "enable_chunked_prefill": False,
            }
        return {
            "gpu_memory_utilization": self._config.gpu_memory_share,
            "enable_return_routed_experts": self._config.routed_experts,
        }

    def _stat_logger(self, _vllm_config: Any, _engine_index: int = 0) -> Any:
        """vLLM's own interface for those who count; its class is known only once vLLM is imported."""
        from vllm.v1.metrics.loggers import StatLoggerBase

        counters = self.counters

        class StepCounter(StatLoggerBase):
            def __init__(self) -> None:
                pass

            def record(self, scheduler_stats: Any, iteration_stats: Any, *_args: Any, **_kwargs: Any) -> None:
                counters.num_steps += 1
                if scheduler_stats is not None:
                    counters.num_running += scheduler_stats.num_running_reqs
                if iteration_stats is not None:
                    counters.num_sampled += iteration_stats.num_generation_tokens

            def log_engine_initialized(self) -> None:
                pass

        return StepCounter()

    async def sample(self, request: SamplingRequest) -> Sampled:
        output = await self._generate(
            request.request_id,
            request.prompt,
            request.cache_salt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_tokens),
            ignore_eos=True,
            logprobs=request.num_top,
        )
        completion = output.outputs[0]
        tokens = np.array(completion.token_ids, np.int32)
        top = tuple({token: entry.logprob for token, entry in position.items()} for position in completion.logprobs)
        routed = completion.routed_experts
        spans = completion.weight_versions or []
        return Sampled(
            tokens=tokens,
            logprobs=np.array([top[i][int(token)] for i, token in enumerate(tokens)], np.float32),
            finish=completion.finish_reason,
            version=spans[0].version if len(spans) == 1 else None,
            num_cached=output.num_cached_tokens or 0,
            top=top if request.num_top else (),
            routed_experts=None if routed is None else (0, routed.astype(np.int16)),
        )

    async def score(self, request_id: str, tokens: tuple[int, ...]) -> list[Mapping[int, float]]:
        output = await self._generate(
            request_id, tokens, None, max_tokens=1, temperature=1.0, ignore_eos=True, prompt_logprobs=TOP
        )
        return [{token: entry.logprob for token, entry in position.items()} for position in output.prompt_logprobs[1:]]

    async def _generate(self, request_id: str, prompt: tuple[int, ...], salt: str | None, **params: Any) -> Any:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        fields: dict[str, Any] = {"prompt_token_ids": list(prompt)}
        if salt is not None:
            fields["cache_salt"] = salt
        sampling = SamplingParams(detokenize=False, output_kind=RequestOutputKind.FINAL_ONLY, **params)
        outputs = [output async for output in self._llm.generate(fields, sampling, request_id)]
        return outputs[-1]

    async def pause(self) -> None:
        await self._llm.pause_generation(mode="abort", clear_cache=True)

    async def resume(self) -> None:
        await self._llm.resume_generation()

    async def reset_prefix_cache(self) -> bool:
        return bool(await self._llm.reset_prefix_cache())

    async def label(self, version: str) -> None:
        await self._llm.update_weight_version(version)

    async def call(self, method: str, **arguments: Any) -> list[Any]:
        return list(await self._llm.collective_rpc(method, kwargs=arguments))

    async def close(self) -> None:
        if self._llm is not None:
            llm, self._llm = self._llm, None
            await asyncio.to_thread(llm.shutdown)
            del llm
            gc.collect()  # its destructor shuts down again, which must not happen while the interpreter ends
