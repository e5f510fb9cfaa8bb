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
    return _Adapter(hook, group, {id(p): name for name, p in named_parameters}).__call__


class _Adapter:
    def __init__(self, hook: CommHook, group: Group, names: dict[int, str]) -> None:
        self._hook = hook
        self._group = group
        self._names = names
        self._driver = Driver(group)
        self._states: dict[int, tuple[BucketSpec, Any, int]] = {}

    def __call__(self, state: Any, bucket: Any) -> torch.futures.Future[Tensor]:
        spec = self._spec(bucket)
        known = self._states.get(spec.index)
        if known is None or known[0] != spec:
            saved = self._save()
            known = (spec, self._hook.load(saved, spec) if saved else self._hook.init(spec), 0)
        _, hook_state, step = known
        self._states[spec.index] = (spec, hook_state, step + 1)
        turn = Turn(spec, self._group.rank, self._group.size, step, donated=True)
        pending = self._driver.launch(self._hook, bucket.buffer(), hook_state, turn)
        device = bucket.buffer().device
        future: torch.futures.Future[Tensor] = torch.futures.Future(devices=[device] if device.type == "cuda" else None)
        if device.type == "cuda":
            future.set_result(pending.wait())
            return future

        def fulfil() -> None:
            try:
                future.set_result(pending.wait())
            except Exception as error:
                future.set_exception(error)  # type: ignore[arg-type]  # torch's stub types it as a result

        # torch waits for the future in C++ with no way to call back here, so a thread of ours waits for the reduction.
        threading.Thread(target=fulfil, name=f"gradwire-hook-{spec.index}", daemon=True).start()
        return future

    def _save(self) -> dict[str, Any]:
        saved: dict[str, Any] = {}
        for spec, state, _ in self._states.values():
            saved.update(self._hook.save(state, spec))
        return saved

    def _spec(self, bucket: Any) -> BucketSpec:
        parameters, buffer = bucket.parameters(), bucket.buffer()
        return BucketSpec(
            index=bucket.index(),
            names=tuple(self._names.get(id(p), f"bucket {bucket.index()}[{i}]") for i, p in enumerate(parameters)),
            shapes=tuple(tuple(p.shape) for p in parameters),
            strides=tuple(tuple(p.stride()) for p in parameters),
            dtype=buffer.dtype,
            device=buffer.device,
            sparse=buffer.is_sparse,
        )
