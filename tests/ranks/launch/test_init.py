"""gw.init(): alone, and on rank processes whose environment is that of a launcher."""

import datetime
import os
import pickle
from contextlib import contextmanager

import pytest
import torch

import gradwire as gw
from gradwire.groups.store.private_store import PrivateStore
from gradwire.interop.default_group import WORLD, is_default
from gradwire.testing import run_ranks


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    """This process is alone, whatever the tests were started by, and has left its world afterwards."""
    for name in list(os.environ):
        if name in ("RANK", "WORLD_SIZE") or name.startswith(
            ("GRADWIRE_", "TORCHELASTIC", "OMPI_COMM", "PMI_", "SLURM_")
        ):
            monkeypatch.delenv(name)
    yield
    gw.launch.leave()


def test_alone_it_is_a_world_of_one_and_always_the_same():
    group = gw.init(timeout=7.0, name="mine")
    assert (group.rank, group.size, group.timeout, group.name) == (0, 1, 7.0, "mine")
    assert isinstance(group, gw.ThreadGroup)
    assert gw.init() is group
    assert gw.init(kind="threads") is group
    assert gw.init("threads") is group
    t = torch.ones(2)
    group.all_reduce(t)
    assert t.tolist() == [1.0, 1.0]


@pytest.mark.parametrize("argument", ["timeout", "meeting_timeout"])
def test_a_timedelta_is_refused_with_what_to_pass(argument):
    with pytest.raises(
        TypeError,
        match=rf"gw.init\({argument}=datetime.timedelta\(seconds=30\)\): .*Pass a number of seconds.*total_seconds",
    ):
        gw.init(**{argument: datetime.timedelta(seconds=30)})


def test_another_kind_than_before_is_refused():
    gw.init()
    with pytest.raises(gw.UsageError, match="already joined its world, with kind 'threads'. Close that group"):
        gw.init(kind="gloo")


@pytest.mark.parametrize("end", ["close", "leave"])
def test_after_its_end_there_is_another(end):
    first = gw.init()
    first.close() if end == "close" else gw.launch.leave()
    assert first.closed
    second = gw.init(kind="gloo")
    assert second is not first
    second.barrier()
    gw.launch.leave()
    gw.launch.leave()
    assert second.closed


@pytest.mark.parametrize(
    ("arguments", "message"),
    [({"kind": "smoke"}, "there is no such kind"), ({"timeout": 0}, "timeout is 0. Pass a number of seconds above 0")],
)
def test_wrong_arguments_are_usage_errors(arguments, message):
    with pytest.raises(gw.UsageError, match=message):
        gw.init(**arguments)
    assert WORLD.get() is None


def test_models_find_the_worlds_group():
    group = gw.init()
    model = gw.DistributedDataParallel(torch.nn.Linear(2, 1))
    assert model.group is group
    model(torch.ones(1, 2)).sum().backward()
    assert is_default(model.process_group)
    again = pickle.loads(pickle.dumps(model))
    assert again.group is group


def test_without_a_world_models_say_what_to_call():
    with pytest.raises(RuntimeError, match=r"call init_process_group, or gw.init\(\). Or pass your own group"):
        gw.DistributedDataParallel(torch.nn.Linear(2, 1))


def test_a_process_that_was_forked_off_is_no_rank(monkeypatch):
    group = gw.init()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: 1)
        assert WORLD.get() is None
    assert WORLD.get() is group


def test_an_exception_that_ends_the_program_aborts(monkeypatch):
    group = gw.init()
    monkeypatch.setattr("sys.last_value", ValueError("boom"), raising=False)
    gw.launch.leave()
    assert isinstance(group.failure, gw.GroupAborted)
    assert group.failure.reason == "ValueError: boom"


@pytest.fixture
def store():
    """That which `gradwire run` would make."""
    with PrivateStore.create() as store:
        yield store


@contextmanager
def launched(rank: int, size: int, store: str):
    """This process's environment as `gradwire run` would make it."""
    ours = {"GRADWIRE_RANK": str(rank), "GRADWIRE_SIZE": str(size), "GRADWIRE_STORE": store}
    os.environ.update(ours)
    try:
        yield
    finally:
        for name in ours:
            del os.environ[name]
        gw.launch.leave()


def test_ranks_meet_train_part_and_meet_again(store):

    def rank_main(outer):
        with launched(outer.rank, outer.size, store_name):
            group = gw.init(timeout=30)
            model = torch.nn.Linear(2, 1)
            ddp = gw.DistributedDataParallel(model)
            ddp(torch.full((1, 2), float(group.rank))).sum().backward()
            group.close()
            second = gw.init(timeout=30, kind="gloo")
            t = torch.tensor([second.rank + 1.0])
            second.all_reduce(t)
            return type(group).__name__, ddp.group is group, model.weight.grad.tolist(), second is group, t.item()

    store_name = store.name
    assert run_ranks(rank_main, 2, kind="gloo") == [("SharedMemoryGroup", True, [[0.5, 0.5]], False, 3.0)] * 2


def test_after_a_group_that_could_not_be_made_there_may_be_another(store):

    def rank_main(outer):
        with launched(outer.rank, outer.size, store_name):
            with pytest.raises(gw.GradwireError, match="'/nowhere'.*No such file"):
                gw.init(timeout=30, directory="/nowhere")
            t = torch.ones(1)
            gw.init(timeout=30).all_reduce(t)
            return t.item()

    store_name = store.name
    assert run_ranks(rank_main, 2, kind="gloo") == [2.0, 2.0]


def test_ranks_that_ask_for_different_kinds_are_told(store):

    def rank_main(outer):
        with launched(outer.rank, outer.size, store_name):
            if outer.rank == 0:
                with pytest.raises(gw.UsageError, match="there is no CUDA device"):
                    gw.init(timeout=30, kind="nccl")
            else:
                with pytest.raises(
                    gw.UsageError, match="kind='gloo'.* rank 0 has 'nccl'. Every rank must pass the same"
                ):
                    gw.init(timeout=30, kind="gloo")

    store_name = store.name
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    run_ranks(rank_main, 2, kind="gloo")


def test_a_rank_that_does_not_come_is_named(store):

    def rank_main(outer):
        with launched(outer.rank, 3, store_name), pytest.raises(gw.CollectiveTimeout) as caught:
            gw.init(timeout=1)
        return caught.value.missing

    store_name = store.name
    assert run_ranks(rank_main, 2, kind="gloo") == [(2,), (2,)]
