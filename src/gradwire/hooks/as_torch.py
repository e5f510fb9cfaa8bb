"""gradwire's hooks inside torch's own DDP: `ddp.register_comm_hook(None, as_torch_hook(hook, group))`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageTypeError
from gradwire.groups.base import Group
from gradwire.hooks.base import CommHook, Turn
from gradwire.hooks.bucket import BucketSpec
from gradwire.hooks.drive import Driver

TorchHook = Callable[[Any, Any], torch.futures.Future[Tensor]]


def as_torch_hook(hook: CommHook, group: Group, *, named_parameters: Iterable[tuple[str, Tensor]] = ()) -> TorchHook:
    """A function of torch's hook interface that reduces every bucket with `hook` over `group`.

    torch tells its hooks no parameter names; pass `model.named_parameters()` to have them in errors and in saved state.
    The hook's states live as long as the function; when torch rebuilds its buckets they follow their parameters.
    """
    if not isinstance(hook, CommHook):
        raise UsageTypeError(f"as_torch_hook({hook!r}): not a CommHook. Pass e.g. chain(cast(torch.bfloat16), mean()).")
    adapter = _Adapter(hook, group, {id(p): name for name, p in named_parameters})

    def reduce(state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        return adapter.reduce(bucket)

    reduce.__annotations__ = {}  # torch refuses a hook whose annotations are text, as they are in this module
    reduce.__qualname__ = reduce.__name__ = repr(hook)  # what torch logs
    return reduce


class _Adapter:
    def __init__(self, hook: CommHook, group: Group, names: dict[int, str]) -> None:
        self._hook = hook
        self._group = group
        self._names = names
        self._driver = Driver(group)
        self._states: dict[int, tuple[BucketSpec, Any]] = {}
        self._step = -1
        self._saved: dict[str, Any] = {}

    def reduce(self, bucket: Any) -> torch.futures.Future[Tensor]:
        spec = self._spec(bucket)
        self._step += spec.index == 0  # torch launches its buckets in index order
        turn = Turn(spec, self._group.rank, self._group.size, self._step, donated=True)
        with torch.no_grad():
            pending = self._driver.launch(self._hook, bucket.buffer(), self._state(spec), turn)
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if device.type == "cuda":
            future.set_result(pending.wait())
            return future

        def fulfil(driver: Driver = self._driver) -> None:  # kept until its reduction is over, whoever drops the model
            try:
                with torch.no_grad():
                    value = pending.wait()
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub types it as a result
            else:
                future.set_result(value)

        # torch waits for the future in C++ with no way to call back here, so a thread of ours waits for the reduction.
        threading.Thread(target=fulfil, name=f"gradwire-hook-{spec.index}", daemon=True).start()
        return future

    def _state(self, spec: BucketSpec) -> Any:
        known = self._states.get(spec.index)
        if known is None or known[0] != spec:
            if known is not None:
                self._take_apart()
            state = self._hook.load(self._saved, spec) if self._saved else self._hook.init(spec)
            self._states[spec.index] = known = (spec, state)
        return known[1]

    def _take_apart(self) -> None:
        """torch has rebuilt its buckets: keep every state by parameter, for the new buckets to pick up."""
        for spec, state in self._states.values():
            self._saved.update(self._hook.save(state, spec))
        self._states.clear()

    def _spec(self, bucket: Any) -> BucketSpec:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        # A parameter without a name is called by the place at which it first came, the same on every rank.
        names = [self._names.setdefault(id(p), f"parameter {len(self._names)}") for p in parameters]
        return BucketSpec(
            index=bucket.index(),
            names=tuple(names),
            shapes=tuple(tuple(p.shape) for p in parameters),
            strides=tuple(tuple(p.stride()) for p in parameters),
            dtype=buffer.dtype,
            device=buffer.device,
            sparse=buffer.is_sparse,
        )
