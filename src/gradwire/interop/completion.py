"""c10d's completion hooks on a gradwire group: the record that torch's hooks expect, made from gradwire's `WorkInfo`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

from gradwire.groups.work_info import WorkInfo
from gradwire.interop.work import op_type


@dataclass(frozen=True, slots=True)
class C10dWorkInfo:
    """A finished operation under the names of c10d's WorkInfo, which Python cannot construct."""

    op_type: Any
    seq: int
    time_started: timedelta
    time_finished: timedelta
    active_duration: timedelta


def translate_hook(hook: Callable[[C10dWorkInfo], None]) -> Callable[[WorkInfo], None]:
    """A gradwire completion hook that calls a c10d one and has its name, for errors."""

    def call(info: WorkInfo) -> None:
        hook(
            C10dWorkInfo(
                op_type=op_type(info.op.kind),
                seq=info.seq,
                time_started=timedelta(seconds=info.started),
                time_finished=timedelta(seconds=info.finished),
                active_duration=timedelta(seconds=info.duration),
            )
        )

    call.__qualname__ = getattr(hook, "__qualname__", type(hook).__name__)
    return call
