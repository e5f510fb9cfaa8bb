"""Every rule of torch's hooks, run through torch and through gradwire: same gradients, same type and message of error."""

import collections
import re
from typing import Any

import pytest
import torch

from gradwire.errors import AutogradHookError

Pair = collections.namedtuple("Pair", "first second")


class Swap(torch.autograd.Function):
    """Two in, two out, crosswise; an undefined gradient stays None."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        ctx.set_materialize_grads(False)
        return b * 2, a * 3

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grad_b, grad_a = grads
        return None if grad_a is None else grad_a * 3, None if grad_b is None else grad_b * 2


def run(api: Any, kind: str, hooks: list[Any], *, both_used: bool = True) -> tuple[Any, ...]:
    """Put `hooks` on the middle of a small graph; the gradients of its two leaves."""
    a, b = (torch.full((2, 3), value, requires_grad=True) for value in (1.0, 2.0))
    x, y = Swap.apply(a, b)
    target = {"on_grad": y, "after_accumulate": a}.get(kind, x.grad_fn)
    for hook in hooks:
        getattr(api, kind)(target, hook)
    (x.sum() + 5 * y.sum() if both_used else x.sum()).backward()
    return a.grad, b.grad


def describe(result: Any) -> Any:
    return [None if grad is None else grad.tolist() for grad in result]


class Callable_:
    """A hook without a name."""

    def __init__(self, result: Any) -> None:
        self.result = result

    def __call__(self, *args: Any) -> Any:
        return self.result


def nameless(result: Any) -> Any:
    return Callable_(result)


class OddName(Callable_):
    __name__ = 7  # type: ignore[assignment]


ONE: dict[str, Any] = {
    "none": lambda value: None,
    "same": lambda value: value,
    "same by view": lambda value: value.view_as(value),
    "int": lambda value: 3,
    "bool": lambda value: False,
    "list": lambda value: [value],
    "tuple": lambda value: (value,),
    "string": lambda value: "grad",
    "fewer elements": lambda value: value.detach()[:1],
    "more dimensions": lambda value: value.detach()[None],
    "broadcastable": lambda value: torch.ones(1, 3),
    "transposed": lambda value: value.detach().t(),
    "scalar": lambda value: torch.tensor(1.0),
    "empty": lambda value: torch.empty(0),
    "double": lambda value: value.detach().double(),
    "half": lambda value: value.detach().bfloat16(),
    "complex": lambda value: value.detach() + 0j,
    "sparse": lambda value: value.detach().to_sparse(),
    "double and smaller": lambda value: value.detach().double()[:1],
    "nameless int": nameless(3),
    "nameless wrong size": nameless(torch.ones(1)),
    "odd name wrong size": OddName(torch.ones(1)),
    "builtin wrong size": torch.sum,
}

MANY: dict[str, Any] = {
    "none": lambda values: None,
    "same": lambda values: values,
    "doubled": lambda values: tuple(None if value is None else value * 2 for value in values),
    "all none": lambda values: (None,) * len(values),
    "first none": lambda values: (None, *values[1:]),
    "list": lambda values: list(values),
    "tensor": lambda values: values[0],
    "int": lambda values: 3,
    "empty": lambda values: (),
    "too few": lambda values: values[:1],
    "too many": lambda values: (*values, values[0]),
    "namedtuple": lambda values: Pair(*values),
    "int inside": lambda values: (3, values[1]),
    "string inside": lambda values: (values[0], "grad"),
    "size inside": lambda values: (values[0][:1], values[1]),
    "dtype inside": lambda values: (values[0], values[1].double()),
    "nested": lambda values: (values, values),
    "nameless too few": nameless(()),
    "nameless wrong size": nameless((torch.ones(1), torch.ones(1))),
}


def without_type_names(error: Exception) -> str:
    """torch names some types in two ways ("torch.FloatTensor", but "CPUBFloat16Type")."""
    return re.sub(r"\(was .*? got .*?\)", "(was … got …)", str(error))


def same(theirs: Any, mine: Any) -> None:
    """Equal gradients, or an error of torch's type that contains torch's message."""
    if isinstance(theirs, Exception):
        assert isinstance(mine, AutogradHookError), mine
        assert isinstance(mine, type(theirs))
        assert without_type_names(theirs) in without_type_names(mine)
    else:
        assert not isinstance(mine, Exception), mine
        assert describe(theirs) == describe(mine)


@pytest.mark.parametrize("kind", ["on_grad", "after_accumulate"])
@pytest.mark.parametrize("hook", ONE.values(), ids=ONE)
def test_one_tensor(outcomes: Any, kind: str, hook: Any) -> None:
    same(*outcomes(lambda api: run(api, kind, [hook])))


@pytest.mark.parametrize("hook", MANY.values(), ids=MANY)
def test_before_node(outcomes: Any, hook: Any) -> None:
    same(*outcomes(lambda api: run(api, "before_node", [hook])))


@pytest.mark.parametrize("hook", MANY.values(), ids=MANY)
def test_after_node(outcomes: Any, hook: Any) -> None:
    same(*outcomes(lambda api: run(api, "after_node", [lambda inputs, outputs: hook(inputs)])))


@pytest.mark.parametrize("kind", ["on_grad", "before_node", "after_node"])
@pytest.mark.parametrize(
    ("first", "second"), [(2.0, 3.0), (2.0, None), (None, 3.0), ("same", 3.0), (2.0, "same")], ids=str
)
def test_two_hooks_in_order(outcomes: Any, kind: str, first: Any, second: Any) -> None:
    """What one returns is what the next sees: (g * first) + second, not the other way round."""

    def change(value: Any, step: Any, *, add: bool) -> Any:
        if value is None or step in (None, "same"):
            return value if step == "same" else None
        return value + step if add else value * step

    def make(step: Any, *, add: bool) -> Any:
        if kind == "on_grad":
            return lambda grad: change(grad, step, add=add)
        if step in (None, "same"):
            return lambda values, *rest: values if step == "same" else None
        return lambda values, *rest: tuple(change(value, step, add=add) for value in values)

    same(*outcomes(lambda api: run(api, kind, [make(first, add=False), make(second, add=True)])))


NONE_GIVEN: dict[str, tuple[str, Any]] = {
    "on_grad leaves it": ("on_grad", lambda grad: None),
    "on_grad replaces it": ("on_grad", lambda grad: torch.ones(2, 3)),
    "before_node leaves it": ("before_node", lambda grads: (grads[0], None)),
    "before_node replaces it": ("before_node", lambda grads: (grads[0], torch.ones(2, 3))),
    "before_node replaces it by an int": ("before_node", lambda grads: (grads[0], 3)),
    "after_node replaces it": ("after_node", lambda grads, _: (torch.ones(2, 3), grads[1])),
}


@pytest.mark.parametrize(("kind", "hook"), NONE_GIVEN.values(), ids=NONE_GIVEN)
def test_undefined_gradient(outcomes: Any, kind: str, hook: Any) -> None:
    same(*outcomes(lambda api: run(api, kind, [hook], both_used=False)))


def test_a_hook_on_an_undefined_gradient_gets_none(api: Any) -> None:
    seen: list[Any] = []
    run(api, "on_grad", [seen.append], both_used=False)
    run(api, "before_node", [lambda grads: seen.append([grad is None for grad in grads])], both_used=False)
    assert seen == [None, [False, True]]


def test_device_changed(outcomes: Any) -> None:
    theirs, mine = outcomes(lambda api: run(api, "on_grad", [lambda grad: grad.to("meta")]))
    assert "has changed the type of value (was " in str(theirs)
    same(theirs, mine)


@pytest.mark.filterwarnings("ignore:Sparse CSR")
def test_layout_without_a_type_name() -> None:
    from gradwire.autograd.user_hooks.checked_hook import find_broken

    broken = find_broken(len, torch.eye(2), torch.eye(2).to_sparse_csr())
    assert broken is not None
    assert "(was torch.FloatTensor got torch.float32 torch.sparse_csr on cpu)" in broken.words


@pytest.mark.parametrize("kind", ["on_grad", "before_node", "after_node", "after_accumulate"])
def test_an_exception_keeps_type_message_and_frame(outcomes: Any, kind: str) -> None:
    class Own(Exception):
        pass

    def hook(*args: Any) -> None:
        raise Own("mine")

    for error in outcomes(lambda api: run(api, kind, [hook])):
        assert type(error) is Own
        assert str(error) == "mine"
        frames = []
        at = error.__traceback__
        while at is not None:
            frames.append(at.tb_frame.f_code.co_name)
            at = at.tb_next
        assert frames[-1] == "hook"
    assert f"{kind} hook" in error.__notes__[0]
    assert "1 of 1" in error.__notes__[0]


@pytest.mark.parametrize("kind", ["on_grad", "after_accumulate"])
def test_registration_without_requires_grad(outcomes: Any, kind: str) -> None:
    theirs, mine = outcomes(lambda api: getattr(api, kind)(torch.ones(2), print))
    assert isinstance(theirs, RuntimeError)
    same(theirs, mine)


def test_after_accumulate_on_a_non_leaf(outcomes: Any) -> None:
    same(*outcomes(lambda api: api.after_accumulate(torch.ones(2, requires_grad=True) * 2, print)))
