"""The four kinds on torch's engine: when they run, in which order, on which version; and registration by name."""

import collections
import copy
import io
import pickle
import sys
import warnings
from typing import Any

import pytest
import torch
from torch import nn

from gradwire.autograd import Kind, after_accumulate, after_node, attach, before_node, on_grad
from gradwire.errors import AutogradHookError, AutogradHookTypeError, UsageError, UsageTypeError
from gradwire.events import Handle


def leaf(value: float = 1.0) -> torch.Tensor:
    return torch.full((2,), value, requires_grad=True)


def say(log: list[str], word: str) -> Any:
    return lambda *args: log.append(word)


@pytest.mark.parametrize("early_node_hook", [True, False])
def test_order_at_a_leaf(api: Any, accumulator: Any, early_node_hook: bool) -> None:
    """on_grad runs before before_node, whichever was registered first."""
    w, log = leaf(), []
    node = accumulator(w)

    def hook_node() -> None:
        api.before_node(node, say(log, "before_node"))
        api.after_node(node, lambda inputs, outputs: log.append(f"after_node {len(inputs)} {len(outputs)}"))

    if early_node_hook:
        hook_node()
    api.after_accumulate(w, lambda tensor: log.append(f"after_accumulate {tensor is w} {tensor.grad.tolist()}"))
    api.on_grad(w, say(log, "on_grad"))
    if not early_node_hook:
        hook_node()
    (w * 3).sum().backward()
    assert log == ["on_grad", "before_node", "after_accumulate True [3.0, 3.0]", "after_node 0 1"]


def test_on_grad_runs_once_with_the_accumulated_gradient(api: Any) -> None:
    w, seen = leaf(), []
    api.on_grad(w, lambda grad: seen.append(grad.tolist()))
    (w * 2 + w * 3 + w).sum().backward()
    assert seen == [[6, 6]]


def test_retain_grad_sees_what_all_on_grad_hooks_made(api: Any) -> None:
    w = leaf()
    y = w * 2
    api.on_grad(y, lambda grad: grad * 10)
    y.retain_grad()
    api.on_grad(y, lambda grad: grad + 1)
    y.sum().backward()
    assert y.grad.tolist() == [11, 11]
    assert w.grad.tolist() == [22, 22]


def test_arguments_and_grad_mode(api: Any) -> None:
    w, seen = leaf(), []
    y = w * 2
    node = y.grad_fn
    api.on_grad(y, lambda *args: seen.append([type(arg) for arg in args]))
    api.before_node(node, lambda *args: seen.append([type(arg) for arg in args]))
    api.after_node(node, lambda *args: seen.append([type(arg) for arg in args]))
    api.after_accumulate(w, lambda *args: seen.append([type(arg) for arg in args] + [torch.is_grad_enabled()]))
    y.sum().backward()
    assert seen == [[torch.Tensor], [tuple], [tuple, tuple], [torch.Tensor, False]]


def test_autograd_grad_runs_on_grad_but_not_the_accumulator(api: Any, accumulator: Any) -> None:
    w, log = leaf(), []
    node = accumulator(w)
    api.on_grad(w, lambda grad: grad * 2)
    api.before_node(node, say(log, "before_node"))
    api.after_node(node, say(log, "after_node"))
    api.after_accumulate(w, say(log, "after_accumulate"))
    (grad,) = torch.autograd.grad((w * 3).sum(), [w])
    assert grad.tolist() == [6, 6]
    assert log == []


def test_backward_with_inputs_runs_nothing_off_the_path(api: Any) -> None:
    a, b, log = leaf(), leaf(), []
    x, y = a * 2, b * 2
    for name, tensor in (("a", a), ("b", b), ("x", x), ("y", y)):
        api.on_grad(tensor, say(log, name))
    (x + y).sum().backward(inputs=[b])
    assert log == ["y", "b"]
    assert a.grad is None


def test_hooks_stay_with_the_version_they_were_put_on(api: Any) -> None:
    w, seen = leaf(), {}
    y = w * 2
    api.on_grad(y, lambda grad: seen.__setitem__("old", grad.tolist()))
    y.mul_(3)
    api.on_grad(y, lambda grad: seen.__setitem__("new", grad.tolist()))
    y.sum().backward()
    assert seen == {"new": [1, 1], "old": [3, 3]}


