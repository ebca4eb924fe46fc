"""The shapes of attention over cached inputs: the model's side, and how a launch spreads it over blocks."""

from __future__ import annotations

from dataclasses import dataclass

GROUP = 128  # values of the input that share a scale, and that one warp owns
SCALES_AT = (
    64 * GROUP // 2
)  # in a stage: first the codes of 64 positions, then their scales, then their zeros
STAGE_BYTES = SCALES_AT + 256
PIECE = 16  # positions of a piece of an exact block, which fills a stage as 64 stored ones do
SCORE_ROW = 68  # floats from head to head of a group's scores: stores of a warp meet no bank twice
# Entries of the lists of units, as `absorbed_plan` says: kinds, flags, and where the chain and the number of units lie beside them.
STORED, EXACT, SINKS, NOTHING = 0, 1, 2, 3  # kinds of units
KIND, FIRST, LAST, STABLE, SINKS_APART = 3, 4, 8, 16, 32  # flags
CHAIN_SHIFT, COUNT_SHIFT = 8, 16
ENTRY_BYTES = 16
_STORED_CHAINS = 8  # a power of two; with 16 one row is faster and 64 rows are slower
_JOINED = 2  # blocks a row with which each block joins its half of the chains


@dataclass(frozen=True)
class AbsorbedShape:
    """The model's side. `kind` is the cache's: fp16 (h) or int4 (h_int4, groups of 128 values).

    Raises:
        ValueError: d_model is no multiple of 128 up to 2048, or there are more than 16 heads.
    """

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    kind: str = "int4"
    has_alibi: bool = False

    def __post_init__(self) -> None:
        if self.d_model % GROUP or self.groups > 16 or self.n_heads > 16 or self.head_dim % 32:
            raise ValueError(f"no absorbed attention for {self}")

    @property
    def is_cut(self) -> bool:
        return self.kind == "int4"

    @property
    def stored_chains(self) -> int:
        return _STORED_CHAINS

    @property
    def chains(self) -> int:
        """Chains of a row; with exact copies each half has one more, of the own block or of the sinks."""
        return self.stored_chains + 2 * self.is_cut

    @property
    def groups(self) -> int:
        """Groups of values, and warps."""
        return self.d_model // GROUP

    @property
    def columns(self) -> int:
        """Heads, rounded up to fours."""
        return -(-self.n_heads // 4) * 4

    @property
    def tiles(self) -> int:
        """Column tiles of 8."""
        return -(-self.columns // 8)

    @property
    def warp_heads(self) -> int:
        """Heads whose softmax one warp does."""
        return -(-self.columns // self.groups)

    @property
    def num_sums(self) -> int:
        """Floats of a lane's sums: 8 tiles of 16 values x column tiles x 4, and of the zeros x column tiles x 2."""
        return self.tiles * (32 + 2 * self.is_cut)

    @property
    def num_words(self) -> int:
        """Words of a lane's averages."""
        return 2 * self.columns

    @property
    def group_bytes(self) -> int:
        """A group's part of a row's query."""
        return GROUP * self.columns * 2

    @property
    def query_bytes(self) -> int:
        """A row's query, in the order of `query_place`."""
        return self.groups * self.group_bytes

    @property
    def row_bytes(self) -> int:
        """A stored position's codes (or halves)."""
        return self.d_model // 2 if self.is_cut else self.d_model * 2

    @property
    def scale(self) -> float:
        """What queries are multiplied by: scores are exponents of 2."""
        return float(1.4426950408889634 / self.head_dim**0.5)


def query_place(shape: AbsorbedShape, head: int, value: int) -> tuple[int, bool]:
    """Where a query's value lies in its row (in halves), and whether it belongs to the high codes.

    [group][column tile][step][column][t][low pair, low pair + 1, high pair, high pair + 1]: fragments of 8 dims.
    """
    group, i = divmod(value, GROUP)
    is_high, i = i >= 64, i % 64
    step, t, odd, half = i >> 4, (i >> 2) & 3, i & 1, (i >> 1) & 1
    tile = head >> 3
    width = min(8, shape.columns - 8 * tile)
    word = ((step * width + (head & 7)) * 4 + t) * 4 + 2 * is_high + odd
    return group * shape.group_bytes // 2 + tile * 1024 + word * 2 + half, is_high


def average_values() -> list[int]:
    """Which of a group's values lies where in averages: what a lane has of a head is then two times 16 bytes."""
    return [
        (at & 1) * 64 + (at >> 1) * 16 + 2 * g + half
        for four in range(2)
        for g in range(8)
        for at in range(4 * four, 4 * four + 4)
        for half in range(2)
    ]


@dataclass(frozen=True)
class AbsorbedLaunch:
    """`split` blocks share a row's chains: 2 write the averages of their halves, others those of every chain.

    `ahead` units (1 or 2) are on their way before the kernel in front has ended: 2 where all blocks run beside that, else the copies of the
    second between products cost less.
    """

    shape: AbsorbedShape
    split: int
    ahead: int = 1

    @property
    def is_joined(self) -> bool:
        return self.split == _JOINED

    @property
    def slots(self) -> int:
        """Averages of a row."""
        return _JOINED if self.is_joined else self.shape.chains

    @property
    def block_chains(self) -> int:
        return self.shape.chains // self.split

    @property
    def ring_bytes(self) -> int:
        return self.shape.groups * 2 * STAGE_BYTES

    @property
    def partials_bytes(self) -> int:
        return self.shape.groups * self.shape.columns * SCORE_ROW * 4

    @property
    def kept_bytes(self) -> int:
        return self.shape.num_words * 128 * self.shape.groups if self.is_joined else 0

    @property
    def shared_bytes(self) -> int:
        # p, shares, what is joined, corrections; sums of queries
        small = self.shape.columns * (128 + 16 + 8 + 4 + 4 * self.shape.groups)
        return (
            self.ring_bytes + self.shape.query_bytes + self.partials_bytes + small + self.kept_bytes
        )
