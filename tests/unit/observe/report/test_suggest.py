"""Which hook is suggested for a run, and what is said of runs from which nothing can be predicted."""

from dataclasses import replace

import pytest

from gradwire.cli import main
from gradwire.errors import UsageError
from gradwire.hooks.named import NAMED_HOOKS
from gradwire.observe.report import suggest as module
from gradwire.observe.report.report_model import RunReport
from gradwire.observe.report.suggest import CANDIDATES, MeasuredStep, measure, suggest, suggest_text
from gradwire.recorder.format import RecordKind as K
from helpers.made_rings import BUCKET, MS, STEP, made, made_ring, write_ring

MB43 = {"nbytes": 43e6, "buckets": 3.0}


def text_of(*rings):
    text = suggest_text(RunReport(rings, directory="run"))
    assert text.count("\n") <= 10
    assert max(map(len, text.splitlines())) <= 80
    return text


def test_a_run(tmp_path, capsys):
    """Waits of 8 ms of 20, 9.5 ms on the wire for two buckets of 1 MiB: 4 bits save more than 8 bits, but not a tenth more."""
    for rank in range(2):
        write_ring(tmp_path, made_ring(rank, range(30), clock=f"host-{rank}"))
    assert main(["suggest", str(tmp_path)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "A step takes 20 ms (median); 40.0% of it is exposed communication.",
        "On the rank that is ready last, which waits only for the link, that is 8 ms.",
        "A rank sends 2.1 MB a step in 9.49 ms (1.77 Gbit/s); backward hides 1.49 ms.",
        "Predicted: bf16 24.7 ms, quantize8 14.9 ms, quantize4 14.3 ms.",
        "Use 8 bits, predicted to be 1.3 times as fast per step:",
        "  model.set_hook(hooks.chain(hooks.error_feedback(), hooks.quantize(bits=8)))",
        "or, in a script for torch's DDP: gradwire run --replace-ddp --hook quantize8",
        "Compare the loss of a few hundred steps with and without it.",
    ]


def test_on_one_host_a_hook_must_save_a_third():
    text = text_of(*(made_ring(rank, range(30)) for rank in range(2)))
    assert "\nAll ranks are on one host, node-a.\nDo not compress: there, hooks compute" in text
    assert "Predicted" not in text
    assert suggest(MeasuredStep(0.55, 0.29, 0.39, **MB43, on_one_host=True)) is not None


def test_a_long_line_to_paste_remains_python():
    lines = module._wrapped(f"  model.set_hook({CANDIDATES[-1].line})")
    assert [len(line) <= 80 for line in lines] == [True, True]
    compile("\n".join(lines).lstrip(), "", "eval")


def test_step_time_and_exposed_share_are_those_of_the_report():
    report = RunReport([made_ring(0, range(30)), made_ring(1, range(30), late=1 * MS)])
    text = " ".join(suggest_text(report).split())
    assert f"A step takes 20 ms (median); {report.exposed_share:.1%} of it is exposed communication" in text


@pytest.mark.parametrize(
    ("seconds", "exposed", "wire", "expected"),
    [
        (8.0, 7.7, 7.8, "local4"),  # 50 Mbit/s
        (4.0, 3.7, 3.8, "quantize4"),
        (0.55, 0.29, 0.39, "quantize8"),  # 1 Gbit/s
        (0.27, 0.02, 0.04, None),  # shared memory
        (0.27, 0.0, 0.2, None),  # all of it is hidden
    ],
)
def test_the_hook_depends_on_the_link(seconds, exposed, wire, expected):
    found = suggest(MeasuredStep(seconds, exposed, wire, **MB43))
    assert (found and found.name) == expected


def test_gradients_of_two_bytes_and_gpus():
    step = MeasuredStep(0.5, 0.3, 0.3, **MB43)
    bf16, eight = CANDIDATES[:2]
    assert replace(step, itemsize=2).predict(bf16) >= step.seconds
    assert replace(step, itemsize=2).predict(eight) > step.predict(eight)
    assert replace(step, on_gpu=True).predict(eight) < step.predict(eight) - 0.03


def test_what_is_measured_is_of_the_rank_that_waits_least():
    late = measure(RunReport([made_ring(0, range(30)), made_ring(1, range(30), late=2 * MS)]))
    assert (late.seconds, late.nbytes, late.buckets) == (STEP / 1e9, 2 * BUCKET, 2)
    assert (late.exposed, late.wire) == pytest.approx((0.006, 0.0075), abs=1e-4)


def test_a_straggler_comes_first():
    text = text_of(made_ring(0, range(30)), made_ring(1, range(30), late=3 * MS))
    assert "First fix this: rank 1 is slow in data (6 ms, the others take 3)" in text
    assert "set_hook" not in text


def test_small_collectives(monkeypatch):
    monkeypatch.setattr(module, "_SMALL", 2 * BUCKET)
    text = text_of(made_ring(0, range(30)), made_ring(1, range(30)))
    assert "Do not compress: a collective has 1.00 MiB" in text


def test_one_rank():
    assert text_of(made_ring(0, range(30), size=1)) == "Do not compress: the run has one rank, which sends nothing.\n"


@pytest.mark.parametrize(
    ("steps", "more", "wrong"),
    [
        (range(5), [], "have recorded 4 steps with averages, and 10 are needed"),
        (range(0), [], "have recorded 0 steps"),
        (range(30), [{"label": "sign()", "bucket": 0}], r"the run uses sign\(\)"),
    ],
)
def test_runs_from_which_nothing_can_be_predicted(steps, more, wrong):
    launched = [made(9000 + i, 590 * MS, K.BUCKET_LAUNCHED, step=29, **fields) for i, fields in enumerate(more)]
    with pytest.raises(UsageError, match=wrong):
        text_of(*(made_ring(rank, steps, more=launched) for rank in range(2)))


def test_candidates_are_hooks_with_these_lines():
    import torch  # noqa: F401  # in the lines

    from gradwire import hooks  # noqa: F401

    for hook in CANDIDATES:
        named = NAMED_HOOKS[hook.name]
        assert (repr(eval(hook.line)), hook.every) == (repr(named.build()), named.every)
