"""`HookedGroup` on threads: what the hook reduces, what passes, and whose state is whose."""

import threading
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from gradwire.collectives import ReduceOp, all_reduce
from gradwire.errors import CollectiveTimeout, GroupAborted, UsageError, UsageTypeError
from gradwire.groups import Group, Recording, ThreadGroup
from gradwire.hooks import (
    CommHook,
    Reduced,
    Reduction,
    Turn,
    cast,
    chain,
    dion,
    error_feedback,
    local_sgd,
    mean,
    partition,
    power_sgd,
    quantize,
    sparse_loco,
    top_k,
)
from gradwire.interop import HookedGroup, register_backend
from gradwire.testing import run_ranks
from helpers.comm_hooks import Scripted

Q8 = quantize(bits=8)
HALF = top_k(ratio=0.5)


class _InBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, call: Callable[[], object]) -> Tensor:
        ctx.call = call
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        ctx.call()
        return grad, None


def in_backward(call: Callable[[], object]) -> None:
    _InBackward.apply(torch.ones(1, requires_grad=True), call).backward()  # type: ignore[no-untyped-call]


def reduced_in_backward(group: Group, tensors: Sequence[Tensor], **how: Any) -> list[list[float]]:
    in_backward(lambda: [group.all_reduce(t, **how) for t in tensors])
    return [t.tolist() for t in tensors]


def hooked(hook: CommHook) -> Callable[[Group], Group]:
    return lambda group: HookedGroup(group, hook)


def recorded(hook: CommHook) -> Callable[[Group], Group]:
    return lambda group: HookedGroup(Recording(group), hook)


def kinds_of(group: Any) -> list[str]:
    return [s.kind.value for s in group.inner.submitted]


# -- what is a gradient ----------------------------------------------------------------------------------------------------


def test_sums_and_averages_of_floats_in_a_backward_are_gradients_and_nothing_else_is():
    def rank_main(group: Any) -> None:
        def once(call: Callable[[], Any]) -> list[str]:
            before = len(kinds_of(group))
            call()
            return kinds_of(group)[before:]

        def sum_of(t: Tensor, **how: Any) -> Callable[[], Any]:
            return lambda: group.all_reduce(t, **how)

        gradient = ["all_to_all_single", "all_gather_into_tensor"]
        for dtype in (torch.float32, torch.bfloat16, torch.float64):
            for how in ({}, {"op": ReduceOp.AVG}, {"op": ReduceOp.PREMUL_SUM, "factor": 0.5}):
                assert once(lambda d=dtype, h=how: in_backward(sum_of(torch.ones(9, dtype=d), **h))) == gradient
                assert once(sum_of(torch.ones(9, dtype=dtype), **how)) == ["all_reduce"]
        for op in (ReduceOp.MAX, ReduceOp.MIN, ReduceOp.PRODUCT):
            assert once(lambda o=op: in_backward(sum_of(torch.ones(9), op=o))) == ["all_reduce"]
        for other in (torch.ones(9, dtype=torch.int64), torch.ones(3, dtype=torch.complex64), torch.ones(0)):
            assert once(lambda t=other: in_backward(sum_of(t))) == ["all_reduce"]
        assert once(lambda: in_backward(lambda: group.broadcast(torch.ones(9), src=0))) == ["broadcast"]
        assert once(lambda: in_backward(lambda: group.barrier())) == ["barrier"]

    run_ranks(rank_main, 2, kind="threads", wrap=recorded(Q8))


def test_the_divisor_is_the_callers():
    """Twice the same values: what eight bits can represent exactly."""

    def rank_main(group: Group) -> list[Any]:
        mine = 127.0 * (group.rank + 1)
        how: list[dict[str, Any]] = [{}, {"op": ReduceOp.AVG}, {"op": ReduceOp.PREMUL_SUM, "factor": 1 / 3}]
        return [reduced_in_backward(group, [torch.full((2, 3), mine)], **h)[0][1][2] for h in how]

    for total, average, scaled in run_ranks(rank_main, 3, kind="threads", wrap=hooked(Q8)):
        assert (total, average) == (6 * 127.0, 2 * 127.0)
        assert scaled == pytest.approx(2 * 127.0, rel=1e-6)


