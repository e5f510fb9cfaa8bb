"""gradwire's hooks inside FSDP2: between replicas, and in place of the reduce-scatter."""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from gradwire.collectives import Collective, ReduceOp, all_reduce
from gradwire.collectives.op import sent_bytes
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups import Group, HierarchicalGroup, ThreadGroup
from gradwire.groups.work import Work
from gradwire.groups.wrappers import GroupWrapper
from gradwire.hooks import (
    Reduced,
    Reduction,
    Turn,
    cast,
    chain,
    diloco,
    error_feedback,
    hierarchical,
    local_sgd,
    mean,
    power_sgd,
    quantize,
    streaming_diloco,
    top_k,
)
from gradwire.interop import (
    as_fsdp_hook,
    as_fsdp_reduce_scatter,
    from_process_group,
    fsdp_parameters,
    outer_steps_on_shards,
)
from gradwire.parallel.replicate import replicate
from gradwire.testing import run_ranks
from gradwire.testing.simulate import one_parameter
from helpers.comm_hooks import Scripted


def coarse(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """The mean of gradients rounded to a grid: lossy, and easy to recognize."""
    sent = (grad * 64).round() / 64
    value = sent.clone()
    yield all_reduce(value, op=ReduceOp.AVG)
    return Reduced(value, sent)


LOSSY = chain(error_feedback(), Scripted(coarse, 1))
OTHERS = {
    "quantize": chain(error_feedback(), quantize(bits=8)),
    "top_k": chain(error_feedback(), top_k(ratio=0.25)),
    "power_sgd": power_sgd(rank=1, min_compression=1.0),
}


def sharded(mesh: Any, frozen: tuple[str, ...] = ()) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 3)).to(
        mesh.device_type
    )
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for i in (0, 2):
        fully_shard(model[i], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model


def train(model: nn.Module, rank: int, steps: range, lr: float = 0.05, optimizer: Any = None) -> Tensor:
    """This rank's shards in the end. (Not full_tensor(), with which torch 2.11 ends the process over gloo on CUDA.)"""
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=lr)
    for step in steps:
        optimizer.zero_grad()
        inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(100 * step + rank))
        model(inputs.to(next(model.parameters()).device)).pow(2).sum().backward()
        optimizer.step()
    return torch.cat([p.detach().to_local().flatten().cpu() for p in model.parameters()])  # type: ignore[attr-defined]


