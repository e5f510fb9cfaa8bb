"""Hooks that keep the momentum, with their optimizers: decoupled momentum and Dion, against naive references."""

import copy
import math
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups import Group
from gradwire.hooks import BucketSpec, chain, decoupled_momentum, dion, mean
from gradwire.hooks.compressors.demo import Tiling, cosines, turned
from gradwire.optim import Dion, SignSGD
from gradwire.parallel import replicate
from gradwire.policies import Buckets
from gradwire.testing import run_ranks, simulate
from helpers.buckets import bucket, gradients, steps
from helpers.outer_training import NET, flat, loss_on


@pytest.mark.parametrize("length", [1, 2, 5, 64])
def test_the_cosines_are_an_orthonormal_basis(length: int) -> None:
    basis, _ = cosines(length, torch.float64, torch.device("cpu"))
    torch.testing.assert_close(basis @ basis.T, torch.eye(length, dtype=torch.float64))
    x = torch.randn(length, dtype=torch.float64)
    for i in range(length):
        by_hand = sum(float(x[j]) * math.cos(math.pi * (j + 0.5) * i / length) for j in range(length))
        norm = math.sqrt((1 if i == 0 else 2) / length)
        assert float((basis @ x)[i]) == pytest.approx(norm * by_hand, abs=1e-9)


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (1,), (7,), (64,), (65,), (6, 4), (13, 130), (3, 5, 2, 2), (1, 9)])
def test_tiles_cover_a_parameter(shape: tuple[int, ...]) -> None:
    tiling = Tiling.of(shape, 4, 32)
    numel = math.prod(shape)
    matrix = torch.arange(float(numel), dtype=torch.float64).view(tiling.rows, tiling.columns)
    tiles = tiling.cut(matrix)
    assert tiles.shape == (tiling.tiles, tiling.height, tiling.width)
    assert tiling.height <= 4
    assert tiling.width <= 4
    assert torch.equal(tiling.join(tiles), matrix)
    high, wide = (cosines(n, matrix.dtype, matrix.device)[0] for n in (tiling.height, tiling.width))
    back = turned(turned(tiles, wide, high), high.T, wide.T)
    torch.testing.assert_close(tiling.join(back), matrix)


def test_no_more_than_a_row_of_padding() -> None:
    tiling = Tiling.of((65, 129), 64, 32)
    assert (tiling.height, tiling.width, tiling.across) == (33, 43, (2, 3))