def test_removal_and_addition_during_a_pass(api: Any) -> None:
    w, log, handles = leaf(), [], {}

    def first(grad: torch.Tensor) -> None:
        log.append("first")
        handles["first"].remove()
        handles["second"].remove()
        api.on_grad(w, say(log, "added"))

    handles["first"] = api.on_grad(w, first)
    handles["second"] = api.on_grad(w, say(log, "second"))
    for _ in range(2):
        w.sum().backward()
        log.append("|")
    assert log == ["first", "second", "|", "added", "|"]


def test_hooks_of_torch_keep_their_place_among_ours() -> None:
    w, log = leaf(), []
    on_grad(w, say(log, "first"))
    w.register_hook(say(log, "torch"))
    on_grad(w, say(log, "last"))
    w.sum().backward()
    assert log == ["first", "torch", "last"]


def test_handle_is_idempotent_and_a_context_manager(api: Any) -> None:
    w, log = leaf(), []
    with api.on_grad(w, say(log, "inside")) as handle:
        w.sum().backward()
    w.sum().backward()
    handle.remove()
    handle.remove()
    with pytest.raises(ZeroDivisionError), api.on_grad(w, say(log, "raised")):
        1 / 0  # noqa: B018
    w.sum().backward()
    assert log == ["inside"]


@pytest.mark.parametrize("kind", ["on_grad", "before_node", "after_node", "after_accumulate"])
def test_reentrant_backward_inside_a_hook(api: Any, accumulator: Any, kind: str) -> None:
    w, other = leaf(), leaf()
    node = accumulator(w)

    def hook(*args: Any) -> None:
        with torch.enable_grad():
            (other * 5).sum().backward()

    getattr(api, kind)(node if "node" in kind else w, hook)
    (w * 2).sum().backward()
    assert other.grad.tolist() == [5, 5]
    assert w.grad.tolist() == [2, 2]


def test_double_backward_goes_through_on_grad(api: Any) -> None:
    w = torch.tensor([3.0], requires_grad=True)
    y = w**2
    api.on_grad(y, lambda grad: grad * w)  # so dy/dw as seen is 2w·w, and its derivative 4w
    (first,) = torch.autograd.grad(y.sum(), [w], create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), [w])
    assert (first.item(), second.item()) == (18.0, 12.0)


