"""`python -m gpu_worker.artifact info FILE [--verify]`: one screen about an artifact. Reads, prints, changes nothing."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator, Sequence

from tokenizers import Tokenizer

from gpu_worker.artifact import Artifact, load
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.kv_sizes import FORMATS, SHARES, is_absorbed, kv_bytes_per_token, unusable_reason


def main(argv: Sequence[str]) -> int:
    """Runs the command line; returns the exit status (1 with one line on stderr for a faulty artifact)."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker.artifact", description="Inspect .tinyloop files."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    info = commands.add_parser(
        "info", help="architecture, loops, parameters, KV sizes, tokenizer, digest"
    )
    info.add_argument("file")
    info.add_argument(
        "--verify", action="store_true", help="read everything: all values finite, digest right"
    )
    args = parser.parse_args(argv)
    try:
        artifact = load(args.file, verify=args.verify)
    except ArtifactError as ex:
        print(ex, file=sys.stderr)
        return 1
    print("\n".join(describe(artifact, args.verify)))
    return 0


def describe(artifact: Artifact, verified: bool) -> Iterator[str]:
    """The lines that `info` prints."""
    config = artifact.config
    arch, stages, loop = config.arch, config.stages, config.loop
    yield f"{config.name}: format {config.format}, {artifact.size_bytes / 1e6:,.1f} MB, {artifact.num_parameters:,} parameters, {config.dtype}"
    if artifact.source:
        yield "source        " + ", ".join(
            f"{k} {_brief(v)}" for k, v in sorted(artifact.source.items())
        )
    yield (
        f"architecture  d_model {arch.d_model}, heads {arch.n_heads} (kv {arch.n_kv_heads}) x {arch.head_dim}, d_ff {arch.d_ff} {arch.act}, "
        f"vocabulary {arch.vocab}, {arch.max_pos} positions"
    )
    yield f"              {arch.block} blocks, {arch.norm} norm eps {arch.norm_eps:g}, positions {_positions(artifact)}"
    biases = [
        k
        for k in ("q_bias", "k_bias", "v_bias", "o_bias", "mlp_bias", "qk_bias", "qk_norm")
        if getattr(arch, k)
    ]
    embedding = f"factorised (rank {arch.embed_rank}), " if arch.embed_rank else ""
    yield f"              embedding {embedding}{'tied' if arch.tied_head else 'untied'}, scale {arch.embed_scale:g}; with {', '.join(biases) or 'no biases'}"
    yield f"stages        prelude {stages.prelude}, core {stages.core}, coda {stages.coda}"
    yield (
        f"loops         default {loop.default}, trained to {loop.trained_max}, at most {loop.hard_max}; injection {loop.inject}, "
        f"state from {loop.state_init.kind}, warm start {loop.warm_start}"
    )
    threshold = (
        "off unless asked for"
        if config.exit.threshold is None
        else f"threshold {config.exit.threshold:g}"
    )
    yield f"exit          {config.exit.kind}" + (
        f", {threshold}, at least {config.exit.min_loops} loops"
        if config.exit.kind != "none"
        else ""
    )
    yield from _kv_lines(artifact)
    yield f"tokenizer     {_tokenizer(artifact)}"
    yield f"tokens        bos {config.tokens.bos}, eos {list(config.tokens.eos)}, pad {config.tokens.pad}"
    yield f"self-check    {'none' if artifact.blob('probe.json') is None else 'stored'}"
    yield f"digest        {artifact.digest}" + (" (verified)" if verified else "")


def _brief(value: object) -> str:
    return f"({len(value)} entries)" if isinstance(value, list | dict) else str(value)


def _positions(artifact: Artifact) -> str:
    pos = artifact.config.arch.pos
    if pos.kind != "rope":
        return pos.kind
    scaling = "" if pos.scaling is None else f", {pos.scaling.kind} scaling x{pos.scaling.factor:g}"
    return f"rotary ({pos.pairing}, theta {pos.theta:g}{scaling})"


def _kv_lines(artifact: Artifact) -> Iterator[str]:
    config = artifact.config
    yield f"KV cache      computed bytes per token at {config.loop.default} loops (slots: prelude + core x loops + coda)"
    yield "              format   " + "".join(f"{share:>12}" for share in SHARES)
    reasons: dict[str, list[str]] = {}
    for kv_format in FORMATS:
        cells = ""
        for share in SHARES:
            reason = unusable_reason(config, kv_format, share)
            cells += f"{'-' if reason else f'{kv_bytes_per_token(config, kv_format, share):,}':>12}"
            if reason:
                reasons.setdefault(reason, []).append(
                    kv_format if share == "per_loop" else f"{kv_format}+{share}"
                )
        yield f"              {kv_format:<9}{cells}"
    for reason, modes in reasons.items():
        yield f"              not usable: {', '.join(modes)}: {reason}"
    if not unusable_reason(config, "h", "per_loop"):
        yield f"              h is read {'absorbed' if is_absorbed(config) else 'rebuilt (K and V computed again from it)'}"


def _tokenizer(artifact: Artifact) -> str:
    blob = artifact.blob("tokenizer.json")
    if blob is None:
        return "none embedded" + (
            " (GPT-2's fits)" if artifact.config.arch.vocab == 50257 else ": serves token ids only"
        )
    size = Tokenizer.from_str(blob.decode()).get_vocab_size(with_added_tokens=True)
    template = "with" if artifact.blob("chat_template.jinja") is not None else "without"
    return f"{size} entries, {template} chat template"
