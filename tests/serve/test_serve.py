"""`mini-ee run`: lines in, JSON lines out, in order; a bad line is told with its number and stops nothing."""

import json
import os
import re
import shutil
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

import mini_ee.lab.cli.run as serve
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.writer import export
from mini_ee.lab.rules import Fixed, Threshold
from mini_ee.lab.training.run_folder import Run

THINGS, WORDS = ("film", "meal", "book", "song", "room"), ("good", "great", "bad", "awful", "dull")
SENTENCES = [f"the {thing} was {'very ' * (number % 4)}{word}" for number, thing in enumerate(THINGS) for word in WORDS]


def export_random(folder, checkpoint_folder, random_model, texts, num_labels=3):
    """An untrained model as an exported folder; its words are drawn anew for the tokenizer's few."""
    labels = ["bad", "fair", "good"] if num_labels > 1 else []
    task = {"name": "words", "label_names": labels, "metrics": ["accuracy"], "texts": texts}
    model, tokenizer = random_model((1, 2, 4, 6), num_labels), Tokenizer.from_folder(checkpoint_folder, 30)
    config = {"method": "joint", "unit": "rows", "num_labels": num_labels, "settings": {}, "task": task}
    run = Run(Path("run"), config, model, tokenizer, Threshold(0.9))
    export(run, folder, [(sentence,) * texts for sentence in SENTENCES[:8]])
    return run


@pytest.fixture(scope="module")
def served(tmp_path_factory, checkpoint_folder, random_model):
    """An exported folder, and the run that it came from."""
    folder = tmp_path_factory.mktemp("served") / "exported"
    return folder, export_random(folder, checkpoint_folder, random_model, 1)


@pytest.fixture(scope="module")
def served_pairs(tmp_path_factory, checkpoint_folder, random_model):
    folder = tmp_path_factory.mktemp("pairs") / "exported"
    export_random(folder, checkpoint_folder, random_model, 2)
    return folder


def lines_of(tmp_path, *lines):
    path = tmp_path / "in.txt"
    path.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() + b"\n" for line in lines))
    return path


def answers(tmp_path, folder, *lines, options=()):
    """Of lines on standard input."""
    out = tmp_path / "out.jsonl"
    with pytest.MonkeyPatch.context() as patch, open(lines_of(tmp_path, *lines)) as source:
        patch.setattr(sys, "stdin", source)
        status = main(["run", *map(str, (folder, "--out", out, "--threads", 1, *options))])
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert status == any("error" in row for row in rows)
    return rows


def expected(run, text):
    result = early_exit(run.segments(), run.rule, run.encode([(text,)]).batch(np.arange(1)))
    return run.label_names[result.logits[0].argmax()], int(result.layers_run[0])


@pytest.mark.parametrize("batch_size", [1, 4, 32])
def test_every_line_gets_the_answer_of_the_model_in_the_order_of_the_lines(served, tmp_path, batch_size):
    folder, run = served
    rows = answers(tmp_path, folder, *SENTENCES, options=["--batch-size", batch_size])
    assert [row["line"] for row in rows] == list(range(1, len(SENTENCES) + 1))
    assert [(row["label"], row["layers"]) for row in rows] == [expected(run, text) for text in SENTENCES]
    assert len({row["layers"] for row in rows}) > 1
    keys = {"line", "label", "confidence", "exit", "layers", "milliseconds"}
    assert all(set(row) == keys and 0 < row["confidence"] <= 1 for row in rows)


def test_the_time_of_a_batch_has_the_wait_for_its_plan_in_it(served):
    @dataclass(frozen=True)
    class Slow(Fixed):
        plans_from_texts = True

        def plan(self, inputs):
            time.sleep(0.2)
            return super().plan(inputs)

    (answer,) = Runtime(served[0]).run(["the film was good"], rule=Slow(0))
    assert answer.milliseconds >= 200


def test_plain_lines_and_json_may_be_mixed(served, tmp_path):
    text = "the film was good"
    as_json = [json.dumps({key: text, "id": 7}) for key in ("text", "sentence")]
    as_json += [f'{before}{{"text": "{text}"}}' for before in ("\ufeff", "  ")]
    plain, *others = answers(tmp_path, served[0], text, *as_json, f"{text}\r\n".encode())
    for other in others:
        assert (other["label"], other["layers"]) == (plain["label"], plain["layers"])


@pytest.mark.parametrize(
    "line",
    [
        "the film\tthe film was good",
        '{"text": "the film", "text_b": "the film was good"}',
        '{"sentence1": "the film", "sentence2": "the film was good", "label": 1}',
    ],
)
def test_rows_of_two_texts_are_given_with_a_tab_or_as_json(served_pairs, tmp_path, line):
    (row,) = answers(tmp_path, served_pairs, line)
    (alone,) = Runtime(served_pairs, threads=1).run([("the film", "the film was good")])
    assert (row["label"], row["exit"]) == (alone.label, alone.exit)


