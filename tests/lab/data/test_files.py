"""Tables and lines, as their owners write them: one reader, whatever the kind of file and whoever reads it."""

import csv
import gzip
import io
import json

import numpy as np
import pytest
from conftest import WORDS, answer, refused

from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.text_files import TextReader, read_rows, read_texts
from mini_ee.lab.errors import WrongArguments
from mini_ee.serve.batch_parts import rows_of

ROWS = [('she said "never" and left', "0"), ("good\tfilm", "1"), ("plain text", "1"), ("two\nlines, café", "0")]
OBJECTS = [{"text": text, "label": label} for text, label in ROWS]


def written(delimiter=",", rows=ROWS, end="\n", header=("text", "label"), **style):
    """What the csv module writes."""
    out = csv.writer(file := io.StringIO(), delimiter=delimiter, lineterminator=end, **style)
    out.writerows([header, *rows])
    return file.getvalue().encode()


def lines(*objects):
    return "".join(json.dumps(line) + "\n" for line in objects).encode()


def parquet(rows):
    pa, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pa.table({name: [row[name] for row in rows] for name in rows[0]}), file := io.BytesIO())
    return file.getvalue()


KINDS = {
    "t.csv": written(),
    "mark.csv": b"\xef\xbb\xbf" + written(end="\r\n"),
    "semicolons.csv": written(";"),
    "tabs.csv": written("\t"),
    "quoted.tsv": written("\t"),
    "crlf.tsv": written("\t", end="\r\n"),
    "all.tsv": written("\t", quoting=csv.QUOTE_ALL),
    "gaps.csv": written().replace(b"\n", b"\n\n  \n", 1) + b"\n\n",
    "gaps.tsv": b"\n" + written("\t").replace(b"\n", b"\n\n", 1) + b"\n",
    "t.jsonl": lines({"label": "0", "text": ROWS[0][0]}, *OBJECTS[1:]) + b"\n \n",
    "optional.ndjson": lines(OBJECTS[0], OBJECTS[1] | {"note": 1}, *OBJECTS[2:]),
    "array.json": json.dumps(OBJECTS, indent=1).encode(),
    "lines.json": lines(*OBJECTS),
    "t.parquet": lambda: parquet(OBJECTS),
}


def made(folder, name, content):
    content = content() if callable(content) else content
    path = folder / name
    path.write_bytes(gzip.compress(content) if name.endswith(".gz") else content)
    return path


@pytest.mark.parametrize("packed", ["", ".gz"])
@pytest.mark.parametrize("name", KINDS)
def test_every_kind_is_read_alike_with_and_without_labels(tmp_path, name, packed):
    """As add-exits, as a job, and as a task."""
    path = made(tmp_path, name + packed, KINDS[name])
    assert read_texts([path]) == [(text,) for text, _ in ROWS]
    assert [(row.texts[0], row.label) for row in read_rows([path], labelled=True)[0]] == ROWS
    assert [row.texts[0] for row in rows_of(TextReader(path, num_texts=1))] == [text for text, _ in ROWS]
    parts = load_task(path, TaskOptions(split_file=0)).splits.values()
    assert sorted(text for part in parts for (text,) in part.texts) == sorted(text for text, _ in ROWS)
    assert kind_is_found_in_a_folder(tmp_path / "folder", path)


def kind_is_found_in_a_folder(folder, path):
    folder.mkdir()
    (folder / f"train.{path.name.partition('.')[2]}").write_bytes(path.read_bytes())
    return [text for (text,) in load_task(folder).split("train").texts] == [text for text, _ in ROWS]


OF_MAC = b'text,label\ra,1\r"b\r""c""",0\r'
UNQUOTED = {  # content of a .tsv file whose quotation marks are text, and its texts
    "in a text": (b'text\tlabel\n5" disk\t1\n', ['5" disk']),
    "around a text": (b'text\tlabel\n"a film"\t1\n', ['"a film"']),
    "open": (b'text\tlabel\n" I like it\t1\nthe film "\t0\n', ['" I like it', 'the film "']),
    "most": (b'text\tlabel\na "b"\t1\n"c\t0\n"d ""e"""\t1\n', ['a "b"', '"c', '"d ""e"""']),
}


@pytest.mark.parametrize("case", UNQUOTED)
def test_single_quotation_marks_of_a_tsv_file_are_text(tmp_path, case):
    content, texts = UNQUOTED[case]
    assert read_texts([made(tmp_path, "t.tsv", content)]) == [(text,) for text in texts]


