"""The registry of group kinds: a user's kind is taken wherever a kind can be named; entry points; mistakes."""

import importlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import gradwire as gw
from gradwire.cli import main
from gradwire.errors import UsageError, UsageTypeError
from gradwire.groups import C10dGroup, Group, GroupKind, Ranks, Recording, ThreadGroup, known_kinds, register_kind
from gradwire.groups.kinds import default_kind, find_kind
from gradwire.testing import check_group, kinds, run_ranks

OWN = "threads, shared_memory, hierarchical, gloo, nccl, mpi"


def recorded_gloo(store: Any, rank: int, size: int, *, timeout: float, name: str) -> Group:
    return Recording(C10dGroup.gloo(store, rank, size, timeout=timeout, name=name))


@pytest.fixture
def recorded() -> Iterator[str]:
    with register_kind(GroupKind("recorded", recorded_gloo)):
        yield "recorded"


# -- a kind of the user's ------------------------------------------------------------------------------------------------


def test_init_takes_a_users_kind(recorded: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(variable, raising=False)
    try:
        group = gw.init(kind=recorded)
        assert isinstance(group, Recording)
        group.barrier()
    finally:
        gw.launch.leave()


def test_run_ranks_and_the_conformance_suite_take_a_users_kind(recorded: str) -> None:
    assert recorded in kinds()

    def total(group: Group) -> tuple[str, float]:
        tensor = torch.ones(1)
        group.all_reduce(tensor)
        return type(group).__name__, tensor.item()

    assert run_ranks(total, 2, kind=recorded) == [("Recording", 2.0)] * 2
    check_group(lambda fn: run_ranks(fn, 2, kind=recorded), only=["all_reduce_ops", "broadcast"])


def test_ranks_of_a_users_kind_that_are_processes_can_be_lost(recorded: str) -> None:
    assert run_ranks(lambda group: os._exit(3) if group.rank else "here", 2, kind=recorded, lost=[1]) == ["here", None]


def test_a_users_kind_of_threads() -> None:
    worlds: dict[str, list[ThreadGroup]] = {}

    def build(store: Any, rank: int, size: int, *, timeout: float, name: str) -> Group:
        return worlds.setdefault(name, ThreadGroup.world(size, timeout=timeout, name=name))[rank]

    with register_kind(GroupKind("seats", build, Ranks.THREADS)):
        assert run_ranks(lambda group: (group.name, group.size), 3, kind="seats") == [("seats", 3)] * 3
        with pytest.raises(UsageError, match="cannot die alone"):
            run_ranks(lambda group: None, 2, kind="seats", lost=[1])


def test_torch_takes_a_users_kind(recorded: str) -> None:
    gw.register_backend("recorded_backend", kind=recorded)
    dist.init_process_group("recorded_backend", store=dist.HashStore(), rank=0, world_size=1)
    try:
        assert isinstance(gw.from_process_group(), Recording)
    finally:
        dist.destroy_process_group()


def test_the_demo_offers_a_users_kind(recorded: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["demo", "--kind", "pigeon"]) == 2
    assert "recorded" in capsys.readouterr().err


def test_a_users_kind_may_be_the_default() -> None:
    kind = GroupKind("for eight", recorded_gloo, default_when=lambda size, local_size: size == 8)
    with register_kind(kind):
        assert default_kind(8, 8) == "for eight"
        assert default_kind(4, 4) == "shared_memory"
    assert default_kind(8, 8) == "shared_memory"


# -- mistakes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ask", "who", "known"),
    [
        (lambda: gw.init(kind="pigeon"), r"gw.init\(kind='pigeon'\)", f"auto, {OWN}"),
        (lambda: gw.register_backend(kind="pigeon"), r"register_backend\(kind='pigeon'\)", OWN),
        (lambda: run_ranks(recorded_gloo, 2, kind="pigeon"), r"run_ranks\(recorded_gloo, 2, kind='pigeon'\)", OWN),
    ],
    ids=["init", "register_backend", "run_ranks"],
)
def test_an_unknown_kind_is_an_error_that_lists_the_known_ones(
    ask: Callable[[], Any], who: str, known: str, recorded: str
) -> None:
    with pytest.raises(UsageError, match=rf"^{who}: there is no such kind. Known kinds: {known}, recorded\.$"):
        ask()


@pytest.mark.parametrize("name", ["gloo", "recorded"])
def test_a_name_cannot_be_registered_twice(name: str, recorded: str) -> None:
    with pytest.raises(UsageError, match=rf"the name '{name}' is already registered, as GroupKind\(name='{name}'"):
        register_kind(GroupKind(name, recorded_gloo))


@pytest.mark.parametrize("name", ["", "auto"])
def test_names_that_mean_something_else_are_refused(name: str) -> None:
    with pytest.raises(UsageError, match=f"the name '{name}' is not allowed"):
        register_kind(GroupKind(name, recorded_gloo))


def test_only_a_kind_can_be_registered() -> None:
    with pytest.raises(UsageTypeError, match=r"pass GroupKind\(name, build\)"):
        register_kind(recorded_gloo)  # type: ignore[arg-type]


