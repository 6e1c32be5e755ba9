"""Weights under the names and in the layouts of Hugging Face's checkpoints, every family's.

A linear layer is [in, out] here and [out, in] there; heads are a dimension here and flattened there. Experts are
stacked here, and there in one of two forms:

    stacked    …experts.gate_up_proj [E, 2F, D] (gate first) and …experts.down_proj [E, D, F]: published weight versions
    separate   three matrices an expert: exported checkpoints, as on the hub

Both are read, and so are the names that transformers uses in memory where the hub's differ. Nothing is rounded: the
round trip is exact. A part of a weight is read from parts of tensors, so that a host reads its own shards only.

Dimensions: D hidden width, H heads, K head width, E experts, F expert width, V vocabulary.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from asyncrl_jax.config_model import ModelConfig
from asyncrl_jax.models.transformer import Params, abstract_params

Array = Any  # jax.Array or numpy.ndarray
Part = tuple[slice, ...]  # of an array, each slice with start and stop
ReadPart = Callable[[str, Part], np.ndarray]  # (tensor's name, part) -> its values


class _Layout(NamedTuple):
    """How an array is laid out there."""

    to_hf: Callable[[Array], Array]
    hf_part: Callable[[Part, tuple[int, ...]], Part]  # where a part of an array of this shape is there
    from_hf: Callable[[Array, tuple[int, ...]], Array]  # what was read there, as a part of this shape here


def _rows_of_heads(heads: slice, head_dim: int) -> slice:
    return slice(heads.start * head_dim, heads.stop * head_dim)


_SAME = _Layout(lambda x: x, lambda part, _: part, lambda x, _: x)
_MATRIX = _Layout(lambda x: x.T, lambda part, _: part[::-1], lambda x, _: x.T)
_STACK = _Layout(lambda x: x.swapaxes(1, 2), lambda p, _: (p[0], p[2], p[1]), lambda x, _: x.swapaxes(1, 2))
_TO_HEADS = _Layout(  # [D, H, K] here
    lambda x: x.reshape(x.shape[0], -1).T,
    lambda part, shape: (_rows_of_heads(part[1], shape[2]), part[0]),
    lambda x, shape: x.T.reshape(shape),
)
_FROM_HEADS = _Layout(  # [H, K, D] here
    lambda x: x.reshape(-1, x.shape[-1]).T,
    lambda part, shape: (part[2], _rows_of_heads(part[0], shape[1])),
    lambda x, shape: x.T.reshape(shape),
)
_OF_HEADS = _Layout(  # [H, K] here
    lambda x: x.reshape(-1),
    lambda part, shape: (_rows_of_heads(part[0], shape[1]),),
    lambda x, shape: x.reshape(shape),
)


class _Leaf(NamedTuple):
    hf_name: str
    layout: _Layout


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
    "attention.q_bias": _Leaf("self_attn.q_proj.bias", _OF_HEADS),
    "attention.k_bias": _Leaf("self_attn.k_proj.bias", _OF_HEADS),
    "attention.v_bias": _Leaf("self_attn.v_proj.bias", _OF_HEADS),
    "attention.o_bias": _Leaf("self_attn.o_proj.bias", _SAME),
    "attention.q_norm": _Leaf("self_attn.q_norm.weight", _SAME),
    "attention.k_norm": _Leaf("self_attn.k_norm.weight", _SAME),
    "attention.sinks": _Leaf("self_attn.attention_sink_bias", _SAME),
    "mlp_norm": _Leaf("post_attention_layernorm.weight", _SAME),
    "mlp.gate_proj": _Leaf("mlp.gate_proj.weight", _MATRIX),
    "mlp.up_proj": _Leaf("mlp.up_proj.weight", _MATRIX),
    "mlp.down_proj": _Leaf("mlp.down_proj.weight", _MATRIX),
    "mlp.gate_bias": _Leaf("mlp.gate_proj.bias", _SAME),
    "mlp.up_bias": _Leaf("mlp.up_proj.bias", _SAME),
    "mlp.down_bias": _Leaf("mlp.down_proj.bias", _SAME),
    "moe_norm": _Leaf("post_attention_layernorm.weight", _SAME),
    "moe.router": _Leaf("mlp.gate.weight", _MATRIX),
    "moe.router_bias": _Leaf("mlp.gate.e_score_correction_bias", _SAME),
}
_EXPERT_LEAVES = ("moe.gate_proj", "moe.up_proj", "moe.down_proj")
_SEPARATE = {"mixtral": ("w1", "w3", "w2")}  # of gate, up and down; elsewhere they are called so
_BLOCK = {"mixtral": "block_sparse_moe"}  # elsewhere "mlp"

# What transformers calls a tensor in memory, where it is not what the hub's files call it.
_IN_MEMORY = {
    "mixtral": (".mlp.", ".block_sparse_moe."),
    "mimo_v2_flash": ("self_attn.sinks", "self_attn.attention_sink_bias"),
}

# Not weights of the decoder: rotary tables of old files, and MiMo's heads that predict more than one token.
_IGNORED = re.compile(r"(^|\.)rotary_emb\.|^model\.mtp\.")


class Source(NamedTuple):
    """One tensor that a weight, or one expert of it, comes from."""

    hf_name: str
    layout: _Layout
    offset: int = 0  # rows of the tensor's last-but-one dimension before the weight's
    rows: int = 0  # rows of the whole tensor in that dimension, when it holds another weight too


def _split(name: str) -> tuple[str, str]:
    """("layers.3", "moe.router") of "layers.3.moe.router"; ("", name) outside of the layers."""
    if not name.startswith("layers."):
        return "", name
    _, index, rest = name.split(".", 2)
    return f"layers.{index}", rest


def sources(config: ModelConfig, name: str, shape: tuple[int, ...], *, stacked: bool) -> list[Source]:
    """Where weight `name` of this shape is: one tensor, or with separate experts one of each expert.

    Raises:
      ValueError: for a weight that is not the decoder's.
    """
    layer, rest = _split(name)
    block = f"model.{layer}.{_BLOCK.get(config.family, 'mlp')}"
    if layer and rest in _EXPERT_LEAVES:
        if stacked and rest == "moe.down_proj":
            return [Source(f"{block}.experts.down_proj", _STACK)]
        if stacked:
            width = shape[2]
            return [Source(f"{block}.experts.gate_up_proj", _STACK, width * (rest == "moe.up_proj"), 2 * width)]
        names = _SEPARATE.get(config.family, ("gate_proj", "up_proj", "down_proj"))
        part = names[_EXPERT_LEAVES.index(rest)]
        return [Source(f"{block}.experts.{expert}.{part}.weight", _MATRIX) for expert in range(shape[0])]
    leaf = (_LAYER if layer else _TOP).get(rest)
    if leaf is None:
        raise ValueError(f"leaf {name!r} has no Hugging Face name")
    if layer and rest.startswith("moe."):
        return [Source(f"{block}.{leaf.hf_name.removeprefix('mlp.')}", leaf.layout)]
    full_norm = rest in ("attention.q_norm", "attention.k_norm") and len(shape) == 2
    return [Source(f"model.{layer}.{leaf.hf_name}" if layer else leaf.hf_name, _OF_HEADS if full_norm else leaf.layout)]


def to_tensors(config: ModelConfig, params: Mapping[str, Array]) -> dict[str, Array]:
    """Weights by Hugging Face name, experts stacked, layer by layer (engines want a layer's tensors together).

    Works on NumPy and JAX arrays, also under `jit`.

    Raises:
      ValueError: for a weight that is not the decoder's.
    """
    halves: dict[str, list[Array]] = {}
    for name, value in params.items():
        (source,) = sources(config, name, value.shape, stacked=True)
        halves.setdefault(source.hf_name, []).insert(1 if source.offset else 0, source.layout.to_hf(value))
    joined: dict[str, Array] = {}
    for hf_name, parts in halves.items():
        library = np if isinstance(parts[0], np.ndarray) else jnp
        joined[hf_name] = parts[0] if len(parts) == 1 else library.concatenate(parts, axis=1)
    return joined


def separate_tensors(config: ModelConfig, name: str, value: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The tensors of one weight in the form of the hub, where each expert has its own."""
    found = sources(config, name, value.shape, stacked=False)
    values = value if _split(name)[1] in _EXPERT_LEAVES else [value]
    for source, part in zip(found, values, strict=True):
        yield source.hf_name, source.layout.to_hf(part)


def hub_names(config: ModelConfig, names: list[str]) -> dict[str, str]:
    """Names in a checkpoint by the hub's name of each, without what is not the decoder's."""
    in_memory, on_hub = _IN_MEMORY.get(config.family, ("", ""))
    return {name.replace(in_memory, on_hub) if in_memory else name: name for name in names if not _IGNORED.search(name)}


def is_stacked(hub_names: Mapping[str, Any]) -> bool:
    """Whether experts are stacked in a checkpoint with these names."""
    return any(name.endswith("experts.down_proj") for name in hub_names)


def expected_shapes(config: ModelConfig, *, stacked: bool) -> dict[str, tuple[int, ...]]:
    """Shape of every tensor of a checkpoint, by the hub's name."""
    shapes: dict[str, tuple[int, ...]] = {}
    for name, leaf in abstract_params(config).items():
        found = sources(config, name, leaf.shape, stacked=stacked)
        one = leaf.shape[1:] if len(found) > 1 or (not stacked and _split(name)[1] in _EXPERT_LEAVES) else leaf.shape
        for source in found:
            whole = tuple(slice(0, size) for size in one)
            shape = [part.stop for part in source.layout.hf_part(whole, one)]
            if source.rows:
                shape[-2] = source.rows
            shapes[source.hf_name] = tuple(shape)
    return shapes


def check_shapes(config: ModelConfig, shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuses tensors, by the hub's name, that are not those of this model.

    Raises:
      ValueError: for missing, unknown or misshapen tensors; it names them.
    """
    expected = expected_shapes(config, stacked=is_stacked(shapes))
    if missing := sorted(expected.keys() - shapes.keys()):
        raise ValueError(f"missing tensors: {', '.join(missing)}")
    if unknown := sorted(shapes.keys() - expected.keys()):
        raise ValueError(f"unknown tensors: {', '.join(unknown)}")
    for name, shape in expected.items():
        if tuple(shapes[name]) != shape:
            raise ValueError(f"tensor {name!r} has shape {tuple(shapes[name])}, expected {shape}")


def read_part(
    config: ModelConfig, name: str, shape: tuple[int, ...], part: Part, read: ReadPart, *, stacked: bool
) -> np.ndarray:
    """A part of weight `name` of this shape, from the parts of the tensors that hold it.

    Args:
      config: the model.
      name: of the weight.
      shape: of the whole weight.
      part: of the weight; its slices have start and stop, and cover heads whole.
      read: gives a part of a tensor, by the hub's name.
      stacked: the form of the experts.
    """
    found = sources(config, name, shape, stacked=stacked)
    if _split(name)[1] in _EXPERT_LEAVES and not stacked:
        of_expert = [_read(source, part[1:], shape[1:], read) for source in found[part[0]]]
        return np.stack(of_expert)
    return _read(found[0], part, shape, read)


def _read(source: Source, part: Part, shape: tuple[int, ...], read: ReadPart) -> np.ndarray:
    hf_part = list(source.layout.hf_part(part, shape))
    if source.offset:
        rows = hf_part[-2]
        hf_part[-2] = slice(rows.start + source.offset, rows.stop + source.offset)
    sizes = tuple(of_dim.stop - of_dim.start for of_dim in part)
    values: np.ndarray = source.layout.from_hf(read(source.hf_name, tuple(hf_part)), sizes)
    return values


def from_tensors(config: ModelConfig, tensors: Mapping[str, Array]) -> Params:
    """Weights by this package's names, from tensors by Hugging Face name in either form.

    Raises:
      ValueError: for a missing, unknown or misshapen tensor; it names it.
    """
    names = hub_names(config, list(tensors))
    check_shapes(config, {hub: tuple(tensors[name].shape) for hub, name in names.items()})
    stacked = is_stacked(names)
    params: Params = {}
    for name, leaf in abstract_params(config).items():
        whole = tuple(slice(0, size) for size in leaf.shape)
        value = read_part(config, name, leaf.shape, whole, lambda hub, part: tensors[names[hub]][part], stacked=stacked)
        params[name] = jnp.array(value, leaf.dtype)  # a copy: readers use the memory of `tensors` again
    return params
