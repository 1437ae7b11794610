"""Errors that localllm raises on purpose, and the exit codes of commands that end with them.

    LocalllmError        1    anything below
    ├── UsageError       2    invalid arguments or combinations of them
    ├── ModelError       3    a model file that cannot be read, is invalid, or is not supported
    │   └── UnsupportedError  a file that may well be valid
    ├── ConstraintError  1    an answer reached a point with no valid token, or too many alternatives
    ├── ContextError     4    the prompt does not fit the context
    ├── MemoryLimitError 5    there is not enough memory; also `fit`, if a model does not fit
    ├── RecordsError     6    some of many records could not be answered
    └── CutError         7    an answer was cut in its reasoning, or before it matched its schema, grammar or regex

An interrupted command exits with 130.
"""

NOT_NUMBERS = "the model computed logits that are not numbers; the file may be damaged (inspect --check says where)"


class LocalllmError(Exception):
    """An error with a message of one line for the user, and a command's exit code."""

    exit_code = 1


class UsageError(LocalllmError):
    """The arguments are invalid, alone or together.

    A message about one argument begins with its Python name, such as top_p; the command line prints --top-p instead.
    """

    exit_code = 2


class ModelError(LocalllmError):
    """The model file cannot be read, is invalid, or needs something that is not supported."""

    exit_code = 3


class UnsupportedError(ModelError):
    """The model file needs something that localllm does not support; other programs may."""


class ConstraintError(LocalllmError):
    """The answer's schema or grammar allows no token at some point, or has too many alternatives there."""


class ContextError(LocalllmError):
    """The prompt does not fit the context.

    Attributes:
        excess: by how many tokens it is too long; None if that is not known.
    """

    exit_code = 4

    def __init__(self, message: str, excess: int | None = None):
        super().__init__(message)
        self.excess = excess


class MemoryLimitError(LocalllmError):
    """There is not enough memory."""

    exit_code = 5


class CutError(LocalllmError):
    """An answer was cut in its reasoning, or does not match its schema, grammar or regular expression."""

    exit_code = 7


class RecordsError(LocalllmError):
    """Some of many records could not be answered; the others were."""

    exit_code = 6
