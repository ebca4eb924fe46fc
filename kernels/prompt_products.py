"""Library products of prompt rows at row counts that give equal bits.

A library may add in another order at another row count. `keep_equal` tries and keeps the counts at which a row has the bits that it
has at the largest; `pieces` covers any number of rows with them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

CANDIDATES = (
    64, 128, 192, 256, 384, 512, 640, 768, 1024, 1280, 1536, 1792, 2048, 2560, 3072, 3584, 4096, 5120, 6144, 7168,
    8192,
)  # fmt: skip


def multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """out = x W^T, fp16 with float32 sums."""
    torch.mm(x, weight.t(), out=out)


def add_product(x: Tensor, weight: Tensor, out: Tensor) -> None:
    """float32 out += x W^T of fp16 factors, never rounded to fp16."""
    if out.is_cuda:
        torch.addmm(out, x, weight.t(), out_dtype=torch.float32, out=out)
    else:
        out += x.float() @ weight.float().t()


Product = Callable[[Tensor, Tensor, Tensor], None]


def keep_equal(
    product: Product, weight: Tensor, candidates: Sequence[int] = CANDIDATES
) -> tuple[int, ...]:
    """The row counts, ascending, at which `product` gives a row the bits that it has at the largest, wherever it lies.

    Runs random rows. The largest candidate is always among the results.

    Raises:
        RuntimeError: a row's bits depend on its place even at the largest count.
    """
    n, k = weight.shape
    candidates = sorted(candidates)
    most = candidates[-1]
    make = torch.Generator(device=weight.device).manual_seed(1)
    x = torch.randn(most, k, generator=make, device=weight.device).half()
    dtype = torch.float32 if product is add_product else torch.half
    start = torch.randn(most, n, generator=make, device=weight.device).to(dtype)

    def run(first: int, rows: int, shift: int = 0) -> Tensor:
        out = start[first : first + rows].roll(shift, 0).contiguous()
        product(x[first : first + rows].roll(shift, 0).contiguous(), weight, out)
        return out.roll(-shift, 0)

    whole = run(0, most)
    if not torch.equal(whole, run(0, most, most // 2 + 1)):
        raise RuntimeError(f"products of {most} rows with {n} x {k} weights depend on the place")
    kept = []
    for rows in candidates[:-1]:
        firsts = sorted({0, most - rows})
        if all(
            torch.equal(whole[first : first + rows], run(first, rows, shift))
            for first in firsts
            for shift in (0, rows // 2 + 1)
        ):
            kept.append(rows)
    return (*kept, most)


def pieces(rows: int, counts: Sequence[int]) -> list[tuple[int, int]]:
    """(first row, row count) of the products that cover `rows` rows, each count one of `counts` (ascending)."""
    found = []
    first = 0
    while first < rows:
        count = next((c for c in counts if c >= rows - first), counts[-1])
        found.append((first, count))
        first += count
    return found
