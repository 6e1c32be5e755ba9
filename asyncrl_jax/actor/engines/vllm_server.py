"""vLLM as a server of its own, perhaps on another machine: the same worker extension, spoken to over HTTP.

The server is started by `asyncrl-vllm-server`, which gives it the flags of `serve_arguments`. It samples for one
engine: who swaps its weights must be one. Its endpoints for weights ask for no password, so it listens on loopback
unless told otherwise. Needs httpx here, and vLLM there.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from asyncrl_jax.actor.engines.vllm_backend import TOP, BackendCounters, Sampled, SamplingRequest
from asyncrl_jax.actor.engines.vllm_process import CPU_ENVIRONMENT, ENVIRONMENT, WORKER_EXTENSION, model_fields
from asyncrl_jax.config import ModelConfig, VllmConfig

SERVER_ENVIRONMENT = {**ENVIRONMENT, "VLLM_SERVER_DEV_MODE": "1"}
# What `vllm serve` runs. The program itself does not know builds for CPUs, whose distribution has another name.
SERVE_MODULE = "vllm.entrypoints.launchers.api_server.entry"
GENERATE = "/inference/v1/generate"  # token ids in, token ids out
CALL_LIMIT_S = 120.0  # for anything but sampling
_POLL_S = 0.5


class VllmServer:
    """See `Backend`. `num_steps` and `num_running` stay 0: the server does not say."""

    def __init__(self, url: str, *, start_timeout_s: float) -> None:
        """Args: url: of the server; start_timeout_s: longest wait for it to be there."""
        self.counters = BackendCounters()
        self._url = url.rstrip("/")
        self._start_timeout_s = start_timeout_s
        self._client: Any = None

    async def start(self) -> None:
        import httpx

        limits = httpx.Limits(max_connections=None)
        self._client = httpx.AsyncClient(base_url=self._url, timeout=CALL_LIMIT_S, limits=limits)
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            try:
                if (await self._client.get("/health")).is_success:
                    break
            except httpx.TransportError:
                pass  # not there yet
            if time.monotonic() > deadline:
                limit = f"vllm.start_timeout_s={self._start_timeout_s:g}"
                raise TimeoutError(f"no vLLM server at {self._url} within {limit}")
            await asyncio.sleep(_POLL_S)
        await self.call("asyncrl_attach", routed_experts=False)

    async def sample(self, request: SamplingRequest) -> Sampled:
        body = _body(
            request.request_id,
            request.prompt,
            max_tokens=request.max_tokens,
            temperature=request.temperature,
            seed=request.seed,
            stop_token_ids=list(request.stop_tokens),
            logprobs=request.num_top,
        )
        if request.cache_salt is not None:
            body["cache_salt"] = request.cache_salt
        places: list[dict[str, Any]] = []  # of the tokens: log-prob, and those of the most likely ones
        last: dict[str, Any] = {}
        usage: dict[str, Any] = {}
        async for chunk in self._stream(body):
            usage = chunk.get("usage") or usage
            for choice in chunk["choices"]:
                new = (choice.get("logprobs") or {}).get("content") or []
                places += new
                self.counters.num_sampled += len(new)
                last = choice
        spans = last.get("weight_versions") or []
        top = tuple({entry["token_id"]: entry["logprob"] for entry in place["top_logprobs"]} for place in places)
        return Sampled(
            tokens=np.array([place["token_id"] for place in places], np.int32),
            logprobs=np.array([place["logprob"] for place in places], np.float32),
            finish=last["finish_reason"],
            version=spans[0]["version"] if len(spans) == 1 else None,
            num_cached=(usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0,
            top=top if request.num_top else (),
        )

    async def score(self, request_id: str, tokens: tuple[int, ...]) -> list[Mapping[int, float]]:
        body = _body(request_id, tokens, max_tokens=1, temperature=1.0, prompt_logprobs=TOP)
        answer = await self._post(GENERATE, json=body, timeout=None)
        places = answer["prompt_logprobs"][1:]
        return [{int(token): entry["logprob"] for token, entry in place.items()} for place in places]

    async def _stream(self, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The parts of an answer. A request that nobody listens to any more is aborted by the server."""
        streamed = {"stream": True, "stream_options": {"include_usage": True}}
        async with self._client.stream("POST", GENERATE, json=body | streamed, timeout=None) as answer:
            if not answer.is_success:
                await answer.aread()
                raise self._failure(GENERATE, answer)
            async for line in answer.aiter_lines():
                if line.startswith("data: ") and line != "data: [DONE]":
                    chunk = json.loads(line.removeprefix("data: "))
                    if "error" in chunk:
                        raise RuntimeError(f"{self._url}{GENERATE}: {chunk['error']}")
                    yield chunk

    async def pause(self) -> None:
        await self._post("/pause", params={"mode": "abort", "clear_cache": "true"})

    async def resume(self) -> None:
        await self._post("/resume")

    async def reset_prefix_cache(self) -> bool:
        await self._post("/reset_prefix_cache")  # an error, if it could not be emptied
        return True

    async def label(self, version: str) -> None:
        await self._post("/update_weight_version", json={"new_version": version})

    async def call(self, method: str, **arguments: Any) -> list[Any]:
        answer = await self._post("/collective_rpc", json={"method": method, "kwargs": arguments})
        return list(answer["results"])

    async def close(self) -> None:
        """Leaves the server to whoever started it."""
        if self._client is not None:
            client, self._client = self._client, None
            await client.aclose()

    async def _post(self, path: str, *, timeout: float | None = CALL_LIMIT_S, **arguments: Any) -> Any:
        answer = await self._client.post(path, timeout=timeout, **arguments)
        if not answer.is_success:
            raise self._failure(path, answer)
        return answer.json() if answer.content else None

    def _failure(self, path: str, answer: Any) -> RuntimeError:
        return RuntimeError(f"{self._url}{path}: {answer.status_code} {answer.text[:500]}")


