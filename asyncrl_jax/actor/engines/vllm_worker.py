"""What runs inside vLLM's worker: weights come in here, and routed experts go out.

vLLM mixes `WorkerExtension` into its worker class (`worker_extension_cls`); methods are called by name, between two
steps. No JAX, and nothing of vLLM is imported before a method runs.

Dimensions: S tokens of a sequence, N tokens of a step, L layers, K experts of a token.
"""

from __future__ import annotations

import collections
import os
import sys
import threading
import time
from collections.abc import Iterator
from typing import Any

import numpy as np

from asyncrl_jax.types import WeightVersion
from asyncrl_jax.weights.manifest import Manifest, VersionGone, WeightsMismatch
from asyncrl_jax.weights.read import WeightsReader

ROUTED_PREFIX = "routed/"  # of the ids of requests that ask for their experts
_MAX_ROUTINGS = 4096  # finished requests whose experts are kept until somebody takes them
_PARENT_POLL_S = 1.0

_DIRECT = ("attention_sink_bias", "e_score_correction_bias")  # see `set_directly`
_READS_STACKED_EXPERTS = ("qwen3_moe",)  # vLLM skips stacked ones of others without a word
_EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2")}  # gate, up and down; others have those very names

# What loading by name raises when a tensor is unknown, missing or misshapen; vLLM has no error of its own for it.
_LOAD_ERRORS = (KeyError, ValueError, AssertionError, RuntimeError, AttributeError, IndexError)


class WorkerExtension:
    """Methods added to vLLM's worker. Each worker of a tensor-parallel engine stages and swaps for itself.

    Invariant: staged weights are verified against their manifest before they touch the model.
    """

    def asyncrl_attach(self, routed_experts: bool) -> dict[str, Any]:
        """Prepares the worker, once; says what it is.

        Args:
          routed_experts: whether experts are captured here. Only for devices where vLLM does not do it itself.
        """
        _end_with_parent()
        if routed_experts:
            self._asyncrl_routing = RoutingCapture(self.model_runner)  # type: ignore[attr-defined]
        return {"pid": os.getpid(), "jax": "jax" in sys.modules}

    def asyncrl_stage(self, directory: str, version: dict[str, Any]) -> None:
        """Starts to read and verify a version on a thread, while sampling goes on."""
        reader = getattr(self, "_asyncrl_reader", None)
        if reader is None or reader.directory != directory:
            reader = WeightsReader(directory)
        self._asyncrl_reader = reader
        self._asyncrl_stage = _Stage(reader, WeightVersion(**version))

    def asyncrl_staged(self) -> dict[str, Any] | None:
        """None while it is being read; then {} or the error, as `error_of` takes it."""
        return self._asyncrl_stage.result()

    def asyncrl_swap(self) -> dict[str, Any]:
        """Puts the staged weights into the model; nothing may be sampling. The cache is the caller's to reset.

        Returns:
          {number, manifest_digest, seconds}, or the error. After an error the model's weights mean nothing.
        """
        started_at, stage = time.monotonic(), self._asyncrl_stage
        manifest, tensors = stage.take()
        try:
            load_into(self, manifest, tensors)
        except WeightsMismatch as error:
            return _error(error)
        return {
            "number": manifest.number,
            "manifest_digest": stage.version.manifest_digest,
            "seconds": time.monotonic() - started_at,
        }

    def asyncrl_take_routing(self, request_id: str) -> list[Any] | None:
        """(first position, shape, int16 bytes) of the experts of a finished request, and forgets them."""
        return self._asyncrl_routing.take(request_id)


def error_of(result: dict[str, Any] | None) -> Exception | None:
    """The exception that a worker's method met, or None."""
    if not result or "error" not in result:
        return None
    kind, reason, detail = result["error"]
    return VersionGone(detail) if kind == "VersionGone" else WeightsMismatch(reason, detail)


def _error(error: Exception) -> dict[str, Any]:
    """A result that carries an exception across the RPC, which keeps no types."""
    if isinstance(error, WeightsMismatch):
        return {"error": ("WeightsMismatch", error.reason, str(error).removeprefix(f"{error.reason}: "))}
    return {"error": (type(error).__name__, "", str(error))}


class _Stage:
    """A version that is read into host memory on a thread."""

    def __init__(self, reader: WeightsReader, version: WeightVersion) -> None:
        self.version = version
        self._reader = reader
        self._read: tuple[Manifest, dict[str, np.ndarray]] | None = None
        self._result: dict[str, Any] | None = None
        threading.Thread(target=self._run, name=f"read v{version.number}", daemon=True).start()

    def _run(self) -> None:
        try:
            self._read = self._reader.read(self.version)
            self._result = {}
        except (VersionGone, WeightsMismatch) as error:
            self._result = _error(error)
        except Exception as error:  # noqa: BLE001  the thread has no other way to say what happened
            self._result = _error(WeightsMismatch("unreadable", repr(error)))

    def result(self) -> dict[str, Any] | None:
        return self._result

    def take(self) -> tuple[Manifest, dict[str, np.ndarray]]:
        """What was read; this object forgets it."""
        assert self._read is not None, "swap comes after a successful stage"
        taken, self._read = self._read, None
        return taken


