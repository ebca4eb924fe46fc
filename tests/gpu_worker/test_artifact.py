"""The `.tinyloop` file: what is written is read back, and each fault is one line with its code."""

from __future__ import annotations

import json
import random
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from gpu_worker import artifact
from gpu_worker.artifact_errors import CODES, ArtifactError
from gpu_worker.model_card import model_card
from gpu_worker.model_config import ModelConfig
from gpu_worker.quantise import stored_values
from gpu_worker.tensor_table import storage_dtype
from scripts.make_toy_artifact import VARIANTS, make, toy_config, toy_tokenizer, toy_weights


def fault(path: Path, verify: bool = False) -> ArtifactError:
    with pytest.raises(ArtifactError) as caught:
        artifact.load(path, verify=verify)
    line = str(caught.value)
    assert "\n" not in line and line.startswith(f"{caught.value.code} {CODES[caught.value.code]}: ")
    assert caught.value.remedy and line.endswith(f"({caught.value.remedy})")
    return caught.value


def rewrite(path: Path, change: Callable[[dict[str, Any], bytearray], None]) -> None:
    """Changes header and data of a safetensors file in place, as a careless or hostile hand would."""
    raw = path.read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header, data = json.loads(raw[8 : 8 + length]), bytearray(raw[8 + length :])
    change(header, data)
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def rewrite_config(path: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    def apply(header: dict[str, Any], _: bytearray) -> None:
        config = json.loads(header["__metadata__"]["tinyloop.config"])
        change(config)
        header["__metadata__"]["tinyloop.config"] = json.dumps(config)

    rewrite(path, apply)


def resave(path: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    """Changes the set of tensors with the reference library, metadata kept."""
    with safe_open(path, "pt") as file:
        metadata = file.metadata()
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata)


@pytest.fixture
def toy(tmp_path: Path) -> Path:
    return make(tmp_path / "toy.tinyloop")


# ------------------------------------------------------------------------------------------------------ the good case


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_variant_comes_back_as_written(tmp_path: Path, variant: str) -> None:
    config = toy_config(variant)
    weights = toy_weights(config, 3)
    path = tmp_path / "a.tinyloop"
    digest = artifact.write(
        path, config, weights, {"tokenizer.json": toy_tokenizer()}, {"family": "toy"}
    )
    loaded = artifact.load(path, verify=True)
    assert (
        loaded.config == config and loaded.digest == digest and loaded.source == {"family": "toy"}
    )
    assert loaded.blob("tokenizer.json") == toy_tokenizer() and loaded.blob("probe.json") is None
    assert loaded.size_bytes == path.stat().st_size
    assert loaded.num_parameters == sum(w.numel() for w in weights.values())
    found = loaded.tensors(dequantise=True)
    assert found.keys() == weights.keys()
    for name, weight in weights.items():
        stored = stored_values(weight, storage_dtype(config, name))
        assert torch.equal(found[name], stored), name


def test_the_reference_library_reads_the_file(toy: Path) -> None:
    tensors = load_file(toy)
    assert torch.equal(tensors["embed.weight"], artifact.load(toy).tensor("embed.weight"))


@pytest.mark.parametrize("dtype", ["fp32", "fp16", "bf16", "int8"])
def test_writing_is_deterministic_and_leaves_no_other_file(tmp_path: Path, dtype: str) -> None:
    first = make(tmp_path / "a.tinyloop", dtype=dtype)
    second = make(tmp_path / "b.tinyloop", dtype=dtype)
    assert first.read_bytes() == second.read_bytes()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.tinyloop", "b.tinyloop"]


def test_digest_depends_on_weights_config_and_blobs_but_not_on_source(tmp_path: Path) -> None:
    config = toy_config()
    weights = toy_weights(config, 0)

    def digest(name: str = "m", nudge: float = 0.0, blob: bytes = b"x", source: str = "s") -> str:
        changed = weights | {"norm.weight": weights["norm.weight"] + nudge}
        return artifact.write(
            tmp_path / "d.tinyloop",
            toy_config(name=name),
            changed,
            {"chat_template.jinja": blob},
            {"s": source},
        )

    base = digest()
    assert base == digest(source="elsewhere")
    assert len({base, digest(name="n"), digest(nudge=1e-3), digest(blob=b"y")}) == 4


def test_half_precision_and_int8_storage(tmp_path: Path) -> None:
    exact = artifact.load(make(tmp_path / "e.tinyloop", variant="gqa")).tensors(dequantise=True)
    for dtype, tolerance in (("fp16", 2**-10), ("bf16", 2**-7), ("int8", 1 / 127)):
        loaded = artifact.load(
            make(tmp_path / "q.tinyloop", variant="gqa", dtype=dtype), verify=True
        )
        found = loaded.tensors(dequantise=True)
        assert found.keys() == exact.keys()
        for name, weight in exact.items():
            if weight.ndim == 1:
                assert torch.equal(found[name], weight)
            else:
                largest = weight.abs().amax(dim=1, keepdim=True)
                assert ((found[name] - weight).abs() <= tolerance * largest / 2 + 1e-7).all(), name
    stored = loaded.tensors()
    assert stored["core.0.attn.q.weight"].dtype is torch.int8
    assert stored["core.0.attn.q.weight.scale"].shape == (64,)


def test_int8_weights_with_scales_are_taken_as_they_are(tmp_path: Path) -> None:
    first = artifact.load(make(tmp_path / "a.tinyloop", dtype="int8"))
    artifact.write(tmp_path / "b.tinyloop", first.config, first.tensors())
    second = artifact.load(tmp_path / "b.tinyloop", verify=True)
    assert all(torch.equal(second.tensors()[n], t) for n, t in first.tensors().items())


def test_functions_are_called_only_when_written(tmp_path: Path) -> None:
    config, calls = toy_config("plain"), []
    weights = toy_weights(config, 0)

    def source(name: str) -> Callable[[], torch.Tensor]:
        return lambda: calls.append(name) or weights[name]  # type: ignore[func-returns-value]

    seen = 0

    def progress(num_bytes: int) -> None:
        nonlocal seen
        seen += num_bytes

    lazy = artifact.write(
        tmp_path / "a.tinyloop", config, {n: source(n) for n in weights}, progress=progress
    )
    assert sorted(calls) == sorted(weights)
    assert seen == sum(w.numel() * 4 for w in weights.values())
    assert lazy == artifact.write(tmp_path / "b.tinyloop", config, weights)


def test_unknown_keys_that_start_with_x_are_ignored(toy: Path) -> None:
    rewrite_config(toy, lambda c: c.update(x_note="hello"))
    assert artifact.load(toy).config == toy_config()


def test_card_holds_what_a_frontend_needs(toy: Path, tmp_path: Path) -> None:
    card = model_card(artifact.load(toy))
    assert card["tokenizer"] == toy_tokenizer() and "message.content" in card["chat_template"]
    assert (card["loops_default"], card["loops_trained"], card["loops_max"]) == (4, 4, 8)
    assert card["kv_bytes_per_token"]["fp16"] == (1 + 2 * 4 + 1) * 2 * 2 * 64
    assert card["kv_bytes_per_token"]["fp16+last_loop"] == (1 + 2 + 1) * 2 * 2 * 64
    bare = model_card(artifact.load(make(tmp_path / "bare.tinyloop", tokenizer=False)))
    assert (
        bare["tokenizer"] is None and bare["chat_template"] is None and bare["generation"] is None
    )


def test_h_modes_are_refused_where_they_save_nothing(tmp_path: Path) -> None:
    card = model_card(artifact.load(make(tmp_path / "gqa.tinyloop", variant="gqa")))
    assert "h" not in card["kv_bytes_per_token"] and "int4" in card["kv_bytes_per_token"]


# ---------------------------------------------------------------------------------------------------------- the faults


def test_not_a_file(tmp_path: Path) -> None:
    assert fault(tmp_path / "nothing.tinyloop").code == "TL001"
    assert fault(tmp_path).code == "TL001"


@pytest.mark.parametrize(
    "content", [b"", b"GGUF", b"\0" * 64, b"\x80\x02}q\0" * 40, b"PK\x03\x04" * 20]
)
def test_not_safetensors(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "a.tinyloop"
    path.write_bytes(content)
    assert fault(path).code == "TL001"


def test_safetensors_without_config_is_no_artifact(tmp_path: Path) -> None:
    save_file({"model.norm.weight": torch.ones(2)}, tmp_path / "a.safetensors")
    error = fault(tmp_path / "a.safetensors")
    assert error.code == "TL002" and "gpu_worker.convert" in error.remedy


@pytest.mark.parametrize("keep", [9, 100, 0.5, 0.999])
def test_truncated(toy: Path, keep: float) -> None:
    raw = toy.read_bytes()
    toy.write_bytes(raw[: int(keep if keep > 1 else keep * len(raw))])
    assert fault(toy).code == "TL010"


def test_trailing_bytes_and_overlaps(toy: Path) -> None:
    raw = toy.read_bytes()
    toy.write_bytes(raw + b"more")
    assert fault(toy).code == "TL010"
    toy.write_bytes(raw)

    def overlap(header: dict[str, Any], _: bytearray) -> None:
        header["core.0.norm1.weight"]["data_offsets"] = header["core.0.norm3.weight"][
            "data_offsets"
        ]

    rewrite(toy, overlap)
    assert "gap or an overlap" in fault(toy).message


def test_header_entry_that_lies_about_its_size(toy: Path) -> None:
    rewrite(toy, lambda h, _: h["norm.weight"].update(shape=[65]))
    assert fault(toy).code == "TL010"


@pytest.mark.parametrize(
    "entry", [None, [], {"dtype": "F32"}, {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}]
)
def test_malformed_header_entry(toy: Path, entry: Any) -> None:
    rewrite(toy, lambda h, _: h.update({"norm.weight": entry}))
    assert fault(toy).code == "TL010"


def test_duplicate_keys_in_header_and_config(toy: Path) -> None:
    raw = toy.read_bytes()
    toy.write_bytes(raw.replace(b'"core.1.norm1.weight"', b'"core.0.norm1.weight"', 1))
    assert "occurs twice" in fault(toy).message
    toy.write_bytes(raw)

    def double(header: dict[str, Any], _: bytearray) -> None:
        text = header["__metadata__"]["tinyloop.config"]
        header["__metadata__"]["tinyloop.config"] = text.replace('"d_ff":', '"vocab":7,"d_ff":')

    rewrite(toy, double)
    error = fault(toy)
    assert error.code == "TL003" and "`vocab` occurs twice" in error.message


def test_newer_format_is_named(toy: Path) -> None:
    rewrite(toy, lambda h, _: h["__metadata__"].update({"tinyloop.format": "2"}))
    assert fault(toy).code == "TL002"


def test_missing_and_extra_tensor_name_the_nearest(toy: Path) -> None:
    resave(toy, lambda t: t.update({"core.0.attn.qq.weight": t.pop("core.0.attn.q.weight")}))
    error = fault(toy)
    assert error.code == "TL004" and "`core.0.attn.q.weight`" in error.message
    assert "did you mean `core.0.attn.qq.weight`" in error.message


def test_extra_tensor(toy: Path) -> None:
    resave(toy, lambda t: t.update({"core.2.norm1.weight": torch.ones(64)}))
    error = fault(toy)
    assert error.code == "TL005" and "`core.2.norm1.weight`" in error.message


def test_unconverted_names_point_to_the_converter(toy: Path) -> None:
    resave(toy, lambda t: t.update({"model.norm.weight": t.pop("norm.weight")}))
    assert "gpu_worker.convert" in fault(toy).remedy


def test_wrong_shape(toy: Path) -> None:
    resave(toy, lambda t: t.update({"core.0.mlp.up.weight": torch.zeros(64, 128)}))
    error = fault(toy)
    assert error.code == "TL006" and "[64, 128], expected [128, 64]" in error.message


def test_wrong_dtype(toy: Path) -> None:
    resave(toy, lambda t: t.update({"core.0.mlp.up.weight": t["core.0.mlp.up.weight"].half()}))
    assert fault(toy).code == "TL007"
    resave(
        toy,
        lambda t: t.update({"core.0.mlp.up.weight": t["core.0.mlp.up.weight"].to(torch.complex64)}),
    )
    assert fault(toy).code == "TL007"


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_values_that_are_not_finite(toy: Path, value: float) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["core.1.norm3.weight"][7] = value

    resave(toy, poison)
    error = fault(toy)
    assert error.code == "TL008" and "`core.1.norm3.weight`" in error.message


def test_one_bad_value_in_a_large_tensor_is_found_by_verify(toy: Path) -> None:
    def poison(tensors: dict[str, torch.Tensor]) -> None:
        tensors["embed.weight"][13, 5] = float("nan")

    resave(toy, poison)
    artifact.load(toy)  # the sample of 4096 misses one value of 32768
    assert fault(toy, verify=True).code == "TL008"


def test_a_changed_bit_is_found_by_verify(tmp_path: Path) -> None:
    toy = make(tmp_path / "bare.tinyloop", tokenizer=False)
    raw = bytearray(toy.read_bytes())
    raw[-4] ^= 1
    toy.write_bytes(raw)
    artifact.load(toy)
    assert fault(toy, verify=True).code == "TL009"


def test_a_file_whose_digest_was_never_filled_in(toy: Path) -> None:
    rewrite(toy, lambda h, _: h["__metadata__"].update({"tinyloop.digest": "0" * 64}))
    assert fault(toy).code == "TL009"


def test_tokenizer_larger_than_the_vocabulary(tmp_path: Path) -> None:
    config = toy_config(vocab=300)
    with pytest.raises(ArtifactError, match=r"TL011 .* ids reach 505, the vocabulary has 300"):
        artifact.write(
            tmp_path / "a.tinyloop",
            config,
            toy_weights(config, 0),
            {"tokenizer.json": toy_tokenizer()},
        )
    assert not list(tmp_path.iterdir())


def test_tokenizer_that_is_none(tmp_path: Path) -> None:
    config = toy_config()
    with pytest.raises(ArtifactError, match="TL011"):
        artifact.write(
            tmp_path / "a.tinyloop", config, toy_weights(config, 0), {"tokenizer.json": b"{}"}
        )


@pytest.mark.parametrize("tokens", [{"bos": 512}, {"pad": -1}, {"eos": [1, 99999]}])
def test_special_ids_out_of_range(toy: Path, tokens: dict[str, Any]) -> None:
    rewrite_config(toy, lambda c: c["tokens"].update(tokens))
    assert fault(toy).code == "TL011"


@pytest.mark.parametrize(
    "loops", [{"default": 0}, {"default": 5}, {"trained_max": 9}, {"hard_max": 3}]
)
def test_loops_out_of_order(toy: Path, loops: dict[str, int]) -> None:
    rewrite_config(toy, lambda c: c["loop"].update(loops))
    assert fault(toy).code == "TL012"


@pytest.mark.parametrize(
    ("path", "value", "says"),
    [
        ("arch.act", "swish", "`arch.act` is 'swish' (allowed: silu_glu"),
        ("arch.surprise", 1, "unknown key `arch.surprise`"),
        ("surprise", 1, "unknown key `surprise`"),
        ("arch.n_kv_heads", 3, "a divisor of n_heads (4)"),
        ("arch.head_dim", 15, "even"),
        ("arch.d_model", True, "an integer"),
        ("arch.d_model", 0, "1 or more"),
        ("arch.norm_eps", "small", "a number"),
        ("arch.pos.kind", "sinusoidal", "allowed: rope"),
        ("arch.pos.scaling", {"kind": "yarn", "factor": 2.0}, "linear, llama3"),
        ("arch.pos.scaling", {"kind": "linear"}, "`arch.pos.scaling.factor` is missing"),
        ("arch.embed_rank", 64, "0 (off) to"),
        ("stages.core", 0, "1 to"),
        ("loop.inject", "gate", "none, concat, add"),
        ("loop.state_init.kind", "ones", "embed, zeros, normal"),
        ("exit.kind", "entropy", "none, gate, latent, kl"),
        ("tokens.eos", 3, "a list"),
        ("tokens.eos", ["a"], "`tokens.eos[0]`"),
        ("dtype", "fp8", "fp32, fp16, bf16, int8"),
        ("name", "", "printable"),
    ],
)
def test_config_faults_are_named(toy: Path, path: str, value: Any, says: str) -> None:
    def change(config: dict[str, Any]) -> None:
        *parents, last = path.split(".")
        for parent in parents:
            config = config[parent]
        config[last] = value

    rewrite_config(toy, change)
    error = fault(toy)
    assert error.code == "TL003" and says in str(error)


@pytest.mark.parametrize("key", ["arch", "loop", "dtype"])
def test_config_keys_are_all_required(toy: Path, key: str) -> None:
    rewrite_config(toy, lambda c: c.pop(key))
    assert f"`{key}` is missing" in fault(toy).message


def test_a_loop_without_embeddings_is_refused(toy: Path) -> None:
    rewrite_config(toy, lambda c: c["loop"].update(inject="none"))
    assert "nothing else injects the embeddings" in str(fault(toy))


@pytest.mark.parametrize("text", ["[1]", "{", '{"format": NaN}', '{"a":' * 5000])
def test_config_that_is_not_an_object(text: str) -> None:
    with pytest.raises(ArtifactError, match="TL003"):
        ModelConfig.from_json(text)


def test_nothing_is_left_behind_when_writing_fails(tmp_path: Path) -> None:
    path = make(tmp_path / "a.tinyloop")
    before = path.read_bytes()
    config = toy_config()
    weights = toy_weights(config, 1)
    weights["norm.weight"][0] = float("nan")
    with pytest.raises(ArtifactError, match="TL008"):
        artifact.write(path, config, weights)
    assert path.read_bytes() == before and [p.name for p in tmp_path.iterdir()] == ["a.tinyloop"]


def test_fp16_overflow_is_refused_with_advice(tmp_path: Path) -> None:
    config = toy_config(dtype="fp16")
    weights = toy_weights(config, 0)
    weights["embed.weight"][0, 0] = 1e6
    with pytest.raises(ArtifactError, match="TL008 .*bf16"):
        artifact.write(tmp_path / "a.tinyloop", config, weights)


def test_stranger_blobs_and_broken_texts(toy: Path) -> None:
    raw = toy.read_bytes()
    resave(toy, lambda t: t.update({"blob.virus.exe": torch.zeros(3, dtype=torch.uint8)}))
    assert fault(toy).code == "TL005"
    toy.write_bytes(raw)
    resave(
        toy,
        lambda t: t.update(
            {"blob.chat_template.jinja": torch.tensor([255, 254], dtype=torch.uint8)}
        ),
    )
    assert fault(toy).code == "TL010"
    resave(
        toy,
        lambda t: t.update(
            {
                "blob.chat_template.jinja": torch.tensor([32], dtype=torch.uint8),
                "blob.generation.json": torch.tensor([91, 93], dtype=torch.uint8),
            }
        ),
    )
    assert fault(toy).code == "TL003"


def test_whatever_is_done_to_a_file_the_answer_is_a_line_or_a_model(toy: Path) -> None:
    """Random damage to bytes and to the configuration never gives another exception."""
    raw, rng, num_refused = toy.read_bytes(), random.Random(0), 0
    for _ in range(150):
        changed = bytearray(raw)
        for _ in range(rng.choice((1, 1, 3))):
            changed[rng.randrange(rng.choice((16, 4000, len(raw))))] = rng.randrange(256)
        toy.write_bytes(changed)
        num_refused += is_refused(toy)
    assert num_refused > 50
    odd = (None, True, -1, 0, 3, 10**400, 1.5, "x", "rope", [], [1], {}, {"kind": "linear"})
    for _ in range(300):
        toy.write_bytes(raw)
        rewrite_config(toy, lambda config: put(config, rng, rng.choice(odd)))
        num_refused += is_refused(toy)
    assert num_refused > 300


def is_refused(path: Path) -> bool:
    try:
        artifact.load(path, verify=True)
    except ArtifactError as ex:
        assert "\n" not in str(ex) and len(str(ex)) < 600
        return True
    return False


def put(config: dict[str, Any], rng: random.Random, value: Any) -> None:
    """Replaces a random key of the configuration at a random depth."""
    key = rng.choice(sorted(config))
    while isinstance(config[key], dict) and rng.random() < 0.9:
        config, key = config[key], rng.choice(sorted(config[key]))
    config[key] = value


# ------------------------------------------------------------------------------------------------------ the command line


def info(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "gpu_worker.artifact", "info", *args],
        capture_output=True,
        text=True,
        timeout=60,
    )


def test_info_prints_one_screen(toy: Path) -> None:
    done = info(str(toy), "--verify")
    assert done.returncode == 0 and done.stderr == ""
    for word in (
        "default 4, trained to 4, at most 8",
        "h_int4",
        "last_loop",
        "rebuilt",
        "506 entries, with chat template",
    ):
        assert word in done.stdout
    assert artifact.load(toy).digest in done.stdout and "(verified)" in done.stdout
    assert len(done.stdout.splitlines()) < 30


def test_info_of_a_faulty_file_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "a.tinyloop"
    path.write_bytes(b"not at all")
    done = info(str(path))
    assert done.returncode == 1 and done.stdout == "" and done.stderr.startswith("TL001 ")
    assert len(done.stderr.splitlines()) == 1
