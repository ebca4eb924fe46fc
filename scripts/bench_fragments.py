"""Checks and times the engine's operations on caches in fragment order, on one GPU: parity, equal bits, microseconds.

    python scripts/bench_fragments.py [--kinds fp16,int4] [--context 1024]

The shape is the reference model's: 12 heads of 128, 4 layers. Parity is against plain PyTorch on what the cache stands for. Times are
medians of CUDA graphs that go round the layers, so that keys come from memory. Without a GPU it says so and leaves with 0.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels import cuda_fragments, fragment_commit, fragment_rows, fragments, runtime  # noqa: E402
from kernels.attention import AttentionShape  # noqa: E402
from kernels.compiler import ptx_of  # noqa: E402
from kernels.layout import NUM_SINKS, FragmentCache, Paging  # noqa: E402

HEADS, LAYERS = (12, 12, 128), 4


def new_cache(kind: str, slots: int, blocks: int) -> tuple[FragmentCache, Tensor]:
    """A cache in which every slot has one table of `blocks` blocks, scattered, with exact copies and sinks, and that table."""
    make = torch.Generator(device="cuda").manual_seed(2)
    ids = torch.randperm(slots * blocks, device="cuda", generator=make).int()
    tables = ids.view(slots, 1, blocks)
    sink_of = torch.full((slots * blocks,), -1, dtype=torch.int32, device="cuda")
    sink_of[tables[:, 0, 0].long()] = torch.arange(slots, dtype=torch.int32, device="cuda")
    copies = tables.flip(0).contiguous()
    cache = cuda_fragments.make_cache(
        kind, slots * blocks, slots * blocks, LAYERS, *HEADS[1:], copies, sink_of, torch.device("cuda"), slots
    )  # fmt: skip
    return cache, tables


def paging(slots: Tensor, positions: Tensor, tables: Tensor, window: int = 0) -> Paging:
    """Rows of those slots at those positions, in their only table."""
    slots, positions = slots.int(), positions.int()
    zeros = torch.zeros_like(slots)
    no_maps = zeros.new_zeros(0, 0)
    return Paging(
        slots, zeros, positions, positions, zeros + window, zeros - 1, zeros, no_maps, tables, zeros
    )


def random_rows(count: int) -> Tensor:
    make = torch.Generator(device="cuda").manual_seed(count)
    width = (HEADS[0] + 2 * HEADS[1]) * HEADS[2]
    return torch.randn(count, width, device="cuda", generator=make)


def fill(cache: FragmentCache, tables: Tensor, context: int) -> None:
    """Positions 0 .. context - 1 of every slot, all layers, in passes of 4096 rows."""
    slots = len(tables)
    every = torch.arange(slots * context, device="cuda")
    for some in every.split(4096):
        at = paging(some // context, some % context, tables)
        for layer in range(LAYERS):
            rows = random_rows(len(some)).roll(layer, 1).contiguous()
            cuda_fragments.store_kv(rows, HEADS, cache, layer, at)


def stands_for(
    cache: FragmentCache, layer: int, slot: int, tables: Tensor, position: int
) -> tuple[Tensor, Tensor]:
    """Keys and values (heads, position + 1, dim) as a row at that position reads them."""
    dim, own = HEADS[2], position // 64
    ids = tables[slot, 0, : own + 1].long()

    def exact(blocks: Tensor) -> list[Tensor]:
        halves = cache.exact[blocks, layer].view(torch.half).unflatten(-1, (2, -1))
        return [
            fragments.unpack_keys(halves[:, :, 0], dim).float(),
            fragments.unpack_values(halves[:, :, 1], dim).float(),
        ]

    if cache.sinks is None:
        parts = exact(ids)
    else:
        packed = cache.stored[ids[:-1], layer].unflatten(-1, (2, -1))
        parts = [fragments.unpack_int4(packed[:, :, i], dim, is_value=i == 1) for i in (0, 1)]
        if own:
            sinks = cache.sinks[slot, layer].view(torch.half).unflatten(-1, (2, -1)).float()
            parts[0][0, :, :NUM_SINKS] = sinks[:, 0].unflatten(-1, (NUM_SINKS, dim))
            values = sinks[:, 1].unflatten(-1, (dim, NUM_SINKS))
            parts[1][0, :, :NUM_SINKS] = values.transpose(1, 2)
        last = exact(cache.exact_tables[slot, 0, own : own + 1].long())
        parts = [torch.cat(both) for both in zip(parts, last, strict=True)]
    keys, values = (part.transpose(0, 1).flatten(1, 2)[:, : position + 1] for part in parts)
    return keys, values


def expected(q: Tensor, keys: Tensor, values: Tensor, window: int) -> Tensor:
    """Attention of one row, in float64."""
    q, last = q[: HEADS[0] * HEADS[2]].view(HEADS[0], 1, HEADS[2]), keys.shape[1] - 1
    scores = (q.double() @ keys.double().transpose(1, 2)) / HEADS[2] ** 0.5
    j = torch.arange(last + 1, device=q.device)
    if window:
        scores = scores.masked_fill((j <= last - window) & (j >= NUM_SINKS), -torch.inf)
    return (scores.softmax(-1) @ values.double()).flatten()


def time_us(run: Callable[[int], object], repeats: int = 8) -> float:
    """Median microseconds of run(layer) in a graph of `repeats` rounds of the layers."""
    for layer in range(LAYERS):
        run(layer)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for i in range(repeats * LAYERS):
            run(i % LAYERS)
    graph.replay()
    times = []
    for _ in range(15):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end))
    return sorted(times)[len(times) // 2] / (repeats * LAYERS) * 1e3


def check(kind: str, context: int) -> int:
    """Prints a table; how many checks failed."""
    rows, failed = 64, 0
    cache, tables = new_cache(kind, rows, context // 64 + 1)
    fill(cache, tables, context)
    every = torch.arange(rows, device="cuda")
    positions = torch.full((rows,), context, device="cuda")
    positions[::8] = torch.tensor([0, 1, 63, 64, 127, 500, 959, 1000], device="cuda") % (
        context + 1
    )
    qkv = random_rows(rows)
    at = paging(every, positions, tables)
    cuda_fragments.store_kv(qkv, HEADS, cache, 1, at)

    def note(name: str, is_good: bool, detail: str) -> None:
        nonlocal failed
        failed += not is_good
        print(f"{kind:<5} {name:<36} {'ok' if is_good else 'FAIL':<5} {detail}", flush=True)

    if cache.sinks is not None:
        ids = tables[:, 0, : context // 64].flatten().long()
        exact = cache.exact[cache.exact_tables[:, 0, : context // 64].flatten().long(), 2]
        halves, dim = exact.view(torch.half).unflatten(-1, (2, -1)).float(), HEADS[2]
        keys, _ = fragments.pack_int4(fragments.unpack_keys(halves[:, :, 0], dim), is_value=False)
        values, _ = fragments.pack_int4(
            fragments.unpack_values(halves[:, :, 1], dim), is_value=True
        )
        wrong = int((cache.stored[ids, 2] != torch.cat([keys, values], -1)).any(-1).sum())
        note("stored blocks as packed", wrong == 0, f"{wrong} of {len(ids) * HEADS[1]} differ")
    for window in (0, 100):
        at = paging(every, positions, tables, window)
        out = cuda_fragments.attention(qkv, HEADS, cache, 1, None, at)
        gap = 0.0
        for row in (0, 8, 16, 24, 32, 48, 56, 63):
            read = stands_for(cache, 1, row, tables, int(positions[row]))
            want = expected(qkv[row], *read, window)
            gap = max(gap, float((out[row] - want).norm() / want.norm()))
        note(f"parity, window {window}", gap < 2e-3, f"rel {gap:.1e}")
        for count, shift in ((1, 0), (1, 17), (8, 40), (11, 3), (rows, 21)):
            order = every.roll(-shift)[:count]
            part = cuda_fragments.attention(
                qkv[order].contiguous(), HEADS, cache, 1, None,
                paging(order, positions[order], tables, window),
            )  # fmt: skip
            differ = (part != out[order]).any(1).nonzero().flatten().tolist()
            note(f"bits, {count} rows from {shift}", not differ, f"rows that differ: {differ[:5]}")
    tree = paging(every, positions, tables)
    tree.row_map = every.int()
    tree.map_base = (positions // 64 * 64).int()
    tree.maps = (tree.map_base[:, None] + torch.arange(64, device="cuda")).int().contiguous()
    out = cuda_fragments.attention(qkv, HEADS, cache, 1, None, paging(every, positions, tables))
    mapped = cuda_fragments.attention(qkv, HEADS, cache, 1, None, tree)
    note(
        "bits, mapped rows",
        torch.equal(out, mapped),
        f"max gap {float((out - mapped).abs().max()):.1e}",
    )

    full = torch.full((rows,), context, device="cuda")
    chunk = context - 256 + torch.arange(256, device="cuda")
    cases = {
        "1 row": (every[:1], full[:1]),
        "8 rows": (every[:8], full[:8]),
        "64 rows": (every, full),
        "256 rows of one prompt": (torch.zeros_like(chunk), chunk),
    }
    for name, (slots, where) in cases.items():
        at, some = paging(slots, where, tables), random_rows(len(slots))
        store = time_us(lambda layer: cuda_fragments.store_kv(some, HEADS, cache, layer, at))  # noqa: B023
        read = time_us(
            lambda layer: cuda_fragments.attention(some, HEADS, cache, layer, None, at)  # noqa: B023
        )
        print(f"{kind:<5} {name:<36} store {store:7.1f} us   attention {read:7.1f} us", flush=True)
    return failed


def compile_all(kinds: list[str], build_dir: Path) -> None:
    """Compile what will be launched, on all cores."""
    jobs = [(kind, rows) for kind in kinds for rows in (1, 8, 64)] + [("rows", 0), ("commit", 0)]
    with ProcessPoolExecutor() as pool:
        list(pool.map(compile_one, jobs, [build_dir] * len(jobs)))


def compile_one(job: tuple[str, int], build_dir: Path) -> None:
    kind, rows = job
    if kind == "rows":
        kernels = [fragment_rows.store_rows(*HEADS[1:]), fragment_rows.gather_own(*HEADS[1:])]
    elif kind == "commit":
        kernels = [fragment_commit.commit_rows(HEADS[2])]
    else:
        kernels = [cuda_fragments.attention_variant(AttentionShape.of(*HEADS, kind), rows)]
    for kernel in kernels:
        ptx_of(kernel, build_dir)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kinds", default="fp16,int4")
    parser.add_argument("--context", type=int, default=1024)
    parser.add_argument("--build-dir", type=Path, default=Path("build/ptx"))
    options = parser.parse_args()
    if not torch.cuda.is_available():
        print("bench_fragments: no CUDA device, nothing checked")
        return 0
    kinds = options.kinds.split(",")
    compile_all(kinds, options.build_dir)
    runtime.set_build_dir(options.build_dir)
    failed = sum(check(kind, options.context) for kind in kinds)
    print(f"{failed} checks failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
