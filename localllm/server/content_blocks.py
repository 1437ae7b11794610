"""A response as blocks of reasoning, text and tool calls, for Anthropic's API and OpenAI's Responses API."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from localllm.generation.reasoning import ARGUMENTS, CALL, TextPart
from localllm.generation.tools.tool_call_parser import ToolCall, generate_call_id
from localllm.server.service import ResponseStream

OPEN, DELTA, CLOSE = "open", "delta", "close"


@dataclass
class ContentBlock:
    """One block of a response.

    Attributes:
        kind: REASONING, ANSWER or CALL.  name, id: of a tool call.  index: position in the response, from 0.
    """

    kind: str
    index: int
    name: str = ""
    id: str = field(default_factory=generate_call_id)
    chunks: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """The content so far; for a tool call, its arguments as JSON."""
        return "".join(self.chunks)

    @property
    def is_truncated(self) -> bool:
        """Return whether the block is a tool call with incomplete arguments."""
        return self.kind == CALL and ToolCall(self.name, self.chunks).arguments is None


class ContentBlockChange(NamedTuple):
    """A change of one block: it opens, grows, or closes."""

    action: str
    block: ContentBlock
    text: str = ""


class ContentBlockList:
    def __init__(self) -> None:
        self.all = list[ContentBlock]()
        self._is_open = False

    def take(self, part: TextPart) -> Iterator[ContentBlockChange]:
        """Append a segment of the answer; yield the resulting changes."""
        kind = CALL if part.kind == ARGUMENTS else part.kind
        if not self._is_open or part.kind == CALL or self.all[-1].kind != kind:
            yield from self.finish()
            self._is_open = True
            self.all.append(ContentBlock(kind, len(self.all), part.text if kind == CALL else ""))
            yield ContentBlockChange(OPEN, self.all[-1])
        if part.kind != CALL:
            self.all[-1].chunks.append(part.text)
            yield ContentBlockChange(DELTA, self.all[-1], part.text)

    def finish(self) -> Iterator[ContentBlockChange]:
        if self._is_open:
            self._is_open = False
            yield ContentBlockChange(CLOSE, self.all[-1])

    @property
    def has_calls(self) -> bool:
        return any(block.kind == CALL for block in self.all)


async def collect_blocks(stream: ResponseStream) -> tuple[ContentBlockList, str]:
    """Wait for the complete response, close it, and return its blocks and finish reason."""
    blocks, reason = ContentBlockList(), ""
    try:
        async for _, token_event in stream.stream_events():
            for part in token_event.parts:
                list(blocks.take(part))
            reason = token_event.finish_reason or reason
    finally:
        await stream.close()
    return blocks, reason
