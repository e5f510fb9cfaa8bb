"""Durations, sizes and foreign text as people read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any


def duration(seconds: float) -> str:
    """A duration, to three digits.

    >>> [duration(s) for s in (0, 2.5e-6, 0.01841, 1.5, 93.7, 4000, 99999)]
    ['0 ms', '2.5 µs', '18.4 ms', '1.5 s', '1 min 34 s', '1 h 6 min', '27 h 46 min']
    """
    if seconds >= 3600:
        return f"{int(seconds) // 3600} h {int(seconds) % 3600 // 60} min"
    if seconds >= 60:
        return f"{round(seconds) // 60} min {round(seconds) % 60} s"
    if seconds >= 0.9995:
        return f"{seconds:.3g} s"
    if seconds >= 0.9995e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs" if seconds > 0 else "0 ms"


def elapsed(seconds: float) -> str:
    """A duration that is usually of seconds, with one digit after the point.

    >>> elapsed(6), elapsed(0.0019)
    ('6.0 s', '1.9 ms')
    """
    return f"{seconds:.1f} s" if seconds >= 0.05 else duration(seconds)


def plural(number: int, word: str) -> str:
    """A number of things.

    >>> plural(1, "rank"), plural(1024, "rank")
    ('1 rank', '1,024 ranks')
    """
    return f"{number:,} {word}{'' if number == 1 else 's'}"


def milliseconds(seconds: float) -> str:
    """A number of milliseconds, to three digits: 0.00123 is 1.23, 12.3 is 12300."""
    value = seconds * 1e3
    return f"{value:.0f}" if value >= 99.95 else f"{value:.3g}"


def signed_milliseconds(seconds: float) -> str:
    """A difference in milliseconds: to three digits, and at most two of them after the point.

    >>> [signed_milliseconds(s) for s in (0.0000512, -0.00123, 0.0456, 0.1234, -0.000001)]
    ['+0.05', '-1.23', '+45.6', '+123', '0']
    """
    value = seconds * 1e3
    digits = 0 if abs(value) >= 99.95 else 1 if abs(value) >= 9.995 else 2
    return f"{value:+.{digits}f}" if abs(value) >= 0.005 else "0"


def size(nbytes: float) -> str:
    """A number of bytes, to three digits, in powers of 1024.

    >>> [size(n) for n in (0, 1000, 1024, 2_115_624, 3 * 2**40)]
    ['0 B', '1000 B', '1.00 KiB', '2.02 MiB', '3.00 TiB']
    """
    unit = 0
    while nbytes >= 1023.5 and unit < len(_UNITS) - 1:
        nbytes /= 1024
        unit += 1
    digits = 0 if unit == 0 or nbytes >= 99.95 else 1 if nbytes >= 9.995 else 2
    return f"{nbytes:.{digits}f} {_UNITS[unit]}"


def bit_rate(bandwidth: float) -> str:
    """Bytes per second, in bits, as networks are sold.

    >>> bit_rate(12.5e6), bit_rate(2.5e9)
    ('100 Mbit/s', '20 Gbit/s')
    """
    bits = bandwidth * 8
    return f"{bits / 1e9:.3g} Gbit/s" if bits >= 0.9995e9 else f"{bits / 1e6:.3g} Mbit/s"


_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def ranks(numbers: Sequence[int]) -> str:
    """Sorted ranks as a person writes them.

    >>> ranks([3]), ranks([0, 1, 2, 5, 7, 8])
    ('rank 3', 'ranks 0-2, 5, 7, 8')
    """
    runs: list[list[int]] = []
    for rank in numbers:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs]
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {', '.join(parts)}"


_CODES = {*range(32), *range(127, 160), *range(0x202A, 0x202F), *range(0x2066, 0x206A)} - {ord("\n"), ord("\t")}
_CONTROL = {code: f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}" for code in _CODES}


def printable(value: Any) -> Any:
    r"""Text, or the texts in what JSON can hold, with control characters escaped: none of a rank may reach a terminal.

    >>> printable({"label": "a\x1b[2Jb", "step": 1})
    {'label': 'a\\x1b[2Jb', 'step': 1}
    """
    if isinstance(value, str):
        return value if value.isprintable() else value.translate(_CONTROL)
    if isinstance(value, list):
        return [printable(one) for one in value]
    if isinstance(value, dict):
        return {printable(key): printable(one) for key, one in value.items()}
    return value
