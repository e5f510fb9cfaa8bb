"""The page and the text: what is in them, that they are escaped and small, and how Chromium shows the page."""

import json
import re
import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import pytest

from gradwire.observe.hangs.analysis import Stall
from gradwire.observe.hangs.hang_report import SavedHang, as_dict
from gradwire.observe.report.render import render_page, render_text
from gradwire.observe.report.report_model import RunReport, load_report
from gradwire.observe.rings.run_outcome import RunOutcome
from gradwire.recorder.format import RecordKind as K
from helpers.made_rings import MS, made_ring, mark, write_ring
from helpers.made_steps import made_steps

EVIL = "<script>alert(1)</script>\"'&"


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.text = ""
        self.links: list[str] = []
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in ("src", "href", "xlink:href")]

    def handle_data(self, data):
        self.text += data


@pytest.fixture
def report():
    return RunReport([made_ring(0, range(30)), made_ring(1, range(30), late=3 * MS)], directory="/runs/x")


def test_everything_is_on_the_page_and_nothing_is_loaded(report):
    page = Page(render_page(report))
    for part in (
        "train.py --lr 0.1",
        "What to look at",
        "Step time",
        "Where a step's time goes",
        "A typical step",
        "When ranks were ready",
        "Bytes by hook and collective",
        "mean()",
        "world (ThreadGroup, 2 ranks)",
        "2 buckets, 2.00 MiB in total",
        "/runs/x",
    ):
        assert part in page.text, part
    assert page.tags.count("svg") == 5 - (len(report.timelines) == 1)
    assert page.links == ["data:,"]
    assert "script" not in page.tags


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("steps", [range(0), range(1), range(2)])
def test_pages_and_texts_of_almost_nothing(steps, ranks):
    report = RunReport([made_ring(rank, steps, size=ranks) for rank in range(ranks)])
    assert "What ran" in render_page(report)
    assert "Ranks" in render_text(report)


def test_a_bucket_without_names():
    ring = made_ring(0, range(3), size=1)
    ring.descriptions["buckets"][0]["buckets"][0]["names"] = []
    report = RunReport([ring])
    assert "What ran" in render_page(report)
    assert "Ranks" in render_text(report)


def test_all_text_is_escaped():
    ring = made_ring(0, range(3), size=1, command=EVIL, host=EVIL, torch=EVIL)
    ring.records[:] = [r._replace(group=EVIL, label=EVIL if r.label else "") for r in ring.records]
    ring.records.append(mark(99, 70 * MS, K.STEP_FAILED, EVIL))
    ring.descriptions["group"][0].update(name=EVIL, kind=EVIL)
    ring.descriptions["buckets"][0]["buckets"][0]["names"] = [EVIL]
    html = render_page(
        RunReport(
            [ring], directory=EVIL, hangs=[SavedHang(EVIL, EVIL, 1.0, (0,), EVIL, (), None)], damaged={EVIL: EVIL}
        )
    )
    page = Page(html)
    assert "script" not in page.tags
    assert page.text.count("<script>") >= 10


def test_64_ranks_and_2500_steps_are_less_than_a_megabyte(monkeypatch):
    """More steps make no larger page: points and cells stand for more of them."""
    rows = made_steps(4, 2_500, jitter=0.05)
    steps = (rows[rank % 4] for rank in range(64))
    monkeypatch.setattr("gradwire.observe.report.rank_summary.step_times", lambda records: next(steps))
    report = RunReport([made_ring(rank, range(0), size=64) for rank in range(64)])
    html = render_page(report)
    assert len(html.encode()) < 1_000_000
    assert "Each point stands for 11 steps" in html
    assert "Each cell is the mean of 21 steps" in html
    assert "32 ranks are not shown" in html
    assert len(render_text(report)) < 20_000


def test_the_text(report):
    text = render_text(report)
    assert max(map(len, text.splitlines())) <= 80
    for part in ("warning: Rank 1 is slow", "exposed communication", "mean()", "all_reduce", "median 20 ms"):
        assert part in text


