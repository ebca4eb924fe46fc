"""The launch structures are those of the driver's own bindings, byte by byte; kernels are told apart; needs no GPU."""

from __future__ import annotations

import ctypes
from dataclasses import replace
from pathlib import Path

import pytest

from kernels import cuda_attention, sampling
from kernels.compiler import Variant, ptx_path
from kernels.launch import LaunchConfig, launch_config


def _read(address: int, num_bytes: int) -> bytes:
    return ctypes.string_at(address, num_bytes)


def test_a_configuration_is_what_the_driver_reads() -> None:
    driver = pytest.importorskip("cuda.bindings.driver")
    variant = Variant("any", lambda: None, "l", 256, cluster=8, shared_bytes=70000)
    mine = launch_config(variant, (16, 3), is_overlapped=True)
    mine.stream = 0x1234

    cluster, overlap = driver.CUlaunchAttribute(), driver.CUlaunchAttribute()
    kinds = driver.CUlaunchAttributeID
    cluster.id = kinds.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
    cluster.value.clusterDim.x, cluster.value.clusterDim.y, cluster.value.clusterDim.z = 8, 1, 1
    overlap.id = kinds.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    overlap.value.programmaticStreamSerializationAllowed = 1
    theirs = driver.CUlaunchConfig()
    theirs.gridDimX, theirs.gridDimY, theirs.gridDimZ = 16, 3, 1
    theirs.blockDimX, theirs.blockDimY, theirs.blockDimZ = 256, 1, 1
    theirs.sharedMemBytes, theirs.hStream = 70000, 0x1234
    theirs.attrs, theirs.numAttrs = [cluster, overlap], 2

    at_attributes, size = LaunchConfig.attributes.offset, ctypes.sizeof(LaunchConfig)
    found = _read(ctypes.addressof(mine), size)
    wanted = _read(int(theirs.getPtr()), size)
    rest = at_attributes + 8
    assert found[:at_attributes] == wanted[:at_attributes]
    assert found[rest : rest + 4] == wanted[rest : rest + 4]
    lists = [
        _read(ctypes.c_void_p.from_buffer_copy(part[at_attributes:rest]).value or 0, 144)
        for part in (found, wanted)
    ]
    for first, last in ((0, 4), (8, 20), (72, 76), (80, 84)):  # what is not padding
        assert lists[0][first:last] == lists[1][first:last]


def test_blocks_that_wait_for_each_other_run_all_or_none() -> None:
    """Else two processes' kernels could each hold a part of the device and wait for the rest for ever."""
    driver = pytest.importorskip("cuda.bindings.driver")
    variant = Variant("any", lambda: None, "l", 256, is_together=True)
    config = launch_config(variant, (132, 1), is_overlapped=False)
    kinds = driver.CUlaunchAttributeID
    assert config.num_attributes == 1
    assert config.attributes[0].id == int(kinds.CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
    assert config.attributes[0].value[0] == 1


def test_kernels_made_of_other_numbers_have_files_of_their_own() -> None:
    """Else one would be launched as the other: of one name, of two vocabularies or shapes."""
    choices = [
        sampling.choose("choose", vocab, is_shaped=is_shaped)
        for vocab in (300, 512, 50257)
        for is_shaped in (False, True)
    ]
    attends = list(cuda_attention.variants().values())
    found = {ptx_path(variant, Path("any")) for variant in (*choices, *attends)}
    assert len(found) == len(choices) + len(attends)
    crowded = replace(choices[0], blocks_per_sm=choices[0].blocks_per_sm + 1)
    assert ptx_path(crowded, Path("any")) not in found


def test_settings_of_a_kernel_have_names() -> None:
    """A setting put in between would otherwise take another's place unseen."""
    with pytest.raises(TypeError):
        Variant("any", lambda: None, "l", 256, 8)  # type: ignore[misc]
