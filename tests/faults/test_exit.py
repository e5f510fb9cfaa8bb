"""The interpreter ends with hooks registered and works in flight: exit code 0, nothing printed, promptly."""

import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from helpers.warm_python import WarmPython

LIMIT = 240
"""Seconds for a whole script: nothing here is about how long torch takes to import on a busy machine."""
pytestmark = [pytest.mark.timeout(LIMIT + 60), pytest.mark.usefixtures("whole_exit")]

PAIR = """
        import torch, torch.distributed as dist, threading
        from gradwire.groups import C10dGroup, SharedMemoryGroup, Verified
        store, groups = dist.HashStore(), {}
        def make(rank): groups[rank] = MAKE
        ranks = [threading.Thread(target=make, args=(r,)) for r in range(2)]
        for r in ranks: r.start()
        for r in ranks: r.join()
"""
"""A group of two ranks in one process."""

SCRIPTS = {
    "threads": """
        import torch
        from gradwire.groups import ThreadGroup
        a, b = ThreadGroup.world(2)
        a.on_completion(lambda info: None)
        a.events.listen(lambda event: None)
        work = a.all_reduce(torch.ones(3), async_op=True)
        future = work.get_future().then(lambda f: f.value())
    """,
    "gloo, no other rank joins": PAIR.replace("MAKE", "C10dGroup.gloo(store, rank, 2)")
    + """
        groups[0].on_completion(lambda info: None)
        works = [groups[0].all_reduce(torch.ones(3), async_op=True) for _ in range(3)]
        works.append(groups[0].recv(torch.ones(3), src=1, async_op=True))
        works.append(groups[0].all_reduce(torch.ones(3, dtype=torch.int16), async_op=True))
        future = works[0].get_future()
    """,
    "gloo, just finishing": PAIR.replace("MAKE", "Verified(C10dGroup.gloo(store, rank, 2))")
    + """
        for group in groups.values():
            group.on_completion(lambda info: None)
            for _ in range(5): group.all_reduce(torch.ones(100_000), async_op=True)
    """,
    "gloo, its thread is the last to drop a tensor": """
        import sys, torch, torch.distributed as dist, threading
        from gradwire.groups import C10dGroup
        store, groups = dist.HashStore(), {}
        def make(rank, number):
            groups[rank, number] = C10dGroup.gloo(dist.PrefixStore(f"{number}", store), rank, 2)
        makers = [threading.Thread(target=make, args=(rank, number)) for rank in range(2) for number in range(8)]
        for maker in makers: maker.start()
        for maker in makers: maker.join()
        sys.setswitchinterval(1000)  # the main thread keeps the interpreter lock to the end, unless it waits
        def owned_by_python(): return torch.frombuffer(bytearray(4_000_000), dtype=torch.float32)
        for number in range(8):
            groups[1, number].all_reduce(owned_by_python(), async_op=True)
        for number in range(8):
            groups[0, number].all_reduce(owned_by_python())
    """,
    "gloo, closed after a time-out": """
        import os, tempfile, time, torch, torch.distributed as dist
        from gradwire.errors import CollectiveTimeout, PeerLost
        from gradwire.groups import C10dGroup
        file, path = tempfile.mkstemp()
        closed, closing = os.pipe()
        child = os.fork()  # nothing has started a thread
        rank = 0 if child else 1
        os.close(closed if rank == 0 else closing)
        group = C10dGroup.gloo(dist.FileStore(path, 2), rank, 2, timeout=30 if rank else 1.5)
        group.barrier()
        if rank == 1:
            os.read(closed, 1)
            began = time.perf_counter()
            try:
                group.all_reduce(torch.ones(3))
            except PeerLost as error:
                assert error.rank == 0 and time.perf_counter() - began < 20, error
        else:
            message = group.recv(torch.ones(3), src=1, async_op=True)
            try:
                group.all_reduce(torch.ones(3))
            except CollectiveTimeout:
                pass
            else:
                raise AssertionError
        group.close()
        if rank == 0:
            os.close(closing)
            assert os.waitpid(child, 0)[1] == 0
            os.remove(path)
    """,
    "gloo, a receive in flight when both end": """
        import os, sys, torch, torch.distributed as dist
        from gradwire.groups import C10dGroup
        child = os.fork()  # nothing has started a thread
        rank = 0 if child else 1
        # Neither rank may remove the file: a FileStore whose file has become shorter reads forever.
        group = C10dGroup.gloo(dist.FileStore(sys.argv[1], 2), rank, 2, timeout=30)
        group.barrier()
        works = [group.recv(torch.ones(3), src=1 - rank, tag=tag, async_op=True) for tag in range(50)]
        group.barrier()
    """,
    "gloo, inside a store that answers late": """
        import fcntl, os, tempfile, threading, time
        file, path = tempfile.mkstemp()
        (asked, ask), (locked, lock) = os.pipe(), os.pipe()
        child = os.fork()  # nothing has started a thread
        if child == 0:  # a rank that is stopped for two seconds while it has the store's lock
            os.read(asked, 1)
            fcntl.flock(file, fcntl.LOCK_EX)
            os.write(lock, b"x")
            time.sleep(2)
            os._exit(0)
        os.close(file)
        import torch, torch.distributed as dist
        from gradwire.groups import C10dGroup
        class Last:  # goes when modules do: the interpreter takes two seconds more to end
            def __del__(self, sleep=time.sleep): sleep(2)
        last, groups = Last(), {}
        def make(rank): groups[rank] = C10dGroup.gloo(dist.FileStore(path, 2), rank, 2)
        ranks = [threading.Thread(target=make, args=(r,)) for r in range(2)]
        for r in ranks: r.start()
        for r in ranks: r.join()
        os.write(ask, b"x"), os.read(locked, 1)
        work = groups[0].all_reduce(torch.ones(3), async_op=True)
        deadline = time.monotonic() + 30
        while not any(thread.name == "gradwire-store-call" for thread in threading.enumerate()):
            assert time.monotonic() < deadline
            time.sleep(0.01)
        os.remove(path)
    """,
    "shared memory, no other rank joins": PAIR.replace("MAKE", "SharedMemoryGroup(store, rank, 2)")
    + """
        groups[0].on_completion(lambda info: None)
        works = [groups[0].all_reduce(torch.ones(n), async_op=True) for n in (3, 100_000, 3)]
        works.append(groups[0].recv(torch.ones(3), src=1, async_op=True))
        works.append(groups[0].send(torch.ones(3), dst=1, async_op=True))
        bucket = groups[0].allocate(100)
        future = works[0].get_future()
    """,
    "shared memory, just finishing": PAIR.replace("MAKE", "SharedMemoryGroup(store, rank, 2)")
    + """
        for group in groups.values():
            group.on_completion(lambda info: None)
            for _ in range(5): group.all_reduce(torch.ones(300_000), async_op=True)
    """,
    "shared memory, sys.exit in the middle": """
        import os, sys, tempfile, time, torch, torch.distributed as dist
        from gradwire.errors import PeerLost
        from gradwire.groups import SharedMemoryGroup
        file, path = tempfile.mkstemp()
        child = os.fork()  # nothing has started a thread
        rank = 0 if child else 1
        group = SharedMemoryGroup(dist.FileStore(path, 2), rank, 2)
        t = torch.ones(3)
        group.all_reduce(t)
        assert t.eq(2).all()
        if rank == 1:
            work = group.send(torch.ones(3), dst=0, async_op=True)
            sys.exit()
        began = time.perf_counter()
        try:
            group.all_reduce(torch.ones(1_000_000), label="doomed")
        except PeerLost as error:
            assert error.rank == 1 and "doomed" in str(error), error
        else:
            raise AssertionError
        assert os.waitpid(child, 0)[1] == 0
        assert time.perf_counter() - began < 60
        os.remove(path)
    """,
    "torch's API": """
        import torch, torch.distributed as dist
        import gradwire.interop as interop
        interop.register_backend()
        dist.init_process_group("gradwire", store=dist.HashStore(), rank=0, world_size=1)
        interop.from_process_group(dist.group.WORLD).on_completion(lambda info: None)
        work = dist.all_reduce(torch.ones(3), async_op=True)
    """,
    "a model": """
        import torch
        from gradwire.groups import ThreadGroup
        from gradwire.parallel import DistributedDataParallel
        (group,) = ThreadGroup.world(1)
        model = DistributedDataParallel(torch.nn.Linear(2, 2), process_group=group)
        group.on_completion(lambda info: None)
        loss = model(torch.ones(1, 2)).sum()
        loss.backward()
    """,
}

