"""The plan of a conversion: which source tensor, or which part of it, becomes which tensor of the artifact.

Built whole before anything is read, so that a missing, left-over or misshapen tensor ends the conversion at once, by name.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert_source import WeightSource
from gpu_worker.model_config import ModelConfig
from gpu_worker.tensor_table import Shape, expected_tensors, is_matrix


@dataclass(frozen=True, slots=True)
class Part:
    """A source tensor, or rows `begin:end` of it, read as the target's shape (single axes may come and go)."""

    source: str
    begin: int = 0
    end: int | None = None


@dataclass(slots=True)
class Plan:
    """All that a family knows about a checkpoint.

    Attributes:
        config: the artifact's configuration (its dtype and name are set by the converter).
        parts: target -> part of the source.
        family: a word for the metadata and the model card.
        notes: lines for the summary: corrections, what was dropped, what is lossy.
    """

    config: ModelConfig
    family: str
    parts: dict[str, Part] = field(default_factory=dict)
    ignored: set[str] = field(default_factory=set)
    notes: list[str] = field(default_factory=list)

    def check(self, source: WeightSource) -> None:
        """Compares the plan with the source.

        Raises:
            ArtifactError: TL023.
        """
        names = source.names()
        used = {part.source for part in self.parts.values()}
        missing, left = sorted(used - names), sorted(names - used - self.ignored)
        if missing:
            near = difflib.get_close_matches(missing[0], left[:2000], n=1)
            hint = f"; there is `{near[0]}`" if near else ""
            raise _misfit(f"{_count(missing, 'missing')}{hint}")
        if left:
            raise _misfit(
                f"{_count(left, 'left over, which nothing in the configuration explains')}"
            )
        for target, shape in expected_tensors(self.config).items():
            part = self.parts[target]
            found = source.shape(part.source)
            rows = found[0] if found else 1
            end = rows if part.end is None else part.end
            selected = (end - part.begin, *found[1:])
            if end > rows or _squeezed(selected) != _squeezed(shape):
                raise _misfit(f"`{part.source}` is {list(found)}, `{target}` needs {list(shape)}")
            if not source.dtype(part.source).is_floating_point:
                raise _misfit(
                    f"`{part.source}` is {source.dtype(part.source)}, no floating-point type"
                )

    def makers(self, source: WeightSource) -> dict[str, Callable[[], torch.Tensor]]:
        """For each target a function that reads it."""
        shapes = expected_tensors(self.config)
        return {name: _maker(source, self.parts[name], shape) for name, shape in shapes.items()}

    def widest_dtype(self, source: WeightSource) -> str:
        """The storage that keeps every matrix exact: the source's own type, fp32 for a mixture."""
        found = {source.dtype(part.source) for name, part in self.parts.items() if is_matrix(name)}
        if found == {torch.bfloat16}:
            return "bf16"
        return "fp16" if found == {torch.float16} else "fp32"


def _maker(source: WeightSource, part: Part, shape: Shape) -> Callable[[], torch.Tensor]:
    return lambda: source.tensor(part.source)[part.begin : part.end].reshape(shape)


def _squeezed(shape: Shape) -> Shape:
    return tuple(n for n in shape if n != 1)


def _count(names: list[str], what: str) -> str:
    return (
        f"{len(names)} tensor{'s' * (len(names) > 1)} {what}: "
        + ", ".join(f"`{n}`" for n in names[:3])
        + (" …" if len(names) > 3 else "")
    )


def _misfit(cause: str) -> ArtifactError:
    return ArtifactError(
        "TL023", cause, "config.json and weights must be of the same model; download both again"
    )
