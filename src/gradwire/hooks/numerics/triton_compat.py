# mypy: disable-error-code="import-not-found, import-untyped"
"""Decorators for Triton kernels. Modules that use them can be imported without Triton, but their kernels cannot be called then."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

try:
    import triton
    import triton.language as tl
except ImportError:
    triton = tl = None

__all__ = ["kernel", "tl"]


def kernel(*varying: str) -> Callable[[Any], Any]:
    """A kernel, or a function that is inlined in kernels. It is not recompiled for other values of the parameters in `varying`."""

    def decorate(function: Any) -> Any:
        return function if triton is None else triton.jit(function, do_not_specialize=list(varying))

    return decorate
