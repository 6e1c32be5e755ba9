"""Weights under the names and in the layouts of Hugging Face's Qwen3-MoE (transformers 5, experts stacked).

A linear layer is [in, out] here and [out, in] there; heads are a dimension here and flattened there; the gate and up
projections of the experts are two leaves here and one, gate first, there. Nothing is rounded: the round trip is exact.

Dimensions: D hidden width, H heads, K head width, E experts, F expert width, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from asyncrl_jax.config import ModelConfig
from asyncrl_jax.models.transformer import Params, abstract_params

Array = Any  # jax.Array or numpy.ndarray


class _Layout(NamedTuple):
    """How an array is laid out there and, given its shape, here."""

    to_hf: Callable[[Array], Array]
    from_hf: Callable[[Array, tuple[int, ...]], Array]


class _Leaf(NamedTuple):
    hf_name: str
    layout: _Layout


_SAME = _Layout(lambda x: x, lambda x, _: x)
_MATRIX = _Layout(lambda x: x.T, lambda x, _: x.T)
_TO_HEADS = _Layout(lambda x: x.reshape(x.shape[0], -1).T, lambda x, shape: x.T.reshape(shape))  # here [D, H, K]
_FROM_HEADS = _Layout(lambda x: x.reshape(-1, x.shape[-1]).T, lambda x, shape: x.T.reshape(shape))  # here [H, K, D]
_EXPERTS = _Layout(lambda x: x.swapaxes(1, 2), lambda x, _: x.swapaxes(1, 2))

_GATE, _UP = "moe.gate_proj", "moe.up_proj"  # both are in experts.gate_up_proj

_TOP = {
    "embedding": _Leaf("model.embed_tokens.weight", _SAME),
    "norm": _Leaf("model.norm.weight", _SAME),
    "lm_head": _Leaf("lm_head.weight", _MATRIX),
}
_LAYER = {
    "attention_norm": _Leaf("input_layernorm.weight", _SAME),
    "attention.q_proj": _Leaf("self_attn.q_proj.weight", _TO_HEADS),
    "attention.k_proj": _Leaf("self_attn.k_proj.weight", _TO_HEADS),
    "attention.v_proj": _Leaf("self_attn.v_proj.weight", _TO_HEADS),
    "attention.o_proj": _Leaf("self_attn.o_proj.weight", _FROM_HEADS),
    "attention.q_norm": _Leaf("self_attn.q_norm.weight", _SAME),
    "attention.k_norm": _Leaf("self_attn.k_norm.weight", _SAME),
    "moe_norm": _Leaf("post_attention_layernorm.weight", _SAME),
    "moe.router": _Leaf("mlp.gate.weight", _MATRIX),
    "moe.down_proj": _Leaf("mlp.experts.down_proj", _EXPERTS),
}
_GATE_UP = "mlp.experts.gate_up_proj"


def _split(name: str) -> tuple[str, str]:
    """("layers.3", "moe.router") of "layers.3.moe.router"; ("", name) outside of the layers."""
    if not name.startswith("layers."):
        return "", name
    _, index, rest = name.split(".", 2)
    return f"layers.{index}", rest


def to_hf(params: Mapping[str, Array]) -> dict[str, Array]:
    """Weights by Hugging Face name, layer by layer (engines want a layer's tensors together).

    Works on NumPy and JAX arrays, also under `jit`.

    Raises:
      ValueError: for a leaf that is not the decoder's.
    """
    tensors: dict[str, Array] = {}
    for name, value in params.items():
        layer, rest = _split(name)
        if layer and rest == _GATE:
            parts = [value.swapaxes(1, 2), params[f"{layer}.{_UP}"].swapaxes(1, 2)]
            joined = (np if isinstance(value, np.ndarray) else jnp).concatenate(parts, axis=1)
            tensors[f"model.{layer}.{_GATE_UP}"] = joined
        elif not (layer and rest == _UP):
            leaf = (_LAYER if layer else _TOP).get(rest)
            if leaf is None:
                raise ValueError(f"leaf {name!r} has no Hugging Face name")
            tensors[f"model.{layer}.{leaf.hf_name}" if layer else leaf.hf_name] = leaf.layout.to_hf(value)
    return tensors


def _hf_shape(name: str, shape: tuple[int, ...]) -> tuple[str, tuple[int, ...]]:
    """Hugging Face name and shape of a leaf of this name and shape."""
    layer, rest = _split(name)
    if layer and rest in (_GATE, _UP):
        num_experts, hidden_dim, expert_dim = shape
        return f"model.{layer}.{_GATE_UP}", (num_experts, 2 * expert_dim, hidden_dim)
    leaf = (_LAYER if layer else _TOP)[rest]
    hf_shape = jax.eval_shape(leaf.layout.to_hf, jax.ShapeDtypeStruct(shape, jnp.float32)).shape
    return (f"model.{layer}.{leaf.hf_name}" if layer else leaf.hf_name), hf_shape


def from_hf(config: ModelConfig, tensors: Mapping[str, Array]) -> Params:
    """Weights by this package's names, from tensors by Hugging Face name.

    Raises:
      ValueError: for a missing, unknown or misshapen tensor; it names the leaf.
    """
    expected = abstract_params(config)
    wanted = {name: _hf_shape(name, leaf.shape) for name, leaf in expected.items()}
    hf_shapes = dict(wanted.values())
    if missing := sorted(hf_shapes.keys() - tensors.keys()):
        raise ValueError(f"missing tensors: {', '.join(missing)}")
    if unknown := sorted(tensors.keys() - hf_shapes.keys()):
        raise ValueError(f"unknown tensors: {', '.join(unknown)}")
    for hf_name, shape in hf_shapes.items():
        if tuple(tensors[hf_name].shape) != shape:
            raise ValueError(f"tensor {hf_name!r} has shape {tuple(tensors[hf_name].shape)}, expected {shape}")
    params: Params = {}
    for name, leaf in expected.items():
        layer, rest = _split(name)
        tensor = tensors[wanted[name][0]]
        if layer and rest in (_GATE, _UP):
            half = leaf.shape[-1]
            value = (tensor[:, :half] if rest == _GATE else tensor[:, half:]).swapaxes(1, 2)
        else:
            value = (_LAYER if layer else _TOP)[rest].layout.from_hf(tensor, leaf.shape)
        params[name] = jnp.asarray(value, leaf.dtype)
    return params
