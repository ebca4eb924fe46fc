"""Prints the tables of docs/models.md: KV bytes per token and conversations in 80 GB, computed from published shapes.

    python scripts/model_tables.py            # print
    python scripts/model_tables.py --write    # put them into docs/models.md, between its markers

Nothing here is measured. Weights are counted at 2 bytes per parameter (bf16), a conversation as 4,096 tokens in full blocks of 64, without block
tables, exact copies of unfinished blocks and activations.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from gpu_worker.kv_sizes import FORMATS, SHARES, kv_bytes_per_token, unusable_reason
from gpu_worker.model_config import Arch, Exit, Loop, ModelConfig, Pos, Stages, StateInit
from gpu_worker.tensor_table import expected_tensors

DOC = Path(__file__).resolve().parent.parent / "docs" / "models.md"
MEMORY_BYTES = 80 * 10**9
TOKENS = 4096


def ouro(name: str, layers: int) -> ModelConfig:
    arch = Arch(
        2048,
        16,
        16,
        128,
        5632,
        49152,
        65536,
        block="branch_post",
        pos=Pos(theta=1e6),
        tied_head=False,
    )
    return ModelConfig(
        name, arch, Stages(0, layers, 0), Loop(4, 4, 8, norm_each=True), Exit("gate")
    )


def published() -> list[ModelConfig]:
    """The shapes of published models, as their papers and configurations give them."""
    huginn = Arch(
        5280, 55, 55, 96, 17920, 65536, 4096, block="sum_post", pos=Pos(theta=50000.0, pairing="interleaved"),
        qk_bias=True, embed_scale=72.6636,
    )  # fmt: skip
    state = StateInit("normal", 0.6325, 3.0)
    smollm = Arch(576, 9, 3, 64, 1536, 49152, 8192, norm_eps=1e-5, pos=Pos(theta=1e5))
    return [
        ouro("Ouro-1.4B", 24),
        ouro("Ouro-2.6B", 48),
        ModelConfig(
            "Huginn-0125",
            huginn,
            Stages(2, 4, 2),
            Loop(32, 32, 64, "concat", state, norm_after_core=True),
        ),
        ModelConfig("SmolLM2-135M", smollm, Stages(0, 30, 0), Loop(1, 1, 1, norm_each=True)),
    ]


def num_parameters(config: ModelConfig) -> int:
    total = 0
    for shape in expected_tensors(config).values():
        count = 1
        for n in shape:
            count *= n
        total += count
    return total


def tables() -> str:
    """All tables as Markdown."""
    lines: list[str] = []
    for config in published():
        params = num_parameters(config)
        lines.append(
            f"**{config.name}** at {config.loop.default} loop{'s' * (config.loop.default > 1)}: {params:,} parameters, {2 * params / 1e9:.2f} GB of weights in bf16"
        )
        lines.append("")
        lines.append(
            "| format | per_loop: bytes/token | conversations | last_loop: bytes/token | conversations |"
        )
        lines.append("|---|---|---|---|---|")
        for kv_format in FORMATS:
            cells = [
                cell for share in SHARES for cell in _cells(config, kv_format, share, 2 * params)
            ]
            lines.append(f"| `{kv_format}` | " + " | ".join(cells) + " |")
        lines.append("")
    return "\n".join(lines)


def _cells(config: ModelConfig, kv_format: str, share: str, weight_bytes: int) -> tuple[str, str]:
    if unusable_reason(config, kv_format, share):
        return "-", "-"
    per_token = kv_bytes_per_token(config, kv_format, share)
    return f"{per_token:,}", f"{(MEMORY_BYTES - weight_bytes) // (per_token * TOKENS):,}"


def written(doc: str) -> str:
    """The document with its tables made anew."""
    before, rest = doc.split("<!-- tables -->\n")
    return f"{before}<!-- tables -->\n{tables()}<!-- end of tables -->{rest.split('<!-- end of tables -->')[1]}"


def main(argv: Sequence[str]) -> int:
    """Prints or writes."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--write", action="store_true", help="update docs/models.md")
    if parser.parse_args(argv).write:
        DOC.write_text(written(DOC.read_text(encoding="utf-8")), encoding="utf-8")
    else:
        print(tables())
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
