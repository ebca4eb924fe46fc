"""Which emulated kernels take so long that they run under `./scripts/test --all` alone; a smaller case of each runs every time."""

from __future__ import annotations

import pytest

SLOW = {
    "test_absorbed.py::test_a_row_has_its_bits_in_any_company_and_spread",
    "test_absorbed.py::test_a_query_has_its_bits_in_any_company",
    "test_absorbed.py::test_values_joins_and_multiplies[9]",
    "test_attention.py::test_int4_reads_stored_blocks_sinks_and_the_own_block_and_stores_what_ends[4]",
    "test_cuda_attention.py::test_a_row_has_the_same_bits_however_its_work_is_shared[fp16]",
    "test_cuda_attention.py::test_rows_that_share_their_reading_have_the_bits_of_rows_alone",
    "test_cuda_dense.py::test_divergences[8]",
    "test_cuda_linear.py::test_a_rows_bits_are_the_same_in_every_kernel[half-300]",
    "test_cuda_linear.py::test_a_rows_bits_are_the_same_in_every_kernel[int8-70]",
    "test_cuda_linear.py::test_products_of_every_kind[33-85-3-bf16]",
    "test_cuda_linear.py::test_products_of_every_kind[33-85-3-fp16]",
    "test_cuda_linear.py::test_products_of_every_kind[33-85-3-fp32]",
    "test_cuda_linear.py::test_products_of_every_kind[33-85-3-int8]",
    "test_linear.py::test_qkv_turns_and_writes_the_cache[True]",
    "test_linear.py::test_wide_products_have_the_bits_of_single_rows[four_parts]",
    "test_linear.py::test_wide_products_have_the_bits_of_single_rows[rounds_with_kept_x]",
    "test_persistent.py::test_gives_the_bits_of_the_kernels_one_by_one[row]",
    "test_persistent.py::test_gives_the_bits_of_the_kernels_one_by_one[rows]",
    "test_persistent.py::test_gives_the_bits_of_the_kernels_one_by_one[team]",
    "test_persistent.py::test_gives_the_bits_of_the_kernels_one_by_one[ends of blocks]",
    "test_persistent.py::test_gives_the_bits_of_the_kernels_one_by_one[stored]",
    "test_sampling.py::test_choose_follows_the_order_of_the_design[False-2]",
}


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if f"{item.path.name}::{item.name}" in SLOW:
            item.add_marker("slow")