def test_as_in_the_paper() -> None:
    """Two ranks, a matrix of four squares and a vector of two ranges, by loops and the formula."""
    spec, ranks, s, k = bucket((6, 6), (6,)), 2, 3, 2
    hook = decoupled_momentum(decay=0.9, chunk=s, k=k)
    basis, _ = cosines(s, torch.float32, torch.device("cpu"))
    momenta = [torch.zeros(42) for _ in range(ranks)]
    blocks = [(slice(a, a + s), slice(b, b + s)) for a in (0, s) for b in (0, s)]
    done: Any = None
    for step in range(4):
        brought = gradients(ranks, 42, seed=step)
        expected = torch.zeros(42)
        for r, g in enumerate(brought):
            momenta[r] = 0.9 * momenta[r] + g
            sent = torch.zeros(42)
            matrix, out = momenta[r][:36].view(6, 6), sent[:36].view(6, 6)
            for block in blocks:
                frequencies = basis @ matrix[block] @ basis.T
                least = frequencies.abs().flatten().sort(descending=True).values[k - 1]
                out[block] = basis.T @ (frequencies * (frequencies.abs() >= least)) @ basis
            for at in (36, 39):
                frequencies = basis @ momenta[r][at : at + s]
                least = frequencies.abs().sort(descending=True).values[k - 1]
                sent[at : at + s] = basis.T @ (frequencies * (frequencies.abs() >= least))
            momenta[r] -= sent
            expected += sent / ranks
        done = simulate(hook, brought, spec=spec, states=done and done.states, step=step)
        torch.testing.assert_close(done.reduced[1].value, expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(done.states[0], momenta[0], atol=1e-5, rtol=1e-5)


def centralized_dion(net: nn.Module, steps: int, ranks: int, rank: int, mu: float, lr: float) -> None:
    """The paper's first algorithm on the mean gradient, and Lion for vectors, in one process."""
    kept: dict[str, list[Tensor]] = {}
    for step in range(steps):
        net.zero_grad()
        (sum(loss_on(net, r, step) for r in range(ranks)) / ranks).backward()  # type: ignore[union-attr]
        for name, p in net.named_parameters():
            g = p.grad
            assert g is not None
            if p.dim() == 1:
                (m,) = kept.setdefault(name, [torch.zeros_like(p)])
                p.data -= lr * torch.sign(0.95 * m + 0.05 * g)
                m.copy_(0.98 * m + 0.02 * g)
                continue
            if name not in kept:  # the hook's own start
                q = dion(rank).init(BucketSpec.of(0, [(name, p)], p))[0].q
                kept[name] = [torch.zeros_like(p), q]
            b = kept[name][0] + g
            basis = torch.linalg.qr(b @ kept[name][1])[0]
            r = b.T @ basis
            kept[name] = [b - (1 - mu) * basis @ r.T, r / r.norm(dim=0)]
            p.data -= lr * (p.shape[0] / p.shape[1]) ** 0.5 * basis @ kept[name][1].T


@pytest.mark.parametrize("rank", [1, 3])
def test_dion_on_four_ranks_is_dion_on_their_mean_gradient(rank: int) -> None:
    steps, lr = 12, 0.05

    def train(group: Group) -> Tensor:
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=dion(rank), buckets=Buckets((600,)))
        optimizer = Dion(model.parameters(), lr=lr)
        for step in range(steps):
            optimizer.zero_grad()
            loss_on(model, group.rank, step).backward()
            optimizer.step()
        replica.detach()
        return flat(model)

    alone = copy.deepcopy(NET)
    centralized_dion(alone, steps, 4, rank, 0.95, lr)
    for moved in run_ranks(train, 4):
        torch.testing.assert_close(moved, flat(alone), atol=1e-5, rtol=1e-5)
    assert float((flat(alone) - flat(NET)).abs().max()) > 0.05


def test_dion_sends_two_thin_matrices_and_keeps_ranks_apart_in_momentum_only() -> None:
    spec, hook = bucket((64, 32), (5,), (4, 3, 3)), dion(8)
    assert hook.wire_bytes(spec, 2) == 4 * (8 * (64 + 32) + 5 + 4 * (4 + 9))
    done = simulate(hook, gradients(2, spec.numel), spec=spec)
    saved = [hook.save(state, spec) for state in done.states]
    for key, alike in (("q", True), ("momentum", False)):
        assert torch.equal(*(one["p0"][key] for one in saved)) is alike
    shared = hook.shared(saved[0])
    assert torch.equal(shared["p0"]["q"], saved[1]["p0"]["q"])
    assert list(shared["p0"]) == ["q"]
    # An orthonormal direction: its singular values are at most 1, up to that of columns of R that are not orthogonal.
    values = torch.linalg.svdvals(done.reduced[0].value[: 64 * 32].view(64, 32))
    assert int((values > 1e-4).sum()) == 8
    assert float(values.square().sum()) == pytest.approx(8, rel=1e-4)
    # A matrix of rank 1 has one direction; rounding errors are none.
    thin = torch.cat([torch.outer(torch.arange(64.0), torch.ones(32)).flatten(), torch.zeros(5 + 36)])
    values = torch.linalg.svdvals(simulate(hook, [thin] * 2, spec=spec).reduced[0].value[: 64 * 32].view(64, 32))
    assert values[:2].tolist() == pytest.approx([1, 0], abs=1e-4)


def test_dion_without_its_hook_warns_once_where_there_are_several_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    def warned() -> list[str]:
        p = torch.nn.Parameter(torch.zeros(2, 2))
        optimizer = Dion([p])
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(2):
                p.grad = torch.ones(2, 2)
                optimizer.step()
        return [str(w.message) for w in caught]

    monkeypatch.setattr(Dion, "hook_ran", False)
    assert warned() == []  # alone
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert [text[:30] for text in warned()] == ["Dion makes its first step, but"]
    spec = bucket((5,))
    simulate(dion(2), gradients(2, spec.numel), spec=spec)  # no matrix
    assert len(warned()) == 1
    spec = bucket((4, 4))
    simulate(dion(2), gradients(2, spec.numel), spec=spec)
    assert warned() == []


