"""The slow retelling that the engine's modes are held to: one token at a time, from the definitions, over the naive model's parts."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from gpu_worker import naive
from gpu_worker.engine import Engine
from gpu_worker.model_config import ModelConfig
from scheduler.messages import Params, Run
from tests.gpu_worker.engine_helpers import engine_weights


class Slow:
    """One sequence decoded from its definition, one position after the other; what each (layer, loop) keeps is a list by position.

    An entry is k and v together, as they are after a round trip through the KV format's exact and stored forms.
    """

    def __init__(
        self,
        config: ModelConfig,
        weights: dict[str, Tensor],
        how: Params,
        num_prompt: int,
        kv_format: str,
        kv_share: str,
    ) -> None:
        self.model = naive._Model(config, weights, torch.ones(1, 1, dtype=torch.bool))
        self.config, self.how = config, how
        self.num_prompt, self.kv_format, self.kv_share = num_prompt, kv_format, kv_share
        self.kept: dict[tuple[str, int], list[tuple[Tensor, Tensor]]] = {}
        self.position = 0
        self.carried: Tensor | None = None

    def prepare(self, at: str, which: str, x: Tensor, position: int) -> Tensor:
        """Norm, bias and position of q or k (1, heads, head_dim)."""
        m, arch = self.model, self.config.arch
        if arch.qk_norm:
            x = naive._rms(x, arch.norm_eps) * m.w[f"{at}.attn.{which}_norm.weight"]
        if arch.qk_bias:
            x = x + m.w[f"{at}.attn.qk_bias"]["qk".index(which)]
        if arch.pos.kind == "rope":
            x = naive.rotate(x, naive.rotary_angles(arch, position + 1)[-1:], arch.pos.pairing)
        return x

    def keys_and_values(self, at: str, x: Tensor, position: int) -> Tensor:
        """(2, kv_heads, head_dim) of an attention input (1, d)."""
        m, arch = self.model, self.config.arch
        k, v = (
            m.linear(f"{at}.attn.{n}", x, getattr(arch, f"{n}_bias")).view(1, -1, arch.head_dim)
            for n in "kv"
        )
        return torch.cat([self.prepare(at, "k", k, position), v])

    def keep(self, at: str, x: Tensor) -> tuple[Tensor, Tensor]:
        if self.kv_format in ("h", "h_int4"):
            group = max(g for g in range(2, 129, 2) if x.shape[1] % g == 0)
            stored = cut(x, "int4" if self.kv_format == "h_int4" else "fp16", group)
            exact = self.keys_and_values(at, x.half().float(), self.position)
            return exact, self.keys_and_values(at, stored, self.position)
        kv = self.keys_and_values(at, x, self.position)
        if self.kv_format == "fp32":
            return kv, kv
        return kv.half().float(), cut(kv, self.kv_format, kv.shape[-1])

    def sees(self, j: int) -> bool:
        window = self.how.cache_window
        return not window or j > self.position - window or j < 4

    def read(self, at: str, loop: int, is_core: bool, j: int) -> Tensor:
        """K and V of position j as the current position reads them."""
        is_own = j // 64 == self.position // 64
        if (
            is_core
            and self.kv_share == "last_loop"
            and self.position >= self.num_prompt
            and not is_own
        ):
            loop = self.how.loops
        exact, stored = self.kept[at, loop][j]
        return exact if is_own or j < 4 else stored

    def stage(self, stage: str, loop: int, x: Tensor) -> Tensor:
        """One token (1, d) through the layers of a stage; appends or replaces its K and V at this loop."""
        m, arch = self.model, self.config.arch
        for i in range(getattr(self.config.stages, stage)):
            at = f"{stage}.{i}"

            def attend(at: str, x: Tensor) -> Tensor:
                q = m.linear(f"{at}.attn.q", x, arch.q_bias).view(1, -1, arch.head_dim)
                q = self.prepare(at, "q", q, self.position)
                rows = self.kept.setdefault((at, loop), [])
                del rows[self.position :]
                rows.append(self.keep(at, x))
                seen = [j for j in range(self.position + 1) if self.sees(j)]
                found = [self.read(at, loop, stage == "core", j) for j in seen]
                keys, values = (torch.stack(t) for t in zip(*found, strict=True))
                heads = []
                for h in range(arch.n_heads):
                    g = h * arch.n_kv_heads // arch.n_heads
                    scores = keys[:, g] @ q[0, h] / math.sqrt(arch.head_dim)
                    if arch.pos.kind == "alibi":
                        distance = self.position - torch.tensor(seen)
                        scores = scores - naive.alibi_slopes(arch.n_heads)[h] * distance
                    heads.append(scores.softmax(0) @ values[:, g])
                return m.linear(f"{at}.attn.o", torch.cat(heads)[None], arch.o_bias)

            m.attention = attend  # type: ignore[method-assign]
            x = m.block(at, x)
        return x

    def token(self, token: int, loops: int, is_read: bool, is_prompt: bool) -> tuple[Tensor, int]:
        """Runs the next token; returns (logits it is read with, loops computed)."""
        m, loop_config, how = self.model, self.config.loop, self.how
        embedded = m.w["embed.weight"][token][None]
        if self.config.arch.embed_rank:
            embedded = embedded @ m.w["embed.proj.weight"].T
        embedded = embedded * self.config.arch.embed_scale
        if self.config.arch.pos.kind == "learned":
            embedded = embedded + m.w["pos.weight"][self.position]
        embedded = self.stage("prelude", 0, embedded)
        state = embedded if loop_config.state_init.kind == "embed" else torch.zeros_like(embedded)
        if how.warm_start and not is_prompt:
            assert self.carried is not None
            state = self.carried
        read, read_state, computed, before, staying = None, state, loops, None, 1.0
        for t in range(1, loops + 1):
            previous = state
            x = state
            if loop_config.inject == "add":
                x = state + embedded
            elif loop_config.inject == "concat":
                x = torch.cat([state, embedded], dim=1) @ m.w["inject.weight"].T
            state = self.stage("core", t, x)
            if loop_config.norm_each:
                state = m.norm("norm", state)
            if read is None:
                leaves = False
                if how.exit_kind == "gate":
                    staying *= 1 - float(m.gate(state))
                    leaves = 1 - staying >= how.exit_threshold and how.exit_threshold < 1
                elif how.exit_kind == "latent":
                    leaves = float((state - previous).norm() / state.norm()) < how.exit_threshold
                elif how.exit_kind == "kl":
                    p = self.logits(state).log_softmax(-1)
                    if before is not None:
                        leaves = float((before.exp() * (before - p)).sum()) < how.exit_threshold
                    before = p
                if is_read and leaves and how.min_loops <= t < loops:
                    read, read_state = self.logits(state), state
                    if how.exit_kv == "copy" and not is_prompt:
                        computed = t
                        for i in range(self.config.stages.core):
                            for later in range(t + 1, loops + 1):
                                rows = self.kept.setdefault((f"core.{i}", later), [])
                                del rows[self.position :]
                                rows.append(self.kept[f"core.{i}", t][self.position])
                        break
        if read is None or is_prompt:
            final = self.logits(state)
            read_state = state if read is None else read_state
            read = final if read is None else read
        if how.exit_kind != "none" and not is_prompt:
            self.logits(read_state)  # the coda keeps what was read
        is_raw = loop_config.warm_start == "raw" or loop_config.norm_each
        self.carried = read_state if is_raw else m.norm_core(read_state)
        self.position += 1
        return read, computed

    def logits(self, state: Tensor) -> Tensor:
        m = self.model
        y = self.stage("coda", 0, m.norm_core(state) if self.config.loop.norm_after_core else state)
        if not (self.config.loop.norm_each and self.config.stages.coda == 0):
            y = m.norm("norm", y)
        if not self.config.arch.tied_head:
            return (y @ m.w["head.weight"].T)[0]
        if self.config.arch.embed_rank:
            y = y @ m.w["embed.proj.weight"]
        return (y @ m.w["embed.weight"].T)[0]


@dataclass
class Told:
    margins: list[float]  # how far each token's logit lies below the largest
    loops: int  # computed for the tokens' rows


def retell(
    engine: Engine,
    run: Run,
    tokens: Sequence[int],
    kv_format: str = "fp32",
    kv_share: str = "per_loop",
) -> Told:
    """What the definition says of a greedy token list."""
    weights = dict(engine_weights(engine))
    slow = Slow(engine.artifact.config, weights, run.params, len(run.prompt), kv_format, kv_share)
    told = Told([], 0)
    everything = [*run.prompt, *tokens]
    with torch.no_grad():
        for p, token in enumerate(everything[:-1]):
            is_prompt, is_read = p < len(run.prompt), p >= len(run.prompt) - 1
            logits, computed = slow.token(token, run.params.loops, is_read, is_prompt)
            if is_read:
                told.margins.append(float(logits.max() - logits[everything[p + 1]]))
                told.loops += computed
    return told


def cut(x: Tensor, kind: str, group: int) -> Tensor:
    """A tensor after a round trip through a stored form; the groups lie along the last axis."""
    if kind == "fp16":
        return x.half().float()
    parts = x.reshape(-1, group)
    if kind == "int8":
        scale = (parts.abs().amax(1, keepdim=True) / 127).half().float()
        return ((parts / scale).round().clamp(-127, 127) * scale).view_as(x)
    zero = parts.amin(1, keepdim=True).half().float()
    scale = ((parts.amax(1, keepdim=True) - parts.amin(1, keepdim=True)) / 15).half().float()
    return (((parts - zero) / scale).round().clamp(0, 15) * scale + zero).view_as(x)
