"""The `.tinyloop` file: write it, open it, prove it whole. One safetensors file holds weights, configuration and tokenizer.

`load` finds every fault before a weight is used and says it in one line (`ArtifactError`); `write` is atomic and deterministic.
The worker and every tool open models through here and nowhere else. `python -m gpu_worker.artifact info FILE` prints one.
"""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.model_config import FORMAT, ModelConfig, parse_json
from gpu_worker.quantise import dequantise_rows, quantise_rows, row_scales
from gpu_worker.safetensors_file import (
    DTYPE_NAMES,
    Pending,
    SafetensorsFile,
    atomic_file,
    encode_header,
    file_order,
    tensor_bytes,
)
from gpu_worker.tensor_table import (
    BLOBS,
    check_finite,
    check_table,
    expected_tensors,
    optional_tensors,
    storage_dtype,
)

__all__ = ["Artifact", "ArtifactError", "ModelConfig", "load", "write"]

DIGEST_PLACE = (
    "0" * 64
)  # reserved width, so that the digest can be filled in after the data is written
MAX_BLOB_BYTES = 64 << 20

TensorSource = torch.Tensor | Callable[[], torch.Tensor]
Progress = Callable[[int], None]  # told the number of bytes just written


class Artifact:
    """An open, checked artifact. Tensors share the file's memory map until they are converted."""

    def __init__(self, file: SafetensorsFile, config: ModelConfig, source: dict[str, Any]) -> None:
        self._file = file
        self.path = file.path
        self.size_bytes = file.size_bytes
        self.config = config
        self.source = source
        self.digest = file.metadata["tinyloop.digest"]

    def names(self) -> list[str]:
        """The names of all weights, without blobs and scales."""
        return [
            n for n in self._file.entries if not n.startswith("blob.") and not n.endswith(".scale")
        ]

    def tensor(self, name: str, dequantise: bool = True) -> torch.Tensor:
        """One weight: in fp32 (`dequantise`), else as stored."""
        stored = self._file.tensor(name)
        if not dequantise:
            return stored
        if stored.dtype is torch.int8:
            return dequantise_rows(stored, self._file.tensor(f"{name}.scale"))
        return stored.float()

    def tensors(self, dequantise: bool = False) -> dict[str, torch.Tensor]:
        """All weights: as stored, scales included; with `dequantise` in fp32, without scales."""
        if dequantise:
            return {name: self.tensor(name) for name in self.names()}
        return {
            name: self._file.tensor(name)
            for name in self._file.entries
            if not name.startswith("blob.")
        }

    def release_pages(self, name: str) -> None:
        """Gives a weight's memory back to the system until it is read again."""
        self._file.release_pages(name)

    def blob(self, name: str) -> bytes | None:
        """An embedded file (`tokenizer.json`, `chat_template.jinja`, `generation.json`, `probe.json`), None if absent."""
        name = name if name.startswith("blob.") else f"blob.{name}"
        return bytes(self._file.view(name)) if name in self._file.entries else None

    def blobs(self) -> dict[str, bytes]:
        """All embedded files by their names."""
        return {n: bytes(self._file.view(n)) for n in self._file.entries if n.startswith("blob.")}

    @property
    def num_parameters(self) -> int:
        return sum(self._file.tensor(name).numel() for name in self.names())

    def verify(self) -> None:
        """Reads everything: all values finite, digest right.

        Raises:
            ArtifactError: TL008 or TL009.
        """
        digest = _start_digest(self.config)
        for name, entry in sorted(self._file.entries.items(), key=lambda item: item[1].begin):
            check_finite(name, self._file.tensor(name), sample=False)
            _digest_tensor(digest, name, entry.dtype, entry.shape, self._file.view(name))
            self.release_pages(name)
        if digest.hexdigest() != self.digest:
            raise ArtifactError(
                "TL009",
                f"{self.path}: content has {digest.hexdigest()[:16]}…, header says {self.digest[:16]}…",
                "copy the file again",
            )


