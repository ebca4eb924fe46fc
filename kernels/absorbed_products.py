"""What the products around attention over cached inputs share: W_q, W_k^T and W_v by head, in clusters of 8 blocks.

A cluster owns a head. For W_q and W_v each block multiplies one eighth of K (8 chains, added as `linear_parts.add_chains` does); for
W_k^T q each makes one eighth of the outputs (one chain over head_dim). A row's bits depend on neither the row count nor its place.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.absorbed_shape import GROUP, AbsorbedShape, average_values
from kernels.device_code import traced
from kernels.fragments import (
    RANKS,
    ProductShape,
    pack_weight,
    plain_rows,
)
from kernels.intrinsics import (
    load_matrices,
    load_shared_128,
    load_shared_f32x2,
    map_shared,
    mma,
    store_async_f32x2,
)
from kernels.linear_parts import add_chains
from kernels.warpgroup import swizzled

VALUE_WARPS = 8


def product_shape(shape: AbsorbedShape) -> ProductShape:
    """How W_q, and W_v by query head, are cut: a head's tiles for a cluster."""
    return ProductShape(shape.n_heads * shape.head_dim, shape.d_model, shape.head_dim // 16)


@dataclass(frozen=True)
class ProductLaunch:
    """`column_tiles` is the batch in eights; `store_clusters` write x to the cache (in `query` alone)."""

    shape: AbsorbedShape
    column_tiles: int
    store_clusters: int = 1

    @property
    def columns(self) -> int:
        return 8 * self.column_tiles

    @property
    def tiles(self) -> int:
        """Of a head's outputs."""
        return self.shape.head_dim // 16

    @property
    def num_warps(self) -> int:
        return max(self.tiles, self.shape.groups)

    @property
    def weight_bytes(self) -> int:
        return self.tiles * product_shape(self.shape).tile_bytes

    @property
    def fold_tile_bytes(self) -> int:
        return self.shape.head_dim * 32

    @property
    def x_bytes(self) -> int:
        return product_shape(self.shape).k_slice * self.columns * 2

    @property
    def sum_slots(self) -> int:
        """Pairs of 8 that one block sends to one owner."""
        return -(-self.tiles * self.columns // RANKS)

    @property
    def staged_items(self) -> int:
        """Eights of averages that a thread of `values` joins."""
        return -(-self.columns * product_shape(self.shape).k_slice // 8 // (32 * VALUE_WARPS))

    @property
    def store_items(self) -> int:
        """Groups of rows that a warp of the clusters that write x writes."""
        return -(
            -self.columns * self.shape.groups // (self.store_clusters * RANKS * self.num_warps)
        )

    @property
    def q_bytes(self) -> int:
        return self.shape.head_dim * self.columns * 2


# --- weights ---------------------------------------------------------------------------------------


def pack_heads(weight: torch.Tensor, shape: AbsorbedShape) -> torch.Tensor:
    """W_q, (n_heads * head_dim, d) fp16, in the order of the products."""
    product = product_shape(shape)
    return pack_weight(weight, product, plain_rows(product.n, product).to(weight.device))


def pack_values(weight: torch.Tensor, shape: AbsorbedShape) -> torch.Tensor:
    """W_v (n_kv_heads * head_dim, d) in the order of the products: heads repeated for their query heads, columns as averages lie."""
    heads = weight.view(shape.n_kv_heads, shape.head_dim, shape.groups, GROUP)[
        ..., average_values()
    ]
    return pack_heads(
        heads.repeat_interleave(shape.n_heads // shape.n_kv_heads, 0).view(-1, shape.d_model), shape
    )


def fold_values(shape: AbsorbedShape) -> torch.Tensor:
    """Which value of x each row of the packed W_k^T is: (d / 16, 16); rows g and g + 8 of a tile are one word of the query."""
    tile = torch.arange(shape.d_model // 16).view(-1, 1)
    g = torch.arange(8)
    t, word = (tile & 1) * 2 + (g >> 2), g & 3
    value = (tile >> 3) * GROUP + ((tile & 7) >> 1) * 16 + t * 4 + (word & 1) + 64 * (word >> 1)
    return torch.cat([value, value + 2], 1)


def pack_fold(weight: torch.Tensor, shape: AbsorbedShape) -> torch.Tensor:
    """W_k (n_kv_heads * head_dim, d), transposed by head, as [kv head][tile of 16 values][step][lane][8] halves."""
    heads = weight.half().view(shape.n_kv_heads, shape.head_dim, shape.d_model).transpose(1, 2)
    rows = heads[:, fold_values(shape).flatten().to(weight.device)]
    parts = rows.view(shape.n_kv_heads, -1, 2, 8, shape.head_dim // 32, 4, 2, 2, 2)
    # axes: 0 head 1 tile 2 high row 3 g 4 32 columns 5 t 6 step 7 high column 8 half
    return parts.permute(0, 1, 4, 6, 3, 5, 7, 2, 8).contiguous().view(-1)


# --- pieces ----------------------------------------------------------------------------------------


def make_multiply(num_pairs: int, column_tiles: int, *, is_ordered: bool = False) -> Any:
    """`is_ordered`: x has the order of warpgroups."""
    load = load_matrices if is_ordered else load_shared_128

    @traced("f" * (4 * column_tiles))
    def multiply(weights: Any, x: Any, lane: Any) -> Any:
        """acc[column tile][4] of one tile of 16 outputs over steps of 16 columns, taken in pairs."""
        row = lane & 7
        x += row * 64 + swizzled(lane >> 3, row) * 16 if is_ordered else lane * 16
        acc: list[Any] = [(0.0, 0.0, 0.0, 0.0)] * column_tiles
        for pair in range(num_pairs):
            a = [load_shared_128(weights + (2 * pair + step) * 512) for step in range(2)]
            for c in range(column_tiles):
                b = load(x + (pair * column_tiles + c) * 512)
                for step in range(2):
                    acc[c] = mma(*acc[c], *a[step], *b[2 * step : 2 * step + 2])
        return tuple(value for part in acc for value in part)

    return multiply


def make_send(launch: ProductLaunch) -> Any:
    tiles, slots = launch.tiles, launch.sum_slots

    @traced()
    def send(acc: Any, sums: Any, tile: Any, rank: Any, lane: Any, rows: Any, bar: Any) -> None:
        """Give a tile's partial sums to the blocks that finish them: (row, tile) belongs to rank (row * tiles + tile) % 8."""
        g, t = lane >> 2, lane & 3
        for c in range(launch.column_tiles):
            for odd in range(2):
                m = 8 * c + 2 * t + odd
                unit = m * tiles + tile
                there = map_shared(sums + (rank * slots + (unit >> 3)) * 64 + g * 8, unit & 7)
                pair = acc[4 * c + odd], acc[4 * c + odd + 2]
                store_async_f32x2(there, *pair, map_shared(bar, unit & 7), rows - m)

    return send


def make_collect(launch: ProductLaunch) -> Any:
    slots = launch.sum_slots

    @traced("ff")
    def collect(sums: Any, unit: Any, g: Any) -> Any:
        local = sums + (unit >> 3) * 64 + g * 8
        return add_chains([load_shared_f32x2(local + i * slots * 64) for i in range(RANKS)])

    return collect