def test_line_ends_of_an_old_mac_and_texts_above_the_limit_of_csv_are_read(tmp_path):
    assert read_texts([made(tmp_path, "t.csv", OF_MAC)]) == [("a",), ('b\r"c"',)]
    assert read_texts([made(tmp_path, "t.txt", b"a\rb\r")]) == [("a",), ("b",)]
    for name, content in (("t.csv", written(rows=[("good " * 30_000, "1")])), ("l.tsv", b"text\n" + b"a" * 200_000)):
        assert len(read_texts([made(tmp_path, name, content)])[0][0]) >= 150_000


REFUSED = {  # content of a file, (line, part of the error) for the commands that stop, None: for none
    "short.csv": (b"text,label\na,1\nb\n", 3, "expected 2 columns, found 1; quote texts that hold the delimiter"),
    "long.tsv": (b"text\tlabel\na\tb\t1\n", 2, "expected 2 columns, found 3; a text holds no tab"),
    "long.csv": (b"id,text\n1,the film, they say, was good\n", 2, "expected 2 columns, found 4"),
    "utf-16.csv": (written().decode().encode("utf-16"), 1, "expected UTF-8, found UTF-16; convert the file"),
    "utf-16-le.txt": ("a film\n".encode("utf-16-le"), 1, "expected UTF-8, found UTF-16"),
    "cp1252.txt": ("a film\ncafé\n".encode("cp1252"), 2, "expected UTF-8, found byte 0xe9; convert the file"),
    "cut.csv.gz": (gzip.compress(written(rows=ROWS * 9000))[:-500], None, "expected gzip, found Compressed file ended"),
    "array.json": (b'[{"text": "a"},\n {"text": }]', 2, "expected an array of JSON objects, found Expecting value"),
    "texts.json": (b'["a", "b"]', 1, "expected one JSON object, found 'a'; write one object a line, or"),
    "columns.json": (b'{"text": ["a", "b"]}', 1, "expected text in text, found ['a', 'b'], which is no string"),
    "cut.parquet": (lambda: parquet(OBJECTS)[:-9], 1, "expected Parquet, found"),
    "empty.jsonl": (b"", 1, "expected a header and rows, found an empty file; fill it in or remove it"),
    "empty.csv": (b"\n\n", 1, "expected a header and rows, found an empty file"),
    "null.jsonl": (lines({"text": "a"}, {"note": "b"}), 2, "expected text in text, found None, which is no string"),
    "blank.csv": (b"text,label\na,1\n ,0\n", 3, "expected text in text, found an empty text; correct or drop the row"),
    "pairs.csv": (b"text,text_b\na,b\n", 1, "expected one text a row, found text and text_b; name the columns"),
    "other.jsonl": (lines({"review": "a"}), 1, "found columns ['review']; name it with --text-column or rename it"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_read_is_named_by_file_and_line_in_every_command(tmp_path, name):
    content, line, message = REFUSED[name]
    path = made(tmp_path, name.removesuffix(".gz"), content)
    with pytest.raises(WrongArguments) as error:
        read_texts([path], TaskOptions(), 1)
    assert len(str(error.value).splitlines()) == 1 and message in str(error.value)
    assert line is None or str(error.value).startswith(f"{path}:{line}: ")
    damaged = [row for row in rows_of(TextReader(path, num_texts=1)) if row.error]
    assert message in damaged[0].error and line in (None, damaged[0].line)
    if path.suffix != ".txt" and name not in ("pairs.csv", "long.csv", "other.jsonl"):
        with pytest.raises(WrongArguments) as error:
            load_task(path, TaskOptions(split_file=0, label_column="label" if b"label" in path.read_bytes() else None))
        assert str(error.value).startswith(f"{path}:")


def test_add_exits_leaves_out_empty_texts_and_counts_them(tmp_path):
    """But no row of another length, and no label that is missing."""
    for name, content in {
        "a.csv": b'text\none\n""\ntwo\n',
        "b.csv": b"text,label\none,1\n,1\ntwo,0\n",
        "c.jsonl": lines({"text": "one"}, {"text": None}, {"text": "two"}),
        "d.jsonl": b'{"text": "one"}\n{"text": NaN}\n{"text": "two"}\n',
        "e.parquet": lambda: parquet([{"text": "one"}, {"text": None}, {"text": "two"}]),
    }.items():
        rows, dropped = read_rows([made(tmp_path, name, content)], drop=True)
        assert ([row.texts for row in rows], dropped) == ([("one",), ("two",)], 1), name
    for name, content in {"f.csv": b"text,label\none,1\nx\n", "g.csv": b"text,label\none,\n"}.items():
        with pytest.raises(WrongArguments):
            read_rows([made(tmp_path, name, content)], labelled=True, drop=True)


LINES = ["good film\tbad plot", "a\tb\tc", "{name} liked it", '{"text": "ok"}', "[url] film", '"quoted', "1,2"]


def test_a_line_of_text_is_a_text_whatever_it_looks_like(tmp_path):
    path = made(tmp_path, "t.txt", "\n".join(["a film", "", *LINES, ""]).encode())
    expected = [("a film",), *((line,) for line in LINES)]
    assert read_texts([path]) == read_texts([path], TaskOptions(), 1) == expected
    assert [row.texts for row in rows_of(TextReader(path, num_texts=1))] == expected
    pairs = made(tmp_path, "pairs.txt", b"a\tb\n\nc\td\n")
    assert read_texts([pairs]) == read_texts([pairs], TaskOptions(), 2) == [("a", "b"), ("c", "d")]
    assert read_texts([pairs], TaskOptions(), 1) == [("a\tb",), ("c\td",)]
    with pytest.raises(
        WrongArguments, match="t.txt:1: expected two texts with a tab between, found 1 texts; write one"
    ):
        read_texts([path], TaskOptions(), 2)
    with pytest.raises(WrongArguments, match="t.txt:1: expected rows of 2 texts, as before, found 1; give one kind"):
        read_texts([pairs, path])
    with pytest.raises(WrongArguments, match="t.log:1: expected a table with columns .*, found lines of text; give"):
        read_texts([made(tmp_path, "t.log", b"text,n\na,1\n")], TaskOptions(text_column="text"))


def test_run_embed_and_batch_read_the_same_texts_and_name_columns_alike(capsys, tmp_path, runtime):
    texts = [*(f"the {word} film" for word in WORDS[:4]), "a\tgood film", '{"text": "a bad film"}']
    table = written(rows=[(n, text) for n, text in enumerate(texts)], header=("id", "review"))
    paths = made(tmp_path, "t.txt", "\n".join(texts).encode()), made(tmp_path, "t.csv.gz", table)
    expected = [one.to_dict()["label"] for one in runtime.run(texts, batch_size=1)]
    for path, columns in zip(paths, ((), ("--text-column", "review"))):
        out = tmp_path / f"{path.name}.jsonl"
        assert answer(capsys, "run", runtime.folder, path, "--out", out, *columns)["failed"] == 0
        assert [json.loads(line)["label"] for line in out.read_text().splitlines()] == expected
        job = ("--in", path, "--out", tmp_path / f"{path.name}-out", "--no-projection", "--processes", 1)
        answer(capsys, "batch", runtime.folder, *job, *columns)
        part = tmp_path / f"{path.name}-out" / f"{path.name}.part-00000.jsonl"
        assert [json.loads(line)["label"] for line in part.read_text().splitlines()] == expected
    advised = refused(capsys, "run", runtime.folder, paths[1], status=2)
    assert advised.endswith("found columns ['id', 'review']; name it with --text-column or rename it")


def test_embed_and_estimate_read_tables_and_keep_the_order_of_lines(capsys, tmp_path, embedding_run, checkpoint_folder):
    rows = [(n, f"the {word} {thing}") for n, (word, thing) in enumerate((a, b) for a in WORDS[:9] for b in WORDS[:10])]
    path = made(tmp_path, "t.tsv", written("\t", rows=rows, header=("id", "review")))
    answer(capsys, "embed", embedding_run.folder, path, "--out", tmp_path / "a.npy", "--text-column", "review")
    np.testing.assert_allclose(np.load(tmp_path / "a.npy"), embedding_run.embed([text for _, text in rows]), atol=1e-5)
    assert answer(capsys, "estimate", checkpoint_folder, "--text", path, "--text-column", "review")["rows"] == 90
    for name in ("--label-column", "--split-file"):
        line = refused(capsys, "estimate", checkpoint_folder, "--text", path, name, "1", status=2)
        assert f"{name} describes the files of --task: give --task too" in line
