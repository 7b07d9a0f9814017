"""Tasks and tokens: GLUE's layouts, plain files, every error of one line, tokenizers, and batches."""

import json
import os
import re
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors

from mini_ee.lab.data.tasks import Split, Task, holdout, load_task, subset, toy_task
from mini_ee.lab.data.tokenizer import Tokenizer, batches

SHARED = os.environ.get("MINI_EE_SHARED")
needs_shared = pytest.mark.skipif(SHARED is None, reason="MINI_EE_SHARED names no folder with the real data")


def folder(tmp_path: Path, name: str, **files: str | bytes) -> Path:
    """A task folder; the keyword train_tsv is the file train.tsv."""
    path = tmp_path / name
    path.mkdir(exist_ok=True)
    for file, content in files.items():
        stem, _, suffix = file.rpartition("_")
        (path / f"{stem}.{suffix}").write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def table(*rows: str) -> str:
    return "".join(row.replace("|", "\t") + "\n" for row in rows)


PLAIN = table("sentence|label", "a good film|pos", "a bad film|neg")


# The nine GLUE tasks, a few rows each, as their zip files lay them out


class Layout(NamedTuple):
    files: dict[str, str]
    first: tuple[str, ...]  # the texts of train's first row
    labels: list[float]  # of train
    label_names: tuple[str, ...]
    metrics: tuple[str, ...]


STSB = "index|genre|filename|year|old_index|source1|source2|sentence1|sentence2"
MNLI = (
    "index|promptID|pairID|genre|sentence1_binary_parse|sentence2_binary_parse|sentence1_parse"
    "|sentence2_parse|sentence1|sentence2"
)
GLUE = {
    "SST-2": Layout(
        {
            "train_tsv": table("sentence|label", "fine |1", "dull |0"),
            "dev_tsv": table("sentence|label", "ok|1"),
            "test_tsv": table("index|sentence", "0|so so"),
        },
        ("fine ",),
        [1, 0],
        ("negative", "positive"),
        ("accuracy",),
    ),
    "CoLA": Layout(
        {
            "train_tsv": table("gj04|1||They drank.", "gj04|0|*|They drank the pub."),
            "dev_tsv": table("gj04|1||We yelled."),
            "test_tsv": table("index|sentence", "0|Bill sang."),
        },
        ("They drank.",),
        [1, 0],
        ("unacceptable", "acceptable"),
        ("matthews",),
    ),
    "MRPC": Layout(
        {
            "train_tsv": "\ufeff"
            + table("Quality|#1 ID|#2 ID|#1 String|#2 String", '1|7|8|He said "yes.|Yes.', "0|9|9|One .|Two ."),
            "test_tsv": table("index|#1 ID|#2 ID|#1 String|#2 String", "0|1|2|A|B"),
        },
        ('He said "yes.', "Yes."),
        [1, 0],
        ("not_equivalent", "equivalent"),
        ("accuracy", "f1"),
    ),
    "QQP": Layout(
        {
            "train_tsv": table(
                "id|qid1|qid2|question1|question2|is_duplicate", "1|2|3|Why?|How so?|1", "4|5|6|What?|Who?|0"
            ),
            "test_tsv": table("id|question1|question2", "0|When?|Then?"),
        },
        ("Why?", "How so?"),
        [1, 0],
        ("not_duplicate", "duplicate"),
        ("accuracy", "f1"),
    ),
    "STS-B": Layout(
        {
            "train_tsv": table(f"{STSB}|score", "0|g|f|y|1|s|s|A man.|A woman.|3.800", "1|g|f|y|1|s|s|A.|B.|0.500"),
            "test_tsv": table(STSB, "0|g|f|y|1|s|s|A.|B."),
        },
        ("A man.", "A woman."),
        [3.8, 0.5],
        (),
        ("pearson", "spearman"),
    ),
    "MNLI": Layout(
        {
            "train_tsv": table(
                f"{MNLI}|label1|gold_label",
                "0|1|1|g|(|(|(|(|It rains.|It is dry.|neutral|contradiction",
                "1|1|1|g|(|(|(|(|He ran.|He moved.|entailment|entailment",
            ),
            "dev_matched_tsv": table(f"{MNLI}|label1|label2|gold_label", "0|1|1|g|(|(|(|(|So.|No.|neutral||neutral"),
            "dev_mismatched_tsv": table(f"{MNLI}|label1|label2|gold_label", "0|1|1|g|(|(|(|(|Up.|Down.|||neutral"),
            "test_matched_tsv": table(MNLI, "0|1|1|g|(|(|(|(|X.|Y."),
        },
        ("It rains.", "It is dry."),
        [2, 0],
        ("entailment", "neutral", "contradiction"),
        ("accuracy",),
    ),
    "QNLI": Layout(
        {
            "train_tsv": table(
                "index|question|sentence|label", "0|Who?|She.|entailment", "1|When?|Here.|not_entailment"
            ),
            "test_tsv": table("index|question|sentence", "0|Who?|Now."),
        },
        ("Who?", "She."),
        [0, 1],
        ("entailment", "not_entailment"),
        ("accuracy",),
    ),
    "RTE": Layout(
        {
            "train_tsv": table("index|sentence1|sentence2|label", "0|No.|Yes.|not_entailment", "1|A.|A.|entailment"),
            "test_tsv": table("index|sentence1|sentence2", "0|A.|B."),
        },
        ("No.", "Yes."),
        [1, 0],
        ("entailment", "not_entailment"),
        ("accuracy",),
    ),
    "WNLI": Layout(
        {
            "train_tsv": table("index|sentence1|sentence2|label", "0|I put it up.|It was put.|1", "1|It fell.|I.|0"),
            "test_tsv": table("index|sentence1|sentence2", "0|A.|B."),
        },
        ("I put it up.", "It was put."),
        [1, 0],
        ("not_entailment", "entailment"),
        ("accuracy",),
    ),
}
KNOWN_BY_COLUMNS = ("CoLA", "MRPC", "QQP", "STS-B", "MNLI")


