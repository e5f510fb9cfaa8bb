"""A run whose members are threads: they die, leave and join at chosen points, and the others go on as if nothing had happened."""

from __future__ import annotations

import contextlib
import copy
import itertools
import json
import os
import shutil
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

import gradwire as gw
from gradwire import hooks
from gradwire.elasticity.hub import Records
from gradwire.elasticity.machine import View
from gradwire.elasticity.performer import Performer
from gradwire.elasticity.quorum import Limits, Quorum
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.state import load, pack, save, unpack
from gradwire.errors import (
    Evicted,
    GroupError,
    ReplicasDiverged,
    SharedMemoryFull,
    TooFewMembers,
    UsageError,
    UsageTypeError,
)
from gradwire.groups.threads_group import ThreadGroup
from gradwire.policies import Graph
from gradwire.testing.faults import KINDS, PLACES, Chaos, InjectedFault, inject
from helpers.elastic_threads import DATA, SLOTS, STEPS, Killed, Threads, alone, at, check, deal, make_model, replaced
from helpers.waiting import wait_until


@pytest.mark.parametrize("place", ["forward", "vote", "update"])
@pytest.mark.parametrize("who", ["a", "b"])
def test_a_member_that_dies_and_one_that_joins_change_nothing(place: str, who: str, tmp_path: Path) -> None:
    world = Threads(tmp_path, fault=at(place, who, 4, replaced))
    for me in "abc":
        world.start(me, 3)
    world.join()
    check(world, alone(1), dead={who})
    steps = list(range(STEPS))
    assert all(world.committed[me] == steps for me in {"a", "b", "c"} - {who})
    assert world.committed["joiner"] == steps[world.committed["joiner"][0] :]
    assert world.committed[who] == steps[:4]  # the others have committed the next one if all were prepared for it


def test_two_die_in_one_step_and_one_while_members_change(tmp_path: Path) -> None:
    entered: list[str] = []

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me in "bc" and place == "forward" and run.committed == 3:
            raise Killed
        if me == "d" and place == "forward" and run.view.epoch >= 1 and not entered:
            entered.append("d")
            raise Killed

    world = Threads(tmp_path, fault=fault)
    for me in "abcde":
        world.start(me, 5)
    world.join()
    check(world, alone(1), dead={"b", "c", "d"})
    assert len(world.views[max(world.views)].members) == 2


def test_the_first_member_dies_before_it_has_given_its_state(tmp_path: Path) -> None:
    world = Threads(tmp_path)
    build = world.build

    def fails(view: View, me: str, records: RunRecords) -> ThreadGroup:
        if me == "a":
            raise Killed
        return build(view, me, records)

    world.build = fails  # type: ignore[method-assign]
    for me in ["a", "bb", "ccc"]:
        world.start(me, 3)
    world.join()
    check(world, alone(2), dead={"a"})


def leaves(world: Threads) -> None:
    world.runs["b"].leave()


def test_a_member_that_leaves_ends_without_an_error(tmp_path: Path) -> None:
    world = Threads(tmp_path, fault=at("forward", "b", 5, leaves))
    for me in "abc":
        world.start(me, 3)
    world.join()
    check(world, alone(1), dead={"b"})
    assert world.runs["b"].left
    assert world.runs["b"].committed == 6  # the step in which it was told to
    assert world.records.values["left/b"] == "left"


def test_what_a_leaver_owes_goes_to_another_member(tmp_path: Path) -> None:
    owed: dict[str, Tensor] = {}
    ready, told = threading.Event(), threading.Event()

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if place == "vote" and run.committed == 5 and me == "a":
            ready.set()
            assert told.wait(30.0)
        if place == "vote" and run.committed == 5 and me == "b":
            assert ready.wait(30.0)
            owed["before"] = owed_by(world.runs["a"]) + owed_by(run)
            run.leave()
            told.set()
        if place == "forward" and run.committed == 6 and me == "a":
            owed.setdefault("after", owed_by(run))

    world = Threads(tmp_path, hook=lambda: hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.1)), fault=fault)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert not world.errors
    torch.testing.assert_close(owed["after"], owed["before"], rtol=1e-12, atol=0)
    assert not owed_by(world.runs["b"]).any()


