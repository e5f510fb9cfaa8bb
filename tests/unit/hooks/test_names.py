"""Names of gradwire.hooks that have moved still work, with a warning."""

from __future__ import annotations

import pytest

from gradwire import hooks, interop


def test_as_torch_hook_has_moved() -> None:
    with pytest.warns(DeprecationWarning, match=r"is now gradwire\.interop\.as_torch_hook"):
        assert hooks.as_torch_hook is interop.as_torch_hook


def test_other_names_do_not_exist() -> None:
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = hooks.nothing
