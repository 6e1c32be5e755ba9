"""The process reward model that runs on the actor host, against its definition and against the published recipe."""

import asyncio
import logging
import threading

import jax
import numpy as np
import pytest

from asyncrl_jax.actor.loop_watch import LoopWatch
from asyncrl_jax.actor.process_rewards.base import checked
from asyncrl_jax.actor.process_rewards.jax_model import JaxProcessModel, shapes_of
from asyncrl_jax.actor.process_rewards.steps import Step
from asyncrl_jax.actor.rewards import InvalidReward
from asyncrl_jax.config_environment import ProcessRewardConfig
from asyncrl_jax.config_model import ModelConfig
from asyncrl_jax.models.hf import from_hf, save_params
from asyncrl_jax.models.transformer import init_params

MODEL = ModelConfig(
    family="qwen3",
    mlp_pattern="d",
    mlp_dim=32,
    vocab_size=258,
    num_layers=1,
    hidden_dim=24,
    num_heads=2,
    num_kv_heads=1,
    max_positions=128,
)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("model")
    save_params(MODEL, init_params(MODEL, 3), path)
    return str(path)


@pytest.fixture(scope="module")
def loaded(directory):
    """Weights and programs, for tests that are not about loading."""
    return JaxProcessModel(settings(directory))._load()


def made(directory, loaded, **changes):
    model = JaxProcessModel(settings(directory, **changes))
    model._run = loaded
    return model


def settings(directory, **changes):
    return ProcessRewardConfig(**{"model": directory, "tokenizer": "byte", "batch_tokens": 256} | changes)


def steps(*pairs):
    return [Step(before, text, 0) for before, text in pairs]


EPISODES = [
    steps(("1+1=", "2"), (" next ", "3")),
    steps(("what? ", "é means e\n"), ("", "so it is e")),
    steps(("x" * 80, "y" * 30)),  # a wider shape
    *[steps((f"{n}+{n}=", str(2 * n))) for n in range(7)],
]


def score_all(model, episodes):
    async def run():
        try:
            return await asyncio.gather(*[model.score(episode) for episode in episodes], return_exceptions=True)
        finally:
            await model.close()

    return asyncio.run(run())


def by_definition(directory, episode, tag):
    """softmax over the two logits at the last byte of each step and tag, without a batch; what follows is not seen."""
    decoder = from_hf(directory)
    logits, said, scores = jax.jit(lambda tokens_BT: decoder(tokens_BT)), b"", []
    for step in episode:
        said += (step.before + step.text + tag).encode()
        tokens_BT = np.full((1, 128), ord("?"), np.int32)
        tokens_BT[0, : len(said)] = np.frombuffer(said, np.uint8)
        at_end_V = np.asarray(logits(tokens_BT)[0, len(said) - 1], np.float64)
        good, bad = np.exp(at_end_V[ord("+")]), np.exp(at_end_V[ord("-")])
        scores.append(good / (good + bad))
    return scores


@pytest.mark.parametrize("tag", ["", " ки\n"])
def test_a_step_scores_the_good_token_against_the_bad_one_where_it_ends(directory, loaded, tag):
    found = score_all(made(directory, loaded, step_tag=tag), EPISODES)
    for episode, scores in list(zip(EPISODES, found, strict=True))[:4]:
        assert checked(scores, len(episode)) == pytest.approx(by_definition(directory, episode, tag), rel=1e-4)
    assert len({round(score, 4) for scores in found for score in scores}) > 10, "the model tells them apart"


def test_nothing_is_compiled_after_the_first_batch_and_batches_are_few(directory):
    model = JaxProcessModel(settings(directory))
    compiled, batches = [], []

    async def run():
        await model.score(EPISODES[0])
        run_batches = model._run
        model._run = lambda episodes: batches.append(len(episodes)) or run_batches(episodes)
        with jax.log_compiles(), CompileLog() as log:
            await asyncio.gather(*[model.score(episode) for episode in EPISODES * 5])
        compiled.extend(log.lines)
        await model.close()

    asyncio.run(run())
    assert compiled == []
    assert model.num_compiled == len(shapes_of(128, 256)) == 4
    assert sum(batches) == 50
    assert len(batches) <= 3, "what waits is scored together"


class CompileLog:
    """What JAX says that it compiled."""

    def __enter__(self):
        self.lines = []
        self.handler = logging.Handler()
        self.handler.emit = lambda record: self.lines.append(record.getMessage())
        self.logger = logging.getLogger("jax")
        self.logger.addHandler(self.handler)
        return self

    def __exit__(self, *_):
        self.logger.removeHandler(self.handler)
        self.lines = [line for line in self.lines if "ompil" in line]


def test_shapes_double_up_to_the_longest():
    assert shapes_of(200, 256) == [(1, 64), (1, 128), (1, 200), (2, 128), (4, 64)]
    assert shapes_of(40, 256) == [(1, 40), (6, 40)]
    assert shapes_of(200, 256, rows=1) == [(1, 64), (1, 128), (1, 200)]