def test_a_group_of_dion_may_be_left_to_lion() -> None:
    p = torch.nn.Parameter(torch.zeros(2, 2))
    p.grad = torch.tensor([[0.1, -3.0], [0.0, math.nan]])
    optimizer = Dion([{"params": [p], "algorithm": "lion"}], lr=0.5)
    optimizer.step()
    torch.testing.assert_close(p.data, torch.tensor([[-0.5, 0.5], [0.0, math.nan]]), equal_nan=True)
    with pytest.raises(UsageError, match=r"Dion\(algorithm='muon'\): unknown. Pass 'dion' or 'lion'"):
        Dion([p], algorithm="muon")
    with pytest.raises(UsageError, match=r"Dion\(lr=-1\): negative"):
        Dion([p], lr=-1)


def test_what_is_on_the_wire() -> None:
    spec = bucket((128, 128), (64,), (10,))
    done = simulate(decoupled_momentum(), gradients(3, spec.numel), spec=spec)
    assert done.wire_bytes == 2 * (4 * 32 + 32 + 10) * (2 + 4)
    done = simulate(decoupled_momentum(values=torch.bfloat16), gradients(3, spec.numel), spec=spec)
    assert done.wire_bytes == 2 * (4 * 32 + 32 + 10) * (2 + 2)
    done = simulate(decoupled_momentum(chunk=182, k=5), gradients(3, spec.numel), spec=spec)
    assert done.wire_bytes == 2 * 15 * (4 + 4)


def test_nothing_is_lost() -> None:
    """Sent and kept make up the momentum: with hardly any decay, all gradients so far."""
    spec = bucket((10, 7), (5,))
    hook = decoupled_momentum(decay=0.999999, chunk=4, k=2, values=torch.bfloat16)
    brought = [gradients(1, 75, seed=step) for step in range(20)]
    done = list(steps(hook, brought.__getitem__, 20, spec=spec))
    sent, total = sum(one.reduced[0].sent for one in done), sum(g for (g,) in brought)
    torch.testing.assert_close(sent + done[-1].states[0], total, atol=1e-3, rtol=0)
    assert float(done[-1].states[0].norm()) < 0.8 * float(total.norm())


def test_strides_of_channels_last_are_followed() -> None:
    plain = bucket((4, 3, 2, 2))
    weight = torch.randn(4, 3, 2, 2)
    last = weight.to(memory_format=torch.channels_last)
    strided = BucketSpec(0, ("p0",), ((4, 3, 2, 2),), (last.stride(),), torch.float32, torch.device("cpu"))
    hook = decoupled_momentum(chunk=4, k=2)
    one = simulate(hook, [weight.flatten()], spec=plain).reduced[0].value
    two = simulate(hook, [last.permute(0, 2, 3, 1).flatten()], spec=strided).reduced[0].value
    torch.testing.assert_close(strided.views(two)[0], plain.views(one)[0])


def test_nan_shows_in_its_chunk_and_nowhere_else() -> None:
    brought = torch.ones(8)
    brought[1] = float("nan")
    value = simulate(decoupled_momentum(chunk=4, k=2), [brought, torch.ones(8)]).reduced[0].value
    assert torch.isnan(value[:4]).all()
    assert torch.isfinite(value[4:]).all()


