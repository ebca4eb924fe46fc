"""The texts of a checkpoint: tokenizer, chat template, generation defaults, and what they say about special tokens.

A folder without a tokenizer converts too: such an artifact serves token ids only.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert_source import dump_json, read_json
from gpu_worker.model_config import SpecialTokens

# Sampling defaults that a server can apply; the rest of generation_config.json is about upstream's own code.
_GENERATION_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "do_sample")


class Texts:
    """Blobs for the artifact, and ids found on the way.

    Attributes:
        blobs: `tokenizer.json`, `chat_template.jinja`, `generation.json`, as far as the source has them.
        eos: end tokens of generation_config.json.
        notes: lines for the summary.
    """

    def __init__(self) -> None:
        self.blobs: dict[str, bytes] = {}
        self.eos: tuple[int, ...] = ()
        self.notes: list[str] = []

    def add_tokenizer(self, data: bytes, add_bos: bool | None, bos: str | None) -> None:
        """Embeds a tokenizer.json, its beginning token brought in line with the source's `add_bos_token`.

        Raises:
            ArtifactError: TL011.
        """
        try:
            tokenizer = Tokenizer.from_str(data.decode())
        except Exception as ex:  # the tokenizers library raises plain Exception
            raise ArtifactError(
                "TL011",
                f"tokenizer.json is not readable: {ex}",
                "give the model's own with --tokenizer",
            ) from None
        bos_id = tokenizer.token_to_id(bos) if bos else None
        if add_bos is not None and bos_id is not None:
            has_bos = tokenizer.encode("a").ids[:1] == [bos_id]
            if has_bos != add_bos:
                data = _with_bos(data, bos, bos_id) if add_bos else _without_template(data)
                self.notes.append(
                    f"tokenizer: {'adds' if add_bos else 'does not add'} {bos} before a text, as add_bos_token says"
                )
        self.blobs["tokenizer.json"] = data

    def token_id(self, token: str) -> int | None:
        """The id of a token of the embedded tokenizer."""
        data = self.blobs.get("tokenizer.json")
        return None if data is None else Tokenizer.from_str(data.decode()).token_to_id(token)


def read_texts(folder: Path, tokenizer: Path | None) -> Texts:
    """Reads a folder's texts; `tokenizer` is a tokenizer.json (or a folder with one) to take instead.

    Raises:
        ArtifactError: TL011 or TL020.
    """
    texts = Texts()
    home = folder if tokenizer is None else tokenizer if tokenizer.is_dir() else tokenizer.parent
    path = home / "tokenizer.json" if tokenizer is None or tokenizer.is_dir() else tokenizer
    options = (
        read_json(home / "tokenizer_config.json")
        if (home / "tokenizer_config.json").exists()
        else {}
    )
    if path.exists():
        texts.add_tokenizer(
            path.read_bytes(),
            _flag(options, "add_bos_token"),
            _token_text(options.get("bos_token")),
        )
    elif tokenizer is not None:
        raise ArtifactError(
            "TL011", f"{path} does not exist", "give a tokenizer.json or a folder with one"
        )
    elif any(
        (folder / name).exists() for name in ("tokenizer.model", "vocab.json", "spiece.model")
    ):
        texts.notes.append(
            "tokenizer: no tokenizer.json, so token ids only (save the tokenizer with transformers to get one)"
        )
    template = _chat_template(home, options)
    if template is not None:
        texts.blobs["chat_template.jinja"] = template.encode()
    if (folder / "generation_config.json").exists():
        _read_generation(texts, read_json(folder / "generation_config.json"))
    return texts


def merge_eos(tokens: SpecialTokens, more: tuple[int, ...]) -> SpecialTokens:
    """End tokens of the model and of its generation defaults, each once, the model's first."""
    eos = tuple(dict.fromkeys((*tokens.eos, *more)))
    return SpecialTokens(tokens.bos, eos, tokens.pad)


def _read_generation(texts: Texts, options: dict[str, Any]) -> None:
    kept = {key: options[key] for key in _GENERATION_KEYS if options.get(key) is not None}
    if kept:
        texts.blobs["generation.json"] = dump_json(kept)
    eos = options.get("eos_token_id", [])
    texts.eos = tuple(t for t in (eos if isinstance(eos, list) else [eos]) if isinstance(t, int))


def _chat_template(folder: Path, options: dict[str, Any]) -> str | None:
    path = folder / "chat_template.jinja"
    if path.exists():
        return path.read_text(encoding="utf-8")
    template = options.get("chat_template")
    if isinstance(template, list):  # several named ones
        named = {t.get("name"): t.get("template") for t in template if isinstance(t, dict)}
        template = named.get("default")
    return template if isinstance(template, str) else None


def _token_text(token: Any) -> str | None:
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _flag(options: dict[str, Any], key: str) -> bool | None:
    value = options.get(key)
    return value if isinstance(value, bool) else None


def _with_bos(data: bytes, bos: str | None, bos_id: int) -> bytes:
    spec = json.loads(data)
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": bos, "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
    old = spec.get("post_processor")
    spec["post_processor"] = (
        template if old is None else {"type": "Sequence", "processors": [old, template]}
    )
    return dump_json(spec)


def _without_template(data: bytes) -> bytes:
    spec = json.loads(data)
    old = spec.get("post_processor") or {}
    kept = [p for p in old.get("processors", [old]) if p.get("type") != "TemplateProcessing"]
    spec["post_processor"] = (
        None
        if not kept
        else kept[0]
        if len(kept) == 1
        else {"type": "Sequence", "processors": kept}
    )
    return dump_json(spec)
