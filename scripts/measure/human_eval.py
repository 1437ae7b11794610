"""Run HumanEval with `localllm map` or a server.

    python scripts/measure human-eval MODEL|URL [MAP'S OPTIONS]

    python scripts/real_models.py human-eval qwen-0.5b
    python scripts/measure human-eval MODEL.gguf           # greedy, 512 tokens at most: the share that is right
    python scripts/measure human-eval MODEL.gguf --every 2 # each second task
    python scripts/measure human-eval MODEL.gguf --in-json # the same with the code as a text within JSON
    python scripts/measure human-eval MODEL.gguf --answers FILE   # keep them; what is there is not asked again
    python scripts/measure human-eval http://127.0.0.1:8080/v1 --callers 16   # ask a server: ours, llama-server, any

Other arguments go to `map`. Each answer's code runs with the task's tests, confined as by `localllm eval`'s grader
`program`. One line says how many are right and how long the answers took; --list also shows which are wrong, and why.
"""

import argparse
import gzip
import json
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

from common import ROOT
from real_models import read_table

from localllm.services.evaluation.questions import assemble_program
from localllm.services.tools.confined_python import ProgramOutcome, describe_obstacle, run_confined

ASK = "Complete this Python function. Answer with the whole function in one block of code.\n\n```python\n{prompt}```"
ASK_FOR_JSON = 'Complete this Python function. Answer with JSON, {"code": the function}.\n\n```python\n{prompt}```'
SCHEMA = {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]}
TOKENS = 512


class Task(NamedTuple):
    """A task of HumanEval."""

    task_id: str
    prompt: str
    entry_point: str
    test: str


def read_tasks(path: Path | None = None) -> list[Task]:
    """Read all tasks in order; path: of HumanEval.jsonl.gz."""
    with gzip.open(path or read_table()["human-eval"].path, "rt", encoding="utf-8") as lines:
        rows = [json.loads(line) for line in lines]
    return [Task(*(row[field] for field in Task._fields)) for row in rows]


def judge(task: Task, answer: str) -> ProgramOutcome:
    """Return whether an answer's code passes the task's tests. Raises RuntimeError if it cannot be confined."""
    return run_confined(assemble_program(task._asdict(), answer))


def judge_all(tasks: Iterable[Task], answers: dict[str, str], at_once: int = 2) -> dict[str, ProgramOutcome]:
    """Judge all answers; return the outcomes by task."""
    answered = [task for task in tasks if task.task_id in answers]
    with ThreadPoolExecutor(at_once) as pool:
        outcomes = pool.map(lambda task: judge(task, answers[task.task_id]), answered)
        return {task.task_id: outcome for task, outcome in zip(answered, outcomes, strict=True)}


def text_of(output: str, in_json: bool) -> str:
    """Return the code in an answer."""
    if not in_json:
        return output
    try:
        return str(json.loads(output)["code"])
    except (ValueError, KeyError, TypeError):
        return output


def answer_all(
    model: str | Path, tasks: list[Task], answers: Path, in_json: bool = False, options: Iterable[str] = ()
) -> dict[str, str]:
    """Ask `localllm map` for the tasks' answers, by their numbers; answers: its output. Raises SystemExit."""
    ask = ASK_FOR_JSON if in_json else ASK
    records = [{"id": task.task_id, "prompt": ask.replace("{prompt}", task.prompt)} for task in tasks]
    words: list[Any] = [sys.executable, "-m", "localllm", "map", model]
    words += ["-o", answers, "-n", TOKENS, "--temp", 0, *(["--json-schema", json.dumps(SCHEMA)] if in_json else [])]
    with tempfile.TemporaryDirectory() as folder:
        asked = Path(folder) / "tasks.jsonl"
        asked.write_text("".join(json.dumps(record) + "\n" for record in records))
        words.insert(5, asked)
        done = subprocess.run([*map(str, words), *options], cwd=ROOT, stdin=subprocess.DEVNULL)
    if done.returncode not in (0, 6):  # 6: an answer was cut short of its schema, which is wrong then
        raise SystemExit(f"map ended with exit code {done.returncode}")
    return {row["id"]: text_of(row.get("output", ""), in_json) for row in rows_of(answers)}


def answer_over_http(url: str, tasks: list[Task], callers: int, in_json: bool = False) -> tuple[dict[str, str], int]:
    """Ask an OpenAI-compatible server, several requests at once; the answers by task, and their tokens in all."""
    ask = ASK_FOR_JSON if in_json else ASK
    schema = {"response_format": {"type": "json_schema", "json_schema": {"name": "code", "schema": SCHEMA}}}

    def answer(task: Task) -> tuple[str, int]:
        messages = [{"role": "user", "content": ask.replace("{prompt}", task.prompt)}]
        body = {"model": "any", "messages": messages, "temperature": 0, "max_tokens": TOKENS}
        data = json.dumps(body | (schema if in_json else {})).encode()
        request = urllib.request.Request(f"{url}/chat/completions", data, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=1200) as reply:
            answered = json.load(reply)
        text = answered["choices"][0]["message"]["content"]
        return text_of(text, in_json), answered["usage"]["completion_tokens"]

    with ThreadPoolExecutor(callers) as pool:
        answers = list(pool.map(answer, tasks))
    ids = [task.task_id for task in tasks]
    return dict(zip(ids, (text for text, _ in answers), strict=True)), sum(count for _, count in answers)


def rows_of(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the lines of a file of JSON."""
    for line in path.read_text("utf-8").splitlines():
        yield json.loads(line)


def main() -> None:
    """Parse, ask, judge, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a file, or a server's URL up to /v1")
    parser.add_argument("--callers", type=int, default=16, metavar="N", help="requests at once to a server")
    parser.add_argument("--every", type=int, default=1, metavar="N", help="only each Nth task")
    parser.add_argument("--in-json", action="store_true", help="ask for JSON that has the code as a text")
    parser.add_argument("--answers", type=Path, metavar="FILE", help="where answers are kept")
    parser.add_argument("--list", action="store_true", help="also tell which tasks failed, and why")
    options, more = parser.parse_known_args()
    if reason := describe_obstacle():
        raise SystemExit(f"nothing is executed here: {reason}")
    tasks = read_tasks()[:: options.every]
    count = 0
    start = time.perf_counter()
    if options.model.startswith(("http://", "https://")):
        answers, count = answer_over_http(options.model, tasks, options.callers, options.in_json)
    else:
        with tempfile.TemporaryDirectory() as folder:
            answers = answer_all(options.model, tasks, options.answers or Path(folder) / "out", options.in_json, more)
    seconds = time.perf_counter() - start
    outcomes = judge_all(tasks, answers)
    right = sum(outcome.passed for outcome in outcomes.values())
    speed = f", {count / seconds:.1f} tokens/s" if count else ""
    print(f"{right} of {len(tasks)} right: {100 * right / len(tasks):.1f} %, answers in {seconds:.0f} s{speed}")
    if options.list:
        for name, outcome in outcomes.items():
            print(*([] if outcome.passed else [f"{name}: {outcome.reason[:100]}"]), sep="\n")