END = """
import pathlib, sys, time
pathlib.Path(sys.argv[2]).write_text(str(time.monotonic()))
"""


@pytest.mark.parametrize("name", SCRIPTS)
def test_exit_is_clean(name: str, tmp_path: Path, warm_python: WarmPython) -> None:
    script = textwrap.dedent(SCRIPTS[name]) + END
    done = warm_python.run(script, str(tmp_path / "store"), str(tmp_path / "end"), timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert time.monotonic() - float((tmp_path / "end").read_text()) < 40


def test_an_uncaught_time_out_under_gradwire_run(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        textwrap.dedent("""
        import time, torch
        import gradwire as gw
        group = gw.init(kind="gloo", timeout=2)
        group.barrier()
        if group.rank == 1:
            time.sleep(60)
        group.all_reduce(torch.ones(3))
    """)
    )
    command = [sys.executable, "-m", "gradwire", "run", "-n", "2", "--timeout", "5", str(script)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT, check=False)
    assert done.returncode == 1, done.stderr
    assert "CollectiveTimeout" in done.stderr
    assert "terminate called" not in done.stderr


FORKING = """
    import multiprocessing, os, sys, tempfile, warnings, torch, torch.distributed as dist
    warnings.simplefilter("ignore")  # newer Pythons warn of fork in a process with threads
    from gradwire.errors import UsageError
    from gradwire.groups import C10dGroup, HierarchicalGroup, SharedMemoryGroup, Verified
    make = {make}
    file, path = tempfile.mkstemp()
    peer = os.fork()  # nothing has started a thread
    rank = 0 if peer else 1
    groups = [make(dist.FileStore(path, 2), rank, 2)]
    t = torch.ones(3)
    groups[0].all_reduce(t)
    if rank == 1:
        child = os.fork()
        if child == 0:
            try:
                groups[0].all_reduce(t)
            except UsageError as error:
                assert "forked" in str(error), error
                sys.exit(0)
            sys.exit(1)
        assert os.waitpid(child, 0)[1] == 0
        process = multiprocessing.get_context("fork").Process(target=groups.clear)
        process.start()
        process.join(100)
        assert process.exitcode == 0, process.exitcode
    for _ in range(3):
        t.fill_(1)
        groups[0].all_reduce(t)
        assert t.eq(2).all()
    groups[0].barrier()
    groups.pop().close()
    if rank == 0:
        assert os.waitpid(peer, 0)[1] == 0
        if os.path.exists(path):  # the store may have removed it
            os.remove(path)
"""

MAKERS = {
    "shared memory": "SharedMemoryGroup",
    "gloo": "C10dGroup.gloo",
    "two-level": "lambda store, rank, size: HierarchicalGroup.discover(store, rank, size, host=f'host {rank}')",
    "wrapped": "lambda store, rank, size: Verified(SharedMemoryGroup(store, rank, size))",
}


@pytest.mark.parametrize("name", MAKERS)
def test_children_that_a_rank_forks_do_not_take_it_along(name: str, warm_python: WarmPython) -> None:
    done = warm_python.run(textwrap.dedent(FORKING).replace("{make}", MAKERS[name]), timeout=LIMIT)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
