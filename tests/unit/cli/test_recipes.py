"""The table of hooks that commands know by name."""

from __future__ import annotations

import dataclasses

import pytest

from gradwire.cli import recipes
from gradwire.cli.lab.contenders import CONTENDERS, REFERENCE, default_names
from gradwire.cli.recipes import RECIPES, Recipe, available
from gradwire.hooks import CommHook, mean


@pytest.mark.parametrize("name", available())
def test_every_recipe_makes_a_hook_that_pays_its_errors_back(name):
    recipe = RECIPES[name]
    hook = recipe.build()
    assert isinstance(hook, CommHook)
    assert hook.remembers or recipe.steps_on_its_own or name in ("mean", "bf16", "fp16")


def test_a_recipe_whose_hook_is_not_there_is_not_available(monkeypatch):
    lost = Recipe("lost", "nowhere", mean, needs="no_such_hook")
    monkeypatch.setattr(recipes, "RECIPES", {"mean": RECIPES["mean"], "lost": lost})
    assert not lost.here
    assert recipes.available(("lost", "mean")) == ("mean",)
    assert dataclasses.replace(lost, needs=None).here


def test_the_reference_runs_first_and_everybody_has_a_name():
    assert default_names()[0] == next(iter(CONTENDERS)) == REFERENCE
    assert set(default_names()) <= set(CONTENDERS)
    assert set(RECIPES) <= set(CONTENDERS)
