"""TorchTitan's llama3 debug model under its own `parallelize_llama`, with a hook as the process group of a mesh dimension.

The mesh is made here, so gradients are reduced by the hook and TorchTitan's code stays as it is: over `dp_replicate` (HSDP, one
shard), or over `fsdp` with `--parallel fsdp`. Tokens are synthetic; two processes on a CPU are enough.

pip install --no-deps -r requirements-torchtitan.txt
gradwire run -n 2 examples/torchtitan_style.py --directory checkpoint
gradwire run -n 2 examples/torchtitan_style.py --directory checkpoint --resume

Where TorchTitan cannot be imported, a llama of the same shape is trained, and one line says why.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard

import gradwire as gw
from gradwire import hooks
from gradwire.collectives import Collective, OpKind

HOOKS = {
    "mean": hooks.mean(),
    "8 bits": hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8)),
    "stock": None,  # torch's own gloo
}
VOCABULARY, DIM, HEADS, HIDDEN = 2048, 256, 16, 768  # of TorchTitan's debug model
SEQUENCES, LENGTH = 2, 64


@dataclass(frozen=True, slots=True)
class Job:
    """The command line."""

    directory: str
    resume: bool = False
    model: str = "torchtitan"
    parallel: str = "hsdp"
    hook: str = "8 bits"
    kind: str = "gloo"
    steps: int = 20
    layers: int = 6


# -- the mesh, with the hook on one of its dimensions ------------------------------------------------------------------


class Counted(gw.GroupWrapper):
    """Counts the bytes that this rank sends for gradients and parameters, by kind of collective."""

    def __init__(self, inner: gw.Group) -> None:
        super().__init__(inner)
        n = inner.size
        self.sent: Counter[tuple[str, str]] = Counter()
        self.share = {
            OpKind.ALL_REDUCE: 2 * (n - 1) / n,
            OpKind.REDUCE_SCATTER_TENSOR: (n - 1) / n,
            OpKind.ALL_TO_ALL_SINGLE: (n - 1) / n,
            OpKind.ALL_GATHER_INTO_TENSOR: n - 1,
        }

    def submit(self, op: Collective) -> gw.Work:
        """Loss and gradient norm, reductions of one element, are not counted; a hook labels its collectives "bucket N"."""
        if op.kind in self.share and op.inputs[0].numel() > 1:
            gathers_parameters = op.kind is OpKind.ALL_GATHER_INTO_TENSOR and not op.label.startswith("bucket")
            what = "parameters" if gathers_parameters else "gradients"
            self.sent[what, op.kind.value] += round(op.nbytes * self.share[op.kind])
        return super().submit(op)


def make_mesh(job: Job) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """The mesh, and the group over which gradients are reduced."""
    size, hook = dist.get_world_size(), HOOKS[job.hook]
    shape, names = ((size, 1), ("dp_replicate", "fsdp")) if job.parallel == "hsdp" else ((size,), ("fsdp",))
    override = {}
    if hook is not None:
        gw.register_backend("hooked", kind=job.kind, wrap=lambda group: gw.HookedGroup(Counted(group), hook))
        override = {names[0]: "hooked"}
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names, backend_override=override)
    return mesh, mesh.get_group(names[0])


# -- the model ---------------------------------------------------------------------------------------------------------


def titan(job: Job, mesh: DeviceMesh) -> nn.Module:
    """TorchTitan's debug model, made parallel by its `parallelize_llama`, which takes our mesh."""
    from torchtitan.config import CompileConfig, ParallelismConfig, TrainingConfig
    from torchtitan.distributed import ParallelDims
    from torchtitan.models.common.attention import ScaledDotProductAttention
    from torchtitan.models.llama3 import llama3_configs, parallelize_llama

    config = llama3_configs["debugmodel"](attn_backend="flex")
    del config.layers[job.layers :]
    for layer in config.layers:
        layer.attention.inner_attention = ScaledDotProductAttention.Config()  # flex attention has no backward on a CPU
        layer.attention.rope = replace(layer.attention.rope, max_seq_len=LENGTH)
    model = config.build()
    model.init_states()
    size = mesh.size()
    replicas = size if job.parallel == "hsdp" else 1
    dims = ParallelDims(replicas, size // replicas, 1, 1, 1, 1, size, spmd_backend="partial_dtensor")
    dims.get_mesh = lambda names: mesh
    return parallelize_llama(
        model,
        parallel_dims=dims,
        training=TrainingConfig(mixed_precision_param="float32"),
        parallelism=ParallelismConfig(spmd_backend="partial_dtensor"),
        compile_config=CompileConfig(),
        ac_config=None,
        dump_folder=job.directory,
    )


class Block(nn.Module):
    """A layer of llama."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.RMSNorm(DIM), nn.RMSNorm(DIM)
        self.wqkv, self.wo = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.w1, self.w3 = nn.Linear(DIM, HIDDEN, bias=False), nn.Linear(DIM, HIDDEN, bias=False)
        self.w2 = nn.Linear(HIDDEN, DIM, bias=False)

    def forward(self, x: Tensor, rotation: Tensor) -> Tensor:
        """Attention, then the gated feed-forward."""
        q, k, v = self.wqkv(self.attention_norm(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        q, k = (
            torch.view_as_real(torch.view_as_complex(t.unflatten(-1, (-1, 2)).contiguous()) * rotation).flatten(-2)
            for t in (q, k)
        )
        attended = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.wo(attended.transpose(1, 2).flatten(2))
        h = self.ffn_norm(x)
        return x + self.w2(nn.functional.silu(self.w1(h)) * self.w3(h))


class Llama(nn.Module):
    """A llama of the shape of TorchTitan's debug model, for machines without TorchTitan."""

    def __init__(self, layers: int) -> None:
        super().__init__()
        self.tok_embeddings = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList(Block() for _ in range(layers))
        self.norm, self.lm_head = nn.RMSNorm(DIM), nn.Linear(DIM, VOCABULARY, bias=False)
        half = DIM // HEADS // 2
        angles = torch.outer(torch.arange(LENGTH), 500_000.0 ** -(torch.arange(half) / half))
        self.register_buffer("rotation", torch.polar(torch.ones_like(angles), angles), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next tokens."""
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x, self.rotation)
        return self.lm_head(self.norm(x))


def same_shape(job: Job, mesh: DeviceMesh) -> nn.Module:
    """The same with a model of our own, sharded as TorchTitan does it."""
    model = Llama(job.layers)
    for module in (model.tok_embeddings, [model.norm, model.lm_head], *model.layers, model):
        fully_shard(module, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
    return model


def make_model(job: Job, mesh: DeviceMesh) -> nn.Module:
    """TorchTitan's model, or one of the same shape."""
    if job.model == "torchtitan":
        try:
            import torchtitan.models.llama3  # noqa: F401
        except Exception as error:  # ImportError, or what else its imports raise on this machine
            if dist.get_rank() == 0:
                print(f"no TorchTitan ({type(error).__name__}: {error}): training a model of the same shape")
            job = replace(job, model="same shape")
    torch.manual_seed(0)
    model = titan(job, mesh) if job.model == "torchtitan" else same_shape(job, mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # TorchTitan's PREMUL_SUM is not in torch's gloo
    return model


# -- the loop ----------------------------------------------------------------------------------------------------------


def batch(step: int) -> tuple[Tensor, Tensor]:
    """This rank's tokens and the next ones: progressions of a random start and stride."""
    generator = torch.Generator().manual_seed(1000 * step + dist.get_rank())
    start = torch.randint(256, (SEQUENCES, 1), generator=generator)
    stride = torch.randint(1, 5, (SEQUENCES, 1), generator=generator)
    tokens = (start + stride * torch.arange(LENGTH + 1)) % 256
    return tokens[:, :-1], tokens[:, 1:]


def checkpoint(model: nn.Module, optimizer: torch.optim.Optimizer, group: gw.Group | None) -> dict[str, Any]:
    """What torch.distributed.checkpoint saves, and loads into: model, optimizer and the hook's state of every rank."""
    state = {"model": model.state_dict(), "optimizer": get_optimizer_state_dict(model, optimizer)}
    return state if group is None else {**state, "hook": group}


def train(job: Job) -> Iterator[tuple[int, float, Counter[tuple[str, str]]]]:
    """The number of each step, its loss, and what this rank sent in it; no counts for torch's own group."""
    mesh, process_group = make_mesh(job)
    group = None if HOOKS[job.hook] is None else gw.from_process_group(process_group)
    model = make_model(job, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first = 0
    if job.resume:
        first = max(int(path.name) for path in Path(job.directory).iterdir())
        state = checkpoint(model, optimizer, group)
        dcp.load(state, checkpoint_id=f"{job.directory}/{first}")
        model.load_state_dict(state["model"])
        set_optimizer_state_dict(model, optimizer, state["optimizer"])
    for step in range(first, first + job.steps):
        counted = Counter() if group is None else group.inner.sent
        counted.clear()
        tokens, following = batch(step)
        logits = model(tokens).flatten(0, 1)
        # TorchTitan sums gradients over ranks, so each rank's loss is its part of the mean over all tokens.
        loss = nn.functional.cross_entropy(logits, following.flatten()) / dist.get_world_size()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        total = loss.detach().clone()
        dist.all_reduce(total, group=process_group)
        yield step, total.item(), counted.copy()
    dcp.save(checkpoint(model, optimizer, group), checkpoint_id=f"{job.directory}/{first + job.steps}")


def main() -> None:
    """Train, or continue, and print the loss of each step and the bytes that rank 0 sent in it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--directory", required=True, help="where checkpoints are, by step")
    parser.add_argument("--resume", action="store_true", help="continue from the last one")
    parser.add_argument("--model", choices=["torchtitan", "same shape"], default="torchtitan")
    parser.add_argument("--parallel", choices=["hsdp", "fsdp"], default="hsdp", help="one shard, or one replica")
    parser.add_argument("--hook", choices=HOOKS, default="8 bits", help="stock: torch's own gloo, not counted")
    parser.add_argument("--kind", choices=["gloo", "shared_memory"], default="gloo", help="what moves the bytes")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--layers", type=int, default=6)
    job = Job(**vars(parser.parse_args()))
    dist.init_process_group("gloo")
    for step, loss, sent in train(job):
        megabytes = ", ".join(f"{what} {kind} {n / 1e6:.2f} MB" for (what, kind), n in sorted(sent.items()))
        if dist.get_rank() == 0:
            print(f"step {step}: loss {loss:.4f}; {megabytes or 'not counted'}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
