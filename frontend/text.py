"""Text and token ids: encoding, the chat template, detokenising while tokens arrive, stop strings.

Everything comes from the model card's bytes; nothing is downloaded. A token is a fixed string of bytes here, so a text
is the same whether its tokens come one by one or at once. The frontend and the batch script share this module; it
knows no HTTP and no sockets.
"""

from __future__ import annotations

import codecs
import json
import logging
import re
from collections.abc import Iterable, Sequence
from typing import Any

from tokenizers import Tokenizer

from frontend.chat_template import ChatTemplate, TemplateError

_log = logging.getLogger(__name__)

_SPACE_MARK = "\u2581"


class TextUnavailable(Exception):
    """Text cannot be turned into this model's tokens; `str()` says why."""


class TextModel:
    """Text <-> ids of one artifact. Without a tokenizer it serves ids only: their strings are `token_id:N`.

    `reason` says why there is no tokenizer, "" if there is one. `template` is None without a chat template.
    """

    def __init__(
        self,
        vocab: int,
        tokenizer: bytes | None,
        *,
        chat_template: str | None = None,
        bos: int | None = None,
        eos: Sequence[int] = (),
        reason: str = "the artifact has no tokenizer",
    ) -> None:
        self.vocab = vocab
        self.bos = bos
        self.eos = tuple(eos)
        self.reason = reason
        self.special_ids: frozenset[int] = frozenset()
        self._tokenizer: Tokenizer | None = None
        self._bytes: list[bytes | None] = []
        self._strips_first_space = False
        if tokenizer is not None:
            self._load(tokenizer)
        names = {"bos_token": bos, "eos_token": self.eos[0] if self.eos else None}
        special = {name: self.token_text(i) for name, i in names.items() if i is not None}
        self.template = ChatTemplate(chat_template, special) if chat_template else None

    @classmethod
    def from_card(cls, card: dict[str, Any]) -> TextModel:
        """The text model of a card. A tokenizer that cannot be used leaves ids only, with the reason."""
        tokens = card["tokens"]
        named: dict[str, Any] = {"bos": tokens.get("bos"), "eos": tokens["eos"]}
        named["chat_template"] = card.get("chat_template")
        try:
            return cls(card["vocab"], card.get("tokenizer"), **named)
        except TextUnavailable as ex:
            _log.error("no text for this model, token ids only: %s", ex)
            return cls(card["vocab"], None, reason=str(ex), **named)

    @property
    def has_tokenizer(self) -> bool:
        return self._tokenizer is not None

    def encode(
        self, text: str, add_special_tokens: bool = True, limit: int | None = None
    ) -> list[int]:
        """The ids of `text`, with what the tokenizer puts around a text (BOS) if asked.

        `limit` bounds the work: where a beginning of the text alone has more than twice as many ids, those are the answer.

        Raises:
            TextUnavailable: there is no tokenizer.
        """
        size = len(text) if limit is None else 16 * limit
        while size < len(text):
            ids = self._encode(text[:size], add_special_tokens)
            if limit is not None and len(ids) > 2 * limit:
                return ids
            size *= 4
        return self._encode(text, add_special_tokens)

    def render_chat(
        self,
        messages: Sequence[dict[str, Any]],
        tools: Sequence[Any] | None,
        options: dict[str, Any],
    ) -> str:
        """A conversation as one text, by the artifact's chat template; to be encoded without special tokens added.

        Raises:
            TextUnavailable: no template, or it refuses the messages.
        """
        if self.template is None:
            raise TextUnavailable("this model has no chat template; use completions")
        try:
            return self.template.render(messages, tools, options)
        except TemplateError as ex:
            raise TextUnavailable(f"the chat template refuses these messages: {ex}") from None

    def decode(self, ids: Iterable[int], skip_special_tokens: bool = True) -> str:
        """The text of a whole token list; equals what `StreamingDetokenizer` gives piece by piece."""
        detokenizer = StreamingDetokenizer(self, skip_special_tokens, is_start=True)
        return "".join([detokenizer.push(i) for i in ids]) + detokenizer.flush()

    def token_bytes(self, token: int) -> bytes:
        """The bytes that a token adds to a text: none for a padding id, `token_id:N ` where there is no tokenizer."""
        if self._tokenizer is None:
            return f"token_id:{token} ".encode()
        return (self._bytes[token] if 0 <= token < len(self._bytes) else None) or b""

    def token_text(self, token: int) -> str:
        """The token as one string of its own: its text, `bytes:\\x..` for a part of a character, `token_id:N` for no text."""
        raw = self.token_bytes(token) if self._tokenizer is not None else b""
        try:
            return raw.decode() or f"token_id:{token}"
        except UnicodeDecodeError:
            return "bytes:" + "".join([f"\\x{byte:02x}" for byte in raw])

    def special_id(self, text: str) -> int | None:
        """The id of the special token spelled `text`, if there is one."""
        found = self._tokenizer.token_to_id(text) if self._tokenizer is not None else None
        return found if found in self.special_ids else None

    def first_space_is_stripped(self) -> bool:
        return self._strips_first_space

    def _encode(self, text: str, add_special_tokens: bool) -> list[int]:
        if self._tokenizer is None:
            raise TextUnavailable(f"{self.reason}: send token ids")
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def _load(self, tokenizer: bytes) -> None:
        try:
            self._tokenizer = Tokenizer.from_buffer(tokenizer)
        except Exception as ex:  # the tokenizers library raises bare Exception
            raise TextUnavailable(f"the artifact's tokenizer cannot be read: {ex}") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(i for i, token in added.items() if token.special)
        decoder = self._tokenizer.decoder
        kinds = _decoder_kinds(json.loads(decoder.__getstate__())) if decoder is not None else set()
        if "ByteLevel" in kinds:
            to_bytes = _byte_level
        elif kinds & {"ByteFallback", "Metaspace", "Replace"}:
            to_bytes = _piece
            self._strips_first_space = bool(kinds & {"Strip", "Metaspace"})
        else:
            named = ", ".join(sorted(kinds)) or "none"
            raise TextUnavailable(f"the tokenizer's decoder is of a kind not known here ({named})")
        self._bytes = [None] * self.vocab
        for piece, i in self._tokenizer.get_vocab(with_added_tokens=True).items():
            if i < self.vocab:
                self._bytes[i] = piece.encode() if i in added else to_bytes(piece)


