"""`Signature`: what a collective looks like without its tensors."""

from __future__ import annotations

from dataclasses import dataclass

from gradwire.collectives.op_kinds import OpKind, ReduceOp, Scope


@dataclass(frozen=True, slots=True)
class Signature:
    """A collective without its tensors: what ranks compare, and what errors, events and traces carry."""

    kind: OpKind
    shapes: tuple[tuple[int, ...], ...] = ()
    dtypes: tuple[str, ...] = ()
    reduce_op: ReduceOp | None = None
    root: int | None = None
    peer: int | None = None
    tag: int = 0
    scope: Scope = Scope.WORLD
    label: str = ""

    def __str__(self) -> str:
        parts = []
        if len(set(zip(self.shapes, self.dtypes, strict=True))) == 1:
            times = f"{len(self.shapes)} x " if len(self.shapes) > 1 else ""
            parts.append(f"{times}{self.dtypes[0]}{list(self.shapes[0])}")
        else:
            parts += [f"{dtype}{list(shape)}" for shape, dtype in zip(self.shapes, self.dtypes, strict=True)]
        if self.reduce_op is not None:
            parts.append(self.reduce_op.name)
        if self.root is not None:
            parts.append(f"root={self.root}")
        if self.kind.is_p2p:
            parts.append(f"peer={'any' if self.peer is None else self.peer}")
            parts.append(f"tag={self.tag}")
        if self.scope is not Scope.WORLD:
            parts.append(f"scope={self.scope.value}")
        if self.label:
            parts.append(f"label={self.label!r}")
        return f"{self.kind.value}({', '.join(parts)})"
