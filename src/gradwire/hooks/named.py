"""Communication hooks by name, with the settings in which they are compared: what commands and benchmarks accept as `--hook`.

>>> NAMED_HOOKS["quantize8"].build()
error_feedback() > quantize(bits=8, block=256, rounding='nearest', seed=0)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch

from gradwire.hooks import CommHook, cast, chain, dgc, diloco, error_feedback, mean, power_sgd, quantize, sign, top_k


@dataclass(frozen=True, slots=True)
class NamedHook:
    name: str
    words: str
    build: Callable[[], CommHook]
    every: int = 1
    """The number of steps after which all replicas are equal again."""

    @property
    def needs_optimizer(self) -> bool:
        """Whether replicas diverge between exchanges, so that the hook needs the optimizer."""
        return self.every > 1


def _fed(hook: CommHook) -> CommHook:
    return chain(error_feedback(), hook)


def _quantize(bits: int) -> NamedHook:
    block = 64 if bits == 1 else 256  # one bit has no magnitude, so there are more scales
    words = f"{bits} bit{'s' if bits > 1 else ''} per element, blocks of {block}, error feedback"
    return NamedHook(f"quantize{bits}", words, lambda: _fed(quantize(bits, block=block)))


_PERIOD = 50
_OFTEN = 10
_ALL = (
    NamedHook("mean", "dense float32", mean),
    NamedHook("bf16", "dense bfloat16", lambda: chain(cast(torch.bfloat16), mean())),
    NamedHook("fp16", "dense float16", lambda: chain(cast(torch.float16), mean())),
    *map(_quantize, (8, 4, 2, 1)),
    NamedHook("sign", "the sign of each element, error feedback", lambda: _fed(sign())),
    NamedHook("power_sgd", "rank 4", lambda: _fed(power_sgd(4))),
    NamedHook("power_sgd16", "rank 16", lambda: _fed(power_sgd(16))),
    NamedHook("power_sgd_batched", "rank 4, the bucket as one matrix", lambda: _fed(power_sgd(4, batched=True))),
    NamedHook("top_k", "the largest 1 %, error feedback", lambda: _fed(top_k(ratio=0.01))),
    NamedHook("dgc", "the largest 0.1 % after a momentum", lambda: dgc(0.001)),
    NamedHook(
        "diloco",
        f"parameters every {_PERIOD} steps",
        # Nesterov momentum without its gain: in the long run an outer step is as long as the mean of the local ones.
        lambda: diloco(every=_PERIOD, outer_lr=0.7, outer_momentum=0.3),
        every=_PERIOD,
    ),
    NamedHook(
        "local4",
        f"parameters' mean every {_OFTEN} steps, changes in 4 bits, error feedback",
        lambda: diloco(every=_OFTEN, outer_lr=1.0, outer_momentum=0.0, hook=_fed(quantize(4))),
        every=_OFTEN,
    ),
)
NAMED_HOOKS: Mapping[str, NamedHook] = MappingProxyType({hook.name: hook for hook in _ALL})
