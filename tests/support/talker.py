"""The program with a scripted model, for terminals.

It answers from ANSWERS, and any other question with the question in capitals. Run as a script it takes the program's
arguments.
"""

import time
from types import SimpleNamespace

from fake_engine import FakeEngine

from localllm import api
from localllm.cli import main
from localllm.engine.forks import create_lock
from localllm.engine.options import EngineOptions
from localllm.files.gguf.file import GGUFFile
from localllm.text.tokenizer import Tokenizer

MIXED = (
    "The quick brown fox 狐狸は怠け者の犬を飛び越える。そして、もう一度跳びます。 and 👩\u200d🔬👍🏽🇩🇪 emoji, "
    "naïve café words that go on and on"
)
MARKDOWN = "# Colours\n\n- **red**\n- blue\n\n```python\nx = 1\n```\n\n" + "One line of text. " * 12
ANSWERS = {
    "mixed": MIXED,
    "colours": MARKDOWN,
    "slowly": "one two three four five six seven eight nine ten",
    "think": "<think>Let me see, what is it?</think>It is four.",
    "ponder": "<think>Let me see, what is it?",
    "count": " ".join(str(number) for number in range(400)),
}
PAUSES = {"slowly": 0.01, "waiting": 2.0}  # seconds before each of its tokens
HEADER = "<|im_start|>assistant\n"


class Talker(FakeEngine):
    """An engine that answers from ANSWERS."""

    def __init__(self, tokenizer: Tokenizer, context: int):
        super().__init__(tokenizer.vocab_size, self.next_token, context)
        self._tokenizer, self.tail = tokenizer, tokenizer.encode(HEADER, special=True)
        self.hyperparameters = SimpleNamespace(
            arch="llama", context=512, states=tuple, is_diffusion=False, bidirectional=False, start_token=None
        )
        self.lock, self.warning, self._answers = create_lock(self), None, dict[str, list[int]]()

    def answer(self, question: str) -> list[int]:
        if question not in self._answers:
            text = ANSWERS.get(question, question.upper())
            self._answers[question] = [*self._tokenizer.encode(text), self._tokenizer.eos_id]
        return self._answers[question]

    def next_token(self, tokens: list[int]) -> int:
        size = len(self.tail)
        place = next((end for end in range(len(tokens), size - 1, -1) if tokens[end - size : end] == self.tail), 0)
        question = (
            self._tokenizer.decode(tokens[:place], special=True).rpartition("user\n")[2].partition("<|im_end|>")[0]
        )
        time.sleep(PAUSES.get(question, 0))
        count, answer = len(tokens) - place, self.answer(question)
        return answer[count] if count < len(answer) else answer[-1]


def open_talker(path: str, options: EngineOptions, chat_template: str | None = None, *_: object) -> api.Model:
    """Open a scripted model; replaces api.open_with_options."""
    file = GGUFFile.open(path)
    tokenizer = api.load_tokenizer(file)
    return api.Model(file, tokenizer, Talker(tokenizer, options.context or 4096), chat_template)


if __name__ == "__main__":
    api.open_with_options = open_talker
    main.main()
