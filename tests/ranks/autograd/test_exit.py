"""The interpreter ends well with hooks registered."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

EXIT = """
    import atexit, torch
    from gradwire.autograd import GradHooks, attach, after_node, on_grad
    class Noisy:
        def __call__(self, *args): return None
        def __del__(self): print("freed")
    model = torch.nn.Linear(2, 2)
    for kind in ("on_grad", "before_node", "after_node", "after_accumulate"):
        attach(model, "*", kind, Noisy())
    class Heard:
        def ready(self): pass
    heard = Heard()
    hooks = GradHooks(list(model.parameters()), heard.ready)
    loss = model(torch.ones(1, 2)).sum()
    kept = on_grad(loss, Noisy()), after_node(loss.grad_fn, Noisy())
    loss.backward(retain_graph=True)
    if {raising}:
        on_grad(loss, lambda grad: 1 / 0)
        loss.backward()
    print("end")
"""


@pytest.mark.parametrize("raising", [False, True])
def test_exit_with_hooks_registered_is_clean(raising: bool) -> None:
    script = textwrap.dedent(EXIT.format(raising=raising))
    done = subprocess.run([sys.executable, "-X", "dev", "-c", script], capture_output=True, text=True, timeout=300)
    if raising:
        assert done.returncode == 1
        assert done.stderr.rstrip().splitlines()[-1].startswith("raised in on_grad hook __main__.<lambda>")
        assert "ZeroDivisionError" in done.stderr
    else:
        assert (done.returncode, done.stderr) == (0, "")
        assert done.stdout.startswith("end")
