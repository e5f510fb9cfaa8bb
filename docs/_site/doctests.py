"""For mkdocstrings: examples in docstrings (`>>> ...`) are shown as code, and so are literal blocks (`::`)."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"(?:^[ ]*>>> .*\n(?:^(?![ ]*\n).*(?:\n|\Z))*)+", re.M)


def fenced(text: str) -> str:
    """The docstring with its examples as code blocks. An example ends at an empty line, as for doctest."""
    return _EXAMPLE.sub(lambda match: f"\n```pycon\n{match[0].rstrip()}\n```\n", text + "\n")


class Doctests(griffe.Extension):
    """Called by mkdocstrings for every object."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rewrite its docstring."""
        if not obj.is_alias and obj.docstring is not None:
            obj.docstring.value = fenced(obj.docstring.value)
