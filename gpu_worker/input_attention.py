"""Attention over cached inputs (the KV formats h and h_int4): x, what the q, k and v products see, is kept instead of K and V.

Absorbed, where keys depend on x alone: scores are (W_K^T q) . x, so W_K is folded into q and W_V applied to the weighted sum of x; a
bias of k adds the same to all scores of a query and drops out, one of v is added once. Rebuilt, where positions or a norm stand
between x and k: K and V of all keys are made again from x in every pass, which saves memory and nothing else. Which one is
fixed by the artifact. Owns the folded weights; the model calls it in place of its plain attention.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from gpu_worker.kv_cache import KVCache
from gpu_worker.kv_sizes import is_absorbed
from gpu_worker.model_config import ModelConfig
from gpu_worker.rows import on_device
from gpu_worker.weights import Layer, Weights
from kernels.cpu_attention import TILE_ROWS, make_tiles
from kernels.layout import BLOCK_SIZE, CutCache, HostPaging, Packed, PagedCache, Paging


@dataclass(frozen=True, slots=True)
class _Folded:
    """One layer's products: q, and by K/V head W_K^T and W_V (absorbed) or k and v together (rebuilt)."""

    q: Packed
    keys: list[Packed]
    values: list[Packed]


class InputAttention:
    """The attention of a model whose cache keeps inputs.

    Args:
        config, tensors, weights, ops: the model, its tensors by artifact name, packed, and its kernels.
        is_half: round rebuilt Q, K and V to fp16.
    """

    def __init__(
        self,
        config: ModelConfig,
        tensors: Mapping[str, Tensor],
        weights: Weights,
        ops: Any,
        is_half: bool,
    ) -> None:
        self._arch = config.arch
        self._weights, self._ops, self._is_half = weights, ops, is_half
        self._tensors = tensors
        self.is_absorbed = is_absorbed(config)
        stages = (("prelude", weights.prelude), ("core", weights.core), ("coda", weights.coda))
        self._layers = {
            id(layer): self._fold(f"{stage}.{i}.attn")
            for stage, layers in stages
            for i, layer in enumerate(layers)
        }

    def attend(self, layer: Layer, x: Tensor, cache: KVCache, paging: Paging) -> Tensor:
        """The heads' outputs (n, H Dh) of the normed input x (n, d), which is written to the cache first."""
        assert isinstance(cache.paged, CutCache)
        self._ops.store_inputs(x, cache.paged, layer.index, paging)
        folded = self._layers[id(layer)]
        q: Tensor = self._ops.linear(x, folded.q)
        if self.is_absorbed:
            return self._absorbed(layer, folded, q, cache.paged, paging)
        return self._rebuilt(layer, folded, q, cache.paged, paging)

    # ---------------------------------------------------------------------------------------------------------- absorbed

    def _absorbed(
        self, layer: Layer, folded: _Folded, q: Tensor, paged: CutCache, paging: Paging
    ) -> Tensor:
        arch = self._arch
        if layer.qk_bias is not None:
            q = q + layer.qk_bias[0].reshape(-1)
        group = arch.n_heads // arch.n_kv_heads
        heads = q.view(-1, arch.n_kv_heads, group, arch.head_dim)
        over_inputs = q.new_empty(len(q), arch.n_kv_heads, group, arch.d_model)
        for h, keys in enumerate(folded.keys):
            part = heads[:, h].reshape(-1, arch.head_dim).contiguous()
            over_inputs[:, h] = self._ops.linear(part, keys).view(len(q), group, arch.d_model)
        mixed = self._ops.attention(
            over_inputs.view(len(q), -1), (arch.n_heads, 1, arch.d_model), paged, layer.index, self._weights.slopes, paging,
            1.0 / math.sqrt(arch.head_dim),
        )  # fmt: skip
        mixed = mixed.view(len(q), arch.n_kv_heads, group, arch.d_model)
        out = q.new_empty(len(q), arch.n_kv_heads, group, arch.head_dim)
        for h, values in enumerate(folded.values):
            part = mixed[:, h].reshape(-1, arch.d_model).contiguous()
            out[:, h] = self._ops.linear(part, values).view(len(q), group, arch.head_dim)
        return out.view(len(q), -1)

    # ----------------------------------------------------------------------------------------------------------- rebuilt

    def _rebuilt(
        self, layer: Layer, folded: _Folded, q: Tensor, paged: CutCache, paging: Paging
    ) -> Tensor:
        """Rows of one own block read one table of rebuilt blocks: the earlier ones as stored, their own exact."""
        host, device = HostPaging.of(paging), q.device
        assert (host.row_map < 0).all(), "tree rows have no rebuilt form"
        arch = self._arch
        padding = q.new_zeros(len(q), 2 * arch.kv_dim)
        qkv = torch.cat([q, padding], dim=1)
        self._prepare(layer, qkv, paging.positions)
        slots, tables, positions = host.slots, host.tables, host.positions
        own = positions // BLOCK_SIZE
        runs = np.flatnonzero(np.diff(slots) | np.diff(tables)) + 1
        bounds = [0, *runs.tolist(), len(q)]
        keys: list[Tensor] = []
        values: list[Tensor] = []
        lists: list[list[int]] = []
        readers = np.empty(len(q), dtype=np.int32)
        num_blocks = 0
        for first, last in zip(bounds, bounds[1:], strict=False):
            slot, table = int(slots[first]), int(tables[first])
            blocks = paging.block_tables[slot, table, : int(own[last - 1]) + 1]
            stored = self._blocks(layer, folded, paged, blocks, torch.full_like(blocks, -1))
            keys.append(stored[0])
            values.append(stored[1])
            first_own = int(own[first])
            if len(paged.exact_tables):
                copies = torch.full_like(blocks, -1)
                copies[first_own:] = paged.exact_tables[slot, table, first_own : len(blocks)]
                exact = self._blocks(layer, folded, paged, blocks, copies)
                keys.append(exact[0])
                values.append(exact[1])
            for block in range(first_own, len(blocks)):
                readers[first:last][own[first:last] == block] = len(lists)
                copy = len(blocks) if len(paged.exact_tables) else 0
                lists.append([*range(num_blocks, num_blocks + block), num_blocks + copy + block])
            num_blocks += len(blocks) * (1 + (len(paged.exact_tables) > 0))
        block_tables = np.zeros((len(lists), 1, max(map(len, lists))), dtype=np.int32)
        for i, ids in enumerate(lists):
            block_tables[i, 0, : len(ids)] = ids
        zeros = np.zeros(len(q), dtype=np.int32)
        rebuilt = Paging(
            on_device(readers, device), on_device(zeros, device), paging.positions, paging.places, paging.windows, paging.row_map,
            paging.map_base, paging.maps, on_device(block_tables, device),
            on_device(make_tiles(readers, zeros, TILE_ROWS), device),
        )  # fmt: skip
        heads = (arch.n_heads, arch.n_kv_heads, arch.head_dim)
        cache = PagedCache(torch.cat(keys), torch.cat(values))
        mixed: Tensor = self._ops.attention(qkv, heads, cache, 0, self._weights.slopes, rebuilt)
        return mixed

    def _blocks(
        self, layer: Layer, folded: _Folded, paged: CutCache, blocks: Tensor, copies: Tensor
    ) -> tuple[Tensor, Tensor]:
        """K (num_blocks, 1, Hkv, Dh, BLOCK_SIZE) and V (num_blocks, 1, Hkv, BLOCK_SIZE, padded Dh) of a sequence's first blocks."""
        arch = self._arch
        x = self._ops.read_inputs(paged, layer.index, blocks, copies).view(-1, arch.d_model)
        (product,) = folded.keys
        kv = self._ops.linear(x, product)
        qkv = torch.cat([x.new_zeros(len(x), arch.n_heads * arch.head_dim), kv], dim=1)
        positions = torch.arange(len(x), dtype=torch.int32, device=x.device).clamp(
            max=arch.max_pos - 1
        )
        self._prepare(layer, qkv, positions)
        parts = qkv[:, arch.n_heads * arch.head_dim :].view(
            len(blocks), BLOCK_SIZE, 2, arch.n_kv_heads, arch.head_dim
        )
        keys = parts[:, :, 0].permute(0, 2, 3, 1)[:, None].contiguous()
        padding = -arch.head_dim % 16
        values = torch.nn.functional.pad(parts[:, :, 1].permute(0, 2, 1, 3), (0, padding))[:, None]
        return keys, values.contiguous()

    def _prepare(self, layer: Layer, qkv: Tensor, positions: Tensor) -> None:
        arch = self._arch
        self._ops.prepare_qkv(
            qkv, (arch.n_heads, arch.n_kv_heads, arch.head_dim), layer.q_norm, layer.k_norm, arch.norm_eps, layer.qk_bias,
            self._weights.rotary, arch.pos.pairing == "interleaved", positions,
        )  # fmt: skip
        if self._is_half:
            qkv.copy_(qkv.half())

    # ----------------------------------------------------------------------------------------------------------- weights

    def _fold(self, at: str) -> _Folded:
        arch, pack = self._arch, self._ops.pack
        q = pack(self._matrix(f"{at}.q"), self._bias(f"{at}.q"))
        keys, values = self._matrix(f"{at}.k"), self._matrix(f"{at}.v")
        key_bias, value_bias = self._bias(f"{at}.k"), self._bias(f"{at}.v")
        if not self.is_absorbed:
            bias = None
            if key_bias is not None or value_bias is not None:
                none = keys.new_zeros(arch.kv_dim)
                bias = torch.cat([none if b is None else b for b in (key_bias, value_bias)])
            return _Folded(q, [pack(torch.cat([keys, values]), bias)], [])
        parts = [slice(h * arch.head_dim, (h + 1) * arch.head_dim) for h in range(arch.n_kv_heads)]
        return _Folded(
            q,
            [pack(keys[part].T.contiguous()) for part in parts],
            [
                pack(values[part], None if value_bias is None else value_bias[part])
                for part in parts
            ],
        )

    def _matrix(self, name: str) -> Tensor:
        """A product's weight in fp32."""
        device = self._ops.DEVICE
        scale = self._tensors.get(f"{name}.weight.scale")
        scale = None if scale is None else scale.to(device)
        data = self._tensors[f"{name}.weight"].to(device).float()
        return data if scale is None else data * scale[:, None]

    def _bias(self, name: str) -> Tensor | None:
        bias = self._tensors.get(f"{name}.bias")
        return None if bias is None else bias.to(self._ops.DEVICE).float()
