"""The data that kernels share: packed weights, the paged cache, and how rows find their keys in it.

Plain containers of tensors, no arithmetic. The caches and rows of `gpu_worker` fill them; every backend reads them.
"""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any

from torch import Tensor

BLOCK_SIZE = 64  # key positions per block
NUM_SINKS = 4  # first keys that a cache window keeps
WAVE_WORDS, RECORD_WORDS, NUM_RECORDS = 16, 8, 16  # see `WaveBuffers`


@dataclass(frozen=True, slots=True)
class Packed:
    """A weight in its backend's own order. `data` and `scale` belong to the backend; `bias` is fp32 (num_out,) or None."""

    data: Tensor
    num_out: int
    num_in: int
    bias: Tensor | None
    scale: Tensor | None = None  # fp32, one per output, of int8 weights
    arrays: Any = field(default=None, repr=False)  # a backend's own form of the above


@dataclass(slots=True)
class PagedCache:
    """K and V of all blocks of the pool.

    Attributes:
        keys: (num_blocks, layers, kv_heads, head_dim, BLOCK_SIZE): a block's keys lie side by side, so that scores of 64 keys are
            one vector.
        values: (num_blocks, layers, kv_heads, BLOCK_SIZE, padded head_dim); the padding is zero.
    """

    keys: Tensor
    values: Tensor
    arrays: Any = field(default=None, repr=False)  # a backend's own form of the above, made once


@dataclass(slots=True)
class CutCache:
    """K and V, or the attention's inputs, of all blocks of the pool in a cut form, with exact copies of what is read exactly.

    A query reads the keys of its own block of BLOCK_SIZE positions, and the first NUM_SINKS keys, from fp16 copies, all others in
    the stored form. fp16 forms need no copies. The forms that keep inputs (h, h_int4) have one head of d_model values, no keys.
    A group of values shares a scale: int8 is q s, s = max|x| / 127; int4 is q s + z, z = min x, s = (max - min) / 15, two to a byte, the
    low half of a group in the low bits.

    Attributes:
        kind: fp16, int8 or int4.
        group: values per scale.
        keys: (num_blocks, layers, heads, stored_dim, BLOCK_SIZE), int16 (bits of fp16), int8, or uint8 with stored_dim = dim / 2.
        values: (num_blocks, layers, heads, BLOCK_SIZE, stored_dim).
        scales: (num_blocks, layers, heads, 2, scales per position, BLOCK_SIZE), bits of fp16, of keys and values (of values alone
            where there are no keys); int4 has scale and zero point per group.
        exact_keys, exact_values: like keys and values, bits of fp16, of the blocks that are still being filled.
        exact_tables: (num_slots, num_tables, max_blocks) which of them, -1 for none; empty where there are no copies.
        sink_keys, sink_values: (num_sinks, layers, heads, NUM_SINKS, dim) bits of fp16.
        sink_of: (num_blocks,) which of them belongs to a block, -1 for none.
    """

    kind: str
    group: int
    keys: Tensor
    values: Tensor
    scales: Tensor
    exact_keys: Tensor
    exact_values: Tensor
    exact_tables: Tensor
    sink_keys: Tensor
    sink_values: Tensor
    sink_of: Tensor
    arrays: Any = field(default=None, repr=False)  # a backend's own form of the above, made once


@dataclass(slots=True)
class FragmentCache:
    """K and V of all blocks in the order in which the GPU's matrix unit takes them (`kernels.fragments`): what its fast kernels read.

    One (block, layer, head) is contiguous: K, then V transposed. head_dim is a multiple of 32.

    Attributes:
        kind: fp16, or int4 (complete blocks are stored in 4 bits; the block that is being filled is read from its exact copy).
        stored: uint8 (num_blocks, layers, heads, bytes): fp16 has 256 * head_dim bytes, int4 2 * (32 * head_dim + 256).
        exact: uint8 (num_copies, layers, heads, 256 * head_dim), fp16 copies of the blocks that are being filled; with kind fp16 `stored`.
        exact_tables: int32 (num_slots, num_tables, max_blocks) which of them, -1 for none; with kind fp16 empty.
        head_dim: values per head.
        sinks: uint8 (num_sinks, layers, heads, 16 * head_dim), fp16 copies of the first NUM_SINKS keys (NUM_SINKS, head_dim), then of
            the values (head_dim, NUM_SINKS); None with kind fp16.
        sink_of: int32 (num_blocks,) which of them belongs to a block, -1 for none; None with kind fp16.
    """

    kind: str
    stored: Tensor
    exact: Tensor
    exact_tables: Tensor
    head_dim: int
    sinks: Tensor | None = None
    sink_of: Tensor | None = None


@dataclass(slots=True)
class Paging:
    """Where the rows of one pass write their own key and read all others. int32, one entry per row unless said.

    The key of position p lies at place v (v = p, or maps[row_map][p - map_base] for p >= map_base): block
    block_tables[slot, table, v // BLOCK_SIZE], offset v % BLOCK_SIZE.

    Attributes:
        slots: the row's sequence, first index of `block_tables`.
        tables: the row's table, second index: the loop that it is in, or the stage before or after.
        positions: absolute positions, for masks and ALiBi.
        places: where the row's own key goes.
        windows: how many recent keys it sees (0: all) besides the sinks.
        row_map: index into `maps`, -1 for none.
        map_base: first mapped position, a multiple of BLOCK_SIZE.
        maps: (num_maps, width) places by position.
        block_tables: (num_slots, num_tables, max_blocks) block ids.
        tiles: (num_tiles + 1) row bounds: rows of a tile follow each other and share slot and table.
    """

    slots: Tensor
    tables: Tensor
    positions: Tensor
    places: Tensor
    windows: Tensor
    row_map: Tensor
    map_base: Tensor
    maps: Tensor
    block_tables: Tensor
    tiles: Tensor
    arrays: HostPaging | None = field(default=None, repr=False)  # the same in host memory


@dataclass(frozen=True, slots=True)
class HostPaging:
    """The fields of a `Paging`, as NumPy arrays in host memory."""

    slots: Any
    tables: Any
    positions: Any
    places: Any
    windows: Any
    row_map: Any
    map_base: Any
    maps: Any
    block_tables: Any
    tiles: Any

    @staticmethod
    def of(paging: Paging) -> HostPaging:
        """That of a paging in host memory, kept there for the many passes through the layers."""
        if paging.arrays is None:
            names = [f.name for f in fields(HostPaging)]
            paging.arrays = HostPaging(*(getattr(paging, name).numpy() for name in names))
        return paging.arrays


@dataclass(slots=True)
class WaveBuffers:
    """Waves of guesses that a device runs on its own (`kernels.wave`): w sequences with r rows each, r a power of 2 up to 32.

    A wave's node at position p has row (p - base) % r of the wave's rows, which follow each other. Nodes stand at the positions from the
    root on; the root is the last committed token, the others are guesses.

    Attributes:
        states: int32 (max_waves, WAVE_WORDS), words as `kernels.wave` names them; the last two are the 64-bit noise key of the seed.
        done: int32 (max_rows,) loops that the node of each row has run.
        is_new: bool (max_rows,) rows that start cold.
        records: int32 (NUM_RECORDS, max_waves, RECORD_WORDS), a ring of what each segment did: 1 if a token was committed, the token, 1 if
            it had been guessed, guesses made, rows run. In memory that the host reads.
    """

    states: Tensor
    done: Tensor
    is_new: Tensor
    records: Tensor