def load_into(worker: Any, manifest: Manifest, tensors: dict[str, np.ndarray]) -> None:
    """Streams tensors by Hugging Face name, layer by layer, into a live model in the engine's own dtype and layout.

    Raises:
      WeightsMismatch: with reason "leaves", if a tensor is missing, superfluous, unknown or misshapen.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model, config = worker.get_model(), worker.model_runner.model_config
    text_config = config.hf_text_config
    tied = bool(getattr(text_config, "tie_word_embeddings", False))
    direct = {name: array for name, array in tensors.items() if name.endswith(_DIRECT)}
    streamed = {name: array for name, array in tensors.items() if name not in direct}
    with set_current_vllm_config(worker.vllm_config):
        if worker.device.type == "cpu":
            forget_packed_experts(model)
        owned = _owned(model)
        initialize_layerwise_reload(model)
        needs = _needs(model, owned, tied)
        try:
            model.load_weights(_stream(streamed, text_config.model_type))
            problem = _incomplete(model, needs, sum(array.size for array in streamed.values()))
        except _LOAD_ERRORS as error:
            problem = f"the engine cannot load them: {error!r}"
        finalize_layerwise_reload(model, config)
        if tied:
            repack_tied_head(model)
        problem = problem or set_directly(model, direct)
    if problem:
        raise WeightsMismatch("leaves", f"v{manifest.number}: {problem[:500]}")


def forget_packed_experts(model: Any) -> None:
    """Makes vLLM pack the experts of an unquantized MoE layer anew.

    It packs them for the CPU only when it has no kernel yet; later loads would copy unpacked weights into packed
    storage of the same shape, silently.
    """
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    for module in model.modules():
        method = getattr(module, "quant_method", None)
        if isinstance(method, UnquantizedFusedMoEMethod):
            method.moe_kernel = None


def repack_tied_head(model: Any) -> None:
    """Makes a head that shares the embedding forget its own packed copy of the old weights."""
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)


def set_directly(model: Any, tensors: dict[str, np.ndarray]) -> str:
    """Copies what a reload would lose into the model; says what does not fit.

    vLLM's MiMo-V2 copies attention sinks to the placeholder that stands for a layer during a reload; and the selection
    bias of a router is shared with its experts, whose own reload overwrites it with memory that nobody wrote.
    """
    from vllm.distributed import get_tensor_model_parallel_rank

    parameters = {name: value for name, value in model.named_parameters() if name.endswith(_DIRECT)}
    if parameters.keys() != tensors.keys():
        return f"sinks and biases {sorted(tensors)[:3]} for a model that has {sorted(parameters)[:3]}"
    for name, array in tensors.items():
        own, tensor = parameters[name], _torch(array)
        start = 0 if len(own) == len(tensor) else get_tensor_model_parallel_rank() * len(own)  # heads are sharded
        own.data.copy_(tensor[start : start + len(own)])
    return ""


def _stream(tensors: dict[str, np.ndarray], model_type: str) -> Iterator[tuple[str, Any]]:
    """Tensors in order of their names, which keeps those of a layer together; views of the same memory."""
    for name in sorted(tensors):
        tensor = _torch(tensors[name])
        block, _, leaf = name.rpartition(".")
        if model_type in _READS_STACKED_EXPERTS or leaf not in ("gate_up_proj", "down_proj"):
            yield name, tensor
            continue
        gate, up, down = _EXPERT_NAMES.get(model_type, ("gate_proj", "up_proj", "down_proj"))
        for expert in range(len(tensor)):
            if leaf == "down_proj":
                yield f"{block}.{expert}.{down}.weight", tensor[expert]
            else:
                halves = tensor[expert].chunk(2)
                yield f"{block}.{expert}.{gate}.weight", halves[0]
                yield f"{block}.{expert}.{up}.weight", halves[1]


def _torch(array: np.ndarray) -> Any:
    """The same memory as a torch tensor."""
    import torch

    array = np.ascontiguousarray(array)
    if array.dtype.name == "bfloat16":  # NumPy's is not torch's
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def _owned(model: Any) -> dict[str, list[str]]:
    """Parameters of each layer by its name; one that several layers share is the first one's. Only before a reload."""
    owned: dict[str, list[str]] = {}
    seen: set[int] = set()
    for name, module in model.named_modules():
        own = {key: value for key, value in module._parameters.items() if value is not None and key not in _DIRECT}
        owned[name] = [key for key, value in own.items() if id(value) not in seen]
        seen.update(map(id, own.values()))
    return owned