def test_a_kind_can_be_taken_back() -> None:
    handle = register_kind(GroupKind("passing", recorded_gloo))
    handle.remove()
    handle.remove()
    assert "passing" not in known_kinds()
    register_kind(GroupKind("passing", recorded_gloo)).remove()


def test_processes_are_not_threads() -> None:
    with pytest.raises(
        UsageError,
        match="must be threads of one process. Choose another kind: shared_memory, hierarchical, gloo, nccl, mpi",
    ):
        find_kind("threads", who="test").build(dist.PrefixStore("p", dist.HashStore()), 0, 2, timeout=1, name="x")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_nccl_without_a_device_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="there is no CUDA device here"):
        find_kind("nccl", who="test").build(dist.HashStore(), 0, 1, timeout=1, name="x")


def test_a_kind_that_is_neither_a_name_nor_a_function_is_a_usage_error() -> None:
    with pytest.raises(UsageTypeError, match=r"kind is 3. Pass one of threads, .*, or a function that makes a group"):
        gw.register_backend("numbered", kind=3)  # type: ignore[arg-type]


# -- entry points --------------------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Makes a distribution with one entry point, as pip would install it."""
    monkeypatch.syspath_prepend(str(tmp_path))
    (tmp_path / "kinds_to_install.py").write_text(
        "from gradwire.groups import C10dGroup, GroupKind\n"
        "def build(store, rank, size, *, timeout, name):\n"
        "    return C10dGroup.gloo(store, rank, size, timeout=timeout, name=name)\n"
        "kind = GroupKind('whole', build, on_cuda=False)\n"
        "number = 3\n"
    )
    (tmp_path / "kinds_that_fail.py").write_text("raise OSError('no licence')\n")
    (tmp_path / "kinds_that_exit.py").write_text("raise SystemExit('on import')\n")

    def install(package: str, entry_point: str) -> None:
        folder = tmp_path / f"{package}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        (folder / "entry_points.txt").write_text(f"[gradwire.groups]\n{entry_point}\n")
        importlib.invalidate_caches()

    return install


def test_a_package_provides_a_kind(install: Callable[[str, str], None]) -> None:
    install("plain", "plain = kinds_to_install:build")
    install("described", "whole = kinds_to_install:kind")
    assert {"plain", "whole"} <= set(known_kinds())
    assert find_kind("plain", who="test").on_cuda
    assert not find_kind("whole", who="test").on_cuda
    assert run_ranks(lambda group: group.size, 2, kind="plain") == [2, 2]


def test_a_broken_entry_point_is_named_when_it_is_asked_for_and_only_then(install: Callable[[str, str], None]) -> None:
    install("broken", "broken = kinds_that_fail:build")
    assert "broken" in known_kinds()
    assert run_ranks(lambda group: group.size, 2) == [2, 2]
    with pytest.raises(UsageError, match="there is no such kind. Known kinds: .*, broken"):
        gw.init(kind="pigeon")
    with pytest.raises(
        UsageError,
        match=r"gw.init\(kind='broken'\): the entry point broken = kinds_that_fail:build of broken 1.0 cannot be loaded: OSError",
    ) as caught:
        gw.init(kind="broken")
    assert isinstance(caught.value.__cause__, OSError)


def test_an_entry_point_that_refers_to_something_else(install: Callable[[str, str], None]) -> None:
    install("numbers", "number = kinds_to_install:number")
    with pytest.raises(
        UsageTypeError, match="number = kinds_to_install:number of numbers 1.0 is 3. It must refer to a GroupKind"
    ):
        find_kind("number", who="test")


def test_two_packages_with_one_kind(install: Callable[[str, str], None]) -> None:
    install("one", "same = kinds_to_install:build")
    install("two", "same = kinds_to_install:kind")
    assert known_kinds().count("same") == 1
    with pytest.raises(
        UsageError, match="several packages provide this kind: same = .* of (one|two) 1.0, same = .*Uninstall"
    ):
        find_kind("same", who="test")


@pytest.mark.parametrize("kind", [GroupKind(3, recorded_gloo), GroupKind("nothing", None)])  # type: ignore[arg-type]
def test_a_kind_has_a_name_and_a_function(kind: GroupKind) -> None:
    with pytest.raises(UsageTypeError, match="a string and a function"):
        register_kind(kind)


def test_an_entry_point_that_ends_the_program_is_named(install: Callable[[str, str], None]) -> None:
    install("exiting", "exits = kinds_that_exit:kind")
    with pytest.raises(UsageError, match="cannot be loaded: SystemExit: on import"):
        run_ranks(str, 1, kind="exits")


def test_what_is_built_must_be_a_group_and_what_was_built_before_is_closed() -> None:
    built: list[Group] = []

    def second_is_none(store: Any, rank: int, size: int, *, timeout: float, name: str) -> Any:
        if rank:
            return "no group"
        built.append(ThreadGroup.world(1, timeout=timeout)[0])
        return built[0]

    with (
        register_kind(GroupKind("odd", second_is_none, Ranks.THREADS)),
        pytest.raises(UsageTypeError, match="the kind 'odd' returned 'no group'"),
    ):
        run_ranks(str, 2, kind="odd")
    assert built[0].closed
