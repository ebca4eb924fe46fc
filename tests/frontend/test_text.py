"""Text and token ids: nothing half a character, nothing of a stop string, the same however the tokens were cut."""

from __future__ import annotations

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models

from frontend.chat_template import ChatTemplate, TemplateError
from frontend.text import StopMatcher, StreamingDetokenizer, TextModel, TextUnavailable
from tests.frontend.scripted import card

TEXTS = [
    "Hello world 😊",
    "日本語のテキスト",
    "a\x00b\x7f\u0080ÿ",
    " lead",
    "👩‍👩‍👧 नमस्ते",
    "\r\n\t",
]


@pytest.mark.parametrize("text", TEXTS)
def test_text_survives_the_way_to_ids_and_back(gpt2: TextModel, text: str) -> None:
    assert gpt2.decode(gpt2.encode(text)) == text


def test_known_ids(gpt2: TextModel) -> None:
    assert gpt2.encode("Hello world 😊") == [15496, 995, 30325, 232]
    assert gpt2.token_text(30325) == "bytes:\\x20\\xf0\\x9f\\x98"
    assert gpt2.token_bytes(232) == b"\x8a"
    assert gpt2.special_id("<|endoftext|>") == 50256
    assert gpt2.special_id("Hello") is None


@settings(max_examples=150, deadline=None)
@given(ids=st.lists(st.integers(0, 50256), max_size=40), cut=st.integers(0, 40))
def test_pieces_add_up_to_the_whole_and_are_well_formed(
    gpt2: TextModel, ids: list[int], cut: int
) -> None:
    detokenizer = StreamingDetokenizer(gpt2)
    pieces = [detokenizer.push(i) for i in ids]
    whole = b"".join(gpt2.token_bytes(i) for i in ids if i != 50256).decode("utf-8", "replace")
    assert "".join(pieces) + detokenizer.flush() == whole
    assert gpt2.decode(ids[:cut]) == gpt2.decode(tuple(ids[:cut]))


def test_a_character_waits_until_it_is_complete(gpt2: TextModel) -> None:
    detokenizer = StreamingDetokenizer(gpt2)
    assert [detokenizer.push(i) for i in (30325, 232)] == [" ", "😊"]
    assert detokenizer.push(30325) == " "
    assert detokenizer.flush() == "\ufffd"


def test_special_tokens_are_no_text_unless_asked_for(gpt2: TextModel) -> None:
    assert gpt2.decode([15496, 50256]) == "Hello"
    assert gpt2.decode([15496, 50256], skip_special_tokens=False) == "Hello<|endoftext|>"


def reference_stop(text: str, stops: list[str], include: bool) -> tuple[str, str | None]:
    """By the definition: the match that ends first, then the one that began first."""
    for end in range(1, len(text) + 1):
        found = [s for s in stops if text[:end].endswith(s)]
        if found:
            stop = max(found, key=len)
            return text[: end if include else end - len(stop)], stop
    return text, None


@settings(max_examples=500, deadline=None)
@given(
    text=st.text("ab", max_size=30),
    stops=st.lists(st.text("ab", min_size=1, max_size=5), min_size=1, max_size=3),
    cuts=st.sets(st.integers(0, 30)),
    include=st.booleans(),
)
def test_stops_are_found_the_same_however_the_text_is_cut(
    text: str, stops: list[str], cuts: set[int], include: bool
) -> None:
    expected, found = reference_stop(text, stops, include)
    matcher, out = StopMatcher(stops, include), ""
    edges = [0, *sorted(c for c in cuts if c < len(text)), len(text)]
    for first, end in zip(edges, edges[1:], strict=False):
        out += matcher.push(text[first:end])
        assert expected.startswith(out), "text that belongs to a stop string went out"
        if matcher.found:
            break
    else:
        out += matcher.flush()
    assert (out, matcher.found) == (expected, found)


def test_a_stop_within_the_minimum_length_does_not_count() -> None:
    matcher = StopMatcher(["ab"])
    assert matcher.push("xab", can_stop=False) == "xab"
    assert matcher.push("ya", can_stop=False) == "y"
    assert (matcher.push("b"), matcher.found) == ("", "ab")  # it ends after the minimum


def piece_tokenizer() -> bytes:
    """A tokenizer of the SentencePiece kind: words marked by U+2581, bytes as <0x..>."""
    pieces = ["<unk>", "\u2581Hello", "\u2581world", "<0xF0>", "<0x9F>", "<0x98>", "<0x8A>", "!"]
    tokenizer = Tokenizer(models.WordLevel({p: i for i, p in enumerate(pieces)}, "<unk>"))
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    return tokenizer.to_str().encode()


def test_pieces_with_byte_fallback() -> None:
    text = TextModel(8, piece_tokenizer())
    ids = [1, 2, 3, 4, 5, 6, 7]
    assert (
        text.decode(ids) == "Hello world😊!" == Tokenizer.from_buffer(piece_tokenizer()).decode(ids)
    )
    continued = StreamingDetokenizer(text)  # what follows a prompt keeps its space
    assert "".join(continued.push(i) for i in ids) == " Hello world😊!"


def test_an_unknown_decoder_leaves_ids_with_the_reason() -> None:
    spec = json.loads(piece_tokenizer())
    spec["decoder"] = {"type": "WordPiece", "prefix": "##", "cleanup": True}
    text = TextModel.from_card(card(vocab=8, tokenizer=json.dumps(spec).encode()))
    assert not text.has_tokenizer
    with pytest.raises(TextUnavailable, match="WordPiece.*send token ids"):
        text.encode("Hello")


@pytest.mark.parametrize("tokenizer", [None, b"", b"{}", b"\xff\xfe"])
def test_ids_only(tokenizer: bytes | None) -> None:
    text = TextModel.from_card(card(vocab=100, tokenizer=tokenizer, tokens={"bos": 1, "eos": [2]}))
    assert text.decode([5, 99]).split() == ["token_id:5", "token_id:99"]
    assert text.token_text(5) == "token_id:5"
    with pytest.raises(TextUnavailable, match="send token ids"):
        text.encode("Hello")


def test_padding_ids_are_no_text() -> None:
    text = TextModel(12, piece_tokenizer())
    assert text.decode([1, 11]) == "Hello"
    assert text.token_text(11) == "token_id:11"


# ------------------------------------------------------------------------------------------------------- templates


def test_template_knows_special_tokens_and_tools() -> None:
    source = "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}{{ tools | tojson }}"
    template = ChatTemplate(source, {"bos_token": "<s>"})
    rendered = template.render([{"role": "user", "content": "é"}], [{"é": 1}], {})
    assert rendered == '<s>[user]é[{"é": 1}]'


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "does not compile"),
        ("{{ messages[0].content.no.such }}", "undefined|no attribute"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "unsafe|undefined"),
        ("{{ messages.append(1) }}", "unsafe"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
    ],
)
def test_templates_cannot_leave_the_sandbox(source: str, message: str) -> None:
    template = ChatTemplate(source, {})
    with pytest.raises(TemplateError, match=message):
        template.render([{"role": "user", "content": "x"}], None, {})
