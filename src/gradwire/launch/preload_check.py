"""Whether ranks of a script may be forks of a process that has imported torch: what its source shows. Pure.

torch and the libraries under it read some variables when they are imported. A script that sets one of them before it imports torch
would be too late in a fork.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

READ_AT_IMPORT = (
    *("TORCH", "PYTORCH", "C10_", "OMP_", "GOMP_", "KMP_", "MKL_", "OPENBLAS_", "GOTO_", "BLIS_", "DNNL_", "ONEDNN_"),
    *("NPY_", "NUMPY_", "NUMEXPR_", "KINETO_", "CUPTI_", "TEARDOWN_CUPTI", "DISABLE_CUPTI", "SYMPY_", "MPMATH_"),
    *("AOT_", "AOTINDUCTOR_", "INDUCTOR_", "PT2_", "PARTITIONER_", "FAKE_ALLOW_META", "CUTLASS_", "CUTEDSL_", "CXX"),
    *("DUMP_AOTI_", "ENABLE_PERSISTENT_TMA", "ENABLE_T", "LOG_AUTOTUNE", "LOG_TLPARSE", "UNSAFE_"),
)
"""How the names of such variables begin."""
_CHANGING = ("setdefault", "update", "pop")


def source_of(script: str, *, module: bool) -> Path:
    """The file of a script, or of a module in the working directory."""
    path = Path(*script.split(".")) if module else Path(script)
    return path if not module else path / "__main__.py" if path.is_dir() else path.with_suffix(".py")


def preloaded_modules(source: bytes | None) -> list[str]:
    """What ranks that run `source` will import: an optimizer imports torch._dynamo, which takes as long as torch."""
    return ["torch", *(["torch._dynamo"] if source is None or b"optim" in source else [])]


def why_not_preload(source: str | bytes) -> str:
    """Why ranks that run `source` must import torch themselves; empty if nothing in it says so.

    >>> why_not_preload("import os, torch"), why_not_preload("import os, sys")
    ('', 'the script imports only modules of Python')
    >>> why_not_preload("import os, torch; os.environ['OMP_NUM_THREADS'] = '4'")
    'the script sets OMP_NUM_THREADS'
    """
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError):
        return "the script cannot be parsed"
    imports = False
    for node in ast.walk(tree):
        for name in _names_set(node):
            if name is None or name.startswith(READ_AT_IMPORT):
                return f"the script sets {name or 'variables'}"
        imports |= _imports(node)
    return "" if imports else "the script imports only modules of Python"


def _imports(node: ast.AST) -> bool:
    """Whether it imports a module that is not Python's own."""
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] not in sys.stdlib_module_names for alias in node.names)
    if isinstance(node, ast.ImportFrom):
        return node.level > 0 or (node.module or "").partition(".")[0] not in sys.stdlib_module_names
    words = {"import_module", "__import__", "exec", "run_path", "run_module"}
    return isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", None)) in words


def _names_set(node: ast.AST) -> Iterator[str | None]:
    """The names of environment variables that an expression changes; None if they are not in the source."""
    if isinstance(node, ast.Subscript) and not isinstance(node.ctx, ast.Load) and _is_environ(node.value):
        yield _text(node.slice)
    elif isinstance(node, ast.AugAssign) and _is_environ(node.target):
        yield None
    elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
        changes = node.func.attr in _CHANGING and _is_environ(node.func.value)
        if not changes and node.func.attr not in ("putenv", "unsetenv"):
            return
        yield from (keyword.arg for keyword in node.keywords)
        for argument in node.args[:1]:
            yield from map(_text, argument.keys) if isinstance(argument, ast.Dict) else [_text(argument)]


def _is_environ(node: ast.AST) -> bool:
    return "environ" in (getattr(node, "attr", None), getattr(node, "id", None))


def _text(node: ast.AST | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
