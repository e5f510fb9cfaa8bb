"""Old names work for one version, with a warning that names the new one."""

from __future__ import annotations

import importlib

import pytest

from gradwire import groups


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("gradwire.Kind", "gradwire.OpKind"),
        ("gradwire.collectives.Kind", "gradwire.collectives.OpKind"),
        ("gradwire.groups.BookedWrapper", "gradwire.groups.TrackedWrapper"),
        ("gradwire.groups.ProgramWrapper", "gradwire.groups.TrackedWrapper"),
        ("gradwire.hooks.SignSGD", "gradwire.optim.SignSGD"),
        ("gradwire.interop.in_backward.NoOverlap", "gradwire.errors.OverlapNotSupported"),
        ("gradwire.parallel.ddp.OnlyOnce", "gradwire.errors.HookAlreadyRegistered"),
        ("gradwire.parallel.ddp.TooLate", "gradwire.errors.TrainingAlreadyStarted"),
        ("gradwire.parallel.ddp.TwoGroups", "gradwire.errors.GroupAndMeshGiven"),
        ("gradwire.parallel.trainable.NothingToDo", "gradwire.errors.NoTrainableParameters"),
    ],
)
def test_an_old_name_warns_and_works(old: str, new: str) -> None:
    module, _, name = old.rpartition(".")
    with pytest.warns(DeprecationWarning, match=f"{old} is now {new}") as caught:
        found = getattr(importlib.import_module(module), name)
    assert caught[0].filename == __file__
    home, _, name = new.rpartition(".")
    assert found is getattr(importlib.import_module(home), name)


def test_a_name_that_never_was_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'NoSuchName'"):
        groups.NoSuchName  # noqa: B018
