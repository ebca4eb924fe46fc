"""A checkpoint folder as the converters see it: its configuration with named faults, and its tensors one at a time.

Safetensors only, single or sharded, memory-mapped; a tensor's pages are given back when the next is read, so memory stays small.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

import torch

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.model_config import parse_json
from gpu_worker.safetensors_file import SafetensorsFile

MAX_JSON_BYTES = 100_000_000
MAX_LAYERS = 10_000


class WeightSource(Protocol):
    """Named tensors of a checkpoint, read when asked for."""

    def names(self) -> set[str]: ...
    def shape(self, name: str) -> tuple[int, ...]: ...
    def dtype(self, name: str) -> torch.dtype: ...
    def tensor(self, name: str) -> torch.Tensor: ...


class SafetensorsFolder:
    """All tensors of a folder's safetensors files."""

    def __init__(self, folder: Path) -> None:
        """Opens the files and checks that they are complete.

        Raises:
            ArtifactError: TL020 or a fault of one of the files.
        """
        self._files: dict[str, SafetensorsFile] = {}
        self._last = ""
        index = folder / "model.safetensors.index.json"
        single = folder / "model.safetensors"
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            if not isinstance(weight_map, dict):
                raise ArtifactError(
                    "TL020", f"{index} has no weight_map", "download the checkpoint again"
                )
            paths = sorted({folder / str(name) for name in weight_map.values()})
        elif single.exists():
            weight_map, paths = None, [single]
        else:
            raise _no_weights(folder)
        for path in paths:
            if path.parent != folder or not path.exists():
                raise ArtifactError(
                    "TL020", f"{path} is missing", "download all shards of the checkpoint"
                )
            file = SafetensorsFile(path)
            for name in file.entries:
                if name in self._files:
                    raise ArtifactError(
                        "TL020", f"`{name}` is in two shards", "download the checkpoint again"
                    )
                self._files[name] = file
        if weight_map is not None and set(weight_map) - set(self._files):
            name = min(set(weight_map) - set(self._files))
            raise ArtifactError(
                "TL020", f"`{name}` is in the index but in no shard", "download the shards again"
            )

    def names(self) -> set[str]:
        return set(self._files)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._files[name].entries[name].shape

    def dtype(self, name: str) -> torch.dtype:
        return self._files[name].entries[name].dtype

    def tensor(self, name: str) -> torch.Tensor:
        """The tensor, without copy. The one read before gives its memory back (and would be read from disk again if used)."""
        if self._last and self._last != name:
            self._files[self._last].release_pages(self._last)
        self._last = name
        return self._files[name].tensor(name)


class SourceConfig:
    """A source's configuration: typed access that names a missing or odd key, and remembers what was looked at."""

    def __init__(self, values: dict[str, Any], where: str) -> None:
        self.values = values
        self._where = where
        self.seen: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        """The value, or the default where the key is absent or null."""
        self.seen.add(key)
        value = self.values.get(key)
        return default if value is None else value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise self.fault(key, value, "a number")
        return float(value)

    def integer(self, key: str, default: int | None = None, most: int = (1 << 31) - 1) -> int:
        """A whole number from 0 to `most`."""
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= most:
            raise self.fault(key, value, f"an integer from 0 to {most}")
        return value

    def layers(self, key: str) -> int:
        return self.integer(key, most=MAX_LAYERS)

    def require(self, key: str, allowed: tuple[Any, ...], default: Any) -> None:
        """Refuses any value but the allowed ones.

        Raises:
            ArtifactError: TL022.
        """
        value = self.get(key, default)
        if value not in allowed:
            raise self.fault(key, value, " or ".join(repr(a) for a in allowed))

    def fault(self, key: str, value: Any, allowed: str) -> ArtifactError:
        what = "is missing" if value is None else f"is {value!r:.80}"
        return ArtifactError("TL022", f"`{key}` in {self._where} {what}", f"supported: {allowed}")

    def unseen(self) -> list[str]:
        """Keys that nothing asked for."""
        return sorted(set(self.values) - self.seen)


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file.

    Raises:
        ArtifactError: TL020.
    """
    try:
        value = parse_json(path.read_text(encoding="utf-8"), path.name, MAX_JSON_BYTES)
    except ArtifactError as ex:
        raise ArtifactError("TL020", ex.message, "download the checkpoint again") from None
    except (OSError, UnicodeDecodeError) as ex:
        raise ArtifactError(
            "TL020", f"{path}: {ex}", "give a folder with a readable checkpoint"
        ) from None
    if not isinstance(value, dict):
        raise ArtifactError(
            "TL020", f"{path} is not a JSON object", "download the checkpoint again"
        )
    return value


def _no_weights(folder: Path) -> ArtifactError:
    if list(folder.glob("*.bin")) or list(folder.glob("*.pt*")):
        return ArtifactError(
            "TL020",
            f"{folder} has pickled weights only",
            "save the model with safe_serialization=True (safetensors)",
        )
    return ArtifactError(
        "TL020", f"{folder} has no model.safetensors and no index of shards", "download the weights"
    )


def dump_json(value: Any) -> bytes:
    """Compact JSON with sorted keys."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
