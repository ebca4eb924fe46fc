"""Launch shapes of the decode products exist for models of every size and fit a multiprocessor."""

from __future__ import annotations

import pytest

from gpu_worker import graphs
from kernels import linear
from kernels.fragments import ProductShape
from kernels.linear_shapes import WideLaunch

MOST_BYTES = 227 * 1024


@pytest.mark.parametrize("rows", [1, 2, 8, 16, 32, 64, 256])
def test_every_width_has_launches(rows: int) -> None:
    tiles = graphs.column_tiles_for(rows)
    for k in (64, 256, 768, 896, 1536, 2048, 3072, 4096, 4864, 5120):
        for n in (64, 256, 896, 1536, 4096, 8192, 50257):
            shape = graphs.product_shape(n, k)
            for launch in (
                graphs.product_launch(shape, tiles, rows),
                graphs.head_launch(ProductShape(n, k, 8), tiles, rows),
            ):
                # Making the kernel checks that its parts divide.
                variant = linear.store_product("t", launch, is_normed=True)
                assert variant.shared_bytes <= MOST_BYTES
                assert launch.clusters * launch.rounds * launch.tiles * 16 >= n
                assert isinstance(launch, WideLaunch) or rows <= 8
