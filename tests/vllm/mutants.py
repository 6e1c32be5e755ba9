"""Faults inside vLLM's worker, chosen by the test over RPC. Each is what some real engine has done silently."""

import contextlib

import numpy as np

from asyncrl_jax.actor.engines import vllm_worker


class MutantWorker(vllm_worker.WorkerExtension):
    def mutate(self, name):
        """Makes the next swaps, or the sampler, wrong in the named way; "" makes them right again."""
        self.mutant = name
        sampler = self.model_runner.sampler
        if not hasattr(self, "right_temperature"):
            self.right_temperature = sampler.apply_temperature
        ignored = name == "temperature ignored"
        sampler.apply_temperature = (lambda logits, *_args: logits) if ignored else self.right_temperature

    def asyncrl_swap(self):
        stage, name = self._asyncrl_stage, getattr(self, "mutant", "")
        if name in ("old version", "old version, lying"):  # what was staged never arrives
            number = stage.version.number if name.endswith("lying") else self.last["number"]
            return self.last | {"number": number, "manifest_digest": stage.version.manifest_digest}
        with _wrong(name):
            result = super().asyncrl_swap()
        if "error" not in result:
            self.last = result
        return result


@contextlib.contextmanager
def _wrong(name):
    replaced = {
        "skipped repacking": ("forget_packed_experts", lambda _model: None),
        "stale tied head": ("repack_tied_head", lambda _model: None),
        "stale sinks": ("set_directly", lambda _model, _tensors: ""),
        "dropped leaf": ("_stream", _without("model.layers.1.post_attention_layernorm.weight")),
        "dropped expert leaf": ("_stream", _without("model.layers.1.mlp.experts.down_proj")),
        "renamed leaf": ("_stream", _renamed),
        "permuted experts": ("_stream", _permuted),
    }
    if name not in replaced:
        yield
        return
    attribute, wrong = replaced[name]
    right = getattr(vllm_worker, attribute)
    setattr(vllm_worker, attribute, wrong)
    try:
        yield
    finally:
        setattr(vllm_worker, attribute, right)


_right_stream = vllm_worker._stream


def _without(dropped):
    return lambda tensors, kind: _right_stream({k: v for k, v in tensors.items() if k != dropped}, kind)


def _renamed(tensors, kind):
    right, wrong = "model.layers.1.mlp.gate.weight", "model.layers.1.mlp.gatt.weight"
    return _right_stream({(wrong if name == right else name): value for name, value in tensors.items()}, kind)


def _permuted(tensors, kind):
    changed = {name: np.roll(value, 1, axis=0) for name, value in tensors.items() if name.endswith("experts.down_proj")}
    return _right_stream(tensors | changed, kind)
