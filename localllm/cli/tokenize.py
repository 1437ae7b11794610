"""localllm tokenize: how a model's vocabulary cuts a text."""

import json
import sys
from typing import Annotated

import typer

from localllm.cli import options
from localllm.cli.run import text_of
from localllm.cli.terminal import is_terminal, say, write
from localllm.errors import UsageError


def tokenize(
    model: options.ModelPath,
    text: Annotated[str | None, typer.Argument(metavar="[TEXT]", help="The text; without it, stdin.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help='Print a list of {"id", "piece"} instead.')] = False,
) -> None:
    """Show the tokens of a text, one per line: its id, a tab, and what it stands for, quoted as in JSON.

    The text is read as `run --raw` reads it: with a BOS token if the model wants one, and texts like <|im_end|> are
    special tokens. Bytes that are part of a character are written \\xNN. The file may hold a vocabulary only.
    """
    from localllm.api import open_tokenizer

    tokenizer = open_tokenizer(model)
    if tokenizer.warning:
        say(f"localllm: warning: {tokenizer.warning}")
    if text is None:
        if sys.stdin is None or is_terminal(sys.stdin):
            raise UsageError("there is no text: give one, or pipe it to stdin")
        text = text_of(sys.stdin.buffer.read())
    ids = tokenizer.encode(text.encode(errors="surrogateescape").decode(errors="replace"), special=True, bos=True)
    pieces = [tokenizer.token_bytes(token, special=True).decode(errors="backslashreplace") for token in ids]
    if as_json:
        tokens = [{"id": token, "piece": piece} for token, piece in zip(ids, pieces, strict=True)]
        write(json.dumps(tokens, ensure_ascii=False) + "\n")
    else:
        for token, piece in zip(ids, pieces, strict=True):
            write(f"{token}\t{json.dumps(piece, ensure_ascii=False)}\n")
