"""Keeps torch.compile out of the methods that torch's C++ calls.

Note [Frames that Dynamo must not see]
Inside a compiled function Dynamo inspects every Python frame, including those called from C++. `torch.compiler.disable` prevents
that by a mark on the code object, but takes seconds to import. The mark can be set without it.
"""

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any, TypeVar

try:
    from torch._C._dynamo import eval_frame
    from torch._C._dynamo.eval_frame import _FrameAction, _FrameExecStrategy, set_code_exec_strategy

    set_eval_frame: Callable[[Any], Any] = eval_frame.set_eval_frame
    """Let Dynamo see the frames of this thread with this callback, or none of them with None. Returns what was set before."""
except ImportError:  # a torch with another mechanism: torch.compile around stock DDP then fails with Dynamo's error
    _FrameExecStrategy = None  # type: ignore[assignment, misc]
    set_eval_frame = lambda callback: None  # noqa: E731

T = TypeVar("T")
F = TypeVar("F", bound=Callable[..., object])


def _skip(fn: object, inside: str) -> None:
    """Mark a function: Dynamo skips its frames, and does with those `inside` what this action of its own says."""
    if _FrameExecStrategy is not None and isinstance(fn, FunctionType):
        strategy = _FrameExecStrategy(_FrameAction.SKIP, getattr(_FrameAction, inside))
        set_code_exec_strategy(fn.__code__, strategy)


def untraced(cls: type[T]) -> type[T]:
    """Class decorator: the methods that the class itself defines, and what they call, run outside torch.compile."""
    for member in vars(cls).values():
        _skip(member, "SKIP")
    return cls


def untraced_frame(fn: F) -> F:
    """Function decorator: under torch.compile `fn` itself runs eagerly, unless it is inlined; what it calls may be compiled."""
    _skip(fn, "DEFAULT")
    return fn


def untraced_call(fn: F) -> F:
    """Function decorator: a compiled caller breaks its graph here and runs `fn`, and everything it calls, eagerly. Dynamo checks
    the attribute before it inlines a call; the mark on the code object stops it at frames."""
    fn._torchdynamo_disable = True  # type: ignore[attr-defined]
    _skip(fn, "SKIP")
    return fn
