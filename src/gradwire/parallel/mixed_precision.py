"""DDP's mixed precision: the module computes in a low-precision dtype, parameters and gradients stay in full precision.

Note [Low precision by substitution]
torch's DDP makes `p.data` the low-precision copy from the forward until the bucket of `p` is reduced, which replaces the gradient
accumulator of `p`. Here a parameter is never written to. While the module runs, its `_parameters` hold `p.to(param_dtype)`, as in
`torch.func.functional_call`; autograd records the conversion, so the gradient arrives at `p` in the dtype of `p`, and everything
after that is the usual path. Buffers are substituted in the same way, and what the forward writes to them is copied back.

Activation checkpointing runs parts of the forward again during backward, so the substitution is repeated from the moment
backward reaches an output of the module until that backward ends or fails.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd.grad_mode import _unsafe_preserve_version_counter
from torch.utils._pytree import tree_map

from gradwire.autograd.backward_end import at_backward_end
from gradwire.autograd.graph import tensors_in
from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.base import CommHook
from gradwire.hooks.dense import cast, chain, mean
from gradwire.runtime.dynamo import untraced_call


class MixedPrecision:
    """A mixed-precision configuration: `param_dtype`, `reduce_dtype` and `buffer_dtype`, each may be None."""

    def __init__(self, module: nn.Module, config: Any, ignore: Collection[str]) -> None:
        if not any(hasattr(config, field) for field in ("param_dtype", "reduce_dtype", "buffer_dtype")):
            raise UsageTypeError(
                f"mixed_precision={config!r}: it has none of param_dtype, reduce_dtype and buffer_dtype. Pass torch's "
                "_MixedPrecision(param_dtype=torch.bfloat16), or any object with these attributes."
            )
        self.param_dtype: torch.dtype | None = _dtype(config, "param_dtype")
        self.reduce_dtype: torch.dtype | None = _dtype(config, "reduce_dtype")
        self.buffer_dtype: torch.dtype | None = _dtype(config, "buffer_dtype")
        self._ignore = frozenset(ignore)
        if getattr(config, "keep_low_precision_grads", False):
            raise UsageError(
                f"mixed_precision={config}: keep_low_precision_grads is not supported, because gradients have the dtype of "
                "their parameters. Leave it False."
            )
        for name, parameter in module.named_parameters():
            if not self.skips(name, parameter):  # torch's attributes; nothing here reads them
                parameter._fp_param = parameter.data  # type: ignore[attr-defined]
                parameter._mp_param = torch.empty(  # type: ignore[attr-defined]
                    0, dtype=self.param_dtype or parameter.dtype, device=parameter.device
                )

    def hook(self) -> CommHook:
        dtype = self.reduce_dtype or self.param_dtype
        return mean() if dtype is None else chain(cast(dtype), mean())

    def forward(self, module: nn.Module, call: Callable[..., Any], inputs: Any, kwargs: Any) -> Any:
        """`call(*inputs, **kwargs)`, which calls `module`, with inputs, parameters and buffers in low precision."""
        inputs, kwargs = self._cast_inputs((inputs, kwargs))
        if self.param_dtype is None and self.buffer_dtype is None:
            return call(*inputs, **kwargs)
        substitution = _Substitution(self, module)
        try:
            substitution.begin()
            output = call(*inputs, **kwargs)
        finally:
            substitution.end()
        substitution.repeat_in_backward_of(output)
        return output

    def _cast_inputs(self, values: Any) -> Any:
        dtype = self.param_dtype
        if dtype is None:
            return values

        def convert(value: Any) -> Any:
            packed = isinstance(value, nn.utils.rnn.PackedSequence)
            if (packed or isinstance(value, Tensor)) and value.data.is_floating_point():
                return value.to(dtype)
            return value

        return tree_map(convert, values, is_leaf=lambda v: isinstance(v, nn.utils.rnn.PackedSequence))

    def skips(self, name: str, tensor: Tensor) -> bool:
        return name in self._ignore or getattr(tensor, "_ddp_ignored", False)


class _Substitution:
    """The low-precision tensors of one forward, in or out of the module: see Note [Low precision by substitution]."""

    _active: ClassVar[set[_Substitution]] = set()
    """Substitutions that a running backward will end; `at_backward_end` holds them weakly."""

    def __init__(self, mixed: MixedPrecision, module: nn.Module) -> None:
        self._mixed = mixed
        self._module = weakref.ref(module)
        self._swaps: list[tuple[Any, str, Tensor, Tensor, bool]] = []
        """Each replaced tensor: the dict that holds it, its name there, the tensor, its replacement, whether it is a buffer."""
        self._rnns: list[tuple[nn.RNNBase, Any, Any]] = []
        self._low: dict[Tensor, Tensor] = {}

    def begin(self) -> None:
        """Put the low-precision tensors in, converting what has not been converted yet."""
        module = self._module()
        if module is None:
            return
        for prefix, part in module.named_modules():
            if isinstance(part, nn.RNNBase):  # it keeps a list of its weights, which it rebuilds in forward
                self._rnns.append((part, part._flat_weights, part._flat_weight_refs))
            self._swap(prefix, part._parameters, self._mixed.param_dtype, is_buffer=False)
            self._swap(prefix, part._buffers, self._mixed.buffer_dtype, is_buffer=True)

    def _swap(self, prefix: str, held: dict[str, Any], dtype: torch.dtype | None, *, is_buffer: bool) -> None:
        for name, full in held.items() if dtype is not None else ():
            if full is None or not full.is_floating_point() or full.dtype == dtype:
                continue
            if self._mixed.skips(f"{prefix}.{name}" if prefix else name, full):
                continue
            if full not in self._low:
                self._low[full] = full.to(dtype)
            held[name] = low = self._low[full]
            self._swaps.append((held, name, full, low, is_buffer))

    def end(self) -> None:
        """Put the full-precision tensors back. A buffer that the forward has written to, or replaced, keeps its new value."""
        for held, name, full, low, is_buffer in self._swaps:
            if name not in held:
                continue  # the forward has deleted it
            now = held[name]
            if is_buffer:
                self._low.pop(full, None)
                held[name] = _written_back(full, now)
            elif now is low:
                held[name] = full
        for rnn, weights, refs in self._rnns:
            rnn._flat_weights, rnn._flat_weight_refs = weights, refs
        self._swaps, self._rnns = [], []

    @untraced_call
    def repeat_in_backward_of(self, output: Any) -> None:
        """Substitute again while a backward from `output` runs."""
        for tensor in tensors_in(output):
            if tensor.grad_fn is not None:
                tensor.register_hook(self._backward_begins)

    def _backward_begins(self, _: Tensor) -> None:
        if self not in self._active:
            self._active.add(self)
            at_backward_end(self._backward_ends, failed=self._backward_ends)
            with torch.enable_grad():  # a re-entrant checkpoint differentiates through what it finds
                self.begin()

    def _backward_ends(self) -> None:
        self.end()
        self._low = {}  # another backward of this graph converts once more
        self._active.discard(self)


def _written_back(full: Tensor, now: Tensor | None) -> Tensor | None:
    """The value of a buffer after the forward, in full precision; elements that the forward has not changed keep their value.
    Values are compared, not versions: batch norm does not increment the version of its statistics."""
    if now is None:
        return None
    with torch.no_grad(), _unsafe_preserve_version_counter(full):
        if now.shape != full.shape:
            return now.to(full.dtype)
        return full.copy_(torch.where(now == full.to(now.dtype), full, now.to(full.dtype)))


def _dtype(config: Any, field: str) -> torch.dtype | None:
    dtype = getattr(config, field, None)
    if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
        raise UsageError(f"mixed_precision={config}: {field} must be a floating-point dtype, got {dtype}.")
    return dtype
