"""The plain PyTorch twin of every kernel, with the same name and arguments, written to be obviously right.

Tests hold each backend to these, and hand a reader the meaning of each kernel. Slow; never called by the engine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn import functional as F

from kernels.layout import BLOCK_SIZE, NUM_SINKS, CutCache, Packed, PagedCache, Paging

_UINT32 = (1 << 32) - 1


def pack(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Packed:
    """The weight (num_out, num_in) in fp32; int8 comes with a `scale` per output."""
    data = weight.float() if scale is None else weight.float() * scale[:, None]
    return Packed(data, weight.shape[0], weight.shape[1], bias)


def linear(x: Tensor, weight: Packed) -> Tensor:
    """(n, num_in) -> (n, num_out): x W^T + bias."""
    return F.linear(x, weight.data, weight.bias)


def linear_add(x: Tensor, weight: Packed, y: Tensor) -> None:
    """y += x W^T + bias, in place."""
    y += linear(x, weight)


def norm(x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
    """RMS norm of each row of (n, d), or LayerNorm if there is a bias."""
    if bias is not None:
        x = x - x.mean(-1, keepdim=True)
    y = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
    return y if bias is None else y + bias


def activate(x: Tensor, act: str) -> Tensor:
    """`silu_glu`: (n, 2 f), gate then up, -> (n, f); else `gelu`, `gelu_tanh` or `relu2`, elementwise."""
    if act == "silu_glu":
        gate, up = x.chunk(2, dim=1)
        return F.silu(gate) * up
    if act == "relu2":
        return x.relu().square()
    return F.gelu(x, approximate="tanh" if act == "gelu_tanh" else "none")


def prepare_qkv(
    qkv: Tensor,
    heads: tuple[int, int, int],
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    eps: float,
    qk_bias: Tensor | None,
    rotary: Tensor | None,
    is_interleaved: bool,
    positions: Tensor,
) -> None:
    """In place on q and k of qkv (n, (H + 2 Hkv) Dh): RMS norm per head, bias (2, H, Dh), rotary (2, max_pos, Dh / 2)."""
    num_heads, num_kv, dim = heads
    parts = qkv.view(len(qkv), num_heads + 2 * num_kv, dim)
    for first, count, weight, which in ((0, num_heads, q_norm, 0), (num_heads, num_kv, k_norm, 1)):
        x = parts[:, first : first + count]
        if weight is not None:
            x = x / (x.pow(2).mean(-1, keepdim=True) + eps).sqrt() * weight
        if qk_bias is not None:
            x = x + qk_bias[which]
        if rotary is not None:
            cos, sin = rotary[:, positions.long()].unsqueeze(2)
            a, b = (x[..., 0::2], x[..., 1::2]) if is_interleaved else x.chunk(2, dim=-1)
            pairs = (a * cos - b * sin, b * cos + a * sin)
            x = (
                torch.stack(pairs, dim=-1).flatten(-2)
                if is_interleaved
                else torch.cat(pairs, dim=-1)
            )
        parts[:, first : first + count] = x


def store_kv(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: PagedCache | CutCache,
    layer: int,
    paging: Paging,
) -> None:
    """Writes each row's K and V to its place."""
    num_heads, num_kv, dim = heads
    parts = qkv.view(len(qkv), num_heads + 2 * num_kv, dim)
    for r in range(len(qkv)):
        key, value = parts[r, num_heads : num_heads + num_kv], parts[r, num_heads + num_kv :]
        if isinstance(cache, CutCache):
            _store_cut(key, value, cache, layer, paging, r)
            continue
        block, offset = _place(paging, r, int(paging.places[r]))
        cache.keys[block, layer, :, :, offset] = key
        cache.values[block, layer, :, offset, :dim] = value


def store_inputs(x: Tensor, cache: CutCache, layer: int, paging: Paging) -> None:
    """Writes each row's attention input (n, d) to its place."""
    for r in range(len(x)):
        _store_cut(None, x[r : r + 1], cache, layer, paging, r)


