"""The public names of gradwire, the README, and the tables in docs that list what a hook and a group are written with."""

import ast
import dataclasses
import inspect
import re
from pathlib import Path

import pytest

import gradwire
from gradwire.collectives import build
from gradwire.groups.work import Work
from gradwire.hooks import Turn

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```$", README, re.M | re.S)


@pytest.mark.parametrize("name", gradwire.__all__)
def test_every_public_name_is_there_and_says_what_it_is(name):
    value = getattr(gradwire, name)
    if name != "__version__":
        assert inspect.getdoc(value)


def test_every_branch_of_the_error_tree_is_public():
    branches = {error for error in gradwire.GradwireError.__subclasses__() if error.__module__ == "gradwire.errors"}
    assert branches >= {gradwire.UsageError, gradwire.GroupError, gradwire.InternalError}
    assert {error.__name__ for error in branches} <= set(gradwire.__all__)


def test_a_name_that_is_not_there_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'gradwire' has no attribute 'warp'"):
        _ = gradwire.warp


def test_type_checkers_see_every_name():
    imports = [node for node in ast.walk(ast.parse(inspect.getsource(gradwire))) if isinstance(node, ast.ImportFrom)]
    exported = {alias.name for node in imports for alias in node.names if alias.asname == alias.name}
    assert {*exported, "__version__"} == set(gradwire.__all__)


def test_the_readme_has_code():
    assert len(BLOCKS) >= 3


def test_the_readme_is_one_page():
    assert len(README.splitlines()) <= 120


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md"])
def test_pages_point_at_what_is_there(page):
    text = (ROOT / page).read_text()
    paths = re.findall(r"`((?:src/gradwire|tests)/[\w./]*)`", text)
    links = [link.split("#")[0] for link in re.findall(r"\]\(([^)]*)\)", text)]
    assert len([*paths, *links]) >= 5
    for path in [*paths, *links]:
        assert (ROOT / path).exists(), path


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)


def test_links_lead_to_pages_and_headings_that_exist() -> None:
    """Also in the site, whose build `make acceptance` checks."""
    for page in [*(ROOT / "docs").rglob("*.md"), ROOT / "README.md", ROOT / "CONTRIBUTING.md"]:
        for target, anchor in re.findall(r"\]\(([^)#\s:]*)(?:#([\w-]+))?\)", prose(page)):
            there = page.parent / target if target else page
            assert there.exists(), (page, target)
            if anchor:
                headings = re.findall(r"^#+ (.*)$|<a name=\"(.*)\">", prose(there), re.M)
                slugs = {re.sub(r"[^\w -]", "", h or name).lower().replace(" ", "-") for h, name in headings}
                assert anchor in slugs, (page, anchor)


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