BAD = [
    (b"caf\xe9\n", "UTF-8"),
    ('{"text": "the film"', "one JSON object"),
    ('{"texts": "the film"}', 'expected {"text": ...} or {"sentence": ...}, found the keys \'texts\''),
    ("{}", "found the keys none"),
    ('{"text_b": "the film"}', "found the keys 'text_b'"),
    ('{"text": "the film", "text_b": "the film"}', "found the keys 'text', 'text_b'"),
    ('{"text": 7}', "text"),
    ('{"text": null}', "text"),
    ("", "empty"),
    ("   ", "empty"),
    ("{" * 100_000, "one JSON object"),
]


def test_a_bad_line_is_reported_with_its_number_and_the_others_are_answered(served, tmp_path, capsys):
    good = "the film was good"
    lines = [line for bad, _ in BAD for line in (good, bad)] + [good]
    rows = answers(tmp_path, served[0], *lines, options=["--batch-size", 2])
    assert [row["line"] for row in rows] == list(range(1, len(lines) + 1))
    assert len({row["label"] for row in rows[::2]}) == 1
    printed = [line for line in capsys.readouterr().err.splitlines() if line.startswith("mini-ee run: line ")]
    for number, (_, message), answered, line in zip(range(2, 99, 2), BAD, rows[1::2], printed, strict=False):
        assert set(answered) == {"line", "error"} and message in answered["error"]
        assert line.startswith(f"mini-ee run: line {number}: ") and message in line
    assert len(printed) == len(BAD)


def test_a_link_stays_a_link_and_a_pipe_a_pipe(served, tmp_path):
    (tmp_path / "out.jsonl").symlink_to(tmp_path / "target")
    assert len(answers(tmp_path, served[0], "the film was good")) == 1
    assert (tmp_path / "out.jsonl").is_symlink() and (tmp_path / "target").is_file()
    (tmp_path / "out.jsonl").unlink()
    os.mkfifo(tmp_path / "out.jsonl")
    read = []
    reader = threading.Thread(target=lambda: read.append((tmp_path / "out.jsonl").read_text()))
    reader.start()
    arguments = served[0], lines_of(tmp_path, "the film was good"), "--out", tmp_path / "out.jsonl", "--threads", 1
    assert main(["run", *map(str, arguments)]) == 0
    reader.join()
    assert len(read[0].splitlines()) == 1 and (tmp_path / "out.jsonl").is_fifo()


def test_closed_streams_are_one_line_or_silence(served, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", None)
    assert main(["run", str(served[0])]) == 2
    assert "standard input is closed" in capsys.readouterr().err
    monkeypatch.setattr(sys, "stderr", None)
    arguments = served[0], lines_of(tmp_path, b"\xff\n"), "--out", tmp_path / "out", "--json"
    assert main(["run", *map(str, arguments)]) == 1
    assert json.loads(capsys.readouterr().out)["failed"] == 1  # what is wrong with the line is not among the answers
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["run", *map(str, arguments)]) == 1
    sys.stdout.close()
    sys.stderr.close()


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("task", None, "no key 'task'"),
        ("task", {"name": "words", "label_names": ["a", "b", "c"]}, "no key 'task.texts'"),
        ("task", {"name": "words", "label_names": [1, 2, 3], "texts": 1}, "wrong type for 'task.label_names'"),
        ("task", {"name": "words", "label_names": [], "texts": 1}, "names 0 labels for 3 logits"),
        ("num_labels", 2, "names 3 labels for 2 logits"),
        ("rule", 3, "wrong type"),
        ("rule", {"name": []}, "wrong type"),
        ("exits", 3, "wrong type"),
        ("exits", [], "wrong type"),
        ("unit", None, "no key 'unit'"),
        ("layer_passes", ["1"], "wrong type"),
        ("flops", [[1, 2]], "wrong type"),
        ("whole_flops", None, "no key 'whole_flops'"),
        ("unit", "pages", "the unit 'pages', not rows, prompts, embeddings, tokens"),
        ("layer_passes", [1, 1], "4 exits, the layers of 2, the costs of 4 and of 4 policies"),
        ("flops", [[[1.0]]] * 4, "two each"),
        ("encoder", {"name": "one"}, "no key 'encoder.flops'"),
    ],
)
def test_a_manifest_that_was_written_wrong_is_one_line(served, tmp_path, capsys, key, value, message):
    folder = tmp_path / "edited"
    shutil.copytree(served[0], folder)
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", {k: v for k, v in (manifest | {key: value}).items() if v is not None})
    with pytest.raises(ValueError, match=f"edited: manifest.json .*{re.escape(message)}.*; export the run again"):
        Runtime(folder)
    assert main(["run", str(folder), "--engine", "torch"]) == 1
    assert message in capsys.readouterr().err


