"""The model card's entries that follow from the artifact alone; the engine adds its own limits and the mode it runs.

Clients get the card through the scheduler, which does not look inside: it is all that a frontend knows of a model.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from gpu_worker import gpt2_tokenizer
from gpu_worker.kv_sizes import FORMATS, SHARES, kv_bytes_per_token, mode_name, unusable_reason

if TYPE_CHECKING:
    from gpu_worker.artifact import Artifact


def model_card(artifact: Artifact, hf_home: str = "") -> dict[str, Any]:
    """Entries of the model card, all of plain types.

    `kv_bytes_per_token` has every mode that the artifact can use, at its default loops. Without an embedded tokenizer a
    vocabulary of GPT-2's size gets GPT-2's, if it is installed or in the hub cache under `hf_home`; otherwise `tokenizer` is None
    and the model serves token ids alone.
    """
    config = artifact.config
    tokenizer = artifact.blob("tokenizer.json")
    if tokenizer is None and config.arch.vocab == gpt2_tokenizer.VOCAB:
        tokenizer = gpt2_tokenizer.load(hf_home)
    template = artifact.blob("chat_template.jinja")
    generation = artifact.blob("generation.json")
    return {
        "name": config.name,
        "digest": artifact.digest,
        "arch_name": str(artifact.source.get("family", "tinyloop")),
        "quant": config.dtype,
        "format": config.format,
        "vocab": config.arch.vocab,
        "max_pos": config.arch.max_pos,
        "loops_default": config.loop.default,
        "loops_trained": config.loop.trained_max,
        "loops_max": config.loop.hard_max,
        "loops_min": 1,
        "has_injection": config.loop.inject != "none",
        "has_coda": config.stages.coda > 0,
        "exit_kind": config.exit.kind,
        "exit_threshold": config.exit.threshold,
        "warm_start": config.loop.warm_start,
        "has_init_seed": config.loop.state_init.kind == "normal",
        "num_parameters": artifact.num_parameters,
        "kv_bytes_per_token": {
            mode_name(f, s): kv_bytes_per_token(config, f, s)
            for s in SHARES
            for f in FORMATS
            if not unusable_reason(config, f, s)
        },
        "tokens": {
            "bos": config.tokens.bos,
            "eos": list(config.tokens.eos),
            "pad": config.tokens.pad,
        },
        "tokenizer": tokenizer,
        "chat_template": None if template is None else template.decode(),
        "generation": None if generation is None else json.loads(generation),
    }
