#!/usr/bin/env python3
"""Run lm-evaluation-harness against `localllm serve` on local questions, and check each score.

    python scripts/platform/check_lm_eval.py MODEL.gguf TOKENIZER

TOKENIZER is a folder with the model's tokenizer as transformers reads it (tokenizer.json). The harness runs by
`--model local-completions`, which asks /v1/completions with echo, log probabilities and token ids, in an environment of
its own, outside of the repository (--environment), where it is installed the first time. Each answer's log likelihood
is compared with that by `Model.logits`. Prints the harness's table; the exit code is 1 if one differs.
"""

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from own_environment import python_with

import localllm

ROOT = Path(__file__).resolve().parent.parent.parent
PACKAGES = ["lm_eval[api]==0.4.13", "transformers"]
TOLERANCE = 0.02  # of a log likelihood: runs of other lengths round otherwise
QUESTIONS = [
    ("What is the capital of France?", ["Paris", "London", "Rome"], 0),
    ("How much is 2 and 2?", ["5", "4", "22"], 1),
    ("At how many degrees Celsius does water freeze?", ["0", "100", "50"], 0),
    ("Where does the sun rise?", ["in the west", "in the north", "in the east"], 2),
    ("What is a cat?", ["an animal", "an engine", "an idea"], 0),
    ("What do dogs do?", ["They bark.", "They meow.", "They fly."], 0),
]
TASK = """task: local_questions
dataset_path: json
dataset_kwargs: {{data_files: {{test: {questions}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "Question: {{{{question}}}}\\nAnswer:"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{answer}}}}"
metric_list: [{{metric: acc}}]
"""


def run_harness(python: Path, model: str, tokenizer: str, folder: Path) -> list[dict]:
    """Run the task against a server of the model; returns what the harness has logged of each question."""
    lines = [json.dumps({"question": asked, "choices": texts, "answer": right}) for asked, texts, right in QUESTIONS]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    (folder / "task.yaml").write_text(TASK.format(questions=folder / "questions.jsonl"), encoding="utf-8")
    serve = [sys.executable, "-m", "localllm", "serve", f"model={model}", "--port", "0"]
    with subprocess.Popen(serve, cwd=ROOT, stderr=subprocess.PIPE, text=True) as server:
        try:
            assert server.stderr
            addresses = (re.search(r"http://\S+\d", line) for line in server.stderr)  # others come before
            if not (found := next(filter(None, addresses), None)):
                raise SystemExit("the server did not start")
            given = f"model=model,base_url={found[0]}/v1/completions,tokenizer={tokenizer}"
            command = [str(python), "-m", "lm_eval", "--model", "local-completions", "--model_args", given]
            command += ["--include_path", str(folder), "--tasks", "local_questions", "--log_samples"]
            offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(folder / "hub")}
            subprocess.run(
                [*command, "--output_path", str(folder / "out")], check=True, env={**os.environ, **offline}, cwd=folder
            )
        finally:
            server.terminate()
    (samples,) = (folder / "out").rglob("samples_*.jsonl")
    return [json.loads(line) for line in samples.read_text(encoding="utf-8").splitlines()]


def log_likelihood(model: localllm.Model, context: str, text: str) -> float:
    """Return the log probability of a text behind a context, both as tokens of one text, without BOS, as asked."""
    ids = model.tokenize(context + text)
    first = len(model.tokenize(context))
    rows = model.logits(ids).astype(np.float64)[first - 1 : -1]
    rows -= rows.max(axis=1, keepdims=True)
    following = ids[first:]
    return float((rows[np.arange(len(following)), following] - np.log(np.exp(rows).sum(axis=1))).sum())


def main() -> int:
    """Run the harness, and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("tokenizer")
    parser.add_argument("--environment", type=Path, default=Path.home() / ".cache" / "localllm" / "lm-eval")
    arguments = parser.parse_args()
    model, tokenizer = map(os.path.abspath, (arguments.model, arguments.tokenizer))
    with tempfile.TemporaryDirectory() as folder:
        samples = run_harness(python_with(PACKAGES, arguments.environment), model, tokenizer, Path(folder))
    differing = 0
    with localllm.open(model, cache=False) as opened:
        for sample in samples:
            for asked, (answer,) in zip(sample["arguments"].values(), sample["resps"], strict=True):
                told, own = float(answer[0]), log_likelihood(opened, asked["arg_0"], asked["arg_1"])
                if abs(told - own) > TOLERANCE:
                    differing += 1
                    print(f"{asked['arg_0']!r} {asked['arg_1']!r}: {told} instead of {own}")
    print(f"{sum(len(sample['resps']) for sample in samples)} log likelihoods, of which {differing} differ")
    return bool(differing or not samples)


if __name__ == "__main__":
    sys.exit(main())
