"""On each rank: what the loop of examples/torchtitan_style.py promises, for a model, and in meshes such as hsdp:gloo.

gradwire run -n 2 tests/integrations/scripts/torchtitan_checks.py --steps 50 {hsdp,fsdp}:{gloo,shared_memory}
"""

import argparse
import json
import runpy
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch.distributed as dist

example = runpy.run_path(str(Path(__file__).parents[3] / "examples" / "torchtitan_style.py"), run_name="example")
parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
parser.add_argument("meshes", nargs="+")
parser.add_argument("--model", default="torchtitan")
parser.add_argument("--steps", type=int, default=6)
parser.add_argument("--layers", type=int, default=6)
asked = parser.parse_args()
dist.init_process_group("gloo")
size = dist.get_world_size()
own = tempfile.TemporaryDirectory()
everyones = [own.name]
dist.broadcast_object_list(everyones)
[directory] = everyones


def train(name: str, hook: str, steps: int = asked.steps, **how: Any) -> tuple[list[float], list[int]]:
    """The losses, and the bytes that this rank sent for gradients in each step."""
    job = example["Job"](f"{directory}/{name}", model=asked.model, hook=hook, steps=steps, layers=asked.layers, **how)
    _, losses, sent = zip(*example["train"](job), strict=True)
    dist.barrier()
    return list(losses), [sum(n for (what, _), n in counts.items() if what == "gradients") for counts in sent]


def stock(parallel: str) -> tuple[list[float], int]:
    """The same with torch's own group, and the bytes of a step: those of the reductions that FSDP calls."""
    sent: Counter[str] = Counter()
    name = "reduce_scatter_single" if hasattr(dist, "reduce_scatter_single") else "reduce_scatter_tensor"
    all_reduce, reduce_scatter = dist.all_reduce, getattr(dist, name)

    def counted_all_reduce(tensor: Any, *args: Any, **kwargs: Any) -> Any:
        sent["all_reduce"] += 2 * (size - 1) * tensor.nbytes // size if tensor.numel() > 1 else 0
        return all_reduce(tensor, *args, **kwargs)

    def counted_reduce_scatter(*, input: Any, **kwargs: Any) -> Any:
        sent["reduce_scatter"] += (size - 1) * input.nbytes // size
        return reduce_scatter(input=input, **kwargs)

    with patch.object(dist, "all_reduce", counted_all_reduce), patch.object(dist, name, counted_reduce_scatter):
        losses, _ = train(f"stock {parallel}", "stock", parallel=parallel)
    return losses, sent.total() // asked.steps


plain: dict[str, tuple[list[float], int]] = {}
for mesh in asked.meshes:
    parallel, _, kind = mesh.partition(":")
    how = {"parallel": parallel, "kind": kind}
    if parallel not in plain:
        plain[parallel] = stock(parallel)
    losses, bytes_of_stock = plain[parallel]
    averaged, sent = train(f"{mesh} mean", "mean", **how)
    assert averaged == losses, (mesh, averaged, losses)
    assert sent == [bytes_of_stock] * asked.steps, (mesh, sent, bytes_of_stock)
    compressed, sent = train(f"{mesh} whole", "8 bits", **how)
    assert compressed != losses, mesh
    assert max(sent) <= 0.27 * bytes_of_stock, (mesh, sent, bytes_of_stock)
    half = asked.steps // 2
    halves = [train(f"{mesh} halves", "8 bits", half, resume=resume, **how)[0] for resume in (False, True)]
    assert halves[0] + halves[1] == compressed[: 2 * half], (mesh, halves, compressed)
    last = slice(-10, None)
    off = sum(compressed[last]) / sum(losses[last]) - 1
    assert abs(off) <= 0.01, (mesh, compressed, losses)
    if dist.get_rank() == 0:
        figures = {"bytes": max(sent) / bytes_of_stock, "off": off, "first": losses[0], "last": losses[-1]}
        print(json.dumps({"mesh": mesh, **figures}), flush=True)
own.cleanup()  # rank 0's was everyone's
dist.destroy_process_group()