def test_a_run_that_has_ended_well_says_so():
    for text, shown in (("", True), ("rank 0 failed", False), (None, False)):
        outcome = None if text is None else RunOutcome(text, None, None, ())
        report = RunReport([made_ring(0, range(3), size=1)], outcome=outcome)
        for page in (render_text(report), Page(render_page(report)).text):
            assert ("ended without an error" in page) == shown


def test_what_is_read_from_a_directory(tmp_path):
    for rank in range(2):
        write_ring(tmp_path, made_ring(rank, range(30)))
    saved = as_dict(Stall(5.0, (0,), 3, None), [])
    odd = [
        '{"collective": ',
        "[1]",
        "null",
        json.dumps({**saved, "waiting": ["x"]}),
        json.dumps({**saved, "suspects": [3]}),
    ]
    for number, text in enumerate([json.dumps(saved), *odd], 1):
        (tmp_path / f"hang-{number}.json").write_text(text)
    (tmp_path / "rank-7.ring").write_bytes(b"x" * 5000)
    report = load_report(tmp_path)
    assert [rank.records for rank in report.ranks] == [540, 540]
    assert [hang.file for hang in report.hangs] == ["hang-1.json"]
    assert list(report.damaged) == ["rank-7.ring"]
    assert len(report.timelines[0].rows) == 2


CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
MEASURE = """<script>
addEventListener("securitypolicyviolation", e => document.title += " violation");
onload = () => {
  const e = document.documentElement, style = getComputedStyle(document.body);
  document.title = JSON.stringify([e.scrollWidth, innerWidth, style.backgroundColor, style.color]);
};
</script></head>"""


def look(tmp_path: Path, html: str, width: int, *flags: str) -> tuple[list[object], str]:
    """What Chromium makes of a page: measured width, width of the window, colors; and what it logs."""
    # The page forbids scripts, so the copy that is measured has a policy that forbids everything else. Headless Chromium has
    # no windows below 500 pixels, so a narrow page is a frame.
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert policy in html
    inner = html.replace(policy, policy + "; script-src 'unsafe-inline'").replace("</head>", MEASURE, 1)
    (tmp_path / "inner.html").write_text(inner)
    outer = f"""<body><iframe src="inner.html" style="width:{width}px;height:900px;border:0"></iframe><script>
      onload = () => {{ const d = document.querySelector("iframe").contentDocument; document.title = d.title; }};</script>"""
    (tmp_path / "outer.html").write_text(outer)
    assert CHROMIUM is not None
    done = subprocess.run(
        [
            CHROMIUM,
            "--headless=new",
            "--no-sandbox",
            "--disable-gpu",
            "--allow-file-access-from-files",
            "--enable-logging=stderr",
            f"--user-data-dir={tmp_path / 'profile'}",
            "--window-size=1400,1000",
            *flags,
            "--virtual-time-budget=3000",
            "--dump-dom",
            (tmp_path / "outer.html").as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=300,
        check=True,
    )
    title = re.search("<title>(.*)</title>", done.stdout)
    assert title is not None, done.stdout + done.stderr
    measured = json.loads(title[1])
    return measured, "\n".join(line for line in done.stderr.splitlines() if "CONSOLE" in line)


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")
def test_chromium_shows_the_page(report, tmp_path):
    html = render_page(report)
    assert "://" not in html.split("<main>")[0]  # nothing that could be requested; the policy forbids it too
    colors = {}
    for width, dark in ((1200, False), (400, False), (1200, True)):
        # 0 is dark, 1 is light: a setting of Chromium's renderer.
        flags = [f"--blink-settings=preferredColorScheme={0 if dark else 1}"]
        (total, window, *found), console = look(tmp_path, html, width, *flags)
        assert window == width
        assert total <= width, f"{total} pixels of content at {width}"
        assert console == ""
        colors[dark] = found
    assert colors[False] != colors[True]
