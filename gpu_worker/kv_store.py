"""The tensors that KV blocks live in, one form per KV format, and what each kind of block weighs.

    fp32                K and V as they are
    fp16 int8 int4      K and V in a cut form
    h h_int4            the attention's input instead of K and V, in fp16 or in 4 bits

Knows layouts and bytes; `kv_cache.py` decides which block is whose. All memory comes zeroed and untouched from the system, so that a
pool takes pages only as it is used.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gpu_worker.kv_sizes import h_group
from gpu_worker.model_config import ModelConfig
from kernels import cuda_fragments
from kernels.layout import BLOCK_SIZE, NUM_SINKS, CutCache, FragmentCache, PagedCache

Store = PagedCache | CutCache | FragmentCache
LANES = 16  # fp32 values per head are padded to a multiple of this
_KINDS = {"fp16": "fp16", "int8": "int8", "int4": "int4", "h": "fp16", "h_int4": "int4"}
_DTYPES = {"fp16": np.int16, "int8": np.int8, "int4": np.uint8}


@dataclass(frozen=True, slots=True)
class Form:
    """Shapes of one block in a KV format, leading axes (layers, heads).

    `has_copies`: blocks that are being filled, and the first keys, have exact copies beside the stored form.
    """

    kv_format: str
    layers: int
    heads: int
    dim: int
    group: int
    has_keys: bool

    @property
    def kind(self) -> str:
        return _KINDS.get(self.kv_format, "fp32")

    @property
    def has_copies(self) -> bool:
        return self.kind in ("int8", "int4")

    @property
    def num_scales(self) -> int:
        """Scales and zero points of one vector."""
        return {"int8": 1, "int4": 2}.get(self.kind, 0) * self.dim // self.group

    @property
    def block_bytes(self) -> int:
        """Bytes of a stored block with its scales."""
        vectors = self.layers * self.heads * BLOCK_SIZE * (1 + self.has_keys)
        if self.kind == "fp32":
            return self.layers * self.heads * BLOCK_SIZE * (self.dim + _padded(self.dim)) * 4
        bits = {"fp16": 16, "int8": 8, "int4": 4}[self.kind]
        return vectors * (self.dim * bits // 8 + 2 * self.num_scales)

    @property
    def copy_bytes(self) -> int:
        """Bytes of an exact copy of a block."""
        return (
            self.layers
            * self.heads
            * BLOCK_SIZE
            * (1 + self.has_keys)
            * self.dim
            * 2
            * self.has_copies
        )

    @property
    def sink_bytes(self) -> int:
        """Bytes of the exact copies of a first block's sinks."""
        return self.copy_bytes * NUM_SINKS // BLOCK_SIZE


def form_of(config: ModelConfig, kv_format: str) -> Form:
    """A model's blocks in a format; a block has all core layers."""
    arch, layers = config.arch, config.stages.core
    if kv_format in ("h", "h_int4"):
        return Form(kv_format, layers, 1, arch.d_model, h_group(arch), False)
    return Form(kv_format, layers, arch.n_kv_heads, arch.head_dim, arch.head_dim, True)


