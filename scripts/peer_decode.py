"""The decode step to compare with: the same model in plain PyTorch, torch.compile with coordinate descent, in one
CUDA graph; its cache is exactly as long as the context and there is no mask. Called by `gpu_check.py --peer`.

It neither pages its cache nor promises equal bits for a row in different batches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F


def _norm(x: Tensor, gain: Tensor, eps: float) -> Tensor:
    y = x.float()
    return (y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * gain).half()


def _turn(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.float().chunk(2, -1)
    return torch.cat([a * cos - b * sin, b * cos + a * sin], -1).half()


def _make_layer(spec: Any, rows: int, position: int) -> Callable[..., Tensor]:
    heads, dim, eps = spec.n_heads, spec.head_dim, spec.norm_eps

    def layer(
        x: Tensor, norm1: Tensor, qkv: Tensor, o: Tensor, norm3: Tensor, gate_up: Tensor, down: Tensor,
        keys: Tensor, values: Tensor, cos: Tensor, sin: Tensor,
    ) -> Tensor:  # fmt: skip
        q, k, v = F.linear(_norm(x, norm1, eps), qkv).view(rows, 3, heads, dim).unbind(1)
        q, k = _turn(q, cos, sin), _turn(k, cos, sin)
        keys[:, :, position] = k
        values[:, :, position] = v
        mixed = F.scaled_dot_product_attention(q.unsqueeze(2), keys, values)
        x = x + F.linear(mixed.reshape(rows, heads * dim), o)
        gate, up = F.linear(_norm(x, norm3, eps), gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, down)

    return layer


def measure(
    spec: Any, tensors: dict[str, Tensor], rows: int, context: int, repeats: int = 40
) -> float:
    """Median milliseconds of one step of `rows` rows after `context` positions."""
    import torch._inductor.config as inductor

    inductor.coordinate_descent_tuning = True
    torch._dynamo.reset()
    device = "cuda"
    layer = _make_layer(spec, rows, context)

    def core(
        x: Tensor, weights: list[list[Tensor]], cache: list[list[Tensor]], cos: Tensor, sin: Tensor
    ) -> Tensor:
        for w, kv in zip(weights, cache, strict=True):
            x = layer(x, *w, *kv, cos, sin)
        return x

    def head(x: Tensor, gain: Tensor, weight: Tensor) -> Tensor:
        return F.linear(_norm(x, gain, spec.norm_eps), weight)

    core, head = torch.compile(core, dynamic=False), torch.compile(head, dynamic=False)
    names = ("norm1", "qkv", "o", "norm3", "gate_up", "down")
    weights = [[tensors[f"{i}.{name}"] for name in names] for i in range(spec.layers)]
    shape = (rows, spec.n_kv_heads, context + 1, spec.head_dim)
    cache = [
        [[torch.randn(shape, device=device, dtype=torch.half) for _ in range(2)] for _ in weights]
        for _ in range(spec.loops)
    ]
    angle = torch.rand(spec.head_dim // 2, device=device)
    cos, sin = angle.cos(), angle.sin()
    tokens = torch.arange(rows, device=device)

    def step() -> Tensor:
        x = F.embedding(tokens, tensors["embed"])
        for one_loop in cache:
            x = core(x, weights, one_loop, cos, sin)
        return head(x, tensors["norm"], tensors["head"])

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # what fills the tensors there
    with torch.no_grad(), torch.cuda.stream(stream):
        for _ in range(3):
            step()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.no_grad(), torch.cuda.graph(graph, stream=stream):
        step()
    for _ in range(5):
        graph.replay()
    events = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        events.append((start, end))
    torch.cuda.synchronize()
    return sorted(a.elapsed_time(b) for a, b in events)[repeats // 2]
