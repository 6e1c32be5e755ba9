"""Both formats, the second with real tokenizers and chat templates that are made here."""

import itertools

import pytest

from asyncrl_jax.actor.chat.formats import ByteFormat, TemplateFormat, chat_format
from asyncrl_jax.actor.chat.messages import Message
from asyncrl_jax.actor.chat.tokenizer import ByteTokenizer, HuggingFaceTokenizer

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Leaves the thinking out of every turn but the last, as the templates of many models do.
FORGETFUL = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n"
    "{% if m.role == 'assistant' and not loop.last %}{{ m.content.split('</think>')[-1] }}"
    "{% else %}{{ m.content }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# Puts consecutive tool answers into one message, so that two of them are not two renderings of one.
GROUPING = (
    "{% for m in messages %}"
    "{% if m.role == 'tool' %}{% if loop.first or messages[loop.index0 - 1].role != 'tool' %}"
    "<|im_start|>user{% endif %}"
    "\n<r>{{ m.content }}</r>"
    "{% if loop.last or messages[loop.index0 + 1].role != 'tool' %}<|im_end|>\n{% endif %}"
    "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def _directory(path, template):
    """A byte-level BPE with merges for `he`, `llo` and `hello`, so that text has several tokenizations."""
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    words = [*alphabet, "he", "ll", "llo", "hello"]
    vocabulary = {word: i for i, word in enumerate(words)}
    merges = [("h", "e"), ("l", "l"), ("ll", "o"), ("he", "llo")]
    inner = tokenizers.Tokenizer(tokenizers.models.BPE(vocab=vocabulary, merges=merges))
    inner.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    inner.decoder = tokenizers.decoders.ByteLevel()
    fast = transformers.PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<|im_end|>")
    fast.add_special_tokens({"additional_special_tokens": ["<|im_start|>"]})
    fast.chat_template = template
    fast.save_pretrained(path)
    return str(path)


@pytest.fixture
def make_format(tmp_path):
    return lambda template=CHATML: chat_format(_directory(tmp_path / "model", template))


def test_bytes_come_back_and_what_is_no_byte_reads_as_a_replacement():
    tokenizer = ByteTokenizer()
    assert tokenizer.decode(tokenizer.encode("ünï 42")) == "ünï 42"
    assert tokenizer.decode([72, ByteTokenizer.TURN_END, 105]) == "H\ufffdi"


def test_byte_format_marks_every_turn():
    chat = ByteFormat()
    start, end = ByteTokenizer.TURN_START, ByteTokenizer.TURN_END
    prompt = chat.prompt([Message("user", "hi")])
    assert prompt == (start, *b"user\nhi", end, start, *b"assistant\n")
    assert chat.reply([Message("tool", "4")]) == (start, *b"tool\n4", end, start, *b"assistant\n")
    assert chat.stop_tokens == {end}


def test_template_format_gives_the_tokens_of_the_whole_conversation(make_format):
    chat = make_format()
    text = chat.tokenizer.encode
    question, answer, result = Message("user", "hello?"), "let me see", Message("tool", "hello")
    (stop,) = text("<|im_end|>")
    grown = chat.prompt([question]) + text(answer) + (stop,) + chat.reply([result])
    conversation = [m.as_dict() for m in (question, Message("assistant", answer), result)]
    whole = chat.tokenizer.inner.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert grown == text(whole)
    assert stop in chat.stop_tokens


def test_tok_01_sampled_ids_are_never_made_again_from_text(make_format):
    chat = make_format()
    vocabulary = chat.tokenizer.inner.get_vocab()
    sampled = (vocabulary["he"], vocabulary["llo"])
    assert chat.tokenizer.encode(chat.tokenizer.decode(sampled)) == (vocabulary["hello"],)  # text would lose them
    before = chat.prompt([Message("user", "?")])
    stop = next(iter(chat.tokenizer.encode("<|im_end|>")))
    history = (*before, *sampled, stop, *chat.reply([Message("tool", "1")]))
    assert history[len(before) : len(before) + 2] == sampled


def test_tok_02_a_template_that_rewrites_the_past_does_not_reach_it(make_format):
    chat = make_format(FORGETFUL)
    thinking = Message("assistant", "<think>a</think>b")
    conversation = [Message("user", "q").as_dict(), thinking.as_dict(), Message("tool", "r").as_dict()]
    rewritten = chat.tokenizer.inner.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert "<think>" not in rewritten  # the template by itself would change what was sampled
    text = chat.tokenizer.encode
    grown = [chat.prompt([Message("user", "q")])]
    for _ in range(3):
        turn = text("<think>a</think>b<|im_end|>")
        grown.append(grown[-1] + turn + chat.reply([Message("tool", "r")]))
    for number, (earlier, later) in enumerate(itertools.pairwise(grown)):
        assert later[: len(earlier)] == earlier, f"turn {number}"
    assert chat.tokenizer.decode(grown[-1]).count("<think>") == 3


def test_tok_09_tool_results_of_one_turn_are_rendered_together(make_format):
    chat = make_format(GROUPING)
    results = [Message("tool", "1"), Message("tool", "2")]
    together = chat.reply(results)
    conversation = [
        Message("user", "q").as_dict(),
        Message("assistant", "a").as_dict(),
        *[m.as_dict() for m in results],
    ]
    whole = chat.tokenizer.inner.apply_chat_template(conversation, add_generation_prompt=True, tokenize=False)
    assert together == chat.tokenizer.encode(whole.split("a<|im_end|>")[1])
    one_by_one = chat.reply(results[:1]) + chat.reply(results[1:])
    assert together != one_by_one


def test_a_directory_without_tokenizer_or_template_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"environment.tokenizer=.*no tokenizer there"):
        chat_format(str(tmp_path))
    directory = _directory(tmp_path / "plain", None)
    with pytest.raises(ValueError, match="no chat template"):
        TemplateFormat(HuggingFaceTokenizer(directory))
    directory = _directory(tmp_path / "endless", "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(ValueError, match="a turn has no end"):
        TemplateFormat(HuggingFaceTokenizer(directory))


def test_identity_follows_tokens_and_template(tmp_path):
    first, second = (HuggingFaceTokenizer(_directory(tmp_path / t[:9].strip("{% "), t)) for t in (CHATML, GROUPING))
    again = HuggingFaceTokenizer(_directory(tmp_path / "again", CHATML))
    assert first.identity == again.identity != second.identity


TOOL = {"type": "function", "function": {"name": "python", "description": "Runs a program.", "parameters": {}}}


@pytest.mark.parametrize("first", ["system", "user"])
def test_a_template_without_a_place_for_tools_has_them_in_the_system_message(make_format, first):
    chat = make_format()
    told = chat.tokenizer.decode(chat.prompt([Message(first, "hello"), Message("user", "2+2")], [TOOL]))
    assert told.count("<|im_start|>system") == 1
    assert '"name": "python"' in told
    assert "<tool_call>" in told
    assert "hello" in told


def test_a_template_with_a_place_for_tools_is_left_to_it(make_format):
    chat = make_format("{% if tools %}[{% for t in tools %}{{ t.function.name }}{% endfor %}]{% endif %}" + CHATML)
    told = chat.tokenizer.decode(chat.prompt([Message("user", "2+2")], [TOOL]))
    assert told.startswith("[python]<|im_start|>user")