def make_store(
    form: Form, num_blocks: int, num_copies: int, exact_tables: Tensor, sink_of: Tensor, device: torch.device,
    is_fast: bool = False,
) -> Store:  # fmt: skip
    """Zeroed tensors on `device` for that many blocks and exact copies of them; the tables go into the cache as they are.

    `is_fast`: in the layout of the GPU's kernels where they have one of their own for the form.
    """
    at = (form.layers, form.heads)
    if is_fast and has_fragments(form):
        return cuda_fragments.make_cache(
            form.kind, num_blocks, num_copies, form.layers, form.heads, form.dim, exact_tables, sink_of, device
        )  # fmt: skip

    def _zeros(shape: tuple[int, ...], dtype: type) -> Tensor:
        zeros = torch.from_numpy(np.zeros(shape if device.type == "cpu" else 0, dtype=dtype))
        return (
            zeros if device.type == "cpu" else torch.zeros(shape, dtype=zeros.dtype, device=device)
        )

    if form.kind == "fp32":
        return PagedCache(
            _zeros((num_blocks, *at, form.dim, BLOCK_SIZE), np.float32),
            _zeros((num_blocks, *at, BLOCK_SIZE, _padded(form.dim)), np.float32),
        )
    num_copies = num_copies if form.has_copies else 0
    num_sinks = num_blocks if form.has_copies else 0
    dtype = _DTYPES[form.kind]
    width = form.dim // 2 if form.kind == "int4" else form.dim
    with_keys = num_blocks if form.has_keys else 0
    copied_keys, sunk_keys = (num_copies, num_sinks) if form.has_keys else (0, 0)
    return CutCache(
        kind=form.kind,
        group=form.group,
        keys=_zeros((with_keys, *at, width, BLOCK_SIZE), dtype),
        values=_zeros((num_blocks, *at, BLOCK_SIZE, width), dtype),
        scales=_zeros((num_blocks, *at, 1 + form.has_keys, form.num_scales, BLOCK_SIZE), np.int16),
        exact_keys=_zeros((copied_keys, *at, form.dim, BLOCK_SIZE), np.int16),
        exact_values=_zeros((num_copies, *at, BLOCK_SIZE, form.dim), np.int16),
        exact_tables=exact_tables,
        sink_keys=_zeros((sunk_keys, *at, NUM_SINKS, form.dim), np.int16),
        sink_values=_zeros((num_sinks, *at, NUM_SINKS, form.dim), np.int16),
        sink_of=sink_of,
    )


def has_fragments(form: Form) -> bool:
    """Whether the GPU's kernels have a faster layout for these blocks than the general one."""
    return (
        form.kind in ("fp16", "int4") and form.has_keys and form.dim % 32 == 0 and form.dim <= 256
    )


def copy_blocks(store: Store, source: Tensor, target: Tensor) -> None:
    """Copies whole blocks (ids, int64) in their stored form."""
    if isinstance(store, FragmentCache):
        cuda_fragments.copy_blocks(store, source, target)
        return
    for stored in _stored(store):
        if len(stored):
            stored[target] = stored[source]


def copy_place(
    store: Store, offset: int, blocks: list[int], copies: list[int], sunk: list[int]
) -> None:
    """Copies one position of the first of `blocks` to the others, in every form; `copies` and `sunk` are their exact copies and sinks, if
    they have any."""
    if isinstance(store, FragmentCache):
        cuda_fragments.copy_place(store, offset, blocks, copies, sunk)
        return
    source, *targets = blocks
    keys, values, *scales = _stored(store)
    if len(keys):
        keys[targets, ..., offset] = keys[source, ..., offset]
    values[targets, :, :, offset] = values[source, :, :, offset]
    for scale in scales:
        scale[targets, ..., offset] = scale[source, ..., offset]
    if not isinstance(store, CutCache) or not copies:
        return
    source_copy, *target_copies = copies
    store.exact_values[target_copies, :, :, offset] = store.exact_values[source_copy, :, :, offset]
    if len(store.exact_keys):
        store.exact_keys[target_copies, ..., offset] = store.exact_keys[source_copy, ..., offset]
    source_sink, *target_sinks = sunk
    if offset < NUM_SINKS and source_sink >= 0:
        for sinks in (store.sink_keys, store.sink_values):
            if len(sinks):
                sinks[target_sinks, :, :, offset] = sinks[source_sink, :, :, offset]


def move_places(
    store: Store, source: int, target: int, blocks: Tensor, copies: Tensor | None
) -> None:
    """Copies offset `source` of blocks[0] to offset `target` of blocks[1], ids (2, n), and the same in their exact copies."""
    if isinstance(store, FragmentCache):
        cuda_fragments.move_places(store, source, target, blocks, copies)
        return
    keys, values, *scales = _stored(store)
    by_column = [(part, blocks) for part in (keys, *scales)]
    by_line = [(values, blocks)]
    if copies is not None:
        assert isinstance(store, CutCache)
        by_column.append((store.exact_keys, copies))
        by_line.append((store.exact_values, copies))
    for part, (read, written) in by_column:
        if len(part):
            part[written, ..., target] = part[read, ..., source]
    for part, (read, written) in by_line:
        part[written, :, :, target] = part[read, :, :, source]


def _stored(store: PagedCache | CutCache) -> tuple[Tensor, ...]:
    if isinstance(store, PagedCache):
        return store.keys, store.values
    return store.keys, store.values, store.scales


def _padded(dim: int) -> int:
    return -(-dim // LANES) * LANES
