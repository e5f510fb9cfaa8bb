"""Puts `gradwire::ready` behind each gradient in the backward graphs that inductor compiles.

Imported only once inductor is there. It knows inductor's graphs and settings, and nothing of parameters or callbacks.

Note [A pass of inductor's]
Inductor runs the passes in its setting `post_grad_custom_post_pass` on every graph, and makes their `uuid` part of the keys of its
caches. The setting is per thread, and a backward on CUDA is compiled in a thread of the engine, so its default is changed.
A thread that has a pass of its own set keeps it; if torch takes lists of passes there, ours is added.

Note [The order of gradients]
Inductor reorders a graph to need less memory, and moves the computation of a gradient, on which nothing else depends, to the end.
So a matrix product that follows an op, in the order in which autograd computes, is made to depend on it, by inductor's own means
(`control_dependencies`). Not the very next product, but the one after it: kernels around the first could not all be fused. A
result that only such dependencies use counts as dead, so each op also takes the result of the previous one.

Note [Inside a CUDA graph]
With `mode="reduce-overhead"` kernels are recorded once and replayed, and an op in Python would run only when they are recorded.
Such graphs stay as they are.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from gradwire.autograd.compiled.op import reports

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_PRODUCTS |= {_aten.convolution.default, _aten.convolution_backward.default}
_SETTING = "post_grad_custom_post_pass"
_LEEWAY = 1
"""How many products may be computed between a gradient and its op. See Note [The order of gradients]."""
_VERSION = "gradwire ready 2"


class ReadyPass(custom_graph_pass.CustomGraphPass):
    """Marks the gradients in a backward graph. Settings are copied from thread to thread, so it has no state."""

    def __call__(self, graph: Graph) -> None:
        """Insert the ops, if `graph` is a backward and gradients of any model are listened for."""
        if reports() and not config.triton.cudagraphs:
            mark_gradients(graph)

    def uuid(self) -> Any:
        return f"{_VERSION}, {reports()}"


def install() -> None:
    """Have inductor run the pass in every thread."""
    setting = config._config[_SETTING]  # type: ignore[attr-defined]
    current = getattr(config, _SETTING)
    if setting.default is None:
        setting.default = ReadyPass()
    if current is None or isinstance(current, ReadyPass):
        return
    passes = list(current) if isinstance(current, list | tuple) else [current]
    takes_lists = hasattr(custom_graph_pass, "get_custom_graph_passes")
    if takes_lists and not any(isinstance(one, ReadyPass) for one in passes):
        setattr(config, _SETTING, [*passes, ReadyPass()])


def mark_gradients(graph: Graph) -> int:
    """Insert the op behind each gradient that a backward graph computes. Returns how many were inserted."""
    nodes = list(graph.nodes)
    if not any(node.op == "placeholder" and node.name.startswith("tangents") for node in nodes):
        return 0  # a forward
    results = nodes[-1].args[0]
    if not isinstance(results, list | tuple):
        return 0
    place = {node: number for number, node in enumerate(nodes)}
    products = [node for node in nodes if node.target in _PRODUCTS]
    computed = [(place[r], position, r) for position, r in enumerate(results) if isinstance(r, Node) and _computes(r)]
    waits: dict[Node, OrderedSet[Node]] = {}
    previous: Node | None = None
    for number, position, result in sorted(computed, key=lambda found: found[:2]):
        with graph.inserting_after(result if previous is None or place[previous] < number else previous):
            op = graph.call_function(torch.ops.gradwire.ready.default, (result, previous, position, len(results)))
        op.meta["val"] = result.meta["val"].new_empty(0)
        place[op], previous = number, op
        following = [one for one in products if place[one] > number]
        if following:
            waits.setdefault(following[: _LEEWAY + 1][-1], OrderedSet()).add(op)
    preserve_node_ordering(graph, {product: waits[product] for product in products if product in waits})
    return len(computed)


def _computes(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