def test_create_graph_keeps_grad_mode_on_in_after_accumulate(api: Any) -> None:
    w, seen = leaf(), []
    api.after_accumulate(w, lambda tensor: seen.append((torch.is_grad_enabled(), tensor.grad.requires_grad)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch warns of the cycle that backward(create_graph=True) makes
        (w**3).sum().backward(create_graph=True)
    w.grad = None
    assert seen == [(True, True)]


def test_sparse_gradients_pass(api: Any) -> None:
    table = nn.Embedding(4, 2, sparse=True)
    api.on_grad(table.weight, lambda grad: grad * 3)
    table(torch.tensor([1])).sum().backward()
    assert table.weight.grad.is_sparse
    assert table.weight.grad.to_dense().tolist() == [[0, 0], [3, 3], [0, 0], [0, 0]]


def test_a_plain_tuple_after_a_tuple_subclass(outcomes: Any) -> None:
    """torch compares exactly one tuple with a whole namedtuple and fails."""
    pair = collections.namedtuple("pair", "only")

    def scenario(api: Any) -> Any:
        w = leaf()
        y = w * 2
        api.before_node(y.grad_fn, lambda grads: pair(*grads))
        api.before_node(y.grad_fn, lambda grads: tuple(grad * 3 for grad in grads))
        y.sum().backward()
        return w.grad.tolist()

    theirs, mine = outcomes(scenario)
    assert isinstance(theirs, TypeError)
    assert mine == [6, 6]


def test_torch_hooks_never_see_a_tuple_subclass() -> None:
    pair = collections.namedtuple("pair", "only")
    w = leaf()
    y = w * 2
    before_node(y.grad_fn, lambda grads: pair(*grads))
    y.grad_fn.register_prehook(lambda grads: tuple(grad * 3 for grad in grads))
    y.sum().backward()
    assert w.grad.tolist() == [6, 6]


@pytest.mark.parametrize("thing", [3, None, "fn", torch.ones(2)], ids=str)
def test_non_callables_are_refused_at_registration(thing: Any) -> None:
    w = leaf()
    y = w * 2
    model = nn.Linear(2, 2)
    for register in (
        lambda: on_grad(w, thing),
        lambda: after_accumulate(w, thing),
        lambda: before_node(y.grad_fn, thing),
        lambda: after_node(y.grad_fn, thing),
        *(lambda kind=kind: attach(model, "*", kind, thing) for kind in Kind),
    ):
        with pytest.raises(UsageTypeError, match="not callable"):
            register()
    y.sum().backward()
    assert not w._backward_hooks


@pytest.mark.parametrize("register", [on_grad, after_accumulate])
@pytest.mark.parametrize("target", [3, None, "w"], ids=str)
def test_a_tensor_is_needed(register: Any, target: Any) -> None:
    with pytest.raises(UsageTypeError, match="not a tensor"):
        register(target, print)


@pytest.mark.parametrize("register", [before_node, after_node])
@pytest.mark.parametrize("target", [None, torch.ones(2), 3], ids=["no grad_fn", "tensor", "int"])
def test_a_node_is_needed(register: Any, target: Any) -> None:
    with pytest.raises(UsageTypeError, match=r"not a node.*grad_fn"):
        register(target, print)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(2, 2)
        self.second = nn.Linear(2, 2)
        self.tied = nn.Linear(2, 2, bias=False)
        self.tied.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tied(self.second(self.first(x)))


def backward(model: nn.Module) -> None:
    model(torch.ones(1, 2)).sum().backward()


@pytest.mark.parametrize("kind", [*Kind, *(kind.value for kind in Kind)], ids=str)
def test_every_kind_attaches_by_name_and_stays_attached(kind: Kind | str) -> None:
    model, calls = Block(), []
    handle = attach(model, "second.*", kind, lambda *args: calls.append(1))
    for expected in (2, 4):
        backward(model)
        assert len(calls) == expected
    handle.remove()
    handle.remove()
    backward(model)
    assert len(calls) == 4


@pytest.mark.parametrize("kind", list(Kind))
def test_the_error_names_the_parameter(kind: Kind) -> None:
    model = Block()
    attach(model, "*.weight", kind, lambda *args: None)
    attach(model, "second.weight", kind, lambda *args: 3)
    with pytest.raises(AutogradHookTypeError, match=r"2 of 2 on .*parameter 'second.weight'") as caught:
        backward(model)
    assert caught.value.place == 2
    assert caught.value.kind == kind.value


def test_the_hooks_own_exception_is_noted_with_the_parameter() -> None:
    def fails(grad: torch.Tensor) -> None:
        raise KeyError("own")

    model = Block()
    attach(model, "first.bias", Kind.ON_GRAD, fails)
    with pytest.raises(KeyError) as caught:
        backward(model)
    assert "parameter 'first.bias'" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [("*", 4), ("*.weight", 2), ("tied.weight", 1), ("first.*", 2), ("[fs]*.bias", 2), ("second.bias", 1)],
)
def test_patterns_and_tied_parameters(pattern: str, expected: int) -> None:
    """A parameter with two names is found under either, and gets one hook."""
    model, calls = Block(), []
    attach(model, pattern, Kind.ON_GRAD, lambda grad: calls.append(1))
    backward(model)
    assert len(calls) == expected


@pytest.mark.parametrize(
    ("pattern", "hint"), [("frist.weight", "first.weight"), ("secnod.bias", "second.bias"), ("zzz", "first.weight")]
)
def test_a_pattern_that_matches_nothing_lists_close_names(pattern: str, hint: str) -> None:
    with pytest.raises(UsageError, match="no parameter of Block") as caught:
        attach(Block(), pattern, Kind.ON_GRAD, print)
    assert pattern in str(caught.value)
    assert hint in str(caught.value)


def test_a_module_without_parameters() -> None:
    with pytest.raises(UsageError, match="It has no parameters"):
        attach(nn.ReLU(), "*", Kind.ON_GRAD, print)


def test_an_unknown_kind() -> None:
    with pytest.raises(UsageError, match="on_grad, before_node, after_node, after_accumulate"):
        attach(Block(), "*", "on_gradient", print)


@pytest.mark.parametrize("kind", list(Kind))
def test_a_frozen_parameter_is_named_and_nothing_is_registered(kind: Kind) -> None:
    model, calls = Block(), []
    model.second.weight.requires_grad_(False)
    with pytest.raises(AutogradHookError, match=r"doesn't require gradient.*'second.weight'"):
        attach(model, "*", kind, lambda *args: calls.append(1))
    backward(model)
    assert not calls


@pytest.mark.parametrize("kind", list(Kind))
def test_all_or_nothing_where_torch_itself_refuses_one(kind: Kind, monkeypatch: pytest.MonkeyPatch) -> None:
    model, calls = Block(), []
    good = Handle(lambda: calls.append("removed"))

    def register(target: Any, kind: Kind, fn: Any, words: str) -> Handle:
        if "second.bias" in words:
            raise MemoryError("torch says no")
        return good

    inside = sys.modules[attach.__module__]
    monkeypatch.setattr(inside, "_on_tensor", register)
    monkeypatch.setattr(inside, "_on_node", register)
    with pytest.raises(MemoryError):
        attach(model, "*", kind, print)
    assert calls == ["removed"]


def test_the_handle_is_a_context_manager() -> None:
    model, calls = Block(), []
    with attach(model, "*", Kind.BEFORE_NODE, lambda grads: calls.append(1)):
        backward(model)
    backward(model)
    assert len(calls) == 4


def hooked(api: Any) -> nn.Module:
    model = nn.Linear(2, 2)
    api.on_grad(model.weight, torch.zeros_like)
    api.after_accumulate(model.bias, lambda tensor: tensor.grad.zero_())
    return model


@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))], ids=["deepcopy", "pickle"]
)
def test_copies_of_a_module_have_no_hooks(api: Any, duplicate: Any) -> None:
    twin = duplicate(hooked(api))
    twin(torch.ones(1, 2)).sum().backward()
    assert twin.weight.grad.all()
    assert twin.bias.grad.all()


