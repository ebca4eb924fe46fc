"""Where every number of the GPU's weights and cache blocks lies, as index arithmetic over PyTorch tensors.

Weights lie in the order in which `mma.sync` wants its A operand, cut into one contiguous piece for each block of
a cluster, so that a kernel fetches its whole share with a few bulk copies. Cached keys lie in the same order
(a key row is a weight row to its query), cached values transposed. Nothing here runs on the hot path.

The order within 32 columns: a lane's eight halves of B (columns `8t .. 8t+7` of lane t) are eight neighbours in
memory, so activations are staged by one 128-bit load and one 128-bit store.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from kernels.device_code import traced
from kernels.intrinsics import fmax, fmin, pack_half2, quotient, remainder
from kernels.warpgroup import swizzled

RANKS = 8  # blocks of a cluster, each with one eighth of K
BLOCK = 64  # positions of a cache block
WARPGROUP_TILES = 8  # column tiles from which products are those of warpgroups
# What activations are multiplied by before they become fp16, so that a residual stream up to a million fits; exact.
PRESCALE = 1 / 16


@dataclass(frozen=True)
class ProductShape:
    """How one product is cut: N output rows and K columns over clusters, blocks and warps.

    `group` tiles of 16 rows lie together for each rank; `sub_slices` cut a rank's K once more. The sum over
    K is fixed by (K, sub_slices) alone: 8 x sub_slices chains of `mma.sync`, added in order.
    """

    n: int
    k: int
    group: int
    sub_slices: int = 1

    @property
    def k_steps(self) -> int:
        """Steps of 16 columns of one chain (always even)."""
        per_chain = RANKS * self.sub_slices * 32
        return 2 * (-(-self.k // per_chain))

    @property
    def k_slice(self) -> int:
        """Columns of one rank, padding included."""
        return self.k_steps * self.sub_slices * 16

    @property
    def num_tiles(self) -> int:
        """Tiles of 16 rows, padded to whole groups."""
        return -(-self.n // (16 * self.group)) * self.group

    @property
    def tile_bytes(self) -> int:
        """Bytes of one tile's share of one rank."""
        return self.k_slice * 32


def pack_weight(weight: torch.Tensor, shape: ProductShape, rows: torch.Tensor) -> torch.Tensor:
    """Order (n, k) weights as [group][rank][tile][sub slice][step][lane][8] halves.

    Args:
        rows: int64 (num_tiles * 16,): which weight row each packed row is; -1 is a row of zeros.
    """
    k_padded = RANKS * shape.k_slice
    if k_padded != weight.shape[1]:
        weight = torch.nn.functional.pad(weight, (0, k_padded - weight.shape[1]))
    padded = torch.cat([weight.half(), weight.new_zeros(1, k_padded).half()])
    tiles = padded[rows]  # index -1 is the row of zeros
    groups = shape.num_tiles // shape.group
    parts = tiles.view(
        groups, shape.group, 2, 8, RANKS, shape.sub_slices, shape.k_steps // 2, 4, 2, 2, 2
    )
    # axes: 0 group 1 tile 2 high row 3 g 4 rank 5 sub slice 6 32 columns 7 t 8 step 9 high column 10 half
    return parts.permute(0, 4, 1, 5, 6, 8, 3, 7, 9, 2, 10).contiguous().view(-1)


def plain_rows(n: int, shape: ProductShape) -> torch.Tensor:
    """Rows so that a lane's pair is two neighbours: (2g, 2g+1) of each 16."""
    tile = torch.arange(16).view(8, 2).t().reshape(-1)
    rows = (torch.arange(shape.num_tiles).view(-1, 1) * 16 + tile).reshape(-1)
    return torch.where(rows < n, rows, -1)


def gated_rows(d_ff: int, shape: ProductShape) -> torch.Tensor:
    """Rows of [gate; up] so that a lane's pair is (gate, up) of one hidden unit; 8 units a tile."""
    unit = torch.arange(shape.num_tiles).view(-1, 1) * 8 + torch.arange(8)
    gate = torch.where(unit < d_ff, unit, -1)
    up = torch.where(unit < d_ff, unit + d_ff, -1)
    return torch.cat([gate, up], 1).reshape(-1)


