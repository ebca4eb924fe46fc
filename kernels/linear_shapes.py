"""Launch shapes of the products of decode rows, and what their ends need to know of the model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from kernels.fragments import RANKS, ProductShape, is_for_warpgroups

CLUSTERS = 15  # clusters of 8 blocks that an H200 runs at a time with one block a multiprocessor
SHARED_BLOCK_BYTES = 113 * 1024  # of shared memory: two blocks fit a multiprocessor
GROUP = 4  # chains whose sum is finished before other groups' sums join it
BARS = 40  # bytes of memory barriers: x has come, sums have come (2 buffers), buffers are free (2)


@dataclass(frozen=True)
class Launch:
    """One launch shape of a product of up to 8 rows.

    `tiles` is what a cluster holds at a time, over `num_warps`: with one stage everything is in flight from the
    start, else tiles come in rounds through a ring of `stages`. Fewer `max_rows` save room for the sums.
    """

    shape: ProductShape
    tiles: int
    num_warps: int
    stages: int = 1
    max_rows: int = 1
    column_tiles: ClassVar[int] = 1
    columns: ClassVar[int] = 8

    @property
    def clusters(self) -> int:
        return -(-self.shape.num_tiles // self.tiles) if self.stages == 1 else CLUSTERS

    @property
    def rounds(self) -> int:
        return -(-self.shape.num_tiles // (self.tiles * self.clusters))

    @property
    def warp_tiles(self) -> int:
        """Tiles of one warp (of one sub slice)."""
        return self.tiles * self.shape.sub_slices // self.num_warps

    @property
    def weight_bytes(self) -> int:
        return self.stages * self.tiles * self.shape.tile_bytes

    @property
    def x_bytes(self) -> int:
        return self.shape.k_slice * self.columns * 2

    @property
    def push_slots(self) -> int:
        """Pairs of 8 that one source sends to one owner."""
        return -(-self.tiles * self.max_rows // RANKS)

    @property
    def partial_bytes(self) -> int:
        buffers = 2 if self.rounds > 1 else 1
        return buffers * RANKS * self.shape.sub_slices * self.push_slots * 64

    @property
    def scales_at(self) -> int:
        """Where each warp keeps what its rows' sums are multiplied by."""
        return self.weight_bytes + self.x_bytes + self.partial_bytes

    @property
    def shared_bytes(self) -> int:
        scale_bytes = 4 * self.columns * self.num_warps
        return self.scales_at + scale_bytes + 8 * self.num_warps * self.stages + BARS


@dataclass(frozen=True)
class HeadShape:
    """What the fused QKV product needs to know of the model and the cache."""

    n_heads: int
    n_kv_heads: int
    head_dim: int
    is_rotary: bool
    is_half_pairing: bool

    @property
    def head_bytes(self) -> int:
        """Bytes of one block of one layer and kv head: K, then V."""
        return 64 * self.head_dim * 4


@dataclass(frozen=True)
class WideLaunch:
    """One launch shape of a product of many rows.

    A block has `tiles` tiles of 16 outputs at a time and all 8 x `column_tiles` rows, over `warps` x `column_warps`
    multiplying warps. The ring has `stages` places of `steps` x 16 columns of K. `is_x_kept`: the block's whole part of x
    stays in shared memory (for clusters that take turns, `max_clusters` of them); else x comes through the ring too.
    """

    shape: ProductShape
    tiles: int
    warps: int
    column_warps: int
    column_tiles: int
    stages: int
    steps: int
    is_x_kept: bool = False
    max_clusters: int = 1 << 20

    @property
    def parts(self) -> int:
        """Pieces of K, one a block."""
        return RANKS * self.shape.sub_slices // GROUP

    @property
    def num_tiles(self) -> int:
        """Tiles that hold outputs."""
        return -(-self.shape.n // 16)

    @property
    def clusters(self) -> int:
        return min(self.max_clusters, -(-self.num_tiles // self.tiles))

    @property
    def rounds(self) -> int:
        return -(-self.num_tiles // (self.tiles * self.clusters))

    @property
    def columns(self) -> int:
        return 8 * self.column_tiles

    @property
    def num_warps(self) -> int:
        """Multiplying warps."""
        return self.warps * self.column_warps

    @property
    def is_by_warpgroups(self) -> bool:
        return is_for_warpgroups(self.column_tiles)

    @property
    def warp_tiles(self) -> int:
        return self.tiles // self.warps

    @property
    def warp_columns(self) -> int:
        """Column tiles of a warp."""
        return self.column_tiles // self.column_warps

    @property
    def owned(self) -> int:
        """Products of a tile and a column tile that a warp finishes."""
        return self.warp_tiles * self.warp_columns // self.parts

    @property
    def block_steps(self) -> int:
        """Ring places that a block's part of K takes."""
        return GROUP * self.shape.k_steps // self.steps

    @property
    def x_stages(self) -> int:
        return self.block_steps if self.is_x_kept else self.stages

    @property
    def weight_stage_bytes(self) -> int:
        return self.tiles * self.steps * 512

    @property
    def x_stage_bytes(self) -> int:
        return self.column_tiles * self.steps * 256

    @property
    def sums_bytes(self) -> int:
        """What one block receives of one round."""
        return (self.parts - 1) * self.num_warps * self.owned * 512

    @property
    def sums_at(self) -> int:
        return self.stages * self.weight_stage_bytes + self.x_stages * self.x_stage_bytes

    @property
    def scales_at(self) -> int:
        return self.sums_at + min(2, self.rounds) * self.sums_bytes

    @property
    def bars_at(self) -> int:
        return self.scales_at + 4 * self.columns

    @property
    def shared_bytes(self) -> int:
        """Barriers: a weight and an `emptied` one a stage, one an x stage, four a warp, one of the factors."""
        return self.bars_at + 8 * (2 * self.stages + self.x_stages + 4 * self.num_warps + 1)