def test_copies_of_a_module_with_hooks_on_accumulators() -> None:
    model = Block()
    attach(model, "*", Kind.AFTER_NODE, lambda *args: None)
    backward(copy.deepcopy(model))
    backward(pickle.loads(pickle.dumps(model)))


@pytest.mark.parametrize("marked", [True, False])
def test_saving_a_hooked_tensor_warns_unless_the_hook_is_marked(api: Any, marked: bool) -> None:
    def hook(grad: torch.Tensor) -> None: ...

    w = leaf()
    api.on_grad(w, torch.utils.hooks.unserializable_hook(hook) if marked else hook)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        torch.save(w, io.BytesIO())
    about_hooks = [str(w.message) for w in caught if "will not be serialized" in str(w.message)]
    assert len(about_hooks) == (0 if marked else 1)
    assert marked or "hook" in about_hooks[0]


@pytest.mark.parametrize("kind", ["on_grad", "before_node", "after_node", "after_accumulate"])
def test_attached_hooks_follow_their_parameters_to_another_dtype(kind: str) -> None:
    model, calls = torch.nn.Linear(2, 1), []
    handle = attach(model, "*", kind, lambda *_: calls.append(1))
    for dtype in (torch.float32, torch.float64, torch.float64, torch.float32):
        model.to(dtype)
        for _ in range(2):
            model.zero_grad()
            calls.clear()
            model(torch.ones(1, 2, dtype=dtype)).sum().backward()
            assert len(calls) == 2
    twin = copy.deepcopy(model)
    calls.clear()
    twin(torch.ones(1, 2)).sum().backward()
    assert calls == []
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls == []
