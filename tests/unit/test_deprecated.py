"""Old names work for one version, with a warning that names the new one."""

from __future__ import annotations

import pytest

from gradwire import groups


@pytest.mark.parametrize("old", ["BookedWrapper", "ProgramWrapper"])
def test_an_old_name_warns_and_works(old: str) -> None:
    with pytest.warns(DeprecationWarning, match=f"gradwire.groups.{old} is now gradwire.groups.TrackedWrapper"):
        assert getattr(groups, old) is groups.TrackedWrapper


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        groups.NoSuchName  # noqa: B018