@pytest.mark.parametrize("values", [None, torch.bfloat16])
def test_frequencies_of_float16_gradients_do_not_overflow_on_the_wire(values: torch.dtype | None) -> None:
    """The mean frequency of 64 x 64 equal elements is 64 times as large as they are."""
    grad = torch.full((64 * 64,), 3000.0, dtype=torch.float16)
    spec = BucketSpec(0, ("w",), ((64, 64),), ((64, 1),), torch.float16, torch.device("cpu"))
    done = simulate(decoupled_momentum(k=1, values=values), [grad, grad], spec=spec)
    torch.testing.assert_close(done.reduced[0].value.float(), grad.float(), rtol=1e-2, atol=0)
    assert done.wire_bytes == decoupled_momentum(k=1, values=values).wire_bytes(spec, 2)


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: decoupled_momentum(chunk=4, k=17), "only 16 frequencies"),
        (lambda: decoupled_momentum(values=torch.int8), "`values` must be None or torch.float32 or torch.bfloat16"),
        (lambda: chain(decoupled_momentum(), mean()), "an all-reduce needs every element"),
        (lambda: simulate(decoupled_momentum(), [torch.ones(3) * 1j]), r"its gradients are complex.*partition"),
    ],
)
def test_refused(build: Any, words: str) -> None:
    with pytest.raises((UsageError, UsageTypeError), match=words):
        build()


def parameter(value: Tensor, grad: Tensor | None) -> torch.nn.Parameter:
    p = torch.nn.Parameter(value.clone())
    p.grad = grad
    return p


def test_sign_sgd_steps_by_the_sign() -> None:
    p = parameter(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-0.1, 0.0, 100.0]))
    untouched = parameter(torch.ones(1), None)
    SignSGD([p, untouched], lr=0.5).step()
    assert p.tolist() == [1.5, 2.0, 2.5]
    assert untouched.item() == 1.0


def test_sign_sgd_decays_weights() -> None:
    p = parameter(torch.tensor([1.0, 2.0]), torch.tensor([1.0, 0.0]))
    SignSGD([{"params": [p], "weight_decay": 0.5}], lr=0.1).step()
    torch.testing.assert_close(p.data, torch.tensor([0.85, 1.9]))


def test_sign_sgd_does_not_hide_nan() -> None:
    p = parameter(torch.ones(2), torch.tensor([float("nan"), 1.0]))
    SignSGD([p], lr=0.5).step()
    assert torch.isnan(p[0])
    assert p[1] == 0.5


def test_sign_sgd_calls_its_closure_and_saves() -> None:
    p = parameter(torch.tensor([4.0]), None)
    optimizer = SignSGD([p], lr=1.0)

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = (p * p).sum()
        loss.backward()
        return loss

    assert optimizer.step(closure).item() == 16.0
    assert p.item() == 3.0
    again = SignSGD([p], lr=7.0)
    again.load_state_dict(optimizer.state_dict())
    assert again.param_groups[0]["lr"] == 1.0


def test_sign_sgd_refuses() -> None:
    with pytest.raises(UsageError, match="lr=-1"):
        SignSGD([parameter(torch.ones(1), None)], lr=-1)
    with pytest.raises(UsageError, match="weight_decay=nan"):
        SignSGD([parameter(torch.ones(1), None)], weight_decay=float("nan"))
    with pytest.raises(UsageError, match="its gradient is sparse"):
        SignSGD([parameter(torch.ones(3, 3), torch.eye(3).to_sparse(1))]).step()
    with pytest.raises(UsageError, match="its gradient is complex"):
        SignSGD([parameter(torch.ones(3) * 1j, torch.ones(3) * 1j)]).step()


def test_the_two_halves_train_together() -> None:
    """A least-squares problem, each rank with rows of its own."""
    generator = torch.Generator().manual_seed(0)
    truth = torch.randn(8, 8, generator=generator)
    inputs = [torch.randn(64, 8, generator=generator) for _ in range(2)]
    weight = torch.nn.Parameter(torch.zeros(8, 8))
    optimizer = SignSGD([weight], lr=0.05)
    hook, spec = decoupled_momentum(decay=0.9, chunk=8, k=8), bucket((8, 8))
    states: Any = None
    losses = []
    for step in range(150):
        optimizer.param_groups[0]["lr"] = 0.05 * (1 - step / 150)
        errors = [x @ (weight.detach() - truth) for x in inputs]
        losses.append(sum(float(e.square().mean()) for e in errors))
        brought = [(x.T @ e / 64).flatten() for x, e in zip(inputs, errors, strict=True)]
        done = simulate(hook, brought, spec=spec, states=states, step=step)
        states = done.states
        weight.grad = done.reduced[0].value.view(8, 8)
        optimizer.step()
    assert losses[-1] < 0.02 * losses[0]