def test_the_summary_counts_rows_failures_and_cut_texts(served, tmp_path, capsys):
    out, source = tmp_path / "out", lines_of(tmp_path, "the film was good " * 20, b"\xff\n", "a dull book")
    assert main(["run", *map(str, (served[0], source, "--out", out, "--json", "--threads", 1))]) == 1
    printed = capsys.readouterr()
    summary = json.loads(printed.out)
    layers = [json.loads(line).get("layers") for line in out.read_text().splitlines()]
    assert (summary["rows"], summary["failed"]) == (3, 1) and layers[1] is None
    assert summary["mean_layers"] == (layers[0] + layers[2]) / 2
    assert summary["rows_truncated"] == 1 and "1 of 3 texts were cut to 30 tokens" in printed.err
    assert main(["run", *map(str, (served[0], lines_of(tmp_path), "--out", out, "--json"))]) == 0
    none = json.loads(capsys.readouterr().out)
    assert out.read_text() == "" and none["rows"] == 0 and none["mean_layers"] is None
    assert summary["engine"] == "onnxruntime" and summary["provider"] == "CPUExecutionProvider"


def test_labels_that_the_graphs_do_not_give_are_refused(served, tmp_path):
    folder = shutil.copytree(served[0], tmp_path / "edited")
    manifest = read_json(folder / "manifest.json")
    write_json(folder / "manifest.json", manifest | {"num_labels": 1, "task": manifest["task"] | {"label_names": []}})
    with pytest.raises(ValueError, match="returns 3 logits, expected 1 as in manifest.json; export the run again"):
        Runtime(folder)


def test_a_log_file_holds_no_progress_bars(served, tmp_path, monkeypatch, capsys):
    shown = []
    right = serve.tqdm
    monkeypatch.setattr(serve, "tqdm", lambda **settings: shown.append(right(**settings | {"delay": 0})) or shown[-1])
    answers(tmp_path, served[0], "the film was good")
    assert shown[0].disable and capsys.readouterr().err == ""


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (2026-11)")
@pytest.mark.parametrize("more", [[], ["--json", "--out", "answers.jsonl"]], ids=["answers", "--json"])
def test_a_full_standard_output_is_named(runtime, tmp_path, more):
    (tmp_path / "in.txt").write_text("the film\n")
    command = [sys.executable, "-m", "mini_ee", "run", str(runtime.folder), "in.txt", *more]
    with open("/dev/full", "w") as full:
        done = subprocess.run(command, cwd=tmp_path, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.stderr == "mini-ee run: standard output: No space left on device\n" and done.returncode == 1


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full (2026-11)")
def test_a_full_disk_names_the_file(served, tmp_path, capsys, monkeypatch):
    def full(name, *arguments, **settings):
        return open("/dev/full" if str(name).endswith(".partial") else name, *arguments, **settings)

    monkeypatch.setattr(serve, "open", full, raising=False)
    out = tmp_path / "out.jsonl"
    arguments = served[0], lines_of(tmp_path, "the film was good"), "--out", out, "--threads", 1
    assert main(["run", *map(str, arguments)]) == 1
    assert capsys.readouterr().err == f"mini-ee run: {out}: No space left on device\n"


def test_the_torch_engine_gives_the_same_answers(served, tmp_path):
    ours, theirs = (
        answers(tmp_path, served[0], *SENTENCES, options=["--engine", engine]) for engine in ("onnxruntime", "torch")
    )
    for one, other in zip(ours, theirs, strict=True):
        assert (one["label"], one["exit"]) == (other["label"], other["exit"])
        assert one["confidence"] == pytest.approx(other["confidence"], abs=1e-5)


def test_an_output_file_takes_its_name_when_all_is_written(served, tmp_path, monkeypatch):
    out = tmp_path / "out.jsonl"
    out.write_text("the answers of yesterday\n")

    def stops(runtime, lines, size):
        raise KeyboardInterrupt

    monkeypatch.setattr(serve, "_answers", stops)
    assert main(["run", *map(str, (served[0], lines_of(tmp_path, "the film"), "--out", out))]) == 1
    assert out.read_text() == "the answers of yesterday\n"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["in.txt", "out.jsonl"]


def test_standard_input_is_answered_as_it_comes(served):
    """With batches of one, an answer is there before the next line is asked for."""
    command = [sys.executable, "-m", "mini_ee", "run", str(served[0]), "--batch-size", "1", "--threads", "1"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=os.environ) as process:
        killer = threading.Timer(60, process.kill)
        killer.start()
        for number in (1, 2):
            process.stdin.write(b"the film was good\n")
            process.stdin.flush()
            assert json.loads(process.stdout.readline())["line"] == number
        process.stdin.close()
        assert process.wait() == 0
        killer.cancel()
