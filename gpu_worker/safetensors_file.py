"""The container: a strict, memory-mapped reader and a streaming, atomic, deterministic writer of safetensors files.

The reader checks all that the format promises (header, offsets without gap or overlap, length of the file), as it also opens
files of strangers. It knows nothing of artifacts; `artifact.py` and the converters do.
"""

from __future__ import annotations

import json
import mmap
import os
import struct
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO

import torch

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.model_config import parse_json

MAX_HEADER_BYTES = 100_000_000

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
}  # fmt: skip
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor of a file; `begin` and `end` are bytes from the start of the file."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    begin: int
    end: int


class SafetensorsFile:
    """An open file: `entries`, `metadata`, and tensors that share its (copy-on-write) memory map."""

    def __init__(self, path: Path) -> None:
        """Maps the file and checks its header.

        Raises:
            ArtifactError: TL001, TL007 or TL010.
        """
        self.path = path
        try:
            with path.open("rb") as file:
                self.size_bytes = os.fstat(file.fileno()).st_size
                if self.size_bytes < 8:
                    raise _not_safetensors(path, f"has {self.size_bytes} bytes")
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        except OSError as ex:
            raise ArtifactError(
                "TL001", f"{path}: {ex.strerror or ex}", "give the path of a readable file"
            ) from None
        self.metadata, self.entries = self._read_header()

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor as stored, without copy."""
        entry = self.entries[name]
        if entry.begin == entry.end:
            return torch.empty(entry.shape, dtype=entry.dtype)
        if entry.begin % entry.dtype.itemsize:  # other writers need not align
            raw = torch.frombuffer(bytearray(self.view(name)), dtype=entry.dtype)
        else:
            count = (entry.end - entry.begin) // entry.dtype.itemsize
            raw = torch.frombuffer(self._map, dtype=entry.dtype, count=count, offset=entry.begin)
        return raw.reshape(entry.shape)

    def view(self, name: str) -> memoryview:
        """The bytes of a tensor, without copy."""
        entry = self.entries[name]
        return memoryview(self._map)[entry.begin : entry.end]

    def release_pages(self, name: str) -> None:
        """Tells the system that a tensor's pages are not needed soon: bounds memory while streaming through a large file."""
        entry = self.entries[name]
        begin = entry.begin // mmap.PAGESIZE * mmap.PAGESIZE
        if entry.end > begin:
            self._map.madvise(mmap.MADV_DONTNEED, begin, entry.end - begin)

    def _read_header(self) -> tuple[dict[str, str], dict[str, Entry]]:
        (length,) = struct.unpack("<Q", self._map[:8])
        if length > MAX_HEADER_BYTES or self._map[8:9] != b"{":
            raise _not_safetensors(self.path, "does not begin with a safetensors header")
        if 8 + length > self.size_bytes:
            raise self._damaged(
                f"the header ends at byte {8 + length}, the file at {self.size_bytes}"
            )
        try:
            text = self._map[8 : 8 + length].decode()
        except UnicodeDecodeError:
            raise _not_safetensors(self.path, "has a header that is not UTF-8") from None
        try:
            header = parse_json(text, "header", MAX_HEADER_BYTES)
        except ArtifactError as ex:
            raise _not_safetensors(self.path, f"has a bad header: {ex.message}") from None
        metadata = header.pop("__metadata__", {})
        if not isinstance(metadata, dict) or not all(isinstance(v, str) for v in metadata.values()):
            raise _not_safetensors(self.path, "has metadata that are not strings")
        entries = {
            name: self._read_entry(name, value, 8 + length) for name, value in header.items()
        }
        self._check_layout(entries, 8 + length)
        return metadata, entries

    def _read_entry(self, name: str, value: Any, base: int) -> Entry:
        try:
            dtype, shape, (begin, end) = (
                value["dtype"],
                tuple(value["shape"]),
                value["data_offsets"],
            )
            if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
                raise ValueError
        except (TypeError, KeyError, ValueError):
            raise self._damaged(f"the header's entry of `{name}` is malformed") from None
        if dtype not in DTYPES:
            raise ArtifactError(
                "TL007", f"`{name}` is {dtype!r:.20}", "known are " + ", ".join(DTYPES)
            )
        count = 1
        for n in shape:
            count *= n
        if end - begin != count * DTYPES[dtype].itemsize:
            raise self._damaged(
                f"`{name}` has {end - begin} bytes, {dtype} {list(shape)} needs {count * DTYPES[dtype].itemsize}"
            )
        return Entry(DTYPES[dtype], shape, base + begin, base + end)

    def _check_layout(self, entries: dict[str, Entry], base: int) -> None:
        at = base
        for name, entry in sorted(entries.items(), key=lambda item: (item[1].begin, item[1].end)):
            if entry.begin != at:
                raise self._damaged(
                    f"`{name}` begins at byte {entry.begin}, expected {at}: a gap or an overlap"
                )
            at = entry.end
        if at != self.size_bytes:
            raise self._damaged(f"the tensors end at byte {at}, the file at {self.size_bytes}")

    def _damaged(self, cause: str) -> ArtifactError:
        return ArtifactError("TL010", f"{self.path}: {cause}", "copy or convert the file again")


@dataclass(frozen=True, slots=True)
class Pending:
    """A tensor to write: what it will be, and the function that makes it when its turn comes."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    make: Callable[[], torch.Tensor]

    @property
    def num_bytes(self) -> int:
        count = self.dtype.itemsize
        for n in self.shape:
            count *= n
        return count


def file_order(tensors: dict[str, Pending]) -> list[str]:
    """The order of tensors in a file: wide elements first (which aligns all), then by name."""
    return sorted(tensors, key=lambda name: (-tensors[name].dtype.itemsize, name))


def encode_header(metadata: dict[str, str], tensors: dict[str, Pending]) -> bytes:
    """The length and the header, padded to a multiple of 8 bytes."""
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    at = 0
    for name in file_order(tensors):
        entry = tensors[name]
        header[name] = {
            "dtype": DTYPE_NAMES[entry.dtype],
            "shape": list(entry.shape),
            "data_offsets": [at, at + entry.num_bytes],
        }
        at += entry.num_bytes
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text


def tensor_bytes(tensor: torch.Tensor) -> memoryview:
    """The bytes of a tensor in row-major order, without copy where it already is."""
    flat = tensor.detach().cpu().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().data if flat.numel() else memoryview(b"")


@contextmanager
def atomic_file(path: Path) -> Iterator[BinaryIO]:
    """A file that appears under `path` whole, synced to disk, or not at all."""
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
    try:
        with os.fdopen(handle, "w+b") as file:
            yield file
            file.flush()
            os.fchmod(file.fileno(), 0o644)
            os.fsync(file.fileno())
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    directory = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _not_safetensors(path: Path, cause: str) -> ArtifactError:
    return ArtifactError(
        "TL001", f"{path} {cause}", "give a .tinyloop file; python -m gpu_worker.convert makes one"
    )
