"""local_sgd, post_local_sgd, diloco, streaming_diloco and gossip on simulated ranks: the laws of outer steps, and arithmetic."""

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from gradwire import hooks
from gradwire.errors import HookError, UsageError
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import Turn, diloco, error_feedback, gossip, local_sgd, mean, post_local_sgd, streaming_diloco
from gradwire.parallel import replicate
from gradwire.reducer.hook.outer_optimizer import cut
from gradwire.testing import check_hook, run_ranks, simulate, simulate_outer
from helpers.buckets import bucket, gradients as parameters
from helpers.outer_training import NET, flat, loss_on
from helpers.through_file import through_file

NARROW = hooks.chain(error_feedback(), hooks.cast(torch.bfloat16), mean())
EQUALISING = {
    "local_sgd": local_sgd(every=4),
    "post_local_sgd": post_local_sgd(start=3, every=4),
    "diloco": diloco(every=4),
    "diloco, plain momentum": diloco(every=4, nesterov=False, outer_lr=0.5),
    "diloco, no momentum": diloco(every=4, outer_momentum=0.0),
    "diloco, compressed": diloco(every=4, hook=NARROW),
    "sparse_loco": hooks.sparse_loco(every=4, k=3, chunk=5),
    "streaming": streaming_diloco(every=4, fragments=2),
}
GOSSIP = {"ring": gossip(), "random": gossip(topology="random", seed=3)}
ALL = EQUALISING | GOSSIP | {"streaming, mixed": streaming_diloco(every=4, fragments=2, delay=1, alpha=0.5)}


def average(values: Any) -> Tensor:
    return torch.stack([v.double() for v in values]).mean(0)


@pytest.mark.parametrize("name", ALL)
def test_reduce_obeys_the_laws_and_leaves_gradients_unchanged(name: str) -> None:
    hook = ALL[name]
    check_hook(hook)
    assert hook.local
    brought = parameters(3, 13)
    done = simulate(hook, brought, step=3)
    assert done.exchanges == ()
    for (value, sent), grad in zip(done.reduced, brought, strict=True):
        assert torch.equal(value, grad)
        assert torch.equal(sent, grad)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("name", EQUALISING)
@pytest.mark.parametrize("ranks", [1, 2, 3])
def test_after_an_outer_step_all_ranks_hold_the_same_bits(name: str, ranks: int, dtype: torch.dtype) -> None:
    hook, states = EQUALISING[name], None
    start = parameters(1, 13, dtype=dtype, seed=9)[0]
    for step in range(3):
        went = [start + way * 0.1 for way in parameters(ranks, 13, dtype=dtype, seed=step)]
        done = simulate_outer(hook, went, start=start, states=states, step=step)
        states, start = done.states, done.parameters[0]
        for other in done.parameters:
            assert other.dtype == dtype
            assert torch.equal(other, start)
        spec = bucket((13,), dtype=dtype)
        assert math.isclose(done.wire_bytes, hook.outer_wire_bytes(spec, ranks) or 0.0)


def test_sparse_loco_as_in_the_paper() -> None:
    """Three ranks, chunks of ten, two of each: the sum that decays, two bits of its largest, SGD along their mean."""
    hook, beta, lr = hooks.sparse_loco(outer_lr=0.5, decay=0.9, k=2, chunk=10), 0.9, 0.5
    anchor = parameters(1, 20, seed=9)[0]
    start, states, kept = anchor.clone(), None, [torch.zeros(20) for _ in range(3)]
    for step in range(4):
        went = [anchor + 0.1 * way for way in parameters(3, 20, seed=step)]
        mean_sent = torch.zeros(20)
        for r in range(3):
            kept[r] = beta * kept[r] + (anchor - went[r])
            sent = torch.zeros(20)
            for at in (0, 10):
                largest = at + kept[r][at : at + 10].abs().topk(2).indices
                # Of two magnitudes one is above the mean, so each is a level of its own.
                sent[largest] = kept[r][largest].bfloat16().float()
            kept[r] -= sent
            mean_sent += sent / 3
        anchor = anchor - lr * mean_sent
        done = simulate_outer(hook, went, start=start, states=states, step=step)
        states = done.states
        torch.testing.assert_close(done.parameters[2], anchor)
        torch.testing.assert_close(states[1].inner["residual"], kept[1])
        assert done.wire_bytes == hook.outer_wire_bytes(bucket((20,)), 3) == 2 * 2 * (4 + 2)


