"""Old names of public attributes and functions, which warn and work for one more version."""

import warnings


class RenamedAttribute:
    """An attribute's old name: reading it warns and returns the attribute of the new name.

    Declare it under `if not TYPE_CHECKING`, so that type checkers report the old name.
    """

    def __init__(self, name: str) -> None:
        self.name = name

    def __set_name__(self, owner: type, name: str) -> None:
        self.old_name = name

    def __get__(self, instance: object, owner: type) -> object:
        if instance is None:  # help() reads the attributes of classes
            return self
        warn_of_old_name(f"{owner.__name__}.{self.old_name}", f"{owner.__name__}.{self.name}")
        return getattr(instance, self.name)


def warn_of_old_name(old_name: str, name: str) -> None:
    """Issue a DeprecationWarning at the caller's caller."""
    warnings.warn(f"{old_name} was renamed to {name}", DeprecationWarning, stacklevel=3)