@pytest.mark.parametrize("hook", [Q8, power_sgd(rank=1, batched=True, min_compression=1.0)])
def test_what_is_reduced_and_scattered_is_a_gradient_too(hook: CommHook):
    """Whether the hook can scatter or not. The input stays as it was."""

    def rank_main(group: Any) -> Any:
        whole, mine = torch.full((2, 8), 127.0 * (group.rank + 1)), torch.empty(1, 8)
        for op in (ReduceOp.SUM, ReduceOp.AVG):
            in_backward(lambda op=op: group.reduce_scatter_tensor(mine, whole, op=op))
            torch.testing.assert_close(
                mine, torch.full((1, 8), 127.0 * (3 if op is ReduceOp.SUM else 1.5)), rtol=1e-2, atol=0
            )
        assert torch.equal(whole, torch.full((2, 8), 127.0 * (group.rank + 1)))
        return "reduce_scatter_tensor" in kinds_of(group)

    assert run_ranks(rank_main, 2, kind="threads", wrap=recorded(hook)) == [False] * 2


def test_a_tensor_with_gaps_is_reduced_in_place():
    def rank_main(group: Group) -> Any:
        whole = torch.full((4, 6), 127.0 * group.rank)
        reduced_in_backward(group, [whole[:, ::2]])
        return whole.tolist()

    row = [127.0, 0.0] * 3, [127.0, 127.0] * 3
    assert run_ranks(rank_main, 2, kind="threads", wrap=hooked(Q8)) == [[row[0]] * 4, [row[1]] * 4]


def test_with_the_mean_everything_passes():
    """Bit for bit: not a mean times the number of ranks."""

    def rank_main(group: Any) -> Any:
        third = torch.tensor([0.1, 1e-40, 3.3e38 / 4]) * (group.rank + 1)
        return reduced_in_backward(group, [third]), kinds_of(group)

    plain = torch.tensor([0.1, 1e-40, 3.3e38 / 4])
    expected = (plain + plain * 2) + plain * 3
    for (values,), kinds in run_ranks(rank_main, 3, kind="threads", wrap=recorded(mean())):
        assert values == expected.tolist()
        assert kinds == ["all_reduce"]


def test_operations_keep_their_order_behind_a_hook_that_is_at_work():
    """Asynchronous, all at once: a gradient, then others; each rank has the right results."""

    def rank_main(group: Group) -> list[float]:
        gradient, loss, flag = torch.full((100_000,), 127.0), torch.tensor([1.0]), torch.tensor([group.rank])
        works = []
        in_backward(lambda: works.append(group.all_reduce(gradient, async_op=True)))
        works.append(group.all_reduce(loss, async_op=True))
        works.append(group.all_reduce(flag, op=ReduceOp.MAX, async_op=True))
        for work in reversed(works):
            assert work.wait()
        return [gradient[-1].item(), loss.item(), flag.item()]

    assert run_ranks(rank_main, 3, kind="threads", wrap=hooked(Q8)) == [[381.0, 3.0, 2.0]] * 3


# -- whose state it is -----------------------------------------------------------------------------------------------------


def state_names(group: Any) -> list[str]:
    return sorted(name.partition(" elements")[0] for name in group.hook_state_dict()["state"])


def owed(group: Any) -> dict[str, float]:
    state = group.hook_state_dict()["state"]
    return {name.partition(" elements")[0]: round(parts["residual"].sum().item(), 3) for name, parts in state.items()}


def test_a_gradient_keeps_its_residual_by_its_place():
    """Half of each gradient is sent in a step, and the other half in the next one."""

    def rank_main(group: Any) -> Any:
        for step in range(4):
            for _ in range(1 + step % 2):  # several backwards in a step
                a, b = torch.tensor([3.0, 1.0]), torch.tensor([30.0, 10.0])
                reduced_in_backward(group, [a, b], op=ReduceOp.AVG)
        return a.tolist(), b.tolist(), owed(group), group.hook_state_dict()["step"]

    for a, b, left, steps in run_ranks(rank_main, 2, kind="threads", wrap=hooked(chain(error_feedback(), HALF))):
        assert steps == 6
        assert [10 * x for x in a] == b
        assert left["gradient 1 of 2"] == 10 * left["gradient 0 of 2"]