def test_visible_sends_what_changes_the_bfloat16_value_and_keeps_the_rest() -> None:
    inner = hooks.chain(error_feedback(), hooks.visible(torch.bfloat16), hooks.threshold(value=0.0))
    hook = diloco(every=2, outer_lr=1.0, outer_momentum=0.0, hook=inner)
    # Below 1 the numbers of bfloat16 are 2^-8 apart: 0.001 is less than half of that, and 0.002 is more.
    start, way = torch.tensor([1.0, 1.0, 0.0, 2.0]), torch.tensor([-0.001, 2**-7, 1e-30, 0.0])
    first = simulate_outer(hook, [start + way] * 2, start=start)
    torch.testing.assert_close(first.parameters[1], torch.tensor([1.0, 1 + 2**-7, 1e-30, 2.0]), rtol=0, atol=0)
    assert first.wire_bytes == 8 + 2 * 8
    torch.testing.assert_close(first.states[0].inner["residual"], torch.tensor([0.001, 0, 0, 0]))
    second = simulate_outer(hook, [first.parameters[0] + way] * 2, states=first.states, step=1)
    torch.testing.assert_close(second.parameters[1], torch.tensor([0.998, 1 + 2**-6, 2e-30, 2.0]))
    assert second.wire_bytes == 8 + 3 * 8
    assert second.states[0].inner["residual"].tolist() == [0.0] * 4


def test_muloco_is_diloco_with_muon_inside() -> None:
    def train(group: Group) -> tuple[list[float], list[Tensor]]:
        model = copy.deepcopy(NET)
        replica = replicate(model, group=group, hook=diloco(every=4))
        matrices, others = ([p for p in model.parameters() if (p.dim() > 1) is two] for two in (True, False))
        optimizers = torch.optim.Muon(matrices, lr=0.02), torch.optim.AdamW(others, lr=1e-3)
        replica.attach_optimizer(*optimizers)
        losses, seen = [], []
        for step in range(24):
            model.zero_grad()
            loss = loss_on(model, group.rank, step)
            loss.backward()
            for optimizer in optimizers:
                optimizer.step()
            losses.append(float(loss.detach()))
            seen.append(flat(model))
        replica.detach()
        return losses, seen[2:4]

    (losses, (apart, equal)), (_, (other, same)) = run_ranks(train, 2)
    assert not torch.equal(apart, other)
    assert torch.equal(equal, same)
    assert sum(losses[-4:]) < 0.7 * sum(losses[:4])


def test_visible_belongs_inside_diloco() -> None:
    inner = hooks.chain(hooks.visible(torch.bfloat16), mean())
    with ThreadGroup.world(1)[0] as group, pytest.raises(UsageError, match=r"no progress. Use diloco\(hook=...\)"):
        replicate(torch.nn.Linear(1, 1), group=group, hook=inner)
    with pytest.raises(UsageError, match=r"not known here. Use it in the hook of diloco"):
        simulate_outer(diloco(every=1, hook=hooks.chain(hooks.random_k(0.5), inner)), parameters(2, 4))
    with pytest.raises(UsageError, match=r"visible\(torch.int8\): not a floating-point dtype"):
        hooks.visible(torch.int8)


def test_repr_of_sparse_loco_is_its_call() -> None:
    hook = hooks.sparse_loco(every=5)
    assert repr(hook) == "sparse_loco(every=5, outer_lr=1.0, decay=0.95, k=64, chunk=4096)"
    assert eval(repr(hook), vars(hooks)) == hook


def test_a_message_of_sparse_loco_is_141_times_smaller_than_diloco() -> None:
    spec, sparse, dense = bucket((4096, 100)), hooks.sparse_loco(), diloco(every=30)
    assert spec.nbytes / (sparse.outer_wire_bytes(spec, 2) or 0) == pytest.approx(141.2, abs=0.1)
    fewer = (dense.outer_wire_bytes(spec, 8) or 0) / (sparse.outer_wire_bytes(spec, 8) or 0)
    assert fewer == pytest.approx(35.3, abs=0.1)


@pytest.mark.parametrize("name", GOSSIP)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
def test_gossip_preserves_the_mean_and_approaches_consensus(name: str, ranks: int) -> None:
    hook, now = GOSSIP[name], parameters(ranks, 13, dtype=torch.float64)
    kept = average(now)
    spread = [max(float((p - kept).abs().max()) for p in now)]
    for step in range(60):
        done = simulate_outer(hook, now, step=step)
        now = list(done.parameters)
        torch.testing.assert_close(average(now), kept, rtol=0, atol=1e-12)
        spread.append(max(float((p - kept).abs().max()) for p in now))
        assert done.wire_bytes <= min(ranks - 1, 2) * 13 * 8
    assert spread[-1] <= 1e-3 * spread[0]


@pytest.mark.parametrize("name", GOSSIP)
@pytest.mark.parametrize("ranks", [2, 3, 4, 5, 8])
def test_the_mixing_matrix_is_doubly_stochastic(name: str, ranks: int) -> None:
    for step in range(4):
        ones = [torch.eye(ranks, dtype=torch.float64)[r].clone() for r in range(ranks)]
        rows = torch.stack(simulate_outer(GOSSIP[name], ones, step=step).parameters)
        torch.testing.assert_close(rows.sum(0), torch.ones(ranks).double())
        torch.testing.assert_close(rows.sum(1), torch.ones(ranks).double())
        assert bool((rows >= 0).all())
        torch.testing.assert_close(rows, rows.T)