@pytest.mark.parametrize("leaves", [False, True], ids=["dies", "leaves"])
def test_what_is_lost_with_a_member_is_told(leaves: bool, tmp_path: Path) -> None:
    norms = list[float]()

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if (me, place, run.training.opened) == ("b", "forward", 6) and not leaves:
            norms.append(float(owed_by(run).norm()))
            raise Killed
        if leaves and me == "b" and run.training.opened == 4:
            run.leave()

    world = Threads(tmp_path, hook=lambda: hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.1)), fault=fault)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for me in "abc":
            world.start(me, 3)
        assert not world.join().errors
    told = [str(one.message) for one in caught if "owed to the average" in str(one.message)]
    expected = [
        f"b is lost, and with it what it owed to the average, of norm {norm:.3g} in step 5." for norm in norms[:1]
    ]
    assert (told, len(expected)) == (expected, int(not leaves))


def owed_by(run: ElasticRun) -> Tensor:
    parts = run.training.replica.hook.owed(run.training.replica.runner.state_dict()["state"]) or ()
    return torch.cat([part.reshape(-1) for _, part in sorted(parts, key=lambda one: one[0])] or [torch.zeros(1)])


def test_a_process_that_comes_when_training_has_ended_does_nothing(tmp_path: Path) -> None:
    world = Threads(tmp_path)
    world.start("a", 1)
    world.threads[0].join(60.0)
    world.start("late")
    world.join()
    assert not world.errors
    assert world.runs["late"].left
    assert world.runs["late"].committed == 0


@pytest.mark.parametrize(
    ("hook", "most"), [(lambda: None, 0), (lambda: hooks.diloco(every=2), 2)], ids=["steps", "rounds"]
)
def test_a_process_that_joins_when_the_others_end_the_loop_has_come_too_late(
    hook: Any, most: int, tmp_path: Path
) -> None:
    """It cannot know: they break out of the loop, in the view in which it has computed nothing."""

    class Ends(Threads):
        def pace(self, run: ElasticRun, step: int) -> object:
            return "joiner" in run.view.members and run is not self.runs["joiner"]

    world = Ends(tmp_path, hook=hook, fault=at("forward", "a", 3, lambda world: world.start("joiner")))
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert not world.errors
    assert world.runs["joiner"].left
    assert len(world.committed["joiner"]) <= most  # those of a round that nobody ends
    assert world.results.keys() == {"a", "b"}


