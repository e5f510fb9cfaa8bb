"""Puts `gradwire::ready` behind the gradients in the backward graphs that inductor compiles, a bucket at a time.

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

Note [Where ops stand]
To call an op from compiled code takes some 10 µs, so there is none for each gradient, but one where a bucket is full if the graph
computes all gradients of its model; they are counted as the reducer counts them, by dtype and device. A graph may also be one of
many of a model, and whose it is cannot be known here. So ops are placed for the buckets of every model in the process, and at most
half a bucket apart, or in a large graph a sixteenth of its gradients: no bucket is launched later than that.

Those places depend on sizes of activations and on the other models of a process, which may differ between ranks. That does not
matter among our own reductions. But if the graph has collectives of its own, perhaps in the same group, a bucket launched before
one of them must be launched before it on every rank: then, and for ops of which it is not known, one stands behind each gradient.

Note [Inside a CUDA graph]
With `mode="reduce-overhead"` kernels are recorded once and replayed, without ops in Python. Such graphs stay as they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch._inductor import config, custom_graph_pass
from torch._inductor.fx_passes.control_dependencies import preserve_node_ordering
from torch.fx import Graph, Node
from torch.utils._ordered_set import OrderedSet

from gradwire.autograd.compiled.op import Limits, bucket_limits

_aten = torch.ops.aten
_PRODUCTS = {_aten.mm.default, _aten.addmm.default, _aten.bmm.default, _aten.baddbmm.default}
_PRODUCTS |= {_aten.convolution.default, _aten.convolution_backward.default}
_SETTING = "post_grad_custom_post_pass"
_LEEWAY = 1
"""How many products may be computed between a gradient and its op. See Note [The order of gradients]."""
_COMPUTING = {"aten", "prims", "rngprims", "inductor", "mkldnn"}
"""The namespaces of ops that do not communicate."""
_VERSION = "gradwire ready 6"


class ReadyPass(custom_graph_pass.CustomGraphPass):
    """Marks the gradients in a backward graph. Settings are copied from thread to thread, so it has no state."""

    def __call__(self, graph: Graph) -> None:
        """Insert the ops, if `graph` is a backward and gradients of any model are listened for."""
        limits = bucket_limits()
        if limits and not config.triton.cudagraphs:
            mark_gradients(graph, limits)

    def uuid(self) -> Any:
        return f"{_VERSION}, {bucket_limits()}"


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


def mark_gradients(graph: Graph, limits: Sequence[Limits]) -> int:
    """Insert ops behind the gradients that a backward graph computes, for buckets of these sizes. Returns how many."""
    nodes = list(graph.nodes)
    if not any(node.op == "placeholder" and node.name.startswith("tangents") for node in nodes):
        return 0  # a forward
    results = nodes[-1].args[0]
    if not isinstance(results, list | tuple):
        return 0
    place = {node: number for number, node in enumerate(nodes)}
    products = [node for node in nodes if node.target in _PRODUCTS]
    computed = [(place[r], position, r) for position, r in enumerate(results) if isinstance(r, Node) and _computes(r)]
    computed.sort(key=lambda found: found[:2])
    waits: dict[Node, OrderedSet[Node]] = {}
    previous: Node | None = None
    if any(getattr(node.target, "namespace", "aten") not in _COMPUTING for node in nodes):
        limits = [(1,)]
    ends = _ends([result for _, _, result in computed], limits)
    for begin, end in pairwise([0, *ends]):
        _, positions, gradients = zip(*computed[begin:end], strict=True)
        number, last = place[gradients[-1]], gradients[-1]
        with graph.inserting_after(last if previous is None or place[previous] < number else previous):
            args = list(gradients), previous, list(positions), len(results)
            op = graph.call_function(torch.ops.gradwire.ready.default, args)
        op.meta["val"] = gradients[0].meta["val"].new_empty(0)
        place[op], previous = number, op
        following = [one for one in products if place[one] > number]
        if following:
            waits.setdefault(following[: _LEEWAY + 1][-1], OrderedSet()).add(op)
    preserve_node_ordering(graph, {product: waits[product] for product in products if product in waits})
    return len(ends)


def _ends(gradients: Sequence[Node], limits: Sequence[Limits]) -> list[int]:
    """How many gradients have been computed before each op."""
    values = [node.meta["val"] for node in gradients]
    ends = {end for model in limits for end in _full(values, model)}
    ends.update(i for i in range(1, len(gradients)) if gradients[i] is gradients[i - 1])  # an op takes a tensor once
    return sorted(ends | {len(gradients)} - {0})


def _full(values: Sequence[torch.Tensor], limits: Limits) -> Iterator[int]:
    """Where a bucket is full, as in `by_size`, or so much has been computed since the last op. See Note [Where ops stand]."""
    filled, buckets, since = Counter[Any](), Counter[Any](), 0
    sizes = [value.numel() * value.element_size() for value in values]
    sizes = [nbytes if isinstance(nbytes, int) else 0 for nbytes in sizes]  # of a symbolic size, as an activation's
    apart = max(limits[-1] / 2, sum(sizes) / 16)
    for number, (value, nbytes) in enumerate(zip(values, sizes, strict=True), 1):
        kind = (value.dtype, value.device)
        filled[kind] += nbytes
        since += nbytes
        if filled[kind] >= limits[min(buckets[kind], len(limits) - 1)]:
            filled[kind], since = 0, 0
            buckets[kind] += 1
            yield number
        elif since >= apart:
            since = 0
            yield number


def _computes(node: Node) -> bool:
    return node.op == "call_function" and isinstance(node.meta.get("val"), torch.Tensor)
