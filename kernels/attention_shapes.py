"""What one launch of decode attention is made for: the model's heads, and how the fixed streams are spread over warps and blocks.

Knows bytes of shared memory and of cache blocks; `attention` makes the kernels.
"""

from __future__ import annotations

from dataclasses import dataclass

from kernels.fragments import ProductShape
from kernels.layout import NUM_SINKS

STREAMS = 16
_SM_BYTES = 228 * 1024  # of shared memory; the system keeps 1 KB of each block's


@dataclass(frozen=True)
class AttentionShape:
    """The model's side. A unit of work has `group` query heads of one kv head (at most 8, 4 with int4), which has `split` units.

    head_dim is a multiple of 32, at most 256.
    """

    n_kv_heads: int
    group: int
    head_dim: int
    format: str = "fp16"
    has_alibi: bool = False
    split: int = 1

    @staticmethod
    def of(
        n_heads: int, n_kv_heads: int, head_dim: int, kind: str = "fp16", has_alibi: bool = False
    ) -> AttentionShape:
        """That of a model: groups of more heads than a unit can have are cut into equal units."""
        group, most = n_heads // n_kv_heads, 4 if kind == "int4" else 8
        split = next(s for s in range(1, group + 1) if group % s == 0 and group // s <= most)
        return AttentionShape(n_kv_heads, group // split, head_dim, kind, has_alibi, split)

    @property
    def units(self) -> int:
        """Units of work of a row."""
        return self.n_kv_heads * self.split

    @property
    def num_columns(self) -> int:
        """Columns of a lane's pair that hold query heads."""
        return 1 if self.group == 1 else 2

    @property
    def exact_parts(self) -> int:
        """In how many chunks an fp16 block is fetched: half of them K's, the rest V's."""
        return 8 if self.format == "int4" and self.head_dim % 64 == 0 else 4

    @property
    def chunk_bytes(self) -> int:
        """A chunk of an fp16 block: some positions of K, or some dims of V."""
        return 256 * self.head_dim // self.exact_parts

    @property
    def stored_bytes(self) -> int:
        """K (or V) of one stored int4 block: the numbers, then (scale, offset) fp16 per position."""
        return 32 * self.head_dim + 256

    @property
    def stored_head_bytes(self) -> int:
        """One block of one layer and kv head in its stored format."""
        return 2 * self.stored_bytes if self.format == "int4" else 256 * self.head_dim

    @property
    def sink_bytes(self) -> int:
        """The exact sinks of one layer and kv head."""
        return 4 * NUM_SINKS * self.head_dim if self.format == "int4" else 0


@dataclass(frozen=True)
class AttentionLaunch:
    """`cluster` blocks of `num_warps` share the 16 streams; each warp has a ring of `stages` chunks.

    The output has the order in which the product `target` reads `column_tiles` x 8 rows, or (rows, heads x dim) without a
    target; it is fp16, or float32 with `is_float_out`.
    With `is_paged` the queries are float32 rows of [q; k; v] and the tables those of a `Paging`; see `attention`.
    """

    shape: AttentionShape
    cluster: int
    num_warps: int
    stages: int
    target: ProductShape | None = None
    column_tiles: int = 1
    is_float_out: bool = False
    is_paged: bool = False

    @property
    def warp_streams(self) -> int:
        return STREAMS // (self.cluster * self.num_warps)

    @property
    def stage_bytes(self) -> int:
        return max(
            self.shape.chunk_bytes, self.shape.stored_bytes if self.shape.format == "int4" else 0
        )

    @property
    def results(self) -> int:
        """Streams whose results are merged: with int4 the exact keys are one of their own."""
        return STREAMS + (self.shape.format == "int4")

    @property
    def result_floats(self) -> int:
        """Of one stream and query head in the block that merges them: its dims, the maximum, the sum."""
        return self.shape.head_dim // self.cluster + 2

    @property
    def ring_bytes(self) -> int:
        return self.num_warps * self.stages * self.stage_bytes

    @property
    def result_bytes(self) -> int:
        return self.results * self.shape.group * self.result_floats * 4

    @property
    def sinks_at(self) -> int:
        """The exact sinks' place in shared memory, behind the rings and the results."""
        return self.ring_bytes + -(-self.result_bytes // 16) * 16

    @property
    def bars_at(self) -> int:
        """Memory barriers: one for each stage of a ring, then those of the sinks and of the results."""
        return self.sinks_at + self.shape.sink_bytes

    @property
    def shared_bytes(self) -> int:
        return self.bars_at + 8 * self.num_warps * self.stages + 16

    def check(self) -> None:
        """Raises ValueError where the model's heads do not fit."""
        shape = self.shape
        most = 4 if shape.format == "int4" else 8
        if shape.group > most or shape.head_dim % 32 or shape.head_dim % (8 * self.cluster):
            raise ValueError(f"{shape} does not fit clusters of {self.cluster}")


def choose_launch(
    shape: AttentionShape,
    rows: int,
    target: ProductShape | None = None,
    column_tiles: int = 1,
    *,
    is_float_out: bool = False,
    is_paged: bool = False,
) -> tuple[AttentionLaunch, int]:
    """How the streams of so many rows are spread, and the blocks for each multiprocessor. A row's bits are the same with all."""
    units, is_int4 = rows * shape.units, shape.format == "int4"
    few = 8 if shape.head_dim % 64 == 0 else 4
    if units <= 30:
        plan = (few, 16 // few, 4, 1)
    elif units <= 132:
        plan = (1, 8, 2 if is_int4 else 3, 1)
    elif is_int4:
        plan = (1, 2, 2, 6)
    else:
        plan = (1, 4, 3, 2) if units <= 264 else (1, 4, 2, 3)

    def launch_of(cluster: int, num_warps: int, stages: int) -> AttentionLaunch:
        return AttentionLaunch(
            shape, cluster, num_warps, stages, target, column_tiles, is_float_out, is_paged
        )

    def fits(cluster: int, num_warps: int, stages: int, blocks: int) -> bool:
        return launch_of(cluster, num_warps, stages).shared_bytes <= _SM_BYTES // blocks - 1024

    if not fits(*plan):
        # Wide heads or many: as many warps as fit, on few blocks, with deep rings.
        plans = [
            (cluster, num_warps, stages, blocks)
            for cluster in (1, 2, 4)
            for num_warps in (2, 4, 8)
            for stages in (2, 3)
            for blocks in range(1, 7)
            if cluster * num_warps <= STREAMS and fits(cluster, num_warps, stages, blocks)
        ]
        enough = 12 if is_int4 else 8
        plan = max(plans, key=lambda p: (min(p[1] * p[3], enough), -p[0], p[2], p[1]))
    return launch_of(*plan[:3]), plan[3]
