"""The script that converts public files: equal to the byte to what the results read, or not written."""

import hashlib
import os
from pathlib import Path

import pytest

from mini_ee.experiments.data import CHECKSUMS, READERS, convert, sentence_piece

SHARED = Path(os.environ.get("MINI_EE_SHARED", ""))


def test_a_file_that_differs_is_not_written_and_what_is_missing_is_named(tmp_path):
    data = tmp_path / "Reproducing-AutoPrompt" / "glue_data" / "SST-2"
    data.mkdir(parents=True)
    for name in ("train_full.tsv", "dev.tsv"):
        (data / name).write_text("sentence\tlabel\nfine \t1\n")
    wrong = convert(tmp_path)
    assert not (tmp_path / "data").exists()
    assert len(wrong) == len(READERS) + 1  # two files of one source differ, and every other source is missing
    assert sum("fetch it: " in line for line in wrong) == len(READERS) - 1
    assert sum("would not be the one that our results read" in line for line in wrong) == 2


def test_a_source_of_another_version_is_one_line(tmp_path):
    (tmp_path / "BECEL").mkdir()
    line = next(line for line in convert(tmp_path) if "BECEL" in line)
    assert "expected https://github.com/MJ-Jang/BECEL, found another version" in line


def test_pieces_merge_in_the_order_of_their_result():
    tokens = [
        "<unk>",
        "<s>",
        "</s>",
        *(f"<0x{byte:02X}>" for byte in range(256)),
        "ab",
        "▁",
        "a",
        "b",
        "c",
        "bc",
    ]
    tokenizer = sentence_piece(tokens)
    assert tokenizer.encode("abc").tokens == ["<s>", "▁", "ab", "c"]  # ab stands before bc
    assert tokenizer.decode(tokenizer.encode("abc").ids) == "abc"


@pytest.mark.skipif(not (SHARED / "data").is_dir(), reason="needs the real data of MINI_EE_SHARED")
def test_the_checksums_are_those_of_the_data_that_the_results_read():
    for line in CHECKSUMS.read_text().splitlines():
        digest, name = line.split("  ")
        if name.startswith("data/") and (SHARED / name).parent.is_dir():
            assert hashlib.sha256((SHARED / name).read_bytes()).hexdigest() == digest, name
