"""Int8 weights: one symmetric scale per output channel (row). Value = int8 * scale.

Works through a weight in pieces of some rows, so that converting a large one needs little memory beside it.
"""

from __future__ import annotations

import torch

ROWS_AT_A_TIME = 4096


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """The fp32 scale (rows,) that maps each row's largest magnitude to 127; 1 for a row of zeros."""
    largest = torch.cat([part.float().abs().amax(dim=1) for part in _parts(weight)])
    return torch.where(largest > 0, largest / 127.0, torch.ones_like(largest))


def quantise_rows(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The int8 form (rows, columns) of a weight, halves rounded to even."""
    quantised = torch.empty(weight.shape, dtype=torch.int8)
    for part, scale, out in zip(_parts(weight), _parts(scales), _parts(quantised), strict=True):
        out.copy_(torch.round(part.float() / scale[:, None]).clamp_(-127, 127))
    return quantised


def dequantise_rows(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 form (rows, columns) of an int8 weight."""
    return weight.float().mul_(scales[:, None])


def stored_values(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a weight reads as, in fp32, after being stored in `dtype` (int8: with its row scales)."""
    values = torch.empty(weight.shape)
    for part, out in zip(_parts(weight), _parts(values), strict=True):
        if dtype is torch.int8:
            scales = row_scales(part)
            out.copy_(dequantise_rows(quantise_rows(part, scales), scales))
        else:
            out.copy_(part.to(dtype))
    return values


def _parts(tensor: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return torch.split(tensor, ROWS_AT_A_TIME)
