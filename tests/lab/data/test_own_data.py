"""A user's own files: which columns are read, a single file, numbers as labels, copies of train, and runs that know
their task again.
"""

import csv
import io
import json
import os
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from conftest import answer, refused

import mini_ee
from mini_ee.experiments import trainings
from mini_ee.experiments.page_data import PageData
from mini_ee.experiments.recipe import Case
from mini_ee.experiments.result_page import runs_table
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.columns import TaskOptions
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import Task, load_task
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.training import doubts
from mini_ee.lab.training.run_folder import load_run

SHARED = os.environ.get("MINI_EE_SHARED")
ROWS = [
    ('Das Frühstück im "Hotel Müller", prima', "gut", "4.5"),
    ("Süß; aber öde", "schlecht", "2"),
    ("Größe: 1,80 m", "gut", "5"),
    ("It's \u00fcbel", "schlecht", "1"),
]


def sheet(header, rows, delimiter=",", line_end="\n", start=""):
    """What a spreadsheet writes, in bytes."""
    file = io.StringIO()
    writer = csv.writer(file, delimiter=delimiter, lineterminator=line_end)
    writer.writerows([header, *rows])
    return (start + file.getvalue()).encode()


def lines(*rows, between="\n"):
    return between.join(json.dumps(row, ensure_ascii=False) for row in rows).encode()


def made(tmp_path, name, **files):
    """A task folder; the keyword train_csv is the file train.csv."""
    folder = tmp_path / name
    folder.mkdir(parents=True, exist_ok=True)
    for file, content in files.items():
        (folder / ".".join(file.rsplit("_", 1))).write_bytes(content)
    return folder


def seen(task, split="train"):
    return task.split(split).texts, [task.label_names[label] for label in task.split(split).labels]


# ---- Files ----

KEYED = [dict(zip(("text", "label"), row)) for row in ROWS]
FILES = {
    "commas": ("train.csv", sheet(("text", "label", "note"), ROWS)),
    "semicolons": ("train.csv", sheet(("text", "label", "note"), ROWS, ";")),
    "tabs in .csv": ("train.csv", sheet(("text", "label", "note"), ROWS, "\t")),
    "a byte-order mark and CRLF": ("train.csv", sheet(("text", "label", "note"), ROWS, ";", "\r\n", "\ufeff")),
    "column names in capitals": ("train.csv", sheet(("TEXT", "Label", "NOTE"), ROWS)),
    "blanks around column names": ("train.csv", sheet((" text", "label ", "note"), ROWS, ";")),
    "file name in capitals": ("Train.CSV", sheet(("text", "label", "note"), ROWS, ";")),
    "tabs": ("train.tsv", "\n".join(["Sentence\tLABEL", *(f"{text}\t{label}" for text, label, _ in ROWS)]).encode()),
    "blank lines in JSON": ("train.jsonl", b"\n" + lines(*KEYED, between="\n \n\r\n") + b"\n\n"),
}


@pytest.mark.parametrize("case", FILES)
def test_the_same_rows_are_read_whatever_separates_them(case, tmp_path):
    name, content = FILES[case]
    (tmp_path / name).write_bytes(content)
    assert seen(load_task(tmp_path)) == (tuple((text,) for text, _, _ in ROWS), [label for _, label, _ in ROWS])


def test_a_table_with_other_separators_than_its_name_implies_is_an_error(tmp_path):
    for content in (b"text,label\na,x\n", b"text;label\na;x\n"):
        with pytest.raises(ValueError, match=r"train.tsv:1: expected column names with tabs .*; rename .* train.csv"):
            load_task(made(tmp_path, "mine", train_tsv=content))


def test_columns_are_those_that_options_name(tmp_path):
    rows = [("1", "a question", "yes", "an answer", "bad"), ("2", "more", "no", "less", "good")]
    folder = made(tmp_path, "mine", train_csv=sheet(("label", "Frage", "text", "Antwort", "Urteil"), rows, ";"))
    named = {"text_column": "frage", "text_pair_column": "Antwort", "label_column": "URTEIL"}
    assert seen(load_task(folder, TaskOptions(**named))) == (
        (("a question", "an answer"), ("more", "less")),
        ["bad", "good"],
    )
    assert seen(load_task(folder, TaskOptions(text_column="Frage"))) == ((("a question",), ("more",)), ["1", "2"])
    pair = load_task(folder, TaskOptions(text_pair_column="Frage", label_column="Urteil"))
    assert seen(pair)[0] == (("yes", "a question"), ("no", "more"))