@pytest.mark.parametrize("name", GLUE)
def test_glue_files_are_read_as_they_are_distributed(name, tmp_path):
    layout = GLUE[name]
    task = load_task(folder(tmp_path, name, **layout.files))
    train = task.split("train")
    assert (task.name, task.label_names, task.metrics) == (name, layout.label_names, layout.metrics)
    assert train.texts[0] == layout.first
    assert train.labels.dtype == (np.float32 if name == "STS-B" else np.int64)
    np.testing.assert_allclose(train.labels, layout.labels, rtol=1e-6)
    assert (task.num_labels, task.regression) == (max(1, len(layout.label_names)), name == "STS-B")
    assert task.split("test").labels is None


@pytest.mark.parametrize("name", GLUE)
@pytest.mark.parametrize("dash", ["-", "_", ""])
def test_a_glue_folder_is_known_however_its_name_is_spelled(name, dash, tmp_path):
    task = load_task(folder(tmp_path, name.lower().replace("-", dash), **GLUE[name].files))
    assert (task.name, task.label_names) == (name, GLUE[name].label_names)


@pytest.mark.parametrize("name", KNOWN_BY_COLUMNS)
def test_a_glue_folder_of_any_name_is_known_by_its_columns(name, tmp_path):
    task = load_task(folder(tmp_path, "somewhere", **GLUE[name].files))
    assert (task.name, task.label_names, task.metrics) == (name, GLUE[name].label_names, GLUE[name].metrics)


def test_a_score_next_to_a_label_does_not_make_a_regression(tmp_path):
    rows = table("sentence1|sentence2|label|score", "a|b|yes|0.9", "c|d|no|0.8")
    assert load_task(folder(tmp_path, "mine", train_tsv=rows)).label_names == ("no", "yes")


def test_mnli_has_a_matched_and_a_mismatched_dev_split(tmp_path):
    task = load_task(folder(tmp_path, "mnli", **GLUE["MNLI"].files))
    assert list(task.splits) == ["train", "dev", "dev_mismatched", "test"]
    assert task.split("dev").texts == (("So.", "No."),)
    assert task.split("dev_mismatched").texts == (("Up.", "Down."),)


def test_glue_labels_may_be_numbers_in_hugging_face_order(tmp_path):
    rows = [{"premise": "A.", "hypothesis": "B.", "label": label} for label in (2, 0, "neutral")]
    task = load_task(folder(tmp_path, "MNLI", train_jsonl="\n".join(map(json.dumps, rows))))
    assert task.split("train").labels.tolist() == [2, 0, 1]


def test_microsofts_own_mrpc_files_are_read_if_glues_are_missing(tmp_path):
    rows = GLUE["MRPC"].files["train_tsv"]
    path = folder(tmp_path, "MRPC", msr_paraphrase_train_txt=rows, msr_paraphrase_test_txt=rows)
    assert {name: len(split) for name, split in load_task(path).splits.items()} == {"train": 2, "test": 2}
    folder(tmp_path, "MRPC", train_tsv=rows + rows.split("\n")[1] + "\n")
    assert len(load_task(path).split("train")) == 3


def test_qqp_alone_skips_rows_that_were_cut(tmp_path):
    whole, cut = GLUE["QQP"].files["train_tsv"], table("4|5|6|What is this", "7|8|9|What?||0")
    assert len(load_task(folder(tmp_path, "QQP", train_tsv=whole + cut)).split("train")) == 2
    rte = GLUE["RTE"].files["train_tsv"] + table("3|4|5")
    with pytest.raises(ValueError, match=r"train\.tsv:4: expected 4 columns, found 3"):
        load_task(folder(tmp_path, "RTE", train_tsv=rte))


# Plain tasks


@pytest.mark.parametrize(
    "columns", ["sentence1|sentence2", "premise|hypothesis", "question|sentence", "question1|question2", "text|text_b"]
)
def test_a_plain_task_finds_its_pair_of_texts_by_name(columns, tmp_path):
    rows = table(f"label|id|{columns}", "b|1|A a|B b", "a|2|C|D")
    task = load_task(folder(tmp_path, "mine", train_tsv=rows))
    assert task.split("train").texts == (("A a", "B b"), ("C", "D"))
    assert (task.name, task.label_names, task.split("train").labels.tolist()) == ("mine", ("a", "b"), [1, 0])


