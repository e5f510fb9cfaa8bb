"""What the launcher and init() choose by themselves: environment, kind of group, memory per rank."""

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from gradwire.groups.kinds import default_kind
from gradwire.launch import Address, Launcher, World, find_world
from gradwire.launch.entry import _agree
from gradwire.launch.environment import HUB, LocalWorld, rank_environment
from gradwire.launch.preload_check import preloaded_modules, source_of, why_not_preload

STORE = Address("127.0.0.1", 4000)
PRIVATE = "123:4:5:678"


def environment(base=None, extra=None, *, rank=1, size=4, cpus=10):
    return rank_environment(base or {}, extra or {}, rank, LocalWorld(size, PRIVATE, STORE, cpus))


def test_a_rank_finds_its_world():
    world = find_world(environment())
    assert (world.rank, world.size, world.launcher) == (1, 4, Launcher.GRADWIRE)
    assert (world.private, world.store) == (PRIVATE, None)


def test_scripts_written_for_torchrun_find_theirs():
    ours = environment()
    world = find_world({name: value for name, value in ours.items() if not name.startswith("GRADWIRE_")})
    assert (world.rank, world.size, world.launcher, world.store) == (1, 4, Launcher.TORCHRUN, STORE)
    assert (world.local_rank, world.local_size, world.hosted) == (1, 4, True)


def test_a_launcher_around_us_is_forgotten():
    outer = {"RANK": "7", "WORLD_SIZE": "9", "TORCHELASTIC_RUN_ID": "outer", "GROUP_RANK": "3", "HOME": "/home"}
    inner = environment(outer)
    assert (inner["RANK"], inner["WORLD_SIZE"], inner["HOME"]) == ("1", "4", "/home")
    assert not {"TORCHELASTIC_RUN_ID", "GROUP_RANK"} & inner.keys()


@pytest.mark.parametrize(("cpus", "size", "threads"), [(10, 4, "2"), (2, 4, "1"), (1, 1, "1")])
def test_ranks_share_the_cores(cpus, size, threads):
    assert environment(cpus=cpus, size=size, rank=0)["OMP_NUM_THREADS"] == threads


def test_what_the_user_says_counts():
    base = {"OMP_NUM_THREADS": "7", "PYTHONUNBUFFERED": ""}
    ours = environment(base, {"PYTHONFAULTHANDLER": "0", "MASTER_ADDR": "mine"})
    assert (ours["OMP_NUM_THREADS"], ours["PYTHONUNBUFFERED"]) == ("7", "")
    assert (ours["PYTHONFAULTHANDLER"], ours["MASTER_ADDR"]) == ("0", "mine")
    assert environment({"A": "1"}, {"A": "2"})["A"] == "2"


@pytest.mark.parametrize(
    ("hub", "interface"), [({}, "lo"), ({HUB: "127.0.0.1:4001"}, "lo"), ({HUB: "10.0.0.1:4001"}, None)]
)
def test_gloo_is_reached_from_other_hosts_if_the_hub_is(hub, interface):
    assert environment(extra=hub).get("GLOO_SOCKET_IFNAME") == interface


@pytest.mark.parametrize(
    ("size", "local_size", "kind"),
    [
        (1, 1, "threads"),
        (1, None, "threads"),
        (4, 4, "shared_memory"),
        (4, 2, "hierarchical"),
        (4, 1, "gloo"),
        (4, None, "gloo"),
    ],
)
def test_the_kind_that_suits_the_hosts_is_chosen(size: int, local_size: int | None, kind: str) -> None:
    assert default_kind(size, local_size) == kind


@pytest.mark.parametrize(
    ("devices", "asked", "kind"),
    [
        ([2, 2], "auto", "nccl"),
        ([4, 4], "auto", "nccl"),
        ([2, 1], "auto", "shared_memory"),  # decided by all ranks together
        ([0, 0], "auto", "shared_memory"),
        ([2, 2], "gloo", "gloo"),
    ],
)
def test_nccl_is_chosen_where_every_rank_has_a_gpu(monkeypatch, devices, asked, kind):
    store = HashStore()
    visible = threading.local()
    monkeypatch.setattr(dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: visible.devices > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: visible.devices)

    def rank_main(rank: int) -> str:
        visible.devices = devices[rank]
        return _agree(store, World(rank, 2, Launcher.TORCHRUN, local_size=2), asked, 60.0)

    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(rank_main, range(2))) == [kind, kind]


@pytest.mark.parametrize(
    ("source", "variable"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '1'", "OMP_NUM_THREADS"),
        ("from os import environ\nif x:\n    environ['MKL_NUM_THREADS'] = '1'", "MKL_NUM_THREADS"),
        ("os.environ.setdefault('TORCH_LOGS', '+dynamo')", "TORCH_LOGS"),
        ("os.environ.update({'A': '1', 'PYTORCH_CUDA_ALLOC_CONF': 'x'})", "PYTORCH_CUDA_ALLOC_CONF"),
        ("os.environ.update(KMP_AFFINITY='none')", "KMP_AFFINITY"),
        ("os.environ.update(settings)", "variables"),
        ("os.environ |= settings", "variables"),
        ("os.environ[name] = '1'", "variables"),
        ("os.environ.pop('OPENBLAS_NUM_THREADS', None)", "OPENBLAS_NUM_THREADS"),
        ("del os.environ['GOMP_CPU_AFFINITY']", "GOMP_CPU_AFFINITY"),
        ("os.putenv('OMP_PROC_BIND', 'true')", "OMP_PROC_BIND"),
        ("os.environ['CUDA_VISIBLE_DEVICES'] = '0'", ""),  # read when CUDA is initialized
        ("os.environ['A'] = os.environ['OMP_NUM_THREADS']", ""),
        ("env = os.environ.copy(); env['OMP_NUM_THREADS'] = '1'", ""),
        ("settings.update(OMP_NUM_THREADS=1)", ""),
    ],
)
def test_variables_that_a_script_sets_for_torch_are_found(source, variable):
    assert why_not_preload(f"import os, torch\n{source}") == (f"the script sets {variable}" if variable else "")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"import os.path\nfrom sys import argv", "the script imports only modules of Python"),
        (b"def f():\n    from . import model", ""),
        (b"import importlib\nimportlib.import_module('torch')", ""),
        (b"def f(:", "the script cannot be parsed"),
        (b"PK\x03\x04\x00", "the script cannot be parsed"),  # an archive
        (b"# coding: latin-1\nimport torch  # \xe9", ""),
    ],
)
def test_what_a_script_imports(source, expected):
    assert why_not_preload(source) == expected


def test_what_an_optimizer_imports_is_imported_once_for_all_ranks():
    sources = (b"import torch", b"import torch\ntorch.optim.SGD", None)  # the last one: of an installed module
    assert [len(preloaded_modules(source)) for source in sources] == [1, 2, 2]


def test_the_source_of_a_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a" / "b").mkdir(parents=True)
    names = {"a.b": "a/b/__main__.py", "a.b.c": "a/b/c.py", "d": "d.py"}
    assert {name: str(source_of(name, module=True)) for name in names} == names
    assert str(source_of("a/x.y.py", module=False)) == "a/x.y.py"