def _needs(model: Any, owned: dict[str, list[str]], tied: bool) -> dict[str, int]:
    """Elements that each layer is to be given, by name. Only between the start of a reload and its first tensor."""
    needs: dict[str, int] = {}
    for name, keys in owned.items():
        module = model.get_submodule(name)
        values = [module._parameters[key] for key in keys]
        needed = sum(getattr(value, "weight_loader_numel", value.numel()) for value in values) - _padding(module)
        if needed > 0 and not (tied and name == "lm_head"):
            needs[name] = needed
    return needs


def _incomplete(model: Any, needs: dict[str, int], num_streamed: int) -> str:
    """What vLLM does not say by itself: layers that got less than they need, or tensors that went nowhere."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    infos = {name: get_layerwise_info(model.get_submodule(name)) for name in needs}
    short = [  # the counts of complete layers are reset
        f"{name} got {infos[name].load_numel} of {needed} elements"
        for name, needed in needs.items()
        if infos[name].can_load() and infos[name].load_numel < needed
    ]
    if not short and num_streamed != sum(needs.values()):
        return f"{num_streamed} elements for a model of {sum(needs.values())}"
    return "; ".join(short[:5])


def _padding(module: Any) -> int:
    """Elements of a vocabulary's rows that no checkpoint holds."""
    padded, real = getattr(module, "num_embeddings_padded", 0), getattr(module, "org_vocab_size", 0)
    return max(0, padded - real) * getattr(module, "embedding_dim", 0)


class RoutingCapture:
    """Experts that served each position of running requests, taken from the routers of a CPU model.

    vLLM's own capture needs Triton. Invariant: the first choice at a position stays, since it made what was sampled;
    a request that is computed anew after preemption does not overwrite it.
    """

    def __init__(self, model_runner: Any) -> None:
        from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter
        from vllm.model_executor.models.utils import extract_layer_index

        self._runner = model_runner
        self._num_layers = model_runner.model_config.hf_text_config.num_hidden_layers
        self._step: dict[int, np.ndarray] = {}  # [N, K] by layer, of the step under way
        self._routings: collections.OrderedDict[str, dict[int, np.ndarray]] = collections.OrderedDict()
        for name, module in model_runner.get_model().named_modules():
            router = getattr(module, "router", None)
            if isinstance(router, BaseRouter):
                router.set_capture_fn(self._note(extract_layer_index(name)))
        self._execute, model_runner.execute_model = model_runner.execute_model, self.execute_model

    def _note(self, layer: int) -> Any:
        def note(topk_ids_NK: Any) -> None:
            self._step[layer] = topk_ids_NK.cpu().numpy().astype(np.int16)

        return note

    def execute_model(self, scheduler_output: Any, *args: Any, **kwargs: Any) -> Any:
        """The model runner's step, and the bookkeeping after it."""
        self._step.clear()
        result = self._execute(scheduler_output, *args, **kwargs)
        batch, row = self._runner.input_batch, 0
        for i, request_id in enumerate(batch.req_ids):
            count = scheduler_output.num_scheduled_tokens.get(request_id, 0)
            if count and request_id.startswith(ROUTED_PREFIX):
                self._keep(
                    request_id.rpartition("-")[0], int(batch.num_computed_tokens_cpu[i]), slice(row, row + count)
                )
            row += count
        while len(self._routings) > _MAX_ROUTINGS:
            self._routings.popitem(last=False)
        return result

    def _keep(self, request_id: str, start: int, rows: slice) -> None:
        num_experts = next(iter(self._step.values())).shape[1]
        step_SLK = np.full((rows.stop - rows.start, self._num_layers, num_experts), -1, np.int16)
        for layer, topk_ids_NK in self._step.items():
            step_SLK[:, layer] = topk_ids_NK[rows]
        routing = self._routings.setdefault(request_id, {})
        for offset, row_LK in enumerate(step_SLK):
            routing.setdefault(start + offset, row_LK)

    def take(self, request_id: str) -> list[Any] | None:
        """See `WorkerExtension.asyncrl_take_routing`."""
        routing = self._routings.pop(request_id, None)
        if not routing:
            return None
        first = min(routing)
        rows_SLK = np.stack([routing[position] for position in range(first, first + len(routing))])
        return [first, list(rows_SLK.shape), rows_SLK.tobytes()]


def _end_with_parent() -> None:
    """Ends this process when the actor that started it is gone, however it went."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(_PARENT_POLL_S)
        os._exit(1)

    threading.Thread(target=watch, name="parent watch", daemon=True).start()
