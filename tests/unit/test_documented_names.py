"""The tables of docs/hooks.md and docs/own-group.md list what a hook and a group are written with."""

from __future__ import annotations

import dataclasses
import inspect
from pathlib import Path

from gradwire.collectives import build
from gradwire.groups.work import Work
from gradwire.hooks import Turn

DOCS = Path(__file__).parents[2] / "docs"


def public(names: object) -> set[str]:
    return {name for name in vars(names) if not name.startswith("_")}


def test_hooks_md_lists_the_fields_of_a_turn_and_all_collectives() -> None:
    text = (DOCS / "hooks.md").read_text()
    fields = {field.name for field in dataclasses.fields(Turn)} | {"counted", "share"}
    assert {name for name in fields if f"`{name}`" not in text} == set()
    collectives = {name for name in public(build) if inspect.getmodule(getattr(build, name)) is build}
    assert {name for name in collectives if f"`{name}(" not in text} == set()


def test_own_group_md_lists_the_methods_of_a_work() -> None:
    text = (DOCS / "own-group.md").read_text()
    internal = {"over", "info", "wait_settled", "seq", "started", "submitted"}
    methods = {name for name in public(Work) - internal if callable(getattr(Work, name))}
    assert {name for name in methods if f"`{name}(" not in text} == set()
