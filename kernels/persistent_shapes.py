"""What the persistent kernel is made for: the model's products and attention, and its place in shared memory."""

from __future__ import annotations

from dataclasses import dataclass

from kernels.attention import AttentionShape
from kernels.attention_int4_parts import heads_of
from kernels.attention_shapes import STREAMS
from kernels.fragments import ProductShape, packed_size
from kernels.linear_shapes import HeadShape
from kernels.persistent_parts import (
    num_chains,
    num_streams,
    pitch_of,
    result_words,
)
from kernels.persistent_shares import seats, share_tiles

PRODUCTS = ("qkv", "o", "gate_up", "down", "head")
POINTERS = 6  # of a layer: qkv, o, gate_up, down, the gains before qkv and before gate_up
PIECE_BYTES = 2048  # of attention's copies: 16 positions x 64 dims of keys, or 16 dims of values


@dataclass(frozen=True)
class CoreShape:
    """The model's side: its products as `graphs.product_shapes` cuts them; the cache is fp16 or int4."""

    d_model: int
    d_ff: int
    layers: int
    heads: HeadShape
    attention: AttentionShape
    qkv: ProductShape
    o: ProductShape
    gate_up: ProductShape
    down: ProductShape
    head: ProductShape

    @property
    def products(self) -> list[ProductShape]:
        return [getattr(self, name) for name in PRODUCTS]

    @property
    def told(self) -> dict[str, int]:
        """Bytes of 8 rows of what is told in a layer call, by name."""
        heads = self.heads
        return {
            "normed": 2 * packed_size(8, self.qkv, 1),
            "squares": 4 * 8 * (self.d_model // 16),
            "q": 2 * 8 * heads.n_heads * heads.head_dim,
            "k": 2 * 8 * heads.n_kv_heads * heads.head_dim,
            "v": 2 * 8 * heads.n_kv_heads * heads.head_dim,
            "mixed": 2 * packed_size(8, self.o, 1),
            "normed_2": 2 * packed_size(8, self.gate_up, 1),
            "squares_2": 4 * 8 * (self.d_model // 16),
            "hidden": 2 * packed_size(8, self.down, 1),
        }

    @property
    def told_at(self) -> dict[str, int]:
        """Where these lie within a layer call's memory; `end`: its bytes."""
        at, places = 0, {}
        for name, size in self.told.items():
            places[name] = at
            at += -(-size // 256) * 256
        return {**places, "end": at}


@dataclass(frozen=True)
class CoreLaunch:
    """`rows` (1, or 8 for up to 8) are computed; `groups` of four warps; each warp has `slots` of `slot_bytes`.

    A block finishes up to `most_tiles` tiles of 8 chains at a time. A warp has `in_flight` pieces on their way, more where it is
    short of them: with `urgent` a piece is asked for, too, as soon as the one `urgent` places before it was used up.
    `team`: groups that share an item of attention, as many blocks of a stream at a time. `at_once`: streams of stored blocks that a
    group has at a time, 1 or 4. `has_prefetch`: while the rings wait for attention,
    weights of down, for which they have no room yet, come into the L2 cache.
    """

    shape: CoreShape
    rows: int
    groups: int = 4
    slots: int = 6
    slot_bytes: int = PIECE_BYTES
    in_flight: int = 1
    urgent: int = 0
    has_prefetch: bool = False
    team: int = 1
    at_once: int = 1
    most_tiles: int = 4

    @property
    def warps(self) -> int:
        return 4 * self.groups

    @property
    def num_items(self) -> int:
        """Items of attention of a (row, unit)."""
        return num_streams(self.shape.attention) - STREAMS + STREAMS // self.at_once

    def round_tiles(self, product: ProductShape) -> int:
        """Tiles that a block finishes at a time: their sums find room, and threads."""
        fitting = min(self.most_tiles * 8 // num_chains(product), 4 * self.warps // self.rows)
        return max(1, fitting - fitting % 2)

    def parts(self, product: ProductShape) -> int:
        """Pieces of a chain, each of an equal number of steps and no larger than a slot."""
        steps = product.k_steps
        return next(
            n for n in range(1, steps + 1) if steps % n == 0 and steps // n * 512 <= self.slot_bytes
        )

    @property
    def sums_bytes(self) -> int:
        """Of a chain's sums of one tile."""
        return self.rows * pitch_of(self.rows)

    @property
    def sums_at(self) -> int:
        return self.warps * self.slots * self.slot_bytes

    @property
    def buffer_bytes(self) -> int:
        """Of one of two buffers for the sums of the tiles that are finished at a time, and the rows' factors."""
        most = max(self.round_tiles(p) * num_chains(p) for p in self.shape.products)
        return most * self.sums_bytes + 32

    @property
    def scores_bytes(self) -> int:
        """Of the scores of a block of the cache that a group works on."""
        return 256 * self.shape.attention.group

    @property
    def area_bytes(self) -> int:
        """Of a group: two blocks' scores and two queries."""
        return 2 * self.scores_bytes + 2 * self.query_stride

    @property
    def query_stride(self) -> int:
        """Of a query, and with int4 its integers."""
        attention = self.shape.attention
        heads = attention.group + (heads_of(attention) if attention.format == "int4" else 0)
        return 2 * heads * attention.head_dim

    @property
    def areas_at(self) -> int:
        return self.sums_at + 2 * self.buffer_bytes

    @property
    def bars_at(self) -> int:
        return self.areas_at + self.groups * self.area_bytes

    @property
    def shared_bytes(self) -> int:
        return self.bars_at + self.warps * self.slots * 16


def results_size(shape: AttentionShape, rows: int) -> int:
    """Words (each with its tag) of the buffer of stream results."""
    return rows * shape.units * num_streams(shape) * shape.group * result_words(shape)


def share_words(shape: CoreShape, num_blocks: int) -> list[int]:
    """As the kernel reads it, 8 int32 a block: of `share_tiles`, first << 12 | count << 1 | half; of `seats`, the block's."""
    shares, words = share_tiles(shape.products, num_blocks), list[int]()
    for share, seat in zip(shares, seats(shares), strict=True):
        words += [first << 12 | count << 1 | half for first, count, half in share] + [seat, 0, 0]
    return words
