"""A page of the front end of torch's debug server, imported where torch has one. The front end may be another process, to which
the page is pickled."""

from __future__ import annotations

from importlib import import_module
from typing import Any

_frontend: Any = import_module("torch.distributed.debug._frontend")


class Page(_frontend.DebugHandler):  # type: ignore[misc]  # not in every torch
    """Shows what each rank answers to a request."""

    def __init__(self, endpoint: str, path: str, title: str, template: str) -> None:
        self._endpoint = endpoint
        self._path = path
        self._title = title
        self._template = template

    def routes(self) -> list[Any]:
        """Where the page is."""
        return [_frontend.Route(self._path, self._handle)]

    def nav_links(self) -> list[Any]:
        """Its link in the navigation."""
        return [_frontend.NavLink(self._path, self._title)]

    def dump(self) -> str:
        """The same as text, for periodic dumps."""
        addresses, answers = self._fetch()
        parts = [f"=== Rank {i}: {a} ===\n{r.text}" for i, (a, r) in enumerate(zip(addresses, answers, strict=True))]
        return "\n".join(parts)

    def dump_filename(self) -> str:
        """The name of such dumps."""
        return self._endpoint

    def _handle(self, request: Any) -> Any:
        addresses, answers = self._fetch()
        return request.frontend.render_template(self._template, title=self._title, addrs=addresses, resps=answers)

    def _fetch(self) -> Any:
        limit = getattr(self, "fetch_timeout", None)  # torch 2.11 has none
        return _frontend.fetch_all(self._endpoint, **({} if limit is None else {"timeout": limit}))
