"""For mkdocs: links to files outside docs/ lead to the repository, since the site does not contain them."""

from __future__ import annotations

import posixpath
import re
from typing import Any

_LINK = re.compile(r"\]\((?P<path>(?:\.\./)+[^)#\s]+)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, *, page: Any, config: Any, **_: Any) -> str:
    """Called for every page before it is rendered."""
    folder = posixpath.dirname(page.file.src_uri)

    def rewrite(match: re.Match[str]) -> str:
        path = posixpath.normpath(posixpath.join("docs", folder, match["path"]))
        if path.startswith("docs/"):
            return match[0]
        return f"]({config.repo_url}/blob/main/{path}{match['anchor'] or ''})"

    return _LINK.sub(rewrite, markdown)
