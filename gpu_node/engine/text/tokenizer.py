"""The model's tokenizer: text and chats to tokens, and what each token's bytes are."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.contract.errors import ConfigError, RequestError, TooCostlyError
from penstock.contract.tools import ReasoningParserName, ToolParserName
from penstock.gpu_node.engine.text.chat_format import TELLING_MARKS, reasoning_parser_of, tool_parser_of, turns_of
from penstock.gpu_node.engine.text.chat_template import ChatTemplate
from penstock.gpu_node.engine.text.detokenizer import Detokenizer
from penstock.gpu_node.engine.text.encoder import ChatEncoder, token_ids_of
from penstock.gpu_node.engine.text.tokenizer_files import read_tokenizer_files

_METASPACE = "\u2581"


class Tokenizer:
    """Wraps a model folder's tokenizer. Its methods may be called from any thread."""

    def __init__(self, folder: Path, *, vocab_size: int = 0) -> None:
        """`vocab_size` is the model's, which may be padded past the tokenizer's: those ids stand for nothing.

        Raises ConfigError for a folder without a usable tokenizer or with one of an unknown kind.
        """
        # Late, because a folder whose files do not say all by themselves brings transformers in.
        from penstock.gpu_node.model.checkpoint.tokenizer_export import plain_tokenizer

        files = read_tokenizer_files(plain_tokenizer(folder))
        self._backend: Any = files.backend
        self._chats = ChatEncoder(files.backend)
        self._special_tokens = files.special_tokens
        self._template = (
            None if files.chat_template is None else ChatTemplate(files.chat_template, files.special_tokens)
        )
        self._decoder_steps = _decoder_steps(self._backend)
        self.token_bytes = self._token_table(vocab_size)
        """What each token stands for; empty for special tokens and for ids without a token."""

    def encode(self, text: str) -> list[int]:
        """Tokens of a text, with the special tokens that the model expects around it."""
        return token_ids_of(self._backend, text, framed=True)

    def encode_word(self, word: str) -> list[tuple[int, ...]]:
        """The ways in which a word's tokens may stand in a text: at its start or behind a space, and within it."""
        encoded = (token_ids_of(self._backend, text, framed=False) for text in (f" {word.lstrip()}", word))
        return list(dict.fromkeys(tuple(ids) for ids in encoded if ids))

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: str | None = None) -> list[int]:
        """Tokens of a chat up to where the assistant speaks. `developer` is read as `system`; `tools` are JSON text.

        Raises RequestError for a chat that the model has no form for or its template refuses.
        """
        if self._template is None:
            raise RequestError("this model has no chat template; send a prompt instead", param="messages")
        if tools is not None and not self.takes_tools:
            raise RequestError("this model's chat template takes no tools", param="tools")
        turns, offered = turns_of(messages), None if tools is None else json.loads(tools)
        try:
            text = self._template.render(turns, offered)
        except TooCostlyError:
            raise
        except Exception as error:
            # Templates are the model's own code: they refuse what they cannot render by raising what they like.
            raise RequestError(
                f"the model's chat template refuses these messages: {error}", param="messages"
            ) from error
        return self._chats.encode(text)

    @property
    def takes_tools(self) -> bool:
        """Whether the model can be told of tools."""
        return self._template is not None and self._template.takes_tools

    @property
    def tool_parser(self) -> ToolParserName:
        """The form in which the model writes tool calls, as its chat template shows it."""
        return "none" if self._template is None else tool_parser_of(self._template)

    @property
    def reasoning_parser(self) -> ReasoningParserName:
        """The form in which it writes reasoning."""
        return "none" if self._template is None else reasoning_parser_of(self._template)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of tokens, special tokens left out."""
        detokenizer = self.new_detokenizer()
        return detokenizer.push(token_ids) + detokenizer.flush()

    def name_of(self, token_id: int) -> bytes | str:
        """What a token adds to a text; the name, a str, of one that adds nothing."""
        token = self.token_bytes[token_id] if token_id < len(self.token_bytes) else b""
        return token or self._backend.id_to_token(token_id) or ""

    def id_of(self, token: str) -> int | None:
        """The token of exactly that name, if there is one."""
        token_id: int | None = self._backend.token_to_id(token)
        return token_id

    def to_json(self) -> str:
        """All of it, as tokenizer.json has it."""
        text: str = self._backend.to_str()
        return text

    def new_detokenizer(self) -> Detokenizer:
        """A detokenizer at the start of a text."""
        return Detokenizer(self.token_bytes, strip_first_space=self._strips_first_space)

    @property
    def max_token_bytes(self) -> int:
        """Most bytes of text that one token can stand for; 0 where nothing bounds it.

        A normalizer may shrink a text, and without byte level an unknown token may swallow any length of it.
        """
        if not self._is_byte_level or self._backend.normalizer is not None:
            return 0
        return max(map(len, self.token_bytes))

    @property
    def eos_token_ids(self) -> frozenset[int]:
        """The end-of-sequence id that the tokenizer itself names, if any."""
        eos = self._special_tokens.get("eos_token")
        token_id = None if eos is None else self._backend.token_to_id(eos)
        return frozenset() if token_id is None else frozenset((token_id,))

    def _token_table(self, vocab_size: int) -> list[bytes]:
        to_bytes = _byte_level if self._is_byte_level else _byte_fallback
        vocab: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
        table = [b""] * max(vocab_size, max(vocab.values(), default=-1) + 1)
        for token, token_id in vocab.items():
            table[token_id] = to_bytes(token)
        for token_id, added in self._backend.get_added_tokens_decoder().items():
            is_silent = added.special and added.content not in TELLING_MARKS
            table[token_id] = b"" if is_silent else added.content.encode()
        return table

    @property
    def _is_byte_level(self) -> bool:
        return any(step["type"] == "ByteLevel" for step in self._decoder_steps)

    @property
    def _strips_first_space(self) -> bool:
        return any(step["type"] == "Strip" and step["start"] > 0 for step in self._decoder_steps)


def _decoder_steps(backend: Any) -> list[dict[str, Any]]:
    """What turns tokens into text, step by step. Raises ConfigError for steps whose bytes are not known here."""
    spec: dict[str, Any] = (
        json.loads(backend.decoder.__getstate__()) if backend.decoder is not None else {"type": "none"}
    )
    steps: list[dict[str, Any]] = spec["decoders"] if spec["type"] == "Sequence" else [spec]
    kinds = {step["type"] for step in steps}
    if "ByteLevel" not in kinds and not kinds <= {"Replace", "ByteFallback", "Fuse", "Strip"}:
        raise ConfigError(f"tokenizer decoder {sorted(kinds)} is not supported: want ByteLevel or ByteFallback")
    return steps


def _byte_level(token: str) -> bytes:
    """Bytes of a token in GPT-2's alphabet; a token outside it stands for itself."""
    try:
        return bytes(_BYTE_OF[char] for char in token)
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> bytes:
    """Bytes of a SentencePiece token: `<0x0A>` is a byte, the metaspace is a space."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes((int(token[3:5], 16),))
    return token.replace(_METASPACE, " ").encode()


def _byte_alphabet() -> dict[str, int]:
    """GPT-2's byte alphabet: printable Latin-1 stands for itself, the rest is shifted past U+00FF in order."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    shifted = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + i): byte for i, byte in enumerate(shifted)}


_BYTE_OF = _byte_alphabet()
