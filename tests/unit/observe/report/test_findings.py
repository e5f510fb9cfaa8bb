"""What a report warns of."""

from dataclasses import replace

import pytest

from gradwire.observe.hangs.analysis import Cause
from gradwire.observe.hangs.hang_report import SavedHang
from gradwire.observe.report.findings import find
from gradwire.observe.report.report_model import RunReport
from gradwire.observe.rings.intervals import ranks_apart
from gradwire.observe.rings.run_outcome import RankOutcome, RunOutcome
from gradwire.recorder.format import RecordKind as K
from gradwire.runtime.host import ProcessState
from gradwire.runtime.rank_error import RankError
from helpers.made_rings import MS, made_ring, mark


def found(*rings, **more):
    return {finding.title: finding for finding in find(RunReport(rings, **more))}


def only(titles, *parts):
    [title] = [title for title in titles if all(part in title for part in parts)]
    return titles[title]


def test_a_healthy_run_with_little_exposed_communication_has_no_warnings():
    assert found(made_ring(0, range(30), size=1)) == {}


def test_a_straggler_with_what_if_and_advice():
    warning = only(found(made_ring(0, range(30)), made_ring(1, range(30), late=3 * MS)), "Rank 1 is slow")
    assert "Without rank 1 a step takes 17 ms instead of 20 ms" in warning.detail
    assert "data loader" in warning.advice


def test_exposed_communication_without_a_straggler():
    warning = only(found(made_ring(0, range(30)), made_ring(1, range(30))), "40% of a step is exposed")
    assert "quantize" in warning.advice


def test_failures_of_several_ranks_are_one_finding_with_their_text():
    rings = [
        made_ring(
            rank, range(3), more=[mark(99, 70 * MS, K.COLLECTIVE_FAILED, "PeerLost: rank 2 <b>", step=3, ordinal=9)]
        )
        for rank in range(2)
    ]
    error = only(found(*rings), "A collective failed on ranks 0, 1 in step 3")
    assert (error.severity, error.detail) == ("error", "PeerLost: rank 2 <b>")


def test_a_failure_that_every_rank_words_for_itself_is_one_finding():
    rings = [
        made_ring(
            rank,
            range(3),
            more=[
                mark(
                    99,
                    70 * MS,
                    K.COLLECTIVE_FAILED,
                    f"PeerLost: all_reduce on rank {rank} of 3: rank 2 is lost",
                    step=3,
                    ordinal=9,
                ),
                mark(100, 71 * MS, K.STEP_FAILED, f"PeerLost: all_reduce on rank {rank} of 3: rank 2 is lost", step=3),
            ],
        )
        for rank in range(2)
    ]
    [error] = [one for one in found(*rings).values() if one.severity == "error"]
    assert error.title == "A collective failed on ranks 0, 1 in step 3"
    assert error.detail == "PeerLost: all_reduce on rank 0 of 3: rank 2 is lost"


def test_what_a_check_has_raised_is_not_shown_again_as_its_warning():
    more = [mark(99, 70 * MS, K.WARNING, "NaN: x", step=2), mark(100, 70 * MS, K.STEP_FAILED, "Bad: NaN: x", step=2)]
    titles = found(made_ring(0, range(3), more=more))
    assert only(titles, "A step failed on rank 0 in step 2").detail == "Bad: NaN: x"
    assert "NaN: x" not in titles


def test_warnings_of_checks():
    ring = made_ring(0, range(3), more=[mark(99, 70 * MS, K.WARNING, "NaN in layer.weight", step=2)])
    assert "step 2" in only(found(ring), "NaN in layer.weight").detail


def test_ranks_that_were_killed_and_ranks_that_left_nothing():
    ring = made_ring(0, range(3), size=4)
    del ring.descriptions["end"]
    report = RunReport([ring])
    report.ranks[0].state = ProcessState.GONE
    titles = {one.title: one for one in find(report)}
    assert "dmesg" in only(titles, "Rank 0 ended in step 2 without stopping").advice
    assert only(titles, "Ranks 1-3 of 4 left no record here")


def killed_ring(rank, size):
    ring = made_ring(rank, range(3), size=size)
    del ring.descriptions["end"]
    return ring


def test_threads_have_ended_as_their_process_has():
    """The launcher knows of one rank, the process; three threads of it share a ring."""
    whole = killed_ring(0, 1)
    own = [made_ring(number, range(3)).records for number in range(3)]
    whole.records[:] = [
        record._replace(number=number, rank=rank, thread=rank, group="threads")
        for rank, records in enumerate(own)
        for number, record in enumerate(records, start=rank * len(own[0]))
    ]
    outcome = RunOutcome("stopped by SIGTERM after 2.0 s", None, "SIGTERM", (RankOutcome(0, -15, stopped=True),))
    report = RunReport(ranks_apart([whole]), outcome=outcome)
    assert [(rank.rank, rank.lost) for rank in report.ranks] == [(0, 0), (1, 0), (2, 0)]
    for rank in report.ranks:
        rank.state = ProcessState.GONE
    titles = [one.title for one in find(report) if "exposed" not in one.title]
    assert titles == ["The run was stopped by SIGTERM after 2.0 s"]


