"""Implement --on-overflow head, tail, middle, relevant and chunks of `localllm run`."""

import os
from contextlib import suppress
from typing import TYPE_CHECKING

from localllm.cli.terminal.output import ProgressLine, say
from localllm.errors import UsageError
from localllm.services.long_text.long_prompt import (
    CHUNKS,
    RELEVANT,
    ChunkAnswers,
    ContextBudget,
    condense,
    truncate_material,
)
from localllm.system.files import get_cache_folder

SUMMARIZE = "Summarize this."

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.options import GenerationOptions


class PromptShortener:
    """Shortens prompts that exceed the context.

    Attributes:
        how: the value of --on-overflow.
    """

    def __init__(self, method: str, raw: bool):
        """Check the options. Raises UsageError for methods that need a question if the prompt is plain text."""
        if method in (CHUNKS, RELEVANT) and raw:
            raise UsageError(
                f"--on-overflow {method} needs a question in a chat template: leave out --raw and --suffix"
            )
        self.method, self._raw, self._files = method, raw, list[str]()

    def fit(
        self, model: "Model", material: str, question: str, system: str | None, options: "GenerationOptions"
    ) -> str:
        """Return a prompt that fits; print a note about the omitted text. Raises UsageError, ContextError."""
        if model.file is None or not model.context:
            raise UsageError(
                f"--on-overflow {self.method} is not available with --endpoint: the server's context length is "
                "unknown; shorten the prompt"
            )
        if not material:
            material, question = question, ""
        room, full_prompt = (
            ContextBudget.compute(model, question, system, options, self._raw),
            join_parts(material, question),
        )
        if room.fits(material):
            return full_prompt
        if self.method != CHUNKS:
            if self.method == RELEVANT:
                text, note = select_lines(model, material, question or SUMMARIZE, room)
            else:
                text, note = truncate_material(material, self.method, room)
            say(f"localllm: the prompt exceeds the context of {model.context} tokens: {note}")
            return join_parts(text, question)
        line, has_said = ProgressLine(), False

        def show(done: int, count: int) -> None:
            nonlocal has_said
            if not has_said:
                already = f", {done} of them already answered" if done else ""
                say(f"localllm: the prompt exceeds the context: asking the question of its {count} chunks{already}")
                has_said = True
            line.show(f"{done} of {count} chunks answered")

        answers = ChunkAnswers(model, question or SUMMARIZE, system, options, get_answers_path, show)
        try:
            return condense(material, question or SUMMARIZE, room, answers)
        finally:
            self._files = answers.files
            line.clear()

    def finish(self) -> None:
        """Remove the saved answers of chunks, once the final answer is complete."""
        for file in self._files:
            with suppress(OSError):
                os.unlink(file)


def select_lines(model: "Model", material: str, question: str, room: ContextBudget) -> tuple[str, str]:
    """Return the lines of a text that are relevant to a question, and a note about them. Raises ContextError."""
    from localllm.services.long_text.relevant_lines import find_lines, split_lines

    line, lines = ProgressLine(), split_lines(material)
    say(f"localllm: the prompt exceeds the context: scoring its {len(lines)} lines")
    show = lambda done, count: line.show(f"{done} of {count} lines scored")  # noqa: E731
    with line:
        picked, read = find_lines(model, question, lines, room.tokens, show)
    alike = "" if read == len(lines) else f"; {len(lines) - read} others are alike"
    return "\n".join(picked), f"reads {len(picked)} of {len(lines)} lines{alike}"


def join_parts(material: str, question: str) -> str:
    return "\n\n".join(filter(None, (material, question)))


def get_answers_path(key: str) -> str:
    """Return the path of the file for the chunks' answers. Raises LocalllmError."""
    from localllm.files.safe_file import create_private_folder

    return str(create_private_folder(get_cache_folder() / "parts") / f"{key}.jsonl")
