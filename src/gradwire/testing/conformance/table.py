"""The table of checks, in the order in which they run."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gradwire.groups.base import Group
from gradwire.testing.conformance import (
    aliasing,
    callbacks,
    completion,
    dtypes,
    endings,
    forks,
    memory,
    movement,
    points,
    reductions,
    subgroups,
    usage,
    work,
)
from gradwire.testing.conformance.compare import Problems


@dataclass(frozen=True, slots=True)
class Check:
    """One check. `fresh`: it may break its world, and needs a separate one. `ranks`: the minimum number of ranks."""

    run: Callable[[Group], Problems]
    ranks: int = 1
    fresh: bool = False

    @property
    def name(self) -> str:
        """Its name in reports and in `only`."""
        return self.run.__name__.removeprefix("check_")


def _checks(*runs: Callable[[Group], Problems], ranks: int = 1, fresh: bool = False) -> Sequence[Check]:
    return [Check(run, ranks, fresh) for run in runs]


CHECKS: tuple[Check, ...] = (
    *_checks(
        reductions.check_all_reduce_ops,
        reductions.check_all_reduce_sizes,
        reductions.check_all_reduce_coalesced,
        reductions.check_premul_sum,
        reductions.check_all_reduce_same_bits,
        reductions.check_all_reduce_sparse,
        reductions.check_reduce,
        reductions.check_reduce_scatter,
        reductions.check_reduce_scatter_tensor,
        movement.check_broadcast,
        movement.check_all_gather,
        movement.check_all_gather_into_tensor,
        movement.check_all_to_all,
        movement.check_all_to_all_single,
        movement.check_gather,
        movement.check_scatter,
        movement.check_barrier,
        memory.check_layouts,
        memory.check_layouts_mixed,
        memory.check_zero_dimensional,
        memory.check_large,
        memory.check_channels_last,
        memory.check_gaps,
        memory.check_leaves,
        memory.check_inference_tensors,
        memory.check_allocate,
        aliasing.check_overlapping_outputs,
        dtypes.check_dtypes_without_arithmetic,
    ),
    *_checks(
        aliasing.check_aliasing,
        points.check_send_recv,
        points.check_send_recv_tags,
        points.check_send_recv_both_ways,
        points.check_recv_any,
        points.check_send_recv_beside_collectives,
        ranks=2,
    ),
    *_checks(
        subgroups.check_split,
        subgroups.check_split_key,
        subgroups.check_split_none,
        subgroups.check_split_nested,
        work.check_wait_again,
        work.check_wait_from_threads,
        work.check_wait_timeout,
        work.check_work_tells,
        work.check_future,
        work.check_future_waits,
        work.check_many_in_flight,
        work.check_dropped_work,
        work.check_dropped_group,
        completion.check_hooks_once,
        completion.check_hooks_several,
        completion.check_events,
    ),
    *_checks(
        usage.check_usage_errors,
        callbacks.check_callbacks_raising,
        usage.check_wrong_timeouts,
        dtypes.check_refused_dtypes,
        completion.check_hook_raising,
        endings.check_deadline,
        endings.check_deadline_unwatched,
        endings.check_missing_rank,
        endings.check_abort,
        endings.check_abort_wakes,
        endings.check_recover_again,
        endings.check_close_in_flight,
        endings.check_peer_leaves,
        endings.check_recv_any_alone,
        endings.check_mismatch,
        forks.check_forked_child,
        ranks=2,
        fresh=True,
    ),
    *_checks(completion.check_hooks_at_close, endings.check_close, fresh=True),
)

BY_NAME = {check.name: check for check in CHECKS}
