"""What the commands of classifiers refuse: words -> the line, with status 2, and nothing is written. One table."""

import shlex
from pathlib import Path

import pytest
from conftest import refused

import mini_ee
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER

COMMANDS = [
    ("train joint --model {checkpoint} --task {task} --out out --exits 3,2", "ascend"),
    ("train joint --model {checkpoint} --task {task} --out out --exits 1,9", "end at the last layer, 3"),
    ("train joint --model {checkpoint} --task {task} --out out --exits x", "whole number"),
    ("train joint --model {checkpoint} --task {task} --out out --epochs 0", "at least 1"),
    ("train joint --model {checkpoint} --task {task} --out out --lr -1", "lr must be"),
    ("train joint --model {checkpoint} --task {task} --out out --pool max", "first"),
    ("train joint --model {checkpoint} --task {task} --out out --device cuda:99", "use cpu"),
    ("train joint --model {checkpoint} --task {task} --out out --max-loss 1", "max_loss must be a number of at least"),
    ("train joint --model {checkpoint} --task {task} --out out --confidence 1", "confidence must be a number above 0"),
    ("train joint --model {checkpoint} --task {task} --out out --epoch 3", "--epoch"),
    ("train joint --model {checkpoint} --task {task} --out out --model /nowhere", "/nowhere"),
    ("train joint --model {checkpoint} --task {task} --out out --model {decoder} --pool first", "pool must be mean"),
    ("train joint --model {checkpoint} --task {task} --out out --task /nowhere", "/nowhere"),
    ("train joint --model {checkpoint} --task {task} --out out --max-length 2", "max_length"),
    ("train joint --model {checkpoint} --task {task} --out out --model {run}", "found a run of joint"),
    ("train joint --model {checkpoint} --task {task} --out out --k 1", "unrecognized arguments: --k 1"),
    (
        "train pabee --out out --patience 3",
        "rule, which takes effect after the training: mini-ee evaluate RUN --rule pat",
    ),
    (
        "train pabee --out out --patience 3",
        "evaluate RUN --rule patience --patience 3; see mini-ee train pabee --help-all",
    ),
    ("train joint --out out --threshold .9", "mini-ee evaluate RUN --rule threshold --threshold .9;"),
    ("train joint --out out --layer 2", "mini-ee evaluate RUN --rule fixed --layer 2;"),
    ("evaluate {run} --task {task} --threshold 1.5", "from 0.0 to 1.0"),
    ("evaluate {run} --task {task} --threshold nan", "nan"),
    ("evaluate {run} --task {task} --threshold .5,.5", "one threshold or 3"),
    ("evaluate {run} --task {task} --layer 7", "one of the exits 1,2,3"),
    ("evaluate {run} --task {task} --rule patience", "needs --patience"),
    ("evaluate {run} --task {task} --rule fixed --threshold .5", "the rule fixed does not take --threshold"),
    ("evaluate {run} --task {task} --rule fixed", "needs --layer"),
    ("evaluate {run} --task {task} --layer one", "expected a whole number, found 'one'"),
    ("evaluate {run} --task {task} --patience 999999999999999999999999999999", "at most 10 digits"),
    ("evaluate {run} --task {task} --measure entropy", "give --threshold too"),
    ("evaluate {run} --task {task} --threads 100000", "at most 1024"),
    ("evaluate {run} --task {task} --seed 4294967296", "from 0 to 2**32 - 1"),
    ("evaluate {run} --task {task} --batch-size 999999999999999999999999999999", "at most 10 digits"),
    ("evaluate {run} --task {task} --patience 2 --threshold .5", "does not take"),
    ("evaluate {run} --task {task} --patience 3", "--patience must be less than the number of exits, 3"),
    ("evaluate {run} --task {task} --rule patience-confidence --patience 9 --threshold .5", "number of exits, 3"),
    ("evaluate {run} --task {task} --split validation", "expected one of its splits train, dev, found 'validation'"),
    ("evaluate {run} --task {task} --task reviews", "trained on words"),
    ("evaluate {run} --task {task} --rule oracle", "oracle"),
    ("evaluate {run} --task {task} --model nowhere", "--model is for a run without its backbone"),
    ("evaluate {run} --task {task} --measure saturation --threshold .5", "does not provide; choose another measure"),
    ("evaluate {run} --task {task} --nonsense", "unrecognized arguments for a classifier: --nonsense"),
    ("classify nowhere --text x", "no run here"),
    ("classify {run}", "expected one sentence, found none; for example: mini-ee classify"),
    ("classify {run} 'a film' --text 'a film'", "expected one sentence, found two, TEXT and --text"),
    ("classify {run} ''", "TEXT: expected a sentence, found no text"),
    ("classify {run} the film", "unrecognized arguments for a classifier: film"),
    ("classify {run} --text ''", "--text: expected a sentence, found no text"),
    ("classify {run} --text '   '", "--text: expected a sentence, found no text"),
    ("classify {run} --text 'a\udcff'", "--text: expected text in UTF-8, found another byte at 1"),
    ("classify {run} --text a --text-b ''", "--text-b: expected a sentence, found no text"),
    ("classify {run} --text a --text-b b", "leave out --text-b"),
    ("classify {run} --text a --model nowhere", "--model is for a run without its backbone"),
    ("evaluate nowhere", "no run here"),
    ("compare nowhere", "no run here"),
    ("compare {run} --task {task} --model nowhere", "--model is for a run without its backbone"),
    ("compare {run} --task {task} --temperature 1", "--temperature is for decoders"),
    ("compare {run} --task {task} --schedule parallel", "none of these runs has streams"),
    ("compare {lora} --schedule x", "expected some of restart, parallel, adaptive"),
    ("compare {run} --sweep --picture .", "--picture: expected a file NAME.png in a folder that exists"),
    ("compare {run} --sweep --picture no/a.png", "--picture: expected a file NAME.png in a folder that"),
    ("compare {run} --sweep --picture dev.tsv", "--picture: expected a file NAME.png in a folder that"),
    ("calibrate {run} --task {task} --epsilon .1 --model no", "--model is for a run without its backbone"),
    ("export {run} --task {task} --out out --model no", "--model is for a run without its backbone"),
    ("export {run} --int4 --out out", "--int4 is for decoders that generate text, found"),
    ("export {run} --out file/out", "file: expected a folder, found a file; name another"),
    ("export {lora} --schedule parallel --out out", "--schedule needs --segments, because model.onnx restarts"),
    ("calibrate {run} --task {task} --epsilon 0", "epsilon must be above 0"),
    ("calibrate {run} --task {task} --epsilon 1.5", "expected a number up to 1, found 1.5"),
    ("calibrate {run} --task {task} --epsilon .9 --delta 0", "delta must be at least 1e-09"),
    ("calibrate {run} --task {task} --epsilon .999 --delta .05", "rows are needed"),
    ("calibrate {run} --task {task} ", "--epsilon"),
    ("evaluate {run} --neighbours 2", "unrecognized arguments for a classifier: --neighbours 2"),
    ("evaluate {run} --text x", "unrecognized arguments for a classifier: --text x"),
    ("evaluate {run} --sweep --picture a.png", "unrecognized arguments for a classifier: --picture a.png"),
    ("evaluate {run} --k 3", "unrecognized arguments for a classifier: --k 3"),
    ("classify {run} --text x --least-cosine .5", "unrecognized arguments for a classifier: --least-cosine .5"),
    ("classify {run} --text x --rule similarity", "--rule: invalid choice: 'similarity'"),
    ("calibrate {run} --epsilon .9 --cosine .9", "unrecognized arguments for a classifier: --cosine .9"),
    ("calibrate {run} --epsilon .9 --out x", "unrecognized arguments for a classifier: --out x"),
    ("calibrate {run} --epsilon .9 --greedy", "unrecognized arguments for a classifier: --greedy"),
    ("evaluate {decoder} --overthinking", "unrecognized arguments for a decoder: --overthinking"),
    ("evaluate {decoder} --schedule restart", "unrecognized arguments for a decoder: --schedule restart"),
    ("evaluate {decoder} --text x", "without --task a decoder's run goes with --sweep"),
]
STATUS_1 = {"rows are needed"}  # the data decide


@pytest.fixture(scope="module")
def places(checkpoint_folder, task_folder, tmp_path_factory):
    out, fast = tmp_path_factory.mktemp("refusals"), {"exits": (1, 2, 3), "epochs": 1}
    run, lora = (
        mini_ee.train(method, checkpoint_folder, task_folder, out / method, **fast).folder
        for method in ("joint", "lora-exits")
    )
    places = {"checkpoint": checkpoint_folder, "task": task_folder, "run": run, "lora": lora}
    return places | {"decoder": BUILT_IN_DECODER}


@pytest.mark.parametrize("words, message", COMMANDS)
def test_a_wrong_command_is_one_line_and_writes_nothing(capsys, tmp_path, monkeypatch, places, words, message):
    monkeypatch.chdir(tmp_path)
    Path("file").write_text("")
    before = (places["run"] / "config.json").read_bytes()
    assert message in refused(capsys, *shlex.split(words.format(**places)), status=1 if message in STATUS_1 else 2)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
    assert (places["run"] / "config.json").read_bytes() == before