def findings_of_killed_ranks(outcome):
    report = RunReport([killed_ring(rank, 3) for rank in range(3)], outcome=outcome)
    for rank in report.ranks:
        rank.state = ProcessState.GONE
    return {one.title: one for one in find(report)}


STOPPED = [RankOutcome(rank, -15, stopped=True) for rank in range(3)]


@pytest.mark.parametrize(
    ("status", "raised", "advice"),
    [
        (-9, None, "OOM killer"),
        (-11, None, "look at the stack of rank 1"),
        (-15, None, "no traceback: look at its last output"),
        (3, None, "no traceback: look at its last output"),
        (1, "ValueError", "Look at the traceback of rank 1 in the output"),
    ],
)
def test_what_the_launcher_knows_of_the_first_failure(status, raised, advice):
    first = RankOutcome(1, status, stopped=False, raised=raised)
    titles = findings_of_killed_ranks(RunOutcome("rank 1 failed first", 1, None, (STOPPED[0], first, STOPPED[2])))
    assert advice in only(titles, "Rank 1 failed first").advice
    assert not any("without stopping" in title for title in titles)  # the launcher knows better


def test_the_exception_of_the_rank_that_failed_first():
    error = RankError(1, "ValueError", "builtins", "bad " * 500, "", 1.0)
    outcome = RunOutcome("rank 1 failed first", 1, None, (RankOutcome(1, 1, stopped=False, raised="ValueError"),))
    report = RunReport([made_ring(0, range(3), size=1)], outcome=outcome, errors={1: error})
    detail = only({one.title: one for one in find(report)}, "Rank 1 failed first").detail
    assert detail.startswith("ValueError: bad bad ")
    assert len(detail) <= 500


def test_ranks_of_which_the_launcher_knows_nothing():
    titles = findings_of_killed_ranks(RunOutcome("rank 1 failed first", 1, None, (RankOutcome(1, 3, stopped=False),)))
    assert only(titles, "Ranks 0, 2 ended in step 2 without stopping the recorder")


def test_a_run_whose_output_nobody_read():
    titles = findings_of_killed_ranks(RunOutcome("stopped by SIGPIPE after 2.0 s", None, "SIGPIPE", tuple(STOPPED)))
    assert "| head" in only(titles, "The run was stopped by SIGPIPE").advice


def test_a_run_that_was_stopped_from_outside():
    titles = findings_of_killed_ranks(RunOutcome("stopped by SIGTERM after 2.0 s", None, "SIGTERM", tuple(STOPPED)))
    assert "Ctrl-C" in only(titles, "The run was stopped by SIGTERM after 2.0 s").advice
    assert not any("without stopping" in title or "OOM" in one.advice for title, one in titles.items())


def test_a_run_that_has_lost_what_ranks_need():
    titles = findings_of_killed_ranks(RunOutcome("the store has ended", None, None, tuple(STOPPED)))
    assert only(titles, "The store has ended").severity == "error"


def test_a_run_that_has_ended_well_has_no_findings():
    outcome = RunOutcome("", None, None, tuple(RankOutcome(rank, 0, stopped=False) for rank in range(2)))
    rings = [made_ring(rank, range(3), size=2) for rank in range(2)]
    assert find(RunReport(rings, outcome=outcome)) == find(RunReport(rings))


def test_a_rank_that_ended_early_in_an_operation():
    pending = mark(99, 70 * MS, K.COLLECTIVE_SUBMITTED, "loss", op="all_reduce", group="world", seq=999)
    titles = found(made_ring(0, range(3), more=[pending]), made_ring(1, range(30)))
    assert only(titles, "Rank 0 stopped recording in step 2; others went on to step 29")
    assert only(titles, "Rank 0 ended while all_reduce 'loss' was under way")


HANG = SavedHang(
    "hang-1.json",
    "all_reduce 'b' (operation #3 of world, 8 bytes)",
    5.5,
    (0, 2),
    "",
    ((1, Cause.USER_CODE, "rank 1 (process 7, running): it is in user code: spin() at train.py:6"),),
    {"group": "world", "ordinal": 4, "seq": 3},
)
DEAD = ((1, Cause.DEAD, "rank 1 (process 7): its process has ended"),)
WELL = RunOutcome("", None, None, ())


def test_a_hang_that_was_saved():
    error = only(found(made_ring(0, range(3), size=1), hangs=[HANG]), "hung in")
    assert error.severity == "error"
    assert error.title == f"Ranks 0, 2 hung in {HANG.what}, which was reported after 5.5 s"
    assert error.detail == "Rank 1 (process 7, running): it is in user code: spin() at train.py:6"


def test_a_hang_that_no_rank_is_to_blame_for():
    why = "all ranks have submitted it: the engine or the link is slow or stuck"
    error = only(found(made_ring(0, range(3), size=1), hangs=[replace(HANG, suspects=(), why=why)]), "hung in")
    assert error.detail == why.replace("all", "All", 1)


