"""The GPU's general products, run on the emulator at tiny sizes: against the plain twin, and a row's bits in every kernel.

Tolerance: x keeps 2^-24 of each value or 2^-39 of its slice's largest, sums are fp32. Errors are measured against |x| |w| of row and output.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from kernels import cuda_linear, reference
from kernels.cuda_linear import Packed, linear, linear_add, pack
from kernels.cuda_linear_sliced import Sliced
from kernels.cuda_linear_tiled import Tiled

KINDS = ["fp16", "bf16", "int8", "fp32"]


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rows(n: int, num_in: int, seed: int = 1) -> Tensor:
    """Rows of very different sizes, with a large value among small ones."""
    x = rand(n, num_in, seed=seed) * 10 ** rand(n, 1, seed=seed + 1)
    x[:, num_in // 2] *= 300
    return x


def weights(num_out: int, num_in: int, kind: str) -> tuple[Tensor, Tensor | None]:
    if kind == "int8":
        make = torch.Generator().manual_seed(3)
        numbers = torch.randint(-128, 128, (num_out, num_in), generator=make, dtype=torch.int8)
        return numbers, rand(num_out, seed=4).abs() + 0.1
    types = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
    spread = 10 ** rand(num_out, 1, seed=5) if kind != "fp16" else 1
    return (rand(num_out, num_in, seed=3) * spread).to(types[kind]), None


def check(y: Tensor, x: Tensor, weight: Tensor, scale: Tensor | None, added: Tensor) -> None:
    w = weight.double() if scale is None else weight.double() * scale.double()[:, None]
    expected = x.double() @ w.T + added.double()
    size = x.double().norm(dim=1)[:, None] * w.norm(dim=1) + added.double().abs()
    assert ((y - expected).abs() <= 3e-7 * size).all(), ((y - expected).abs() / size).max()


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_out", "num_in", "n"), [(1, 1, 1), (17, 40, 9), (33, 85, 3)])
def test_products_of_every_kind(kind: str, num_out: int, num_in: int, n: int) -> None:
    weight, scale = weights(num_out, num_in, kind)
    bias, x, y = rand(num_out, seed=6), rows(n, num_in), rand(n, num_out, seed=7)
    packed = pack(weight, bias, scale)
    assert (packed.num_out, packed.num_in) == (num_out, num_in)
    check(linear(x, packed), x, weight, scale, bias)
    before = y.clone()
    linear_add(x, packed, y)
    check(y, x, weight, scale, before + bias)
    plain = reference.linear(x, reference.pack(weight, bias, scale))
    torch.testing.assert_close(linear(x, packed), plain, rtol=1e-4, atol=1e-4 * float(plain.abs().max()))  # fmt: skip


def test_no_rows_and_no_bias() -> None:
    packed = pack(rand(3, 5).half())
    assert linear(torch.empty(0, 5), packed).shape == (0, 3)
    check(linear(rows(2, 5), packed), rows(2, 5), rand(3, 5).half(), None, torch.zeros(3))


def test_int8_takes_a_byte_and_fp16_two() -> None:
    for kind, size in (("int8", 1), ("fp16", 2), ("bf16", 2), ("fp32", 4)):
        weight, scale = weights(256, 64, kind)
        assert pack(weight, None, scale).data.nbytes == 256 * 64 * size


def test_weights_beyond_the_range_of_halves_are_kept() -> None:
    weight = torch.tensor([[3e30, 1e30], [2e-30, -1e-30], [0.0, 0.0]])
    for dtype in (torch.float32, torch.bfloat16):
        x = torch.tensor([[1.0, 2.0]])
        check(linear(x, pack(weight.to(dtype))), x, weight.to(dtype), None, torch.zeros(3))


def test_a_row_of_infinite_values_stays_alone() -> None:
    packed, x = pack(rand(20, 40).half()), rows(9, 40)
    clean = linear(x, packed)
    x[4, 3] = torch.inf
    y = linear(x, packed)
    assert not y[4].isfinite().any()
    assert torch.equal(torch.cat([y[:4], y[5:]]), torch.cat([clean[:4], clean[5:]]))


@pytest.mark.parametrize(("kind", "num_in"), [("half", 300), ("int8", 70), ("pair", 70)])
def test_a_rows_bits_are_the_same_in_every_kernel(
    kind: str, num_in: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, among others, in blocks that go on to further tiles, and through every kind of kernel."""
    num_out, n = 34, 10
    weight, scale = weights(num_out, num_in, {"half": "fp16", "pair": "fp32"}.get(kind, kind))
    packed, x = pack(weight, rand(num_out), scale), rows(n, num_in)
    whole = linear(x, packed)
    for at in (0, 9):
        assert torch.equal(linear(x[at : at + 1].contiguous(), packed)[0], whole[at])
    monkeypatch.setattr(cuda_linear, "MULTIPROCESSORS", 1)
    y = torch.full((8, num_out), torch.nan)
    few = x[1:9].contiguous()
    cuda_linear.multiply_directly(Sliced(kind, 1, 1, 1, 16), few, packed, y, False)
    assert torch.equal(y, whole[1:9])
    staged = cuda_linear.stage(x)
    for shape in (Sliced(kind, 2, 2, 1), Tiled(kind, 1, 1, 2, 1, 2), Tiled(kind, 2, 1, 1, 2, 3)):
        y = torch.full((n, num_out), torch.nan)
        cuda_linear.multiply_staged(shape, *staged, packed, y, False)
        assert torch.equal(y, whole), shape


def test_tiled_products_add_too() -> None:
    weight, x, y = rand(20, 70).half(), rows(9, 70), rand(9, 20)
    packed: Packed = pack(weight, rand(20, seed=1))
    expected = y.clone()
    linear_add(x, packed, expected)
    cuda_linear.multiply_staged(
        Tiled("half", 1, 1, 1, 1, 2), *cuda_linear.stage(x), packed, y, True
    )
    assert torch.equal(y, expected)
