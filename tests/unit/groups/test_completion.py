"""Completion hooks: a thread of their own, in order, whatever a hook does."""

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from gradwire.collectives import OpKind, Signature
from gradwire.errors import HookError
from gradwire.groups.completion import CompletionHooks, WorkInfo, name_of


def info(seq: int) -> WorkInfo:
    return WorkInfo(
        op=Signature(OpKind.BARRIER, label=f"op {seq}"),
        group="g",
        rank=0,
        seq=seq,
        bytes=0,
        started=1.0,
        finished=3.5,
        error=None,
    )


@pytest.fixture
def hooks() -> Iterator[CompletionHooks]:
    hooks = CompletionHooks("g, rank 0")
    yield hooks
    hooks.stop(timeout=100)


def threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("gradwire-completion")]


def test_info_is_read_by_name() -> None:
    assert (info(3).kind, info(3).label, info(3).duration) == ("barrier", "op 3", 2.5)


def test_no_hook_no_thread(hooks: CompletionHooks) -> None:
    assert not hooks
    assert threads() == []
    assert hooks.flush(timeout=1.0)
    hooks.stop(timeout=1.0)


def test_a_hook_that_raises_is_named_chained_and_kept(hooks: CompletionHooks) -> None:
    seen: list[int] = []

    def bad_hook(i: WorkInfo) -> None:
        raise ValueError("boom") if i.seq == 0 else SystemExit(7)

    hooks.add(bad_hook)
    hooks.add(lambda i: seen.append(i.seq))
    hooks.put(info(0))
    hooks.put(info(1))
    assert hooks.flush(timeout=100)
    assert seen == [0, 1]
    first, second = hooks.errors
    assert isinstance(first, HookError)
    assert isinstance(first.__cause__, ValueError)
    assert isinstance(second.__cause__, SystemExit)
    assert "bad_hook" in first.hook
    for part in ("bad_hook", "ValueError: boom", "operation #0", "label='op 0'", "g, rank 0"):
        assert part in str(first)


def test_only_so_many_errors_are_kept(hooks: CompletionHooks) -> None:
    def bad(i: WorkInfo) -> None:
        raise ValueError(i.seq)

    hooks.add(bad)
    for seq in range(40):
        hooks.put(info(seq))
    hooks.flush(timeout=100)
    assert [error.__cause__.args[0] for error in hooks.errors if error.__cause__] == list(range(24, 40))


def test_flush_gives_up_in_time_and_works_from_inside(hooks: CompletionHooks) -> None:
    gate, inside = threading.Event(), []

    def slow(i: WorkInfo) -> None:
        gate.wait(100)
        inside.append(hooks.flush(timeout=1.0))

    hooks.add(slow)
    hooks.put(info(0))
    assert not hooks.flush(timeout=0.02)
    gate.set()
    assert hooks.flush(timeout=100)
    assert inside == [True]


def test_stop_from_inside_a_hook_ends_the_thread() -> None:
    hooks, ended = CompletionHooks("g"), threading.Event()

    def last(i: WorkInfo) -> None:
        hooks.stop(timeout=100)
        ended.set()

    hooks.add(last)
    thread = hooks._worker._thread
    assert thread is not None
    hooks.put(info(0))
    assert ended.wait(100)
    thread.join(100)
    assert not thread.is_alive()


def test_names() -> None:
    class Hook:
        def __call__(self, i: WorkInfo) -> None: ...

    class Odd(Hook):
        __name__ = 3  # type: ignore[assignment]

    assert name_of(print) == "print"
    assert "test_names" in name_of(Hook)
    assert name_of(Hook()) == "<Hook>"
    assert name_of(Odd()) == "<Odd>"
    assert name_of(partial(print)) == "<partial>"


def test_nothing_is_flushed_after_the_end() -> None:
    """A hook that hangs outlives stop(); asking again must not start another thread."""
    gate = threading.Event()
    hooks = CompletionHooks("test")
    hooks.add(lambda _: gate.wait(100) and None)
    hooks.put(info(0))
    hooks.stop(timeout=0.02)
    before = threading.active_count()
    assert hooks.flush(timeout=0.02)
    assert threading.active_count() == before
    gate.set()
