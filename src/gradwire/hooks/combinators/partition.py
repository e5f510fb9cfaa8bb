"""A hook per parameter: `partition` by name, `masked` by any predicate, `by_size`. One implementation.

Note [Parts of a bucket]
The parameters of one rule form a part, a small bucket with a spec of its own. If they are adjacent in the bucket, the part is a
view, and a hook that works in place works in the bucket. Otherwise its slices are gathered, reduced and scattered back. Parts are
reduced one after another in the order of the rules, which is the same on every rank.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor

from gradwire.errors import UsageError, UsageTypeError
from gradwire.hooks.arguments import check_hooks, checks_arguments
from gradwire.hooks.base import CommHook, Reduced, Reduction, Turn
from gradwire.hooks.bucket import BucketSpec, Slices
from gradwire.hooks.composite import Composite
from gradwire.hooks.dense import MEAN
from gradwire.hooks.state import Owed, join_owed

Mask = Callable[[str, tuple[int, ...]], bool]
"""Selects parameters by name and shape."""
Rule = Callable[[str, tuple[int, ...], torch.dtype], bool]


@dataclass(frozen=True, slots=True)
class _Named:
    patterns: tuple[str, ...]

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return any(fnmatchcase(name, pattern) for pattern in self.patterns)


_REST = _Named(("*",))


@dataclass(frozen=True, slots=True)
class _Where:
    mask: Mask

    def __str__(self) -> str:
        return getattr(self.mask, "__qualname__", type(self.mask).__qualname__)

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        return bool(self.mask(name, shape))


@dataclass(frozen=True, slots=True)
class _Small:
    numel: int | None
    nbytes: int | None

    def __call__(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> bool:
        size = torch.Size(shape).numel()
        return size < self.numel if self.numel is not None else size * dtype.itemsize < (self.nbytes or 0)


@dataclass(slots=True)
class _Part:
    rule: int
    hook: CommHook
    spec: BucketSpec
    slices: Slices
    state: Any = None


@dataclass(frozen=True, slots=True)
class Partition(Composite):
    """The hook of `partition`, `masked` and `by_size`. Its state is the list of the bucket's parts."""

    rules: tuple[tuple[Rule, CommHook], ...]
    text: str

    def __post_init__(self) -> None:
        if len({hook.local for _, hook in self.rules}) > 1:
            local = next(hook for _, hook in self.rules if hook.local)
            raise UsageError(
                f"{self}: {local!r} leaves gradients on their rank, others do not. Use local hooks for all parameters or for none."
            )

    @property
    def parts(self) -> Mapping[str, CommHook]:
        return {str(i): hook for i, (_, hook) in enumerate(self.rules)}

    def divide(self, spec: BucketSpec) -> list[_Part]:
        members: list[list[int]] = [[] for _ in self.rules]
        for i, (name, shape) in enumerate(zip(spec.names, spec.shapes, strict=True)):
            matching = (rule for rule, (matches, _) in enumerate(self.rules) if matches(name, shape, spec.dtype))
            rule = next(matching, None)
            if rule is None:
                raise UsageError(
                    f"{self} on {spec}: no pattern matches the parameter {name!r}. Add one for it, or end with '*': mean()."
                )
            members[rule].append(i)
        ranges = list(zip(spec.offsets, spec.numels, strict=True))
        return [
            _Part(rule, self.rules[rule][1], spec.select(mine), Slices.of([ranges[i] for i in mine]))
            for rule, mine in enumerate(members)
            if mine
        ]

    def check(self, spec: BucketSpec) -> None:
        for part in self.divide(spec):
            part.hook.check(part.spec)

    def init(self, spec: BucketSpec) -> list[_Part]:
        return [replace(part, state=part.hook.init(part.spec)) for part in self.divide(spec)]

    def reduce(self, grad: Tensor, state: list[_Part], turn: Turn) -> Reduction:
        """Reduce the parts one after another. See Note [Parts of a bucket]."""
        if len(state) == 1:
            return (yield from state[0].hook.reduce(grad, state[0].state, turn))
        value = grad if turn.donated else torch.empty_like(grad)
        sent = value if turn.donated else torch.empty_like(grad)  # `sent` is not needed if donated
        for part in state:
            anchor = None if turn.anchor is None else part.slices.take(turn.anchor)
            inside = replace(turn, spec=part.spec, anchor=anchor)
            reduced = yield from part.hook.reduce(part.slices.take(grad), part.state, inside)
            part.slices.put(value, reduced.value)
            if not turn.donated:
                part.slices.put(sent, reduced.sent)
        return Reduced(value, sent)

    def capture_key(self, turn: Turn) -> Any:
        keys = tuple(hook.capture_key(turn) for hook in self.parts.values())
        return None if None in keys else keys

    def wire_bytes(self, spec: BucketSpec, world_size: int, step: int = 0) -> float | None:
        counts = [part.hook.wire_bytes(part.spec, world_size, step) for part in self.divide(spec)]
        known = [count for count in counts if count is not None]
        return sum(known, 0.0) if len(known) == len(counts) else None

    def error(self, spec: BucketSpec) -> float:
        return max((part.hook.error(part.spec) for part in self.divide(spec)), default=0.0)

    def save(self, state: list[_Part], spec: BucketSpec) -> dict[str, Any]:
        """The parts' states, each with the index of its rule; no parameter is in two of them."""
        return _ruled((part.rule, part.hook.save(part.state, part.spec)) for part in state)

    def load(self, saved: Mapping[str, Any], spec: BucketSpec) -> list[_Part]:
        parts = self.divide(spec)
        for part in parts:
            mine = {name: saved[name] for name in part.spec.names if name in saved}
            part.state = part.hook.load(_of_rule(part.rule, mine), part.spec)
        return parts

    def shared(self, saved: Mapping[str, Any]) -> dict[str, Any]:
        return _ruled((rule, hook.shared(_of_rule(rule, saved))) for rule, (_, hook) in enumerate(self.rules))

    @property
    def structure(self) -> str:
        """The rules, which assign states to hooks, and each hook's structure."""
        return f"Partition({'; '.join(f'{rule}: {hook.structure}' for rule, hook in self.rules)})"

    def owed(self, saved: Mapping[str, Any]) -> Owed | None:
        return join_owed(hook.owed(_of_rule(rule, saved)) for rule, (_, hook) in enumerate(self.rules))

    def __repr__(self) -> str:
        return self.text


