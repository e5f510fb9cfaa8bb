"""The error tree: what is an instance of what, and that every error crosses a process boundary with its facts."""

import inspect
import pickle

import pytest

from gradwire import errors
from gradwire.collectives import OpKind, ReduceOp, Signature

OP = Signature(OpKind.ALL_REDUCE, ((3,),), ("float32",), ReduceOp.SUM, label="loss")

EXAMPLES = [
    errors.GradwireError("what, why, advice"),
    errors.UsageError("what"),
    errors.UsageTypeError("what"),
    errors.HookError("what", hook="my_hook"),
    errors.LayoutError("what"),
    errors.ClosedError("what"),
    errors.GroupError("what"),
    errors.PeerLost("what", rank=3, op=OP),
    errors.CollectiveTimeout("what", op=OP, joined=[0, 1], missing=range(2, 4)),
    errors.CollectiveTimeout("what", op=OP),
    errors.CollectiveMismatch("what", ops={0: OP, 1: OP}),
    errors.GroupAborted("what", reason="because"),
    errors.NonFiniteGradient(
        "what", rank=1, parameter="fc.weight", index=(2, 0), origin=errors.Origin.GRADIENT, step=7
    ),
    errors.ReplicasDiverged("what", ranks=[2], parameters=["fc.weight"], step=100),
    errors.InternalError("what", story=["first", "then"]),
]


@pytest.mark.parametrize("error", EXAMPLES, ids=lambda e: type(e).__name__)
def test_an_error_pickles_with_its_facts(error: errors.GradwireError) -> None:
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is type(error)
    assert str(copy) == str(error)
    assert copy.args == error.args
    assert copy.__dict__ == error.__dict__


def test_every_error_of_the_module_pickles() -> None:
    classes = [
        c
        for _, c in inspect.getmembers(errors, inspect.isclass)
        if issubclass(c, errors.GradwireError) and c.__module__ == errors.__name__
    ]
    assert len(classes) >= 13
    for cls in classes:
        error = cls("the message")
        error.add_note("a note")
        copy = pickle.loads(pickle.dumps(error))
        assert (type(copy), str(copy), copy.__notes__) == (cls, "the message", ["a note"])
        assert copy.__dict__ == error.__dict__


def test_facts_are_attributes() -> None:
    lost = errors.PeerLost("gone", rank=2, op=OP)
    assert (lost.rank, lost.op) == (2, OP)
    late = errors.CollectiveTimeout("late", op=OP, joined=[0], missing=[1, 2])
    assert (late.joined, late.missing, late.op) == ((0,), (1, 2), OP)
    unknown = errors.CollectiveTimeout("late")
    assert (unknown.joined, unknown.missing, unknown.op) == (None, None, None)
    assert errors.CollectiveMismatch("differ").ops == {}
    assert errors.GroupAborted("end", reason="because").reason == "because"
    assert errors.InternalError("bug", story=["a"]).story == ("a",)
    assert errors.HookError("bad").hook == "<unknown>"


@pytest.mark.parametrize(
    ("error", "torch_raises"),
    [
        (errors.UsageError, ValueError),
        (errors.UsageTypeError, TypeError),
        (errors.HookError, RuntimeError),
        (errors.LayoutError, RuntimeError),
        (errors.ClosedError, RuntimeError),
        (errors.GroupError, RuntimeError),
        (errors.NonFiniteGradient, RuntimeError),
        (errors.InternalError, RuntimeError),
    ],
)
def test_code_written_for_torch_keeps_catching(
    error: type[errors.GradwireError], torch_raises: type[Exception]
) -> None:
    assert issubclass(error, torch_raises)
    assert issubclass(error, errors.GradwireError)


def test_your_fault_and_the_worlds_fault_are_apart() -> None:
    for cls in (errors.PeerLost, errors.CollectiveTimeout, errors.CollectiveMismatch, errors.GroupAborted):
        assert issubclass(cls, errors.GroupError)
        assert not issubclass(cls, errors.UsageError)
    for cls in (errors.HookError, errors.LayoutError, errors.ClosedError, errors.UsageTypeError):
        assert issubclass(cls, errors.UsageError)
        assert not issubclass(cls, errors.GroupError)


def test_again_copies_type_facts_notes_and_cause_and_no_traceback() -> None:
    try:
        try:
            raise KeyError("why")
        except KeyError as cause:
            raise errors.CollectiveTimeout("late", joined=[0], missing=[1]) from cause
    except errors.CollectiveTimeout as error:
        error.add_note("a note")
        kept = error
    copy = errors.again(kept)
    assert (type(copy), str(copy), copy.joined, copy.missing) == (errors.CollectiveTimeout, "late", (0,), (1,))
    assert copy.__cause__ is kept.__cause__
    assert copy.__suppress_context__
    assert copy.__traceback__ is None
    copy.add_note("another")
    assert kept.__notes__ == ["a note"]
    assert pickle.loads(pickle.dumps(copy)).missing == (1,)
    problem = OSError(2, "no such file", "name")
    assert (errors.again(problem).errno, str(errors.again(problem))) == (2, str(problem))
