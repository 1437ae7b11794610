"""Options of `localllm run`; those of servers, images and tools are also in `chat`, `map` and others."""

import os
import sys
from collections.abc import Callable
from contextlib import ExitStack
from typing import TYPE_CHECKING, Annotated, Any

from localllm.cli.options import shared
from localllm.cli.options.choices import Choices
from localllm.cli.options.offers import make_offer, offer_prompts
from localllm.cli.options.shared import HideThinking
from localllm.cli.parameters import option, option_group
from localllm.cli.prompt_input import Encoding, Prompt, decode_file, read_file, require_decodable
from localllm.cli.terminal.output import open_stdin, say
from localllm.errors import UsageError

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.cli.options.shared import AnswerGroup, EngineGroup
    from localllm.cli.terminal.tool_calls import ToolCallRunner
    from localllm.services.remote.http import Endpoint
    from localllm.text.messages import Message


@option_group
class PromptGroup:
    """Prompt."""

    prompt: Prompt = None
    file: list[str] | None = option(
        "-f --file",
        "File, or folder of text files, to add to the prompt; - is stdin.  [repeatable; more may follow]",
        "FILE",
    )
    binary_file: str | None = option(
        "-bf --binary-file", "File to add to the prompt with its final line break.", "FILE"
    )
    system: shared.System = None
    system_file: shared.SystemFile = None
    chat_template: shared.ChatTemplate = None
    encoding: Encoding = None
    no_stdin: bool = option("--no-stdin", "Do not read stdin.")
    no_names: bool = option("--no-names", "Do not put file names before the texts of several files.")
    prompt_first: bool = option("--prompt-first", "Put the prompt before files and stdin, not after them.")
    raw: bool = option("--raw", "Continue the prompt as plain text, without the chat template.")
    no_cache: shared.NoCache = False


@option_group
class OutputGroup:
    """Output."""

    choices_given: Choices = None
    as_json: shared.AsJson = False
    stats: bool = option("--stats", "Print timings to stderr.")
    plain: shared.Plain = False
    receipt: str | None = option(
        "--receipt", "Write a receipt, so that `localllm replay` can reproduce the answer.", "FILE"
    )
    force: shared.Force = False
    hide_thinking: HideThinking = False
    n: int = option(
        "--n", "Sample N answers, most likely first; -n is the length in tokens.  [default: 1]", "N", default=1
    )
    beams: int = option("--beams", "Beam search with N beams.  [default: 0, off]", "N", default=0)


@option_group
class FollowUpGroup:
    """Code blocks and follow-up questions."""

    extract: bool = option(
        "-x --extract", "Print only the first code block of the answer, without its fences, and stop there."
    )
    extract_last: bool = option("--extract-last", "Print only the last code block of the answer.")
    latest: bool = option(
        "--continue", "Follow up on the last answer of `run`, with its model if none is given.", typed_only=True
    )
    session: str | None = option(
        "--session",
        "Continue or start this session (see `localllm sessions`); the answer is saved in it.",
        "NAME",
        typed_only=True,
    )


@option_group
class TemplateGroup:
    """Named prompts."""

    template: str | None = option(
        "--template",
        "Named prompt, with its options: see `localllm templates`.",
        "NAME",
        autocompletion=offer_prompts,
        typed_only=True,
    )
    field: list[str] | None = option(
        "--field", "Set a field of the template.  [repeatable]", "NAME=TEXT", typed_only=True
    )


@option_group
class InfillGroup:
    """Fill in the middle, for code models."""

    suffix: str | None = option(
        "--suffix", "Text after the gap; the prompt is then the text before it, verbatim.", "TEXT", typed_only=True
    )
    suffix_file: str | None = option("-sf --suffix-file", "File with the text after the gap.", "FILE", typed_only=True)

    def read_suffix(self, encoding: str | None, most_bytes: Callable[[], int]) -> str | None:
        """Return the text after the gap, or None without these options. Raises UsageError, ContextError.

        most_bytes: see read_prompt.
        """
        if self.suffix_file is None:
            return None if self.suffix is None else require_decodable(self.suffix, "--suffix")
        if self.suffix is not None:
            raise UsageError("give either --suffix or -sf, not both")
        return decode_file(read_file(self.suffix_file, most_bytes, encoding), self.suffix_file, encoding, whole=True)


def encode_infill(model: "Model", prefix: str, suffix: str) -> list[int]:
    """Return the prompt's token ids. Raises UsageError for a model without fill-in-the-middle tokens."""
    from localllm.generation.infill import Infill

    return Infill(prefix, suffix).encode(model.tokenizer)


KEY = "LOCALLLM_API_KEY"


@option_group
class EndpointGroup:
    """Remote server instead of a local model."""

    endpoint: str | None = option(
        "--endpoint", "OpenAI-compatible server, e.g. http://127.0.0.1:8000; MODEL is then one of its models.", "URL"
    )
    api_key_file: str | None = option("--api-key-file", f"File with the server's API key.  [default: ${KEY}]", "FILE")

    def parse_endpoint(self) -> "Endpoint | None":
        if self.endpoint is None:
            if self.api_key_file is not None:
                raise UsageError("api_key_file needs --endpoint URL")
            return None
        from localllm.services.remote.http import Endpoint

        return Endpoint.parse(self.endpoint, read_api_key(self.api_key_file))


def read_api_key(file: str | None) -> str | None:
    """Return the API key from a file, or from the environment. Raises UsageError."""
    if file is None:
        return os.environ.get(KEY) or None
    from localllm.files.text_file import read_keys

    return read_keys(file)[0]


