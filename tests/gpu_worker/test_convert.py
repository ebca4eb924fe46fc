"""Converting checkpoints: what is recognised, what is corrected, and one clear line for everything that is not supported."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer

from gpu_worker import artifact, naive
from gpu_worker.artifact_errors import ArtifactError
from gpu_worker.convert import Options, convert
from scripts.make_toy_artifact import toy_tokenizer

GOLDENS = Path(__file__).resolve().parents[1] / "goldens"


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    def make(name: str) -> Path:
        shutil.copytree(GOLDENS / name, tmp_path / name)
        (tmp_path / name / "expected.safetensors").unlink()
        return tmp_path / name

    return make


def edit(folder: Path, file: str = "config.json", **changes: Any) -> None:
    path = folder / file
    values = json.loads(path.read_text()) if path.exists() else {}
    values |= changes
    path.write_text(json.dumps({k: v for k, v in values.items() if v is not ...}))


def edit_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    weights = load_file(folder / "model.safetensors")
    change(weights)
    save_file(weights, folder / "model.safetensors", {"format": "pt"})


def refusal(folder: Path, code: str, *words: str, options: Options = Options()) -> str:  # noqa: B008
    """The one line with which a conversion ends; nothing may be left behind."""
    out = folder.parent / "refused.tinyloop"
    with pytest.raises(ArtifactError) as caught:
        convert(folder, out, options)
    line = str(caught.value)
    assert caught.value.code == code, line
    for word in words:
        assert word in line
    assert not list(out.parent.glob("*refused*"))
    return line


def converted(folder: Path, options: Options = Options()) -> tuple[artifact.Artifact, str]:  # noqa: B008
    out = folder.parent / "out.tinyloop"
    lines = convert(folder, out, options)
    assert [p.name for p in folder.parent.glob("*tinyloop*")] == ["out.tinyloop"]
    return artifact.load(out, verify=True), "\n".join(lines)


# ---------------------------------------------------------------------------------------------------- containers, dtypes


def test_shards_give_the_same_artifact(copy: Callable[[str], Path]) -> None:
    folder = copy("ouro-tiny")
    whole, _ = converted(folder)
    weights = load_file(folder / "model.safetensors")
    names = sorted(weights)
    shards = {
        "model-00001-of-00002.safetensors": names[::2],
        "model-00002-of-00002.safetensors": names[1::2],
    }
    for shard, part in shards.items():
        save_file({n: weights[n] for n in part}, folder / shard)
    (folder / "model.safetensors").unlink()
    index = {"weight_map": {n: shard for shard, part in shards.items() for n in part}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    assert converted(folder)[0].digest == whole.digest
    (folder / "model-00002-of-00002.safetensors").unlink()
    refusal(folder, "TL020", "model-00002-of-00002.safetensors is missing")


def test_an_index_that_names_what_no_shard_has(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    names = dict.fromkeys(
        [*load_file(folder / "model.safetensors"), "model.layers.7.nothing"], "model.safetensors"
    )
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    refusal(folder, "TL020", "`model.layers.7.nothing` is in the index but in no shard")


@pytest.mark.parametrize(
    ("dtype", "stored"), [("float32", "fp32"), ("float16", "fp16"), ("bfloat16", "bf16")]
)
def test_the_source_dtype_is_kept(copy: Callable[[str], Path], dtype: str, stored: str) -> None:
    folder = copy("llama-tiny")
    kind = getattr(torch, dtype)
    edit_weights(folder, lambda w: w.update({n: t.to(kind) for n, t in w.items()}))
    loaded, _ = converted(folder)
    assert loaded.config.dtype == stored
    source = load_file(folder / "model.safetensors")
    assert torch.equal(
        loaded.tensor("core.1.mlp.down.weight"),
        source["model.layers.1.mlp.down_proj.weight"].float(),
    )
    assert torch.equal(loaded.tensor("norm.weight"), source["model.norm.weight"].float())


def test_a_mixture_of_dtypes_becomes_fp32(copy: Callable[[str], Path]) -> None:
    folder = copy("ouro-tiny")
    edit_weights(folder, lambda w: w.update({"lm_head.weight": w["lm_head.weight"].half()}))
    assert converted(folder)[0].config.dtype == "fp32"


def test_int8_stays_close(copy: Callable[[str], Path]) -> None:
    folder = copy("qwen3-tiny")
    exact, quantised = converted(folder)[0], None
    tokens = list(range(3, 40))
    want = naive.forward(exact.config, exact.tensors(dequantise=True), tokens, 1)
    quantised, summary = converted(folder, Options(dtype="int8"))
    got = naive.forward(quantised.config, quantised.tensors(dequantise=True), tokens, 1)
    assert "weights rounded from fp32 to int8" in summary
    assert 0 < (want - got).abs().mean() < 0.03 * want.std()
    assert quantised.size_bytes < 0.5 * exact.size_bytes


# ---------------------------------------------------------------------------------------------------- names, loops, tokens


def test_options_override_the_source(copy: Callable[[str], Path]) -> None:
    options = Options(name="mine", dtype="fp32", loops_default=2, loops_max=3, bos=7, eos=(8, 9))
    loaded, summary = converted(copy("ouro-tiny"), options)
    config = loaded.config
    assert (config.name, config.dtype, config.tokens.bos, config.tokens.eos) == (
        "mine",
        "fp32",
        7,
        (8, 9),
    )
    assert (config.loop.default, config.loop.trained_max, config.loop.hard_max) == (2, 3, 3)
    assert "default 2, trained to 3, at most 3" in summary


def test_loops_out_of_order_are_refused(copy: Callable[[str], Path]) -> None:
    refusal(copy("ouro-tiny"), "TL012", options=Options(loops_default=5))


def test_ouros_special_tokens_are_corrected_only_where_they_are_wrong(
    copy: Callable[[str], Path],
) -> None:
    folder = copy("ouro-tiny")
    edit(folder, "generation_config.json", eos_token_id=0, temperature=0.7, max_length=99)
    loaded, summary = converted(folder)
    assert (loaded.config.tokens.bos, loaded.config.tokens.eos, loaded.config.tokens.pad) == (
        1,
        (2,),
        0,
    )
    assert "special tokens corrected" in summary
    assert json.loads(loaded.blob("generation.json") or b"") == {"temperature": 0.7}
    edit(folder, bos_token_id=5, eos_token_id=6)
    loaded, summary = converted(folder)
    assert (loaded.config.tokens.bos, loaded.config.tokens.eos[0]) == (
        5,
        6,
    ) and "corrected" not in summary


def test_end_tokens_of_the_generation_defaults_are_added(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    edit(folder, "generation_config.json", eos_token_id=[2, 11, 12])
    assert converted(folder)[0].config.tokens.eos == (2, 11, 12)


def test_token_ids_outside_the_vocabulary_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    edit(folder, eos_token_id=256)
    refusal(folder, "TL011", "tokens.eos is 256")


def test_a_gate_threshold_below_one_is_kept(copy: Callable[[str], Path]) -> None:
    folder = copy("ouro-tiny")
    edit(folder, early_exit_threshold=0.8)
    assert converted(folder)[0].config.exit.threshold == 0.8


def test_huginns_end_of_turn_also_ends(copy: Callable[[str], Path]) -> None:
    folder = copy("huginn-tiny")
    spec = json.loads(toy_tokenizer())
    spec["added_tokens"].append(
        {
            "id": 506,  # the next free one
            "content": "<|end_turn|>",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
            "special": True,
        }
    )
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    assert converted(folder)[0].config.tokens.eos == (505, 506)


# ------------------------------------------------------------------------------------------------------------ tokenizers


def test_texts_are_embedded(copy: Callable[[str], Path]) -> None:
    folder = copy("ouro-tiny")
    (folder / "tokenizer.json").write_bytes(toy_tokenizer())
    edit(folder, "tokenizer_config.json", chat_template="{{ messages }}")
    loaded, summary = converted(folder)
    assert (
        loaded.blob("tokenizer.json") == toy_tokenizer()
        and loaded.blob("chat_template.jinja") == b"{{ messages }}"
    )
    assert "token ids only" not in summary
    (folder / "chat_template.jinja").write_text("from a file")
    assert converted(folder)[0].blob("chat_template.jinja") == b"from a file"


def test_named_chat_templates(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    templates = [{"name": "tools", "template": "t"}, {"name": "default", "template": "d"}]
    edit(folder, "tokenizer_config.json", chat_template=templates)
    assert converted(folder)[0].blob("chat_template.jinja") == b"d"


def test_without_tokenizer_it_serves_ids(copy: Callable[[str], Path]) -> None:
    loaded, summary = converted(copy("ouro-tiny"))
    assert loaded.blob("tokenizer.json") is None and "serves token ids only" in summary


def test_a_misfit_tokenizer_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    (folder / "tokenizer.json").write_bytes(toy_tokenizer())
    refusal(folder, "TL011", "ids reach 505, the vocabulary has 256")
    (folder / "tokenizer.json").write_text("{")
    refusal(folder, "TL011", "tokenizer.json is not readable")
    refusal(folder, "TL011", "does not exist", options=Options(tokenizer=folder / "nowhere.json"))


@pytest.mark.parametrize("in_file", [True, False])
@pytest.mark.parametrize("add_bos", [True, False, None])
def test_the_beginning_token_is_added_as_upstream_does(
    copy: Callable[[str], Path], in_file: bool, add_bos: bool | None
) -> None:
    folder = copy("ouro-tiny")
    spec = json.loads(toy_tokenizer())
    template = {
        "type": "TemplateProcessing",
        "single": [
            {"SpecialToken": {"id": "<|end|>", "type_id": 0}},
            {"Sequence": {"id": "A", "type_id": 0}},
        ],
        "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
        "special_tokens": {"<|end|>": {"id": "<|end|>", "ids": [256], "tokens": ["<|end|>"]}},
    }
    spec["post_processor"] = (
        {"type": "Sequence", "processors": [spec["decoder"], template]} if in_file else None
    )
    (folder / "tokenizer.json").write_text(json.dumps(spec))
    edit(
        folder,
        "tokenizer_config.json",
        bos_token={"content": "<|end|>"},
        add_bos_token=... if add_bos is None else add_bos,
    )
    blob = converted(folder)[0].blob("tokenizer.json")
    assert blob is not None
    tokenizer = Tokenizer.from_str(blob.decode())
    assert (tokenizer.encode("so").ids[0] == 256) == (in_file if add_bos is None else add_bos)
    assert tokenizer.encode("so", add_special_tokens=False).ids[0] != 256


# ---------------------------------------------------------------------------------------------------- what is refused


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("llama-tiny", {"model_type": "gemma3"}, ("TL021", "'gemma3'", "huginn_raven")),
        ("llama-tiny", {"model_type": ...}, ("TL021", "None")),
        ("llama-tiny", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, ("TL022", "`rope_scaling`", "'yarn'")),
        ("llama-tiny", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, ("TL022", "'dynamic'")),
        ("llama-tiny", {"rope_scaling": {"rope_type": "llama3", "factor": 2.0}}, ("TL022", "`original_max_position_embeddings`")),
        ("llama-tiny", {"hidden_act": "gelu"}, ("TL022", "`hidden_act`", "'gelu'")),
        ("llama-tiny", {"partial_rotary_factor": 0.5}, ("TL022", "`partial_rotary_factor`")),
        ("llama-tiny", {"quantization_config": {"bits": 4}}, ("TL022", "`quantization_config`")),
        ("llama-tiny", {"attn_logit_softcapping": 50.0}, ("TL022", "`attn_logit_softcapping`")),
        ("llama-tiny", {"hidden_size": ...}, ("TL022", "`hidden_size`", "is missing")),
        ("llama-tiny", {"hidden_size": "64"}, ("TL022", "`hidden_size`", "an integer")),
        ("mistral-tiny", {"sliding_window": 128}, ("TL022", "`sliding_window`", "128")),
        ("qwen2-tiny", {"layer_types": ["full_attention", "sliding_attention"]}, ("TL022", "`layer_types`", "sliding_attention")),
        ("qwen2-tiny", {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1, "layer_types": ...}, ("TL022", "`sliding_window`")),
        ("llama-tiny", {"no_rope_layers": [1, 0]}, ("TL022", "`no_rope_layers`")),
        ("llama-tiny", {"model_type": "smollm3"}, ("TL022", "`no_rope_layer_interval`")),
        ("ouro-tiny", {"total_ut_steps": ...}, ("TL022", "`total_ut_steps`")),
        ("huginn-tiny", {"injection_type": "gate"}, ("TL022", "`injection_type`", "'gate'")),
        ("huginn-tiny", {"block_class_name": "TransformerPreNormBlock"}, ("TL022", "`block_class_name`")),
        ("huginn-tiny", {"test_time_noise": 0.1}, ("TL022", "`test_time_noise`")),
        ("huginn-tiny", {"init_values": {"std": 1.0}}, ("TL022", "`init_values`")),
    ],
)  # fmt: skip
def test_options_that_change_the_arithmetic_are_refused_by_name(
    copy: Callable[[str], Path], name: str, changes: dict[str, Any], words: tuple[str, ...]
) -> None:
    folder = copy(name)
    edit(folder, **changes)
    refusal(folder, words[0], *words[1:])


@pytest.mark.parametrize("name", ["ouro-tiny", "huginn-tiny", "qwen2-tiny"])
def test_odd_values_never_end_in_another_exception(copy: Callable[[str], Path], name: str) -> None:
    folder, rng, num_refused = copy(name), random.Random(1), 0
    original = json.loads((folder / "config.json").read_text())
    odd = (
        None,
        True,
        -1,
        0,
        3,
        10**400,
        1.5,
        "x",
        [],
        [1],
        ["x"],
        {},
        {"type": "linear"},
        {"factor": "x"},
    )
    for _ in range(120):
        changed = original | {rng.choice(sorted(original)): rng.choice(odd)}
        (folder / "config.json").write_text(json.dumps(changed))
        try:
            convert(folder, folder / "out.tinyloop")
        except ArtifactError as ex:
            num_refused += 1
            assert "\n" not in str(ex)
    assert num_refused > 40


def test_harmless_windows_are_accepted(copy: Callable[[str], Path]) -> None:
    folder = copy("mistral-tiny")
    edit(folder, sliding_window=256)
    converted(folder)
    folder = copy("qwen2-tiny")
    edit(folder, sliding_window=64, use_sliding_window=False)
    converted(folder)


def test_missing_left_over_and_misshapen_tensors(copy: Callable[[str], Path]) -> None:
    folder = copy("ouro-tiny")
    norm = "model.layers.2.input_layernorm_2.weight"
    kept = load_file(folder / "model.safetensors")[norm]
    edit_weights(folder, lambda w: w.pop(norm))
    refusal(folder, "TL023", f"1 tensor missing: `{norm}`")
    edit_weights(
        folder, lambda w: w.update({norm: kept, "model.layers.2.adapter.weight": torch.ones(3)})
    )
    refusal(folder, "TL023", "1 tensor left over", "`model.layers.2.adapter.weight`")
    edit_weights(
        folder, lambda w: (w.pop("model.layers.2.adapter.weight"), w.update({norm: torch.ones(63)}))
    )
    refusal(folder, "TL023", f"`{norm}` is [63], `core.2.norm2.weight` needs [64]")
    edit_weights(folder, lambda w: w.update({norm: torch.ones(64, dtype=torch.int32)}))
    refusal(folder, "TL023", f"`{norm}` is torch.int32")


def test_fewer_layers_than_the_config_says_and_more(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    edit(folder, num_hidden_layers=3)
    refusal(folder, "TL023", "9 tensors missing", "model.layers.2.")
    edit(folder, num_hidden_layers=1)
    refusal(folder, "TL023", "9 tensors left over", "model.layers.1.")


def test_values_that_are_not_finite_are_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    edit_weights(
        folder, lambda w: w["model.layers.0.mlp.up_proj.weight"].view(-1)[77].fill_(float("nan"))
    )
    refusal(folder, "TL008", "`core.0.mlp.up.weight`")


def test_a_tied_copy_is_accepted_and_another_head_is_not(copy: Callable[[str], Path]) -> None:
    folder = copy("huginn-tiny")
    plain, _ = converted(folder)
    edit_weights(
        folder, lambda w: w.update({"lm_head.weight": w["transformer.wte.weight"].clone()})
    )
    assert converted(folder)[0].digest == plain.digest
    edit_weights(folder, lambda w: w["lm_head.weight"][3, 3].add_(1))
    refusal(folder, "TL023", "`lm_head.weight` differs from `transformer.wte.weight`")


def test_sources_that_are_none(tmp_path: Path, copy: Callable[[str], Path]) -> None:
    refusal(tmp_path / "nowhere", "TL020", "is no folder")
    folder = copy("llama-tiny")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refusal(folder, "TL020", "pickled weights only", "safe_serialization")
    (folder / "config.json").write_text("{'single': 'quotes'}")
    refusal(folder, "TL020", "config.json is not JSON")
    (tmp_path / "a.gguf").write_bytes(b"GGUF but not really")
    refusal(tmp_path / "a.gguf", "TL020", "not readable as GGUF")


def test_a_truncated_shard_is_refused(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    raw = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(raw[:-100])
    refusal(folder, "TL010")


def test_keys_without_effect_are_named_in_the_summary(copy: Callable[[str], Path]) -> None:
    folder = copy("llama-tiny")
    edit(folder, my_training_flag=True)
    assert "my_training_flag" in converted(folder)[1]


# ------------------------------------------------------------------------------------------------------ the command line


def test_the_command_line(copy: Callable[[str], Path], tmp_path: Path) -> None:
    folder = copy("huginn-tiny")
    command = [
        sys.executable,
        "-m",
        "gpu_worker.convert",
        str(folder),
        str(tmp_path / "h.tinyloop"),
    ]
    done = subprocess.run(
        [*command, "--quant", "int8", "--loops-default", "4"],
        capture_output=True,
        text=True,
        timeout=100,
    )
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) < 32 and "read back and verified" in done.stdout
    assert "100%" in done.stderr or "B/s" in done.stderr
    loaded = artifact.load(tmp_path / "h.tinyloop", verify=True)
    assert loaded.config.dtype == "int8" and loaded.config.loop.default == 4
    edit(folder, model_type="mamba")
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (
        done.returncode == 1
        and done.stdout == ""
        and done.stderr.count("\n") == 1
        and done.stderr.startswith("TL021 ")
    )


MEASURE = """
import resource, sys
from gpu_worker import convert
def peak():
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
before = peak()
status = convert.main(sys.argv[1:])
print(peak() - before)
sys.exit(status)
"""


@pytest.mark.slow
@pytest.mark.parametrize("options", [[], ["--quant", "int8"]])
def test_memory_stays_at_a_few_tensors(tmp_path: Path, options: list[str]) -> None:
    """A checkpoint of 500 MB, largest tensor 4 MB, converts in far less memory than it has."""
    d, layers, folder = 1024, 36, tmp_path / "big"
    folder.mkdir()
    weight_map = {}

    def save(shard: str, shapes: dict[str, tuple[int, ...]]) -> None:
        tensors = {
            n: torch.randn(s).mul_(0.02).bfloat16() if len(s) > 1 else torch.ones(s).bfloat16()
            for n, s in shapes.items()
        }
        save_file(tensors, folder / shard)
        weight_map.update(dict.fromkeys(shapes, shard))

    save("outer.safetensors", {"model.embed_tokens.weight": (2000, d), "model.norm.weight": (d,)})
    for i in range(layers):
        at = f"model.layers.{i}"
        shapes: dict[str, tuple[int, ...]] = {
            f"{at}.self_attn.{n}_proj.weight": (d, d) for n in "qkvo"
        }
        shapes |= {f"{at}.mlp.{n}_proj.weight": (d, d) for n in ("up", "gate", "down")}
        shapes |= {
            f"{at}.{n}.weight": (d,) for n in ("input_layernorm", "post_attention_layernorm")
        }
        save(f"layer-{i}.safetensors", shapes)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    edit(
        folder, model_type="llama", hidden_size=d, intermediate_size=d, num_hidden_layers=layers, num_attention_heads=16,
        vocab_size=2000, max_position_embeddings=512, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    command = [sys.executable, "-c", MEASURE, str(folder), str(tmp_path / "big.tinyloop"), *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    total = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
    growth = int(done.stdout.splitlines()[-1])
    assert total > 500e6 and growth < 120e6, f"{growth / 1e6:.0f} MB more for {total / 1e6:.0f} MB"


def test_a_folder_that_does_not_exist_is_one_line_before_any_work(tmp_path: Path) -> None:
    with pytest.raises(ArtifactError, match="TL024") as caught:
        convert(GOLDENS / "llama-tiny", tmp_path / "nowhere" / "x.tinyloop")
    assert "\n" not in str(caught.value)