@pytest.mark.parametrize("stem", ["dev", "validation", "valid", "val"])
def test_a_dev_file_has_four_names(stem, tmp_path):
    task = load_task(folder(tmp_path, "mine", train_tsv=PLAIN, test_tsv=PLAIN, **{f"{stem}_tsv": PLAIN}))
    assert list(task.splits) == ["train", "dev", "test"]
    assert task.default_split == "dev"


def test_without_dev_the_default_split_is_test(tmp_path):
    assert load_task(folder(tmp_path, "mine", train_tsv=PLAIN, test_tsv=PLAIN)).default_split == "test"


def test_tsv_csv_and_jsonl_of_the_same_rows_are_the_same_task(tmp_path):
    texts = ['say "a, b"', 'a " mark', "next\x85line\u2028end", "caf\u00e9 \U0001f600 "]
    labels = [9, 10, 9, 9]
    rows = list(zip(texts, labels, strict=True))
    formats = {
        "train_tsv": ["text\tlabel", *(f"{text}\t{label}" for text, label in rows)],
        "train_csv": ["text,label", *('"' + text.replace('"', '""') + f'",{label}' for text, label in rows)],
        "train_jsonl": [json.dumps({"text": text, "label": label}, ensure_ascii=False) for text, label in rows],
    }
    for file, lines in formats.items():
        content = "\n".join(lines)
        for variant in (content, content + "\n", content + "\n\n", "\ufeff" + content, "\r\n".join(lines)):
            task = load_task(folder(tmp_path, f"plain-{file}", **{file: variant}))
            assert [text for (text,) in task.split("train").texts] == texts
            assert task.label_names == ("9", "10")  # by number: "10" < "9" as words
            assert task.split("train").labels.tolist() == [0, 1, 0, 0]


def test_a_csv_text_may_hold_line_ends_and_errors_still_name_the_right_line(tmp_path):
    rows = 'text,label\n"two\nlines, one text",a\nshort,b\n'
    task = load_task(folder(tmp_path, "mine", train_csv=rows))
    assert task.split("train").texts[0] == ("two\nlines, one text",)
    with pytest.raises(ValueError, match=r"train\.csv:5: expected 2 columns, found 1; quote texts"):
        load_task(folder(tmp_path, "mine", train_csv=rows + "only\n"))


def test_a_test_file_may_lack_the_label_column(tmp_path):
    task = load_task(folder(tmp_path, "mine", train_tsv=PLAIN, test_tsv=table("sentence", "so so")))
    assert task.split("test").labels is None
    assert task.split("test").take(np.array([0])).labels is None


def test_labels_that_are_one_number_have_one_order(tmp_path):
    labels = [spelled for number in range(1, 9) for spelled in (f"0{number}", str(number))]
    (tmp_path / "train.tsv").write_text("sentence\tlabel\n" + "".join(f"text\t{label}\n" for label in labels[::-1]))
    assert list(load_task(tmp_path).label_names) == labels


def test_files_with_other_numbers_of_texts_are_not_one_task(tmp_path):
    (tmp_path / "train.tsv").write_text("sentence1\tsentence2\tlabel\na\tb\tgood\nb\ta\tbad\n")
    (tmp_path / "dev.tsv").write_text("sentence\tlabel\na\tgood\n")
    with pytest.raises(ValueError, match="dev.tsv:1: expected 2 texts, as train.tsv has, found 1; rename the columns"):
        load_task(tmp_path)


@pytest.mark.parametrize("header", ["label\tsentence\tlabel", "sentence\tsentence\tlabel"])
def test_a_column_that_is_there_twice_is_not_chosen_from(tmp_path, header):
    (tmp_path / "train.tsv").write_text(f"{header}\na\tb\tc\n")
    with pytest.raises(
        ValueError, match="train.tsv:1: expected one column (label|sentence), found 2; rename or remove"
    ):
        load_task(tmp_path)


@pytest.mark.parametrize("columns, others", [("sentence", ["sentence2"]), ("text", ["hypothesis", "question"])])
def test_a_second_text_that_goes_with_none_is_not_dropped(columns, others, tmp_path):
    rows = table("|".join([columns, *others, "label"]), "|".join(["A", *others, "x"]), "|".join(["B", *others, "y"]))
    with pytest.raises(ValueError, match=f"train.tsv:1: expected {columns} alone, or two that go together .*, found"):
        load_task(folder(tmp_path, "mine", train_tsv=rows))


def test_labels_that_differ_in_form_alone_are_one(tmp_path):
    rows = table("sentence|label", "a|1", "b| 1", "c|2 ")
    assert load_task(folder(tmp_path, "mine", train_tsv=rows)).label_names == ("1", "2")
    lines = [{"text": "a", "label": 1}, {"text": "b", "label": 1.0}, {"text": "c", "label": 0.5}]
    task = load_task(folder(tmp_path, "other", train_jsonl="\n".join(map(json.dumps, lines))))
    assert task.label_names == ("0.5", "1") and task.split("train").labels.tolist() == [1, 1, 0]
    for name, written in (("NaN", "nan"), ("Infinity", "inf")):
        with pytest.raises(ValueError, match=f"train.jsonl:1: expected a label in label, found {written}; fill it in"):
            load_task(folder(tmp_path, name, train_jsonl=f'{{"text": "a", "label": {name}}}'))
    assert (
        load_task(folder(tmp_path, "long", train_tsv=table("sentence|label", "a|1", "b|" + "9" * 5000))).num_labels == 2
    )


