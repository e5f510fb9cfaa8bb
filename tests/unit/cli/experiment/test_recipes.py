"""The table of hooks that commands know by name."""

from __future__ import annotations

import pytest

from gradwire.cli.experiment.recipes import RECIPES
from gradwire.cli.lab.contenders import CONTENDERS, REFERENCE, default_names
from gradwire.hooks import CommHook


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_a_hook_that_pays_its_errors_back(name):
    recipe = RECIPES[name]
    hook = recipe.build()
    assert isinstance(hook, CommHook)
    assert hook.remembers or recipe.steps_on_its_own or name in ("mean", "bf16", "fp16")


def test_the_reference_runs_first_and_everybody_has_a_name():
    assert default_names()[0] == next(iter(CONTENDERS)) == REFERENCE
    assert set(default_names()) <= set(CONTENDERS)
    assert set(RECIPES) <= set(CONTENDERS)
