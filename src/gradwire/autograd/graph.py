"""Which parameters a backward from given outputs can reach.

Responsible for finding the tensors in a module's outputs and for walking the recorded graph. It must not know what is done
with parameters that cannot be reached.

Note [What the walk cannot see]
    It sees edges. What a node does inside is hidden: a checkpoint with use_reentrant=True is one node whose edges are its
    tensor arguments, and the parameters used inside it are not among them (torch's own DDP is blind here too). A node may
    also return None for an edge, so a parameter can be reached and still get no gradient. Non-reentrant checkpoints,
    views, in-place changes, custom functions and compiled regions have all of their edges. `backward(inputs=...)` runs
    less than the walk finds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch


def reachable_parameters(outputs: Any, params: Sequence[torch.Tensor]) -> frozenset[int]:
    """The indices of those `params` that can get a gradient from `outputs`, a tensor or a nest of containers of tensors.

    The walk stops when all have been found, so it is cheap for a model that uses all of its parameters.

    >>> used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> outputs = {"logits": used(torch.ones(1, 2)), "step": 3}
    >>> sorted(reachable_parameters(outputs, [*used.parameters(), *unused.parameters()]))
    [0, 1]
    """
    wanted = {id(param): index for index, param in enumerate(params) if param.requires_grad}
    found: set[int] = set()
    seen: set[Any] = set()  # of nodes, not of their ids: a node that nobody holds is freed, and its id used again
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            seen.add(tensor.grad_fn)
        elif id(tensor) in wanted:
            found.add(wanted[id(tensor)])
    stack = list(seen)
    while stack and len(found) < len(wanted):
        node = stack.pop()
        edges = node.next_functions
        for edge in edges:
            successor = edge[0]
            if successor is not None and successor not in seen:
                seen.add(successor)
                stack.append(successor)
        if not edges:
            index = wanted.get(id(getattr(node, "variable", None)))  # only gradient accumulators have a variable
            if index is not None:
                found.add(index)
    return frozenset(found)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings and dataclasses; anything else is passed over.

    >>> [tuple(t.shape) for t in tensors_in({"a": [torch.zeros(1), None], "b": (torch.zeros(2), "text")})]
    [(2,), (1,)]
    """
    seen: set[int] = set()
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, torch.Tensor):
            yield item
        elif id(item) not in seen:  # the ids stay valid: `value` holds every container in it
            children = _children(item)
            if children:
                seen.add(id(item))
                stack.extend(children)


def _children(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return []
