"""An answer as blocks in a row: thoughts, texts, calls of tools, for Anthropic's interface and OpenAI's newer one."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from localllm.generation.reasoning import TextPart
from localllm.generation.tools.tool_call import ToolCall, call_id
from localllm.generation.tools.tool_call_parser import ARGUMENTS, CALL
from localllm.server.service import ResponseStream

OPEN, DELTA, CLOSE = "open", "delta", "close"


@dataclass
class Block:
    """A part of an answer.

    Attributes:
        kind: THOUGHT, ANSWER or CALL.  name, id: of a call.  index: its place, from 0.
    """

    kind: str
    index: int
    name: str = ""
    id: str = field(default_factory=call_id)
    pieces: list[str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """What is in it: of a call, the arguments as JSON, as far as they were said."""
        return "".join(self.pieces)

    @property
    def is_cut(self) -> bool:
        """Whether it is a call whose arguments are not whole."""
        return self.kind == CALL and ToolCall(self.name, self.pieces).arguments is None


class Change(NamedTuple):
    """What is new: a block opens, has more text, or closes."""

    what: str
    block: Block
    text: str = ""


class Blocks:
    """The blocks of an answer that is being told."""

    def __init__(self) -> None:
        self.all = list[Block]()
        self._is_open = False

    def take(self, part: TextPart) -> Iterator[Change]:
        """What changes with a part."""
        kind = CALL if part.kind == ARGUMENTS else part.kind
        if not self._is_open or part.kind == CALL or self.all[-1].kind != kind:
            yield from self.end()
            self._is_open = True
            self.all.append(Block(kind, len(self.all), part.text if kind == CALL else ""))
            yield Change(OPEN, self.all[-1])
        if part.kind != CALL:
            self.all[-1].pieces.append(part.text)
            yield Change(DELTA, self.all[-1], part.text)

    def end(self) -> Iterator[Change]:
        """The last block closes, if there is one."""
        if self._is_open:
            self._is_open = False
            yield Change(CLOSE, self.all[-1])

    @property
    def calls(self) -> bool:
        """Whether there are calls."""
        return any(block.kind == CALL for block in self.all)


async def all_blocks(exchange: ResponseStream) -> tuple[Blocks, str]:
    """The blocks of a whole answer, and why it ended. The exchange is closed then."""
    blocks, reason = Blocks(), ""
    try:
        async for _, told in exchange.events():
            for part in told.parts:
                list(blocks.take(part))
            reason = told.finish_reason or reason
    finally:
        await exchange.close()
    return blocks, reason
