"""The program with a scripted model that calls tools.

It answers questions from CALLS, and a tool's result with its first line. Run as a script it takes the program's
arguments.
"""

import json
import time

import talker
from talker import HEADER

from localllm import api
from localllm.cli import main

QWEN = (
    "{% if tools %}{{ tools | tojson }}{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    '<tool_call>\n{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}\n</tool_call>'
    "{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def call(name: str, **arguments: object) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {json.dumps(arguments)}}}\n</tool_call>'


CALLS = {
    "read": call("read_file", path="notes.txt"),
    "json": '```json\n{"name": "read_file", "arguments": {"path": "notes.txt"}}\n```',
    "speak": "Let me see.\n" + call("read_file", path="notes.txt"),
    "outside": call("read_file", path="../secret.txt"),
    "evil": call("read_file", path="evil.txt"),
    "run": call("run", command="echo hello; exit 3"),
    "sleep": call("run", command="echo begun; sleep 100"),
    "again": call("list", path="."),
    "add": call("calc__add", a=2, b=40),
}
FOR_EVER = "again"  # is answered with calls only


class ToolTalker(talker.Talker):
    """An engine that answers from CALLS."""

    def next_token(self, tokens: list[int]) -> int:
        size = len(self.tail)
        place = next((end for end in range(len(tokens), size - 1, -1) if tokens[end - size : end] == self.tail), 0)
        start, end = (self._tokenizer.get_special_id(mark) for mark in ("<|im_start|>", "<|im_end|>"))
        before = tokens[: place - size]
        begin = len(before) - before[::-1].index(start)
        role, _, text = self._tokenizer.decode(before[begin : before.index(end, begin)]).partition("\n")
        key = text if role == "user" else "\n" + text
        if role == "tool" and f"user\n{FOR_EVER}" in self._tokenizer.decode(before):
            key = FOR_EVER
        count, answer = len(tokens) - place, self.answer(key)
        return answer[count] if count < len(answer) else answer[-1]

    def answer(self, question: str) -> list[int]:
        if question.startswith("\n"):
            text = "It says: " + question[1:].partition("\n")[0]
        else:
            text = CALLS.get(question, question.upper())
        if question == "slowly":
            time.sleep(0.01)
        return [*self._tokenizer.encode(text), self._tokenizer.eos_id]


if __name__ == "__main__":
    talker.Talker = ToolTalker  # type: ignore[misc]
    api.open_with_options = talker.open_talker
    assert HEADER
    main.main()