@pytest.mark.usefixtures("_sigterm")
@pytest.mark.parametrize("how", ["patience ends", "it is told to end", "all leave", "no hub"])
def test_too_few_members_raise_and_save_the_state(tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "rescued"

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        run.rescue = path
        if place == "forward" and run.committed == 2 - (how in ("all leave", "no hub")):
            if how in ("all leave", "no hub"):
                run.leave()
                if how == "no hub":
                    monkeypatch.setattr(RunRecords, "publish", Mock(side_effect=GroupError("the hub is away")))
            elif me == "b":
                if how == "it is told to end":  # while it waits for others
                    threading.Timer(0.5, world.runs["a"].leave).start()
                raise Killed

    world = Threads(tmp_path, fault=fault, min_ranks=2, patience=0.5 if how == "patience ends" else 60.0)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert isinstance(error := world.errors["a"], TooFewMembers)
    reason = {"patience ends": "are left, for 0.5 s", "all leave": "nobody goes on"}
    assert reason.get(how, "until it was told to end") in str(error)
    assert error.__notes__ == [f"The state after step 2 is saved: gw.elastic(state='{path}')."]
    model, optimizer = make_model(9)
    with gw.elastic(model, optimizer, data=deal(), steps=STEPS, state=path) as run:
        assert run.committed == 2
        for step in run:
            for x, y in step:
                (model(x).squeeze(1) - y).square().mean().backward()
            step.commit()
    assert all(torch.equal(one, alone(1)[name]) for name, one in model.state_dict().items())


def test_a_rescue_that_fails_is_said(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        run.rescue = tmp_path / "none" / "rescued"
        run.leave()

    world = Threads(tmp_path, fault=fault)
    world.start("a", 1)
    world.join()
    assert isinstance(error := world.errors["a"], TooFewMembers)
    assert "The state after step 1 could not be saved" in error.__notes__[0]
    with pytest.raises(UsageError, match="there is no such directory. Make it before"):
        gw.elastic(*make_model(), data=deal(), rescue=tmp_path / "none" / "rescued")


@pytest.mark.parametrize("leaves", [True, False])
def test_what_members_with_their_own_data_owe_is_kept_when_their_number_changes(tmp_path: Path, leaves: bool) -> None:
    """Gradients are divided by the number of members, so what one of them owes counts more or less."""
    feedback, records, lost = hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.1)), Records(tmp_path / "hub"), []
    worlds = [ThreadGroup.world(size, timeout=60) for size in (2, 1)]

    def live(me: str, run: ElasticRun) -> None:
        limits = Limits(starters=2, patience=30.0)
        build = lambda view, me, _: worlds[view.epoch][view.members.index(me)]  # noqa: E731
        run.start(me, lambda: RunRecords(records), build, limits)
        while not run.done:
            if me == "b" and run.committed == 3:
                if not leaves:
                    lost.append(owed(run))
                    RunRecords(records).mark(me, gone=True)
                    return
                run.leave()
            run.model(torch.arange(1.0, 9.0)[None]).sum().backward()
            run.step()

    def owed(run: ElasticRun) -> Tensor:
        runner = run.training.replica.runner
        return next(iter(dict(runner.hook.owed(runner.state_dict()["state"]) or ()).values())).flatten()

    runs = []
    for _ in "ab":
        model = nn.Linear(8, 1, bias=False)
        nn.init.zeros_(model.weight)
        runs.append(ElasticRun(model, torch.optim.SGD(model.parameters(), lr=1.0), hook=feedback))
        runs[-1].steps = 6
    threads = [threading.Thread(target=live, args=pair) for pair in zip("ab", runs, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    moved = -runs[0].model.weight.detach().flatten()  # type: ignore[union-attr, operator]
    wanted = 6 * torch.arange(1.0, 9.0) - sum(lost, torch.zeros(8)) / 2
    torch.testing.assert_close(moved + owed(runs[0]), wanted)
    for run in runs:
        run.release()
    records.close()


def test_members_with_different_data_are_found(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and run.data is not None:
            run.data.dataset = DATA[:-1]

    world = Threads(tmp_path, fault=fault)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert all(isinstance(world.errors[me], ReplicasDiverged) for me in "ab")


def test_backwards_outside_of_a_steps_batches_change_no_average(tmp_path: Path) -> None:
    """Of an evaluation, of a batch whose error the loop handles, and of what `update=` computes."""
    alike, grads, other = make_model()[0], list[Tensor](), DATA[0][0][None]

    def update() -> None:
        (weight, *_) = run.model.parameters()
        grads.append(weight.grad)
        weight.grad = None
        run.model(other).sum().backward()  # as the closure of LBFGS
        grads.append(weight.grad)

    with running_alone(tmp_path, data=deal()) as run:
        run.training.update = update
        for _, step in zip(range(3), run, strict=False):
            run.model(other).sum().backward()
            for number, (x, _) in enumerate(step):
                with contextlib.suppress(RuntimeError):
                    run.model(x if number else x[:, :1]).sum().backward()
            assert step.commit()
            batches = torch.cat([run.data.batch(step.number, slot)[0] for slot in run.training.slots[1:]])
            for got, x, share in zip(grads[-2:], (batches, other), (run.data.slots, 1), strict=True):
                (want, *_) = torch.autograd.grad(alike(x).sum() / share, [*alike.parameters()])
                torch.testing.assert_close(got, want)
        run.close()


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList(nn.Linear(4, 1).double() for _ in range(2))

    def forward(self, x: Tensor, part: int) -> Tensor:
        return self.parts[part](x).sum()  # type: ignore[no-any-return]


def test_a_part_that_is_used_only_before_an_error_counts_and_only_in_an_evaluation_does_not(tmp_path: Path) -> None:
    model, grads = Branches(), list[Tensor | None]()
    made, x = (model, torch.optim.SGD(model.parameters(), lr=0.0)), DATA[0][0][None]
    with running_alone(tmp_path, model=made, data=deal(), graph=Graph.FIND_UNUSED) as run:
        run.training.update = lambda: grads.append(copy.deepcopy(model.parts[0].weight.grad))  # type: ignore[arg-type]
        for step in itertools.islice(run, 2):
            model(x, 0).backward()  # an evaluation
            for slot, (batch, _) in enumerate(step):
                with contextlib.suppress(IndexError):
                    run.model(batch, 9 if slot == 1 else slot + step.number > 0).backward()
            assert step.commit()
        run.close()
    used = deal().batch(0, 0)[0].sum(0, keepdim=True)
    torch.testing.assert_close(grads, [used / SLOTS, None])


def test_buffers_that_a_forward_makes_are_no_other_model(tmp_path: Path) -> None:
    with running_alone(tmp_path) as run:
        before = run.training._script
        run.model.register_buffer("made", torch.ones(1), persistent=False)
        assert run.training._script == before


@pytest.mark.usefixtures("_sigterm")
def test_a_start_that_fails_leaves_nothing(tmp_path: Path) -> None:
    model, optimizer = make_model()
    (tmp_path / "damaged").write_bytes(b"none")
    for wrong in ({"state": tmp_path / "none"}, {"state": tmp_path / "damaged"}, {"kind": "none"}, {"min_ranks": 2}):
        with pytest.raises((UsageError, OSError)):
            gw.elastic(model, optimizer, **wrong)  # type: ignore[arg-type]
    assert type(model) is nn.Sequential
    with gw.elastic(model, optimizer, steps=1) as run:
        model(DATA[0][0][None]).sum().backward()
        assert run.step()


class _Versioned(nn.Linear):
    _version = 2

    def _load_from_state_dict(self, state: Any, prefix: str, metadata: Any, *args: Any) -> None:
        assert metadata["version"] == 2
        super()._load_from_state_dict(state, prefix, metadata, *args)


def test_what_is_loaded_is_a_copy_and_has_its_dtype_and_its_version(tmp_path: Path) -> None:
    """torch casts an optimizer's state to the dtype of the parameter, and makes no copy."""

    def make() -> ElasticRun:
        model = _Versioned(2, 2).to(torch.bfloat16)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer.state[model.weight] = {"master": torch.rand(2, 2), "step": torch.tensor(3.0)}
        return ElasticRun(model, optimizer)

    run, other = make(), make()
    run.save(tmp_path / "saved")
    for state in (run.state_dict(), load(tmp_path / "saved")):
        other.load_state_dict(state)
        (mine,), (theirs,) = (list(one.optimizer.state.values()) for one in (run, other))
        assert all(torch.equal(mine[key], theirs[key]) and mine[key].dtype == theirs[key].dtype for key in mine)
        assert all(mine[key].data_ptr() != theirs[key].data_ptr() for key in mine)
    run.register(rates=torch.optim.lr_scheduler.ConstantLR(run.optimizer))
    with pytest.raises(UsageError, match="register= of rates, and here it is of nothing"):
        other.load_state_dict(run.state_dict())
    for one in (run, other):
        one.release()


def test_a_joiner_is_told_when_nobody_has_the_state_any_more(tmp_path: Path) -> None:
    world = Threads(tmp_path, fault=at("forward", "a", 2, replaced))
    world.start("a", 1)
    world.join()
    assert "nobody has the state" in str(world.errors["joiner"])


def test_a_joiner_gives_up_when_no_member_can_be_reached(tmp_path: Path) -> None:
    hub, run = Records(tmp_path / "hub"), ElasticRun(*make_model())
    RunRecords(hub).propose(View(0, ("host-0",), 0))
    hub.compare_set("silent/host", "", "silent")
    with pytest.raises(TooFewMembers, match="no member of the run can be reached"):
        run.start("me", lambda: RunRecords(hub), Mock(), Limits(patience=0.2))
    run.release()
    hub.close()


def test_the_hub_is_watched_again_after_it_had_another_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Quorum, "count", count := Mock(side_effect=UsageError("the keys differ")))
    with running_alone(tmp_path):
        wait_until(lambda: count.call_count > 1, "the thread that watches looks again")


def test_a_member_that_was_taken_for_dead_is_told(tmp_path: Path) -> None:
    out = threading.Event()

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and place == "forward" and run.committed == 3:
            RunRecords(world.records).mark("b", gone=True)
            assert out.wait(30.0)
        if me == "a" and run.committed == 5:
            out.set()

    world = Threads(tmp_path, fault=fault)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert isinstance(world.errors["b"], Evicted)
    assert "a" in world.results


def test_members_whose_parameters_differ_are_found(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and place == "forward" and run.committed == 3:
            with torch.no_grad():
                next(run.model.parameters()).view(-1)[0] += 1e-9

    world = Threads(tmp_path, fault=fault)
    for me in "ab":
        world.start(me, 2)
    world.join()
    assert all(isinstance(world.errors[me], ReplicasDiverged) for me in "ab")
    assert {run.committed for run in world.runs.values()} == {3}


@contextlib.contextmanager
def running_alone(tmp_path: Path, **options: Any) -> Any:
    tmp_path.mkdir(exist_ok=True)
    (tmp_path / "hub").unlink(missing_ok=True)
    records = Records(tmp_path / "hub")
    model, optimizer = options.pop("model", None) or make_model()
    run = ElasticRun(model, optimizer, **options)

    def build(view: View, me: str, _: RunRecords) -> ThreadGroup:
        return ThreadGroup.world(1)[0]

    run.start("me", lambda: RunRecords(records), build, Limits(starters=1, patience=10.0))
    try:
        yield run
    finally:
        run.release()
        records.close()


def test_a_loop_of_ones_own(tmp_path: Path) -> None:
    with running_alone(tmp_path) as run:
        for _ in range(3):
            run.model(DATA[0][0][None]).sum().backward()
            assert run.step()
    assert run.committed == 3


def test_buffers_are_as_before_after_a_step_that_is_dropped(tmp_path: Path) -> None:
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    run = ElasticRun(model, torch.optim.SGD(model.parameters(), lr=0.1), data=deal())
    records = Records(tmp_path / "hub")
    run.start("me", lambda: RunRecords(records), lambda *_: ThreadGroup.world(1)[0], Limits(starters=1, patience=10.0))
    before = {name: buffer.clone() for name, buffer in model.named_buffers()}
    step = next(iter(run))
    for x, _ in step:
        model(x).sum().backward()
        run.performer.lost()  # the group has failed
    assert not step.commit()
    assert all(torch.equal(buffer, before[name]) for name, buffer in model.named_buffers())
    assert all(p.grad is None for p in model.parameters())
    run.close()
    records.close()


def test_what_a_step_has_committed_stays_when_members_change(tmp_path: Path) -> None:
    """Buffers are those of the commit, not those with which its step began; gradients of before the run do not count."""
    model = nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 1)).double()
    model(torch.ones(2, 4).double()).sum().backward()
    optimizer = torch.optim.SGD(model.parameters(), lr=np.float64(0.1))  # type: ignore[arg-type]
    run = ElasticRun(model, optimizer, data=deal())
    records = Records(tmp_path / "hub")
    run.start("me", lambda: RunRecords(records), lambda *_: ThreadGroup.world(1)[0], Limits(starters=1, patience=10.0))
    assert all(p.grad is None for p in model.parameters())
    step = next(iter(run))
    for number, (x, _) in enumerate(step):
        with pytest.raises(UsageError, match="Save it after commit") if number else contextlib.nullcontext():
            run.state_dict()
        model(x).sum().backward()
    run.performer._lobby = ("somebody",)  # the vote asks for a change
    assert step.commit()
    assert run.view.epoch == 1
    assert model[0].num_batches_tracked == SLOTS + 1  # type: ignore[union-attr]
    packed = pack(run.training._travelling(), [])
    assert unpack(packed, [torch.ones(1)] * 99)["optimizer"]["param_groups"][0]["lr"] == 0.1
    run.close()
    records.close()


class Tied(nn.Module):
    """Two parameters that share memory, and a buffer without an element."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)
        self.last, self.unused = nn.Linear(4, 4), nn.Linear(0, 2)
        self.last.weight = self.first.weight
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.first(x)))


@pytest.fixture
def _sigterm() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


CHECKPOINTS: dict[str, tuple[Callable[[ElasticRun, Path], object], Callable[[Path], Any]]] = {
    "torch.save": (lambda run, path: torch.save(run.state_dict(), path), torch.load),
    "safetensors": (lambda run, path: run.save(str(path)), lambda path: path),
    "distributed": (
        lambda run, path: torch.distributed.checkpoint.save(run.state_dict(), checkpoint_id=path, no_dist=True),
        lambda path: dcp_to_torch_save(path, path / "one file") or torch.load(path / "one file"),
    ),
}


@pytest.mark.usefixtures("_sigterm")
@pytest.mark.parametrize("how", CHECKPOINTS)
@pytest.mark.parametrize("hook", [None, hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8))], ids=str)
def test_a_run_that_begins_from_a_checkpoint_has_the_same_bits(tmp_path: Path, how: str, hook: Any) -> None:
    def train(steps: int, state: Any = None, into: Path | None = None) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(0)
        model = Tied()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, amsgrad=True)
        rates = torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 7])
        update = lambda: (optimizer.step(), rates.step())  # noqa: E731
        with gw.elastic(
            model, optimizer, hook=hook, data=deal(), steps=steps, update=update, register={"rates": rates},
            state=state, graph=Graph.FIND_UNUSED,
        ) as run:  # fmt: skip
            for step in run:
                for x, _ in step:
                    model(x).square().mean().backward()
                step.commit()
        if into is not None:
            write(run, into)
        tensors: list[Tensor] = []
        return pack(run.state_dict(), tensors), tensors

    write, read = CHECKPOINTS[how]
    expected, tensors = train(STEPS)
    train(STEPS // 2, into=tmp_path / "checkpoint")
    packed, again = train(STEPS, read(tmp_path / "checkpoint"))
    assert packed == expected
    assert all(map(torch.equal, again, tensors))
    assert how == "distributed" or os.listdir(tmp_path) == ["checkpoint"]


def test_files_that_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save_file({"a": torch.ones(1)}, tmp_path / "other")
    with pytest.raises(UsageError, match="other: this file holds no state of a run"):
        load(tmp_path / "other")
    with pytest.raises(UsageTypeError, match=r"state\['a'\] is a object"):
        save({"a": object()}, tmp_path / "new")
    with pytest.raises(FileNotFoundError):  # nothing is left of a file that could not be written
        save({"a": torch.ones(1)}, tmp_path / "none" / "new")
    save({"z": torch.tensor([1 + 2j]).to(torch.complex128)}, tmp_path / "other")
    assert load(tmp_path / "other")["z"] == 1 + 2j
    whole = (tmp_path / "other").read_bytes()
    (tmp_path / "other").write_bytes(whole.replace(torch.tensor([2.0]).double().numpy().tobytes(), bytes(8)))
    with pytest.raises(UsageError, match="the checksum of tensor 0 differs"):
        load(tmp_path / "other")
    with pytest.raises(UsageError, match="none: this file holds no state of a run .*No such file"):
        load(tmp_path / "none")
    with running_alone(tmp_path / "run", data=deal()) as run, running_alone(tmp_path / "run", data=deal()) as other:
        run.data.seed = 4
        with pytest.raises(UsageError, match="the state of a run with data of .* a step would have other samples"):
            other.training.load_state_dict(run.training.state_dict())
    shutil.rmtree(tmp_path / "run")
    monkeypatch.setitem(sys.modules, "safetensors", None)
    with pytest.raises(UsageError, match=r"pip install 'gradwire\[elastic\]'"):
        load(tmp_path / "other")
    assert os.listdir(tmp_path) == ["other"]


def test_misuse_is_refused(tmp_path: Path) -> None:
    with running_alone(tmp_path, data=deal()) as run:
        with pytest.raises(UsageError, match="no gradients were averaged"):
            run.commit()
        with pytest.raises(UsageError, match="without commit"):
            for _ in run:
                pass
    with running_alone(tmp_path) as run, pytest.raises(UsageError, match="the run has no data"):
        list(next(iter(run)))
    with running_alone(tmp_path) as run, pytest.raises(UsageTypeError, match="is a set, which cannot travel"):
        run.optimizer.param_groups[0]["seen"] = {1}
        run.model(DATA[0][0][None]).sum().backward()
        run.step()
    model, optimizer = make_model()
    for wrong in ({"model": "m"}, {"optimizer": None}, {"data": DATA}):
        with pytest.raises(UsageTypeError, match=r"gw\.elastic\("):
            ElasticRun(**{"model": model, "optimizer": optimizer, **wrong})  # type: ignore[arg-type]
    with pytest.raises(UsageTypeError, match="no state_dict"):
        ElasticRun(model, optimizer).register(step=3)
    with pytest.raises(UsageError, match="Use mean\\(\\) instead"):
        ElasticRun(model, optimizer, data=deal(), hook=hooks.weighted_mean())
    with pytest.raises(UsageError, match="have not seen the graph"):
        ElasticRun(model, optimizer, graph=Graph.STATIC)
    with pytest.raises(UsageError, match="2 parameters that are not the model's"):
        ElasticRun(model, torch.optim.SGD([*model.parameters(), *nn.Linear(1, 1).parameters()], lr=0.1))
    with running_alone(tmp_path, data=deal()) as run:
        with pytest.raises(UsageError, match="Pass register="):
            run.register(optimizer=run.optimizer)
        with pytest.raises(UsageError, match="Pass state="):
            run.load_state_dict(run.state_dict())
        (step,) = itertools.islice(run, 1)
        for x, _ in list(step):  # all are handed out before the first backward
            run.model(x).sum().backward()
        with pytest.raises(UsageError, match="Save it after commit"):
            run.state_dict()
        with pytest.raises(UsageError, match="has run again after its gradients"):
            step.commit()
        run.close()
        with pytest.raises(UsageError, match="the run has ended"):
            run.commit()
    with running_alone(tmp_path) as run:
        run.training.update = lambda: 1 / 0
        for error in (ZeroDivisionError, UsageError):
            run.model(DATA[0][0][None]).sum().backward()
            with pytest.raises(error, match="division by zero"):
                run.step()
    with running_alone(tmp_path) as run:
        run.model(DATA[0][0][None]).sum().backward()
        with pytest.raises(UsageError, match="before the members have voted"):
            run.optimizer.step()
        run.steps = 1
        assert run.step()
        run.optimizer.step()  # training has ended
        with pytest.raises(UsageError, match="the run has ended"):
            run.step()
    with running_alone(tmp_path) as run:
        loss = run.model(DATA[0][0][None]).sum()
        loss.backward(retain_graph=True)
        loss.backward()
        with pytest.raises(UsageError, match="has run again after its gradients"):
            run.step()
    with running_alone(tmp_path) as run:
        late = nn.Parameter(torch.ones(1))
        late.grad = torch.ones(1)
        run.optimizer.add_param_group({"params": [late]})
        run.model(DATA[0][0][None]).sum().backward()
        with pytest.raises(UsageError, match="a parameter has a gradient that is not averaged"):
            run.step()
    for fails in ([1], range(SLOTS)):
        with running_alone(tmp_path, data=deal()) as run:
            numbers = itertools.count()
            run.model[0].weight.register_hook(lambda grad: (next(numbers) in fails and 1 / 0) or None)
            (step,) = itertools.islice(run, 1)
            for x, _ in step:
                with contextlib.suppress(ZeroDivisionError):
                    run.model(x).sum().backward()
            with pytest.raises(UsageError, match="a backward of it has failed here .ZeroDivisionError"):
                step.commit()
    (model := make_model()[0]).requires_grad_(False)[2].requires_grad_(True)
    with running_alone(tmp_path, model=(model, torch.optim.SGD(model[2].parameters()))) as run:
        model.requires_grad_(True)  # for an optimizer of its own
        run.model(DATA[0][0][None]).sum().backward()
        with pytest.raises(UsageError, match="0.weight has a gradient that is not averaged"):
            run.step()


def faults_in(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("place", PLACES)
def test_faults_are_injected_at_each_place_and_the_others_go_on(
    place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Performer, "join", Performer.join)  # `watch` replaces it
    chaos = Chaos(3, ["raise"], {place: 1.0}, record=tmp_path / "faults")
    third, watched = at("forward", "c", 4, replaced), threading.Event()

    def fault(world: Threads, me: str, here: str, run: ElasticRun) -> None:
        if me == "b" and not watched.is_set():
            watched.set()
            chaos.watch(run)
        third(world, me, here, run)

    world = Threads(tmp_path, fault=fault)
    if place == "join":
        chaos.watch()
    for me in "abc":
        world.start(me, 3)
    world.join()
    faulty = {"b", "c"} if place == "join" else {"b"}
    assert all(isinstance(world.errors.pop(me), InjectedFault) for me in faulty)
    check(world, alone(1), dead={"b", "c"})
    assert {fault["member"] for fault in faults_in(tmp_path / "faults")} == faulty
    late = place in ("view change", "hub write")  # when c has died
    for fault in faults_in(tmp_path / "faults"):
        assert abs(fault.pop("time") - time.time()) < 60
        assert fault.pop("when") in ("before", "after")
        assert fault.pop("epoch") in ((0, 1) if late or place == "join" else (0,))
        assert fault == {"member": fault["member"], "kind": "raise", "place": place, "step": 4 * late}


def test_faults_at_the_same_time_leave_a_member_with_the_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Performer, "join", Performer.join)
    Chaos(3, ["raise"], {"vote": 1.0}, record=tmp_path / "faults").watch()
    together = threading.Barrier(3)

    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if place == "vote" and run.view.epoch == 0:
            together.wait(30.0)

    world = Threads(tmp_path, fault=fault)
    for me in "abc":
        world.start(me, 3)
    world.join()
    dead, errors = set(world.errors), list(world.errors.values())
    assert [type(error) for error in errors] == [InjectedFault] * 2, errors
    world.errors.clear()
    check(world, alone(1), dead=dead)


def test_a_seed_decides_which_faults_fire(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def train(name: str, seed: int, **options: Any) -> list[Any]:
        monkeypatch.setattr(Performer, "join", Performer.join)
        path = tmp_path / name
        path.mkdir()
        Chaos(seed, ["slow", "raise"], 0.8, record=path / "faults", seconds=0.0).watch()
        with running_alone(path, **options) as run:
            for step in range(6):
                x, _ = DATA[0] if run.data is None else run.data.batch(step, 0)
                run.model(x).sum().backward()
                assert run.commit()
        monkeypatch.undo()
        return [(fault["place"], fault["step"], fault["kind"]) for fault in faults_in(path / "faults")]

    one = train("one", 1, data=deal())
    assert {place for place, _, _ in one} >= {"forward", "bucket in flight", "vote", "optimizer"}
    assert {kind for _, _, kind in one} == {"slow"}  # what would end the last member does not fire
    assert train("again", 1, data=deal()) == one
    assert train("other", 2, data=deal()) != one
    assert train("a loop of one's own", 1) == one


def test_the_gil_is_held() -> None:
    times, over = [time.monotonic()], threading.Event()

    def tick() -> None:
        while not over.wait(0.01):
            times.append(time.monotonic())

    thread = threading.Thread(target=tick)
    thread.start()
    inject("gil", 0.2, "here")
    over.set()
    thread.join()
    times.append(time.monotonic())
    assert max(b - a for a, b in itertools.pairwise(times)) > 0.15


def test_there_is_no_room_in_shared_memory_for_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", os.posix_fallocate)
    with open(tmp_path / "file", "wb") as file:
        inject("shm", 0.2, "here")
        with pytest.raises(OSError, match="No space left"):
            os.posix_fallocate(file.fileno(), 0, 4096)
        time.sleep(0.2)  # the fault's own time
        os.posix_fallocate(file.fileno(), 0, 4096)


@pytest.mark.parametrize("room", [True, False])
def test_a_view_that_cannot_begin_is_tried_again_and_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: bool
) -> None:
    """As when /dev/shm is full: no member has died, and a new view helps only once there is room."""
    said: list[str] = []
    monkeypatch.setattr("gradwire.elasticity.run_errors.warn_user", said.append)

    class Full(Threads):
        def build(self, view: View, me: str, records: RunRecords) -> ThreadGroup:
            if view.epoch and (view.epoch < 8 or not room):
                raise SharedMemoryFull("no room for 1 MiB.")
            return super().build(view, me, records)

    world = Full(tmp_path, fault=at("vote", "a", 4, replaced), min_ranks=2, patience=30.0 if room else 1.0)
    for me in "ab":
        world.start(me, 2)
    world.join()
    text = "b: 5 views in a row have failed before they began, the last one because of Shared"
    assert any(text in one for one in said)
    if room:
        check(world, alone(1), dead={"a"})
    else:
        assert isinstance(error := world.errors["b"], TooFewMembers)
        assert isinstance(error.__cause__, SharedMemoryFull)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kinds": ["kil"]}, r"Chaos\(kinds=...\): 'kil' is not known there. Choose from kill, stop"),
        ({"kinds": []}, r"Chaos\(kinds=...\): nothing is not known"),
        ({"rate": {"votes": 0.1}}, "'votes' is not known there. Choose from forward, bucket in flight, vote"),
        ({"rate": 1.5}, "rate=1.5\\) at forward: it is the probability .* Choose one from 0 to 1"),
    ],
)
def test_faults_that_cannot_be_drawn_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        Chaos(**{"seed": 0, "kinds": KINDS, "rate": 0.1, **options})


def test_a_loop_that_is_left_with_break_has_ended_for_all(tmp_path: Path) -> None:
    with running_alone(tmp_path, data=deal()) as run:
        for step in run:
            for x, _ in step:
                run.model(x).sum().backward()
            if step.commit() and run.committed == 2:
                break
        run.close()
    assert "ended" in run.performer._connect().hub.values
    with pytest.raises(ZeroDivisionError), running_alone(tmp_path / "other") as run, run:
        raise ZeroDivisionError
    assert "ended" not in run.performer._connect().hub.values
