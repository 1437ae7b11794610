"""Script a model's answers to each coding agent: one call of the agent's own tools after each result."""

import json
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from served import Scripted

from localllm import api
from localllm.files.gguf.file import GGUFFile
from localllm.server import http, metrics

HEADER, RESULT, TOOLS = "<|im_start|>assistant\n", "<tool_response>", "<tools>"
OLD, NEW = "    return a - b", "    return a + b"
FIND = "sed -i 's/a - b/a + b/' calc.py"
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
RUN = f"{sys.executable} check.py"
FOLDER = "/FOLDER"  # of the task, in answers
FILE = f"{FOLDER}/calc.py"


def call(name: str, **arguments: Any) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


@dataclass
class AgentScript:
    """An agent's command line, and the answers that it gets."""

    arguments: Sequence[str]
    steps: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    result: str = RESULT  # what a prompt has for each step that was taken


SCRIPTS = {
    "claude": AgentScript(
        ["--dangerously-skip-permissions", "-p"],
        [call("Read", file_path=FILE), call("Edit", file_path=FILE, old_string=OLD, new_string=NEW),
         call("Bash", command=RUN, description="Run the test")],
        {"IS_SANDBOX": "1"},
    ),
    "codex": AgentScript(
        ["exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"],
        [call("exec_command", cmd=command) for command in ("cat calc.py", FIND, RUN)],
    ),
    "opencode": AgentScript(
        ["run"],
        [call("read", filePath=FILE), call("edit", filePath=FILE, oldString=OLD, newString=NEW),
         call("bash", command=RUN)],
    ),
    "qwen": AgentScript(
        ["--yolo", "-p"],
        [call("read_file", file_path=FILE),
         call("edit", file_path=FILE, old_string=OLD, new_string=NEW),
         call("run_shell_command", command=RUN, is_background=False)],
    ),
    "aider": AgentScript(
        ["--yes-always", "--no-git", "--no-check-update", "--no-stream", "--edit-format", "diff", "--test-cmd", RUN,
         "--auto-test", "calc.py", "--message"],
        [f"calc.py\n```python\n<<<<<<< SEARCH\n{OLD}\n=======\n{NEW}\n>>>>>>> REPLACE\n```\n"],
    ),
    "mini": AgentScript(
        ["--yolo", "--exit-immediately", "--task"],
        [call("bash", command=command) for command in ("cat calc.py", FIND, RUN, SUBMIT)],
    ),
}  # fmt: skip


class Played:
    """A scripted model for one agent, and a record of what it was asked.

    Attributes:
        requests: of each with tools, tokens of the prompt, of these in the cache, and of the answer.  bodies: as sent.
    """

    def __init__(self, path: str, script: AgentScript, turns: int, folder: Path):
        self._path, self._script, self._folder = path, script, str(folder)
        self._steps = [*[script.steps[0]] * (1 + turns), *script.steps[1:]]
        self._has_calls = script.steps[0].startswith("<tool_call>")
        self.requests, self.bodies = list[tuple[int, int, int]](), list[dict[str, Any]]()
        finish, parse = metrics.Metrics.record_finished, http.parse_json

        def record_finished(self_: Any, request: Any) -> None:
            if request.task.calls or not self._has_calls:
                written = sum(len(each.tokens) for each in request.answers)
                self.requests.append((len(request.prompt), request.cached, written))
            finish(self_, request)

        def parse_json(body: bytes, depth: int) -> dict[str, Any]:
            self.bodies.append(parse(body, depth))
            return self.bodies[-1]

        metrics.Metrics.record_finished, http.parse_json = record_finished, parse_json  # type: ignore[method-assign]

    def open(self) -> api.Model:
        """Open the model: a vocabulary and a template, and no weights."""
        file = GGUFFile.open(self._path)
        tokenizer = api.load_tokenizer(file)
        engine: Any = ByTurn(tokenizer, 131072, self.answer)
        return api.Model(file, tokenizer, engine)

    def answer(self, prompt: str) -> str:
        """Return the answer to a prompt, by how many results are in it; without tools a title."""
        if TOOLS not in prompt and self._has_calls:
            return "A task"
        done = prompt.count(self._script.result) - prompt.partition("<|im_end|>")[0].count(self._script.result)
        last = "The line is changed and the test passes."
        return self._steps[done].replace(FOLDER, self._folder) if done < len(self._steps) else last

    def turns_read_again(self) -> list[int]:
        """Return, of each request but the first, how many tokens of the one before and its answer were read again."""
        pairs = zip(self.requests, self.requests[1:], strict=False)
        return [max(0, before + written - cached) for (before, _, written), (_, cached, _) in pairs]

    def prompt_range(self) -> str:
        prompts = [prompt for prompt, *_ in self.requests]
        return f"{min(prompts)} to {max(prompts)}" if prompts else "no"


class ByTurn(Scripted):
    """A model whose answer is a function of the whole prompt."""

    def __init__(self, tokenizer: Any, context: int, answer: Callable[[str], str]):
        super().__init__(tokenizer, context, {})
        self._by_prompt, self._said = answer, dict[tuple[int, int], list[int]]()

    def next_token(self, tokens: list[int]) -> int:
        size = len(self.tail)
        place = next((end for end in range(len(tokens), size - 1, -1) if tokens[end - size : end] == self.tail), 0)
        key = place, hash(tuple(tokens[:place]))
        if key not in self._said:
            said = self._by_prompt(self._tokenizer.decode(tokens[:place], special=True))
            self._said[key] = [*self._tokenizer.encode(said, special=True), self._tokenizer.eos_id]
        written, answer = len(tokens) - place, self._said[key]
        return answer[written] if written < len(answer) else answer[-1]
