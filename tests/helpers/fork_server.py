"""The program of the server in `warm_python.py`: imports what tests need, and forks a process for each request.

It has one thread and waits for requests and for the ends of its children only. A child leaves the loop and runs its code at the top
level of this file, so that it ends as a program does.
"""

import gc

gc.disable()  # nothing of what is imported is garbage

import atexit  # noqa: E402
import builtins  # noqa: E402
import contextlib  # noqa: E402
import ctypes  # noqa: E402
import fcntl  # noqa: E402
import importlib  # noqa: E402
import json  # noqa: E402
import os  # noqa: E402
import select  # noqa: E402
import signal  # noqa: E402
import socket  # noqa: E402
import sys  # noqa: E402
import tempfile  # noqa: E402
import types  # noqa: E402

PRELOADED = (
    "torch", "torch.distributed", "torch._dynamo", "numba", "gradwire.hooks", "gradwire.interop", "gradwire.parallel",
    "gradwire.testing.pool.warm_worker", "gradwire.launch", "torch.utils.data", "gradwire.cli.run", "gradwire.observe.recording",
    "helpers.forked_python",
)  # fmt: skip


def next_request(source: socket.socket) -> tuple[dict | None, list[int]]:
    """A request and its descriptors; None if the other end has closed."""
    head, fds, _, _ = socket.recv_fds(source, 8, 16)
    size, text = int.from_bytes(head, "big"), b""
    while len(text) < size and (more := source.recv(size - len(text))):
        text += more
    return json.loads(text) if head and len(text) == size else None, fds


def tell(status: socket.socket, number: int) -> None:
    with contextlib.suppress(OSError):  # nobody wants to know any more
        status.send(str(number).encode())


def serve(control: socket.socket, door: socket.socket) -> dict:
    """Fork for every request of the tests, or of a client at the door. Returns in the children only."""
    children: dict[int, tuple[int, socket.socket]] = {}
    while True:
        ready, _, _ = select.select([control, door, *children], [], [])
        for pidfd in ready:
            if pidfd in children:
                pid, status = children.pop(pidfd)
                os.close(pidfd)
                tell(status, os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))
                status.close()
        if control in ready:
            request, passed = next_request(control)
            if request is None:
                os._exit(0)  # the tests are over
        elif door in ready:
            with door.accept()[0] as client:
                request, passed = next_request(client)
            if request is None:
                for fd in passed:
                    os.close(fd)
                continue
        else:
            continue
        told, *fds = passed
        pid = os.fork()
        if pid == 0:
            os.close(told)
            control.close()
            door.close()
            for pidfd, (_, status) in children.items():
                os.close(pidfd)
                status.close()
            become(request, fds)
            return request
        for fd in fds:
            os.close(fd)
        status = socket.socket(fileno=told)
        children[os.pidfd_open(pid)] = pid, status
        tell(status, pid)


def become(request: dict, fds: list[int]) -> None:
    """The child's descriptors, environment and place are those of the request."""
    high = [os.dup2(fd, 100 + i, inheritable=False) for i, fd in enumerate(fds)]
    for fd in fds:
        os.close(fd)
    for i, fd in enumerate(high):
        os.dup2(fd, i)
        os.close(fd)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    tempfile.tempdir = None  # determined again from the environment
    if "lifeline" in request:
        die_with(request["lifeline"])
        join_group(request["process_group"])
    signal.signal(signal.SIGINT, signal.default_int_handler)


def die_with(lifeline: int) -> None:
    """Linux kills this process when the other end of a socket is closed."""
    fcntl.fcntl(lifeline, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(lifeline, fcntl.F_SETFL, os.O_RDWR | os.O_NONBLOCK | os.O_ASYNC)
    with contextlib.suppress(BlockingIOError):
        os.read(lifeline, 1)
        os._exit(1)  # it has been closed already


def join_group(group: int) -> None:
    """Be in the process group of the client, where signals for it arrive, or in one of its own if that is in another session."""
    try:
        os.setpgid(0, group)
    except PermissionError:
        os.setpgid(0, 0)


def load_compiler() -> None:
    """What numba imports when a loop is compiled, or loaded, for the first time: half a second in every rank."""
    from gradwire.collectives import ReduceOp
    from gradwire.groups.shared_memory.fold import CompiledFold

    CompiledFold.find(ReduceOp.SUM, sys.modules["torch"].float32, 2)
    if "colorama.initialise" in sys.modules:  # numba imports it, and every fork would write its escape sequence at exit
        atexit.unregister(sys.modules["colorama.initialise"].reset_all)


if __name__ == "__main__":
    del sys.path[0]  # the directory of this file; a child puts that of its program there
    parent = int(sys.argv[2])
    pr_set_pdeathsig = 1
    ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
    if os.getppid() != parent:
        sys.exit()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the whole terminal
    sys.path.append(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))  # where `helpers` and `detection` are
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    with contextlib.suppress(
        ImportError
    ):  # Dynamo shows progress bars where it is installed, and the first starts a thread
        importlib.import_module("tqdm").tqdm.monitor_interval = 0
    with contextlib.suppress(ImportError):
        load_compiler()
    threads = os.listdir("/proc/self/task")
    if len(threads) > 1:
        sys.exit(
            f"the fork server has {len(threads)} threads, so it cannot fork: something that it imports starts them"
        )
    gc.collect()
    gc.freeze()
    asked = serve(socket.socket(fileno=int(sys.argv[1])), socket.socket(fileno=int(sys.argv[3])))
    gc.enable()
    path = asked["path"]
    sys.argv[:] = ["-c" if path == "<string>" else path, *asked["args"]]
    sys.path.insert(0, "" if path == "<string>" else os.path.dirname(os.path.abspath(path)))
    program = types.ModuleType("__main__")
    program.__dict__.update(__builtins__=builtins, __file__=path)
    sys.modules["__main__"] = program
    exec(compile(asked["code"], path, "exec"), program.__dict__)
