"""A hub that is killed, or stopped for a while, loses nothing that it has confirmed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from gradwire.elasticity.hub import Address, HubClient

_PROGRAM = """
import sys, time
from gradwire.elasticity.hub import Hub
hub = Hub(sys.argv[1], key=b"secret", address=("127.0.0.1", int(sys.argv[2])))
print(hub.address[1], flush=True)
time.sleep(600)
"""


def start(path: Path, port: int = 0) -> tuple[subprocess.Popen[str], Address]:
    process = subprocess.Popen(
        [sys.executable, "-c", _PROGRAM, str(path), str(port)], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    return process, ("127.0.0.1", int(process.stdout.readline()))


def end(process: subprocess.Popen[str]) -> None:
    process.kill()
    process.communicate()


def test_what_was_confirmed_is_there_after_sigkill_and_sigstop(tmp_path: Path) -> None:
    process, address = start(tmp_path / "hub")
    confirmed: list[str] = []
    done = threading.Event()

    def write() -> None:
        client = HubClient(address, key=b"secret", timeout=120.0)
        while not done.is_set():
            number = str(len(confirmed))
            assert client.compare_set(f"n/{number}", "", number) == number
            confirmed.append(number)
        client.close()

    writer = threading.Thread(target=write)
    writer.start()
    try:
        for _ in range(5):
            before = len(confirmed)
            while len(confirmed) < before + 20:
                assert writer.is_alive()
            end(process)
            process, _ = start(tmp_path / "hub", address[1])
        os.kill(process.pid, signal.SIGSTOP)
        stopped_at = len(confirmed)
        time.sleep(0.2)
        assert len(confirmed) <= stopped_at + 1  # its reply may have been on the way
        os.kill(process.pid, signal.SIGCONT)
        while len(confirmed) < stopped_at + 20:
            assert writer.is_alive()
    finally:
        done.set()
        writer.join(120.0)
        client = HubClient(address, key=b"secret")
        records = client.read("n/")[1]
        client.close()
        end(process)
    assert records == {f"n/{n}": n for n in confirmed}