def between_replicas(rank: int, size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Replicas of one shard: torch's own hybrid sharding, and ours by two hooks."""
    done = {}
    mesh = init_device_mesh(device, (size, 1), mesh_dim_names=("replicate", "shard"))
    done["plain"] = train(sharded(mesh), rank, range(3))
    replicas = from_process_group(mesh.get_group("replicate"))
    for name, hook in {"mean": mean(), "lossy": LOSSY, **OTHERS}.items():
        model = sharded(mesh["shard"])
        hooks = []
        for module, named in fsdp_parameters(model):
            hooks.append(as_fsdp_hook(hook, replicas, named_parameters=named))
            module.set_all_reduce_hook(hooks[-1])
        done[name] = train(model, rank, range(3))
        states = [h.hook_state_dict() for h in hooks]
        assert [s["step"] for s in states] == [3] * 3
        if name == "lossy":
            residuals = {n: parts["residual"].numel() for s in states for n, parts in s["state"].items()}
            assert residuals == {n: p.numel() for n, p in model.named_parameters()}
            for h, state in zip(hooks, states, strict=True):
                h.load_hook_state_dict(state)
    with pytest.raises(UsageError, match=r"torch itself averages over its replicas.*over a 1-D mesh.*register_backend"):
        for _, named in fsdp_parameters(sharded(mesh)):
            as_fsdp_hook(mean(), replicas, named_parameters=named)
    refuses_torchs_replicate(mesh["replicate"], replicas)
    names_are_those_of_the_gradients(mesh["shard"], replicas)
    done["frozen"] = frozen(mesh, replicas, rank)
    replicas.close()
    return done


def refuses_torchs_replicate(mesh: Any, replicas: Group) -> None:
    """FSDP2's `replicate()` all-reduces in full before any hook: the hook would average the average, and save no byte."""
    replicate = pytest.importorskip("torch.distributed._composable.replicate_with_fsdp").replicate
    model = replicate(nn.Linear(4, 3).to(mesh.device_type), mesh=mesh)
    ((_, named),) = fsdp_parameters(model)
    for adapt in (as_fsdp_hook, as_fsdp_reduce_scatter):
        with pytest.raises(UsageError, match=rf"^{adapt.__name__}: weight .*backend_override.*gw\.replicate"):
            adapt(mean(), replicas, named_parameters=named)


class Scaled(nn.Module):
    """Its own parameter is its first, and the last of FSDP's."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.first, self.norm, self.last = nn.Linear(3, 3), nn.LayerNorm(3), nn.Linear(3, 1)

    def forward(self, x: Tensor) -> Any:
        return self.last(self.norm(self.scale * self.first(x)))


def names_are_those_of_the_gradients(mesh: Any, replicas: Group) -> None:
    """Whatever the order in which FSDP reduces; modules that are sharded together, as a list, have one hook."""
    seen: dict[str, Tensor] = {}

    def look(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        seen.update(zip(turn.spec.names, grad.clone().split(turn.spec.numels), strict=True))
        yield all_reduce(grad, op=ReduceOp.AVG)
        return Reduced(grad, grad)

    torch.manual_seed(0)
    model = Scaled().to(mesh.device_type)
    fully_shard([model.last, model.norm], mesh=mesh)
    fully_shard(model, mesh=mesh)
    together = list(fsdp_parameters(model))
    for module, named in together:
        module.set_all_reduce_hook(as_fsdp_hook(Scripted(look, 1), replicas, named_parameters=named))
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        model(torch.eye(3, device=mesh.device_type)).pow(2).sum().backward()
    assert [[name for name, _ in named] for _, named in together] == [
        ["first.weight", "first.bias", "scale"],
        ["last.weight", "last.bias", "norm.weight", "norm.bias"],
    ]
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None
        assert torch.equal(seen[name], parameter.grad.to_local().flatten())  # type: ignore[attr-defined]


def frozen(mesh: Any, replicas: Group, rank: int) -> Tensor:
    """A model of which only some parameters are trained: the hook sees those, by name."""
    model = sharded(mesh["shard"], frozen=("0.weight", "0.bias", "2.weight"))
    hooks = []
    for module, named in fsdp_parameters(model):
        hooks.append(as_fsdp_hook(LOSSY, replicas, named_parameters=named))
        module.set_all_reduce_hook(hooks[-1])
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        after = train(model, rank, range(3))
    assert [sorted(h.hook_state_dict()["state"]) for h in hooks] == [["2.bias"], ["4.bias", "4.weight"]]
    return after


def in_place_of_the_reduce_scatter(rank: int, size: int, device: str = "cpu") -> dict[str, Tensor]:
    """Every rank is a shard."""
    done = {}
    mesh = init_device_mesh(device, (size,))
    done["plain"] = train(sharded(mesh), rank, range(3))
    shards = from_process_group(mesh.get_group())
    for name, hook in {"mean": mean(), "lossy": LOSSY, **OTHERS}.items():
        model, comms = sharded(mesh), []
        for module, named in fsdp_parameters(model):
            comms.append(as_fsdp_reduce_scatter(hook, shards, named_parameters=named))
            module.set_custom_reduce_scatter(comms[-1])
            if name == "lossy":  # FSDP asks for sums then, and divides itself
                module.set_force_sum_reduction_for_comms(True)
        done[name] = train(model, rank, range(3))
        states = [comm.hook_state_dict() for comm in comms]
        assert [s["step"] for s in states] == [3] * 3
        if name == "lossy":
            residuals = {n: parts["residual"].numel() for s in states for n, parts in s["state"].items()}
            assert len(residuals) == 6 * size
            assert residuals["0.weight (shard 1)"] == 7 * 6  # thirteen rows on two ranks: seven, padded
            assert residuals["4.bias (shard 0)"] == 2
        for comm, state in zip(comms, states, strict=True):
            comm.load_hook_state_dict(state)
    model = sharded(mesh)
    for module, named in fsdp_parameters(model):
        module.set_custom_reduce_scatter(as_fsdp_reduce_scatter(mean(), shards, named_parameters=named))
        module.set_gradient_divide_factor(size / 2)  # sums of twice the mean, premultiplied
    done["divided"] = train(model, rank, range(3), lr=0.025)
    eight_bits_send_a_quarter(mesh, shards)
    shards.close()
    return done


class Counted(GroupWrapper):
    """Counts what a rank sends."""

    sent = 0.0

    def submit(self, op: Collective) -> Work:
        self.sent += sent_bytes(op, self.rank, self.size)
        return super().submit(op)


def eight_bits_send_a_quarter(mesh: Any, shards: Group) -> None:
    """Of the bytes of a reduce-scatter in float32, which is what `mean()` sends; rows are not multiples of a block."""
    model = nn.Sequential(nn.Linear(250, 333), nn.Linear(333, 123)).to(mesh.device_type)
    numel, sent = sum(-(-len(p) // shards.size) * p[0].numel() for p in model.parameters()), {}
    for hook in (mean(), OTHERS["quantize"]):
        shared = fully_shard(copy.deepcopy(model), mesh=mesh)
        ((module, named),) = fsdp_parameters(shared)
        group = Counted(shards)
        module.set_custom_reduce_scatter(as_fsdp_reduce_scatter(hook, group, named_parameters=named))
        shared(torch.ones(2, 250, device=mesh.device_type)).sum().backward()
        sent[hook] = group.sent
        spec = one_parameter(torch.empty(shards.size * numel))
        assert group.sent == hook.scatter_wire_bytes(spec, shards.size)
    assert sent[mean()] == (shards.size - 1) * numel * 4
    assert sent[OTHERS["quantize"]] <= 0.257 * sent[mean()]


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_fsdp_trains_with_our_hooks(fresh: Callable[..., Any], device: str) -> None:
    """The mean gives what FSDP gives by itself; a lossy hook, with error feedback, something near it. Replicas agree.

    On CUDA both ranks share a device, over gloo: NCCL needs one for each.
    """

    def both(rank: int, size: int) -> list[dict[str, Tensor]]:
        return [scenario(rank, size, device) for scenario in (between_replicas, in_place_of_the_reduce_scatter)]

    (ranks,) = fresh(both, ("gloo",), devices=device == "cuda")
    for one in ranks:
        for done in one:
            torch.testing.assert_close(done["mean"], done["plain"])
            torch.testing.assert_close(done.get("divided", done["plain"]), done["plain"])
            for name, near in {"lossy": 0.02, "quantize": 0.02, "top_k": 0.2, "power_sgd": 0.2}.items():
                torch.testing.assert_close(done[name], done["plain"], rtol=0.1, atol=near)
                assert not torch.equal(done[name], done["plain"])
    for name, first in ranks[0][0].items():  # of replicas every rank has the whole
        assert torch.equal(ranks[1][0][name], first)


def row_of(model: nn.Module) -> Tensor:
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])


def on_islands(rank: int, size: int) -> dict[str, tuple[Tensor, Tensor]]:
    """Two islands, each with a model that is sharded over two ranks, and the same without sharding: all ranks' parameters."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("island", "shard"))
    across, island = from_process_group(mesh.get_group("island")), rank // 2
    done = {}
    for name, hook in {
        "local_sgd": local_sgd(every=2),
        "diloco": diloco(every=2),
        "streaming_diloco": streaming_diloco(every=3, fragments=3, delay=1, alpha=0.5),
    }.items():
        torch.manual_seed(rank)  # those of the first island become those of all
        whole = nn.Sequential(nn.Linear(6, 13), nn.Tanh(), nn.Linear(13, 8), nn.Tanh(), nn.Linear(8, 3))
        model = sharded(mesh["shard"])
        with torch.no_grad():
            for p in [*model.parameters()]:
                p.mul_(1 + island)
        whole.load_state_dict({n: p.full_tensor() for n, p in model.state_dict().items()})
        whole[2].bias.requires_grad_(False)
        replica = replicate(whole, group=across, hook=hook)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.02, momentum=0.9) for m in (model, whole)]
        model[2].bias.requires_grad_(False)
        outer = outer_steps_on_shards(hook, across, model.named_parameters(), optimizers[0])
        replica.attach_optimizer(optimizers[1])
        with torch.no_grad():  # as when a checkpoint is loaded now
            for p in [*model.parameters(), *whole.parameters()]:
                p.add_(100)
        for step in range(8):
            inputs = torch.randn(4, 6, generator=torch.Generator().manual_seed(10 * step + island))
            for m, optimizer in zip((model, whole), optimizers, strict=True):
                optimizer.zero_grad()
                m(inputs).pow(2).sum().backward()
                optimizer.step()
            if step == 5:
                saved = outer.hook_state_dict()
                assert saved["step"] == 6
                outer.load_hook_state_dict(saved)
        done[name] = row_of(model), row_of(whole)
        outer.average_parameters()
        done[f"{name}, averaged"] = row_of(model), row_of(whole)
        outer.close()
        replica.detach()
    return done


