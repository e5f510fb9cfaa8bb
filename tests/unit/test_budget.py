"""The package has a budget of lines: volume is where defects hide.

The limits rise only by an issue that says so.
"""

import ast
import functools
import io
import tokenize
from collections import Counter, defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "gradwire"
FILES = sorted(SOURCE.rglob("*.py"))

CODE_LINES = 36_710
PHYSICAL_LINES = 52_910
SHARE_OF_TEXT = 0.28
TEST_LINES = 57_440

_NO_CODE = {
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENCODING, tokenize.ENDMARKER,
}  # fmt: skip


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Every file of the package. Not when the file is imported: every worker does that."""
    return {path.relative_to(SOURCE).as_posix(): ast.parse(path.read_text()) for path in FILES}


def code_lines(path: Path) -> int:
    """Lines with a token that is neither a comment nor part of a docstring."""
    text = path.read_text()
    bodies = (getattr(node, "body", None) for node in ast.walk(ast.parse(text)))
    docstrings = {
        line
        for body in bodies
        if isinstance(body, list)
        for one in body
        if isinstance(one, ast.Expr) and isinstance(one.value, ast.Constant) and isinstance(one.value.value, str)
        for line in range(one.lineno, (one.end_lineno or one.lineno) + 1)
    }
    code = {
        line
        for token in tokenize.generate_tokens(io.StringIO(text).readline)
        if token.type not in _NO_CODE
        for line in range(token.start[0], token.end[0] + 1)
    }
    return len(code - docstrings)


def physical_lines(path: Path) -> int:
    return path.read_text().count("\n")


def test_the_package_is_within_its_budget() -> None:
    physical, code = sum(map(physical_lines, FILES)), sum(map(code_lines, FILES))
    assert code <= CODE_LINES
    assert physical <= PHYSICAL_LINES
    assert (physical - code) / physical >= SHARE_OF_TEXT, "docstrings, comments and blank lines are not what to save"


def test_the_tests_are_within_their_budget() -> None:
    tests = [p for p in (ROOT / "tests").rglob("*.py") if not {"detection", "benchmarks"} & set(p.parts)]
    assert sum(map(physical_lines, tests)) <= TEST_LINES


def test_the_documentation_is_within_its_budget() -> None:
    pages = [page for page in (ROOT / "docs").rglob("*.md") if "api" not in page.parts]
    assert len(pages) <= 20
    assert sum(map(physical_lines, pages)) <= 3_100
    assert physical_lines(ROOT / "docs" / "design.md") <= 300


def test_the_package_runs_no_code_from_data_files() -> None:
    """Templates lay out what Python has computed; nothing else is shipped but Python."""
    shipped = {path.suffix for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts}
    assert shipped <= {".py", ".typed", ".html", ".css", ".j2"}


def test_six_modules_at_the_top() -> None:
    assert {p.stem for p in SOURCE.glob("*.py")} == {"__init__", "__main__", "errors", "events", "optim", "policies"}


def test_functions_fit_a_screen() -> None:
    """But kernels and compiled loops, which cannot call functions."""
    kernels = {name for name in trees() if name.endswith(("kernels.py", "loops.py"))}
    long = {
        (name, node.name): (node.end_lineno or 0) - node.lineno + 1
        for name, tree in trees().items()
        if name not in kernels
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    }
    assert {function for function, lines in long.items() if lines > 60} == set()


def test_a_public_class_name_is_used_once() -> None:
    names = Counter(
        node.name
        for tree in trees().values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert {name for name, count in names.items() if count > 1} == set()


def test_a_base_name_is_used_once_in_a_layer() -> None:
    """But by parallel files of sibling packages."""
    parallel = {"__init__.py", "group.py", "engine.py", "work.py", "base.py", "layout.py"}
    layers: dict[tuple[str, str], list[str]] = defaultdict(list)
    for name in trees():
        layer, _, rest = name.partition("/")
        base = name.rsplit("/", 1)[-1]
        if rest and base not in parallel:
            layers[layer, base].append(name)
    assert [names for names in layers.values() if len(names) > 1] == []
