"""Decode steps as CUDA graphs: static buffers, one graph per row bucket, one replay per token.

Owns the launches of a pre-norm, RMS, SwiGLU model's step (embedding, loops x layers, head) and nothing of
requests: whoever drives it writes tokens, positions and tables into the buffers and replays. Every kernel may
start while the one in front still runs; each waits before it touches what the step writes.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from kernels import attention, fragments, linear, step
from kernels.attention import AttentionLaunch, AttentionShape
from kernels.compiler import Variant
from kernels.fragments import ProductShape
from kernels.launch import Library
from kernels.linear_shapes import (
    CLUSTERS,
    SHARED_BLOCK_BYTES,
    HeadShape,
    Launch,
    WideLaunch,
)

_SHARE_BYTES = 109 * 1024  # of those, weights
_SM_BYTES = 227 * 1024  # the most that one block can have
_RESIDENT = {
    2: 66,
    4: 31,
    8: CLUSTERS,
}  # clusters of so many blocks that run at a time, one block a multiprocessor


@dataclass(frozen=True)
class DecodeSpec:
    """The model and the cache of a runner; lengths in positions, formats as in `attention.py`."""

    d_model: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    d_ff: int
    vocab: int
    layers: int
    loops: int
    norm_eps: float = 1e-6
    is_rotary: bool = True
    is_half_pairing: bool = True
    theta: float = 10000.0
    max_pos: int = 2048
    kv_format: str = "fp16"
    has_alibi: bool = False

    @property
    def heads(self) -> HeadShape:
        return HeadShape(
            self.n_heads, self.n_kv_heads, self.head_dim, self.is_rotary, self.is_half_pairing
        )

    @property
    def attention(self) -> AttentionShape:
        return AttentionShape.of(
            self.n_heads, self.n_kv_heads, self.head_dim, self.kv_format, self.has_alibi
        )

    @property
    def exact_block_bytes(self) -> int:
        return self.layers * self.n_kv_heads * self.heads.head_bytes

    @property
    def stored_block_bytes(self) -> int:
        return self.layers * self.n_kv_heads * self.attention.stored_head_bytes


REFERENCE = DecodeSpec(1536, 12, 12, 128, 4096, 50257, 4, 8)

# What `scripts/check_ptx.py` compiles.
CHECKED_SPECS = {
    "1b": REFERENCE,
    "1b-int4": replace(REFERENCE, kv_format="int4"),
}


def launches_to_try(
    spec: DecodeSpec, rows: int
) -> dict[str, dict[str, Launch | WideLaunch | AttentionLaunch]]:
    """Other launch shapes worth a measurement, by name (`scripts/gpu_check.py --try`)."""
    shapes, tiles = product_shapes(spec), column_tiles_for(rows)
    names = ("qkv", "o", "gate_up", "down")
    if tiles > 1:
        gate_up = replace(wide_launch(shapes["gate_up"], tiles), warps=4)
        return {"gate_up with two tiles a warp": {"gate_up": gate_up}} if tiles == 8 else {}
    found: dict[str, dict[str, Launch | WideLaunch | AttentionLaunch]] = {
        "head by streams": {"head": wide_head(shapes["head"], tiles)}
    }
    if rows == 1:
        found["layers by streams"] = {name: wide_launch(shapes[name], tiles) for name in names}
    return found


def product_shape(n: int, k: int) -> ProductShape:
    """How an (n, k) product is cut: runs of tiles that fit a block beside the next kernel's; long chains halved."""
    tiles = -(-n // 16)
    sub_slices = 2 if k > 24 * 128 else 1
    tile_bytes = ProductShape(n, k, 1, sub_slices).tile_bytes
    # 30 clusters run at a time if two of their blocks fit a multiprocessor; all must, or there is a second wave.
    most = max(2, _SHARE_BYTES // tile_bytes)
    sizes = [size for size in range(2, most + 1, 2) if -(-tiles // size) <= 2 * CLUSTERS] or [most]
    padded = {size: -(-tiles // size) * size for size in sizes}
    best = min(padded.values())
    group = min(size for size in sizes if padded[size] == best)
    return ProductShape(n, k, group, sub_slices)


def product_launch(shape: ProductShape, column_tiles: int, rows: int) -> Launch | WideLaunch:
    """The launch for up to 8 x column_tiles rows; one row has its own."""
    return few_launch(shape) if rows == 1 else wide_launch(shape, column_tiles)


def few_launch(shape: ProductShape) -> Launch:
    """The launch for one row: all weights of all blocks in flight from the start."""
    chains = shape.group * shape.sub_slices
    num_warps = chains if shape.sub_slices > 1 else max(w for w in range(1, 11) if chains % w == 0)
    return Launch(shape, shape.group, num_warps)


def wide_launch(shape: ProductShape, column_tiles: int) -> WideLaunch:
    """The launch for more rows: one wave of blocks, each with room beside it for the next kernel's."""
    if fragments.is_for_warpgroups(column_tiles):
        return _warpgroup_launch(shape, column_tiles)
    steps = next(steps for steps in (8, 4, 2) if shape.k_steps % steps == 0)
    parts = WideLaunch(shape, 1, 1, 1, column_tiles, 1, steps).parts
    most = _RESIDENT.get(parts, CLUSTERS)
    # Every part of K finishes as much of a block's outputs as any other.
    sizes = [t for t in (2, 4, 6, 8) if t * column_tiles % parts == 0]
    tiles = next((t for t in sizes if -(-shape.n // (16 * t)) <= most), 8)
    warps, column_warps = _wide_warps(tiles, column_tiles, parts, 4)
    launch = WideLaunch(shape, tiles, warps, column_warps, column_tiles, 1, steps)
    return _deepest(launch, SHARED_BLOCK_BYTES)


def _warpgroup_launch(shape: ProductShape, column_tiles: int) -> WideLaunch:
    """The same by warpgroups, as was measured: a deep ring pays more than room for the next kernel's, but for long K and small blocks."""
    parts = WideLaunch(shape, 4, 4, 1, column_tiles, 1, 2).parts
    most = _RESIDENT.get(parts, CLUSTERS)
    # With so much to do, smaller blocks pay even where two share a multiprocessor.
    tiles = 4 if -(-shape.n // 64) <= most + most // 10 else 8
    whole = WideLaunch(shape, tiles, tiles, 1, column_tiles, 1, shape.k_steps)
    if parts == 2 and whole.clusters <= most:
        launch = _deepest(whole, _SM_BYTES)
        if launch.stages == launch.block_steps and launch.shared_bytes <= _SM_BYTES:
            return launch
        deep = next(n for n in (6, 4, 2) if shape.k_steps % n == 0)
        return _deepest(replace(whole, steps=deep), _SM_BYTES)
    if parts == 2:
        few = 4 if shape.k_steps % 4 == 0 else 2
        return _deepest(replace(whole, steps=few), SHARED_BLOCK_BYTES)
    steps = [n for n in range(2, shape.k_steps // 2 + 1, 2) if shape.k_steps % n == 0] or [2]
    launches = [_deepest(replace(whole, steps=n), SHARED_BLOCK_BYTES) for n in steps]
    return [launch for launch in launches if launch.stages > 2 or launch.steps == 2][-1]


def _wide_warps(tiles: int, column_tiles: int, parts: int, num_warps: int) -> tuple[int, int]:
    """Over how many warps tiles and columns are spread: about `num_warps` in all, with the least shared memory traffic."""
    ways = [
        (warps, column_warps)
        for warps in range(1, tiles + 1)
        for column_warps in (1, 2, 4, 8)
        if tiles % warps == 0
        and column_tiles % column_warps == 0
        and tiles * column_tiles // (warps * column_warps) % parts == 0
    ]
    return min(
        ways,
        key=lambda way: (
            abs(way[0] * way[1] - num_warps),
            way[0] / tiles + 2 * way[1] / column_tiles,
        ),
    )


def _deepest(launch: WideLaunch, most_bytes: int) -> WideLaunch:
    """`launch` with as many ring stages as fit, two at least."""
    deep = (replace(launch, stages=n) for n in range(launch.block_steps, 2, -1))
    fitting = (one for one in deep if one.shared_bytes <= most_bytes)
    return next(fitting, replace(launch, stages=2))


def head_launch(shape: ProductShape, column_tiles: int, rows: int) -> Launch | WideLaunch:
    """The head: rounds through a ring, on the whole device."""
    few = [Launch(shape, shape.group, 8, stages, 1 if rows == 1 else 8) for stages in (4, 3, 2)]
    fitting = [launch for launch in few if launch.shared_bytes <= _SM_BYTES]
    if column_tiles == 1 and fitting:
        return fitting[0]
    return wide_head(shape, column_tiles)


def wide_head(shape: ProductShape, column_tiles: int) -> WideLaunch:
    """Each block keeps its part of x for all rounds, if that leaves room for a ring."""
    one = wide_launch(shape, column_tiles)
    most = _RESIDENT.get(one.parts, CLUSTERS)
    kept = _deepest(replace(one, stages=2, is_x_kept=True, max_clusters=most), _SM_BYTES)
    if kept.shared_bytes <= _SM_BYTES and kept.stages > 2:
        return kept
    return _deepest(replace(one, stages=2, max_clusters=most), _SM_BYTES)


def product_shapes(spec: DecodeSpec) -> dict[str, ProductShape]:
    """How each product of the step is cut."""
    width = (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    return {
        "qkv": product_shape(width, spec.d_model),
        "o": product_shape(spec.d_model, spec.n_heads * spec.head_dim),
        "gate_up": product_shape(2 * spec.d_ff, spec.d_model),
        "down": product_shape(spec.d_model, spec.d_ff),
        "head": ProductShape(spec.vocab, spec.d_model, 8),
    }


def column_tiles_for(rows: int) -> int:
    """Column tiles of 8 rows in one pass of a product: 1, 2, 4 or 8."""
    return 1 << (min(8, -(-rows // 8)) - 1).bit_length()


def step_kernels(
    spec: DecodeSpec,
    rows: int,
    instead: Mapping[str, Launch | WideLaunch | AttentionLaunch] | None = None,
) -> tuple[dict[str, Variant], dict[str, tuple[int, int]]]:
    """The kernels of a step of `rows` rows, and their grids; `instead` has launches to try for single products."""
    column_tiles = column_tiles_for(rows)
    shapes = product_shapes(spec)
    cut: dict[str, Launch | WideLaunch] = {
        name: (head_launch if name == "head" else product_launch)(shape, column_tiles, rows)
        for name, shape in shapes.items()
    }
    attend, blocks_per_sm = attention.choose_launch(spec.attention, rows, shapes["o"], column_tiles)
    for name, launch in (instead or {}).items():
        if isinstance(launch, AttentionLaunch):
            attend, blocks_per_sm = launch, 1
        else:
            cut[name] = launch
    angles = spec.head_dim // 2 if spec.is_rotary else 0
    variants = {
        "begin": step.begin_step(step.StepShape(spec.d_model, angles, shapes["qkv"], column_tiles)),
        "qkv": linear.qkv_product("qkv", cut["qkv"], spec.heads),
        "attention": attention.attention("attention", attend, blocks_per_sm),
        "o": linear.residual_product("o", cut["o"], shapes["gate_up"]),
        "gate_up": linear.gated_product("gate_up", cut["gate_up"], shapes["down"]),
        "down": linear.residual_product("down", cut["down"], shapes["qkv"]),
        "head": linear.store_product("head", cut["head"], is_normed=True),
    }
    chunks = -(-rows // (8 * column_tiles))
    grids = {
        name: (launch.clusters * variants[name].cluster, chunks) for name, launch in cut.items()
    }
    grids["begin"] = (rows, 1)
    grids["attention"] = (rows * spec.attention.units * attend.cluster, 1)
    return variants, grids


def rotary_angles(spec: DecodeSpec, device: torch.device | str) -> Tensor:
    """(max_pos, head_dim/2, 2) float32 of cos and sin."""
    pairs = torch.arange(spec.head_dim // 2, dtype=torch.float64)
    angles = torch.arange(spec.max_pos, dtype=torch.float64)[:, None] * spec.theta ** (
        -2 * pairs / spec.head_dim
    )
    return torch.stack([angles.cos(), angles.sin()], -1).float().to(device)


class DecodeWeights:
    """A model's weights in the order of the kernels.

    Takes fp16 tensors `embed` (vocab, d), `head` (vocab, d), and per core layer i `i.qkv`, `i.o`, `i.gate_up`,
    `i.down`, with float32 gains `i.norm1`, `i.norm3`, `norm`.
    """

    def __init__(self, spec: DecodeSpec, tensors: Mapping[str, Tensor]) -> None:
        self.spec = spec
        d, ff = spec.d_model, spec.d_ff
        self.shapes = product_shapes(spec)
        rows = {
            "qkv": fragments.qkv_rows(
                spec.n_heads, spec.n_kv_heads, spec.head_dim, spec.is_half_pairing and spec.is_rotary,
                self.shapes["qkv"],
            ),
            "o": fragments.plain_rows(d, self.shapes["o"]),
            "gate_up": fragments.gated_rows(ff, self.shapes["gate_up"]),
            "down": fragments.plain_rows(d, self.shapes["down"]),
            "head": fragments.plain_rows(spec.vocab, self.shapes["head"]),
        }  # fmt: skip
        self.packed: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            kind = name.rsplit(".", 1)[-1]
            if kind in rows:
                order = rows[kind].to(tensor.device)
                self.packed[name] = fragments.pack_weight(tensor, self.shapes[kind], order)
            else:
                self.packed[name] = tensor.contiguous()

    def address(self, name: str) -> int:
        return self.packed[name].data_ptr()


class DecodeCache:
    """Blocks of one kv format, all core layers together; `exact` is the pool of own blocks."""

    def __init__(
        self, spec: DecodeSpec, num_blocks: int, num_exact: int, device: torch.device | str
    ) -> None:
        self.stored = torch.zeros(
            num_blocks, spec.stored_block_bytes, dtype=torch.uint8, device=device
        )
        self.exact = self.stored
        has_copies = spec.kv_format != "fp16"
        if has_copies:
            self.exact = torch.zeros(
                num_exact, spec.exact_block_bytes, dtype=torch.uint8, device=device
            )
        # Exact copies of the first keys, and which of them belongs to a block: room for as many as there are open blocks.
        sink_bytes = spec.layers * spec.n_kv_heads * spec.attention.sink_bytes
        num_sinks = num_exact if has_copies else 0
        self.sinks = torch.zeros(num_sinks, sink_bytes, dtype=torch.uint8, device=device)
        num_owners = num_blocks if has_copies else 0
        self.sink_of = torch.full((num_owners,), -1, dtype=torch.int32, device=device)


class DecodeRunner:
    """One row bucket: its static buffers, its launches and its graph."""

    def __init__(
        self,
        weights: DecodeWeights,
        cache: DecodeCache,
        rows: int,
        max_blocks: int,
        library: Library,
        *,
        is_overlapped: bool = True,
        instead: Mapping[str, Launch | WideLaunch | AttentionLaunch] | None = None,
    ) -> None:
        spec = weights.spec
        self.spec, self.weights, self.cache, self.rows = spec, weights, cache, rows
        self._max_blocks, self._library, self._is_overlapped = max_blocks, library, is_overlapped
        device = cache.stored.device
        d = spec.d_model

        def ints(*shape: int) -> Tensor:
            return torch.zeros(*shape, dtype=torch.int32, device=device)

        self.tokens, self.positions = ints(rows), ints(rows) - 1
        self.row_info = ints(rows, 2)
        self.tables = ints(rows, spec.loops, max_blocks)
        self.exact_blocks = ints(rows, spec.loops, max_blocks)
        self.slots = ints(spec.loops, rows)
        self.rope_table = rotary_angles(spec, device)
        self.rope = torch.zeros(rows, spec.head_dim // 2, 2, device=device)
        self.x = torch.zeros(rows, d, device=device)
        self.squares = torch.zeros(rows, d // 16, device=device)
        self.q = torch.zeros(rows, spec.n_heads * spec.head_dim, dtype=torch.half, device=device)
        tiles = column_tiles_for(rows)
        # What the products read: x for qkv, gate_up and head; attention's output; the hidden units.
        self.normed, self.mixed, self.hidden = (
            torch.zeros(
                fragments.packed_size(rows, weights.shapes[name], tiles),
                dtype=torch.half,
                device=device,
            )
            for name in ("qkv", "o", "down")
        )
        self.logits = torch.zeros(rows, spec.vocab, device=device)
        self.told = 0, 0  # what `begin` makes forget
        self.graph: torch.cuda.CUDAGraph | None = None
        self.variants, self.grids = step_kernels(spec, rows, instead)

    def _launch(self, name: str, stream: int, *args: Any, is_first: bool = False) -> None:
        kernel = self._library.get(self.variants[name])
        overlapped = self._is_overlapped and not is_first
        kernel.launch(self.grids[name], args, stream, is_overlapped=overlapped)

    def launch_begin(self, stream: int) -> None:
        """Put the step's first kernel, which embeds the tokens, on a raw stream."""
        spec, w = self.spec, self.weights
        is_stored = spec.kv_format != "fp16"
        own = self.exact_blocks if is_stored else self.tables
        self._launch(
            "begin", stream, self.tokens.data_ptr(), w.address("embed"), 0, self.x.data_ptr(),
            self.squares.data_ptr(), self.positions.data_ptr(), self.row_info.data_ptr(),
            own.data_ptr(), self.slots.data_ptr(), self.rope_table.data_ptr(), self.rope.data_ptr(),
            w.address("0.norm1"), self.normed.data_ptr(), 0, 0, 0, *self.told, spec.loops, spec.loops, self._max_blocks, 1.0,
            is_first=True,
        )  # fmt: skip

    def launch_step(self, stream: int, skip: Collection[str] = ()) -> None:
        """Put one whole step on a raw stream; `skip` leaves kernels out (to see their share of the time)."""
        spec, w = self.spec, self.weights
        x, squares, rows = self.x.data_ptr(), self.squares.data_ptr(), self.rows
        q, mixed, hidden = self.q.data_ptr(), self.mixed.data_ptr(), self.hidden.data_ptr()
        normed = self.normed.data_ptr()
        sinks_bytes, sink_of = self.cache.sinks.stride(0), self.cache.sink_of.data_ptr()
        self.launch_begin(stream)
        eps = spec.norm_eps
        for loop in range(spec.loops):
            for layer in range(spec.layers):
                exact = self.cache.exact.data_ptr() + layer * spec.exact_block_bytes // spec.layers
                stored = (
                    self.cache.stored.data_ptr() + layer * spec.stored_block_bytes // spec.layers
                )
                sinks = self.cache.sinks.data_ptr() + layer * sinks_bytes // spec.layers
                slots = self.slots.data_ptr() + loop * rows * 4
                if "qkv" not in skip:
                    self._launch(
                        "qkv", stream, w.address(f"{layer}.qkv"), normed, squares, rows, eps, q, exact, slots,
                        self.rope.data_ptr(), spec.exact_block_bytes,
                    )  # fmt: skip
                if "attention" not in skip:
                    self._launch(
                        "attention", stream, q, exact, self.exact_blocks.data_ptr(),
                        spec.exact_block_bytes, stored, spec.stored_block_bytes, self.tables.data_ptr(),
                        self.positions.data_ptr(), self.row_info.data_ptr(), 0, 0, 0, 0, 0, mixed,
                        sinks, sink_of, sinks_bytes, loop, spec.loops, self._max_blocks,
                    )  # fmt: skip
                if "o" not in skip:
                    self._launch(
                        "o", stream, w.address(f"{layer}.o"), mixed, 0, rows, eps, x, squares,
                        w.address(f"{layer}.norm3"), normed,
                    )  # fmt: skip
                if "gate_up" not in skip:
                    self._launch(
                        "gate_up", stream, w.address(f"{layer}.gate_up"), normed, squares, rows, eps,
                        hidden,
                    )  # fmt: skip
                if "down" not in skip:
                    following = f"{layer + 1}.norm1" if layer + 1 < spec.layers else "0.norm1"
                    if (loop, layer) == (spec.loops - 1, spec.layers - 1):
                        following = "norm"
                    self._launch(
                        "down", stream, w.address(f"{layer}.down"), hidden, 0, rows, eps, x, squares,
                        w.address(following), normed,
                    )  # fmt: skip
        if "head" not in skip:
            self._launch(
                "head", stream, w.address("head"), normed, squares, rows, eps, self.logits.data_ptr(),
            )  # fmt: skip

    def capture(self, skip: Collection[str] = ()) -> torch.cuda.CUDAGraph:
        """Capture the step; later replays take no Python launch."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())  # what fills the cache there
        self.launch_step(stream.cuda_stream, skip)  # loads the kernels outside the capture
        stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self.launch_step(stream.cuda_stream, skip)
        self.graph = graph
        return graph
