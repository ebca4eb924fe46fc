"""The logic of the few-row products, run on the emulator at tiny sizes against plain PyTorch."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import emulator, fragments, linear, linear_shapes
from kernels.compiler import Variant
from kernels.fragments import ProductShape
from kernels.linear_shapes import HeadShape, Launch, WideLaunch

_TARGET = ProductShape(16, 32, 1)


@pytest.fixture(autouse=True)
def memory() -> Iterator[None]:
    yield
    emulator.forget()


def _run(variant: Variant, clusters: int, chunks: int, *args: object) -> None:
    flat = []
    for arg in args:
        if isinstance(arg, torch.Tensor):
            emulator.register(arg)
            flat.append(arg.data_ptr())
        else:
            flat.append(arg)
    flat += [0] * (13 - len(flat))
    emulator.run(
        variant.function,
        (clusters * variant.cluster, chunks),
        variant.num_threads,
        flat,
        cluster=variant.cluster,
        shared_bytes=variant.shared_bytes,
    )


def _squares(x: torch.Tensor) -> torch.Tensor:
    return x.view(x.shape[0], -1, 16).square().sum(-1).contiguous()


def _normed(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """What a product makes of x, which comes times the gain and as fp16; its row's factor joins the sums."""
    return (x * gain).half().float() * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def _place(rows: int, columns: int, shape: ProductShape, column_tiles: int) -> torch.Tensor:
    grid = torch.arange(rows)[:, None], torch.arange(columns)
    return fragments.packed_place(*grid, shape, column_tiles)


def _pack(x: torch.Tensor, shape: ProductShape, column_tiles: int) -> torch.Tensor:
    """fp16 activations in the order of their reader; what belongs to no row is NaN, padding of K is zero."""
    size = fragments.packed_size(len(x), shape, column_tiles)
    packed = torch.full((size,), float("nan")).half()
    padded = torch.nn.functional.pad(x, (0, fragments.RANKS * shape.k_slice - x.shape[1]))
    packed[_place(*padded.shape, shape, column_tiles)] = padded.half()
    return packed


def _prescaled(x: torch.Tensor, gain: torch.Tensor, launch: Launch | WideLaunch) -> torch.Tensor:
    return _pack(x * gain * fragments.PRESCALE, launch.shape, launch.column_tiles)


def _weight(n: int, k: int) -> torch.Tensor:
    return (torch.randn(n, k) / k**0.5).half()


