"""Commands that run in the test's process: their answer, or the one line of their error."""

import json
import shutil

from mini_ee.lab.cli.main import main
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.training.run_folder import load_run


def called(*argv):
    return main([*map(str, argv)])


def answer(capsys, *argv):
    assert called(*argv, "--json") == 0
    return json.loads(capsys.readouterr().out)


def refused(capsys, *argv):
    try:
        assert called(*argv) in (1, 2)
    except SystemExit as stop:
        assert stop.code == 2
    printed = capsys.readouterr()
    assert printed.out == "" and len(printed.err.splitlines()) == 1, printed.err
    return printed.err


def is_served_end_to_end(capsys, tmp_path, folder, task_folder, engine, precision):
    shutil.rmtree(tmp_path / "exported", ignore_errors=True)
    options = ("--task", task_folder, "--out", tmp_path / "exported", *precision)
    verified = answer(capsys, "export", folder, *options)["verified"]
    texts = ["the film was good", "a dull and awful meal", "the room was very fine and the song was fine"]
    (tmp_path / "texts").write_text("\n".join(texts))
    run = ("run", tmp_path / "exported", tmp_path / "texts", "--out", tmp_path / "answers", "--engine", engine)
    assert answer(capsys, *run)["rows"] == 3
    lines = [json.loads(line) for line in (tmp_path / "answers").read_text().splitlines()]
    if not precision:
        assert verified["max_logit_difference"] < 1e-4 and verified["exit_agreement"] == 1
        trained = load_run(folder)
        for text, line in zip(texts, lines):
            alone = early_exit(trained.segments(), trained.rule, trained.encode([text]).batch(slice(None)))
            assert line["exit"] == trained.exits[alone.exit_index[0]] and line["layers"] == alone.layers_run[0]
            assert line["label"] == trained.label_names[alone.logits[0].argmax()]
    assert {"line", "label", "confidence", "exit", "layers", "milliseconds"} == lines[0].keys()
