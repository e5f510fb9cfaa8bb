"""HookChain by itself: its rules hold for any sequence of hooks, without an engine."""

import gc
import pickle
import threading
from typing import Any

import pytest
import torch
from hypothesis import given, strategies as st

from gradwire.autograd import HookChain, Kind
from gradwire.errors import AutogradHookError, AutogradHookTypeError, UsageTypeError

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


def call(chain: HookChain, value: torch.Tensor) -> torch.Tensor:
    if chain.kind in TUPLES:
        rest = ((value,),) if chain.kind is Kind.AFTER_NODE else ()
        result = chain((value,), *rest)
        return value if result is None else result[0]
    result = chain(value)
    return value if result is None else result


@given(kind=st.sampled_from([Kind.ON_GRAD, *TUPLES]), actions=st.lists(ACTIONS, max_size=6))
def test_a_chain_is_the_composition_of_its_hooks(kind: Kind, actions: list[str]) -> None:
    chain, calls = HookChain(kind), []
    handles = [chain.add(make_hook(kind, action, calls, n), target="tensor 't'") for n, action in enumerate(actions)]
    assert torch.equal(call(chain, torch.ones(2)), expect(actions, torch.ones(2)))
    assert calls == list(range(len(actions)))
    assert len(chain) == len(handles)


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
    chain, calls, handles = HookChain(kind), [], []
    count = len(actions)
    removals = [(who % count, whom % count) for who, whom in removals]
    additions = [who % count for who in additions]

    def meddle(number: int) -> None:
        for who, whom in removals:
            if who == number:
                handles[whom].remove()
        for who in additions:
            if who == number:
                chain.add(make_hook(kind, "add", calls, 100), target="tensor 't'")

    def wrap(number: int, hook: Any) -> Any:
        def meddling(*args: Any) -> Any:
            meddle(number)
            return hook(*args)

        return meddling

    for number, action in enumerate(actions):
        hook = wrap(number, make_hook(kind, action, calls, number))
        handles.append(chain.add(hook, target="tensor 't'"))
    assert torch.equal(call(chain, torch.ones(2)), expect(actions, torch.ones(2)))
    assert calls == list(range(count))

    calls.clear()
    removed = {whom for _, whom in removals}
    kept = [number for number in range(count) if number not in removed]
    call(chain, torch.ones(2))
    assert calls == kept + [100] * len(additions)


@given(operations=st.lists(st.one_of(st.none(), st.integers(0, 9)), max_size=20))
def test_handles_are_idempotent_and_uninstall_comes_when_the_last_goes(operations: list[int | None]) -> None:
    uninstalled: list[int] = []
    chain = HookChain(Kind.ON_GRAD, uninstall=lambda: uninstalled.append(len(chain)))
    handles, alive, emptied = [], set(), 0
    for operation in operations:
        if operation is None:
            handles.append(chain.add(lambda grad: None, target="t"))
            alive.add(len(handles) - 1)
        elif operation < len(handles):
            handles[operation].remove()
            emptied += alive == {operation}
            alive.discard(operation)
        assert len(chain) == len(alive)
    assert uninstalled == [0] * emptied


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_error_says_who_where_and_what(kind: Kind, place: int) -> None:
    def culprit(*args: Any) -> Any:
        return 3

    chain = HookChain(kind)
    for position in (1, 2, 3):
        hook = culprit if position == place else lambda *args: None
        chain.add(hook, target=f"parameter 'layer.{position}'")
    with pytest.raises(AutogradHookTypeError) as caught:
        call(chain, torch.ones(2))
    error = caught.value
    assert (error.hook, error.kind, error.place) == ("culprit", kind.value, place)
    assert error.target == f"parameter 'layer.{place}'"
    for words in ("test_chain", "culprit", kind.value, f"{place} of 3", error.target, "Return None", "'int'"):
        assert words in str(error) or (kind is Kind.AFTER_ACCUMULATE and words == "Return None")
    copy = pickle.loads(pickle.dumps(error))
    assert (str(copy), copy.place, copy.target) == (str(error), place, error.target)


def test_a_hook_after_the_one_that_failed_does_not_run() -> None:
    chain, ran = HookChain(Kind.AFTER_ACCUMULATE), []
    chain.add(lambda tensor: tensor * 2, target="t")
    chain.add(ran.append, target="t")
    with pytest.raises(AutogradHookError, match="Tensor post accumulate grad hooks should return None"):
        chain(torch.ones(2))
    assert not ran


