"""`fork_client.py python [options] -c CODE ...` under mpirun: the fork server runs it, and this process ends as that one does.

It takes milliseconds to start, where the interpreter would import torch. Standard streams, environment and directory are passed on.
When this process ends, by whatever signal, Linux kills the other.
"""

import json
import os
import signal
import socket
import sys

ADDRESS = "GRADWIRE_TESTS_FORK_SERVER"
"""The variable with the path of the server's socket."""
WHOLE_EXIT = "GRADWIRE_TESTS_WHOLE_EXIT"
"""The variable that is set if a fork must end as any process does: see `quick_exit.py`."""


DIE_WITH_CLIENT = """
import contextlib, fcntl, os, signal
fcntl.fcntl(3, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(3, fcntl.F_SETSIG, signal.SIGKILL)
fcntl.fcntl(3, fcntl.F_SETFL, os.O_RDWR | os.O_NONBLOCK | os.O_ASYNC)
with contextlib.suppress(BlockingIOError):
    os.read(3, 1)
    os._exit(1)  # the client has ended already
try:
    os.setpgid(0, {group})  # where signals for the client arrive
except PermissionError:  # it is in another session
    os.setpgid(0, 0)
"""
"""Linux kills the process when the other end of descriptor 3, a socket, is closed."""


def main() -> None:
    """Ask for the process, and wait for it."""
    words = sys.argv[2:]
    while words[0] != "-c":
        words.pop(0)
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    kept, lifeline = socket.socketpair()
    code = DIE_WITH_CLIENT.format(group=os.getpgrp()) + words[1]
    request = {"code": code, "path": "<string>", "args": words[2:], "env": dict(os.environ), "cwd": os.getcwd()}
    text = json.dumps(request).encode()
    with socket.socket(socket.AF_UNIX) as server, theirs, lifeline:
        server.connect(os.environ[ADDRESS])
        socket.send_fds(server, [len(text).to_bytes(8, "big")], [theirs.fileno(), 0, 1, 2, lifeline.fileno()])
        server.sendall(text)
    ours.recv(100)  # its process id
    status = int(ours.recv(100) or 1)
    kept.close()
    if status < 0:
        signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    sys.exit(status)


if __name__ == "__main__":
    main()
