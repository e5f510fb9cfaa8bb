"""A run that begins from what all members of another one have saved goes on as that would have, with what each of them owes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from gradwire import hooks
from gradwire.elasticity.quorum import Limits
from gradwire.elasticity.run import ElasticRun
from gradwire.elasticity.run_records import RunRecords
from gradwire.elasticity.state import SavedState
from gradwire.errors import ReplicasDiverged, TooFewMembers, UsageError
from gradwire.hooks.state import add_owed
from helpers.elastic_threads import DATA, STEPS, Killed, Threads, make_model

SAVED = STEPS // 2
FEEDBACK = hooks.chain(hooks.error_feedback(), hooks.top_k(ratio=0.1))
HOOKS = {
    "top_k": FEEDBACK,
    "power_sgd": hooks.chain(hooks.error_feedback(), hooks.power_sgd(rank=1)),
    "dgc": hooks.dgc(ratio=0.1),
    "quantize": hooks.chain(hooks.error_feedback(), hooks.quantize(bits=2)),
    "mean": hooks.mean(),
}


class Saving(Threads):
    """Members begin from what `states` gives for each, and save after every step; `began` is its hook's before its first one."""

    def __init__(
        self, path: Path, states: Callable[[str], Any] = lambda me: None, hook: Any = FEEDBACK, **more: Any
    ) -> None:
        path.mkdir()
        self.path, self.states, self.began = path, states, dict[str, Any]()
        self.data = more.pop("data", True)
        super().__init__(path, hook=lambda: hook, **more)

    def prepare(self, me: str, run: ElasticRun) -> None:
        super().prepare(me, run)
        if not self.data:
            run.data = run.training.data = None
        if (state := self.states(me)) is not None:
            run.load_state_dict(state)
        run.training.listeners.append(lambda view: view.begins and self.began.update({me: self.states_of(me)}))
        run.rescue, commit = self.path / "rescued", run.commit

        def save() -> bool:
            done = commit()
            if done and not run.left:
                run.save(self.path / f"{run.committed}-{run.group.rank}")
            return done

        run.commit = save  # type: ignore[method-assign]

    def train(self, me: str, run: ElasticRun, starters: int) -> None:
        if self.data:
            super().train(me, run, starters)
            return
        run.start(me, lambda: RunRecords(self.records), lambda *view: self.build(*view), Limits(starters=starters))
        while not run.done:
            run.model(DATA[run.group.rank][0]).sum().backward()
            run.step()

    def live_all(self, members: Sequence[str]) -> Saving:
        for me in members:
            self.start(me, len(members))
        self.join()
        return self

    def states_of(self, me: str) -> Any:
        return self.runs[me].training.replica.runner.state_dict()

    def saved(self, ranks: Iterable[int]) -> list[Any]:
        return [SavedState(file).read()["hook"] for file in self.files(ranks)]

    def files(self, ranks: Iterable[int], step: int = SAVED) -> list[Path]:
        return [self.path / f"{step}-{rank}" for rank in ranks]


def owed(states: Iterable[Mapping[str, Any]], hook: Any = FEEDBACK) -> dict[str, Tensor]:
    """The sum of what members owe, by parameter."""
    return add_owed(*(part for one in states for part in (hook.owed(one["state"]), one["owed"].items())))


def close(one: Mapping[str, Tensor], other: Mapping[str, Tensor], rtol: float = 1e-12) -> None:
    assert one
    torch.testing.assert_close(dict(one), dict(other), rtol=rtol, atol=0)


@pytest.mark.parametrize("name", HOOKS)
def test_as_many_ranks_have_the_same_bits(name: str, tmp_path: Path) -> None:
    whole = Saving(tmp_path / "a", hook=HOOKS[name]).live_all("abc")
    files = whole.files([2, 0, 1] if name != "mean" else [1])
    again = Saving(tmp_path / "b", lambda me: files, HOOKS[name]).live_all("xyz")
    assert not whole.errors | again.errors
    for one, other in zip("abc", "xyz", strict=True):
        assert all(torch.equal(value, again.results[other][key]) for key, value in whole.results[one].items())
        mine, others = (owed([world.states_of(me)], HOOKS[name]) for world, me in ((whole, one), (again, other)))
        assert all(torch.equal(value, others[key]) for key, value in mine.items())
        assert mine or name == "mean"