@pytest.mark.parametrize("outcome", [None, WELL, RunOutcome("rank 1 failed first", 1, None, ())])
def test_a_wait_that_has_ended_is_a_note_below_real_errors(outcome):
    waits = [replace(HANG, ended=True, count=40, total=322.0), replace(HANG, file="hang-2.json")]
    listed = find(RunReport([made_ring(0, range(3), size=1)], hangs=waits, outcome=outcome))
    title = f"Ranks 0, 2 waited 40 times in {HANG.what}, 5 min 22 s in all, and continued"
    assert [one.severity for one in listed if one.title == title] == ["note"]
    errors = [one.title for one in listed if one.severity == "error"]
    if outcome == WELL:
        assert errors == []  # what did not end was a wait, too, and the launcher has missed its end
    else:
        assert "hung in" in errors[-1]
        assert listed.index(only({one.title: one for one in listed}, title)) >= len(errors)


def test_a_rank_that_ended_while_no_other_rank_waited():
    gone = replace(HANG, what="", waiting=(), suspects=DEAD, collective=None)
    error = only(found(made_ring(0, range(3), size=1), hangs=[gone]), "Rank 1 ended during the run")
    assert error.detail == "Rank 1 (process 7): its process has ended"


def test_ranks_that_waited_for_one_that_was_killed_have_not_hung():
    first = RankOutcome(1, -9, stopped=False)
    hang = replace(HANG, suspects=DEAD)
    outcome = RunOutcome("rank 1 failed first", 1, None, (STOPPED[0], first, STOPPED[2]))
    pending = [mark(99, 70 * MS, K.COLLECTIVE_SUBMITTED, "bucket 0", step=3, op="all_reduce", seq=7, group="world")]
    report = RunReport(
        [made_ring(rank, range(3), size=3, more=pending) for rank in range(3)], outcome=outcome, hangs=[hang]
    )
    titles = [one.title for one in find(report) if one.severity != "note"]
    assert titles[:2] == [
        "Rank 1 failed first",
        "Rank 1 ended during the run, and ranks 0, 2 waited for it in all_reduce 'b' (operation #3 of world, 8 bytes)",
    ]
    assert [title for title in titles if "was under way" in title] == [
        "Rank 1 ended while all_reduce 'bucket 0' was under way"
    ]
    alone = RunOutcome("rank 1 failed first", 1, None, (RankOutcome(0, 0, stopped=False), first))
    report = RunReport([made_ring(rank, range(3), size=3, more=pending) for rank in range(3)], outcome=alone)
    assert sum("was under way" in one.title for one in find(report)) == 3  # the launcher has stopped none of them


def test_what_ctrl_c_has_broken_off_is_no_failure():
    aborted = "GroupAborted: world was broken off on rank 0 by KeyboardInterrupt."
    more = [
        mark(99, 70 * MS, K.STEP_FAILED, "KeyboardInterrupt: ", step=3),
        mark(100, 70 * MS, K.COLLECTIVE_FAILED, aborted),
    ]
    ring = made_ring(0, range(3), size=1, more=more)
    outcome = RunOutcome("stopped by SIGINT after 2.0 s", None, "SIGINT", (STOPPED[0],))
    assert list(found(ring, outcome=outcome)) == ["The run was stopped by SIGINT after 2.0 s"]
    another = mark(101, 70 * MS, K.STEP_FAILED, "ValueError: no KeyboardInterrupt here", step=3)
    assert only(found(made_ring(0, range(3), size=1, more=[another]), outcome=outcome), "A step failed")
    assert only(found(ring), "A step failed on rank 0")


def test_advice_on_failures_fits_them():
    different = mark(99, 70 * MS, K.COLLECTIVE_FAILED, "CollectiveMismatch: ranks differ in kind", step=3)
    assert only(found(made_ring(0, range(3), more=[different])), "A collective failed").advice == ""
    raised = mark(99, 70 * MS, K.STEP_FAILED, "NonFiniteGradient: NaN", step=3)
    outcomes = {None: "Look at the traceback", RunOutcome("", None, None, ()): "The script has caught it"}
    for outcome, advice in outcomes.items():
        failed = only(found(made_ring(0, range(3), more=[raised]), outcome=outcome), "A step failed")
        assert failed.advice.startswith(advice)
        assert failed.severity == ("error" if outcome is None else "warning")  # no error in a run that ended well


def test_a_ring_that_has_wrapped_a_run_in_progress_and_damaged_files():
    ring = replace(made_ring(0, range(5), size=1), lost=1000)
    report = RunReport([ring], damaged={"rank-1.ring": "is not a ring"})
    report.ranks[0].state = ProcessState.RUNNING
    report.ranks[0].descriptions.pop("end")
    titles = {one.title: one for one in find(report)}
    assert "up to 1,000 were lost" in only(titles, "earlier records were overwritten").detail
    assert only(titles, "The run is in progress: rank 0")
    assert only(titles, "rank-1.ring cannot be read").detail == "Is not a ring"


def test_nothing_and_no_steps():
    assert only(found(made_ring(0, range(0), size=1)), "Nothing was recorded")
    marks = replace(made_ring(0, range(0), size=1), records=[mark(0, 0, K.MARK, "x")])
    assert only(found(marks), "No complete steps")