def test_outer_steps_on_shards_are_those_of_whole_parameters_bit_for_bit(fresh: Callable[..., Any]) -> None:
    (ranks,) = fresh(on_islands, ("gloo",), 4)
    for done in ranks:
        for name in ("local_sgd", "diloco", "streaming_diloco"):
            sharded_row, whole_row = done[name]
            assert torch.equal(sharded_row, whole_row), name
            assert torch.equal(done[f"{name}, averaged"][0], ranks[0][f"{name}, averaged"][0])
    assert not torch.equal(
        ranks[0]["streaming_diloco"][0], ranks[2]["streaming_diloco"][0]
    )  # islands differ in between


def checkpointed(rank: int, size: int, path: Path) -> dict[str, tuple[Tensor, Tensor]]:
    """In each place of a hook: six steps at once, and three, a checkpoint of torch's, and three more."""
    done = {}
    mesh = init_device_mesh("cpu", (size, 1), mesh_dim_names=("replicate", "shard"))
    for place in ("replicas", "shards", "islands"):
        group = from_process_group(mesh.get_group("replicate"))
        over = mesh["replicate"] if place == "shards" else mesh["shard"]

        def begin(place: str = place, group: Group = group, over: Any = over) -> tuple[nn.Module, dict[str, Any], Any]:
            model = sharded(over)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
            if place == "islands":
                outer = outer_steps_on_shards(diloco(every=3), group, model.named_parameters(), optimizer)
                return model, {"hook": outer}, optimizer
            made: dict[str, Any] = {}
            for i, (module, named) in enumerate(fsdp_parameters(model)):
                if place == "replicas":
                    made[f"hook {i}"] = hook = as_fsdp_hook(LOSSY, group, named_parameters=named)
                    module.set_all_reduce_hook(hook)
                else:
                    made[f"hook {i}"] = comm = as_fsdp_reduce_scatter(LOSSY, group, named_parameters=named)
                    module.set_custom_reduce_scatter(comm)
            return model, made, optimizer

        model, hooks, optimizer = begin()
        train(model, rank, range(3), optimizer=optimizer)
        dcp.save({"model": model.state_dict(), **hooks}, checkpoint_id=str(path / place))
        whole = train(model, rank, range(3, 6), optimizer=optimizer)
        model, hooks, optimizer = begin()
        loaded = {"model": model.state_dict(), **hooks}
        dcp.load(loaded, checkpoint_id=str(path / place))
        model.load_state_dict(loaded["model"])
        done[place] = whole, train(model, rank, range(3, 6), optimizer=optimizer)
    return done