def test_gossip_sends_to_neighbors_only_and_draws_new_pairs_each_time() -> None:
    done = simulate_outer(gossip(), parameters(5, 13))
    assert done.exchanges[0].sent == (2 * 13 * 4,) * 5
    spec = bucket((1,), index=7)
    hook = GOSSIP["random"]
    pairs = []
    for step in range(6):
        mates = [hook.neighbors(Turn(spec, rank, 4, step)) for rank in range(4)]  # type: ignore[attr-defined]
        assert all(mates[mates[rank][0]] == [rank] for rank in range(4))
        pairs.append(str(mates))
    assert len(set(pairs)) > 1
    alone = [hook.neighbors(Turn(spec, rank, 5, 0)) for rank in range(5)]  # type: ignore[attr-defined]
    assert sum(not mates for mates in alone) == 1


@pytest.mark.parametrize("name", ALL)
def test_empty_buckets_zeros_and_non_finite_values(name: str) -> None:
    hook = ALL[name]
    assert simulate_outer(hook, parameters(3, 0)).parameters[0].numel() == 0
    zeros = simulate_outer(hook, [torch.zeros(4)] * 3).parameters
    assert torch.stack(zeros).tolist() == [[0.0] * 4] * 3
    bad = simulate_outer(hook, [torch.tensor([math.nan, 1.0]), *[torch.ones(2)] * 2]).parameters
    assert any(not math.isfinite(p[0]) for p in bad)
    assert all(math.isfinite(p[1]) for p in bad) or name == "sparse_loco"  # two bits: all that the chunk sends


@pytest.mark.parametrize("nesterov", [False, True])
def test_diloco_is_torchs_sgd_on_the_mean_progress(nesterov: bool) -> None:
    hook = diloco(every=2, outer_lr=0.6, outer_momentum=0.8, nesterov=nesterov)
    theirs = torch.zeros(13, requires_grad=True)
    optimizer = torch.optim.SGD([theirs], lr=0.6, momentum=0.8, nesterov=nesterov)
    states, now = None, torch.zeros(13)
    for step in range(4):
        went = [now + way for way in parameters(3, 13, seed=step)]
        done = simulate_outer(hook, went, states=states, step=step)
        theirs.grad = (theirs - average(went).float()).detach()
        optimizer.step()
        states, now = done.states, done.parameters[0]
        torch.testing.assert_close(now, theirs.detach())


def test_diloco_with_a_plain_outer_step_is_local_sgd() -> None:
    went = parameters(3, 13)
    plain = simulate_outer(diloco(every=1, outer_lr=1.0, outer_momentum=0.0), went).parameters[0]
    torch.testing.assert_close(plain, simulate_outer(local_sgd(every=1), went).parameters[0])


def test_the_inner_hook_compresses_the_progress() -> None:
    went = parameters(2, 13)
    plain, narrow = (simulate_outer(diloco(every=1, hook=h), went) for h in (mean(), NARROW))
    assert narrow.wire_bytes == plain.wire_bytes / 2
    assert not torch.equal(narrow.parameters[0], plain.parameters[0])
    torch.testing.assert_close(narrow.parameters[0], plain.parameters[0], rtol=0.02, atol=0.02)


def test_a_narrow_model_has_a_wide_anchor() -> None:
    """Small progress would be lost in bfloat16: 1 + 0.001 is 1 there."""
    hook = diloco(every=1, outer_lr=0.25, outer_momentum=0.0)
    states, now = None, torch.ones(1, dtype=torch.bfloat16)
    for step in range(8):
        done = simulate_outer(hook, [now + 0.0078125] * 2, start=now, states=states, step=step)
        states, now = done.states, done.parameters[0]
    assert now.item() > 1.0


def test_streaming_mixes_in_the_ranks_own_parameters() -> None:
    hook = streaming_diloco(every=2, fragments=1, alpha=0.25, outer_lr=1.0, outer_momentum=0.0)
    done = simulate_outer(hook, [torch.tensor([0.0]), torch.tensor([8.0])])
    assert [p.item() for p in done.parameters] == [0.75 * 4, 0.75 * 4 + 0.25 * 8]


def due(hook: hooks.OuterHook, steps: int) -> list[tuple[int, ...]]:
    return [hook.due(step) for step in range(1, steps + 1)]