@pytest.mark.parametrize("data", [True, False])
@pytest.mark.parametrize("members", ["u", "uv", "uvwxy"])
def test_with_another_number_of_ranks_as_much_is_owed(members: str, data: bool, tmp_path: Path) -> None:
    """The sum, or with data of their own, whose gradients are divided by the number of members, the mean."""
    before = Saving(tmp_path / "a", data=data).live_all("abc")
    after = Saving(tmp_path / "b", lambda me: before.files(range(3)), data=data).live_all(members)
    assert not before.errors | after.errors
    factor = 1 if data else len(members) / 3
    expected = {key: value * factor for key, value in owed(before.saved(range(3))).items()}
    close(owed(after.began.values()), expected)
    assert [bool(owed([after.began[me]])) for me in members] == [rank < 3 for rank in range(len(members))]


def test_a_death_before_the_first_step_loses_nothing(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "x" and place == "forward" and run.view.epoch == 0:  # the others have no averages of this step
            raise Killed

    before = Saving(tmp_path / "a").live_all("abc")
    after = Saving(tmp_path / "b", lambda me: before.files(range(3)), fault=fault).live_all("xyz")
    assert not after.errors
    del after.began["x"]
    close(owed(after.began.values()), owed(before.saved(range(3))))


def test_what_was_not_saved_together_is_refused(tmp_path: Path) -> None:
    before, other = (Saving(tmp_path / us[0]).live_all(us) for us in (["a", "b", "c"], ["dd", "ee", "ff"]))
    files = before.files(range(3))
    run = ElasticRun(*make_model(), hook=FEEDBACK)
    together, each = "was not saved together", "Pass each once"
    wrong = {
        together: [[*files[:2], before.files([2], SAVED + 1)[0]], [*files[:2], other.files([2])[0]]],
        each: [files[:2], files[1:], [*files, files[0]]],
        "it is empty": [[]],
    }
    for message, lists in wrong.items():
        for one in lists:
            with pytest.raises(UsageError, match=message):
                run.load_state_dict(one)
    with pytest.warns(RuntimeWarning, match=r"here are those of \[1\]. What others owe is lost"):
        run.load_state_dict(files[1])
    run.release()


def test_members_that_begin_from_different_states_are_found(tmp_path: Path) -> None:
    before = Saving(tmp_path / "a").live_all("ab")
    after = Saving(tmp_path / "b", lambda me: before.files(range(2)) if me == "x" else None).live_all("xy")
    assert all(isinstance(after.errors[me], ReplicasDiverged) for me in "xy")


def test_other_bits_have_another_digest() -> None:
    def digest(*values: Tensor) -> int:
        model = nn.ParameterList(values)
        run = ElasticRun(model, torch.optim.SGD(model.parameters()))
        run.release()
        return run.training.digest

    one = torch.tensor([1.0, 0.0, float("nan"), 2.0])
    quiet = one.view(torch.int32) + torch.tensor([0, 0, 1, 0], dtype=torch.int32)
    others = [
        one * torch.tensor([1, -1, 1, 1]),
        quiet.view(torch.float32),
        one.flip(0),
        one.view(2, 2),
        one.view(torch.float64),
        one[:3],
    ]
    assert digest(one) == digest(one.clone()) == digest(torch.stack([one, one], 1)[:, 0])
    found = {digest(one), *map(digest, others), digest(one[:2], one[2:]), digest(one[2:], one[:2])}
    assert len(found) == len(others) + 3


def test_what_is_rescued_has_what_those_owed_that_are_left(tmp_path: Path) -> None:
    def fault(world: Threads, me: str, place: str, run: ElasticRun) -> None:
        if me == "b" and place == "forward" and run.committed == SAVED:
            for other in "ac":
                world.runs[other].leave()
            raise Killed

    before = Saving(tmp_path / "a", fault=fault, min_ranks=3).live_all("abc")
    assert all(isinstance(before.errors[me], TooFewMembers) for me in "ac")
    assert f"gw.elastic(state=glob.glob('{before.path}/rescued-*'))" in before.errors["a"].__notes__[0]
    files = sorted(before.path.glob("rescued-*"))
    assert [file.name for file in files] == ["rescued-0", "rescued-2"]
    with pytest.warns(RuntimeWarning, match=r"each of 3 ranks owes .* those of \[0, 2\]. What others owe is lost"):
        after = Saving(tmp_path / "b", lambda me: files).live_all("xy")
    assert not after.errors
    close(owed(after.began.values()), owed([before.states_of("a"), before.states_of("c")]))
