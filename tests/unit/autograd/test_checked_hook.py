"""Hooks of gradwire's on torch's engine: their rules hold for any sequence of hooks. CheckedHook by itself: what it returns."""

import collections
import contextlib
import gc
import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from gradwire import autograd
from gradwire.autograd import Kind
from gradwire.autograd.user_hooks.checked_hook import CheckedHook
from gradwire.errors import AutogradHookError, AutogradHookTypeError, UsageTypeError
from gradwire.events import Handle

TUPLES = [Kind.BEFORE_NODE, Kind.AFTER_NODE]

# A hook as data: what it does to the value it is given.
ACTIONS = st.sampled_from(["none", "same", "add", "double"])


def act(action: str, value: Any) -> Any:
    return {"none": None, "same": value, "add": value + 1, "double": value * 2}[action]


def expect(actions: list[str], value: torch.Tensor) -> torch.Tensor:
    for action in actions:
        value = value if action in ("none", "same") else act(action, value)
    return value


def make_hook(kind: Kind, action: str, calls: list[int], number: int) -> Any:
    def hook(value: Any, *rest: Any) -> Any:
        calls.append(number)
        if kind in TUPLES:
            return None if action == "none" else value if action == "same" else tuple(act(action, v) for v in value)
        return act(action, value)

    return hook


class Target:
    """A tensor and its node, with hooks of one kind. `call` returns what they make of ones."""

    def __init__(self, kind: Kind) -> None:
        self.w = torch.ones(2, requires_grad=True)
        self.y, self.kind = self.w.clone(), kind
        on_leaf = kind is Kind.AFTER_ACCUMULATE
        self.target = self.w if on_leaf else self.y if kind is Kind.ON_GRAD else self.y.grad_fn

    def add(self, hook: Any) -> Handle:
        return getattr(autograd, self.kind.value)(self.target, hook)

    def call(self) -> torch.Tensor:
        self.w.grad = None
        self.y.sum().backward(retain_graph=True)
        return self.w.grad


@given(kind=st.sampled_from([Kind.ON_GRAD, *TUPLES]), actions=st.lists(ACTIONS, max_size=6))
def test_hooks_are_composed_in_order(kind: Kind, actions: list[str]) -> None:
    target, calls = Target(kind), []
    for n, action in enumerate(actions):
        target.add(make_hook(kind, action, calls, n))
    assert torch.equal(target.call(), expect(actions, torch.ones(2)))
    assert calls == list(range(len(actions)))


@given(
    kind=st.sampled_from([Kind.ON_GRAD, *TUPLES]),
    actions=st.lists(ACTIONS, min_size=1, max_size=6),
    removals=st.lists(st.tuples(st.integers(0, 5), st.integers(0, 5)), max_size=6),
    additions=st.lists(st.integers(0, 5), max_size=3),
)
def test_a_pass_runs_its_snapshot(
    kind: Kind, actions: list[str], removals: list[tuple[int, int]], additions: list[int]
) -> None:
    """Hook `who` removes hook `whom`, and some add another: this pass runs all that were registered at its start."""
    target, calls, handles = Target(kind), [], []
    count = len(actions)
    removals = [(who % count, whom % count) for who, whom in removals]
    additions = [who % count for who in additions]

    def meddle(number: int) -> None:
        for who, whom in removals:
            if who == number:
                handles[whom].remove()
        for who in additions:
            if who == number:
                target.add(make_hook(kind, "add", calls, 100))

    def wrap(number: int, hook: Any) -> Any:
        def meddling(*args: Any) -> Any:
            meddle(number)
            return hook(*args)

        return meddling

    for number, action in enumerate(actions):
        hook = wrap(number, make_hook(kind, action, calls, number))
        handles.append(target.add(hook))
    assert torch.equal(target.call(), expect(actions, torch.ones(2)))
    assert calls == list(range(count))

    calls.clear()
    removed = {whom for _, whom in removals}
    kept = [number for number in range(count) if number not in removed]
    target.call()
    assert calls == kept + [100] * len(additions)


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_error_says_who_where_and_what(kind: Kind, place: int) -> None:
    def culprit(*args: Any) -> Any:
        return 3

    target = Target(kind)
    for position in (1, 2, 3):
        target.add(culprit if position == place else lambda *args: None)
    with pytest.raises(AutogradHookTypeError) as caught:
        target.call()
    error = caught.value
    assert (error.hook, error.kind, error.place) == ("culprit", kind.value, place)
    for words in ("culprit", kind.value, f"{place} of 3", error.target, "Return None", "'int'"):
        assert words in str(error) or (kind is Kind.AFTER_ACCUMULATE and words == "Return None")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.place, copy.target) == (str(error), place, error.target)