class StreamingDetokenizer:
    """Tokens in, text out, never half a character. The pieces and the flush joined are the whole text.

    `is_start`: the tokens begin a text, so that a tokenizer which marks words by a leading space drops the first one.
    """

    def __init__(
        self, text: TextModel, skip_special_tokens: bool = True, is_start: bool = False
    ) -> None:
        self._text = text
        self._skipped = text.special_ids if skip_special_tokens else frozenset()
        self._strips = is_start and text.first_space_is_stripped()
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token: int) -> str:
        """The text that is complete now."""
        if token in self._skipped:
            return ""
        raw = self._text.token_bytes(token)
        if self._strips and raw:
            self._strips = False
            raw = raw.removeprefix(b" ")
        return self._decoder.decode(raw)

    def flush(self) -> str:
        """What was held back: the replacement character if the last character never became complete."""
        return self._decoder.decode(b"", True)


class StopMatcher:
    """Finds the first stop string in a text that arrives in pieces, and lets nothing through that may belong to one.

    Of all matches the one that ends first wins, then the one that began first: a property of the text alone, however
    it was cut into pieces.
    """

    def __init__(self, stops: Sequence[str], include: bool = False) -> None:
        self.found: str | None = None
        self._stops = tuple(stops)
        self._include = include
        self._held = ""

    def push(self, piece: str, can_stop: bool = True) -> str:
        """The text that may go out. `can_stop=False`: no match may end within this piece (minimum length not reached)."""
        if not self._stops:
            return piece
        text, old = self._held + piece, len(self._held)
        match = self._first_match(text, old if can_stop else len(text))
        if match is not None:
            start, end, self.found = match
            self._held = ""
            return text[: end if self._include else start]
        keep = max(_overlap(text, stop) for stop in self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep]

    def flush(self) -> str:
        """What was held back and is no stop string after all."""
        held, self._held = self._held, ""
        return held

    def _first_match(self, text: str, after: int) -> tuple[int, int, str] | None:
        """The match (start, end, stop) with the least end beyond `after`, then the least start."""
        best: tuple[int, int, str] | None = None
        for stop in self._stops:
            start = text.find(stop, max(0, after + 1 - len(stop)))
            if start >= 0 and (best is None or (start + len(stop), start) < (best[1], best[0])):
                best = (start, start + len(stop), stop)
        return best


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    for length in range(min(len(text), len(stop) - 1), 0, -1):
        if text.endswith(stop[:length]):
            return length
    return 0


def _decoder_kinds(decoder: dict[str, Any]) -> set[str]:
    """The type names in a decoder's JSON, sequences opened."""
    kinds = {str(decoder.get("type"))}
    for part in decoder.get("decoders", ()):
        kinds |= _decoder_kinds(part)
    return kinds - {"Sequence", "Fuse"}


def _byte_alphabet() -> dict[str, int]:
    """The byte-level alphabet: printable Latin-1 stands for itself, the other bytes for U+0100 onwards, in order."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(b): b for b in plain} | {chr(0x100 + n): b for n, b in enumerate(others)}


_BYTE_OF = _byte_alphabet()
_BYTE_PIECE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


def _byte_level(piece: str) -> bytes:
    try:
        return bytes([_BYTE_OF[char] for char in piece])
    except KeyError:
        return piece.encode()


def _piece(piece: str) -> bytes:
    if match := _BYTE_PIECE.fullmatch(piece):
        return bytes([int(match[1], 16)])
    return piece.replace(_SPACE_MARK, " ").encode()
