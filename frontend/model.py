"""The served model as a frontend sees it: the card's limits by name, its text model, the names it answers to.

Made once per model card; holds no weights and no file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from frontend.errors import ApiError
from frontend.text import TextModel

_SAMPLING_DEFAULTS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")


@dataclass(frozen=True, slots=True)
class ServedModel:
    """`sampling` are the artifact's own defaults (temperature, top_p, ...), used by the OpenAI-like families."""

    name: str
    aliases: tuple[str, ...]
    card: dict[str, Any]
    text: TextModel
    vocab: int
    max_seq_len: int
    loops_default: int
    loops_trained: int
    loops_min: int
    loops_max: int
    eos: tuple[int, ...]
    sampling: dict[str, float]
    created: int  # Unix time at which this process learned of it

    @classmethod
    def from_card(cls, card: dict[str, Any], aliases: Sequence[str]) -> ServedModel:
        generation = card.get("generation") or {}
        sampling = {k: generation[k] for k in _SAMPLING_DEFAULTS if k in generation}
        return cls(
            name=card["name"],
            aliases=tuple(aliases),
            card=card,
            text=TextModel.from_card(card),
            vocab=card["vocab"],
            max_seq_len=card["max_seq_len"],
            loops_default=card["loops_default"],
            loops_trained=card["loops_trained"],
            loops_min=card.get("loops_min", 1),
            loops_max=card["loops_max"],
            eos=tuple(card["tokens"]["eos"]),
            sampling={k: v for k, v in sampling.items() if type(v) in (int, float)},
            created=int(time.time()),
        )

    @property
    def listed_names(self) -> list[str]:
        """The names in model lists, the model's own first."""
        return [self.name, *[a for a in self.aliases if a not in ("*", self.name)]]

    def resolve(self, name: str, param: str = "model") -> str:
        """The name to answer under: `name` if this model answers to it, the model's own for "".

        Raises:
            ApiError: 404 model_not_found.
        """
        if not name:
            return self.name
        if name == self.name or name in self.aliases or "*" in self.aliases:
            return name
        raise ApiError(
            404,
            f"the model '{name:.200}' is not served here; '{self.name}' is",
            code="model_not_found",
            param=param,
        )
