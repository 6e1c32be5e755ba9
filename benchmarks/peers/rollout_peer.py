"""One engine of `benchmarks.rollout`, in a process of its own: `rollout_peer publish|jax|vllm|tunix DIRECTORY REPEATS`.

The checkpoint: Qwen3-MoE, 4 layers, hidden 128, 8 experts × 256, top 2, vocabulary 512. 64 sequences, prompts of 16
tokens, 64 sampled tokens each at temperature 1. Every repeat has prompts of its own, so that no engine finds those of
the repeat before in a cache.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks._core import cpu_seconds

NUM_SEQUENCES, PROMPT_TOKENS, NUM_TOKENS, VOCAB_SIZE = 64, 16, 64, 512
GROUP_SIZE, SHARED_TOKENS, NUM_TURNS, TURN_TOKENS = 8, 64, 3, 8  # of the run with shared prefixes
ROPE_THETA = 1_000_000.0  # google-tunix knows no other, whatever its config says
MODEL = {
    "model.num_layers": 4,
    "model.hidden_dim": 128,
    "model.num_heads": 4,
    "model.num_kv_heads": 2,
    "model.head_dim": 32,
    "model.num_experts": 8,
    "model.experts_per_token": 2,
    "model.expert_dim": 256,
    "model.vocab_size": VOCAB_SIZE,
    "model.rope_theta": ROPE_THETA,
    "model.max_positions": 128,
    "environment.max_tokens": 128,
    "learner.pack_tokens": 128,
    "actor.slots": NUM_SEQUENCES,
}


_PROMPTS = np.random.default_rng(0)


def prompts(length: int, count: int) -> list[list[int]]:
    """New ones at every call."""
    return _PROMPTS.integers(1, VOCAB_SIZE - 1, (count, length)).tolist()


def publish(directory: Path) -> None:
    """Two versions for our engines, and v0 as transformers would save it."""
    import jax

    from asyncrl_jax.config import Config, override
    from asyncrl_jax.models import graph_of, init_params, merge, to_hf, to_tensors
    from asyncrl_jax.weights.manifest import Canary
    from asyncrl_jax.weights.publish import publish as publish_version

    model = override(Config(), MODEL).model
    tokens_CT = np.random.default_rng(1).integers(0, VOCAB_SIZE, (4, 24)).astype(np.int32)
    versions = []
    for number in range(2):
        params = init_params(model, number)
        decoder = merge(graph_of(model), params)
        logprobs_CTV = jax.nn.log_softmax(decoder(tokens_CT))
        logprobs_CT = np.take_along_axis(np.asarray(logprobs_CTV)[:, :-1], tokens_CT[:, 1:, None], axis=2)[..., 0]
        version = publish_version(
            directory / "weights",
            to_tensors(model, params),
            number=number,
            parent=None,
            line=0,
            update=number,
            canary=Canary(tokens_CT, logprobs_CT.astype(np.float32)),
        )
        versions.append(version.manifest_digest)
        if number == 0:
            to_hf(decoder, directory / "model")
    (directory / "versions.json").write_text(json.dumps(versions))


async def best_of(repeats: int, run: Callable[[], Awaitable[int]]) -> float:
    """Tokens a CPU second of the best run, after one that warms up; see `cpu_seconds`."""
    await run()
    rates = []
    for _ in range(repeats):
        started_at = cpu_seconds()
        tokens = await run()
        rates.append(tokens / (cpu_seconds() - started_at))
    return max(rates)


async def ours(kind: str, directory: Path, repeats: int, *, reuse: bool = True) -> dict[str, Any]:
    """Figures of one of our engines."""
    from asyncrl_jax.actor.engines.registry import make_engine
    from asyncrl_jax.config import Config, override
    from asyncrl_jax.types import WeightVersion

    config = override(Config(), MODEL | {"actor.engine": kind, "vllm.prefix_reuse": reuse, "actor.prefix_reuse": reuse})
    engine = make_engine(config)
    running = asyncio.create_task(engine.run())
    digests = json.loads((directory / "versions.json").read_text())
    versions = [WeightVersion(number, None, 0, number, digest) for number, digest in enumerate(digests)]
    weights, never = str(directory / "weights"), frozenset[int]()

    async def one(seed: int, turns: list[list[int]], length: int, whole: bool = False) -> int:
        """Samples in one session, or in a fresh one for each turn that is given the whole history."""
        session, history, count = await engine.open(seed, 1.0), [], 0
        try:
            for turn in turns:
                history += turn
                if whole and count:
                    session.close()
                    session = await engine.open(seed, 1.0)
                completion = await session.generate(history if whole else turn, never, length)
                history += completion.tokens.tolist()
                count += len(completion.tokens)
        finally:
            session.close()
        return count

    async def single() -> int:
        asked = prompts(PROMPT_TOKENS, NUM_SEQUENCES)
        return sum(await asyncio.gather(*(one(i, [asked[i]], NUM_TOKENS) for i in range(NUM_SEQUENCES))))

    async def multi() -> int:
        shared = prompts(SHARED_TOKENS, NUM_SEQUENCES // GROUP_SIZE)
        more = [[7, 8, 9]] * (NUM_TURNS - 1)
        members = (one(i, [shared[i // GROUP_SIZE], *more], TURN_TOKENS, not reuse) for i in range(NUM_SEQUENCES))
        return sum(await asyncio.gather(*members))

    async def uneven(together: bool) -> int:
        """Three times as many sequences as slots, of uneven lengths: all at once, or batch after batch."""
        rng = np.random.default_rng(1)
        lengths = np.clip(rng.lognormal(np.log(20), 0.8, 3 * NUM_SEQUENCES), 2, 100).astype(int).tolist()
        asked = prompts(PROMPT_TOKENS, len(lengths))
        count, size = 0, len(lengths) if together else NUM_SEQUENCES
        for first in range(0, len(lengths), size):
            members = (one(i, [asked[i]], lengths[i]) for i in range(first, first + size))
            count += sum(await asyncio.gather(*members))
        return count

    try:
        await engine.load(weights, versions[0])
        result: dict[str, Any] = {"multi_turn_tokens_per_s": await best_of(repeats, multi)}
        if reuse:
            result["tokens_per_s"] = await best_of(repeats, single)
            result["continuous_tokens_per_s"] = await best_of(repeats, lambda: uneven(True))
            result["batched_tokens_per_s"] = await best_of(repeats, lambda: uneven(False))
            result["swap_ms"] = await swap(engine, weights, versions, repeats, single)
    finally:
        running.cancel()
        await asyncio.wait([running])
    return result


async def swap(engine: Any, weights: str, versions: Any, repeats: int, run: Callable[[], Awaitable[int]]) -> Any:
    """Milliseconds of swaps in flight, medians: pause, proof, and prefixes of running sequences computed anew."""
    found: dict[str, list[float]] = {"swap": [], "proof": [], "rebuild": []}

    async def twice() -> int:  # once would be over before some proofs are
        return await run() + await run()

    for repeat in range(max(repeats, 3)):
        sampling = asyncio.create_task(twice())
        sampled = engine.counters.num_sampled_tokens
        while engine.counters.num_sampled_tokens < sampled + NUM_SEQUENCES:  # into the sampling
            await asyncio.sleep(0.001)
        before = vars(engine.counters).copy()
        await engine.load(weights, versions[(repeat + 1) % 2])
        tokens = await sampling
        assert tokens == 2 * NUM_SEQUENCES * NUM_TOKENS, "a swap has cost tokens"
        after = vars(engine.counters)
        for name, values in found.items():
            values.append(1e3 * (after[f"{name}_s"] - before[f"{name}_s"]))
    return {name: float(np.median(values)) for name, values in found.items()} | {"worst_swap": max(found["swap"])}


def tunix(directory: Path, repeats: int) -> dict[str, Any]:
    """google-tunix's sampler, with a tokenizer that passes ids through."""
    import jax
    import jax.numpy as jnp
    from tunix.generate.sampler import CacheConfig, Sampler
    from tunix.models.qwen3 import model as qwen3
    from tunix.models.qwen3.params import create_model_from_safe_tensors

    class Ids:
        def encode(self, text: str, **_: Any) -> list[int]:
            return [int(word) for word in text.split()]

        def decode(self, ids: Any, **_: Any) -> str:
            return " ".join(map(str, ids))

        def bos_id(self) -> int:
            return VOCAB_SIZE - 1

        def eos_id(self) -> int:
            return VOCAB_SIZE - 1

        def pad_id(self) -> int:
            return 0

    shape = qwen3.ModelConfig(
        num_layers=4,
        vocab_size=VOCAB_SIZE,
        embed_dim=128,
        hidden_dim=256,
        num_heads=4,
        head_dim=32,
        num_kv_heads=2,
        rope_theta=ROPE_THETA,
        norm_eps=1e-6,
        num_experts=8,
        num_experts_per_tok=2,
    )
    model = create_model_from_safe_tensors(str(directory / "model"), shape, dtype=jnp.float32)
    sampler = Sampler(model, Ids(), CacheConfig(cache_size=128, num_layers=4, num_kv_heads=2, head_dim=32))

    async def run() -> int:
        asked = [" ".join(map(str, prompt)) for prompt in prompts(PROMPT_TOKENS - 1, NUM_SEQUENCES)]  # it adds one
        output = sampler(
            asked,
            max_generation_steps=NUM_TOKENS,
            max_prompt_length=PROMPT_TOKENS,
            temperature=1.0,
            top_p=1.0,
            seed=0,
            eos_tokens=[VOCAB_SIZE],  # none: all of them sample to the end
            return_logprobs=True,
        )
        jax.block_until_ready(output.logprobs)
        return sum(len(tokens) for tokens in output.tokens)

    return {"tokens_per_s": asyncio.run(best_of(repeats, run))}


def main() -> None:
    kind, directory, repeats = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if kind == "publish":
        publish(directory)
        return
    if kind == "tunix":
        result = tunix(directory, repeats)
    else:
        result = asyncio.run(ours(kind, directory, repeats))
        without = asyncio.run(ours(kind, directory, repeats, reuse=False))
        result["multi_turn_tokens_per_s_without_reuse"] = without["multi_turn_tokens_per_s"]
    print(json.dumps(result))


if __name__ == "__main__":
    main()