def _body(request_id: str, prompt: tuple[int, ...], **params: Any) -> dict[str, Any]:
    params = {"detokenize": False, "ignore_eos": True, **params}
    return {"request_id": request_id, "token_ids": list(prompt), "sampling_params": params}


def serve_arguments(
    model: ModelConfig, config: VllmConfig, directory: Path, *, num_slots: int, max_tokens: int, on_cpu: bool
) -> list[str]:
    """Arguments of Python for a server that a `VllmServer` may use; address and port are left out.

    Args:
      model: to serve.
      config: settings of vLLM; where the server runs, not where the actor does.
      directory: exists; the model's config.json is written there.
      num_slots: sequences at once.
      max_tokens: of the longest.
      on_cpu: whether it computes on a CPU.
    """
    (directory / "config.json").write_text(json.dumps(model_fields(model, max_tokens)))
    arguments = [
        "-m",
        SERVE_MODULE,
        f"--model={directory}",
        "--load-format=dummy",
        "--skip-tokenizer-init",
        "--generation-config=vllm",
        f"--dtype={config.dtype}",
        f"--max-model-len={max_tokens + 1}",
        f"--max-num-seqs={num_slots}",
        f"--max-num-batched-tokens={max(config.max_batched_tokens, num_slots, max_tokens + 1)}",
        f"--block-size={config.block_size}",
        "--enable-prefix-caching" if config.prefix_reuse else "--no-enable-prefix-caching",
        "--logprobs-mode=processed_logprobs",
        f"--max-logprobs={TOP}",
        f"--worker-extension-cls={WORKER_EXTENSION}",
        "--enable-prompt-tokens-details",
        "--enable-scale-out",  # token ids in and out
        "--seed=0",
    ]
    if not on_cpu:
        return [*arguments, f"--gpu-memory-utilization={config.gpu_memory_share}"]
    cpu = ["--enforce-eager", "--distributed-executor-backend=uni", "--gpu-memory-utilization=0.2"]
    return [*arguments, *cpu, "--no-enable-chunked-prefill"]


def server_environment(config: VllmConfig, *, on_cpu: bool) -> dict[str, str]:
    """Variables that `vllm serve` needs; those that the user has set should win."""
    if not on_cpu:
        return dict(SERVER_ENVIRONMENT)
    return {**SERVER_ENVIRONMENT, **CPU_ENVIRONMENT, "VLLM_CPU_KVCACHE_SPACE": str(config.kv_cache_gib)}
