"""The shapes that kernels of prompt rows are made for."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class PromptAttentionShape:
    """The model's side and the cache's kind, fp16 or int4; head_dim is a multiple of 32.

    Without `has_windows` the tiles' windows must be 0.
    """

    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_alibi: bool = False
    has_windows: bool = False
    kind: str = "fp16"

    @property
    def half_bytes(self) -> int:
        """K or V of one block of one layer and kv head, as fp16."""
        return 128 * self.head_dim


@dataclass(frozen=True)
class GatherShape:
    """One layer of a cache; head_dim is a multiple of 32."""

    num_kv_heads: int
    head_dim: int
    kind: str = "fp16"

    @property
    def half_bytes(self) -> int:
        """K or V of one block of one layer and kv head, as fp16."""
        return 128 * self.head_dim

    @property
    def stored_bytes(self) -> int:
        """K or V of one block of one layer and kv head, as stored."""
        return 32 * self.head_dim + 256 if self.kind == "int4" else self.half_bytes
