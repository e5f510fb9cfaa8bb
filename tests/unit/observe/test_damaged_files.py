"""Files of a recorder that are cut, or whose header is damaged: no command fails, and a file that cannot be read is named."""

import random
import warnings

import pytest

from gradwire.cli import main
from gradwire.observe.report.render import render_page, render_text
from gradwire.observe.report.report_model import load_report
from gradwire.observe.rings.ring import load_rings, read_rings
from gradwire.observe.stragglers.detect import find_stragglers
from gradwire.runtime.host import clock_identity
from helpers.made_rings import made_ring, write_ring

SEEDS = 20
FILES = ("rank-0.ring", "rank-0.names")


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The files of a run of two ranks, by name."""
    directory = tmp_path_factory.mktemp("whole")
    for rank in range(2):
        header = {"clock": clock_identity(), "started": 0, "main_thread": 1}
        write_ring(directory, made_ring(rank, range(14), late=rank * 1000, **header), capacity=256)
    return {path.name: path.read_bytes() for path in directory.iterdir()}


@pytest.fixture
def run(whole, tmp_path):
    """The run, with one of its files changed."""

    def make(name, data):
        for other, content in whole.items():
            (tmp_path / other).write_bytes(data if other == name else content)
        return tmp_path

    return make


def damaged(data: bytes, rng: random.Random, name: str) -> bytes:
    """Bytes that are cut; or the header of a ring with bits flipped, bytes replaced, or a piece moved."""
    found = bytearray(data)
    how = rng.randrange(4)
    if how == 0 or name.endswith(".names"):
        return bytes(found[: rng.randrange(len(found))])
    for _ in range(rng.choice((1, 1, 3, 20))):
        at = rng.randrange(700)
        if how == 1:
            found[at] ^= 1 << rng.randrange(8)
        elif how == 2:
            found[at] = rng.choice((0, 255, ord('"'), ord("}"), ord("9"), rng.randrange(256)))
        else:
            length = rng.randrange(1, 40)
            found[at : at + length] = found[-length:]
    return bytes(found)


def commands(directory, out):
    yield ["report", str(directory), "-o", str(out / "page.html")]
    yield ["report", str(directory), "--text"]
    yield ["trace", str(directory), "-o", str(out / "trace.json")]
    yield ["inspect", str(directory)]
    yield ["top", str(directory), "--once"]


@pytest.mark.parametrize("name", FILES)
def test_every_command_reads_what_can_be_read(run, whole, tmp_path_factory, capsys, name):
    out = tmp_path_factory.mktemp("out")
    for seed in range(SEEDS):
        rng = random.Random(f"{name} {seed}")
        data = damaged(whole[name], rng, name)
        directory = run(name, data)
        for words in rng.sample(list(commands(directory, out)), 2):
            assert main(words) == 0, (seed, words)
        with warnings.catch_warnings(record=True) as shown:
            warnings.simplefilter("always")
            rings = read_rings(directory)
            find_stragglers(directory)
        assert rings[-1].rank == 1
        assert len(rings[-1].records) == 252
        assert all("rank-0." in str(one.message) for one in shown)
        capsys.readouterr()


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda data: b"x" + data[1:], "is not a ring"),
        (lambda data: data[:5000], "is damaged: 256 records in 5000 bytes"),
        (lambda data: data.replace(b'"pid": 1000', b'"pid": null'), "its header cannot be read"),
        (lambda data: data[:4000], "is not a ring"),
    ],
)
def test_the_file_is_named_once_by_every_command(run, whole, tmp_path_factory, capsys, change, what):
    name = "rank-0.ring"
    data = change(whole[name])
    assert data != whole[name]
    directory = run(name, data)
    [(named, words)] = load_rings(directory)[1].items()
    assert named == name
    assert words.startswith("left out: ")
    assert what in words
    for command in commands(directory, tmp_path_factory.mktemp("out")):
        assert main(command) == 0
        shown = capsys.readouterr()
        if command[0] != "report":
            assert f"{shown.out}{shown.err}".count(f"warning: {directory / name}: ") == 1, command
    report = load_report(directory)
    assert list(report.damaged) == [name]
    for text in (render_text(report), render_page(report)):
        assert text.count(f"{name} cannot be read as a whole") == 1


def test_whole_files_are_not_called_damaged(run, whole):
    directory = run("rank-0.ring", whole["rank-0.ring"])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        read_rings(directory)
    assert load_report(directory).damaged == {}