def test_after_accumulate_tolerates_the_tensor_itself() -> None:
    chain = HookChain(Kind.AFTER_ACCUMULATE)
    chain.add(lambda tensor: tensor, target="t")
    assert chain(torch.ones(2)) is None


@pytest.mark.parametrize("kind", TUPLES)
def test_a_subclass_of_tuple_is_seen_as_it_is_and_handed_on_plain(kind: Kind) -> None:
    class Grads(tuple):
        pass

    chain, seen = HookChain(kind), []
    chain.add(lambda grads, *rest: Grads(grads), target="n")
    chain.add(lambda grads, *rest: seen.append(type(grads)), target="n")
    chain.add(lambda grads, *rest: tuple(grad * 2 for grad in grads), target="n")
    result = chain((torch.ones(2),), *([()] if kind is Kind.AFTER_NODE else []))
    assert seen == [Grads]
    assert type(result) is tuple
    assert result[0].tolist() == [2, 2]
    chain.add(lambda grads, *rest: Grads(grads), target="n")
    assert type(chain((torch.ones(2),), *([()] if kind is Kind.AFTER_NODE else []))) is tuple


def test_compiled_autograd_hands_lists_and_hooks_see_tuples() -> None:
    chain, seen = HookChain(Kind.AFTER_NODE), []
    chain.add(lambda inputs, outputs: seen.append((type(inputs), type(outputs))), target="n")
    assert chain([torch.ones(2)], [torch.ones(2)]) is None
    assert seen == [(tuple, tuple)]


@pytest.mark.parametrize("kind", list(Kind))
@pytest.mark.parametrize("thing", [3, None, "hook", torch.ones(2)])
def test_what_cannot_be_called_is_refused(kind: Kind, thing: Any) -> None:
    with pytest.raises(UsageTypeError, match="not callable") as caught:
        HookChain(kind).add(thing, target="tensor 't'")
    assert isinstance(caught.value, TypeError)
    assert kind.value in str(caught.value)
    assert "tensor 't'" in str(caught.value)


def test_torch_may_pickle_without_a_warning_only_if_every_hook_says_so() -> None:
    marked = torch.utils.hooks.unserializable_hook(lambda grad: None)
    chain = HookChain(Kind.ON_GRAD)
    chain.add(marked, target="t")
    assert hasattr(chain, "__torch_unserializable__")
    chain.add(lambda grad: None, target="t")
    assert not hasattr(chain, "__torch_unserializable__")


def test_the_repr_names_the_hooks() -> None:
    chain = HookChain(Kind.ON_GRAD)
    chain.add(torch.zeros_like, target="t")
    chain.add(HookChain(Kind.ON_GRAD), target="t")  # an object without a name of its own
    assert "zeros_like" in repr(chain)
    assert repr(chain).endswith("gradwire.autograd.user_hooks.hook_chain.HookChain>")


def test_a_finalizer_that_removes_another_hook_while_one_is_removed() -> None:
    """Dropping a hook may run anything, such as the removal of a second hook of the same chain."""
    uninstalled: list[bool] = []
    chain = HookChain(Kind.ON_GRAD, uninstall=lambda: uninstalled.append(True))
    other = chain.add(lambda grad: None, target="t")

    class Owner:
        def __call__(self, grad: torch.Tensor) -> None: ...

        def __del__(self) -> None:
            other.remove()

    first = chain.add(Owner(), target="t")
    first.remove()
    gc.collect()
    assert len(chain) == 0
    assert uninstalled == [True]


def test_threads_may_add_and_remove_while_the_chain_runs() -> None:
    chain = HookChain(Kind.ON_GRAD)
    chain.add(lambda grad: grad + 1, target="t")
    stop = threading.Event()
    errors: list[BaseException] = []

    def churn() -> None:
        try:
            while not stop.is_set():
                chain.add(lambda grad: None, target="t").remove()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=churn) for _ in range(2)]
    for thread in threads:
        thread.start()
    for _ in range(300):
        assert chain(torch.zeros(1)).item() == 1
    stop.set()
    for thread in threads:
        thread.join()
    assert not errors
    assert len(chain) == 1
