"""Limits on the source that keep it readable: no import circles, no large files or classes, no names that are easily confused."""

import ast
import functools
from graphlib import CycleError, TopologicalSorter
from itertools import combinations
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src"
TORCHS_OWN = {"TorchSurface", "PrivateStore"}
"""Classes with torch's methods."""


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of the package. Not when the file is imported: every worker does that."""
    return {
        ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__"): ast.parse(path.read_text())
        for path in sorted(SOURCE.rglob("*.py"))
    }


def imports(tree: ast.Module) -> set[str]:
    """The modules that a module imports anywhere, also for type checkers only."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            whole = (f"{node.module}.{alias.name}" for alias in node.names)
            found |= {name if name in modules() else node.module for name in whole}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & modules().keys()


def test_there_are_no_import_circles() -> None:
    try:
        TopologicalSorter({name: imports(tree) - {name} for name, tree in modules().items()}).prepare()
    except CycleError as circle:
        pytest.fail(" -> ".join(circle.args[1]))


def test_files_are_short() -> None:
    long = {name: tree.body[-1].end_lineno or 0 for name, tree in modules().items() if tree.body}
    assert [name for name, lines in long.items() if lines > 400] == []


def test_classes_are_small() -> None:
    large = {
        node.name
        for tree in modules().values()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef) and sum(isinstance(one, ast.FunctionDef) for one in node.body) > 25
    }
    assert large <= TORCHS_OWN | {"Group"}


def parameters(function: ast.FunctionDef) -> int:
    every = function.args.posonlyargs + function.args.args + function.args.kwonlyargs
    return sum(one.arg not in ("self", "cls") for one in every)


def test_functions_have_few_parameters() -> None:
    """Other than compiled loops and kernels, which take numbers only, and calls that users make with keywords."""
    compiled = {"gradwire.hooks.compressors.quantized.kernels", "gradwire.hooks.compressors.quantized.loops"}
    many = {
        (name, node.name)
        for name, tree in modules().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef) and parameters(node) > 6 and name not in compiled
    }
    assert many <= {
        ("gradwire.groups.hierarchical.group", "__init__"),
        ("gradwire.groups.hierarchical.group", "discover"),
        ("gradwire.groups.shared_memory.group", "__init__"),
        ("gradwire.hooks.periodic.diloco", "streaming_diloco"),
        ("gradwire.launch.elastic_entry", "elastic"),
        ("gradwire.parallel.ddp", "__init__"),
        ("gradwire.parallel.replicate", "replicate"),
        ("gradwire.testing.laws", "check_hook"),
        ("gradwire.testing.pool.pool", "run"),
        ("gradwire.testing.ranks", "run_ranks"),
        ("gradwire.testing.simulate", "simulate"),
    }


def differ_by_one_letter(a: str, b: str) -> bool:
    if len(a) == len(b):
        return sum(x != y for x, y in zip(a, b, strict=True)) == 1
    short, long = sorted((a, b), key=len)
    return any(long[:i] + long[i + 1 :] == short for i in range(len(long)))


def test_no_two_files_have_names_one_letter_apart() -> None:
    names = {path.stem for path in SOURCE.rglob("*.py")}
    alike = {pair for pair in combinations(sorted(names), 2) if differ_by_one_letter(*pair)}
    assert alike <= {
        ("op", "top"),
        ("ring", "rng"),
        ("run", "runs"),
        ("transformer", "transformers"),
    }  # of packages that have nothing to do with each other
