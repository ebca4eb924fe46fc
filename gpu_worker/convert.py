"""`python -m gpu_worker.convert SOURCE OUT.tinyloop`: an upstream checkpoint becomes one artifact.

SOURCE is a folder with config.json and safetensors (Ouro, Huginn, Llama, Mistral, Qwen 2/3 dense, SmolLM) or a GGUF file of the Llama family.
Tensors stream through one at a time; the result is verified before it gets its name. What does not fit ends with one line and nothing written.
"""

from __future__ import annotations

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from tqdm import tqdm

from gpu_worker import artifact, convert_families, selfcheck
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.artifact_info import describe
from gpu_worker.convert_gguf import GgufFile
from gpu_worker.convert_plan import Plan
from gpu_worker.convert_source import SafetensorsFolder, SourceConfig, WeightSource, read_json
from gpu_worker.convert_tokenizer import Texts, merge_eos, read_texts
from gpu_worker.model_config import ModelConfig, SpecialTokens

CONVERTER = "1"


@dataclass(frozen=True, slots=True)
class Options:
    """What the caller may decide. `dtype` auto keeps the source's; quantised GGUF becomes fp32, which is exact."""

    name: str = ""
    dtype: str = "auto"
    loops_default: int | None = None
    loops_max: int | None = None
    tokenizer: Path | None = None
    bos: int | None = None
    eos: tuple[int, ...] = ()
    progress: bool = False


def convert(source: str | Path, out: str | Path, options: Options = Options()) -> list[str]:  # noqa: B008 - frozen
    """Converts a checkpoint.

    Args:
        source: a folder or a .gguf file.
        out: the artifact to make or replace.
        options: see `Options`.

    Returns:
        The lines of a summary.

    Raises:
        ArtifactError: whatever does not fit; `out` is untouched then.
    """
    source, out = Path(source), Path(out)
    started = time.monotonic()
    if not out.parent.is_dir():
        raise ArtifactError(
            "TL024", f"{out.parent} is not a folder", "name a file in a folder that exists"
        )
    weights, plan, texts = _open(source, options)
    plan.check(weights)
    _decide(plan, weights, texts, options, source)
    ModelConfig.from_json(plan.config.to_json())  # all values of the right type and range
    blobs = dict(texts.blobs)
    makers = plan.makers(weights)
    with tqdm(disable=not options.progress, desc="self-check", unit=" tensors") as bar:
        counted = {name: _counted(make, bar) for name, make in makers.items()}
        stored = selfcheck.StoredForm(plan.config, counted)
        blobs["probe.json"] = selfcheck.make(plan.config, stored)
    origin = {"family": plan.family, "from": source.resolve().name, "converter": CONVERTER}
    draft = out.with_name(f".{out.name}.converting")
    try:
        with tqdm(
            disable=not options.progress,
            desc="writing",
            unit="B",
            unit_scale=True,
            total=_size(weights, plan),
        ) as bar:
            artifact.write(draft, plan.config, makers, blobs, origin, progress=bar.update)
        written = artifact.load(draft, verify=True)
        os.replace(draft, out)
    finally:
        draft.unlink(missing_ok=True)
    written.path = out
    notes = [f"note          {note}" for note in (*plan.notes, *texts.notes)]
    took = f"done          {out} in {time.monotonic() - started:.0f} s, read back and verified"
    return [*describe(written, verified=True), *notes, took]


def _open(source: Path, options: Options) -> tuple[WeightSource, Plan, Texts]:
    if source.is_dir():
        config = SourceConfig(read_json(source / "config.json"), "config.json")
        folder = SafetensorsFolder(source)
        return folder, convert_families.plan(config, folder), read_texts(source, options.tokenizer)
    if source.suffix == ".gguf" and source.exists():
        file = GgufFile(source)
        plan = convert_families.plan(file.config(), file)
        texts = (
            file.texts()
            if options.tokenizer is None
            else read_texts(source.parent, options.tokenizer)
        )
        return file, plan, texts
    raise ArtifactError(
        "TL020",
        f"{source} is no folder and no .gguf file",
        "give the folder with config.json and the weights",
    )


