"""Measure what a JSON schema costs a model's answers.

    python scripts/measure json-answers MODEL [--peer-python PEER]

Forty questions with known answers (json_tasks.py), greedily, one after another: how many are right if the model may
write white space between the parts of JSON (as it is), if it may not, and by llama.cpp with its own grammar of the same
schemas. --list tells each wrong answer.
"""

import json
import subprocess
from collections.abc import Iterator

from common import make_parser
from json_tasks import JsonTask, is_right, read_json_tasks

import localllm
from localllm.generation.constraints.schemas import OPTIONS, WHITE_SPACE

TOKENS = 200
NO_SPACE = r"(?:)"
THEIRS = """
import json, sys, llama_cpp
model = llama_cpp.Llama(sys.argv[1], n_ctx=2048, n_threads=2, verbose=False)
for line in sys.stdin:
    prompt, schema = json.loads(line)
    form = {"type": "json_object", "schema": schema}
    answer = model.create_chat_completion(
        [{"role": "user", "content": prompt}], temperature=0, max_tokens=int(sys.argv[2]), response_format=form
    )
    print(json.dumps(answer["choices"][0]["message"]["content"]), flush=True)
"""


def our_answers(model: localllm.Model, tasks: list[JsonTask], white_space: str) -> Iterator[str]:
    """Answers of localllm; white_space: an expression for what may stand between the parts of JSON."""
    usual, OPTIONS["whitespace_pattern"] = WHITE_SPACE, white_space
    try:
        for task in tasks:
            yield "".join(
                model.chat([{"role": "user", "content": task.prompt}], TOKENS, temperature=0, schema=task.schema)
            )
    finally:
        OPTIONS["whitespace_pattern"] = usual


def their_answers(python: str, path: str, tasks: list[JsonTask]) -> list[str]:
    """Answers of llama.cpp."""
    asked = "".join(json.dumps([task.prompt, task.schema]) + "\n" for task in tasks)
    words = [python, "-c", THEIRS, path, str(TOKENS)]
    done = subprocess.run(words, input=asked, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, check=True)
    return [json.loads(line) for line in done.stdout.splitlines()]


def main() -> None:
    """Parse, ask, print."""
    parser = make_parser(__doc__, "model", threads=False)
    parser.add_argument("--peer-python", help="an interpreter that has llama-cpp-python")
    parser.add_argument("--list", action="store_true", help="also tell each wrong answer")
    options = parser.parse_args()
    tasks, answers = read_json_tasks(), dict[str, list[str]]()
    with localllm.open(options.model, context=2048, cache=False) as model:
        answers["white space"] = [*our_answers(model, tasks, WHITE_SPACE)]
        answers["compact"] = [*our_answers(model, tasks, NO_SPACE)]
    if options.peer_python:
        answers["llama.cpp"] = their_answers(options.peer_python, options.model, tasks)
    for name, texts in answers.items():
        wrong = [(task, text) for task, text in zip(tasks, texts, strict=True) if not is_right(task, text)]
        print(f"{name}: {len(tasks) - len(wrong)} of {len(tasks)} right")
        if options.list:
            for task, text in wrong:
                print(f"    {task.id}: {text!r}, not {json.dumps(task.expect, ensure_ascii=False)[:100]}")
