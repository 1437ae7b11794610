"""An extension of Griffe, which reads docstrings for the site: attributes that share a line get a line each."""

import re
from typing import Any

import griffe

NEXT = re.compile(r"(?<=[.)])  (?=\w+(?:, \w+)*: )")


class OneAttributePerLine(griffe.Extension):
    """Divides "a: of x.  b: of y." among the lines of a section "Attributes:"."""

    def on_instance(self, *, obj: griffe.Object, **more: Any) -> None:
        """Rewrite the docstring of a class or a module."""
        if obj.docstring and "Attributes:\n" in obj.docstring.value:
            head, mark, attributes = obj.docstring.value.partition("Attributes:\n")
            obj.docstring.value = head + mark + NEXT.sub("\n    ", attributes)
