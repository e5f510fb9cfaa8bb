"""The table of hooks that commands know by name."""

import pytest

from gradwire.hooks import CommHook
from gradwire.hooks.named import NAMED_HOOKS


@pytest.mark.parametrize("name", NAMED_HOOKS)
def test_every_lossy_hook_keeps_its_errors(name):
    named = NAMED_HOOKS[name]
    hook = named.build()
    assert isinstance(hook, CommHook)
    assert hook.remembers or named.needs_optimizer or name in ("mean", "bf16", "fp16")