def test_a_column_spelled_exactly_goes_before_one_in_other_case(tmp_path):
    content = sheet(("Text", "text", "LABEL", "label"), [("a", "b", "c", "d"), ("e", "f", "g", "h")])
    folder = made(tmp_path, "mine", train_csv=content)
    assert seen(load_task(folder)) == ((("b",), ("f",)), ["d", "h"])
    assert seen(load_task(folder, TaskOptions(text_column="Text"))) == ((("a",), ("e",)), ["d", "h"])
    with pytest.raises(ValueError, match="expected one column TEXT, found 2; rename"):
        load_task(folder, TaskOptions(text_column="TEXT"))


PLAIN = sheet(("Kommentar", "Note"), [("a", "1"), ("b", "2")], ";")
REFUSED = {
    "no such text": ({"text_column": "Satz"}, "train.csv:1: expected the column Satz (--text-column), found columns"),
    "no such pair": (
        {"text_column": "Kommentar", "text_pair_column": "Satz"},
        "expected the column Satz (--text-pair-column), found columns ['Kommentar', 'Note']; name one of these",
    ),
    "no such label": (
        {"text_column": "Kommentar", "label_column": "x"},
        "expected the column x (--label-column), found columns ['Kommentar', 'Note']",
    ),
    "unknown text": ({}, "found columns ['Kommentar', 'Note']; name it with --text-column or rename it"),
    "unknown label": (
        {"text_column": "Kommentar"},
        "found columns ['Kommentar', 'Note']; name it with --label-column or rename it",
    ),
    "label is the text": (
        {"text_column": "Kommentar", "label_column": "kommentar"},
        "expected a label and a text, found both in Kommentar; name two columns",
    ),
    "words as numbers": (
        {"text_column": "Note", "label_column": "Kommentar", "regression": True},
        "train.csv:2: expected a finite number as label, found 'a'; correct it",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_columns_that_are_not_there_are_one_line(case, tmp_path):
    options, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_task(made(tmp_path, "mine", train_csv=PLAIN), TaskOptions(**options))
    assert len(str(error.value).splitlines()) == 1


def test_options_that_name_one_column_twice_are_refused():
    with pytest.raises(ValueError, match="--text-column and --label-column: expected two columns, found 'a' for both"):
        TaskOptions(text_column="a", label_column="a")
    with pytest.raises(ValueError, match="--text-column: expected the name of a column, found ' '"):
        TaskOptions(text_column=" ")


# ---- Numbers ----


@pytest.mark.parametrize("name", ["mine", "SST-2", "v1.2"])
def test_numbers_are_a_regression_of_one_text_whatever_the_folder_is_called(name, tmp_path):
    folder = made(tmp_path, name, train_csv=sheet(("text", "label", "Note"), ROWS, ";"))
    task = load_task(folder, TaskOptions(label_column="note", regression=True))
    assert task.regression and task.num_labels == 1 and task.name == name and task.metrics == ("pearson", "spearman")
    assert task.split("train").labels.tolist() == [4.5, 2, 5, 1] and task.split("train").labels.dtype == np.float32


def test_numbers_are_classes_without_the_regression_option(tmp_path):
    """Also those that are known as STS-B's by their columns, where the user names a column."""
    pairs = sheet(("sentence1", "sentence2", "score"), [("a", "b", "1"), ("c", "d", "5")])
    folder = made(tmp_path, "mine", train_csv=pairs)
    assert load_task(folder).name == "STS-B" and load_task(folder).regression
    assert load_task(folder, TaskOptions(label_column="score")).label_names == ("1", "5")


def test_a_decimal_comma_is_an_error(tmp_path):
    folder = made(tmp_path, "mine", train_csv=sheet(("text", "label"), [("a", "1,5")], ";"))
    with pytest.raises(ValueError, match="train.csv:2: .* found '1,5'; write numbers with a decimal point"):
        load_task(folder, TaskOptions(regression=True))


# ---- A single file ----


def test_a_single_file_is_split_by_its_seed_and_no_text_is_on_both_sides(tmp_path):
    rows = [(f"text {i % 50}" if i < 90 else f"TEXT  {i % 50}", "ab"[i % 3 == 0]) for i in range(200)]
    file = made(tmp_path, "mine", all_csv=sheet(("text", "label"), rows)) / "all.csv"
    drawn = {}
    for path, seed in ((file, 0), (file.parent, 0), (file, 1)):
        task = load_task(path, TaskOptions(split_file=seed))
        train, dev = ([*zip(*seen(task, name))] for name in ("train", "dev"))
        assert sorted(train + dev) == sorted(((text,), label) for text, label in rows)
        train_words, dev_words = ({text.lower().split()[1] for (text,), _ in part} for part in (train, dev))
        assert len(dev_words) == 10 and not train_words & dev_words
        drawn[path, seed] = dev_words
    assert drawn[file, 0] == drawn[file.parent, 0] != drawn[file, 1]
    assert load_task(file, TaskOptions(split_file=0)).name == "all"


def test_a_single_file_that_is_not_split_is_an_error_with_advice(tmp_path):
    folder = made(tmp_path, "mine", kunden_csv=PLAIN)
    with pytest.raises(FileNotFoundError, match="kunden.csv: expected a task folder, found a file; .*--split-file 0"):
        load_task(folder / "kunden.csv")
    with pytest.raises(ValueError, match=r"found \['kunden.csv'\]; add --split-file 0 to split the file"):
        load_task(folder)
    made(tmp_path, "mine", train_csv=PLAIN)
    with pytest.raises(WrongArguments, match=r"expected one table \(.tsv, .*\), found kunden.csv, train"):
        load_task(folder, TaskOptions(split_file=0))
    (tmp_path / "book.xlsx").write_bytes(b"PK")
    with pytest.raises(WrongArguments, match=r"expected one table \(.tsv, .*\), found book.xlsx"):
        load_task(tmp_path / "book.xlsx", TaskOptions(split_file=0))
    same = made(tmp_path, "same", train_csv=sheet(("text", "label"), [("a", "1"), ("A ", "2")]))
    with pytest.raises(ValueError, match="expected at least two different texts, found 1"):
        load_task(same, TaskOptions(split_file=0))


# ---- Copies of train ----


def copied(tmp_path, name="copied"):
    """A task of which 2 of 4 test rows stand in train, one in other case and blanks; of the dev row none does."""
    header, pairs = ("sentence1", "sentence2", "label"), [("a b", "c", "x"), ("d", "e", "y"), ("f", "g", "x")]
    test = [("a b", "c", "x"), ("D ", "E", "x"), ("a b", "e", "x"), ("c", "a b", "y")]
    dev = [("c a", "b", "x")]
    return made(
        tmp_path, name, train_csv=sheet(header, pairs), test_csv=sheet(header, test), dev_csv=sheet(header, dev)
    )


def test_rows_of_train_are_found_word_for_word_and_dropped_from_the_other_splits(tmp_path):
    task = load_task(copied(tmp_path))
    assert task.seen_in_train(task.split("test")).tolist() == [True, True, False, False]
    without, counts = task.without_seen_rows()
    assert counts == {"dev": 0, "test": 2} and without.split("test").texts == (("a b", "e"), ("c", "a b"))
    assert without.split("test").labels.tolist() == [0, 1]
    assert without.split("train").sha256() == task.split("train").sha256() and without.split("dev") is task.split("dev")
    everything = Task("all", ("x", "y"), ("accuracy",), {"train": task.split("train"), "test": task.split("train")})
    with pytest.raises(ValueError, match="expected rows in test that train does not have, found none"):
        everything.without_seen_rows()


@pytest.mark.skipif(SHARED is None, reason="MINI_EE_SHARED names no folder with the real data")
@pytest.mark.parametrize("name, split, count", [("MPQA", "test", 561), ("TREC", "test", 11), ("MR", "test", 0)])
def test_real_tasks_have_as_many_copies_as_the_review_counted(name, split, count):
    task = load_task(Path(SHARED, "data", name))
    assert task.seen_in_train(task.split(split)).sum() == count


def test_an_experiment_drops_test_rows_that_train_has_and_keeps_how_many(tmp_path, monkeypatch):
    (copied(tmp_path / "data", "twice") / "dev.csv").unlink()
    measured, lines = [], []

    def measure(run, task, reference):
        measured.append([" ".join(row) for row in task.split("test").texts])
        return {"full": 0.5}, {}

    monkeypatch.setattr(trainings, "train", lambda *_, out, **__: out.mkdir(parents=True) or SimpleNamespace(config={}))
    monkeypatch.setitem(trainings.MEASUREMENTS, "rows", measure)
    sources, first = trainings.Sources(tmp_path, tmp_path), Case("a", "rows", {"method": "joint", "task": "twice"})
    second = Case("b", "rows", {"method": "joint", "task": "twice"}, reference="a")
    for case in (first, second):
        trainings.run_case(tmp_path, case, 0, sources, lines.append)
        assert read_json(trainings.file_of(tmp_path, case.name))["seeds"]["0"]["test_rows_dropped"] == 2
    assert measured == [["a b e", "c a b"]] * 2
    assert lines.count("  2 test examples are dropped: training examples have the same texts") == 2
    data = PageData({"a": first}, {"a": read_json(trainings.file_of(tmp_path, "a"))})
    (row,) = csv.DictReader(runs_table(data).splitlines())
    assert row["dropped"] == "2"


def test_a_case_is_not_compared_with_one_of_other_test_rows(tmp_path, monkeypatch):
    (copied(tmp_path / "data", "twice") / "dev.csv").unlink()
    made_with = dict.fromkeys(trainings.MADE_WITH, "?")
    made = {"figures": {"full": 0.5}, "lists": {}, "how": made_with, "data": {}, "core_seconds": 1.0}
    old = {"case": "a", "seeds": {"0": made | {"test_rows_dropped": 0}}}
    write_json(trainings.file_of(tmp_path, "a"), old)
    case = Case("b", "rows", {"method": "joint", "task": "twice"}, reference="a")
    monkeypatch.setattr(trainings, "train", None)  # nothing is trained before
    with pytest.raises(
        ValueError, match="a.json: expected figures without the 2 test examples .*, found 0 dropped; remove"
    ):
        trainings.run_case(tmp_path, case, 0, trainings.Sources(tmp_path, tmp_path), lambda text: None)


# ---- What makes figures doubtful ----


def test_doubts_about_data_are_printed_before_training(tmp_path):
    (line,) = doubts.of_data(load_task(copied(tmp_path)))
    assert line.startswith("2 of 4 examples of copied test are in train word for word:")
    many = sheet(("text", "label"), [(f"text {i}", f"{i / 2}") for i in range(30)])
    folder = made(tmp_path, "many", all_csv=many)
    split, numbers = doubts.of_data(load_task(folder / "all.csv", TaskOptions(split_file=3)))
    assert split == "all.csv was split with seed 3: 24 in train and 6 in dev."
    assert numbers == "The labels are 30 different numbers and are read as classes; see --regression."
    assert doubts.of_data(load_task(folder, TaskOptions(split_file=3, regression=True)))[1:] == []
    few = made(tmp_path, "few", train_csv=sheet(("text", "label"), [(f"text {i}", str(1 + i % 5)) for i in range(30)]))
    assert doubts.of_data(load_task(few)) == []


VARIED = np.arange(300) % 2
RESULTS = {  # labels of train and of the held-out set, predictions of these -> what is said
    "nothing": (VARIED, VARIED[:100], VARIED[:100], []),
    "few": (
        VARIED[:4],
        VARIED[:1],
        VARIED[:1],
        ["about 100 points, after a training on 4 examples", "predicts no for every"],
    ),
    "few held out": (VARIED, VARIED[:25], VARIED[:25], ["25 held-out examples show accuracy to about 20 points"]),
    "one label": (
        (np.arange(300) % 20 == 0).astype(int),
        np.arange(100) % 4 // 3,
        VARIED[:100],
        ["95.0% of the train examples have the label no: a model that always predicts it has an accuracy of 75.0% on"],
    ),
    "one prediction": (VARIED, VARIED[:100], VARIED[1:2].repeat(100), ["predicts yes for every held-out example"]),
}


@pytest.mark.parametrize("case", RESULTS)
def test_doubts_about_a_result_are_printed_after_it(case):
    train, held, predictions, expected = RESULTS[case]
    task = Task("mine", ("no", "yes"), ("accuracy",), {})
    doubted = doubts.of_result(task, train, held, predictions)
    assert len(doubted) == len(expected) and all(part in line for part, line in zip(expected, doubted))


def test_a_regression_has_no_majority_and_no_single_answer():
    task, rows = Task("mine", (), ("pearson",), {}), np.ones(200, np.float32)
    assert doubts.of_result(task, rows, rows, rows) == []


# ---- Commands ----

FAST = ("--exits", "1,3", "--epochs", "1", "--batch-size", "8")


@pytest.fixture(scope="module")
def kunden(tmp_path_factory, task_folder):
    """One file with semicolons, its columns in German; what its columns hold is decided by one word."""
    files = [(task_folder / f"{split}.jsonl").read_text() for split in ("train", "dev")]
    rows = [json.loads(line) for line in "".join(files).splitlines()]
    rows = [(row["sentence"], row["label"], str(3.5 + (row["label"] == "good"))) for row in rows]
    file = tmp_path_factory.mktemp("own") / "kunden.csv"
    file.write_bytes(sheet(("Kommentar", "Bewertung", "Note"), rows, ";", "\r\n", "\ufeff"))
    return file


COLUMNS = ("--text-column", "kommentar", "--label-column", "Bewertung")


@pytest.fixture(scope="module")
def own_run(kunden, checkpoint_folder):
    out = kunden.parent / "run"
    given = ("--model", checkpoint_folder, "--task", kunden, "--split-file", 0, *COLUMNS, *FAST, "--out", out)
    assert main([*map(str, ("train", "joint", *given))]) == 0
    return out


@pytest.mark.parametrize(
    "command", [("train", "joint"), ("evaluate",), ("calibrate",), ("compare",), ("estimate",), ("export",), ("demo",)]
)
def test_every_command_that_opens_a_task_has_the_options_of_tasks(command, capsys):
    with pytest.raises(SystemExit):
        main([*command, "--help-all"])
    assert {"--text-column", "--text-pair-column", "--label-column", "--regression", "--split-file"} <= set(
        capsys.readouterr().out.split()
    )


def test_commands_without_a_task_read_what_training_read(capsys, own_run, kunden, tmp_path):
    """As training read it: the file, its split and its columns; and so where the file alone is named."""
    run = shutil.copytree(own_run, tmp_path / "run")
    dev = len(
        load_task(kunden, TaskOptions(split_file=0, text_column="Kommentar", label_column="Bewertung")).split("dev")
    )
    evaluated = answer(capsys, "evaluate", run)
    assert (evaluated["task"], evaluated["split"], sum(evaluated["exit_counts"])) == ("kunden", "dev", dev)
    named = answer(capsys, "evaluate", run, "--task", kunden)
    assert named["per_exit_accuracy"] == evaluated["per_exit_accuracy"]
    assert answer(capsys, "compare", run, own_run)["task"] == "kunden"
    assert answer(capsys, "calibrate", run, "--epsilon", 0.5)["split"] == "hold-out"
    answer(capsys, "export", run, "--task", kunden, "--out", tmp_path / "exported")
    exported = answer(capsys, "evaluate", tmp_path / "exported")
    assert exported["per_exit_accuracy"] == evaluated["per_exit_accuracy"]


def test_a_task_that_moved_or_changed_has_to_be_named(capsys, own_run, kunden, tmp_path, checkpoint_folder):
    file, run = shutil.copy(kunden, tmp_path / "mine.csv"), tmp_path / "run"
    given = ("--task", file, "--split-file", 1, *COLUMNS, *FAST)
    answer(capsys, "train", "joint", "--model", checkpoint_folder, *given, "--out", run)
    assert "the runs were trained on different tasks: give" in refused(capsys, "compare", run, own_run, status=2)
    content = file.read_bytes()
    for command in (("evaluate",), ("compare",), ("calibrate", "--epsilon", ".5")):
        file.write_bytes(content + b"the new film was good;good;4\r\n")
        assert "has other train examples now: give that task's folder" in refused(capsys, *command, run, status=2)
        file.unlink()
        assert "mine.csv, which does not exist now: give that" in refused(capsys, *command, run, status=2)
    file.write_bytes(content)
    config = read_json(run / "config.json")
    for task, message in (
        ({"folder": None}, "the run was trained on mine: give that task's folder with --task"),
        ({"options": {"colour": 1}}, "the run has unknown options of its task"),
    ):
        write_json(run / "config.json", config | {"task": config["task"] | task})
        assert main(["evaluate", str(run)]) and message in capsys.readouterr().err


def test_options_of_a_task_need_a_task(capsys, own_run, checkpoint_folder, decoder_checkpoint, tmp_path):
    out = ("--out", tmp_path / "out")
    for command in (("evaluate", own_run), ("compare", own_run), ("export", own_run, *out), ("estimate",)):
        line = refused(capsys, *command, "--split-file", 0, status=2)
        assert "--split-file describes the files of --task: give --task too" in line
    line = refused(capsys, "train", "joint", *out, "--label-column", "x", status=2)
    assert "--label-column is for files of your own: name them with --task" in line
    line = refused(capsys, "evaluate", decoder_checkpoint, "--sweep", "--task", "x", "--text-column", "x", status=2)
    assert "unrecognized arguments for a decoder: --text-column x" in line
    assert not (tmp_path / "out").exists()


def test_from_python_the_options_are_the_same(kunden, checkpoint_folder, tmp_path):
    lines = []
    options = {"text_column": "Kommentar", "label_column": "note", "regression": True, "split_file": 0}
    made = {"exits": (1, 3), "epochs": 1, "batch_size": 8}
    mini_ee.train("joint", checkpoint_folder, kunden, tmp_path / "run", say=lines.append, **options, **made)
    run = load_run(tmp_path / "run")
    assert run.label_names == [] and run.config["task"]["folder"] == str(kunden)
    assert run.config["task"]["options"] == options
    assert lines[0].startswith("kunden.csv was split with seed 0:")
    with pytest.raises(WrongArguments, match="split_file .* must be a whole number of at least 0, got -1|least 0"):
        mini_ee.train("joint", checkpoint_folder, kunden, tmp_path / "other", split_file=-1)


def test_training_and_evaluation_warn_of_copies_and_of_too_few_examples(capsys, tmp_path, checkpoint_folder):
    header, rows = ("text", "label"), [(f"the film was good {'very ' * i}", "good") for i in range(4)]
    rows += [("the film was bad", "bad")]
    folder = made(
        tmp_path, "five", train_csv=sheet(header, rows), test_csv=sheet(header, rows[:1] + [("a film", "bad")])
    )
    given = ("--model", checkpoint_folder, "--task", folder, *FAST, "--out", tmp_path / "run")
    assert main([*map(str, ("train", "joint", *given))]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0].startswith("1 of 2 examples of five test are in train word for word")
    assert printed[-1] == f"Run: {tmp_path / 'run'}"
    uncertain = r"These figures are uncertain: 1 held-out examples .* 100 points, after a training on 4 examples\."
    assert any(re.fullmatch(uncertain, line) for line in printed[:-1])
    assert any(re.match("The model predicts (good|bad) for every held-out example", line) for line in printed[:-1])
    assert answer(capsys, "evaluate", tmp_path / "run")["copies"].startswith("1 of 2 examples of five test")
    assert main(["evaluate", str(tmp_path / "run")]) == 0
    assert "1 of 2 examples of five test are in train word for word" in capsys.readouterr().out
