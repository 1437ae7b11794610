"""Every error that localllm raises on purpose; the command line prints the message as one line and exits with the code.

    LocalllmError        1    anything below
    ├── UsageError       2    arguments that make no sense together
    ├── ModelError       3    a model file that cannot be read, is invalid, or is not supported
    │   └── UnsupportedError  a file that may well be valid
    ├── ConstraintError  1    an answer got where no token may come, or into more alternatives than can be followed
    ├── ContextError     4    the prompt does not fit the context
    ├── MemoryLimitError 5    the computer has not enough memory
    ├── RecordsError     6    some of many records could not be answered
    └── CutError         7    an answer was cut, and is not what its schema, grammar or regular expression promises

An interrupted command exits with 130.
"""

NOT_NUMBERS = "the model computed logits that are not numbers; the file may be damaged (inspect --check says where)"


class LocalllmError(Exception):
    """A failure that its message explains in one line."""

    exit_code = 1


class UsageError(LocalllmError):
    """The arguments make no sense, alone or together.

    A message about one begins with its name in Python, top_p say, in whose place the command line puts --top-p.
    """

    exit_code = 2


class ModelError(LocalllmError):
    """The model file cannot be read, is invalid, or needs something that is not supported."""

    exit_code = 3


class UnsupportedError(ModelError):
    """The model file needs something that localllm does not do; other programs may."""


class ConstraintError(LocalllmError):
    """An answer has got where its grammar is too complex to go on, or where no token is allowed."""


class ContextError(LocalllmError):
    """The prompt does not fit the context."""

    exit_code = 4


class MemoryLimitError(LocalllmError):
    """There is not enough memory."""

    exit_code = 5


class CutError(LocalllmError):
    """An answer was cut, and is not what its schema, grammar or regular expression promises."""

    exit_code = 7


class RecordsError(LocalllmError):
    """Some of many records could not be answered; the others were."""

    exit_code = 6