def test_torchs_checkpoints_keep_the_state_of_every_rank(fresh: Callable[..., Any], tmp_path: Path) -> None:
    (ranks,) = fresh(partial(checkpointed, path=tmp_path), ("gloo",))
    for done in ranks:
        for place, (whole, restored) in done.items():
            assert torch.equal(whole, restored), place


def test_a_tensor_of_another_length_is_one_unnamed_row() -> None:
    """Some parameters got no gradient; FSDP does not expose which."""

    def rank_main(group: Group) -> list[str]:
        hook = as_fsdp_hook(LOSSY, group, named_parameters=[("a", torch.zeros(4)), ("b", torch.zeros(2, 3))])
        for numel in (10, 6, 10, 4):
            flat = torch.full((numel,), float(group.rank))
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                hook(flat)
            assert flat.tolist() == [0.5] * numel
            said = [str(w.message) for w in caught]
            assert len(said) == (numel == 6)  # once
            assert all("reduces 6 elements" in text and "(a, b) have 10" in text for text in said)
        return sorted(hook.hook_state_dict()["state"])

    assert run_ranks(rank_main, 2) == [["4 elements", "6 elements", "a", "b"]] * 2


@pytest.mark.parametrize("saved_by", [0, 1])
def test_the_state_of_a_later_rank_is_loaded_with_a_warning(saved_by: int) -> None:
    """As dcp keeps one rank's copy of a dict that all ranks save; a new rank may load that of rank 0."""

    def rank_main(group: Group) -> None:
        hook = as_fsdp_hook(LOSSY, group, named_parameters=[("a", torch.zeros(4))])
        hook(torch.full((4,), 0.3))
        hook.load_hook_state_dict({**hook.hook_state_dict(), "rank": saved_by})

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        run_ranks(rank_main, 2)
    said = [str(w.message) for w in caught if "keeps one rank's copy of a dict" in str(w.message)]
    assert len(said) == saved_by
    assert all("the state of rank 1 of the group, and this is rank 0" in text for text in said)