def test_when_outer_steps_are_due() -> None:
    assert due(local_sgd(every=2), 4) == [(), (0,), (), (0,)]
    assert due(post_local_sgd(start=2, every=2), 6) == [(), (), (), (0,), (), (0,)]
    assert due(post_local_sgd(start=0, every=1), 2) == [(0,), (0,)]
    assert due(streaming_diloco(every=4, fragments=4), 5) == [(1,), (2,), (3,), (0,), (1,)]
    assert due(streaming_diloco(every=5, fragments=2), 7) == [(), (1,), (), (), (0,), (), (1,)]


def test_post_local_sgd_averages_gradients_at_first() -> None:
    hook, brought = post_local_sgd(start=2, every=2), parameters(2, 13)
    for step in range(2):
        torch.testing.assert_close(simulate(hook, brought, step=step).reduced[0].value, average(brought).float())
    assert torch.equal(simulate(hook, brought, step=2).reduced[1].value, brought[1])


def test_parameters_are_split_into_fragments_of_about_the_same_size() -> None:
    named = [(f"p{i}", torch.zeros(10)) for i in range(8)] + [("half", torch.zeros(6, dtype=torch.float16))]
    pieces = cut(named, 4)
    assert [(f, spec.names) for f, spec, _ in pieces] == [
        (0, ("p0", "p1")),
        (1, ("p2", "p3")),
        (2, ("p4", "p5")),
        (3, ("p6", "p7")),
        (2, ("half",)),
    ]
    assert [spec.index for _, spec, _ in pieces] == [0, 1, 2, 3, 4]
    small = cut(named[:8], 1, limit=80)
    assert [(f, spec.names) for f, spec, _ in small] == [(0, (f"p{i}", f"p{i + 1}")) for i in range(0, 8, 2)]


TWO = bucket((4,), (3, 3), names="ab")


@pytest.mark.parametrize("hook", [diloco(every=2), diloco(every=2, hook=NARROW)], ids=repr)
def test_anchor_and_momentum_go_through_a_file_and_other_buckets(hook: hooks.OuterHook) -> None:
    spec, went = TWO, parameters(2, 13)
    before = simulate_outer(hook, went, spec=spec)
    loaded = []
    for rank, saved in enumerate(through_file([hook.save(state, spec) for state in before.states])):
        apart: dict[str, Any] = {}
        for part in (bucket((3, 3), names="b"), bucket((4,), names="a")):
            state = hook.load(saved, part)
            apart |= hook.save(state, part)
        state = hook.load(apart, spec)
        hook.begin(torch.full((13,), 77.0), state, Turn(spec, rank, 2))
        loaded.append(state)
    moved = [p + 1 + r for r, p in enumerate(before.parameters)]
    again = simulate_outer(hook, moved, spec=spec, states=loaded, step=1)
    went_on = simulate_outer(hook, moved, spec=spec, states=before.states, step=1)
    assert torch.equal(again.parameters[0], went_on.parameters[0])


def test_a_new_parameter_is_its_own_anchor_and_a_new_rank_shares_the_anchor() -> None:
    hook, spec = diloco(every=2, hook=NARROW), TWO
    state = simulate_outer(hook, parameters(1, 13), spec=spec).states[0]
    saved = hook.save(state, spec)
    assert set(saved["a"]) == {"anchor", "momentum", "inner"}
    assert {key for parts in hook.shared(saved).values() for key in parts} == {"anchor", "momentum"}
    fresh = hook.load({"a": saved["a"]}, spec)
    hook.begin(torch.full((13,), 7.0), fresh, Turn(spec, 0, 1))
    assert torch.equal(fresh.anchor[:4], saved["a"]["anchor"])
    assert fresh.anchor[4:].tolist() == [7.0] * 9
    assert fresh.momentum[4:].tolist() == [0.0] * 9


@pytest.mark.parametrize(
    ("build", "words"),
    [
        (lambda: diloco(every=2, hook=local_sgd(every=2)), "it communicates nothing"),
        (lambda: streaming_diloco(every=2, fragments=3), "some steps would have several of them"),
        (
            lambda: streaming_diloco(every=2, fragments=1, delay=2),
            r"delay=2\): it must be applied before the next is sent",
        ),
        (lambda: gossip(topology="star"), r"topology='star'\): `topology` must be 'ring' or 'random'"),
        (lambda: diloco(every=2, hook=hooks.cast(torch.bfloat16)), "is a stage"),  # type: ignore[arg-type]
        (lambda: hooks.chain(error_feedback(), local_sgd(every=2)), "leaves gradients on their rank"),
    ],
)
def test_invalid_settings_are_refused_when_built(build: Any, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build()


def test_an_inner_hook_that_breaks_its_contract_is_named() -> None:
    class Short(hooks.CommHook):
        def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Any:
            return grad
            yield

    with pytest.raises(HookError, match="not Reduced"):
        simulate_outer(diloco(every=1, hook=Short()), parameters(2, 13))