def open_remote(
    place: "Endpoint", model: str | None, choices: "AnswerGroup", engine: "EngineGroup | None" = None, **refused: object
) -> Any:
    """Open a RemoteModel, which has the methods of a local model, at an endpoint.

    Warns of options about weights, which have no effect. refused: options by name that would change the answer and must
    not
    be set. Raises UsageError, EndpointError.
    """
    from localllm.services.remote.model import RemoteModel

    for name, value in refused.items():
        if value:
            raise UsageError(f"{name} is not available with --endpoint: the server sets it")
    if engine is not None and (ignored := list_weight_options(engine)):
        say(f"localllm: ignored (no effect with --endpoint): {', '.join(ignored)}")
    return RemoteModel(place, model, choices.shape.create_output_format())


def list_weight_options(engine: "EngineGroup") -> list[str]:
    """Return the given options about weights and the KV cache, which a server ignores."""
    usual = type(engine)(cache=type(engine.cache)(), rope=type(engine.rope)(), adapters=type(engine.adapters)())
    names = {"context": "-c", "threads": "-t", "device": "--device", "gpu_layers": "-ngl"}
    ignored = [text for name, text in names.items() if getattr(engine, name) != getattr(usual, name)]
    caches = ["--kv-type"] if vars(engine.cache) != vars(usual.cache) else []
    adapters = ["--lora"] if any(engine.adapters.to_fields().values()) else []
    return [*ignored, *caches, *(["--rope-scaling"] if engine.rope.make_scaling() else []), *adapters]


Projector = Annotated[
    str | None, option("-mm --mmproj", "Vision projector.  [default: mmproj-*.gguf in the model's folder]", "FILE")
]


@option_group
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

    def add_images(self, prompt: "str | list[Message]") -> "str | list[Message]":
        """Return the prompt with the images before its text. Raises UsageError if it is not a conversation."""
        if not self.image_files:
            return prompt
        if isinstance(prompt, str):
            raise UsageError("images need a chat template: leave out --raw, or use a chat model")
        return [*prompt[:-1], {**prompt[-1], "images": self.list_sources()}]

    def list_sources(self) -> list[str | bytes]:
        """Return the paths of images, and the bytes of one from stdin. Raises UsageError."""
        files = self.image_files or []
        if files.count("-") > 1 or ("-" in files and sys.stdin is None):
            raise UsageError("--image -: stdin must be open, and can be used for one image only")
        return [open_stdin().read() if name == "-" else name for name in files]

    def require_files(self) -> None:
        """Raise UsageError for an image from stdin, from which chat reads the conversation."""
        if self.takes_stdin:
            raise UsageError("--image -: chat reads the prompt from stdin; use `localllm run` for an image from stdin")


BUILT_IN = ("read_file", "list", "search", "run")


@option_group
class ToolGroup:
    """Tools that the model may call, each time with your consent."""

    tools: str | None = option(
        "--tools",
        "Built-in tools to offer, separated by commas: read_file,list,search,run.",
        "NAMES",
        autocompletion=make_offer(BUILT_IN),
    )
    allow: list[str] | None = option(
        "--allow", "Folder that the built-in tools may access; nothing outside is visible.  [repeatable]", "DIR"
    )
    mcp: str | None = option(
        "--mcp", 'JSON file of MCP servers: {"mcpServers": {NAME: {"command": ..., "args": []}}}.', "FILE"
    )
    yes: str | None = option("--yes", "Tools to run without asking, separated by commas.", "NAMES", typed_only=True)
    max_steps: int = option(
        "--max-steps", "Maximum number of tool calls for one answer.  [default: 20]", "N", default=20
    )
    no_json_calls: bool = option(
        "--no-json-calls", "Recognize only tool calls in the chat template's own format; treat other JSON as text."
    )
    transcript: str | None = option("--transcript", "Log tool calls and their results to FILE, as JSON lines.", "FILE")

    @property
    def is_enabled(self) -> bool:
        return self.tools is not None or self.mcp is not None

    def open_tools(self, stack: ExitStack) -> "ToolCallRunner | None":
        """Open the tools, with MCP servers that run until `stack` closes; return None without tools.

        Raises UsageError and the errors of McpServers.
        """
        if not self.is_enabled:
            for name in ("allow", "yes", "transcript"):
                if getattr(self, name) is not None:
                    raise UsageError(f"{name} needs tools: add --tools or --mcp")
            return None
        if self.max_steps < 1:
            raise UsageError(f"max_steps must be 1 or greater, not {self.max_steps}")
        from localllm.cli.terminal.tool_calls import ToolCallRunner
        from localllm.services.tools.built_in import make_toolbox
        from localllm.services.tools.transcript import require_transcript

        if self.transcript is not None:
            require_transcript(self.transcript)
        if "run" in split_names(self.tools):
            warn_unconfined()
        box = make_toolbox(split_names(self.tools), self.allow or (), self.mcp, stack, not self.no_json_calls)
        return ToolCallRunner.create(box, split_names(self.yes), self.max_steps, self.transcript, stack)


def warn_unconfined() -> None:
    """Warn if this system cannot confine commands to folders."""
    from localllm.services.tools.confined import get_landlock_version

    if not get_landlock_version():
        say("localllm: this system cannot confine commands to folders; check each command before you allow it")


def split_names(text: str | None) -> list[str]:
    return [name.strip() for name in (text or "").split(",") if name.strip()]
