"""gradwire's DistributedDataParallel against torch's: after 6 steps, or 5 on four ranks, every parameter is bitwise equal.

One world per size trains every model with every set of flags, first on torch's class, then on ours. One test compares all that was
trained: each worker that has a part of them would train all.
"""

import copy
import functools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.groups import Group
from gradwire.parallel import DistributedDataParallel as DDP
from gradwire.testing import run_ranks

STEPS = {2: 6, 4: 5}
"""By world size. What differs between steps repeats after three."""


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 4))


def mlp_batch(data: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randn(16, 8, generator=data),)


def convolutional() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(3, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Conv2d(6, 6, 3), nn.BatchNorm2d(6), nn.ReLU(), nn.Flatten(),
        nn.Linear(6 * 4 * 4, 4),
    )  # fmt: skip


def image_batch(data: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randn(4, 3, 8, 8, generator=data),)


class Transformer(nn.Module):
    """Two blocks, with tied input and output embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 16)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(16, 2, dim_feedforward=32, dropout=0.0, batch_first=True) for _ in range(2)
        )
        self.head = nn.Linear(16, 20, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.embed(words)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def word_batch(data: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return (torch.randint(0, 20, (4, 6), generator=data),)


class Forked(nn.Module):
    """Which parts are used depends on the rank and the step; one never is."""

    def __init__(self) -> None:
        super().__init__()
        self.shared, self.never = nn.Linear(8, 8), nn.Linear(8, 8)
        self.branches = nn.ModuleList(nn.Linear(8, 4) for _ in range(3))

    def forward(self, x: Tensor, branch: int) -> Tensor:
        return self.branches[branch](self.shared(x))


def forked_batch(data: torch.Generator, step: int, rank: int) -> tuple[Any, ...]:
    return torch.randn(8, 8, generator=data), (step + rank) % 3


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[..., tuple[Any, ...]]]] = {
    "mlp": (mlp, mlp_batch),
    "convolutional": (convolutional, image_batch),
    "transformer": (Transformer, word_batch),
    "forked": (Forked, forked_batch),
}
PLAIN: dict[str, dict[str, Any]] = {
    "plain": {},
    "views": {"gradient_as_bucket_view": True},
    "small buckets": {"bucket_cap_mb": 0.001},
    "small buckets and views": {"bucket_cap_mb": 0.001, "gradient_as_bucket_view": True},
    "static": {"static_graph": True, "bucket_cap_mb": 0.001},
}
UNUSED: dict[str, dict[str, Any]] = {
    "plain": {"find_unused_parameters": True},
    "views": {"find_unused_parameters": True, "gradient_as_bucket_view": True},
    "small buckets": {"find_unused_parameters": True, "bucket_cap_mb": 0.0005},
}


SIZES = tuple(STEPS)
NOT_ON_FOUR = ("views", "small buckets")
"""What four ranks add is the ring of more than two."""


def combinations(size: int) -> Iterator[tuple[str, str, dict[str, Any]]]:
    for model in MODELS:
        for name, flags in (UNUSED if model == "forked" else PLAIN).items():
            if size == 2 or model == "forked" or name not in NOT_ON_FOUR:
                yield model, name, flags


def train(model: nn.Module, batches: Callable[..., tuple[Any, ...]], group: Group) -> dict[str, Tensor]:
    """Some steps of SGD with momentum, written out; parameters, buffers and last gradients afterwards."""
    data = torch.Generator().manual_seed(7 + group.rank)
    momentum = [torch.zeros_like(p) for p in model.parameters()]
    for step in range(STEPS[group.size]):
        model.zero_grad()
        model(*batches(data, step, group.rank)).square().mean().backward()
        with torch.no_grad():
            for p, m in zip(model.parameters(), momentum, strict=True):
                if p.grad is not None:
                    p -= m.mul_(0.9).add_(p.grad, alpha=0.05)
    found = {name: value.detach().clone() for name, value in model.state_dict().items()}
    found |= {f"{name}.grad": p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    return found


def bases() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {name: make() for name, (make, _) in MODELS.items()}


def layout(ddp: Any) -> str:
    """The buckets in use at the end, as both classes log them."""
    data = ddp._get_ddp_logging_data()
    return f"{data.get('rebuilt_bucket_sizes', data['bucket_sizes'])} / {data.get('rebuilt_per_bucket_param_indices')}"


Trained = list[dict[Any, Any]]


def rank_main(group: Group, torch_world: Callable[..., Any]) -> dict[Any, Any]:
    """(torch's, ours, torch's buckets, our buckets) by model and flags."""
    done: dict[Any, Any] = {}
    with torch_world(group, "gloo"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for model, name, flags in combinations(group.size):
            results, wrapped = [], []
            for whose in (TorchDDP, DDP):
                wrapped.append(whose(bases()[model], **flags))
                results.append(train(wrapped[-1], MODELS[model][1], group))
            done[model, name] = (*results, *map(layout, wrapped))
    return done


@pytest.mark.usefixtures("_convolution_opened_its_file")
@pytest.mark.parametrize("size", SIZES)
def test_the_same_as_torchs_ddp(torch_world: Callable[..., Any], size: int) -> None:
    trained = run_ranks(functools.partial(rank_main, torch_world=torch_world), size, kind="gloo")
    has_the_bits_of_torchs(trained, size)
    training_moved_the_parameters_and_ranks_agree(trained)
    over_threads_within_summation_order_and_replicas_are_equal(trained, size)
    if size == 2:
        over_shared_memory_the_same_bits_and_nothing_is_copied(trained)


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> list[str]:
    """The names of what is not bitwise equal."""
    return [name for name in a.keys() | b.keys() if name not in a or name not in b or not torch.equal(a[name], b[name])]


def has_the_bits_of_torchs(trained: Trained, size: int) -> None:
    for done in trained:
        buckets = {case: (ours, torchs) for case, (_, _, torchs, ours) in done.items() if ours != torchs}
        bits = {case: names for case, (torchs, ours, _, _) in done.items() if (names := same(ours, torchs))}
        assert (buckets, bits) == ({}, {})
        assert len(done) == len(list(combinations(size)))


def training_moved_the_parameters_and_ranks_agree(trained: Trained) -> None:
    rank_0, *others = trained
    first = rank_0["mlp", "plain"][1]
    start = {f"module.{name}": value for name, value in bases()["mlp"].state_dict().items()}
    assert all(not torch.allclose(first[name], value, atol=1e-4) for name, value in start.items())
    for done in others:
        assert same(done["transformer", "plain"][1], rank_0["transformer", "plain"][1]) == []
    assert rank_0["transformer", "small buckets and views"][3].count(",") > 10


# -- threads: summation order differs from gloo's, so close is what can be asked; replicas are equal bit by bit ------------------


def over_threads_within_summation_order_and_replicas_are_equal(trained: Trained, size: int) -> None:
    for model, name, flags in combinations(size):
        base, batches = bases()[model], MODELS[model][1]

        def rank_main(
            group: Group, base: nn.Module = base, batches: Any = batches, flags: dict[str, Any] = flags
        ) -> dict[str, Tensor]:
            return train(DDP(copy.deepcopy(base), process_group=group, **flags), batches, group)

        results = run_ranks(rank_main, size)
        for rank, result in enumerate(results):
            torch.testing.assert_close(result, trained[rank][model, name][0], rtol=1e-4, atol=1e-5)
            parameters = {key: value for key, value in result.items() if "running" not in key}
            assert same(parameters, {key: results[0][key] for key in parameters}) == []


# -- shared memory: two ranks have one order of summation only, so the bits are torch's; and no gradient is copied to travel ------


ON_SHARED_MEMORY = {
    (model, name): flags
    for model, name, flags in combinations(2)
    if name in ("plain", "small buckets and views") or model == "forked"
}


def over_shared_memory() -> list[dict[Any, Any]]:
    """What was trained, and whether every bucket is in memory that all ranks can reach, on each rank."""

    def rank_main(group: Any) -> dict[Any, Any]:
        torch.set_num_threads(1)
        done: dict[Any, Any] = {}
        for (model, name), flags in ON_SHARED_MEMORY.items():
            ddp = DDP(bases()[model], process_group=group, **flags)
            found = train(ddp, MODELS[model][1], group)
            buffers = [storage.buffer for storage in ddp.replica.reducer.buckets.storages]
            done[model, name] = found, [group.in_heap(buffer) for buffer in buffers]
        return done

    return run_ranks(rank_main, 2, kind="shared_memory")


def over_shared_memory_the_same_bits_and_nothing_is_copied(trained: Trained) -> None:
    for rank, done in enumerate(over_shared_memory()):
        assert done.keys() == ON_SHARED_MEMORY.keys()
        for case, (ours, in_heap) in done.items():
            assert in_heap, case
            assert all(in_heap), case
            assert same(ours, trained[rank][case][0]) == [], case


@pytest.fixture(scope="module")
def _convolution_opened_its_file() -> None:
    """The first convolution makes oneDNN open a file that it never closes: not a leftover of the test."""
    convolutional()(torch.zeros(2, 3, 8, 8)).sum().backward()


def test_torchs_public_names_are_there(torch_world: Callable[..., Any]) -> None:
    """But for two that tell how torch's own implementation is set."""

    def rank_main(group: Group) -> tuple[set[str], list[Any]]:
        with torch_world(group, "gloo"):
            models = [whose(convolutional()) for whose in (TorchDDP, DDP)]
            missing = {name for name in dir(models[0]) if not name.startswith("_") and not hasattr(models[1], name)}
            moved = [m.to_kwargs((torch.ones(2),), {"k": 1}, 0) for m in models]
            buffers = [[[b.sum().item() for b in m.modules_buffers], list(m.named_module_buffers)] for m in models]
            return missing, [moved, buffers]

    ((missing, pairs),) = run_ranks(rank_main, 1, kind="gloo")
    assert missing <= {"bucket_bytes_cap_default", "use_side_stream_for_tensor_copies"}
    for torchs, ours in pairs:
        assert str(torchs) == str(ours)