def test_a_hook_that_has_removed_itself_has_no_place_in_its_error() -> None:
    target = Target(Kind.ON_GRAD)

    def culprit(grad: torch.Tensor) -> int:
        handle.remove()
        return 3

    handle = target.add(culprit)
    with pytest.raises(AutogradHookTypeError, match=r"culprit on tensor of shape \(2,\)") as caught:
        target.call()
    assert caught.value.place is None


def test_a_hook_after_the_one_that_failed_does_not_run() -> None:
    target, ran = Target(Kind.AFTER_ACCUMULATE), []
    target.add(lambda tensor: tensor * 2)
    target.add(ran.append)
    with pytest.raises(AutogradHookError, match="Tensor post accumulate grad hooks should return None"):
        target.call()
    assert not ran


def test_after_accumulate_tolerates_the_tensor_itself() -> None:
    assert CheckedHook(lambda tensor: tensor, Kind.AFTER_ACCUMULATE, "t")(torch.ones(2)) is None


@pytest.mark.parametrize("kind", TUPLES)
def test_a_subclass_of_tuple_is_handed_on_plain(kind: Kind) -> None:
    class Grads(tuple):
        pass

    hook = CheckedHook(lambda grads, *rest: Grads(grad * 2 for grad in grads), kind, "n")
    result = hook((torch.ones(2),), *([()] if kind is Kind.AFTER_NODE else []))
    assert type(result) is tuple
    assert result[0].tolist() == [2, 2]


def test_compiled_autograd_hands_lists_and_hooks_see_tuples() -> None:
    seen: list[Any] = []
    hook = CheckedHook(lambda inputs, outputs: seen.append((type(inputs), type(outputs))), Kind.AFTER_NODE, "n")
    assert hook([torch.ones(2)], [torch.ones(2)]) is None
    assert seen == [(tuple, tuple)]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("thing", [3, None, "hook", torch.ones(2)])
def test_what_cannot_be_called_is_refused(kind: Kind, thing: Any) -> None:
    with pytest.raises(UsageTypeError, match="not callable") as caught:
        CheckedHook(thing, kind, "tensor 't'")
    assert isinstance(caught.value, TypeError)
    assert kind.value in str(caught.value)
    assert "tensor 't'" in str(caught.value)


def test_torch_may_pickle_without_a_warning_only_if_the_hook_says_so() -> None:
    marked = torch.utils.hooks.unserializable_hook(lambda grad: None)
    assert hasattr(CheckedHook(marked, Kind.ON_GRAD, "t"), "__torch_unserializable__")
    assert not hasattr(CheckedHook(lambda grad: None, Kind.ON_GRAD, "t"), "__torch_unserializable__")


def test_the_repr_names_the_hook() -> None:
    hook = CheckedHook(torch.zeros_like, Kind.ON_GRAD, "t")
    assert "on_grad hook" in repr(hook)
    assert "zeros_like" in repr(hook)
    nameless = CheckedHook(hook, Kind.ON_GRAD, "t")  # an object without a name of its own
    assert repr(nameless).endswith("gradwire.autograd.user_hooks.checked_hook.CheckedHook>")


def test_a_finalizer_that_removes_another_hook_while_one_is_removed() -> None:
    """Dropping a hook may run anything, such as the removal of a second hook of the same tensor."""
    target = Target(Kind.ON_GRAD)
    other = target.add(lambda grad: None)

    class Owner:
        def __call__(self, grad: torch.Tensor) -> None: ...

        def __del__(self) -> None:
            other.remove()

    first = target.add(Owner())
    first.remove()
    gc.collect()
    assert not target.y._backward_hooks


def test_threads_may_add_and_remove_while_hooks_run() -> None:
    target, stop = Target(Kind.ON_GRAD), threading.Event()
    target.add(lambda grad: grad + 1)

    def churn() -> None:
        while not stop.is_set():
            target.add(lambda grad: None).remove()

    with ThreadPoolExecutor() as pool, contextlib.ExitStack() as ending:
        ending.callback(stop.set)
        churning = [pool.submit(churn) for _ in range(2)]
        assert all(target.call().tolist() == [2, 2] for _ in range(100))
    assert [future.result() for future in churning] == [None] * 2
    assert len(target.y._backward_hooks) == 1


@pytest.mark.parametrize("register", [autograd.on_grad, autograd.after_accumulate])
def test_no_hook_is_lost_where_threads_register_the_first_ones(register: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    w, log, both = torch.ones(2, requires_grad=True), [], threading.Barrier(2)

    def make_table() -> Any:  # another thread runs just here
        with contextlib.suppress(threading.BrokenBarrierError):
            both.wait(0.2)
        return collections.OrderedDict()

    monkeypatch.setattr("torch._tensor.OrderedDict", make_table)
    with ThreadPoolExecutor() as pool:
        list(pool.map(lambda _: register(w, log.append), range(2)))
    w.sum().backward()
    assert len(log) == 2
