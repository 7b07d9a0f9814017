"""A job over many files: its answers, parts that are whole or absent, jobs that were killed, damaged rows, refusals."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from importlib.util import find_spec

import numpy as np
import pytest
from conftest import WORDS, answer, refused

from mini_ee.lab.cli.main import main
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.text_files import InputRow, TextReader
from mini_ee.lab.export import writer
from mini_ee.lab.export.runtime import Answer, Runtime
from mini_ee.serve import batch as job
from mini_ee.serve import batch_parts as parts
from mini_ee.serve.batch_parts import Block, blocks_of, rows_of

TEXTS = [
    f"the {'very ' * (n % 4)}{word} {thing}"
    for n in (3, 0, 2, 1)
    for word in ("good", "bad")
    for thing in ("film", "meal")
]


def parts_of(out):
    """Name -> bytes of every part."""
    return {path.name: path.read_bytes() for path in sorted(out.glob("[!.]*.part-*"))}


def answers_of(out, suffix=".jsonl"):
    content = [content for name, content in parts_of(out).items() if name.endswith(suffix)]
    return [json.loads(line) for part in content for line in part.splitlines()]


def batch(runtime, out, *inputs, options=("--no-projection",)):
    return ["batch", runtime.folder, "--in", *inputs, "--out", out, "--processes", 1, "--part-rows", 5, *options]


@pytest.fixture
def inputs(tmp_path):
    folder = tmp_path / "in"
    folder.mkdir()
    lines = [json.dumps({"id": f"n{at}", "text": text}) for at, text in enumerate(TEXTS)]
    (folder / "a.jsonl").write_text("\n".join(lines) + "\n")
    (folder / "b.txt").write_text("\n".join(TEXTS[:7]) + "\n")
    return folder


def test_the_answers_are_those_of_run_in_the_order_of_the_rows(capsys, tmp_path, runtime, inputs):
    summary = answer(capsys, *batch(runtime, tmp_path / "out", f"{inputs}/*"))
    expected = [answered.to_dict() for answered in runtime.run(TEXTS, batch_size=1)]
    keys = [{"id": f"n{at}"} for at in range(16)] + [{"file": "b.txt", "row": at} for at in range(1, 8)]
    rows = answers_of(tmp_path / "out")
    for key, row, one in zip(keys, rows, expected + expected[:7], strict=True):
        expected_row = key | one | {"confidence": pytest.approx(one["confidence"], abs=1e-6)}
        del expected_row["milliseconds"]
        assert row == expected_row
    assert len({row["exit"] for row in rows}) > 1
    sizes = {"a.jsonl": (5, 5, 5, 1), "b.txt": (5, 2)}
    names = {f"{name}.part-{at:05d}.jsonl": n for name, part_rows in sizes.items() for at, n in enumerate(part_rows)}
    assert {name: content.count(b"\n") for name, content in parts_of(tmp_path / "out").items()} == names
    assert summary["rows"] == 23 and summary["parts"] == 6 and summary["failed"] == 0
    assert summary["mean_layers"] == pytest.approx(sum(row["layers"] for row in rows) / 23)
    assert summary["layers_saved"] == pytest.approx(1 - summary["mean_layers"] / 6)
    assert summary["exit_counts"] == [sum(row["exit"] == layer for row in rows) for layer in runtime.exits]


TABLES = {  # content of a file, texts that are read, (line, beginning of the error) of rows that are not
    "json.jsonl": (
        '{"text": "x"}\n{"text": 5}\n\n{"text"\n{"words": "x"}\n{"text": " "}\n{"text": "y", "more": 1}\n',
        ["x", "y"],
        [
            (2, "expected text in text, found 5"),
            (4, "expected one JSON object"),
            (5, "expected text in text, found None"),
            (6, "expected text in text, found an empty text"),
        ],
    ),
    "quoted.csv": (
        'id,text\n1,x\n2,"a ""b"",\nc"\n3,"open\n4,y\n5,"a"b\n6,x,more\n\n7,z\n',
        ["x", 'a "b",\nc', "y", "z"],
        [
            (5, "expected closed quotation marks"),
            (7, "expected closed quotation marks"),
            (8, "expected 2 columns, found 3"),
        ],
    ),
    "bytes.csv": (b"\xef\xbb\xbftext\r\nx\r\n\xff\r\ny\r\n", ["x", "y"], [(3, "expected UTF-8")]),
    "semicolon.csv": ("text;label\nx, 1;0\nx, 2;1\n", ["x, 1", "x, 2"], []),
    "tabs.tsv": ('label\tsentence\n0\tx "1\n1\n\n1\ty\n', ['x "1', "y"], [(3, "expected 2 columns, found 1")]),
    "bytes.tsv": (b"text\nx\n\xff\ny\n", ["x", "y"], [(3, "expected UTF-8")]),
    "lines.txt": (
        b'x\n\n\xff\n{"text": "y"}\n{"words"\na\tb\tc\n',
        ["x", '{"text": "y"}', '{"words"', "a\tb\tc"],
        [(3, "expected UTF-8")],
    ),
    "empty.csv": ("", [], [(1, "expected a header and rows, found an empty file")]),
    "names.csv": ("a,b\n1,2\n", [], [(1, "expected a text column")]),
    "pairs.csv": ("sentence1,sentence2\nx,y\n", [], [(1, "expected one text a row, found sentence1 and sentence2")]),
}


@pytest.mark.parametrize("name", TABLES)
def test_a_damaged_row_is_an_error_with_its_line_and_the_rows_around_it_are_read(tmp_path, name):
    content, texts, errors = TABLES[name]
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    rows = list(rows_of(TextReader(path, TaskOptions(), 1)))
    assert [row.texts[0] for row in rows if row.error is None] == texts
    damaged = [row for row in rows if row.error is not None]
    assert [row.line for row in damaged] == [line for line, _ in errors]
    assert all(row.error.startswith(begin) for row, (_, begin) in zip(damaged, errors))


def test_a_line_without_end_is_an_error_and_is_never_in_memory(tmp_path, monkeypatch):
    monkeypatch.setattr("mini_ee.lab.data.table_files.LONGEST_LINE", 10)
    (tmp_path / "a.txt").write_text("short\n" + "long " * 7 + "\nlast\n")
    first, second, third = TextReader(tmp_path / "a.txt", TaskOptions(), 1)
    assert (first.texts, third.texts, third.line) == (("short",), ("last",), 3) and second.error


def test_long_texts_make_smaller_blocks_and_numbers_count_damaged_rows(tmp_path, monkeypatch):
    monkeypatch.setattr("mini_ee.serve.batch_parts.CHARACTERS", 20)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\nno\n{"text": "%s"}\n{"text": "y"}\n' % ("z" * 30))
    first, second = blocks_of(TextReader(tmp_path / "a.jsonl", TaskOptions(), 1), 100, "jsonl")
    assert list(first.rows) == [1, 2, 3] and list(second.rows) == [4]
    assert [number for number, row in first.rows.items() if row.error] == [2]
    assert first.size + second.size == (tmp_path / "a.jsonl").stat().st_size


def test_damaged_rows_are_reported_and_the_rest_is_done(capsys, tmp_path, runtime, inputs, monkeypatch):
    """One row fails in the reader, one in the model, one file has no column of texts."""
    (inputs / "a.jsonl").write_text('{"text": "a good film"}\n{"text"\n{"text": "a bad film"}\n{"text": "a meal"}\n')
    (inputs / "c.csv").write_text("number\n1\n2\n")
    early_exit = parts.early_exit

    def fails(segments, rule, batch):
        if ("a bad film",) in batch.texts:
            raise ValueError("not finite")
        return early_exit(segments, rule, batch)

    monkeypatch.setattr(parts, "early_exit", fails)
    assert main([*map(str, batch(runtime, tmp_path / "out", f"{inputs}/*")), "--json"]) == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    assert summary["failed"] == 3 and summary["rows"] == 2 + 7
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    places = [(error["file"], error["line"], error["row"]) for error in errors]
    assert places == [("a.jsonl", 2, 2), ("a.jsonl", 3, 3), ("c.csv", 1, 1)]
    assert errors[2]["error"].endswith("; no row of this file is read")
    assert errors[1]["error"] == "not finite" and "a.jsonl:3: not finite" in printed.err
    assert [row["row"] for row in answers_of(tmp_path / "out") if row["file"] == "a.jsonl"] == [1, 4]


def stopped_at(monkeypatch, write):
    """The job is stopped in its write with this number."""
    replace, count = os.replace, iter(range(1000))

    def replace_or_stop(*names):
        if next(count) == write:
            raise KeyboardInterrupt
        replace(*names)

    monkeypatch.setattr(os, "replace", replace_or_stop)


def test_a_job_that_was_stopped_at_any_write_goes_on_and_ends_equal(capsys, tmp_path, runtime, inputs, monkeypatch):
    (inputs / "b.txt").write_text("a film\n\xff\n", "latin-1")
    command = batch(runtime, tmp_path / "whole", f"{inputs}/*")
    assert main([*map(str, command)]) == 1
    written, computed = [], parts.PartWriter.write
    monkeypatch.setattr(
        parts.PartWriter, "write", lambda self, block: written.append(block.part) or computed(self, block)
    )
    for write in (0, 1, 2, 3, 10, 11):  # of twelve: job.json, five parts with their statistics, errors.jsonl
        out = tmp_path / f"out{write}"
        with monkeypatch.context() as patch:
            stopped_at(patch, write)
            assert main([*map(str, batch(runtime, out, f"{inputs}/*"))]) == 1
        assert capsys.readouterr().err.endswith("stopped\n")
        assert not [path for path in out.rglob("*") if "partial" in path.name]
        there = parts_of(out)
        assert there.items() <= parts_of(tmp_path / "whole").items()
        written.clear()
        assert main([*map(str, batch(runtime, out, f"{inputs}/*"))]) == 1
        assert set(written) == parts_of(out).keys() - there.keys()
        assert parts_of(out) == parts_of(tmp_path / "whole")
        assert (out / "errors.jsonl").read_bytes() == (tmp_path / "whole" / "errors.jsonl").read_bytes()


@pytest.mark.slow
def test_two_processes_write_the_same_and_go_on_after_a_kill(tmp_path, runtime, inputs):
    (inputs / "c.txt").write_text("\n".join(TEXTS * 40) + "\n")
    command = [sys.executable, "-m", "mini_ee", *map(str, batch(runtime, tmp_path / "one", f"{inputs}/*"))]
    assert main(command[3:]) == 0
    command[command.index("--processes") + 1 : command.index("--processes") + 2] = ["2"]
    command[command.index(str(tmp_path / "one"))] = str(tmp_path / "two")
    process = subprocess.Popen(command, stderr=subprocess.PIPE)
    while process.poll() is None and len(list((tmp_path / "two").glob("[!.]*.part-*"))) < 10:
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate(timeout=20)  # ends if the workers too have ended: they share standard error
    assert parts_of(tmp_path / "two").items() <= parts_of(tmp_path / "one").items()
    assert len(parts_of(tmp_path / "two")) < len(parts_of(tmp_path / "one"))
    subprocess.run(command, check=True, timeout=60)
    assert parts_of(tmp_path / "two") == parts_of(tmp_path / "one")


def test_what_does_not_fit_a_job_or_a_disk_is_refused_in_one_line(capsys, tmp_path, runtime, inputs, monkeypatch):
    out = tmp_path / "out"
    assert answer(capsys, *batch(runtime, out, f"{inputs}/*"))["rows_now"] == 23
    before = parts_of(out)
    for names, options, part in (
        (("a.jsonl", "b.txt"), ("--part-rows", 6), "out: expected part_rows 5 as in job.json, found 6; give"),
        (("a.jsonl", "b.txt"), ("--text-column", "text"), "expected text_column None as in job.json, found text;"),
        (("a.jsonl",), (), "expected b.txt too"),
    ):
        command = batch(runtime, out, *(inputs / name for name in names), options=options)
        assert part in refused(capsys, *command, status=2)
    (inputs / "b.txt").write_text("changed\n")
    assert "b.txt: changed since" in refused(capsys, *batch(runtime, out, f"{inputs}/*"), status=2)
    assert parts_of(out) == before
    with monkeypatch.context() as patch:
        patch.setattr(job, "find_spec", lambda name: None)
        line = refused(
            capsys, *batch(runtime, tmp_path / "p", inputs / "a.jsonl", options=["--format", "parquet"]), status=2
        )
        assert "pip install 'mini-ee[batch]'" in line

    def full(path, *content):
        raise OSError(28, "No space left on device", str(path))

    monkeypatch.setattr(parts, "write_bytes", full)
    line = refused(capsys, *batch(runtime, tmp_path / "full", inputs / "a.jsonl"), status=1)
    assert "a.jsonl.part-00000.jsonl: No space left on device" in line


def exported_encoder(run, tmp_path):
    writer.export(run, tmp_path / "encoder", [(text,) for text in TEXTS])
    return Runtime(tmp_path / "encoder", threads=1)


def test_parquet_is_read_and_written_as_jsonl_is(capsys, tmp_path, runtime, embedding_run, inputs):
    """Ids keep their type. A file that is cut off is one error, and the next file is done."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    ids = list(range(100, 116))
    parquet.write_table(pa.table({"key": ids, "id": ids, "sentence": TEXTS}), inputs / "p.parquet", row_group_size=3)
    (inputs / "0.parquet").write_bytes((inputs / "p.parquet").read_bytes()[:-100])
    assert main([*map(str, batch(runtime, tmp_path / "out", f"{inputs}/*")), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1
    tables = [parquet.read_table(path) for path in sorted((tmp_path / "out").glob("p.parquet.part-*.parquet"))]
    rows = [row for table in tables for row in table.to_pylist()]
    plain = [row for row in answers_of(tmp_path / "out", ".jsonl") if "id" in row]
    assert [row | {"id": plain[at]["id"]} for at, row in enumerate(rows)] == plain
    assert [row["id"] for row in rows] == ids
    assert [table.num_rows for table in tables] == [5, 5, 5, 1]
    encoder = exported_encoder(embedding_run, tmp_path)
    options = ("--no-projection", "--format", "parquet")
    answer(capsys, *batch(encoder, tmp_path / "vectors", inputs / "b.txt", options=options))
    table = parquet.read_table(tmp_path / "vectors" / "b.txt.part-00000.parquet")
    assert table.column_names == ["file", "row", "embedding", "exit", "layers"]
    np.testing.assert_allclose(table["embedding"].to_pylist(), encoder.embed(TEXTS[:5]), atol=1e-5)


def block_with(ids):
    rows = {number: InputRow(number, ("x",), id=row_id) for number, row_id in enumerate(ids, start=1)}
    return Block("a.part-00000.parquet", "a", rows, True, 0.0, 0)


def test_a_row_may_have_several_labels(tmp_path, runtime, monkeypatch):
    """In Parquet a map; None is the confidence of a regression."""
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    monkeypatch.setitem(runtime.config["task"], "multi_label", True)
    answers = {1: Answer({"bad": 0.6, "good": 0.7}, 0.4, 2, 2, 0.0, None), 2: Answer({}, None, 1, 1, 0.0, None)}
    content = parts.parquet_content(block_with(["k", 7]), answers, runtime)
    assert parquet.read_table(pa.BufferReader(content)).to_pylist() == [
        {"id": "k", "label": [("bad", 0.6), ("good", 0.7)], "confidence": 0.4, "exit": 2, "layers": 2.0},
        {"id": "7", "label": [], "confidence": None, "exit": 1, "layers": 1.0},
    ]


@pytest.mark.parametrize(
    "ids, expected",
    [
        ([3, None, 5], [3, None, 5]),
        (["a", None, 5], ["a", None, "5"]),
        ([True, 2, 3], ["True", "2", "3"]),
        ([2**63, 2, 3], [str(2**63), "2", "3"]),
    ],
    ids=["numbers", "names", "bools", "beyond int64"],
)
def test_ids_in_parquet_are_integers_or_strings_and_a_missing_one_is_null(runtime, ids, expected):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    answers = dict.fromkeys((1, 2, 3), Answer("bad", 1.0, 0, 1, 0, None))
    content = parts.parquet_content(block_with(ids), answers, runtime)
    assert parquet.read_table(pa.BufferReader(content))["id"].to_pylist() == expected


def with_ids(ids, folder, name="t.parquet"):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({"id": ids(pa), "text": TEXTS[:3]}), folder / name)
    return folder / name


IDS = {  # a column of ids -> the ids of the answers as JSON, None for a row that is an error
    "dates": (lambda pa: pa.array([0, 2**31 - 1, None], pa.int32()).cast("date32"), "1970-01-01", "2147483647", None),
    "times": (
        lambda pa: pa.array([0, 10**15, 1], pa.int64()).cast(pa.timestamp("ms")),
        "1970-01-01",
        "10000000000",
        "1",
    ),
    "zones": (lambda pa: pa.array([7, 8, 9], pa.int64()).cast(pa.timestamp("s", "Mars/A")), "7", "8", "9"),
    "nanoseconds": (lambda pa: pa.array([0, 1, 2], pa.timestamp("ns")), "1970-01-01", ".000000001", ".000000002"),
    "durations": (lambda pa: pa.array([0, 2**62, 1], pa.int64()).cast(pa.duration("s")), "0:00:00", str(2**62), "0:00"),
    "not finite": (lambda pa: pa.array([0.5, float("nan"), float("inf")]), "0.5", "None", "inf"),
}


@pytest.mark.parametrize("case", IDS)
def test_ids_that_python_or_json_cannot_hold_are_texts_and_the_rows_are_answered(tmp_path, runtime, case, capsys):
    ids, *expected = IDS[case]
    path = with_ids(ids, tmp_path)
    for form in ("jsonl", "parquet"):
        options = ("--no-projection", "--format", form)
        assert answer(capsys, *batch(runtime, tmp_path / form, path, options=options))["rows"] == 3
    (part,) = parts_of(tmp_path / "jsonl").values()
    ids_written = [json.loads(line, parse_constant=pytest.fail)["id"] for line in part.splitlines()]
    assert all(str(wanted) in str(row_id) for wanted, row_id in zip(expected, ids_written, strict=True)), ids_written


def test_a_value_that_utf_8_cannot_hold_is_the_error_of_its_row_alone(capsys, tmp_path, runtime):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    rows = [{"id": "a", "text": TEXTS[0]}, {"id": "\ud800", "text": TEXTS[1]}, {"id": "c", "text": TEXTS[2]}]
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = pa.array([text.encode() for text in TEXTS[:3]] * 1000)
    damaged = texts.to_pylist()
    damaged[2500] = b"\xff"
    parquet.write_table(pa.table({"text": pa.array(damaged).view(pa.string())}), tmp_path / "b.parquet")
    options = ("--no-projection", "--format", "parquet", "--part-rows", "5000")
    assert main([*map(str, batch(runtime, tmp_path / "out", tmp_path / "*.*", options=options)), "--json"]) == 1
    assert json.loads(capsys.readouterr().out)["rows"] == 2 + 2999
    errors = [json.loads(line) for line in (tmp_path / "out" / "errors.jsonl").read_text().splitlines()]
    assert [(error["file"], error["row"]) for error in errors] == [("a.jsonl", 2), ("b.parquet", 2501)]
    assert errors[0]["error"].startswith("expected an id that UTF-8 and JSON hold, found '\\ud800'; correct")
    assert errors[1]["error"].startswith("expected UTF-8, found invalid start byte at byte 0; correct")


def test_a_part_that_was_emptied_or_cut_is_computed_again(capsys, tmp_path, runtime, inputs):
    command = batch(runtime, tmp_path / "out", inputs / "a.jsonl")
    assert answer(capsys, *command)["rows_now"] == 16
    before = parts_of(tmp_path / "out")
    for name, size in zip(before, (0, 30)):
        os.truncate(tmp_path / "out" / name, size)
    assert answer(capsys, *command)["rows_now"] == 10
    assert parts_of(tmp_path / "out") == before


def test_a_file_name_that_is_not_utf_8_is_named(capsys, tmp_path, runtime):
    path = os.fsencode(tmp_path) + b"/caf\xe9.txt"
    try:
        shutil.copy(__file__, path)
    except OSError:
        pytest.skip("the file system has UTF-8 names only")
    for command in (batch(runtime, tmp_path / "out", os.fsdecode(path)), ("run", runtime.folder, os.fsdecode(path))):
        line = refused(capsys, *command, status=2)
        assert "caf\\xe9.txt: expected a file name in UTF-8, found other bytes; rename the file" in line
    assert not (tmp_path / "out").exists()


def test_the_folder_of_a_job_may_be_the_current_one(capsys, tmp_path, runtime, inputs, monkeypatch):
    (inputs / "new").mkdir()
    monkeypatch.chdir(inputs / "new")
    assert answer(capsys, *batch(runtime, ".", inputs / "b.txt"))["rows"] == len(answers_of(inputs / "new")) == 7
    assert not list(inputs.glob(".*.lock"))


def test_the_projection_adds_up(capsys, tmp_path, runtime, inputs):
    (inputs / "a.jsonl").write_text(
        "".join(json.dumps({"text": f"{text} {word} is"}) + "\n" for word in WORDS for text in TEXTS)
    )
    summary = answer(capsys, *batch(runtime, tmp_path / "out", inputs / "a.jsonl", options=()))
    projection, rows = summary["projection"], summary["rows"]
    hours, io = projection["core_hours"], summary["io_core_seconds"] / rows
    model = summary["core_seconds"] / rows - io
    per_hour = projection["rows"] / 3600
    assert hours["exits"] == pytest.approx((io + model) * per_hour)
    assert hours["full"] == pytest.approx((io + model * projection["full_ratio"]) * per_hour)
    assert projection["full_ratio"] > 1 and 0 < model
    (block,) = blocks_of(TextReader(inputs / "b.txt", TaskOptions(), 1), 100, "jsonl")
    stats = parts.PartWriter(runtime.folder, tmp_path / "out").write(block._replace(seconds=100.0)).stats
    assert stats["seconds"] > stats["io_seconds"] > 100
    again = answer(capsys, *batch(runtime, tmp_path / "out", inputs / "a.jsonl", options=()))
    assert again["rows_now"] == 0 and "projection" not in again
    assert {name: again[name] for name in ("rows", "core_seconds", "exit_counts")} == {
        name: summary[name] for name in ("rows", "core_seconds", "exit_counts")
    }


def test_two_tasks_on_ray_write_the_same(tmp_path, runtime, inputs):
    if not find_spec("ray"):
        pytest.skip("Ray is not installed: pip install 'mini-ee[ray]'")
    command = [*map(str, batch(runtime, tmp_path / "one", f"{inputs}/*"))]
    assert main(command) == 0
    for replaced, value in ((str(tmp_path / "one"), str(tmp_path / "two")), ("1", "2")):
        command[command.index(replaced)] = value
    subprocess.run([sys.executable, "-m", "mini_ee", *command, "--ray"], check=True, timeout=120)
    assert parts_of(tmp_path / "two") == parts_of(tmp_path / "one")
