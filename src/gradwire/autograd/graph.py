"""Which parameters a backward from given outputs can reach: finds the tensors in a module's outputs, and walks the recorded graph.

Note [What the walk cannot see]
    It sees edges. A checkpoint with use_reentrant=True is one node whose edges are its tensor arguments, and the parameters used
    inside it are not among them (torch's own DDP is blind here too). A node may also return None for an edge, so a parameter can be
    reached and still get no gradient. Non-reentrant checkpoints, views, in-place changes, custom functions and compiled regions
    have all of their edges. `backward(inputs=...)` runs less than the walk finds.

Note [Marks]
    So where a backward must be assigned to its model, the nodes of a model's outputs are marked as well: a dict that torch keeps
    for every node, and frees with it, holds a weak reference to the owner.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Container, Iterator, Mapping, Sequence
from typing import Any

import torch

_MARK = "gradwire"


def reachable_parameters(outputs: Any, params: Sequence[torch.Tensor]) -> frozenset[int]:
    """The indices of those `params` that can get a gradient from `outputs`. The walk stops when all have been found.

    >>> used, unused = torch.nn.Linear(2, 2), torch.nn.Linear(2, 2)
    >>> outputs = {"logits": used(torch.ones(1, 2)), "step": 3}
    >>> sorted(reachable_parameters(outputs, [*used.parameters(), *unused.parameters()]))
    [0, 1]
    """
    wanted = {id(param): index for index, param in enumerate(params) if param.requires_grad}
    found = {wanted[id(tensor)] for tensor in tensors_in(outputs) if id(tensor) in wanted}
    if len(found) < len(wanted):
        for node, edges in _nodes(outputs):
            if edges:
                continue
            index = wanted.get(id(getattr(node, "variable", None)))  # only gradient accumulators have a variable
            if index is not None:
                found.add(index)
                if len(found) == len(wanted):
                    break
    return frozenset(found)


def sole_edges(outputs: Any, params: Sequence[torch.Tensor], accumulators: Mapping[Any, int]) -> dict[int, Any]:
    """The indices of those `params` to which exactly one edge of the graph behind `outputs` leads, and their accumulators. The
    gradient on that edge is complete. `accumulators` are those that are known, but a conversion makes new ones."""
    wanted: dict[int, int] = {}
    found: dict[int, Any] = {}
    several: set[int] = set()
    for _, edges in _nodes(outputs, ends=accumulators):
        for node, _ in edges:
            if node in accumulators:
                index = accumulators[node]
            else:
                wanted = wanted or {id(param): index for index, param in enumerate(params)}
                index = wanted.get(id(getattr(node, "variable", None)), -1)
            if index in found:
                several.add(index)
            elif index >= 0:
                found[index] = node
    # Where backward is called on a parameter, or on its accumulator, it has another gradient from there.
    roots = {id(getattr(leaf, "variable", leaf)) for leaf in _leaves(outputs)}
    return {i: node for i, node in found.items() if i not in several and id(params[i]) not in roots}


def mark_outputs(outputs: Any, owner: object) -> None:
    """Have `reaches_mark` find `owner` behind these outputs of its model. See [Marks]."""
    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:
            tensor.grad_fn.metadata[_MARK, id(owner)] = weakref.ref(owner)  # type: ignore[index]


def reaches_mark(outputs: Any, owner: object) -> bool:
    """Whether a backward from `outputs` reaches what `mark_outputs` has marked for `owner`."""
    marks = (node.metadata.get((_MARK, id(owner))) for node, _ in _nodes(outputs))
    return any(mark is not None and mark() is owner for mark in marks)


def _nodes(outputs: Any, ends: Container[Any] = ()) -> Iterator[tuple[Any, Sequence[Any]]]:
    """The nodes, with their edges, that a backward from these tensors or gradient edges may run, in no particular order. The walk
    does not visit `ends`."""
    seen: set[Any] = set()  # of nodes, not of their ids: a node without references is freed, and its id reused
    for value in _leaves(outputs):
        node = value.grad_fn if isinstance(value, torch.Tensor) else value
        if isinstance(node, torch.autograd.graph.Node):
            seen.add(node)
    stack = list(seen)
    while stack:
        node = stack.pop()
        edges = node.next_functions
        yield node, edges
        for edge in edges:
            successor = edge[0]
            if successor is not None and successor not in seen and successor not in ends:
                seen.add(successor)
                stack.append(successor)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Every tensor in nested lists, tuples, sets, mappings and dataclasses; anything else is ignored."""
    return (leaf for leaf in _leaves(value) if isinstance(leaf, torch.Tensor))


def _leaves(value: Any) -> Iterator[Any]:
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
            else:
                yield item


def _children(item: Any) -> list[Any]:
    if isinstance(item, Mapping):
        return list(item.values())
    if isinstance(item, list | tuple | set | frozenset):
        return list(item)
    if dataclasses.is_dataclass(item) and not isinstance(item, type):
        return [getattr(item, field.name) for field in dataclasses.fields(item)]
    return []
