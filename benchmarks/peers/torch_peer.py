"""transformers and PyTorch: forward and backward pass of the same loss, eager, without an optimizer. It pads."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
import transformers

from benchmarks.peers import problem
from benchmarks.peers.problem import FirstUpdate


def loss_of(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """PPO's clipped objective, mean over tokens."""
    logits_BTV = model(input_ids=batch["tokens"], attention_mask=batch["attended"], use_cache=False).logits
    logprobs_BTV = torch.log_softmax(logits_BTV[:, :-1], dim=-1)
    target_BT = logprobs_BTV.gather(-1, batch["tokens"][:, 1:, None])[..., 0]
    ratio = torch.exp(target_BT - batch["behaviour"][:, 1:])
    advantages = batch["advantages"][:, None]
    bounded = torch.clamp(ratio, 1 - problem.CLIP_RANGE, 1 + problem.CLIP_RANGE)
    terms_BT = -torch.minimum(ratio * advantages, bounded * advantages) * batch["mask"][:, 1:]
    return terms_BT.sum() / batch["mask"].sum()


def main() -> None:
    torch.set_num_threads(1)
    directory = Path(sys.argv[1])
    model = transformers.AutoModelForCausalLM.from_pretrained(
        directory / "model", dtype=torch.float32, attn_implementation=sys.argv[2], experts_implementation=sys.argv[3]
    )
    model.train()
    batches = {}
    for name in problem.BATCHES:
        batch = problem.read_batch(directory, name)
        batches[name] = {
            "tokens": torch.from_numpy(batch.tokens_BT).long(),
            "attended": torch.from_numpy(batch.tokens_BT != 0).long(),
            "behaviour": torch.from_numpy(batch.behaviour_BT),
            "advantages": torch.from_numpy(batch.advantages_B).float(),
            "mask": torch.from_numpy(batch.mask_BT).float(),
        }

    def update(name: str) -> FirstUpdate:
        model.zero_grad(set_to_none=True)
        loss = loss_of(model, batches[name])
        loss.backward()
        return FirstUpdate(loss.item(), torch.nn.utils.get_total_norm(p.grad for p in model.parameters()).item())

    problem.serve({"torch": torch.__version__, "transformers": transformers.__version__}, update)


if __name__ == "__main__":
    main()
