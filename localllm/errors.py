"""Errors that localllm raises on purpose, and the exit codes of commands that end with them.

    LocalllmError        1    anything below
    ├── UsageError       2    invalid arguments or combinations of them
    │   └── UnknownOptionError  an argument by an unknown name; also a TypeError
    ├── ModelError       3    a model file that cannot be read, is invalid, or is not supported
    │   └── UnsupportedError  a file that may well be valid
    ├── ConstraintError  1    the constraint allows no token at some point, or too many alternatives
    ├── ContextError     4    the prompt does not fit the context
    ├── MemoryLimitError 5    there is not enough memory; also `fit`, if a model does not fit
    ├── RecordsError     6    some of many records could not be answered
    └── CutError         7    an answer was cut off in its reasoning, or before it matched its schema, grammar or regex

An interrupted command exits with 130.
"""

NOT_NUMBERS = "the model computed logits that are not finite; the file may be damaged: run `localllm inspect --check`"


class LocalllmError(Exception):
    """An error with a one-line message for the user, and a command's exit code."""

    exit_code = 1


class UsageError(LocalllmError):
    """Arguments that are invalid, alone or in combination.

    A message about one argument begins with its Python name, such as top_p; the command line prints --top-p instead.
    """

    exit_code = 2


class UnknownOptionError(UsageError, TypeError):
    """An argument by a name that does not exist; a TypeError, as Python raises for functions."""


class ModelError(LocalllmError):
    """A model file that cannot be read, is invalid, or needs a feature that is not supported."""

    exit_code = 3


class UnsupportedError(ModelError):
    """A model file that needs a feature which localllm does not support; other programs may."""


class ConstraintError(LocalllmError):
    """The answer's schema or grammar allows no token at some point, or too many alternatives."""


class ContextError(LocalllmError):
    """The prompt does not fit the context.

    Attributes:
        excess: count of tokens by which it is too long; None if unknown.
    """

    exit_code = 4

    def __init__(self, message: str, excess: int | None = None):
        super().__init__(message)
        self.excess = excess


class MemoryLimitError(LocalllmError):
    """There is not enough memory."""

    exit_code = 5


class CutError(LocalllmError):
    """An answer was cut off in its reasoning, or before it matched its schema, grammar or regular expression."""

    exit_code = 7


class RecordsError(LocalllmError):
    """Some of many records could not be answered, and the others were."""

    exit_code = 6
