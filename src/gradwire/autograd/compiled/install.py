"""Before the forward of a model: what torch.compile compiles there is to report gradients.

Note [Graphs of before]
Dynamo keeps what it has compiled with the code of `forward`, which all models of a class share. So a model that ran before it was
replicated, or another of its class, may have left graphs that report nothing, or too late for smaller buckets. They are dropped.
"""

from __future__ import annotations

import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterator

from torch import nn

from gradwire.autograd.compiled import op

_COMPILER = "torch._inductor.compile_fx"
"""Imported when inductor compiles for the first time."""

# Of these models and this code, Dynamo has no graphs without the ops they need: see Note [Graphs of before]. With their limits, and
# how many graphs had been compiled without the ops for these.
_models: weakref.WeakKeyDictionary[nn.Module, tuple[op.Limits, int]] = weakref.WeakKeyDictionary()
_code: dict[tuple[int, op.Limits], tuple[types.CodeType, int]] = {}


def forward_begins(model: nn.Module, limits: op.Limits) -> None:
    """What torch.compile compiles from now on reports gradients. `model` has a listener, with these limits."""
    if _COMPILER not in sys.modules and model in _models:
        return  # as in every forward of a program that compiles nothing
    if "torch._inductor.config" in sys.modules:  # else nothing is compiled, and to import it takes seconds
        install = _installer()
        if install is not None:
            install()
            _renew(model, limits)


@functools.cache
def _installer() -> Callable[[], None] | None:
    """None if this torch's inductor lacks what the pass needs: then gradients arrive when the compiled backward has ended."""
    try:
        from gradwire.autograd.compiled.inductor_pass import install
    except ImportError:
        return None
    return install


def _renew(model: nn.Module, limits: op.Limits) -> None:
    """Have Dynamo forget what it compiled of `model` before there was a listener with these limits."""
    without = op.graphs_without(limits)
    if _models.get(model) == (limits, without):
        return
    from torch._dynamo.eval_frame import reset_code  # type: ignore[attr-defined]

    _models[model] = limits, without
    for code in _code_of(model):
        if _code.get((id(code), limits)) != (code, without):
            _code[id(code), limits] = code, without
            reset_code(code)


def _code_of(model: nn.Module) -> Iterator[types.CodeType]:
    """The code by which Dynamo may know a graph of `model`, or of a part of it."""
    for module in model.modules():
        for function in (module.forward, module._compiled_call_impl):
            original = getattr(function, "_torchdynamo_orig_callable", function)
            code = getattr(original, "__code__", None)
            if code is not None:
                yield code