def head_dims(head_dim: int, is_half: bool) -> torch.Tensor:
    """(head_dim/16, 16) dims of a head's tiles so that a lane's pair is one rotary pair."""
    pair = torch.arange(head_dim // 2).view(-1, 8)
    if is_half:
        return torch.cat([pair, pair + head_dim // 2], 1)
    return torch.cat([2 * pair, 2 * pair + 1], 1)


def qkv_rows(
    n_heads: int, n_kv_heads: int, head_dim: int, is_half: bool, shape: ProductShape
) -> torch.Tensor:
    """Rows of [q; k; v] in tiles of rotary pairs (q and k) or neighbours (v)."""
    turned = head_dims(head_dim, is_half).reshape(-1)
    plain = head_dims(head_dim, False).reshape(-1)
    parts = [
        head * head_dim + (turned if head < n_heads + n_kv_heads else plain)
        for head in range(n_heads + 2 * n_kv_heads)
    ]
    rows = torch.cat(parts)
    return torch.nn.functional.pad(rows, (0, shape.num_tiles * 16 - rows.numel()), value=-1)


def packed_place(row: Any, column: Any, shape: ProductShape, column_tiles: int) -> Any:
    """Where fp16 activation (row, column) lies in the order in which `shape` reads it, in halves.

    [chunk of 8 x column_tiles rows][rank][32 columns][column tile][row][16-byte unit][8]: one contiguous piece a block.
    A unit holds what a lane of `mma.sync` needs of 32 columns or, for warpgroups, a quarter of what each of four lanes needs.
    """
    rows = 8 * column_tiles
    chunk, in_chunk = quotient(row, rows), remainder(row, rows)
    rank, in_slice = quotient(column, shape.k_slice), remainder(column, shape.k_slice)
    piece = (chunk * RANKS + rank) * (shape.k_slice // 32) + (in_slice >> 5)
    row8, lane, half = in_chunk & 7, (in_slice >> 3) & 3, in_slice & 7
    unit, place = lane, half
    if is_for_warpgroups(column_tiles):
        unit, place = swizzled(half >> 1, row8), lane * 2 + (half & 1)
    return ((piece * column_tiles + (in_chunk >> 3)) * 32 + row8 * 4 + unit) * 8 + place


def is_for_warpgroups(column_tiles: int) -> bool:
    """Whether products of 8 x column_tiles rows are those of warpgroups, which read x in an order of their own."""
    return column_tiles >= WARPGROUP_TILES


def packed_size(rows: int, shape: ProductShape, column_tiles: int) -> int:
    """Halves of an activation buffer for `rows` rows."""
    return -(-rows // (8 * column_tiles)) * 8 * column_tiles * RANKS * shape.k_slice


@traced("r")
def pack_prescaled(low: Any, high: Any) -> Any:
    """Two floats times PRESCALE as halves; what fp16 cannot hold becomes the largest number that it can."""
    return pack_half2(*(fmax(fmin(x * PRESCALE, 65504.0), -65504.0) for x in (low, high)))


# --- cache blocks ----------------------------------------------------------------------------------


def pack_keys(keys: torch.Tensor) -> torch.Tensor:
    """(..., 64, head_dim) keys in the order of a block's K part: (..., 64 * head_dim)."""
    *lead, _, dim = keys.shape
    parts = keys.reshape(*lead, 4, 2, 8, dim // 32, 4, 2, 2, 2)
    n = len(lead)
    # axes: 0 tile 1 high row 2 g 3 32 columns 4 t 5 step 6 high column 7 half
    order = [n + i for i in (0, 3, 5, 2, 4, 6, 1, 7)]
    return parts.permute(*range(n), *order).reshape(*lead, BLOCK * dim)


def unpack_keys(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `pack_keys`."""
    *lead, _ = packed.shape
    n = len(lead)
    parts = packed.reshape(*lead, 4, dim // 32, 2, 8, 4, 2, 2, 2)
    # axes: 0 tile 1 32 columns 2 step 3 g 4 t 5 high column 6 high row 7 half
    order = [n + i for i in (0, 6, 3, 1, 4, 2, 5, 7)]
    return parts.permute(*range(n), *order).reshape(*lead, BLOCK, dim)


def pack_values(values: torch.Tensor) -> torch.Tensor:
    """(..., 64, head_dim) values, transposed, in the order of a block's V part."""
    *lead, _, dim = values.shape
    parts = values.transpose(-1, -2).reshape(*lead, dim // 16, 2, 8, 4, 2, 4, 2)
    n = len(lead)
    # axes: 0 tile 1 high row 2 g 3 step 4 high column 5 t 6 half
    order = [n + i for i in (0, 3, 2, 5, 4, 1, 6)]
    return parts.permute(*range(n), *order).reshape(*lead, BLOCK * dim)


def unpack_values(packed: torch.Tensor, dim: int) -> torch.Tensor:
    """The inverse of `pack_values`."""
    *lead, _ = packed.shape
    n = len(lead)
    parts = packed.reshape(*lead, dim // 16, 4, 8, 4, 2, 2, 2)
    # axes: 0 tile 1 step 2 g 3 t 4 high column 5 high row 6 half
    order = [n + i for i in (0, 5, 2, 1, 4, 3, 6)]
    return parts.permute(*range(n), *order).reshape(*lead, dim, BLOCK).transpose(-1, -2)


def key_place(position: Any, d: Any, dim: int) -> Any:
    """Where element (position, d) of a block's keys lies, in halves from the block's start."""
    step = (position >> 4) * (dim // 16) + (d >> 5) * 2 + ((d >> 2) & 1)
    lane = (position & 7) * 4 + ((d >> 3) & 3)
    return (step * 32 + lane) * 8 + (((d >> 1) & 1) * 2 + ((position >> 3) & 1)) * 2 + (d & 1)


def value_place(position: Any, d: Any) -> Any:
    """Where element (position, d) of a block's values lies, in halves from the V part's start."""
    step = (d >> 4) * 4 + (position >> 4)
    lane = (d & 7) * 4 + ((position >> 1) & 3)
    return (
        (step * 32 + lane) * 8 + (((position >> 3) & 1) * 2 + ((d >> 3) & 1)) * 2 + (position & 1)
    )


def quantise_int4(block: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(..., 64, dim) float32 -> numbers n 0..15, scale and offset (..., 64) fp16; x = scale * n + offset.

    The offset is each position's least value; a flat position has scale 0. Ties go to the even number.
    """
    low, high = block.amin(-1), block.amax(-1)
    scale, offset = ((high - low) / 15).half(), low.half()
    divisor = torch.where(scale > 0, scale.float(), torch.inf)
    numbers = ((block - offset.float().unsqueeze(-1)) / divisor.unsqueeze(-1)).round()
    return numbers.clamp(0, 15).to(torch.uint8), scale, offset


def pack_int4(block: torch.Tensor, *, is_value: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """A block's stored K or V part, (..., 32 * dim + 256) bytes, and what it stands for (..., 64, dim).

    A 32-bit word holds one lane's eight halves of one tile and step: nibbles 0 and 4 are the first pair, 1 and
    5 the second, 2 and 6 the third, 3 and 7 the fourth. Four words of a lane lie together: steps of a tile, and where a tile's
    steps are no multiple of four those of the next one.
    """
    *lead, _, dim = block.shape
    numbers, scale, offset = quantise_int4(block)
    order = pack_values(numbers) if is_value else pack_keys(numbers)
    # (..., four steps, step, lane, pair, half)
    halves = order.reshape(*lead, dim // 16, 4, 32, 4, 2).int()
    shift = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], device=block.device)
    words = (halves.long() << shift).sum((-1, -2)).transpose(-1, -2)
    packed = words.to(torch.int64).reshape(*lead, -1)
    data = (packed - (packed >= 1 << 31).long() * (1 << 32)).int().contiguous().view(torch.uint8)
    pairs = torch.stack([scale, offset], -1).contiguous().view(torch.uint8).reshape(*lead, 256)
    restored = scale.float().unsqueeze(-1) * numbers.float() + offset.float().unsqueeze(-1)
    return torch.cat([data, pairs], -1), restored


def unpack_int4(packed: torch.Tensor, dim: int, *, is_value: bool) -> torch.Tensor:
    """What a stored K or V part stands for: (..., 64, dim) float32."""
    *lead, _ = packed.shape
    words = packed[..., : 32 * dim].contiguous().view(torch.int32).reshape(*lead, dim // 16, 32, 4)
    shift = torch.tensor([[0, 16], [4, 20], [8, 24], [12, 28]], device=packed.device)
    numbers = (words.transpose(-1, -2)[..., None, None] >> shift) & 15
    flat = numbers.reshape(*lead, BLOCK * dim).float()
    block = unpack_values(flat, dim) if is_value else unpack_keys(flat, dim)
    pairs = packed[..., 32 * dim :].contiguous().view(torch.half).reshape(*lead, BLOCK, 2).float()
    return pairs[..., :1] * block + pairs[..., 1:]