def test_a_score_that_float32_does_not_hold_is_no_number(tmp_path):
    (tmp_path / "STS-B").mkdir()
    (tmp_path / "STS-B" / "train.tsv").write_text("sentence1\tsentence2\tscore\na\tb\t1e39\n")
    with pytest.raises(ValueError, match="train.tsv:2: expected a finite number as label, found '1e39'; correct it"):
        load_task(tmp_path / "STS-B")


def test_labels_may_be_true_and_false(tmp_path):
    rows = [{"text": "a", "label": True}, {"text": "b", "label": False}, {"text": "c", "label": True}]
    task = load_task(folder(tmp_path, "mine", train_jsonl="\n".join(map(json.dumps, rows))))
    assert task.label_names == ("false", "true") and task.split("train").labels.tolist() == [1, 0, 1]


# Errors: one line that says where, what was expected, what was found and what to do

JSON_ROW = '{"text": "a", "label": 1}\n'
ERRORS = {
    "no file": (
        {},
        "mine: expected train, dev or test files (.tsv, .csv, .jsonl, .ndjson, .json, .parquet), found []",
    ),
    "two files": (
        {"train_tsv": PLAIN, "dev_tsv": PLAIN, "val_csv": PLAIN},
        "mine: expected one dev file, found dev.tsv and val.csv; remove one",
    ),
    "empty file": ({"train_tsv": ""}, "train.tsv:1: expected a header and rows, found an empty file; fill it in"),
    "only line ends": ({"train_tsv": "\ufeff\r\n\n"}, "train.tsv:1: expected a header and rows, found an empty file"),
    "only a header": (
        {"train_tsv": "sentence\tlabel\n"},
        "train.tsv:1: expected rows below the header, found none; add",
    ),
    "no text column": (
        {"train_tsv": table("words|label", "a|b")},
        "train.tsv:1: expected a text column (sentence, text) or two (sentence1 and sentence2, ...), "
        "found columns ['words', 'label']; name it with --text-column or rename it",
    ),
    "no label column": (
        {"train_tsv": table("sentence|class", "a|b")},
        "train.tsv:1: expected a label column (gold_label, label, is_duplicate, Quality, score), "
        "found columns ['sentence', 'class']; name it with --label-column or rename it; only test files go without",
    ),
    "dev without labels": (
        {"train_tsv": PLAIN, "dev_tsv": table("sentence", "a")},
        "dev.tsv:1: expected a label column",
    ),
    "too few columns": (
        {"train_tsv": PLAIN + "alone\n"},
        "train.tsv:4: expected 2 columns, found 1; a text holds no tab",
    ),
    "too many columns": (
        {"train_tsv": PLAIN + "a\tb\tc\n"},
        "train.tsv:4: expected 2 columns, found 3; a text holds no tab",
    ),
    "empty text": (
        {"train_tsv": PLAIN + " \u2028 \tpos\n"},
        "train.tsv:4: expected text in sentence, found an empty text; correct or drop the row",
    ),
    "empty label": (
        {"train_tsv": PLAIN + "a film\t\n"},
        "train.tsv:4: expected a label in label, found ''; fill it in",
    ),
    "label unknown": (
        {"train_tsv": PLAIN, "dev_tsv": PLAIN + "hm\tmeh\n"},
        "dev.tsv:4: expected one of the labels neg, pos, found 'meh'; correct it, or add rows with this",
    ),
    "one label of many unknown": (
        {
            "train_tsv": table("sentence|label", *(f"a|{k}" for k in range(20))),
            "dev_tsv": table("sentence|label", "a|20"),
        },
        "dev.tsv:2: expected one of the labels 0, 1, 2, 3, 4, 5, 6, 7, ..., found '20'; correct it",
    ),
    "one label": (
        {"train_tsv": table("sentence|label", "a|b")},
        "train.tsv:2: expected at least two labels in the file, found only 'b'; add rows with another label",
    ),
    "no train file": (
        {"dev_tsv": PLAIN},
        "mine: expected a train file, which defines the labels, found none; add train.tsv",
    ),
    "not UTF-8": (
        {"train_tsv": PLAIN.encode() + b"caf\xe9 society\tpos\n"},
        "train.tsv:4: expected UTF-8, found byte 0xe9; convert the file to UTF-8",
    ),
    "UTF-16": ({"train_tsv": PLAIN.encode("utf-16")}, "train.tsv:1: expected UTF-8, found UTF-16; convert"),
    "open quote": (
        {"train_csv": 'text,label\na,x\n"b,y\n'},
        "train.csv:3: expected closed quotation marks, found unexpected end of data; close every quotation",
    ),
    "broken JSON": (
        {"train_jsonl": JSON_ROW + '{"text": "b"\n'},
        "train.jsonl:2: expected one JSON object, found Expecting ',' delimiter: line 2 column 1 (char 13); write one",
    ),
    "deep JSON": ({"train_jsonl": "[" * 100_000}, "train.jsonl:1: expected one JSON object, found maximum rec"),
    "no JSON object": (
        {"train_jsonl": '["a", 1]\n'},
        """train.jsonl:1: expected one JSON object, found '["a", 1]'; write one object a line""",
    ),
    "missing key": (
        {"train_jsonl": JSON_ROW + '{"text": "b"}\n'},
        "train.jsonl:2: expected a label in label, found None; fill it in",
    ),
    "text no string": (
        {"train_jsonl": '{"text": 5, "label": 1}\n'},
        "train.jsonl:1: expected text in text, found 5, which is no string; correct or drop the row",
    ),
    "half a character": (
        {"train_jsonl": '{"text": "\\ud800", "label": 1}\n'},
        "train.jsonl:1: expected text in text, found half of a surrogate pair, which is no character",
    ),
    "null as label": (
        {"train_jsonl": '{"text": "a", "label": null}\n'},
        "train.jsonl:1: expected a label in label, found None; fill it in",
    ),
    "list as label": (
        {"train_jsonl": '{"text": "a", "label": [1]}\n'},
        "train.jsonl:1: expected a label in label, found [1]; fill it in",
    ),
    "score no number": (
        {"train_tsv": table("sentence1|sentence2|score", "a|b|nan")},
        "train.tsv:2: expected a finite number as label, found 'nan'; correct it",
    ),
}


