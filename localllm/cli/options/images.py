"""Options for images and the vision projector."""

import sys
from typing import TYPE_CHECKING, Annotated

from localllm.cli.parameters import group, option
from localllm.cli.terminal.output import stdin
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.text.messages import Message

Projector = Annotated[
    str | None, option("-mm --mmproj", "Vision projector.  [default: mmproj-*.gguf in the model's folder]", "FILE")
]


@group
class ImageGroup:
    """Images, for vision models."""

    image_files: list[str] | None = option(
        "--image", "Image to send with the prompt; - is stdin.  [repeatable]", "FILE"
    )
    mmproj: Projector = None
    pan_and_scan: bool = option(
        "--pan-and-scan", "Gemma 3: also encode crops of elongated images; takes up to five times the tokens."
    )

    @property
    def takes_stdin(self) -> bool:
        return "-" in (self.image_files or ())

    def with_images(self, prompt: "str | list[Message]") -> "str | list[Message]":
        """Return the prompt with the images before its text. Raises UsageError if it is not a conversation."""
        if not self.image_files:
            return prompt
        if isinstance(prompt, str):
            raise UsageError("images need a chat template: leave out --raw, or use a chat model")
        return [*prompt[:-1], {**prompt[-1], "images": self.sources()}]

    def sources(self) -> list[str | bytes]:
        """Return the paths of images, and the bytes of one from stdin. Raises UsageError."""
        files = self.image_files or []
        if files.count("-") > 1 or ("-" in files and sys.stdin is None):
            raise UsageError("--image -: stdin must be open, and can be used for one image only")
        return [stdin().read() if name == "-" else name for name in files]

    def require_files(self) -> None:
        """Raise UsageError for an image from stdin, from which chat reads the conversation."""
        if self.takes_stdin:
            raise UsageError("--image -: chat reads the prompt from stdin; use `localllm run` for an image from stdin")