@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (1, Launch(ProductShape(40, 256, 1), 1, 1)),
        (3, Launch(ProductShape(32, 512, 1, 2), 1, 2, max_rows=8)),
        (9, Launch(ProductShape(32, 200, 2), 2, 1, max_rows=8)),
    ],
    ids=["row", "sub_slices", "padded_k_two_chunks"],
)
def test_store_matches_pytorch(rows: int, launch: Launch) -> None:
    torch.manual_seed(rows)
    n, k = launch.shape.n, launch.shape.k
    weight, x = _weight(n, k), torch.randn(rows, k).half()
    packed = fragments.pack_weight(weight, launch.shape, fragments.plain_rows(n, launch.shape))
    out = torch.full((rows, n), float("nan"))
    variant = linear.store_product("t", launch, is_normed=False)
    ordered = _pack(x, launch.shape, launch.column_tiles)
    _run(variant, launch.clusters, -(-rows // launch.columns), packed, ordered, 0, rows, 0.0, out)
    torch.testing.assert_close(out, x.float() @ weight.float().T, rtol=1e-5, atol=1e-5)


def test_rounds_go_through_the_ring(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    monkeypatch.setattr(linear_shapes, "CLUSTERS", 1)
    launch = Launch(ProductShape(16 * 5 - 4, 256, 1), 1, 1, 2, 2)
    n, k, rows = launch.shape.n, launch.shape.k, 2
    assert launch.rounds == 5
    weight, x, gain = _weight(n, k), torch.randn(rows, k), torch.rand(k) + 0.5
    packed = fragments.pack_weight(weight, launch.shape, fragments.plain_rows(n, launch.shape))
    out = torch.full((rows, n), float("nan"))
    variant = linear.store_product("t", launch, is_normed=True)
    ordered = _prescaled(x, gain, launch)
    _run(variant, launch.clusters, 1, packed, ordered, _squares(x), rows, 1e-6, out)
    torch.testing.assert_close(out, _normed(x, gain) @ weight.float().T, rtol=1e-4, atol=2e-4)


def test_residual_adds_and_leaves_what_the_next_norm_needs() -> None:
    torch.manual_seed(1)
    launch = Launch(ProductShape(32, 256, 1), 1, 1, max_rows=3)
    weight, h, x = _weight(32, 256), torch.randn(3, 256).half(), torch.randn(3, 32)
    x[0, 0] = 3e7  # more than fp16 holds, even prescaled
    packed = fragments.pack_weight(weight, launch.shape, fragments.plain_rows(32, launch.shape))
    expected = x + h.float() @ weight.float().T
    squares, gain, target = torch.full((3, 2), float("nan")), torch.rand(32) + 0.5, _TARGET
    following = torch.zeros(fragments.packed_size(3, target, 1)).half()
    _run(
        linear.residual_product("t", launch, target), 2, 1,
        packed, _pack(h, launch.shape, 1), 0, 3, 0.0, x, squares, gain, following,
    )  # fmt: skip
    torch.testing.assert_close(x, expected, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(squares, _squares(expected), rtol=1e-4, atol=1e-4)
    read = following[_place(3, 32, target, 1)].float()
    wanted = (expected * gain * fragments.PRESCALE).clamp(-65504, 65504)
    torch.testing.assert_close(read, wanted, rtol=1e-3, atol=1e-3)


def test_gated_matches_swiglu() -> None:
    torch.manual_seed(2)
    launch = Launch(ProductShape(2 * 24, 256, 1), 1, 1, max_rows=2)
    weight, x, gain = _weight(48, 256), torch.randn(2, 256), torch.rand(256) + 0.5
    packed = fragments.pack_weight(weight, launch.shape, fragments.gated_rows(24, launch.shape))
    target = ProductShape(16, 24, 1)
    out = torch.full((fragments.packed_size(2, target, 1),), float("nan")).half()
    _run(
        linear.gated_product("t", launch, target), launch.clusters, 1,
        packed, _prescaled(x, gain, launch), _squares(x), 2, 1e-6, out,
    )  # fmt: skip
    y = _normed(x, gain) @ weight.float().T
    expected = torch.nn.functional.silu(y[:, :24]) * y[:, 24:]
    torch.testing.assert_close(
        out[_place(2, 24, target, 1)].float(), expected, rtol=2e-3, atol=2e-3
    )


@pytest.mark.parametrize(
    ("is_half", "is_wide"),
    [(True, False), (True, True), pytest.param(False, False, marks=pytest.mark.slow)],
)
def test_qkv_turns_and_writes_the_cache(is_half: bool, is_wide: bool) -> None:
    torch.manual_seed(3)
    dim, heads, kv, d, rows = 32, 2, 1, 256, 2
    cut = ProductShape((heads + 2 * kv) * dim, d, 1)
    launch = WideLaunch(cut, 4, 2, 1, 1, 2, 2) if is_wide else Launch(cut, 1, 1, max_rows=2)
    weight, x, gain = _weight(launch.shape.n, d), torch.randn(rows, d), torch.ones(d)
    order = fragments.qkv_rows(heads, kv, dim, is_half, launch.shape)
    packed = fragments.pack_weight(weight, launch.shape, order)
    shape = HeadShape(heads, kv, dim, True, is_half)
    cache = torch.zeros(3, kv, 2, 64 * dim).half()
    slots = torch.tensor([2 * 64 + 5, -1], dtype=torch.int32)
    angle = torch.rand(rows, dim // 2) * 6
    rope = torch.stack([angle.cos(), angle.sin()], -1).contiguous()
    q = torch.zeros(rows, heads, dim).half()
    variant = linear.qkv_product("t", launch, shape)
    _run(
        variant, launch.clusters, 1, packed, _prescaled(x, gain, launch), _squares(x), rows, 1e-6,
        q, cache, slots, rope, kv * shape.head_bytes,
    )  # fmt: skip
    y = (_normed(x, gain) @ weight.float().T).view(rows, heads + 2 * kv, dim)

    def turn(v: torch.Tensor) -> torch.Tensor:
        cos, sin = rope[0, :, 0], rope[0, :, 1]
        a, b = (v[..., : dim // 2], v[..., dim // 2 :]) if is_half else (v[..., ::2], v[..., 1::2])
        parts = (a * cos - b * sin, b * cos + a * sin)
        return torch.cat(parts, -1) if is_half else torch.stack(parts, -1).flatten(-2)

    scale = 1.4426950408889634 / dim**0.5
    tolerance = {"rtol": 2e-3, "atol": 2e-3}
    torch.testing.assert_close(q[0].float(), turn(y[0, :heads]) * scale, **tolerance)
    assert not q[1].any()
    keys = fragments.unpack_keys(cache[2, 0, 0], dim)
    values = fragments.unpack_values(cache[2, 0, 1], dim)
    torch.testing.assert_close(keys[5].float(), turn(y[0, heads]), **tolerance)
    torch.testing.assert_close(values[5].float(), y[0, heads + kv], **tolerance)
    assert torch.count_nonzero(cache) <= 2 * dim


@pytest.mark.parametrize(
    ("rows", "launch"),
    [
        (16, WideLaunch(ProductShape(24, 512, 2), 2, 1, 1, 2, 3, 2)),
        (17, WideLaunch(ProductShape(32, 256, 1), 2, 2, 1, 2, 2, 2)),
        (9, WideLaunch(ProductShape(64, 512, 2, 2), 4, 1, 1, 2, 2, 2)),
        (5, WideLaunch(ProductShape(120, 256, 2), 2, 1, 1, 1, 3, 2, True, 1)),
        (39, WideLaunch(ProductShape(56, 256, 2), 4, 4, 1, 8, 2, 2)),
        (34, WideLaunch(ProductShape(120, 256, 2), 8, 4, 1, 8, 2, 2)),
    ],
    ids=["ring", "two_chunks", "four_parts", "rounds_with_kept_x", "warpgroup", "two_tiles_a_warp"],
)
def test_wide_products_have_the_bits_of_single_rows(rows: int, launch: WideLaunch) -> None:
    torch.manual_seed(rows)
    shape, row = launch.shape, rows - 1
    weight, x, gain = (
        _weight(shape.n, shape.k),
        torch.randn(rows, shape.k),
        torch.rand(shape.k) + 0.5,
    )
    packed = fragments.pack_weight(weight, shape, fragments.plain_rows(shape.n, shape))
    out, alone = torch.full((rows, shape.n), float("nan")), torch.zeros(1, shape.n)
    few = Launch(shape, shape.group, shape.group * shape.sub_slices)
    for some, one, y in ((slice(0, rows), launch, out), (slice(row, rows), few, alone)):
        _run(
            linear.store_product("t", one, is_normed=True), one.clusters, -(-len(y) // one.columns),
            packed, _prescaled(x[some], gain, one), _squares(x[some]), len(y), 1e-6, y,
        )  # fmt: skip
    torch.testing.assert_close(out, _normed(x, gain) @ weight.float().T, rtol=1e-4, atol=2e-4)
    assert torch.equal(alone[0], out[row])


def test_wide_residuals_leave_what_single_rows_leave() -> None:
    torch.manual_seed(5)
    shape, rows = ProductShape(32, 256, 2), 10
    weight, h, x = _weight(32, 256), torch.randn(rows, 256).half(), torch.randn(rows, 32)
    packed = fragments.pack_weight(weight, shape, fragments.plain_rows(32, shape))
    gain, left = torch.rand(32) + 0.5, []
    wide, few = WideLaunch(shape, 2, 1, 1, 2, 2, 2), Launch(shape, 2, 2)
    for some, launch in ((slice(0, rows), wide), (slice(9, 10), few)):
        y, n = x[some].clone(), len(x[some])
        squares = torch.zeros(n, 2)
        following = torch.zeros(fragments.packed_size(n, _TARGET, launch.column_tiles)).half()
        _run(
            linear.residual_product("t", launch, _TARGET), 1, 1,
            packed, _pack(h[some], shape, launch.column_tiles), 0, n, 0.0, y, squares, gain, following,
        )  # fmt: skip
        read = following[_place(n, 32, _TARGET, launch.column_tiles)]
        left.append(torch.cat([y, squares, read.float()], 1)[-1])
    assert torch.equal(*left)
    torch.testing.assert_close(
        left[0][:32], x[9] + weight.float() @ h[9].float(), rtol=1e-5, atol=1e-5
    )


def test_cache_order_round_trips() -> None:
    x = torch.randn(3, 64, 96).half()
    assert torch.equal(fragments.unpack_keys(fragments.pack_keys(x), 96), x)
    assert torch.equal(fragments.unpack_values(fragments.pack_values(x), 96), x)
    p, d = 37, 53
    assert fragments.pack_keys(x)[1, fragments.key_place(p, d, 96)] == x[1, p, d]
    assert fragments.pack_values(x)[1, fragments.value_place(p, d)] == x[1, p, d]