@pytest.mark.parametrize("case", ERRORS)
def test_whatever_is_wrong_with_a_file_is_one_line(case, tmp_path):
    files, message = ERRORS[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        load_task(folder(tmp_path, "mine", **files))
    assert len(str(error.value).splitlines()) == 1


def test_a_missing_folder_and_a_file_in_its_place_are_errors(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"nowhere: expected a task folder, found nothing; name"):
        load_task(tmp_path / "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(FileNotFoundError, match="file: expected a task folder, found a file; to split this file"):
        load_task(tmp_path / "file")


def test_a_glue_label_outside_the_fixed_set_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r"train\.tsv:2: .* negative, positive, found '-1'; .*remove the"):
        load_task(folder(tmp_path, "SST-2", train_tsv=table("sentence|label", "a|-1")))


def test_an_unknown_split_lists_those_there_are(tmp_path):
    task = load_task(folder(tmp_path, "mine", train_tsv=PLAIN))
    with pytest.raises(ValueError, match="task mine: expected one of its splits train, found 'dev'; choose"):
        task.split("dev")


def test_a_task_of_train_alone_is_an_error_that_names_what_is_missing(tmp_path):
    task = load_task(folder(tmp_path, "mine", train_tsv=PLAIN))
    message = "task mine: expected a dev or a test file, whose rows are reported, found train alone; add dev.tsv or"
    with pytest.raises(ValueError, match=f"{message} test.tsv, let --split-file 0 split train, or give --split train"):
        task.default_split  # noqa: B018


# Scores and parts of a split


def test_score_is_the_mean_of_the_tasks_metrics_and_accuracy_is_always_there():
    predictions, labels = np.array([1, 1, 0, 0]), np.array([1, 0, 0, 0])
    cola = Task("CoLA", ("unacceptable", "acceptable"), ("matthews",), {}).score(predictions, labels)
    assert cola == pytest.approx({"matthews": 3**-0.5, "accuracy": 0.75, "score": 3**-0.5})
    mrpc = Task("MRPC", ("not_equivalent", "equivalent"), ("accuracy", "f1"), {}).score(predictions, labels)
    assert mrpc == pytest.approx({"accuracy": 0.75, "f1": 2 / 3, "score": (0.75 + 2 / 3) / 2})
    sts = Task("STS-B", (), ("pearson", "spearman"), {}).score(labels * 2.5, labels * 1.0)
    assert sts == pytest.approx({"pearson": 1, "spearman": 1, "score": 1})


def numbered(count: int) -> Split:
    rows = range(count)
    return Split(tuple((str(row),) for row in rows), np.array(rows), tuple(f"h{row}" for row in rows))


def test_holdout_parts_a_split_in_two_and_keeps_the_order():
    fit, held = holdout(numbered(203), seed=5)
    assert len(held) == 20
    assert sorted([*fit.labels, *held.labels]) == list(range(203))
    for part in (fit, held):
        assert part.labels.tolist() == sorted(part.labels)
        assert [(f"{row}",) for row in part.labels] == list(part.texts)
        assert [f"h{row}" for row in part.labels] == list(part.hardness)


def test_holdout_and_subset_follow_the_seed():
    for part in (lambda seed: holdout(numbered(100), seed)[1], lambda seed: subset(numbered(100), 30, seed)):
        assert part(1).texts == part(1).texts
        assert part(1).texts != part(2).texts


@pytest.mark.parametrize("count", [0, 1])
def test_holdout_refuses_an_empty_part(count):
    with pytest.raises(ValueError, match=f"expected at least two rows, of which one is held out, found {count}"):
        holdout(numbered(count), 0)


def test_subset_has_the_count_asked_for_or_all_rows():
    drawn = subset(numbered(50), 20, seed=0)
    assert len(set(drawn.texts)) == 20 and drawn.labels.tolist() == sorted(drawn.labels)
    assert [(f"{row}",) for row in drawn.labels] == list(drawn.texts)
    assert subset(numbered(50), 60, seed=0).texts == numbered(50).texts
    with pytest.raises(ValueError, match="at least one row, found 0"):
        subset(numbered(50), 0, seed=0)


def test_take_accepts_indices_masks_and_slices():
    split = numbered(4)
    assert split.take([2, 0]).labels.tolist() == [2, 0]
    assert split.take(split.labels > 1).hardness == ("h2", "h3")
    assert split.take(slice(1)).texts == (("0",),)
    assert len(split.take([])) == 0


def test_the_toy_task_is_the_same_every_time_and_knows_its_hardness():
    task, again = toy_task(), toy_task.__wrapped__()
    assert (task.name, task.label_names, task.default_split) == ("reviews", ("negative", "positive"), "dev")
    for name, split in task.splits.items():
        assert split.texts == again.split(name).texts
        assert len(split) == len(split.labels) == len(split.hardness)
        assert set(split.labels) == {0, 1}


# Tokenizers

WORDS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *"abcd", "great", "film", "##s", "Great"]