def load(path: str | Path, verify: bool = False) -> Artifact:
    """Opens an artifact and checks it: container, configuration, table of tensors, values (a sample of each), tokenizer.

    Args:
        path: the file.
        verify: read everything (all values, digest), which takes as long as reading the file.

    Raises:
        ArtifactError: any of TL001 to TL012.
    """
    file = SafetensorsFile(Path(path))
    metadata = file.metadata
    if "tinyloop.format" not in metadata or "tinyloop.config" not in metadata:
        raise ArtifactError(
            "TL002",
            f"{path} is a safetensors file, but no artifact",
            "convert it: python -m gpu_worker.convert",
        )
    if metadata["tinyloop.format"] != str(FORMAT):
        raise ArtifactError(
            "TL002",
            f"{path} has format {metadata['tinyloop.format']!r:.20}, this program reads {FORMAT}",
            "upgrade or convert again",
        )
    config = ModelConfig.from_json(metadata["tinyloop.config"])
    digest = metadata.get("tinyloop.digest", "")
    if (
        len(digest) != 64
        or digest == DIGEST_PLACE
        or any(c not in "0123456789abcdef" for c in digest)
    ):
        raise ArtifactError(
            "TL009", f"{path} has no digest", "it was not written to its end: convert again"
        )
    source = parse_json(metadata.get("tinyloop.source", "{}"), "source", 1 << 20)
    artifact = Artifact(file, config, source if isinstance(source, dict) else {})
    check_table(
        config,
        {
            name: (e.dtype, e.shape)
            for name, e in file.entries.items()
            if not name.startswith("blob.")
        },
    )
    for name in file.entries:
        if not name.startswith("blob."):
            check_finite(name, file.tensor(name), sample=True)
            file.release_pages(name)
    _check_blobs(
        config,
        {n: (e.dtype, e.end - e.begin) for n, e in file.entries.items() if n.startswith("blob.")},
        artifact.blob,
    )
    if verify:
        artifact.verify()
    return artifact


