"""Around the forward of a model: what torch.compile compiles there is to report gradients."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable

from gradwire.autograd.compiled_backward import running


def forward_begins() -> None:
    """What is compiled in this thread from now on belongs to a model whose gradients are listened for."""
    running.forward = True
    if "torch._inductor.config" in sys.modules:  # else nothing is compiled, and to import it takes seconds
        install = _installer()
        if install is not None:
            install()


@functools.cache
def _installer() -> Callable[[], None] | None:
    """None if this torch's inductor lacks what the pass needs: then gradients arrive when the compiled backward has ended."""
    try:
        from gradwire.autograd.inductor_pass import install
    except ImportError:
        return None
    return install


def forward_ended() -> None:
    """The end of `forward_begins`."""
    running.forward = False
