"""google-tunix's GRPO update: its Qwen3 model, its GRPO loss and its trainer's compiled step.

It pads: its packing needs an attention kernel of accelerators.
"""

from __future__ import annotations

import sys
from importlib.metadata import version
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
from tunix.models.qwen3 import model as qwen3
from tunix.models.qwen3.params import create_model_from_safe_tensors
from tunix.rl import algo_core, function_registry, trainer
from tunix.rl.grpo.grpo_learner import GRPOConfig, TrainExample
from tunix.sft.peft_trainer import TrainingConfig

from benchmarks.peers import problem
from benchmarks.peers.problem import FirstUpdate

assert algo_core  # its import registers the losses
PAD_ID, EOS_ID = 0, problem.VOCAB_SIZE - 1


def make_trainer(directory: Path) -> trainer.Trainer:
    config = qwen3.ModelConfig(
        num_layers=problem.NUM_LAYERS,
        vocab_size=problem.VOCAB_SIZE,
        embed_dim=problem.HIDDEN_DIM,
        hidden_dim=problem.EXPERT_DIM,
        num_heads=problem.NUM_HEADS,
        head_dim=problem.HEAD_DIM,
        num_kv_heads=problem.NUM_KV_HEADS,
        rope_theta=problem.ROPE_THETA,
        norm_eps=problem.NORM_EPS,
        num_experts=problem.NUM_EXPERTS,
        num_experts_per_tok=problem.CHOICES,
    )
    model = create_model_from_safe_tensors(str(directory / "model"), config, dtype=jnp.float32)
    optimizer = optax.chain(optax.clip_by_global_norm(problem.MAX_GRAD_NORM), optax.adamw(problem.LEARNING_RATE))
    made = trainer.Trainer(
        model, optimizer, TrainingConfig(eval_every_n_steps=1_000_000), custom_checkpoint_metadata_fn=dict
    )
    algorithm = GRPOConfig(beta=0.0, epsilon=problem.CLIP_RANGE, loss_agg_mode="token-mean")
    algorithm.temperature = 1.0
    policy_loss = function_registry.get_policy_loss_fn(algorithm.policy_loss_fn)
    made.with_loss_fn(
        lambda model, train_example: policy_loss(
            model, train_example, algo_config=algorithm, pad_id=PAD_ID, eos_id=EOS_ID
        ),
        has_aux=True,
    )
    made.with_gen_model_input_fn(lambda example: {"train_example": example})
    return made


def example(batch: problem.Batch) -> TrainExample:
    tokens = jnp.asarray(batch.tokens_BT)
    return TrainExample(
        prompt_ids=tokens[:, :1],
        prompt_mask=jnp.ones((len(tokens), 1), bool),
        completion_ids=tokens[:, 1:],
        completion_mask=jnp.asarray(batch.mask_BT[:, 1:].astype(np.float32)),
        advantages=jnp.asarray(batch.advantages_B, jnp.float32),
        ref_per_token_logps=None,
        old_per_token_logps=jnp.asarray(batch.behaviour_BT[:, 1:]),
    )


def main() -> None:
    directory = Path(sys.argv[1])
    steps, examples = {}, {}
    for name in problem.BATCHES:
        steps[name], _ = make_trainer(directory).jit_train_and_eval_step(cache_nnx_graph=True)
        examples[name] = example(problem.read_batch(directory, name))

    def update(name: str) -> FirstUpdate:
        loss, _, grad_norm = jax.block_until_ready(steps[name](examples[name]))
        return FirstUpdate(float(loss), float(grad_norm))

    problem.serve({"google-tunix": version("google-tunix"), "jax": jax.__version__}, update)


if __name__ == "__main__":
    main()