def test_a_hook_of_two_levels_is_told_of_hosts() -> None:
    """Values are narrow between hosts, but not inside each host."""

    def rank_main(world: Group) -> list[float]:
        inside, across = world.split(world.rank // 2), world.split(world.rank % 2)
        assert inside is not None
        with HierarchicalGroup(inside, across, rank=world.rank) as group:
            hook = as_fsdp_hook(hierarchical(across=chain(cast(torch.bfloat16), mean())), group)
            flat = torch.full((4,), 1.0 + 2**-9)
            hook(flat)
            return flat.tolist()

    assert run_ranks(rank_main, 4, kind="threads") == [[1.0] * 4] * 4


def test_what_does_not_fit_is_refused() -> None:
    (group,) = ThreadGroup.world(1, timeout=20)
    with pytest.raises(UsageTypeError, match="is a stage"):
        as_fsdp_hook(cast(torch.bfloat16), group)  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"outer_steps_on_shards\(mean\(\)\): it has no outer steps"):
        outer_steps_on_shards(mean(), group, [("a", nn.Parameter(torch.zeros(2)))])
    with pytest.raises(UsageError, match="no parameter requires a gradient"):
        outer_steps_on_shards(diloco(every=2), group, [("a", torch.zeros(2))])
    with pytest.raises(UsageError, match=r"local_sgd\(every=2\)\): it averages parameters.*outer_steps_on_shards"):
        as_fsdp_reduce_scatter(local_sgd(every=2), group)
    for adapt in (as_fsdp_hook, as_fsdp_reduce_scatter):
        with pytest.raises(UsageError, match=r"head\.weight"):
            adapt(quantize({"encoder.*": 8}), group, named_parameters=[("head.weight", torch.zeros(4))])

    class Pair:
        def size(self) -> int:
            return 2

    comm = as_fsdp_reduce_scatter(mean(), group)
    with pytest.raises(UsageError, match="over 2 ranks, .*but this hook averages or sums over 1 ranks"):
        comm(torch.zeros(1), torch.zeros(2), Pair(), dist.ReduceOp.AVG)
    assert repr(as_fsdp_hook(mean(), group)).startswith("FsdpHook(mean(), <threads rank 0 of 1")
    assert list(fsdp_parameters(nn.Linear(2, 2))) == []
    group.close()
