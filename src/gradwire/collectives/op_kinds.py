"""What a collective does, which ranks take part, and how it reduces: `OpKind`, `Scope` and `ReduceOp`."""

from __future__ import annotations

from enum import Enum


class OpKind(Enum):
    """What a collective does. The value is the name people read."""

    ALL_REDUCE = "all_reduce"
    """Every input becomes its reduction over all ranks, in place; several tensors are reduced as one operation."""
    BROADCAST = "broadcast"
    """The root's tensors replace every rank's, in place."""
    REDUCE = "reduce"
    """As ALL_REDUCE, but only the root's tensor holds the result; the others' are left as they were."""
    ALL_GATHER = "all_gather"
    """One input; one output per rank, which may differ in size from rank to rank."""
    ALL_GATHER_INTO_TENSOR = "all_gather_into_tensor"
    """Each output is the concatenation of all ranks' inputs, rank 0 first; several pairs are one operation."""
    REDUCE_SCATTER = "reduce_scatter"
    """One input per rank; the output is the reduction of the inputs that all ranks meant for this one."""
    REDUCE_SCATTER_TENSOR = "reduce_scatter_tensor"
    """Each input is a concatenation of one part per rank; several pairs are one operation."""
    ALL_TO_ALL = "all_to_all"
    """Input j goes to rank j, output i comes from rank i."""
    ALL_TO_ALL_SINGLE = "all_to_all_single"
    """The same on one tensor, cut along dimension 0 into equal parts or by `splits`."""
    GATHER = "gather"
    """Every input goes to the root, which has one output per rank."""
    SCATTER = "scatter"
    """The root has one input per rank; every rank gets its own in the output."""
    SEND = "send"
    """One tensor to `peer`, matched by tag."""
    RECV = "recv"
    """One tensor from `peer`, or from any rank when `peer` is None, matched by tag."""
    BARRIER = "barrier"
    """No data: done when every rank has arrived."""

    is_p2p: bool
    """Between two ranks only, and so not numbered together with the rest."""
    reduces: bool
    """Whether a `reduce_op` takes part."""
    number: int
    """In records: its place in this list."""

    # A member is one object: its identity is its hash, and computing that runs no Python.
    __hash__ = object.__hash__


for _number, _kind in enumerate(OpKind):
    _kind.number = _number
    _kind.is_p2p = _kind in (OpKind.SEND, OpKind.RECV)
    _kind.reduces = _kind in (OpKind.ALL_REDUCE, OpKind.REDUCE, OpKind.REDUCE_SCATTER, OpKind.REDUCE_SCATTER_TENSOR)


class Scope(Enum):
    """Which ranks take part in a collective. Ranks in it, such as a root, are then numbered within those."""

    WORLD = "world"
    """All ranks of the group."""
    INSIDE = "inside"
    """The ranks of this host, in the order of the layout."""
    ACROSS = "across"
    """One rank per host: those that have this rank's place in their hosts, in the order of the hosts. Only for carriers."""

    __hash__ = object.__hash__


class ReduceOp(Enum):
    """How values of different ranks become one."""

    SUM = "sum"
    """The sum; on bool, the logical or."""
    AVG = "avg"
    """The sum divided by the number of ranks; floating point and complex only."""
    PRODUCT = "product"
    """The product; on bool, the logical and."""
    MIN = "min"
    """The least; not on complex."""
    MAX = "max"
    """The greatest; not on complex."""
    BAND = "band"
    """Bitwise and; integers and bool."""
    BOR = "bor"
    """Bitwise or; integers and bool."""
    BXOR = "bxor"
    """Bitwise exclusive or; integers and bool."""
    PREMUL_SUM = "premul_sum"
    """The sum of each rank's values times `factor`, which ranks may choose differently; floating point and complex."""

    __hash__ = object.__hash__