def bert_folder(path: Path, **config: object) -> Path:
    (path / "vocab.txt").write_text("\n".join(WORDS) + "\n")
    if config:
        (path / "tokenizer_config.json").write_text(json.dumps(config))
    return path


def decoder_backend(bos: str = "<s> ") -> tokenizers.Tokenizer:
    """Like Llama's: "<s>" in front of one text, no template for two, no padding token."""
    vocabulary = {"<unk>": 0, "<s>": 1, "a": 2, "b": 3, "\n": 4}
    backend = tokenizers.Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    backend.post_processor = processors.TemplateProcessing(single=f"{bos}$A", special_tokens=[("<s>", 1)])
    return backend


def test_bert_vocabulary_gives_the_documented_sequences_and_type_ids(tmp_path):
    encoded = Tokenizer.from_folder(bert_folder(tmp_path)).encode(["a b", ("GREAT films", "c"), ("zz",)])
    inputs = encoded.batch([0, 1, 2])
    assert inputs.input_ids.tolist() == [[2, 5, 6, 3, 0, 0, 0], [2, 9, 10, 11, 3, 7, 3], [2, 1, 3, 0, 0, 0, 0]]
    assert inputs.token_type_ids.tolist() == [[0] * 7, [0, 0, 0, 0, 0, 1, 1], [0] * 7]
    assert inputs.attention_mask.tolist() == [[1] * 4 + [0] * 3, [1] * 7, [1] * 3 + [0] * 4]
    assert inputs.texts == (("a b",), ("GREAT films", "c"), ("zz",))
    assert inputs.input_ids.dtype == inputs.attention_mask.dtype == inputs.token_type_ids.dtype == np.int64


def test_do_lower_case_false_keeps_capitals(tmp_path):
    tokenizer = Tokenizer.from_folder(bert_folder(tmp_path, do_lower_case=False))
    assert tokenizer.encode(["Great great"]).ids[0].tolist() == [2, 12, 9, 3]


def test_stored_truncation_and_padding_are_replaced_by_ours(tmp_path):
    tokenizer = Tokenizer.from_folder(bert_folder(tmp_path))
    tokenizer.backend.enable_padding(length=16)
    tokenizer.backend.enable_truncation(4)
    tokenizer.save(tmp_path / "tokenizer.json")
    encoded = Tokenizer.from_folder(tmp_path, max_length=6).encode(["a", "a b c d", "a b c d great film"])
    assert [len(ids) for ids in encoded.ids] == [3, 6, 6]
    assert encoded.truncated == 1


def test_without_a_max_length_nothing_is_cut(tmp_path):
    Tokenizer.from_folder(bert_folder(tmp_path), 4).save(tmp_path / "tokenizer.json")
    tokenizer, text = Tokenizer.from_folder(tmp_path, None), "a great film " * 100
    assert len(tokenizer.ids_of(text)) == 302 and len(tokenizer.ids_of(text, special=False)) == 300
    assert tokenizer.encode([text]).truncated == 0


def test_a_saved_tokenizer_gives_the_same_ids_and_is_the_only_file(tmp_path):
    tokenizer = Tokenizer.from_folder(bert_folder(tmp_path))
    (tmp_path / "run").mkdir()
    tokenizer.save(tmp_path / "run" / "tokenizer.json")
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["tokenizer.json"]
    again = Tokenizer.from_folder(tmp_path / "run")
    texts = ["a great film", ("films", "A B C"), "unknown"]
    for one, other in zip(tokenizer.encode(texts).ids, again.encode(texts).ids, strict=True):
        np.testing.assert_array_equal(one, other)


