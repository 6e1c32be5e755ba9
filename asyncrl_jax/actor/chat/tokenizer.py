"""Text to tokens and back."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Text to token ids and back. `decode(encode(text)) == text`; nothing relies on the reverse: it need not hold."""

    @property
    def vocab_size(self) -> int: ...

    @property
    def identity(self) -> str:
        """Changes whenever a text would give other tokens."""
        ...

    @property
    def marks(self) -> frozenset[int]:
        """Tokens that no text contains, as ends of turns."""
        ...

    def encode(self, text: str) -> tuple[int, ...]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


class ByteTokenizer:
    """UTF-8 bytes, and two marks that no text contains: for models too small for a vocabulary.

    A token that is no byte, or bytes that are no UTF-8, which a policy may sample, decode to U+FFFD.
    """

    TURN_START = 256
    TURN_END = 257
    vocab_size = 258
    identity = "bytes-1"
    marks = frozenset({TURN_START, TURN_END})

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(text.encode("utf-8", errors="replace"))

    def decode(self, tokens: Sequence[int]) -> str:
        return bytes(token if token < 256 else 0xFF for token in tokens).decode("utf-8", errors="replace")


class HuggingFaceTokenizer:
    """The tokenizer of a checkpoint directory. Needs transformers (the extra `hf`)."""

    def __init__(self, directory: str) -> None:
        """Args: directory: holds tokenizer.json and the chat template.

        Raises:
          ValueError: if there is no tokenizer.
        """
        from transformers import AutoTokenizer

        try:
            self.inner: Any = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        except (OSError, ValueError) as error:
            raise ValueError(f"--config.environment.tokenizer={directory}: no tokenizer there ({error})") from error
        self.vocab_size = len(self.inner)
        self.marks = frozenset(self.inner.all_special_ids)

    @functools.cached_property
    def identity(self) -> str:
        import xxhash

        backend = getattr(self.inner, "backend_tokenizer", None)
        text = backend.to_str() if backend is not None else repr(sorted(self.inner.get_vocab().items()))
        return xxhash.xxh3_128_hexdigest((text + str(self.inner.chat_template)).encode())

    def encode(self, text: str) -> tuple[int, ...]:
        return tuple(self.inner.encode(text, add_special_tokens=False))

    def decode(self, tokens: Sequence[int]) -> str:
        return str(self.inner.decode(list(tokens), skip_special_tokens=False, clean_up_tokenization_spaces=False))