def _ruled(states: Iterable[tuple[int, Mapping[str, Any]]]) -> dict[str, Any]:
    return {name: {"rule": rule, "state": state} for rule, mine in states for name, state in mine.items()}


def _of_rule(rule: int, saved: Mapping[str, Any]) -> dict[str, Any]:
    return {name: one["state"] for name, one in saved.items() if one["rule"] == rule}


def partition(hooks: Mapping[str, CommHook]) -> CommHook:
    """A hook per pattern of parameter names, as in the shell (`*`, `?`, `[...]`); the first pattern that matches wins.

    A parameter that no pattern matches is an error when the hook is set on a model. On the wire: the sum over the parts.

    >>> from gradwire.hooks import cast, chain, mean
    >>> partition({"*.bias": mean(), "*": chain(cast(torch.bfloat16), mean())})
    partition({'*.bias': mean(), '*': cast(torch.bfloat16) > mean()})
    """
    if not hooks:
        raise UsageError('partition({}): no patterns. Start with {"*": mean()}.')
    for pattern, hook in hooks.items():
        if not isinstance(pattern, str):
            raise UsageTypeError(f"partition(...): {pattern!r} is not a pattern of names. Write e.g. '*.bias'.")
        check_hooks("partition", **{pattern: hook})
    patterns = list(hooks)
    if "*" in patterns[:-1]:
        raise UsageError(
            f"partition(...) with the patterns {patterns}: '*' matches every name, so others are never reached. Put it last."
        )
    return Partition(tuple((_Named((pattern,)), hook) for pattern, hook in hooks.items()), f"partition({dict(hooks)})")


def masked(mask: str | Sequence[str] | Mask, hook: CommHook, *, otherwise: CommHook = MEAN) -> CommHook:
    """`hook` for the parameters that `mask` selects, `otherwise` for the rest.

    The mask is a pattern of names, several of them, or a function of name and shape. Ranks compare hooks by their repr, so give a
    function a descriptive name. On the wire: the sum over both.

    >>> from gradwire.hooks import cast, chain, mean
    >>> masked(["*.weight", "embed.*"], chain(cast(torch.bfloat16), mean()))
    masked(['*.weight', 'embed.*'], cast(torch.bfloat16) > mean(), otherwise=mean())
    """
    check_hooks("masked", hook=hook, otherwise=otherwise)
    rule: Rule
    if callable(mask):
        rule = _Where(mask)
        shown = str(rule)
    else:
        patterns = [mask] if isinstance(mask, str) else list(mask) if isinstance(mask, Sequence) else [mask]
        if not patterns or not all(isinstance(pattern, str) for pattern in patterns):
            raise UsageTypeError(
                f"masked({mask!r}, ...): not a pattern, a sequence of patterns or a function of name and shape, e.g. '*.weight'."
            )
        rule, shown = _Named(tuple(patterns)), repr(mask if isinstance(mask, str) else patterns)
    return Partition(((rule, hook), (_REST, otherwise)), f"masked({shown}, {hook!r}, otherwise={otherwise!r})")


@checks_arguments(numel="[0, inf)", nbytes="[0, inf)")
def by_size(
    *, large: CommHook, small: CommHook = MEAN, numel: int | None = None, nbytes: int | None = None
) -> CommHook:
    """`large` for parameters of at least `numel` elements, or `nbytes` bytes, and `small` for those below.

    On the wire: the sum over both.

    >>> from gradwire.hooks import cast, chain, mean
    >>> by_size(numel=4096, large=chain(cast(torch.bfloat16), mean()))
    by_size(numel=4096, small=mean(), large=cast(torch.bfloat16) > mean())
    """
    check_hooks("by_size", small=small, large=large)
    if (numel is None) == (nbytes is None):
        raise UsageError(f"by_size(numel={numel}, nbytes={nbytes}): the size is ambiguous. Pass one of the two.")
    shown = f"numel={numel}" if nbytes is None else f"nbytes={nbytes}"
    text = f"by_size({shown}, small={small!r}, large={large!r})"
    return Partition(((_Small(numel, nbytes), small), (_REST, large)), text)