def write(
    path: str | Path,
    config: ModelConfig,
    tensors: Mapping[str, TensorSource],
    blobs: Mapping[str, bytes] | None = None,
    source: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> str:
    """Writes an artifact: whole or not at all, and the same bytes for the same content.

    Args:
        path: the file to make or replace.
        config: its `dtype` says how matrices are stored; int8 quantises here, per output channel.
        tensors: a tensor of any float type, or a function that makes it (called once, for int8 twice), for each name of the
            table. An int8 tensor with its `.scale` is taken as it is.
        blobs: `tokenizer.json`, `chat_template.jinja`, `generation.json`, `probe.json`.
        source: where the weights are from; kept in the metadata, not part of the digest.
        progress: told of bytes as they are written.

    Returns:
        The digest.

    Raises:
        ArtifactError: what `load` would find.
    """
    path = Path(path)
    ModelConfig.from_json(config.to_json())  # what cannot be read back must not be written
    known = expected_tensors(config) | optional_tensors(config)
    pending: dict[str, Pending] = {}
    for name, given in tensors.items():
        pending.update(_pending(config, name, known.get(name, ()), given, tensors))
    check_table(config, {name: (p.dtype, p.shape) for name, p in pending.items()})
    named = {n if n.startswith("blob.") else f"blob.{n}": data for n, data in (blobs or {}).items()}
    _check_blobs(
        config, {n: (torch.uint8, len(data)) for n, data in named.items()}, lambda n: named[n]
    )
    for name, data in named.items():
        pending[name] = _pending_blob(data)
    metadata = {
        "tinyloop.format": str(FORMAT),
        "tinyloop.config": config.to_json(),
        "tinyloop.digest": DIGEST_PLACE,
        "tinyloop.source": json.dumps(dict(source or {}), sort_keys=True, separators=(",", ":")),
    }
    header = encode_header(metadata, pending)
    digest = _start_digest(config)
    with atomic_file(path) as file:
        file.write(header)
        for name in file_order(pending):
            entry = pending[name]
            made = entry.make()
            if made.dtype is not entry.dtype or tuple(made.shape) != entry.shape:
                raise ArtifactError(
                    "TL006",
                    f"`{name}` is {list(made.shape)}, expected {list(entry.shape)}",
                    "correct the source",
                )
            check_finite(name, made, sample=False)
            content = tensor_bytes(made)
            file.write(content)
            _digest_tensor(digest, name, entry.dtype, entry.shape, content)
            if progress is not None:
                progress(len(content))
        file.seek(header.index(DIGEST_PLACE.encode(), header.index(b"tinyloop.digest")))
        file.write(digest.hexdigest().encode())
    return str(digest.hexdigest())


def _pending_blob(data: bytes) -> Pending:
    return Pending(
        torch.uint8, (len(data),), lambda: torch.frombuffer(bytearray(data), dtype=torch.uint8)
    )


def _pending(
    config: ModelConfig,
    name: str,
    shape: tuple[int, ...],
    given: TensorSource,
    tensors: Mapping[str, TensorSource],
) -> dict[str, Pending]:
    """What a given weight becomes in the file: itself in its storage dtype, or int8 and scales."""

    def get() -> torch.Tensor:
        return given if isinstance(given, torch.Tensor) else given()

    if isinstance(given, torch.Tensor):
        shape = tuple(given.shape)
        if f"{name}.scale" in tensors or name.endswith(".scale"):
            return {name: Pending(given.dtype, shape, get)}
    dtype = storage_dtype(config, name)
    if dtype is not torch.int8:
        return {name: Pending(dtype, shape, lambda: get().to(dtype))}
    return {
        name: Pending(torch.int8, shape, lambda: _quantised(get())),
        f"{name}.scale": Pending(torch.float32, shape[:1], lambda: row_scales(get())),
    }


def _quantised(weight: torch.Tensor) -> torch.Tensor:
    return quantise_rows(weight, row_scales(weight))


def _check_blobs(
    config: ModelConfig, found: dict[str, tuple[torch.dtype, int]], read: Callable[[str], Any]
) -> None:
    for name, (dtype, num_bytes) in found.items():
        if name not in BLOBS:
            raise ArtifactError("TL005", f"`{name}`", "known blobs are " + ", ".join(BLOBS))
        if dtype is not torch.uint8:
            raise ArtifactError("TL007", f"`{name}` is not U8", "convert the model again")
        if num_bytes > MAX_BLOB_BYTES:
            raise ArtifactError(
                "TL010",
                f"`{name}` has {num_bytes} bytes, more than {MAX_BLOB_BYTES}",
                "make it smaller",
            )
        try:
            text = bytes(read(name)).decode()
        except UnicodeDecodeError:
            raise ArtifactError(
                "TL010", f"`{name}` is not UTF-8", "convert the model again"
            ) from None
        if name == "blob.tokenizer.json":
            _check_tokenizer(config, text)
        elif name.endswith(".json") and not isinstance(
            parse_json(text, name, MAX_BLOB_BYTES), dict
        ):
            raise ArtifactError(
                "TL003", f"`{name}` is not a JSON object", "convert the model again"
            )


def _check_tokenizer(config: ModelConfig, text: str) -> None:
    try:
        ids = Tokenizer.from_str(text).get_vocab(with_added_tokens=True).values()
    except Exception as ex:  # noqa: BLE001 - the tokenizers library raises plain Exception
        raise ArtifactError(
            "TL011", f"tokenizer.json is not readable: {ex}", "embed the model's own tokenizer.json"
        ) from None
    largest = max(ids, default=-1)
    if largest >= config.arch.vocab:
        raise ArtifactError(
            "TL011",
            f"the tokenizer's ids reach {largest}, the vocabulary has {config.arch.vocab} entries",
            "embed the tokenizer of this model",
        )


def _start_digest(config: ModelConfig) -> Any:
    return hashlib.sha256(f"tinyloop {FORMAT}\n{config.to_json()}\n".encode())


def _digest_tensor(
    digest: Any, name: str, dtype: torch.dtype, shape: tuple[int, ...], data: memoryview
) -> None:
    digest.update(f"{name} {DTYPE_NAMES[dtype]} {list(shape)}\n".encode())
    digest.update(data)


if __name__ == "__main__":
    from gpu_worker.artifact_info import main

    sys.exit(main(sys.argv[1:]))
