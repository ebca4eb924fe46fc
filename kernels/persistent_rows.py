"""Where the keys of a row lie, as the persistent kernel's attention reads it; `persistent.core_step` lists the tables."""

from __future__ import annotations

from typing import Any

from kernels.attention_blocks import NO_WINDOW
from kernels.device_code import device_function
from kernels.intrinsics import load_constant_i32, wide
from kernels.polling import narrow


@device_function
def entry_of(
    tables: Any, row_info: Any, loop: Any, max_loops: Any, max_blocks: Any, row: Any, block: Any
) -> Any:
    """The table's entry for a block of a row."""
    depth = load_constant_i32(row_info + row * 8 + 4) + loop
    return load_constant_i32(tables + wide((row * max_loops + depth) * max_blocks + block) * 4)


@device_function
def shown_of(positions: Any, windows: Any, row: Any) -> Any:
    """(position, window, first block after block 0 that it shows)."""
    position = load_constant_i32(positions + row * 4)
    window, low = narrow(NO_WINDOW), narrow(1)
    if windows != 0:
        width = load_constant_i32(windows + row * 4)
        if width > 0:
            window = width
            if position - width >= 127:
                low = narrow((position - width + 1) >> 6)
    return position, window, low
