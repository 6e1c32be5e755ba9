"""Models: a Qwen3-MoE decoder, its sharding, and its names in Hugging Face checkpoints."""

from asyncrl_jax.models.hf_names import from_hf, to_hf
from asyncrl_jax.models.transformer import (
    Decoder,
    DecoderOutput,
    KVCache,
    Params,
    abstract_params,
    decode_step,
    graph_of,
    init_cache,
    init_params,
    merge,
    params_of,
    prefill,
)

__all__ = [
    "Decoder",
    "DecoderOutput",
    "KVCache",
    "Params",
    "abstract_params",
    "decode_step",
    "from_hf",
    "graph_of",
    "init_cache",
    "init_params",
    "merge",
    "params_of",
    "prefill",
    "to_hf",
]
