"""Models: one decoder for all families, its sharding, and its Hugging Face checkpoints."""

from asyncrl_jax.models.decoding import KVCache, LayerCache, decode_step, extend, init_cache
from asyncrl_jax.models.hf import from_hf, load_params, save_params, to_hf
from asyncrl_jax.models.hf_names import from_tensors, to_tensors
from asyncrl_jax.models.transformer import (
    Decoder,
    DecoderOutput,
    Params,
    Trunk,
    abstract_params,
    graph_of,
    init_params,
    merge,
    params_of,
)
from asyncrl_jax.models.upcycle import upcycle

__all__ = [
    "Decoder",
    "DecoderOutput",
    "KVCache",
    "LayerCache",
    "Params",
    "Trunk",
    "abstract_params",
    "decode_step",
    "extend",
    "from_hf",
    "from_tensors",
    "graph_of",
    "init_cache",
    "init_params",
    "load_params",
    "merge",
    "params_of",
    "save_params",
    "to_hf",
    "to_tensors",
    "upcycle",
]
