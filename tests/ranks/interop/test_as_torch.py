"""gradwire's hooks inside torch's own DDP."""

import copy
import inspect
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as TorchDDP

from gradwire.collectives import all_reduce
from gradwire.errors import HookError, NonFiniteGradient, Origin, UsageError, UsageTypeError
from gradwire.groups import Group, ThreadGroup
from gradwire.hooks import Reduction, Turn, cast, chain, local_sgd, mean, quantize
from gradwire.interop import as_torch_hook
from gradwire.policies import NonFinite
from gradwire.testing import run_ranks
from helpers.buckets import TorchBucket
from helpers.comm_hooks import CountsSteps, Scripted
from helpers.models import descend


def make_model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))


def train(model: nn.Module, rank: int, steps: int = 5) -> Tensor:
    data = torch.Generator().manual_seed(rank)
    for _ in range(steps):
        model.zero_grad()
        model(torch.randn(4, 6, generator=data)).pow(2).sum().backward()
        descend(model, 0.01)
    return torch.cat([p.detach().flatten() for p in model.parameters()])


class Careful(CountsSteps):
    """The mean in two collectives, so that it runs on the lane, counting its steps by parameter."""

    collectives = None

    def reduce(self, grad: Tensor, state: Any, turn: Turn) -> Reduction:
        assert set(state.values()) == {turn.step}
        yield all_reduce(torch.zeros(1))
        return (yield from super().reduce(grad, state, turn))


def test_the_same_parameters_as_plain_ddp(torch_world: Callable[..., Any]) -> None:
    hooks = {"mean": mean(), "careful": Careful(), "cast": chain(cast(torch.bfloat16), mean())}

    def rank_main(group: Group) -> dict[str, Tensor]:
        done = {}
        with torch_world(group, "gloo"):
            done["plain"] = train(TorchDDP(make_model(), bucket_cap_mb=0.001), group.rank)
            for name, hook in hooks.items():
                model = TorchDDP(make_model(), bucket_cap_mb=0.001)
                model.register_comm_hook(None, as_torch_hook(hook, group, named_parameters=model.named_parameters()))
                done[name] = train(model, group.rank)
                assert len(model._get_ddp_logging_data()["comm_hook"]) > 0
                assert copy.deepcopy(model)._comm_hooks == model._comm_hooks  # as AveragedModel does
        return done

    a, b = run_ranks(rank_main, 2, kind="gloo")
    for done in (a, b):
        for name in ("mean", "careful"):
            torch.testing.assert_close(done[name], done["plain"])
        torch.testing.assert_close(done["cast"], done["plain"], rtol=0.05, atol=0.02)
        assert not torch.equal(done["cast"], done["plain"])
    assert all(torch.equal(a[name], b[name]) for name in a)


@pytest.mark.filterwarnings("ignore:averaging gradients")
@pytest.mark.parametrize("views", [False, True], ids=["copies", "views"])
def test_nonfinite_gradients_in_torchs_ddp(torch_world: Callable[..., Any], views: bool) -> None:
    """Found with their rank and origin by all ranks, also with a hook that hides or composes; and torch's DDP goes on."""
    hooks = {"mean": mean(), "careful": Careful(), "float16": chain(cast(torch.float16), mean())}

    def rank_main(group: Group) -> list[Any]:
        seen: list[Any] = []
        with torch_world(group, "gloo"):
            for hook in hooks.values():
                for policy in (NonFinite.RAISE, NonFinite.SKIP):
                    model = TorchDDP(make_model(), bucket_cap_mb=0.001, gradient_as_bucket_view=views)
                    names = model.module.named_parameters()
                    ours = as_torch_hook(hook, named_parameters=names, nonfinite=policy)
                    model.register_comm_hook(None, ours)
                    for factor in (1.0, float("nan"), 1e9, 1.0):
                        model.zero_grad()
                        loss = model(torch.ones(2, 6)).sum() * (factor if group.rank == 1 else 1.0)
                        try:
                            loss.backward()
                            seen.append(all(p.grad is None for p in model.parameters()))
                        except NonFiniteGradient as error:
                            seen.append((error.rank, error.parameter, error.origin, error.step))
                    ours.close()
        return seen

    results = run_ranks(rank_main, 2, kind="gloo")
    bad = (1, "4.bias", Origin.GRADIENT, 1)
    plain = [False, bad, False, False, False, True, False, False]
    overflow = [False, bad, (1, "4.bias", Origin.OVERFLOW, 2), False, False, True, True, False]
    assert results == [plain + plain + overflow] * 2


def test_nonfinite_needs_names() -> None:
    with pytest.raises(UsageError, match=r"Pass named_parameters=model.named_parameters\(\)"):
        as_torch_hook(mean(), nonfinite=NonFinite.RAISE)
    with pytest.raises(UsageTypeError, match="nonfinite='raise'"):
        as_torch_hook(mean(), nonfinite="raise")  # type: ignore[arg-type]


