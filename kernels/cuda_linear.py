"""Products of any shape on the GPU, close to fp32 accuracy: packed weights, and which kernel multiplies how many rows.

The accuracy-first path that every architecture can take: x in fp32 is split into two planes of halves, both multiply W. A row's bits
depend on its own values, K and W alone: all kernels keep to the slices and the order of `kernels.cuda_linear_parts`, whatever the
number of rows. Called through `kernels.cuda`; launches through `kernels.runtime`.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from torch import Tensor

from kernels.compiler import Variant
from kernels.cuda_linear_parts import (
    GROUP,
    GROUP_BYTES,
    SLICES,
    Sliced,
    make_sliced,
    make_stage_kernel,
)
from kernels.cuda_linear_tiled import Tiled, make_tiled
from kernels.layout import Packed
from kernels.runtime import launch

MULTIPROCESSORS = 132
_PRODUCT_ARGS = "llllll" + "rrrrrrr"
# Groups of 32 columns up to which a block of few rows stages x itself, by how much shared memory that takes.
_DIRECT_GROUPS = (48, 128, 216)


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight lies in memory: tiles of 16 rows, each in groups of 32 columns; `kind` is half, pair or int8."""

    kind: str
    num_tiles: int
    groups: int


def pack(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Packed:
    """A weight (num_out, num_in) in the order of the matrix unit, on its own device.

    fp16 stays as it is; int8 (with fp32 `scale` (num_out,)) takes one byte; bf16 becomes fp16 times a power of two per row (exact but
    for what is below 2^-38 of the row's largest); fp32 becomes two planes of fp16, high and low, times a power of two per row.
    `Packed.data` is [tile][group][plane][step of 16 columns][lane][8 halves] (int8: [tile][group][lane][16 bytes], each plus 128);
    `Packed.scale` fp32 (num_out,) is what a row's sum is multiplied with.
    """
    num_out, num_in = weight.shape
    form = Form("half", -(-num_out // 16), -(-num_in // GROUP))
    if scale is not None:
        form = Form("int8", form.num_tiles, form.groups)
        biased = (weight.to(torch.int16) + 128).to(torch.uint8)
        planes, factor = [_fragments(biased, form, 128)], scale.float()
    elif weight.dtype == torch.float16:
        planes, factor = [_fragments(weight, form, 0)], torch.ones(num_out, device=weight.device)
    else:
        values = weight.float()
        exponent = torch.frexp(values.abs().amax(1)).exponent.clamp(min=-100)
        values = torch.ldexp(values, (15 - exponent)[:, None])
        factor = torch.ldexp(torch.ones(num_out, device=weight.device), exponent - 15)
        high = values.half()
        planes = [_fragments(high, form, 0)]
        if weight.dtype != torch.bfloat16:
            form = Form("pair", form.num_tiles, form.groups)
            planes.append(_fragments((values - high.float()).half(), form, 0))
    data = torch.stack(planes, 2).contiguous().view(torch.uint8).view(-1)
    bias = None if bias is None else bias.float().contiguous()
    return Packed(data, num_out, num_in, bias, factor.contiguous(), form)


def _fragments(weight: Tensor, form: Form, zero: int) -> Tensor:
    """(num_tiles, groups, values of a plane's group): int8 has both steps of a lane side by side."""
    padded = weight.new_full((form.num_tiles * 16, form.groups * GROUP), zero)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    parts = padded.view(form.num_tiles, 2, 8, form.groups, 4, 2, 2, 2)
    # axes: 0 tile 1 high row 2 g 3 group 4 t 5 step 6 high column 7 half
    order = (0, 3, 2, 4, 5, 6, 1, 7) if form.kind == "int8" else (0, 3, 5, 2, 4, 6, 1, 7)
    return parts.permute(*order).reshape(form.num_tiles, form.groups, -1)


def linear(x: Tensor, weight: Packed) -> Tensor:
    """x W^T (+ bias): fp32 (n, num_in) -> (n, num_out)."""
    y = torch.empty(x.shape[0], weight.num_out, device=x.device)
    _multiply(x, weight, y, is_add=False)
    return y


def linear_add(x: Tensor, weight: Packed, y: Tensor) -> None:
    """y += x W^T (+ bias) in place."""
    _multiply(x, weight, y, is_add=True)


def _multiply(x: Tensor, weight: Packed, y: Tensor, *, is_add: bool) -> None:
    assert x.is_contiguous() and y.is_contiguous(), "the kernel goes by addresses"
    if len(x) == 0:
        return
    fitting = [groups for groups in _DIRECT_GROUPS if weight.arrays.groups <= groups]
    if x.shape[0] <= 8 and fitting:
        multiply_directly(direct_shape(weight.arrays.kind, fitting[0]), x, weight, y, is_add)
        return
    multiply_staged(staged_shape(weight.arrays.kind, x.shape[0]), *stage(x), weight, y, is_add)


def stage(x: Tensor) -> tuple[Tensor, Tensor]:
    """x split into planes of halves in the matrix unit's order, and what undoes the scale of each row's slices."""
    n, num_in = x.shape
    row_tiles, groups = -(-n // 8), -(-num_in // GROUP)
    planes = torch.empty(row_tiles * groups * 512, dtype=torch.int16, device=x.device)
    inverse = torch.empty(n * SLICES, device=x.device)
    launch(_stage(), (row_tiles, SLICES), x, planes, inverse, n, num_in, groups)
    return planes, inverse


def multiply_directly(shape: Sliced, x: Tensor, weight: Packed, y: Tensor, is_add: bool) -> None:
    """y = or += x W^T for up to 8 rows of x in fp32, with the kernel of `shape`."""
    blocks = min(weight.arrays.num_tiles, MULTIPROCESSORS * shape.blocks_per_sm)
    _launch_product(sliced(shape), (blocks, 1), x, None, weight, y, is_add)


def multiply_staged(
    shape: Sliced | Tiled, planes: Tensor, inverse: Tensor, weight: Packed, y: Tensor, is_add: bool
) -> None:
    """y = or += x W^T for any number of rows of a staged x, with the kernel of `shape`."""
    num_tiles, num_columns = weight.arrays.num_tiles, -(-len(y) // 8)
    if isinstance(shape, Tiled):
        grid = -(-num_columns // shape.block_columns), -(-num_tiles // shape.block_tiles)
        _launch_product(tiled(shape), grid, planes, inverse, weight, y, is_add)
        return
    grid = -(-num_tiles // shape.tiles), -(-num_columns // shape.columns)
    _launch_product(sliced(shape), grid, planes, inverse, weight, y, is_add)


def _launch_product(
    variant: Variant, grid: tuple[int, int], x: Tensor, inverse: Tensor | None, weight: Packed, y: Tensor, is_add: bool
) -> None:  # fmt: skip
    form: Form = weight.arrays
    launch(
        variant, grid, weight.data, weight.scale, weight.bias, x, inverse, y, len(y), weight.num_out,
        weight.num_in, form.groups, form.num_tiles, int(is_add), int(weight.bias is not None),
    )  # fmt: skip


def direct_shape(kind: str, max_groups: int) -> Sliced:
    """For up to 8 rows."""
    is_small = max_groups == _DIRECT_GROUPS[0]
    chunk, blocks = (2, 3) if is_small else (4, 1)
    if kind == "pair":
        chunk, blocks = chunk // 2, min(blocks, 2)
    return Sliced(kind, 1, 1, chunk, max_groups, blocks)


def staged_shape(kind: str, n: int) -> Sliced:
    """For more rows."""
    if n <= 16:
        return Sliced(kind, 1, 2, 1, blocks_per_sm=1 if kind == "pair" else 2)
    return Sliced(kind, 2 if n <= 64 or kind == "pair" else 4, 4, 1)


@cache
def _stage() -> Variant:
    """Splits x; see `make_stage_kernel`."""
    return Variant(name="stage_rows", function=make_stage_kernel(), args="lllrrr", num_threads=32)


@cache
def sliced(shape: Sliced) -> Variant:
    """The product of `shape`; see `make_sliced`."""
    how = f"_s{shape.max_groups}" if shape.max_groups else ""
    return Variant(
        name=f"product_{shape.kind}_{shape.tiles}x{shape.columns}{how}",
        function=make_sliced(shape),
        args=_PRODUCT_ARGS,
        num_threads=32 * SLICES,
        shared_bytes=shape.shared_bytes,
        blocks_per_sm=shape.blocks_per_sm,
        constants=(shape,),
    )


@cache
def tiled(shape: Tiled) -> Variant:
    """The product of `shape`; see `make_tiled`."""
    rows, columns = 16 * shape.block_tiles, 8 * shape.block_columns
    return Variant(
        name=f"product_{shape.kind}_{rows}x{columns}_tiled",
        function=make_tiled(shape),
        args=_PRODUCT_ARGS,
        num_threads=shape.num_threads,
        shared_bytes=shape.shared_bytes,
        blocks_per_sm=shape.blocks_per_sm,
        constants=(shape,),
    )


def variants() -> dict[str, Variant]:
    """Every kernel here, by name."""
    found = [_stage()]
    for kind in GROUP_BYTES:
        found += [sliced(direct_shape(kind, groups)) for groups in _DIRECT_GROUPS]
        found += [sliced(staged_shape(kind, n)) for n in (16, 64, 256)]
    return {variant.name: variant for variant in found}
