"""localllm tokenize: show the tokens of a text."""

import json
import sys

from localllm.cli import open_model as opening
from localllm.cli.open_model import resolve_model_path
from localllm.cli.options import shared as options
from localllm.cli.parameters import argument, option
from localllm.cli.prompt_input import Encoding, decode_file, read_file, require_decodable
from localllm.cli.terminal.output import is_terminal, open_stdin, to_json_line, write
from localllm.errors import UsageError


def tokenize(
    model: options.ModelName,
    text: str | None = argument("[TEXT]", "Text to tokenize.  [default: stdin]", also=("-p", "--prompt")),
    *,
    file: str | None = option("-f --file", "Read the text from FILE.", "FILE"),
    ids: bool = option("--ids", "Print only the token ids, as a JSON list."),
    count: bool = option("--count", "Print only the number of tokens."),
    encoding: Encoding = None,
    as_json: bool = option("--json", 'Print a JSON list of {"id", "piece"}.'),
) -> None:
    """Show the tokens of a text.

    Prints one token per line: its id, a tab, and its text, quoted as in JSON; bytes of an incomplete character are
    written as \\xNN. Without TEXT, stdin is read. As in `run --raw`, a BOS token is added if the model wants one, and
    special tokens like <|im_end|> are parsed. MODEL may be a file with a vocabulary only.

    Examples:
      localllm tokenize model.gguf "Hello world"
      localllm tokenize model.gguf --count < book.txt
    """
    from localllm.api import open_tokenizer

    tokenizer = open_tokenizer(resolve_model_path(model))
    opening.warn(tokenizer.warnings)
    if text is not None and file is not None:
        raise UsageError("give either TEXT or -f FILE, not both")
    content_text = None if text is None else require_decodable(text, "TEXT")
    if file is not None:
        content_text = decode_file(read_file(file, lambda: sys.maxsize, encoding), file, encoding, whole=True)
    if content_text is None:
        if sys.stdin is None or is_terminal(sys.stdin):
            raise UsageError("TEXT is missing: give a text, or pipe one to stdin")
        content_text = decode_file(open_stdin().read(), "stdin", encoding)
    token_ids = tokenizer.encode(content_text, special=True, bos=True)
    if count:
        return write(f"{len(token_ids)}\n")
    if ids:
        return write(json.dumps(token_ids) + "\n")
    pieces = [tokenizer.token_bytes(token, special=True).decode(errors="backslashreplace") for token in token_ids]
    tokens = [{"id": token, "piece": piece} for token, piece in zip(token_ids, pieces, strict=True)]
    if as_json:
        write(to_json_line(tokens))
    else:
        write("".join(f"{token['id']}\t{json.dumps(token['piece'], ensure_ascii=False)}\n" for token in tokens))