def test_re_entrant_backwards_are_parts_of_one():
    """A checkpoint that runs a backward inside the backward: its reductions are in graph tasks of their own."""

    def rank_main(group: Any) -> list[str]:
        def block(x: Tensor) -> Any:
            return _InBackward.apply(x, lambda: group.all_reduce(torch.ones(4)))  # type: ignore[no-untyped-call]

        for _ in range(3):
            x = torch.ones(1, requires_grad=True)
            for _ in range(3):
                x = checkpoint(block, x, use_reentrant=True)
            x.sum().backward()
        assert group.hook_state_dict()["step"] == 3
        return state_names(group)

    expected = [f"gradient {i} of 4" for i in range(3)]
    assert run_ranks(rank_main, 2, kind="threads", wrap=hooked(chain(error_feedback(), Q8))) == [expected] * 2


def test_two_models_that_take_turns_have_states_of_their_own():
    def rank_main(group: Any) -> list[str]:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for _ in range(3):
                for sizes in ((4, 5), (5, 4, 4)):
                    reduced_in_backward(group, [torch.ones(n) for n in sizes])
        return state_names(group)

    wrap = hooked(chain(error_feedback(), Q8))
    expected = [f"gradient {i} of {n}" for i, n in enumerate((4, 5, 5, 4, 4))]
    assert run_ranks(rank_main, 2, kind="threads", wrap=wrap) == [expected] * 2


def test_a_backward_that_departs_is_reported_once_and_learned_when_it_recurs():
    def rank_main(group: Any) -> Any:
        said, names = [], []
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for sizes in [(4, 5, 6)] * 4 + [(4, 6, 6), (4, 5, 6)] * 3 + [(4, 5)]:
                reduced_in_backward(group, [torch.ones(n) for n in sizes])
                names.append(state_names(group))
                said.append(len(caught))
        return said, names, str(caught[0].message)

    for said, names, text in run_ranks(rank_main, 1, kind="threads", wrap=hooked(chain(error_feedback(), Q8))):
        assert said == [0] * 4 + [1] * 7
        assert "number 2 of this one, of 6 elements in float32, is new" in text
        learned = ["gradient 0 of 4", "gradient 1 of 5", "gradient 2 of 6"]
        assert names[3] == learned
        assert (
            names[4] == names[7] == [*learned, "gradient 3 of 6", "gradient 4 of 6"]
        )  # by length, but not one for both
        assert names[-1] == [*names[4], "gradient 5 of 6", "gradient 6 of 6"]  # in their places


def test_many_models_that_take_turns_never_share_a_state_in_one_backward():
    """Layers of one model of very different gradients: what is owed of the large one must not reach the small one."""

    def rank_main(group: Any) -> list[float]:
        total = torch.zeros(8)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            for step in range(12):
                for model in range(6):
                    g = torch.Generator().manual_seed(100 * step + model)
                    large, small = 1000 * torch.randn(8, generator=g), torch.randn(8, generator=g)
                    exact = small.clone()
                    reduced_in_backward(group, [torch.ones(20 + model), large, small], op=ReduceOp.AVG)
                    total += small - exact if model == 5 else 0
        return total.tolist()

    for error in run_ranks(rank_main, 1, kind="threads", wrap=hooked(chain(error_feedback(), quantize(bits=4)))):
        assert max(map(abs, error)) < 3


@pytest.mark.parametrize("how", [in_backward, lambda call: call()], ids=["a gradient", "what passes"])
def test_time_outs_name_the_ranks_that_are_missing(how: Callable[[Callable[[], object]], None]):
    over = threading.Event()

    def rank_main(group: Group) -> Any:
        if group.rank == 1:
            over.wait(60)
            return None
        group.set_timeout(0.5)
        try:
            how(lambda: group.all_reduce(torch.ones(8)))
        except CollectiveTimeout as error:
            return list(error.missing or ()), str(error).partition("(")[0]
        finally:
            over.set()

    alone, _ = run_ranks(rank_main, 2, kind="threads", wrap=hooked(Q8))
    assert alone == ([1], "all_reduce")


