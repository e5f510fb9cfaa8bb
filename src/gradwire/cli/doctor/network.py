"""The network interfaces of this host, and what its name resolves to."""

from __future__ import annotations

import fcntl
import socket
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_GET_ADDRESS = 0x8915  # SIOCGIFADDR
_REQUEST = 256  # at least sizeof(struct ifreq)
LOOPBACK = "lo"


@dataclass(frozen=True, slots=True)
class Interface:
    """A network interface. `address` is its IPv4 address, empty without one; `mbit` its nominal speed, 0 if unknown."""

    name: str
    address: str
    is_up: bool
    mbit: int = 0

    def __str__(self) -> str:
        speed = f", {self.mbit:,} Mbit/s" if self.mbit > 0 else ""
        return f"{self.address or 'no IPv4 address'}{speed}{'' if self.is_up else ', down'}"


def interfaces() -> Iterator[Interface]:
    """All of this host's, as this process sees them."""
    for _, name in socket.if_nameindex():
        folder = Path("/sys/class/net", name)
        speed = _read(folder / "speed")  # -1, or an error, where the device has none
        state = _read(folder / "operstate")
        yield Interface(name, _address(name), state != "down", max(0, int(speed)) if _is_number(speed) else 0)


def _address(name: str) -> str:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack(f"{_REQUEST}s", name.encode()[:15])
        try:
            reply = fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
        except OSError:  # it has none
            return ""
    return socket.inet_ntoa(reply[20:24])


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _is_number(text: str) -> bool:
    return text.removeprefix("-").isdecimal()


def host_addresses(name: str) -> tuple[str, ...]:
    """What a host's name resolves to, without duplicates; nothing if it does not."""
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def is_loopback(address: str) -> bool:
    """Whether other hosts cannot reach it."""
    return address == "::1" or address.startswith("127.")