def _decide(
    plan: Plan, weights: WeightSource, texts: Texts, options: Options, source: Path
) -> None:
    """Name, storage, loops and special tokens of the artifact: the source's word, corrected, unless the caller says otherwise."""
    config = plan.config
    tokens = merge_eos(
        config.tokens, texts.eos if config.tokens.eos != (2,) or plan.family != "ouro" else ()
    )
    end_turn = texts.token_id("<|end_turn|>") if plan.family == "huginn" else None
    if end_turn is not None and end_turn not in tokens.eos:
        tokens = merge_eos(tokens, (end_turn,))
        plan.notes.append(f"special tokens: <|end_turn|> ({end_turn}) also ends a text")
    tokens = SpecialTokens(
        tokens.bos if options.bos is None else options.bos, options.eos or tokens.eos, tokens.pad
    )
    loop = config.loop
    if options.loops_max is not None:
        loop = dataclasses.replace(
            loop, hard_max=options.loops_max, trained_max=min(loop.trained_max, options.loops_max)
        )
    if options.loops_default is not None:
        loop = dataclasses.replace(loop, default=options.loops_default)
    exit_ = dataclasses.replace(
        config.exit, min_loops=min(config.exit.min_loops, max(1, loop.default))
    )
    exact = plan.widest_dtype(weights)
    dtype: Any = exact if options.dtype == "auto" else options.dtype
    if exact != dtype and dtype != "fp32":
        plan.notes.append(f"weights rounded from {exact} to {dtype}")
    plan.config = dataclasses.replace(
        config,
        name=options.name or source.resolve().stem,
        dtype=dtype,
        tokens=tokens,
        loop=loop,
        exit=exit_,
    )
    if "tokenizer.json" not in texts.blobs:
        plan.notes.append("no tokenizer in the source: the artifact serves token ids only")


def _counted(make: Callable[[], Tensor], bar: Any) -> Callable[[], Tensor]:
    def counted() -> Tensor:
        bar.update()
        return make()

    return counted


def _size(weights: WeightSource, plan: Plan) -> int:
    width = {"fp32": 4, "fp16": 2, "bf16": 2, "int8": 1}[plan.config.dtype]
    total = 0
    for name in {part.source for part in plan.parts.values()}:
        count = width
        for n in weights.shape(name):
            count *= n
        total += count
    return total


def main(argv: Sequence[str]) -> int:
    """Runs the command line; 1 with one line on stderr when something does not fit."""
    parser = argparse.ArgumentParser(
        prog="python -m gpu_worker.convert",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("source", type=Path, help="checkpoint folder or .gguf file")
    parser.add_argument("out", type=Path, help="the .tinyloop file to write")
    parser.add_argument(
        "--name", default="", help="the model's name for clients (default: the source's)"
    )
    parser.add_argument(
        "--dtype",
        choices=("auto", "fp32", "fp16", "bf16"),
        default="auto",
        help="storage (default: the source's own)",
    )
    parser.add_argument(
        "--quant", choices=("int8",), help="int8 weights, one scale per output channel"
    )
    parser.add_argument(
        "--loops-default", type=int, metavar="N", help="loops of a request that names none"
    )
    parser.add_argument(
        "--loops-max", type=int, metavar="N", help="most loops that a request may ask for"
    )
    parser.add_argument(
        "--tokenizer",
        type=Path,
        metavar="PATH",
        help="tokenizer.json, or a folder with one, instead of the source's",
    )
    parser.add_argument(
        "--bos", type=int, metavar="ID", help="beginning token instead of the source's"
    )
    parser.add_argument(
        "--eos",
        type=int,
        nargs="+",
        default=[],
        metavar="ID",
        help="end tokens instead of the source's",
    )
    args = parser.parse_args(argv)
    options = Options(
        name=args.name,
        dtype=args.quant or args.dtype,
        loops_default=args.loops_default,
        loops_max=args.loops_max,
        tokenizer=args.tokenizer,
        bos=args.bos,
        eos=tuple(args.eos),
        progress=True,
    )
    try:
        lines = convert(args.source, args.out, options)
    except ArtifactError as ex:
        print(ex, file=sys.stderr)
        return 1
    print("\n".join(lines))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