def test_a_backward_that_ends_early_is_reported_and_one_of_a_hook_without_state_is_not():
    def rank_main(group: Any) -> list[str]:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for sizes in ((4, 4), (4, 4), (4,), (4, 4), (4,), (4, 4), (4,)):
                reduced_in_backward(group, [torch.ones(n) for n in sizes])
        return [str(w.message).partition(": ")[2].partition(".")[0] for w in caught]

    said = "backwards differ in the gradients that they reduce: the last one ended after 1"
    assert run_ranks(rank_main, 1, kind="threads", wrap=hooked(chain(error_feedback(), Q8))) == [[said]]
    assert run_ranks(rank_main, 1, kind="threads", wrap=hooked(Q8)) == [[]]


def test_a_state_that_was_saved_continues_bit_for_bit():
    def rank_main(group: Any) -> tuple[list[Tensor], list[Tensor]]:
        def step(on: Group, number: int) -> Tensor:
            gradient = torch.randn(300, generator=torch.Generator().manual_seed(10 * number + on.rank))
            in_backward(lambda: on.all_reduce(gradient, op=ReduceOp.AVG))
            return gradient

        for number in range(3):
            step(group, number)
        reduced_in_backward(
            group, [torch.ones(7), torch.ones(300)]
        )  # another sequence, which a new group would not number so
        saved = group.state_dict()
        assert list(saved) == [f"rank {group.rank}"]
        assert all(isinstance(part, bytes) for part in saved.values())
        again = HookedGroup(group.inner, group.hook)
        again.load_state_dict(saved)
        with pytest.raises(UsageError, match=f"there is no 'rank {group.rank}', only 'rank 7'"):
            again.load_state_dict({"rank 7": b""})
        return [step(group, n) for n in (3, 4)], [step(again, n) for n in (3, 4)]

    for on, again in run_ranks(rank_main, 2, kind="threads", wrap=hooked(chain(error_feedback(), quantize(bits=4)))):
        assert all(torch.equal(a, b) for a, b in zip(on, again, strict=True))


# -- errors and the end ----------------------------------------------------------------------------------------------------


def test_a_hook_that_fails_on_one_rank_fails_on_all():
    def breaks(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        if turn.rank == 1:
            raise ValueError("no more")
        yield all_reduce(grad, op=ReduceOp.AVG)
        return Reduced(grad, grad)

    def rank_main(group: Group) -> str:
        try:
            in_backward(lambda: group.all_reduce(torch.ones(3)))
        except (ValueError, GroupAborted) as error:
            return str(error)
        return "no error"

    other, own = run_ranks(rank_main, 2, kind="threads", wrap=hooked(Scripted(breaks, 1)))
    assert own.startswith("no more")
    assert "failed on rank 1 with ValueError: no more" in other


def test_what_does_not_fit_is_refused():
    (inner,) = ThreadGroup.world(1, timeout=20)
    with pytest.raises(UsageError, match=r"HookedGroup: local_sgd\(every=2\) averages parameters after"):
        HookedGroup(inner, local_sgd(every=2))
    with pytest.raises(UsageTypeError, match="is a stage"):
        HookedGroup(inner, cast(torch.bfloat16))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=r"register_backend\(wrap=..., hook=...\): pass one"):
        register_backend("hooked_twice", wrap=Recording, hook=Q8)
    with pytest.raises(UsageError, match=r"register_backend\('hooked_local', hook=...\): local_sgd"):
        register_backend("hooked_local", hook=local_sgd(every=2))
    with pytest.raises(UsageError, match=r"On a mesh, use interop\.outer_steps_on_shards"):
        register_backend("hooked_outer", hook=sparse_loco(every=5))
    for flat in (dion(8), chain(error_feedback(), power_sgd(4)), partition({"bias": mean(), "*": dion(8)})):
        with pytest.raises(
            UsageError, match=r"register_backend\('hooked_flat', hook=...\): .*flat gradients.*optim\.Dion"
        ):
            register_backend("hooked_flat", hook=flat)
        with pytest.raises(UsageError, match=r"batched=True"):
            HookedGroup(inner, flat)
    group = HookedGroup(inner, Q8)
    part = group.split(0)
    assert isinstance(part, HookedGroup)
    assert part.hook is Q8
    assert not group.orders_streams(torch.device("cpu"))
    part.close()
    group.close()
