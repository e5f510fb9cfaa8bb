"""Around the forward of a model: what torch.compile compiles there is to report gradients."""

from __future__ import annotations

import sys

from gradwire.autograd.compiled_backward import running


def forward_begins() -> None:
    """What is compiled in this thread from now on belongs to a model whose gradients are listened for."""
    running.forward = True
    if "torch._inductor.config" in sys.modules:  # else nothing is compiled, and to import it takes seconds
        from gradwire.autograd.inductor_pass import install

        install()


def forward_ended() -> None:
    """The end of `forward_begins`."""
    running.forward = False
