"""What one kernel boundary costs: chains of kernels that do nothing, in a CUDA graph, by launch shape.

    python scripts/bench_kernels.py [--build-dir build/ptx]

A step of the reference model has 5 kernels a layer call, 160 in all, so a microsecond here is 0.16 ms there.
Prints one line a variant and one JSON line last; skips without a GPU. `--compile` only compiles.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from kernels.compiler import Variant, ptx_of  # noqa: E402
from kernels.intrinsics import (  # noqa: E402
    add_release,
    cluster_arrive,
    cluster_wait,
    grid_dependency_launch,
    grid_dependency_wait,
    grid_x,
    load_acquire,
    load_i32,
    store_32,
    sync_block,
    thread_id,
)
from kernels.launch import Library  # noqa: E402

CHAIN = 160


def _make_link(has_cluster: bool, touches_memory: bool) -> Any:
    def link(data: Any) -> None:
        grid_dependency_launch()
        if has_cluster:
            cluster_arrive()
        grid_dependency_wait()
        if has_cluster:
            cluster_wait()
        if touches_memory:
            store_32(data + thread_id() * 4, load_i32(data + thread_id() * 4) + 1)

    return link


def _make_barriers(count: int) -> Any:
    def barriers(counter: Any) -> None:
        for i in range(count):
            sync_block()
            if thread_id() == 0:
                add_release(counter, 1)
                while load_acquire(counter) < (i + 1) * grid_x():
                    pass
            sync_block()

    return barriers


def variants() -> list[tuple[str, Variant, tuple[int, int], bool]]:
    """(label, kernel, grid, whether kernels may overlap)."""
    found = []
    for cluster in (1, 8):
        for touches in (False, True):
            for shared in (0, 100 * 1024):
                variant = Variant(
                    f"link_c{cluster}_{int(touches)}_{shared}",
                    _make_link(cluster > 1, touches), "l", 256,
                    cluster=cluster, shared_bytes=shared, constants=(cluster, touches),
                )  # fmt: skip
                for overlapped in (True, False):
                    label = f"cluster {cluster}, shared {shared >> 10} KB"
                    label += ", reads and writes" if touches else ", empty"
                    label += ", overlapped" if overlapped else ", in turn"
                    found.append((label, variant, (120, 1), overlapped))
    barrier = Variant("barriers", _make_barriers(CHAIN), "l", 256, constants=(CHAIN,))
    found.append(("grid barriers in one kernel", barrier, (120, 1), False))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--build-dir", type=Path, default=Path("build/ptx"))
    parser.add_argument("--compile", action="store_true")
    options = parser.parse_args()
    if options.compile:
        for _, variant, _, _ in variants():
            ptx_of(variant, options.build_dir)
        return 0
    if not torch.cuda.is_available():
        print("bench_kernels: no CUDA device, nothing measured")
        return 0
    library = Library(options.build_dir)
    data = torch.zeros(4096, dtype=torch.int32, device="cuda")
    results = {}
    for label, variant, grid, overlapped in variants():
        kernel = library.get(variant)
        stream = torch.cuda.Stream()
        graph = torch.cuda.CUDAGraph()
        count = 1 if variant.name == "barriers" else CHAIN
        with torch.cuda.graph(graph, stream=stream):
            if count == 1:
                data.zero_()
            for i in range(count):
                kernel.launch(
                    grid, (data.data_ptr(),), stream.cuda_stream, is_overlapped=overlapped and i > 0
                )
        times = []
        for _ in range(12):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            times.append(start.elapsed_time(end))
        results[label] = sorted(times)[6] / CHAIN * 1e3
        print(f"{label:<56} {results[label]:6.2f} us")
    print(json.dumps(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())
