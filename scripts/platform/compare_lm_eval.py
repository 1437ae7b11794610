#!/usr/bin/env python3
"""Compare lm-evaluation-harness on `localllm serve` with its own `hf` backend, with the same weights in F32.

    python scripts/platform/compare_lm_eval.py MODEL-F32.gguf

transformers makes a checkpoint of the GGUF file, and torch runs it on the CPU. 100 items of local files: 40 questions
of multiple choice, 40 log likelihoods, 20 rolling ones, cut from a text (--text; docs/chat.md, of which the built-in
model knows something). Prints each figure of both backends as the harness rounds it, and by how much single log
likelihoods differ at most; the exit code is 1 if a figure differs. The harness runs in an environment of its own,
outside of the repository (--environment), where it is installed the first time, with torch (1 GB).
"""

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from own_environment import python_with

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ["lm_eval[api]==0.4.13", "torch==2.13.0", "transformers==5.24.0", "accelerate", "gguf"]
DIGITS = 4  # of the harness's table
CONVERT = """
import sys, torch
from transformers import AutoModelForCausalLM, AutoTokenizer
folder, name, out = sys.argv[1:]
AutoTokenizer.from_pretrained(folder, gguf_file=name).save_pretrained(out)
read = AutoModelForCausalLM.from_pretrained(folder, gguf_file=name, dtype=torch.float32)
del read.config.quantization_config  # a model read from GGUF cannot be saved, but its weights can
plain = AutoModelForCausalLM.from_config(read.config, dtype=torch.float32)
plain.load_state_dict(read.state_dict())
plain.save_pretrained(out)
"""
HEAD = """task: local_{kind}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: {kind}
"""
TASKS = {
    "multiple_choice": """doc_to_text: "{{context}}"
doc_to_choice: "{{choices}}"
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}, {metric: acc_norm}]
""",
    "loglikelihood": """doc_to_text: "{{context}}"
doc_to_target: "{{end}}"
metric_list: [{metric: perplexity}, {metric: acc}]
""",
    "loglikelihood_rolling": """doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: word_perplexity}, {metric: byte_perplexity}, {metric: bits_per_byte}]
""",
}


def make_items(text: str) -> dict[str, list[dict[str, Any]]]:
    """Cut 40, 40 and 20 items from a text, by a seed."""
    chance, words = random.Random(5), text.split()

    def cut(count: int) -> list[str]:
        start = chance.randrange(len(words) - count)
        return words[start : start + count]

    choices, ends = [], []
    for _ in range(40):
        asked, answer = cut(24), chance.randrange(4)
        texts = [" ".join(cut(8)) for _ in range(3)]
        texts.insert(answer, " ".join(asked[16:]))
        choices.append({"context": " ".join(asked[:16]), "choices": texts, "answer": answer})
        begun = cut(20)
        ends.append({"context": " ".join(begun[:19]), "end": " " + begun[19]})
    rolling = [{"text": " ".join(cut(chance.randrange(20, 120)))} for _ in range(20)]
    return {"multiple_choice": choices, "loglikelihood": ends, "loglikelihood_rolling": rolling}


def write_tasks(folder: Path, text: str) -> None:
    """Write the tasks and their items, cut from a text, for the harness."""
    for kind, items in make_items(text).items():
        file = folder / f"{kind}.jsonl"
        file.write_text("".join(json.dumps(item) + "\n" for item in items), encoding="utf-8")
        (folder / f"{kind}.yaml").write_text(HEAD.format(kind=kind, file=file) + TASKS[kind], encoding="utf-8")


class Harness:
    """The harness in its environment, with tasks in a folder."""

    def __init__(self, python: Path, folder: Path):
        self.python, self.folder = python, folder
        offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
        self.environment = {**os.environ, **offline}

    def convert(self, model: Path) -> Path:
        """Make a checkpoint in F32 of a GGUF file."""
        out = self.folder / "checkpoint"
        words = [self.python, "-c", CONVERT, model.parent, model.name, out]
        subprocess.run([*map(str, words)], check=True, env=self.environment)
        return out

    def run(self, backend: str, given: str) -> tuple[dict[str, float], list[float]]:
        """Return the figures by name, and all log likelihoods in order."""
        out = self.folder / backend
        words = ["-m", "lm_eval", "--model", backend, "--model_args", given, "--include_path", str(self.folder)]
        words += ["--tasks", ",".join(f"local_{kind}" for kind in TASKS), "--log_samples", "--output_path", str(out)]
        subprocess.run(
            [str(self.python), *words, *(["--device", "cpu"] if backend == "hf" else [])],
            check=True, env=self.environment, cwd=self.folder,
        )  # fmt: skip
        (results,) = out.rglob("results_*.json")
        figures = {
            f"{task} {name.removesuffix(',none')}": value
            for task, values in sorted(json.loads(results.read_text("utf-8"))["results"].items())
            for name, value in sorted(values.items())
            if isinstance(value, float)
        }
        return figures, [value for path in sorted(out.rglob("samples_*.jsonl")) for value in log_likelihoods(path)]


def log_likelihoods(path: Path) -> list[float]:
    """Return the log likelihoods that the harness has logged, by the documents' numbers."""
    rows = [json.loads(line) for line in path.read_text("utf-8").splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    numbers = []
    for row in rows:
        for (answer,) in row["resps"]:
            numbers.append(float(answer[0] if isinstance(answer, list) else answer))
    return numbers


def run_server(harness: Harness, model: Path, tokenizer: Path) -> tuple[dict[str, float], list[float]]:
    """Run the harness against a server of the model."""
    serve = [sys.executable, "-m", "localllm", "serve", f"model={model}", "--port", "0", "--kv-type", "f32"]
    with subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr
            addresses = (re.search(r"http://\S+\d", line) for line in server.stderr)  # others come before
            if not (found := next(filter(None, addresses), None)):
                raise SystemExit("the server did not start")
            url = f"base_url={found[0]}/v1/completions"
            return harness.run("local-completions", f"model=model,{url},tokenizer={tokenizer},max_length=1023")
        finally:
            server.terminate()


def main() -> int:
    """Run both, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path, help="a GGUF file in F32, of an architecture that transformers reads")
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "localllm" / "lm-eval-hf")
    parser.add_argument("--text", type=Path, default=ROOT / "docs" / "chat.md", metavar="FILE")
    arguments = parser.parse_args()
    model = arguments.model.resolve()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_tasks(folder, arguments.text.read_text("utf-8"))
        harness = Harness(python_with(PACKAGES, arguments.environment), folder)
        checkpoint = harness.convert(model)
        served, own = run_server(harness, model, checkpoint)
        reference, exact = harness.run("hf", f"pretrained={checkpoint},dtype=float32,max_length=1023")
    differing = 0
    for figure, value in reference.items():
        texts = f"{served.get(figure, float('nan')):.{DIGITS}f}", f"{value:.{DIGITS}f}"
        differing += texts[0] != texts[1]
        print(f"{figure:50} serve {texts[0]:>12}  hf {texts[1]:>12}{'  differs' * (texts[0] != texts[1])}")
    if len(own) != len(exact):
        raise SystemExit(f"{len(own)} and {len(exact)} log likelihoods")
    most = max(abs(one - other) for one, other in zip(own, exact, strict=True))
    print(f"{len(own)} log likelihoods, which differ by {most:.2g} at most; {differing} figures differ")
    return bool(differing or not reference)


if __name__ == "__main__":
    sys.exit(main())