def test_a_text_of_100000_characters_is_cut_and_counted(tmp_path):
    tokenizer = Tokenizer.from_folder(bert_folder(tmp_path), max_length=32)
    encoded = tokenizer.encode(["a b " * 25_000, "a", ("c d " * 25_000, "b")])
    assert [len(ids) for ids in encoded.ids] == [32, 3, 32]
    assert encoded.truncated == 2
    assert encoded.ids[2][-3:].tolist() == [3, 6, 3]  # the longer text is the one that is cut


def test_a_tokenizer_without_a_template_for_pairs_reads_two_lines(tmp_path):
    encoded = Tokenizer(decoder_backend()).encode(["ab", ("a", "b")])
    assert [ids.tolist() for ids in encoded.ids] == [[1, 2, 3], [1, 2, 4, 3]]
    assert encoded.type_ids[1].tolist() == [0] * 4
    assert Tokenizer(decoder_backend(bos="")).encode([("a", "b")]).ids[0].tolist() == [2, 4, 3]


@pytest.mark.parametrize(
    "lengths, expected", [((40, 3), (9, 3)), ((3, 40), (3, 9)), ((40, 40), (6, 6)), ((4, 5), (4, 5))]
)
def test_two_lines_that_are_too_long_together_lose_of_the_longer(lengths, expected):
    encoded = Tokenizer(decoder_backend(), 14).encode([("a" * lengths[0], "b" * lengths[1])])  # with <s> and a new line
    assert encoded.ids[0].tolist() == [1, *[2] * expected[0], 4, *[3] * expected[1]]
    assert encoded.truncated == (sum(lengths) > 12)


def test_two_lines_are_too_long_if_the_end_of_a_line_is_several_tokens():
    backend = decoder_backend()
    backend.normalizer = tokenizers.normalizers.Replace("\n", "\n\n\n")
    encoded = Tokenizer(backend, 14).encode([("a" * 6, "b" * 5)])
    assert encoded.ids[0].tolist() == [1, *[2] * 6, 4, 4, 4, *[3] * 4] and encoded.truncated == 1


def test_token_ids_of_words_and_of_special_tokens(tmp_path):
    tokenizer, decoder = Tokenizer.from_folder(bert_folder(tmp_path)), Tokenizer(decoder_backend())
    assert [tokenizer.token_id(word) for word in ("great", "GREAT", "films", "zebra")] == [9, 9, None, None]
    assert (tokenizer.pad_token_id, tokenizer.mask_token_id) == (0, 4)
    assert (decoder.pad_token_id, decoder.mask_token_id, decoder.token_id("a")) == (0, None, 2)


def test_padding_uses_the_tokenizers_own_id():
    backend = tokenizers.Tokenizer(models.WordLevel({"<s>": 0, "<pad>": 1, "a": 2}, unk_token="<s>"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.normalizer = normalizers.Lowercase()
    assert Tokenizer(backend).encode(["A a", "a"]).batch([1, 0]).input_ids.tolist() == [[2, 1], [2, 2]]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["a", ""], "row 1: expected one text or two, found an empty text; correct"),
        ([("a", " \n")], "row 0: .* found an empty text"),
        ([()], "row 0: .* found 0"),
        ([("a", "b", "c")], "row 0: .* found 3"),
        ([("a", 5)], "row 0: .* found 5, which is no string"),
        (["\ud800"], "row 0: .* half of a surrogate pair"),
    ],
)
def test_texts_that_cannot_be_encoded_are_errors(rows, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        Tokenizer.from_folder(bert_folder(tmp_path)).encode(rows)


def test_folders_without_a_readable_tokenizer_and_a_length_of_special_tokens_alone_are_errors(tmp_path):
    with pytest.raises(ValueError, match=r"expected tokenizer\.json or vocab\.txt, found neither; copy one"):
        Tokenizer.from_folder(tmp_path)
    with pytest.raises(ValueError, match="expected max_length above the 3 special tokens, found 3"):
        Tokenizer.from_folder(bert_folder(tmp_path), max_length=3)
    (tmp_path / "tokenizer.json").write_text('{"version": "1.0"')
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer, found .*; copy the file"):
        Tokenizer.from_folder(tmp_path)


PANICKING = {
    "type": "BPE",
    "continuing_subword_prefix": "##",
    "vocab": {"a": 0, "b": 1, "ab": 2, "##b": 3},
    "merges": [["a", "b"]],
}


def test_a_tokenizer_that_the_library_breaks_on_is_one_line(tmp_path, capfd):
    """tokenizers raises a PanicException, which is no Exception, after it printed a backtrace."""
    tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1, "ab": 2}, [("a", "b")])).save(str(tmp_path / "tokenizer.json"))
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    (tmp_path / "tokenizer.json").write_text(json.dumps(content | {"model": content["model"] | PANICKING}))
    with pytest.raises(ValueError, match=r"tokenizer\.json: expected a tokenizer, found '.*'; copy the file again"):
        Tokenizer.from_folder(tmp_path)
    os.write(2, b"heard again\n")
    assert capfd.readouterr().err == "heard again\n"


