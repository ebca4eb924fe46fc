"""The logic of the persistent core kernel, run on the emulator at tiny sizes: the same bits as the kernels one by one."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any, cast

import pytest
import torch

from gpu_worker.graphs import REFERENCE, DecodeCache, DecodeRunner, DecodeSpec, DecodeWeights
from gpu_worker.persistent import PersistentRunner, core_launch
from kernels import emulator
from kernels.compiler import Variant
from kernels.launch import Library
from kernels.linear_shapes import Launch
from kernels.persistent_shapes import PRODUCTS
from kernels.persistent_shares import seats, share_tiles


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    emulator.forget()


class EmulatedKernel:
    def __init__(self, variant: Variant) -> None:
        self.variant = variant

    def launch(
        self, grid: tuple[int, int], args: Sequence[Any], stream: int, *, is_overlapped: bool
    ) -> None:
        del stream, is_overlapped
        variant = self.variant
        emulator.run(
            variant.function, grid, variant.num_threads,
            [*args, *[0] * (len(variant.args) - len(args))],
            cluster=variant.cluster, shared_bytes=variant.shared_bytes,
            is_together=variant.is_together,
        )  # fmt: skip


class Emulated:
    """A `Library` whose kernels run on the emulator."""

    def get(self, variant: Variant) -> EmulatedKernel:
        return EmulatedKernel(variant)


def _tensors(spec: DecodeSpec) -> dict[str, torch.Tensor]:
    torch.manual_seed(0)

    def matrix(n: int, k: int) -> torch.Tensor:
        return (torch.randn(n, k) / k**0.5).half()

    d, width = spec.d_model, (spec.n_heads + 2 * spec.n_kv_heads) * spec.head_dim
    tensors = {"embed": torch.randn(spec.vocab, d).half(), "head": matrix(spec.vocab, d)}
    tensors["norm"] = torch.rand(d) + 0.5
    for layer in range(spec.layers):
        tensors |= {
            f"{layer}.qkv": matrix(width, d),
            f"{layer}.o": matrix(d, spec.n_heads * spec.head_dim),
            f"{layer}.gate_up": matrix(2 * spec.d_ff, d),
            f"{layer}.down": matrix(d, spec.d_ff),
            f"{layer}.norm1": torch.rand(d) + 0.5,
            f"{layer}.norm3": torch.rand(d) + 0.5,
        }
    return tensors


def _cache(spec: DecodeSpec, tables: torch.Tensor) -> DecodeCache:
    """Random; with int4 the exact blocks are numbered as the others, and every first block has sinks but that of row 3."""
    torch.manual_seed(1)
    cache = DecodeCache(spec, tables.numel(), tables.numel(), "cpu")
    cache.exact.view(torch.half).normal_()
    if spec.kv_format == "int4":
        cache.stored.random_(0, 256)
        part = spec.attention.stored_bytes
        pairs = cache.stored.view(len(cache.stored), -1, part)[..., part - 256 :].view(torch.half)
        pairs.copy_(torch.tensor([0.2, -1.5]).repeat(64) + torch.rand(pairs.shape) / 8)
        cache.sinks.view(torch.half).normal_()
        firsts = tables[:, :, 0]
        cache.sink_of[firsts.flatten()] = torch.arange(firsts.numel(), dtype=torch.int32)
        cache.sink_of[firsts[3:].flatten()] = -1
    return cache


def _pools(cache: DecodeCache) -> tuple[torch.Tensor, ...]:
    return cache.exact, cache.stored, cache.sinks


def _fill(runner: DecodeRunner, positions: list[int], tables: torch.Tensor) -> None:
    runner.tokens.copy_(torch.arange(len(positions)) * 3 % runner.spec.vocab)
    runner.positions.copy_(torch.tensor(positions))
    runner.row_info[:, 0] = torch.tensor([max(p, 0) >> 6 for p in positions])
    runner.tables.copy_(tables)
    runner.exact_blocks.copy_(tables.flip(2))


def _register(runner: DecodeRunner) -> None:
    cache = runner.cache
    owned = [*vars(runner).values(), *runner.weights.packed.values(), *vars(cache).values()]
    if isinstance(runner, PersistentRunner):
        owned += [*vars(runner.core).values(), *runner.core.pointers.values()]
    emulator.register(*(value for value in owned if isinstance(value, torch.Tensor)))


SMALL = DecodeSpec(64, 1, 1, 64, 48, 40, 1, 2, max_pos=2048)
WIDER = DecodeSpec(64, 1, 1, 128, 48, 40, 1, 1, max_pos=2048)
STORED = replace(WIDER, kv_format="int4")
NARROW = replace(SMALL, loops=1, kv_format="int4")
GROUPED = DecodeSpec(64, 3, 1, 64, 48, 40, 1, 1, max_pos=2048, kv_format="int4")


@pytest.mark.parametrize(
    ("spec", "positions", "blocks", "options"),
    [
        pytest.param(SMALL, [70], 2, {"groups": 2, "urgent": 2, "has_prefetch": True}, id="row"),
        pytest.param(SMALL, [64, -1, 0], 2, {"groups": 2}, id="rows"),
        pytest.param(WIDER, [1030], 2, {"groups": 2, "team": 2, "has_prefetch": True}, id="team"),
        pytest.param(STORED, [1093], 2, {"groups": 2, "has_prefetch": True}, id="stored"),
        pytest.param(NARROW, [70], 2, {"groups": 2, "at_once": 4}, id="a few stored"),
        pytest.param(GROUPED, [127, -1, 2, 64], 2, {"groups": 2}, id="ends of blocks"),
    ],
)
def test_gives_the_bits_of_the_kernels_one_by_one(
    spec: DecodeSpec, positions: list[int], blocks: int, options: dict[str, int]
) -> None:
    rows, max_blocks = len(positions), max(positions) // 64 + 1
    library = cast(Library, Emulated())
    weights = DecodeWeights(spec, _tensors(spec))
    tables = torch.randperm(rows * spec.loops * max_blocks).view(rows, spec.loops, max_blocks)
    caches = [_cache(spec, tables) for _ in range(2)]
    before = [pool.clone() for pool in _pools(caches[0])]
    head = {"head": Launch(weights.shapes["head"], 8, 1, max_rows=8)}  # one cluster, small blocks
    one_by_one = DecodeRunner(weights, caches[0], rows, max_blocks, library, instead=head)
    together = PersistentRunner(weights, caches[1], rows, max_blocks, library, blocks, **options)
    for runner in (one_by_one, together):
        _fill(runner, positions, tables)
        _register(runner)
        runner.launch_step(0)
    real = [row for row, position in enumerate(positions) if position >= 0]
    assert not torch.equal(caches[0].exact, before[0])
    for name, first, second in zip(("exact", "stored", "sinks"), *map(_pools, caches), strict=True):
        assert torch.equal(first, second), name
    for name in ("x", "logits"):
        assert torch.equal(getattr(one_by_one, name)[real], getattr(together, name)[real]), name
    if spec is NARROW:  # the quick case
        return
    again = together.logits.clone()
    together.logits.zero_()
    together.launch_step(0)
    assert torch.equal(together.logits[real], again[real])


def test_tiles_are_shared_out_once_and_evenly() -> None:
    shape = core_launch(REFERENCE, 1).shape
    shares = share_tiles(shape.products, 132)
    loads = [0.0] * 132
    for p, name in enumerate(PRODUCTS):
        if name != "head":
            size = getattr(shape, name).tile_bytes
            loads = [a + share[p][1] * size for a, share in zip(loads, shares, strict=True)]
    assert max(loads) < 1.12 * sum(loads) / 132
    # a third tile of qkv behind one of down would not find room in the rings before it is needed
    assert all(qkv[1] <= 2 for qkv, _, _, down, _ in shares if down[1])
    places = seats(shares)
    assert sorted(places) == list(range(132))
    in_order = [shares[places.index(place)][0][1] for place in range(132)]
    assert in_order == sorted(in_order)


@pytest.mark.parametrize("spec", [REFERENCE, SMALL, GROUPED, DecodeSpec(128, 4, 4, 64, 128, 512, 2, 8), DecodeSpec(512, 8, 8, 64, 1024, 300, 2, 4)])  # fmt: skip
@pytest.mark.parametrize("num_blocks", [2, 132])
def test_every_tile_is_a_blocks(spec: DecodeSpec, num_blocks: int) -> None:
    shape = core_launch(spec, 1).shape
    shares = share_tiles(shape.products, num_blocks)
    for p, name in enumerate(PRODUCTS):
        firsts_and_counts = [share[p][:2] for share in shares]
        tiles = [t for first, count in firsts_and_counts for t in range(first, first + count)]
        assert tiles == list(range(-(-getattr(shape, name).n // 16)))
        assert min(count for _, count in firsts_and_counts) >= 0