def test_the_event_loop_turns_while_the_model_loads_and_scores(directory):
    """A watch on the loop sees no standstill, and all of it happens on one other thread."""
    model, threads = JaxProcessModel(settings(directory, max_tokens=64)), set()
    load = model._load
    model._load = lambda: threads.add(threading.current_thread().name) or load()

    async def run():
        turns, watching = 0, True

        async def turn():
            nonlocal turns
            while watching:
                turns += 1
                await asyncio.sleep(0.001)

        with LoopWatch() as watch:
            turning = asyncio.create_task(turn())
            running = asyncio.create_task(watch.run())
            await asyncio.gather(*[model.score(EPISODES[0]) for _ in range(50)])
            watching = False
            await turning
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)
        await model.close()
        return turns, watch.values()

    turns, values = asyncio.run(run())
    assert turns > 20
    assert values["loop_blocked"] == 0
    assert len(threads) == 1
    assert threads.pop().startswith("process reward model")


def test_an_episode_that_is_too_long_fails_alone_and_one_that_is_given_up_holds_up_nobody(directory, loaded):
    model = made(directory, loaded, max_tokens=64)

    async def run():
        given_up = asyncio.create_task(model.score(EPISODES[0]))
        long = asyncio.create_task(model.score(steps(("x" * 60, "y" * 5))))
        fitting = asyncio.create_task(model.score(steps(("x" * 60, "y" * 4))))
        await asyncio.sleep(0)
        given_up.cancel()
        results = await asyncio.gather(given_up, long, fitting, return_exceptions=True)
        again = await model.score(EPISODES[0])
        await model.close()
        return results, again

    (cancelled, long, fitting), again = asyncio.run(run())
    assert isinstance(cancelled, asyncio.CancelledError)
    assert isinstance(long, InvalidReward)
    assert long.reason == "too_long"
    assert len(fitting) == 1
    assert len(again) == 2


def test_an_episode_that_cannot_be_made_into_tokens_fails_alone(directory, loaded):
    model = made(directory, loaded)

    async def run():
        odd = [Step(None, "x", 1)]  # a tokenizer of others may refuse texts too
        results = await asyncio.gather(model.score(odd), model.score(EPISODES[0]), return_exceptions=True)
        await model.close()
        return results

    odd, fine = asyncio.run(run())
    assert isinstance(odd, TypeError)
    assert len(fine) == 2


def test_one_at_a_time_the_bits_do_not_depend_on_the_company(directory):
    model = JaxProcessModel(settings(directory), one_at_a_time=True)

    async def run():
        alone = [await model.score(episode) for episode in EPISODES]
        together = await asyncio.gather(*[model.score(episode) for episode in EPISODES])
        await model.close()
        return alone, together

    alone, together = asyncio.run(run())
    assert alone == together


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        ({"good": "++"}, r"process\.good=\+\+: 2 tokens"),
        ({"bad": ""}, r"process\.bad=: 0 tokens"),
        ({"tokenizer": ""}, r"process\.tokenizer"),
        ({"model": "/nowhere"}, "config.json"),
    ],
)
def test_a_model_that_can_not_score_is_refused_before_anything_starts(directory, changes, match):
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=match):
        JaxProcessModel(settings(directory, **changes))


def test_the_published_recipe_in_transformers_gives_the_same_scores(tmp_path):
    """Math-Shepherd's own: logits of the two candidates at each tag, softmax, the first of them; a real tokenizer."""
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    text = "Step 1: 1 + 1 = 2 ки\nStep 2: 2 - 1 = 1 ки\n The question: what is it? " * 5
    bpe = tokenizers.Tokenizer(tokenizers.models.BPE())
    bpe.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=320,
        special_tokens=["<s>", "</s>", "ки"],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([text], trainer)
    bpe.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")
    tokenizer.save_pretrained(tmp_path)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(tokenizer), hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2
    )
    reference = transformers.LlamaForCausalLM(config).eval()
    reference.save_pretrained(tmp_path)

    pairs = [("What is 1 + 1 - 1? ", "Step 1: 1 + 1 = 2 "), ("", "\nStep 2: 2 - 1 = 1 "), (" Sure? ", "ünlikely, 3 ")]
    said = "".join(before + answer + "ки" for before, answer in pairs)
    ids = torch.tensor([tokenizer.encode(said)])
    candidates = [tokenizer.convert_tokens_to_ids("+"), tokenizer.convert_tokens_to_ids("-")]
    with torch.no_grad():
        scores = reference(ids).logits[:, :, candidates].softmax(dim=-1)[:, :, 0]
    expected = scores[ids == tokenizer.convert_tokens_to_ids("ки")].tolist()
    assert len(expected) == 3
    assert ids[0, 0] == 0, "with the mark that its tokenizer begins with"

    model = JaxProcessModel(ProcessRewardConfig(model=str(tmp_path), step_tag="ки", max_tokens=128, batch_tokens=128))
    (found,) = score_all(model, [steps(*pairs)])
    assert found == pytest.approx(expected, rel=1e-5)
