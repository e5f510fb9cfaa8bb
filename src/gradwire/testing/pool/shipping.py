"""Pickling between the pool and its workers: functions out, results and errors back."""

from __future__ import annotations

import importlib
import io
import os
import sys
import time
import traceback
import types
from collections.abc import Collection
from typing import Any

import cloudpickle  # type: ignore[import-untyped]

from gradwire.errors import GroupError, UsageTypeError
from gradwire.testing.pool.protocol import Fate, Raised, RankResult, RemoteTraceback, Returned


class _Shipper(cloudpickle.Pickler):  # type: ignore[misc]
    """Pickles by value what the workers could not import: functions, classes and modules of tests, scripts, notebooks.

    A module counts as importable there if its top-level package is directly in one of the paths that the workers import from.
    They do not search the current directory, so a test module never is, however pytest has loaded it.
    """

    def __init__(self, file: io.BytesIO, paths: Collection[str]) -> None:
        super().__init__(file)
        self._paths = paths
        self.registered: list[types.ModuleType] = []

    def reducer_override(self, obj: Any) -> Any:
        """As in cloudpickle, after registering the object's module."""
        if isinstance(obj, types.ModuleType):
            if self._importable(obj):
                return importlib.import_module, (obj.__name__,)
            # Loader and spec may lead to all of pytest; a module made by value needs neither.
            state = {k: v for k, v in vars(obj).items() if k not in ("__builtins__", "__loader__", "__spec__")}
            return types.ModuleType, (obj.__name__,), state
        if isinstance(obj, (types.FunctionType, type)):
            self._look_at(sys.modules.get(obj.__module__ or ""))
        return super().reducer_override(obj)

    def _look_at(self, module: types.ModuleType | None) -> None:
        if module is None or module.__name__ in cloudpickle.list_registry_pickle_by_value():
            return
        if not self._importable(module):
            cloudpickle.register_pickle_by_value(module)
            self.registered.append(module)

    def _importable(self, module: types.ModuleType) -> bool:
        top = module.__name__.partition(".")[0]
        if top in sys.stdlib_module_names:
            return True
        package = sys.modules.get(top, module)
        places = list(getattr(package, "__path__", ())) or [getattr(package, "__file__", None)]
        return any(os.path.dirname(os.path.realpath(place)) in self._paths for place in places if place)


def ship(value: object, paths: Collection[str]) -> bytes:
    """Pickle `value` for workers that import from `paths`."""
    file = io.BytesIO()
    shipper = _Shipper(file, paths)
    try:
        shipper.dump(value)
    finally:
        for module in shipper.registered:
            cloudpickle.unregister_pickle_by_value(module)
    return file.getvalue()


def dump_result(value: object, rank: int) -> bytes:
    """Pickle what a rank returned."""
    try:
        blob: bytes = cloudpickle.dumps(value)
    except Exception as problem:
        raise UsageTypeError(
            f"rank {rank} returned a {type(value).__qualname__} that cannot be sent to another process: "
            f"{type(problem).__name__}: {problem}. Return tensors, numbers, strings, or containers of them."
        ) from problem
    return blob


def load_result(rank: int, message: Returned) -> RankResult:
    """Unpickle what a rank returned."""
    try:
        return RankResult(rank, Fate.RETURNED, time.monotonic(), value=cloudpickle.loads(message.blob))
    except Exception as problem:
        error = UsageTypeError(
            f"what rank {rank} returned cannot be rebuilt in this process: {type(problem).__name__}: {problem}. "
            "Return tensors, numbers, strings, or containers of them."
        )
        return RankResult(rank, Fate.RAISED, time.monotonic(), error=error)


def pack(error: BaseException, rank: int, when: float) -> Raised:
    """Pickle an error. One that cannot be pickled is replaced by a GroupError that describes it."""
    text = "".join(traceback.format_exception(error))
    try:
        blob = cloudpickle.dumps(error)
        cloudpickle.loads(blob)
    except Exception as problem:
        stand_in = GroupError(
            f"rank {rank} raised {type(error).__qualname__}: {error}. The exception itself cannot be sent to another "
            f"process ({type(problem).__name__}: {problem}), so this replaces it; its traceback is the cause. "
            "Keep what cannot be pickled out of its arguments, or define __reduce__."
        )
        blob = cloudpickle.dumps(stand_in)
    return Raised(when, blob, text)


def unpack(rank: int, raised: Raised) -> RankResult:
    """Unpickle an error: its traceback is its cause."""
    try:
        error = cloudpickle.loads(raised.blob)
    except Exception as problem:
        error = GroupError(
            f"rank {rank} raised an error that cannot be rebuilt here: {problem!r}. Its traceback is the cause."
        )
    error.__cause__ = RemoteTraceback(raised.text)
    return RankResult(rank, Fate.RAISED, raised.when, error=error)