def test_a_panic_while_a_text_is_read_is_one_line_and_an_interrupt_is_none():
    class PanicException(BaseException):
        pass

    class Backend:
        def __init__(self, error):
            self.error = error

        def __getattr__(self, name):
            return getattr(decoder_backend(), name)

        def encode_batch(self, sequences, **settings):
            raise self.error

    with pytest.raises(ValueError, match=r"the tokenizer cannot read a text \(slice index\); copy the model's own"):
        Tokenizer(Backend(PanicException("slice index"))).encode(["a"])
    with pytest.raises(KeyboardInterrupt):
        Tokenizer(Backend(KeyboardInterrupt())).encode(["a"])


# Batches


def encoded_of(lengths, tmp_path):
    return Tokenizer.from_folder(bert_folder(tmp_path)).encode(["a " * int(length) for length in lengths])


def test_inputs_take_keeps_rows_together_and_the_width(tmp_path):
    inputs = encoded_of([1, 5, 3], tmp_path).batch([0, 1, 2])
    rest = inputs.take(np.array([False, False, True]))
    assert (len(rest), rest.input_ids.shape, rest.texts) == (1, (1, 7), (("a a a ",),))
    np.testing.assert_array_equal(rest.input_ids[0], inputs.input_ids[2])
    assert rest.attention_mask.sum() == 5
    assert encoded_of([1], tmp_path).batch([]).input_ids.shape == (0, 0)


@pytest.mark.parametrize("seed", [None, 0, 1])
@pytest.mark.parametrize("count", [0, 1, 7, 64, 250])
@pytest.mark.parametrize("batch_size", [1, 4, 300])
def test_every_row_is_in_one_batch_and_batches_are_full_but_one(count, batch_size, seed, tmp_path):
    encoded = encoded_of(np.random.default_rng(count).integers(1, 30, count), tmp_path)
    cut = list(batches(encoded, batch_size, shuffle_seed=seed))
    assert sorted(row for rows in cut for row in rows) == list(range(count))
    assert sorted((len(rows) for rows in cut), reverse=True) == [
        min(batch_size, count - start) for start in range(0, count, batch_size)
    ]


def test_without_a_seed_rows_go_from_short_to_long_and_ties_keep_their_order(tmp_path):
    cut = batches(encoded_of([3, 1, 3, 2, 1], tmp_path), 2)
    assert [rows.tolist() for rows in cut] == [[1, 4], [3, 0], [2]]


def test_with_a_seed_batches_repeat_are_shuffled_and_waste_little_padding(tmp_path):
    lengths = np.random.default_rng(0).integers(1, 60, 600)
    encoded = encoded_of(lengths, tmp_path)
    cut = [rows.tolist() for rows in batches(encoded, 8, shuffle_seed=3)]
    assert cut == [rows.tolist() for rows in batches(encoded, 8, shuffle_seed=3)]
    assert cut != [rows.tolist() for rows in batches(encoded, 8, shuffle_seed=4)]
    longest = [lengths[rows].max() for rows in cut]
    assert longest != sorted(longest)
    padded = sum(len(rows) * length for rows, length in zip(cut, longest, strict=True))
    assert padded < 1.1 * lengths.sum()


def test_a_batch_size_below_one_is_an_error(tmp_path):
    with pytest.raises(ValueError, match="batch_size of at least 1, a whole number, found 0"):
        batches(encoded_of([1], tmp_path), 0)


# The real files, and the real tokenizers

ROWS = {
    "SST-2": {"train": 67349, "dev": 872, "test": 1821},
    "SST-5": {"train": 8544, "dev": 1101, "test": 2210},
    "TREC": {"train": 5452, "test": 500},
    "MR": {"train": 8662, "test": 2000},
    "MPQA": {"train": 8603, "test": 2000},
    "RTE": {"train": 2490, "dev": 277},
    "MRPC": {"train": 3668, "dev": 408, "test": 1725},
    "SICK": {"train": 4500, "dev": 500, "test": 4927},
}


@needs_shared
@pytest.mark.parametrize("name", ROWS)
def test_real_tasks_have_the_rows_that_their_source_counts(name):
    task = load_task(Path(SHARED, "data", name))
    assert task.name == name
    assert {split: len(rows) for split, rows in task.splits.items()} == ROWS[name]
    for split in task.splits.values():
        assert set(split.labels) == set(range(task.num_labels))


@needs_shared
def test_real_vocabulary_and_real_tokenizer_json_agree(tmp_path):
    source = Path(SHARED, "weights", "all-MiniLM-L6-v2")
    (tmp_path / "vocab.txt").symlink_to(source / "vocab.txt")
    texts = load_task(Path(SHARED, "data", "MRPC")).split("dev").texts
    ours, theirs = Tokenizer.from_folder(tmp_path).encode(texts), Tokenizer.from_folder(source).encode(texts)
    assert ours.truncated == theirs.truncated
    for one, other in zip([*ours.ids, *ours.type_ids], [*theirs.ids, *theirs.type_ids], strict=True):
        np.testing.assert_array_equal(one, other)


@needs_shared
def test_the_real_decoder_tokenizer_keeps_its_first_token_for_pairs():
    tokenizer = Tokenizer.from_folder(Path(SHARED, "weights", "stories260K"))
    for ids in tokenizer.encode(["a dog", ("a dog", "a cat")]).ids:
        assert ids[0] == 1
