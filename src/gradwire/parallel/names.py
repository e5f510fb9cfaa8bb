"""Full names of parameters, as torch's error messages give them."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from torch import Tensor, nn

from gradwire.errors import UsageError


def names_of(module: nn.Module, parameters: Sequence[Tensor], ignore: Collection[str] = ()) -> dict[int, str]:
    """The name of each of `parameters` by its index. A parameter with two names gets the last."""
    place = {id(p): i for i, p in enumerate(parameters)}
    names: dict[int, str] = {}
    for prefix, owner in module.named_modules():
        for name, parameter in owner.named_parameters(recurse=False):
            full = f"{prefix}.{name}"
            if full in ignore or not parameter.requires_grad:
                continue
            if id(parameter) not in place:
                raise UsageError(
                    f"Param with name {full} found in module parameters, but not DDP parameters. It was added after the "
                    "model was replicated; replicate it again."
                )
            names[place[id(parameter)]] = full
    if len(names) != len(place):
        raise UsageError(
            "Expected param to name mapping to cover all parameters, but got conflicting lengths: "
            f"{len(place)} vs {len(names)}. Parameters were removed from the module after it was replicated."
        )
    return names