def test_what_a_hook_raises_comes_out_of_torchs_backward(torch_world: Callable[..., Any]) -> None:
    def angry(grad: Tensor, state: Any, turn: Turn) -> Reduction:
        yield all_reduce(grad)
        raise ValueError("no gradient for you")

    def rank_main(group: Group) -> None:
        with torch_world(group, "gloo"):
            model = TorchDDP(make_model())
            # Of one collective: torch never frees a model whose hook failed, and so would keep a lane for good.
            hook = as_torch_hook(Scripted(angry, 1), group)
            model.register_comm_hook(None, hook)
            with pytest.raises((ValueError, RuntimeError), match="no gradient for you"):
                model(torch.ones(1, 6)).sum().backward()
            hook.close()
        group.torchs_world = None  # type: ignore[attr-defined]  # which that model would keep for good too

    run_ranks(rank_main, 2, kind="gloo")


@pytest.fixture
def group() -> Any:
    (only,) = ThreadGroup.world(1, timeout=20)
    yield only
    only.close()


@pytest.mark.parametrize("named", [False, True])
def test_states_follow_their_parameters_into_other_buckets(group: Group, named: bool) -> None:
    a, b, c = (torch.zeros(n) for n in (2, 3, 4))
    names = [("a", a), ("b", b), ("c", c)] if named else []
    hook = as_torch_hook(Careful(), group, named_parameters=names)  # asserts that every state is as old as the step
    for layout in ([[a, b, c]], [[a, b, c]], [[c], [b, a]], [[c], [b, a]], [[a], [c], [b]], [[a, b, c]]):
        for index, parameters in enumerate(layout):
            assert hook(None, TorchBucket(parameters, index=index)).wait().tolist() == [2.0] * sum(
                p.numel() for p in parameters
            )


def test_the_function_passes_torchs_check_of_hooks(group: Group) -> None:
    hook = as_torch_hook(mean(), group)
    signature = inspect.signature(hook)
    assert list(signature.parameters) == ["state", "bucket"]
    assert signature.parameters["bucket"].annotation is inspect.Parameter.empty
    assert signature.return_annotation is inspect.Signature.empty
    assert hook.__qualname__ == "mean()"


def test_only_our_own_hooks_are_taken(group: Group) -> None:
    with pytest.raises(UsageTypeError, match="is a stage"):
        as_torch_hook(cast(torch.bfloat16), group)  # type: ignore[arg-type]


def test_a_hook_refuses_parameters_before_any_step(group: Group) -> None:
    whole = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    with pytest.raises(UsageError, match=r"head\.weight"):
        as_torch_hook(quantize({"encoder.*": 8}), group, named_parameters=[("head.weight", whole)])


def test_a_hook_may_refuse_a_bucket(group: Group) -> None:
    with pytest.raises(UsageError, match=r"parameter 0"):
        as_torch_hook(quantize({"encoder.*": 8}), group)(None, TorchBucket([torch.zeros(2)]))


def interrupted(grad: Tensor, state: Any, turn: Turn) -> Reduction:
    """Is stopped after its collective by what is no Exception."""
    yield all_reduce(grad)
    raise KeyboardInterrupt("enough")


def test_whatever_ends_a_reduction_reaches_torchs_future(group: Group) -> None:
    """torch waits for the future in C++, without a deadline."""
    future = as_torch_hook(Scripted(interrupted, 1), group)(None, TorchBucket([torch.zeros(2)]))
    over = threading.Event()
    future.add_done_callback(lambda _: over.set())
    assert over.wait(100)
    with pytest.raises(HookError, match=r"ended by KeyboardInterrupt: enough") as caught:
        future.value()
    assert isinstance(caught.value.__cause__, KeyboardInterrupt)


def test_it_needs_no_result_of_several_collectives_to_return() -> None:
    """torch goes on with backward while the lane works. Only with the first bucket ranks meet, to make a group for the hook."""
    meet, weight = threading.Barrier(2), torch.zeros(2)

    def rank_main(group: Group) -> list[float]:
        hook = as_torch_hook(Careful(), group)
        hook(None, TorchBucket([weight])).wait()
        if group.rank == 0:
            future = hook(None, TorchBucket([weight]))
            assert not future.done()
            meet.wait(100)
        else:
            meet.wait(100)
            future = hook(None, TorchBucket([weight]))
        value = future.wait().tolist()
        hook.close()
        return value

    assert run_ranks(rank_main, 2, kind="threads") == [[2.0, 2.0]] * 2


def test_an_optimizer_can_be_attached_before_there_is_a_process_group() -> None:
    model = nn.Linear(2, 2)
    hook = as_torch_hook(local_sgd(every=2), named_parameters=model.named_parameters())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hook.attach_optimizer(optimizer)
    assert len(optimizer._optimizer_step_post_hooks) == 1
    hook.close()
    assert not optimizer._optimizer_step_post_hooks