def read_inputs(cache: CutCache, layer: int, blocks: Tensor, copies: Tensor) -> Tensor:
    """The inputs (num_blocks, BLOCK_SIZE, d) of a sequence's first blocks, from exact copies where there are any."""
    return torch.stack(
        [
            _load_cut(cache, layer, int(block), int(copy), b == 0)[1][0]
            for b, (block, copy) in enumerate(zip(blocks, copies, strict=True))
        ]
    )


def attention(
    qkv: Tensor,
    heads: tuple[int, int, int],
    cache: PagedCache | CutCache,
    layer: int,
    slopes: Tensor | None,
    paging: Paging,
    scale: float | None = None,
) -> Tensor:
    """Softmax attention of each row over the keys that it sees, (n, H Dh); scores are times `scale`, 1 / sqrt(Dh) if None."""
    num_heads, num_kv, dim = heads
    out = torch.empty(len(qkv), num_heads * dim)
    for r in range(len(qkv)):
        position, window = int(paging.positions[r]), int(paging.windows[r])
        seen = [
            p for p in range(position + 1) if not window or p > position - window or p < NUM_SINKS
        ]
        found = [_key_and_value(cache, layer, paging, r, p, dim) for p in seen]
        keys, values = (torch.stack(t) for t in zip(*found, strict=True))  # (seen, Hkv, Dh)
        q = qkv[r, : num_heads * dim].view(num_kv, num_heads // num_kv, dim)
        scores = torch.einsum("kgd,skd->kgs", q, keys).reshape(num_heads, -1)
        scores = scores * (1 / math.sqrt(dim) if scale is None else scale)
        if slopes is not None:
            scores = scores - slopes[:, None] * (position - torch.tensor(seen))
        weights = scores.softmax(-1).view(num_kv, num_heads // num_kv, -1)
        out[r] = torch.einsum("kgs,skd->kgd", weights, values).reshape(-1)
    return out


def _key_and_value(
    cache: PagedCache | CutCache, layer: int, paging: Paging, row: int, position: int, dim: int
) -> tuple[Tensor, Tensor]:
    """K and V (Hkv, Dh) of a position as a row reads them: exact in its own block and at the sinks, else as stored."""
    place = _mapped(paging, row, position)
    block, offset = _place(paging, row, place)
    if isinstance(cache, PagedCache):
        return cache.keys[block, layer, :, :, offset], cache.values[block, layer, :, offset, :dim]
    copy = -1
    if (
        len(cache.exact_tables)
        and position // BLOCK_SIZE == int(paging.positions[row]) // BLOCK_SIZE
    ):
        at = int(paging.slots[row]), int(paging.tables[row]), place // BLOCK_SIZE
        copy = int(cache.exact_tables[at])
    keys, values = _load_cut(cache, layer, block, copy, place < BLOCK_SIZE)
    return keys[:, offset], values[:, offset]


def _store_cut(
    key: Tensor | None, value: Tensor, cache: CutCache, layer: int, paging: Paging, row: int
) -> None:
    """One row's vectors (heads, dim) in every form; there is no key where the cache keeps inputs."""
    place = int(paging.places[row])
    block, offset = _place(paging, row, place)
    copy = sink = -1
    if len(cache.exact_tables):
        at = int(paging.slots[row]), int(paging.tables[row]), place // BLOCK_SIZE
        copy = int(cache.exact_tables[at])
        sink = int(cache.sink_of[block]) if place < NUM_SINKS else -1
    codes, scales = _cut(value, cache.kind, cache.group)
    cache.values[block, layer, :, offset] = codes
    cache.scales[block, layer, :, -1, :, offset] = scales
    if copy >= 0:
        cache.exact_values[copy, layer, :, offset] = _half_bits(value)
    if sink >= 0:
        cache.sink_values[sink, layer, :, offset] = _half_bits(value)
    if key is None:
        return
    codes, scales = _cut(key, cache.kind, cache.group)
    cache.keys[block, layer, :, :, offset] = codes
    cache.scales[block, layer, :, 0, :, offset] = scales
    if copy >= 0:
        cache.exact_keys[copy, layer, :, :, offset] = _half_bits(key)
    if sink >= 0:
        cache.sink_keys[sink, layer, :, offset] = _half_bits(key)


def _half_bits(x: Tensor) -> Tensor:
    return x.clamp(-65504, 65504).half().view(torch.int16)


def _cut(x: Tensor, kind: str, group: int) -> tuple[Tensor, Tensor]:
    """Vectors (heads, dim) as (codes in their stored form, bits of the scales (heads, scales per vector))."""
    if kind == "fp16":
        return _half_bits(x), torch.empty(len(x), 0, dtype=torch.int16)
    parts = x.view(len(x), -1, group)
    if kind == "int8":
        scales = (parts.abs().amax(-1) / 127).half()
        codes = (parts / scales.float()[..., None]).nan_to_num(0, 0, 0).round().clamp(-127, 127)
        return codes.to(torch.int8).view_as(x), scales.view(torch.int16)
    least, most = parts.amin(-1), parts.amax(-1)
    scale, zero = ((most - least) / 15).half(), least.half()
    codes = (parts - zero.float()[..., None]) / scale.float()[..., None]
    codes = codes.nan_to_num(0, 0, 0).round().clamp(0, 15).to(torch.uint8)
    low, high = codes.chunk(2, dim=-1)
    scales = torch.stack([scale, zero], dim=-1).view(len(x), -1)
    return (low | (high << 4)).reshape(len(x), -1), scales.view(torch.int16)


def _uncut(codes: Tensor, scales: Tensor, kind: str, group: int) -> Tensor:
    """Codes (heads, BLOCK_SIZE, stored dim) and scale bits (heads, scales, BLOCK_SIZE) as fp32 (heads, BLOCK_SIZE, dim)."""
    if kind == "fp16":
        return codes.contiguous().view(torch.float16).float()
    heads = len(codes)
    found = (
        scales.contiguous().view(torch.float16).float().transpose(1, 2)
    )  # (heads, BLOCK_SIZE, S)
    if kind == "int8":
        parts = codes.float().view(heads, BLOCK_SIZE, -1, group)
        return (parts * found[..., None]).flatten(2)
    pairs = codes.contiguous().view(heads, BLOCK_SIZE, -1, group // 2)
    parts = torch.cat([pairs & 15, pairs >> 4], dim=-1).float()
    scale, zero = found.view(*found.shape[:2], -1, 2).unbind(-1)
    return (parts * scale[..., None] + zero[..., None]).flatten(2)


def _load_cut(
    cache: CutCache, layer: int, block: int, copy: int, is_first: bool
) -> tuple[Tensor, Tensor]:
    """One block's keys and values (heads, BLOCK_SIZE, dim), exact where `copy` >= 0, else as stored with exact sinks."""
    has_keys = len(cache.keys) > 0
    if copy >= 0:
        values = _uncut(cache.exact_values[copy, layer], cache.scales[:0], "fp16", 0)
        keys = (
            _uncut(cache.exact_keys[copy, layer].transpose(1, 2), cache.scales[:0], "fp16", 0)
            if has_keys
            else values
        )
        return keys, values
    scales = cache.scales[block, layer]
    values = _uncut(cache.values[block, layer], scales[:, -1], cache.kind, cache.group)
    keys = values
    if has_keys:
        codes = cache.keys[block, layer].transpose(1, 2)
        keys = _uncut(codes, scales[:, 0], cache.kind, cache.group)
    sink = int(cache.sink_of[block]) if is_first and len(cache.sink_of) else -1
    if sink >= 0:
        values[:, :NUM_SINKS] = cache.sink_values[sink, layer].view(torch.float16).float()
        if has_keys:
            keys[:, :NUM_SINKS] = cache.sink_keys[sink, layer].view(torch.float16).float()
    return keys, values


def _mapped(paging: Paging, row: int, position: int) -> int:
    """The place of the key at a position, as the row reads it."""
    which, base = int(paging.row_map[row]), int(paging.map_base[row])
    return position if which < 0 or position < base else int(paging.maps[which, position - base])


def _place(paging: Paging, row: int, place: int) -> tuple[int, int]:
    """(block, offset) of a place in the row's table."""
    slot, table = int(paging.slots[row]), int(paging.tables[row])
    return int(paging.block_tables[slot, table, place // BLOCK_SIZE]), place % BLOCK_SIZE


def choose(
    logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, min_p: Tensor, keys: Tensor
) -> Tensor:
    """One token per row by the order of the design: temperature, top-k, top-p, min-p, then Gumbel-max; ties to the lowest id."""
    tokens = torch.empty(len(logits), dtype=torch.int64)
    for r, row in enumerate(logits):
        if temperature[r] == 0:
            tokens[r] = int((row == row.max()).nonzero()[0])
            continue
        z = row * (1 / temperature[r])
        order = sorted(range(len(z)), key=lambda i: (-float(z[i]), i))
        if top_k[r] > 0:
            order = order[: int(top_k[r])]
        if top_p[r] < 1:
            masses = [int(2**30 * math.exp(float(z[i] - z.max()))) for i in order]
            target, ahead, kept = max(int(float(top_p[r]) * sum(masses)), 1), 0, []
            for i, mass in zip(order, masses, strict=True):
                if ahead >= target or mass == 0:
                    break
                kept.append(i)
                ahead += mass
            order = kept
        order = [i for i in order if min_p[r] <= 0 or math.exp(float(z[i] - z.max())) >= min_p[r]]
        noise = gumbel_noise(keys[r], torch.tensor(order))
        tokens[r] = min(
            zip(order, noise.tolist(), strict=True),
            key=lambda pair: (-(float(z[pair[0]]) + pair[1]), pair[0]),
        )[0]
    return tokens


def gumbel_noise(key: Tensor, ids: Tensor) -> Tensor:
    """-log(-log(u)), u = (23 hashed bits + 1/2) / 2**23, of token ids int64 (n,) under a key of two uint32."""
    low, high = (int(k) & _UINT32 for k in key.tolist())
    h = _mix(((ids * 0x9E3779B9) + low) & _UINT32)
    h = _mix(h ^ high)
    u = ((h >> 9).float() + 0.5) * 2.0**-23
    return -torch.log(-torch.log(u))


def _mix(h: Tensor) -> Tensor:
    """A 32-bit hash of int64 values in [0, 2**32)."""
    for shift, factor in ((16, 0x7FEB352D), (15, 0x846CA68B)):
        h = ((h ^ (h >> shift)) * factor) & _UINT32
    return h ^ (h >> 16)


def log_probabilities(
    logits: Tensor, chosen: Tensor, num_top: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Log-softmax at `chosen`, and the `num_top` largest with their ids, ties to the lowest id."""
    logprobs = logits.log_softmax(-1)
    order = torch.sort(logits, dim=-1, descending=True, stable=True).indices[:, :num_top]
    return logprobs.gather(1, chosen[:, None])[:, 0], order, logprobs.gather(1, order)


def relative_change(before: Tensor, after: Tensor) -> Tensor:
    """|after - before| / |after| of each row, fp64 (n,)."""
    change: Tensor = (after.double() - before.double()).norm(dim=-1)
    size: Tensor = after.double().norm(dim=-1)
    return change / size


def divergence(before: Tensor, after: Tensor) -> Tensor:
    """KL(softmax(before) || softmax(after)) of each row, fp64 (n,)."""
    p, q = before.double().log_softmax(-1), after.double().log_softmax(-1)
    return (p.exp() * (p - q)).sum(-1)
