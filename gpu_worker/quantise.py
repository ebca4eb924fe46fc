"""Int8 weights: one symmetric scale per output channel (row). Value = int8 * scale."""

from __future__ import annotations

import torch


def row_scales(weight: torch.Tensor) -> torch.Tensor:
    """The fp32 scale (rows,) that maps each row's largest magnitude to 127; 1 for a row of zeros."""
    largest = weight.float().abs().amax(dim=1)
    return torch.where(largest > 0, largest / 127.0, torch.ones_like(largest))


def quantise_rows(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The int8 form (rows, columns) of a weight, halves rounded to even."""
    return torch.round(weight.float() / scales[:, None]).clamp_(-127, 127).to(torch.int8)


def dequantise_rows(weight: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The fp32 form (rows, columns) of an int8 weight."""
    return weight.float() * scales[:, None]
