"""`HubStore`: a rendezvous store in the hub, for members on several hosts. None of them, who could be cut off, hosts it."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Sequence
from typing import Any

from torch._C._distributed_c10d import Store

from gradwire.elasticity.hub import HubClient
from gradwire.errors import GroupError


class HubStore(Store):
    """The store of this name, by default a new one, in the hub of `client`. It has what groups use: they poll with `check`."""

    def __init__(self, client: HubClient, name: str | None = None) -> None:
        super().__init__()
        self.name = name or secrets.token_hex(8)
        self.host, self.port = client.address
        self._client = HubClient(client.address, key=client.key, timeout=10.0)  # a hub that was away has no stores
        self._lock = threading.Lock()
        self._closed = False
        if name is None:
            self._call("make", [])

    def _call(self, verb: str, keys: Sequence[str], *values: str | bytes) -> Any:
        texts = [(v.encode() if isinstance(v, str) else bytes(memoryview(v))).decode("latin-1") for v in values]
        with self._lock:
            answer = None if self._closed else self._client.call("store", self.name, verb, list(keys), *texts)
        if answer is None or None in (answer if verb == "read" else ()):
            raise GroupError(f"{verb} {keys} in store {self.name} of {self._client}: no such store or key any more.")
        return answer

    def close(self) -> None:
        """Any other call raises from now on."""
        with self._lock:
            self._closed = True
            self._client.close()

    def set(self, key: str, value: str | bytes) -> None:
        self._call("set", [key], value)

    def get(self, key: str) -> bytes:
        return str(self._call("read", [key])[0]).encode("latin-1")

    def add(self, key: str, amount: int) -> int:
        return int(self._call("add", [key], str(amount), secrets.token_hex(8)))

    def compare_set(self, key: str, expected: str | bytes, desired: str | bytes) -> bytes:
        return str(self._call("set", [key], desired, expected)).encode("latin-1")

    def check(self, keys: Sequence[str]) -> bool:
        return None not in self._call("check", keys)
