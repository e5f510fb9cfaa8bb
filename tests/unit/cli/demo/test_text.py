"""The demo's text: the same on every rank, its two parts apart, its windows inside."""

import math

import pytest
import torch

from gradwire.cli.demo.model import ALPHABET, Corpus, decode, encode, even_windows, random_windows, standard_library
from gradwire.errors import UsageError


@pytest.fixture
def folder(tmp_path):
    for i in range(20):
        (tmp_path / f"m{i:02}.py").write_text(f"x{i:02} = 1\r\n" if i % 2 else f"x{i:02} = 1\n", newline="")
    (tmp_path / "notes.txt").write_text("not a module")
    return tmp_path


def test_every_tenth_module_is_held_out_and_nothing_else_is_read(folder):
    corpus = standard_library(folder)
    assert decode(corpus.held_out) == "x09 = 1\n\nx19 = 1\n"
    assert decode(corpus.train).count("= 1\n") == 18
    assert "x09" not in decode(corpus.train)


def test_this_pythons_library_is_a_text_worth_learning():
    corpus = standard_library()
    assert corpus.train.numel() > 1_000_000
    assert corpus.held_out.numel() > 50_000
    assert int(corpus.train.max()) < len(ALPHABET)
    assert 2.5 < corpus.unigram_entropy() < math.log(len(ALPHABET))


def test_too_few_modules_are_refused(tmp_path):
    with pytest.raises(UsageError, match="need at least 10"):
        standard_library(tmp_path)


def test_unigram_entropy_of_a_fair_coin_is_one_bit():
    corpus = Corpus(train=encode("ab" * 8), held_out=encode(""))
    assert corpus.unigram_entropy() == pytest.approx(math.log(2))


@pytest.mark.parametrize("length", [1, 4, 10])
def test_windows_lie_inside_the_text(length):
    text = encode("abcdefghij")
    generator = torch.Generator().manual_seed(0)
    for windows in (
        random_windows(text, 50, length, generator),
        even_windows(text, 4, length),
        even_windows(text, 1, length),
    ):
        assert windows.dtype is torch.int64
        assert windows.shape[1] == length
        assert all(decode(w) in "abcdefghij" for w in windows)


def test_even_windows_reach_from_the_first_character_to_the_last():
    assert [decode(w) for w in even_windows(encode("abcdefghij"), 3, 2)] == ["ab", "ef", "ij"]
