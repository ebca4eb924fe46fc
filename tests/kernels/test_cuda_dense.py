"""The GPU's general kernels for rows, run on the emulator at tiny sizes against the plain twins; a row's bits do not depend on others.

Tolerances: both sides are fp32 unless said; functions are good to a few 1e-7.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from kernels import cuda_dense, reference


def rand(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("d", [1, 33, 2100])
@pytest.mark.parametrize("has_bias", [False, True])
def test_norms(d: int, has_bias: bool) -> None:
    x, weight = rand(2, d) * 3 + 1, rand(d, seed=1)
    bias = rand(d, seed=2) if has_bias else None
    y = cuda_dense.norm(x, weight, bias, 1e-5)
    plain = reference.norm(x.double(), weight, bias, 1e-5)
    torch.testing.assert_close(y.double(), plain, rtol=1e-6, atol=2e-6)
    assert torch.equal(cuda_dense.norm(x[1:].contiguous(), weight, bias, 1e-5)[0], y[1])


@pytest.mark.parametrize("act", ["silu_glu", "gelu", "gelu_tanh", "relu2"])
def test_activations(act: str) -> None:
    line = torch.linspace(-100, 100, 94)[None]
    x = torch.cat([rand(1, 94) * 4, line, line / 20])
    y = cuda_dense.activate(x, act)
    plain = reference.activate(x.double(), act)
    torch.testing.assert_close(y.double(), plain, rtol=1e-6, atol=5e-7)
    assert torch.equal(cuda_dense.activate(x[2:].contiguous(), act)[0], y[2])


def test_an_activation_wider_than_a_block() -> None:
    x = rand(1, 2 * 1030)
    y = cuda_dense.activate(x, "silu_glu")
    torch.testing.assert_close(y, reference.activate(x, "silu_glu"), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("is_interleaved", [False, True])
@pytest.mark.parametrize("heads", [(4, 2, 24), (3, 1, 66), (2, 2, 7)])
@pytest.mark.parametrize("parts", ["rotary", "norm", "bias", "all"])
def test_heads_are_prepared(is_interleaved: bool, heads: tuple[int, int, int], parts: str) -> None:
    num_heads, num_kv, dim = heads
    if parts in ("bias", "all"):
        num_kv = num_heads
    has_rotary = (
        parts in ("rotary", "all") and dim % 2 == 0
    )  # the plain twin turns whole pairs alone
    angles = torch.rand(50, dim // 2, generator=torch.Generator().manual_seed(9)) * 6
    rotary = torch.stack([angles.cos(), angles.sin()]) if has_rotary else None
    has_norm = parts in ("norm", "all")
    q_norm, k_norm = (rand(dim, seed=1), rand(dim, seed=2)) if has_norm else (None, None)
    bias = rand(2, num_heads, dim, seed=3) if parts in ("bias", "all") else None
    qkv, positions = rand(3, (num_heads + 2 * num_kv) * dim), torch.tensor([0, 49, 20]).int()
    expected, whole = qkv.clone(), (num_heads, num_kv, dim)
    rest = (q_norm, k_norm, 1e-6, bias, rotary, is_interleaved)
    reference.prepare_qkv(expected, whole, *rest, positions)
    alone = qkv[2:].clone()
    cuda_dense.prepare_qkv(qkv, whole, *rest, positions)
    torch.testing.assert_close(qkv, expected, rtol=1e-6, atol=2e-6)
    cuda_dense.prepare_qkv(alone, whole, *rest, positions[2:].clone())
    assert torch.equal(alone[0], qkv[2])


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.int8])
def test_embeddings_are_exact(dtype: torch.dtype) -> None:
    table, ids = (rand(10, 37) * 40).to(dtype), torch.tensor([3, 0, 9, 3])
    scale = rand(10, seed=1) if dtype == torch.int8 else None
    expected = table[ids].float() if scale is None else table[ids].float() * scale[ids, None]
    assert torch.equal(cuda_dense.embed_rows(table, scale, ids), expected)


def test_relative_changes() -> None:
    after = rand(4, 1100)
    before = after + rand(4, 1100, seed=1) * torch.tensor([1e-4, 1e-2, 1.0, 0.0])[:, None]
    change = cuda_dense.relative_change(before, after)
    assert change.dtype == torch.float64 and change[3] == 0
    torch.testing.assert_close(change, reference.relative_change(before, after), rtol=1e-6, atol=0)
    assert cuda_dense.relative_change(before[:1], torch.zeros(1, 1100)) == torch.inf
    assert cuda_dense.relative_change(before[1:2], after[1:2]) == change[1]


@pytest.mark.parametrize("size", [1, 8])
def test_divergences(size: float) -> None:
    before = rand(4, 1100) * size
    after = before + rand(4, 1100, seed=1) * torch.tensor([1e-3, 0.1, 5.0, 0.0])[:, None] * size
    after[1] += 50  # a shift of all logits changes nothing
    kl = cuda_dense.divergence(before, after)
    assert kl.dtype == torch.float64 and kl[3] == 0
    torch.testing.assert_close(
        kl[[0, 2]], reference.divergence(before, after)[[0, 2]], rtol=2e-6, atol=0
    )
    # the shift costs fp32 digits of the logits themselves
    torch.testing.assert_close(kl[1], reference.divergence(before, after)[1], rtol=1e-4, atol=0)
    assert cuda_dense.divergence(before[2:3], after[2:3]) == kl[2]


def test_no_rows() -> None:
    assert cuda_dense.norm(torch.empty(0, 8), torch.ones(8), None, 1e-5).shape == (0, 8)
    assert cuda_dense.activate(torch.empty(0, 8), "silu_glu").shape == (0, 4)
    assert len(cuda_dense.divergence(torch.empty(0, 8), torch.empty(0, 8))) == 0


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_parity_and_bits_on_the_gpu() -> None:
    script = Path(__file__).resolve().parents[2] / "scripts" / "bench_dense.py"
    run = subprocess.run(
        [sys.executable, str(script), "--only", "check"],
        capture_output=True, text=True, check=False, timeout=280,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert "\n0 checks failed" in run.stdout
