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
    RUN,
    SLICES,
    make_stage_kernel,
)
from kernels.cuda_linear_sliced import Sliced, make_sliced
from kernels.cuda_linear_tiled import Tiled, make_tiled
from kernels.layout import Packed
from kernels.runtime import launch

MULTIPROCESSORS = 132
_PRODUCT_ARGS = "llllll" + "rrrrrrr"
# Groups of 32 columns up to which a block of few rows stages x itself, by how much shared memory that takes.
_DIRECT_GROUPS = (48, 128, 216)
_MANY_BLOCKS = 180  # from so many blocks on, sharing tiles is faster (measured)


@dataclass(frozen=True, slots=True)
class Form:
    """How a weight lies in memory: tiles of 16 rows in runs of 8, groups of 32 columns; `kind` is half, pair or int8."""

    kind: str
    num_tiles: int
    groups: int


def pack(weight: Tensor, bias: Tensor | None = None, scale: Tensor | None = None) -> Packed:
    """A weight (num_out, num_in) in the order of the matrix unit, on its own device.

    fp16 stays as it is; int8 (with fp32 `scale` (num_out,)) takes one byte; bf16 becomes fp16 times a power of two per row (exact but
    for what is below 2^-38 of the row's largest); fp32 becomes two planes of fp16, high and low, times a power of two per row.
    `Packed.data` is [8 tiles][group][tile][plane][step of 16 columns][lane][8 halves] (int8: [..][tile][lane][16 bytes], each plus 128);
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
    data = torch.stack(planes, 3).contiguous().view(torch.uint8).view(-1)
    bias = None if bias is None else bias.float().contiguous()
    return Packed(data, num_out, num_in, bias, factor.contiguous(), form)


def _fragments(weight: Tensor, form: Form, zero: int) -> Tensor:
    """(runs of tiles, groups, RUN, values of a plane's group): int8 has both steps of a lane side by side."""
    runs = -(-form.num_tiles // RUN)
    padded = weight.new_full((runs * RUN * 16, form.groups * GROUP), zero)
    padded[: weight.shape[0], : weight.shape[1]] = weight
    parts = padded.view(runs, RUN, 2, 8, form.groups, 4, 2, 2, 2)
    # axes: 0 run 1 tile 2 high row 3 g 4 group 5 t 6 step 7 high column 8 half
    order = (0, 4, 1, 3, 5, 6, 7, 2, 8) if form.kind == "int8" else (0, 4, 1, 6, 3, 5, 7, 2, 8)
    return parts.permute(*order).reshape(runs, form.groups, RUN, -1)


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
    form: Form = weight.arrays
    if len(x) <= 8 and form.groups <= _DIRECT_GROUPS[-1]:
        shape = direct_shape(form.kind, form.num_tiles, form.groups)
        multiply_directly(shape, x, weight, y, is_add)
    else:
        staged = staged_shape(form.kind, form.num_tiles, len(x))
        multiply_staged(staged, *stage(x), weight, y, is_add)


def stage(x: Tensor) -> tuple[Tensor, Tensor]:
    """x split into planes of halves in the matrix unit's order, and what undoes the scale of each row's slices."""
    n, num_in = x.shape
    row_tiles, groups = -(-n // 8), -(-num_in // GROUP)
    runs = -(-row_tiles // RUN)
    planes = torch.empty(runs * RUN * groups * 512, dtype=torch.int16, device=x.device)
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


def direct_shape(kind: str, num_tiles: int, groups: int) -> Sliced:
    """For up to 8 rows: few tiles give each block a multiprocessor and deep prefetches."""
    is_small = groups <= _DIRECT_GROUPS[0]
    is_few = num_tiles <= MULTIPROCESSORS
    max_groups = next(most for most in _DIRECT_GROUPS if groups <= most)
    chunk, blocks = (3, 2) if is_small and not is_few else (6, 1)
    if kind == "pair":
        chunk, blocks = -(-chunk // 2), 1
    return Sliced(kind, 1, 1, chunk, max_groups, blocks, 4 if is_small else 8)


def staged_shape(kind: str, num_tiles: int, n: int) -> Sliced | Tiled:
    """For more rows."""
    if kind == "pair":
        return Sliced(kind, 1, 2, 1) if n <= 16 else Sliced(kind, 2, 4, 1)
    if n <= 16:
        is_few = num_tiles <= MULTIPROCESSORS
        return Sliced(kind, 1, 2, 2) if is_few else Sliced(kind, 2, 2, 1, blocks_per_sm=2)
    many = Tiled(kind, 4, 4, 2, 2, 6, 2)
    num_blocks = -(-num_tiles // many.block_tiles) * -(-n // (8 * many.block_columns))
    if n > 64 and num_blocks >= _MANY_BLOCKS:
        return many
    return Sliced(kind, 2 if n <= 64 and num_tiles <= 2 * MULTIPROCESSORS else 4, 4, 1)


@cache
def _stage() -> Variant:
    """Splits x; see `make_stage_kernel`."""
    return Variant(name="stage_rows", function=make_stage_kernel(), args="lllrrr", num_threads=32)


@cache
def sliced(shape: Sliced) -> Variant:
    """The product of `shape`; see `make_sliced`."""
    how = f"_s{shape.max_groups}" if shape.max_groups else ""
    return Variant(
        name=f"product_{shape.kind}_{shape.tiles}x{shape.columns}x{shape.chunk}{how}",
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
        for num_tiles in (1, 1000):
            found += [sliced(direct_shape(kind, num_tiles, groups)) for groups in _DIRECT_GROUPS]
            for n in (16, 64, 1024):
                shape = staged_shape(kind, num_tiles, n)
                found.append(tiled(shape) if isinstance(shape, Tiled) else sliced(shape))
    return {variant.name: variant for variant in found}
