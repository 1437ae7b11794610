"""A chat template, and what is read off it when needed: how its model marks thoughts and writes calls of tools."""

from functools import cached_property
from typing import TYPE_CHECKING

from localllm.generation.reasoning import format_of

if TYPE_CHECKING:
    from localllm.generation.reasoning import ThinkingFormat
    from localllm.generation.tools.tool_call_format import ToolCallFormat
    from localllm.text.templates import ChatTemplate
    from localllm.text.tokenizer import Tokenizer


class ChatFormat:
    """How conversations are written.

    Attributes:
        template: that writes them.
    """

    def __init__(self, template: "ChatTemplate", tokenizer: "Tokenizer"):
        self.template, self._tokenizer = template, tokenizer

    @cached_property
    def thoughts(self) -> "ThinkingFormat | None":
        """How the model marks its thoughts, None if it has none."""
        return format_of(self.template.source, self._tokenizer)

    @cached_property
    def calls(self) -> "ToolCallFormat":
        """How the model writes calls of tools."""
        from localllm.generation.tools.tool_messages import format_of_template

        return format_of_template(self.template, self._tokenizer)

    @cached_property
    def result_marks(self) -> tuple[str, ...]:
        """What the template writes behind the result of a call, as far as a text could."""
        from localllm.generation.tools.tool_messages import marks_of_results

        return marks_of_results(self.template, self._tokenizer)
