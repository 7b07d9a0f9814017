"""One text must not fail the requests of others: a token that the model does not have, and logits that are not finite.

The tokenizer has a word that the model does not, BEYOND. What the graphs compute of a text with the word HUGE is made
NaN, in the outputs of those that read token ids, and in a decoder's caches. The oracle is `Runtime.run` on each good
text alone.
"""

import json
import logging
import shutil
from concurrent.futures import wait
from pathlib import Path

import pytest
import torch
from conftest import random_decoder
from http_server import ask, serving, together

from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.export import verification, writer
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.export.sessions import Session
from mini_ee.lab.export.token_segments import OrtTokenModel, OrtTokenSegments
from mini_ee.lab.rules import Fixed, Threshold
from mini_ee.lab.training.run_folder import Run
from mini_ee.serve import Worker, WrongRow, engine_of
from mini_ee.serve.engines import RowEngine, TextEngine
from mini_ee.serve.monitoring import Guarantee

BEYOND, HUGE = "beyond", "dull"
THINGS, WORDS = ("film", "meal", "book", "song", "room"), ("good", "bad", "fine", "poor")
GOOD = [f"the {thing} was {'very ' * (at % 5)}{word}" for at, thing in enumerate(THINGS) for word in WORDS]
WITH_BEYOND, WITH_HUGE = f"the film {BEYOND}", f"the film was very very {HUGE}"
NOT_KNOWN = "expected token ids below 60, as the model has them, found 60 ('beyond')"
NOT_FINITE = "the logits must be finite, found NaN or infinity"


def with_a_word_more(checkpoint_folder, max_length):
    """The tokenizer with as many words as the model, and BEYOND."""
    tokenizer = Tokenizer.from_folder(checkpoint_folder, max_length)
    fillers = [f"filler{at}" for at in range(60 - tokenizer.backend.get_vocab_size())]
    tokenizer.backend.add_tokens([*fillers, BEYOND])
    assert tokenizer.backend.token_to_id(BEYOND) == 60
    return tokenizer


@pytest.fixture(scope="module")
def rows(tmp_path_factory, checkpoint_folder, random_model):
    task = {"name": "words", "metrics": ["accuracy"], "texts": 1, "label_names": ["bad", "fair", "good"]}
    config = {"method": "joint", "unit": "rows", "num_labels": 3, "settings": {}, "task": task}
    tokenizer = with_a_word_more(checkpoint_folder, 30)
    run = Run(Path("run"), config, random_model((1, 2, 4, 6)), tokenizer, Threshold(0.875))
    folder = tmp_path_factory.mktemp("one") / "rows"
    writer.export(run, folder, [(text,) for text in GOOD], segments=True)
    return Runtime(folder, threads=1)


@pytest.fixture(scope="module")
def decoder(tmp_path_factory, checkpoint_folder):
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = TokenExits(random_decoder("llama", 3), (1, 2, 3), "copy").eval()
    config, tokenizer = {"method": "joint", "unit": "tokens", "settings": {}}, with_a_word_more(checkpoint_folder, None)
    folder = tmp_path_factory.mktemp("one") / "decoder"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(verification, "VERIFIED_TOKENS", 4)
        run = Run(Path("run"), config, model, tokenizer, Threshold((0.25, 0.3, 0.0)))
        writer.export(run, folder, GOOD[:3], segments=True)
    return Runtime(folder, threads=1, max_new_tokens=4)


@pytest.fixture
def overflow(rows, monkeypatch):
    """HUGE makes NaN of whatever a graph computes of its text."""
    huge = rows.tokenizer.backend.token_to_id(HUGE)
    run = Session.run

    def of_rows(self, inputs, read=True):
        output = run(self, inputs, read)
        if "input_ids" in inputs:
            for row in (inputs["input_ids"] == huge).any(axis=1).nonzero()[0]:
                for value in output.values():
                    if len(value) and value.dtype.kind == "f":
                        value[row] = float("nan")
        return output

    def of_prompts(of, self, ids, rows, positions):
        of(self, ids, rows, positions)
        for row, some in zip(rows, ids):
            for cache in self._caches.values() if huge in some else ():
                cache.numpy()[row] = float("nan")

    monkeypatch.setattr(Session, "run", of_rows)
    for segments in (OrtTokenModel, OrtTokenSegments):
        through = segments.run_through
        monkeypatch.setattr(segments, "run_through", lambda *given, of=through: of_prompts(of, *given))


ENGINES = {
    "segments": lambda rows, decoder: RowEngine(rows),
    "one graph": lambda rows, decoder: RowEngine(rows, rebatch=False),
    "planned": lambda rows, decoder: RowEngine(rows, Fixed(1)),
    "shadow": lambda rows, decoder: RowEngine(rows, guarantee=Guarantee(1.0)),
    "shadow, one graph": lambda rows, decoder: RowEngine(rows, rebatch=False, guarantee=Guarantee(1.0)),
    "decoder": lambda rows, decoder: TextEngine(decoder, room=4),
    "decoder that recomputes": lambda rows, decoder: TextEngine(
        Runtime(decoder.folder, threads=1, max_new_tokens=4, missing_kv="recompute"), room=4
    ),
}


def oracle(engine):
    """What each good text gets alone."""
    runtime = engine.runtime
    answers = [runtime.run([text], 1, engine.rule)[0] for text in GOOD]
    return [
        (answer.tokens, answer.layers) if hasattr(answer, "tokens") else (answer.label, answer.layers)
        for answer in answers
    ]


@pytest.mark.parametrize("kind", ENGINES)
def test_of_a_batch_only_the_texts_that_fail_alone_fail(rows, decoder, overflow, kind):
    engine = ENGINES[kind](rows, decoder)
    expected, futures = oracle(engine), []
    with Worker(engine, max_wait=0.05) as worker:
        with worker._ready:  # all are there before the first batch is chosen
            for at, text in enumerate(GOOD):
                futures.append(worker.submit(text))
                if not at % 2:
                    futures += [worker.submit(WITH_BEYOND), worker.submit(WITH_HUGE)]
        wait(futures, 60)
        assert worker.state == "ready" and worker._open == 0
    good = [future.result() for future in futures if future.exception() is None]
    outcomes = [
        (answer.tokens, answer.layers) if hasattr(answer, "tokens") else (answer.label, answer.layers)
        for answer in good
    ]
    assert outcomes == expected
    errors = [future.exception() for future in futures if future.exception() is not None]
    wrong = [str(error) for error in errors if isinstance(error, WrongRow)]
    failed = [str(error) for error in errors if not isinstance(error, WrongRow)]
    assert len(wrong) == len(failed) == 10
    assert all(line.startswith(NOT_KNOWN) and WITH_BEYOND in line for line in wrong)
    assert all(line.startswith(NOT_FINITE) and "\n" not in line for line in failed)
    assert engine.metrics.requests["failed"] == 10 and engine.metrics.requests["answered"] == len(GOOD)


def test_a_prompt_that_was_not_read_when_its_batch_failed_is_read_alone(decoder, monkeypatch):
    huge, through = decoder.tokenizer.backend.token_to_id(HUGE), OrtTokenModel.run_through

    def failing(self, ids, *of):
        if any(huge in some for some in ids):
            raise ValueError("a batch that fails")
        through(self, ids, *of)

    alone = [decoder.run([text])[0].tokens for text in GOOD[:3]]
    monkeypatch.setattr(OrtTokenModel, "run_through", failing)
    with Worker(TextEngine(decoder, room=4)) as worker:
        with worker._ready:
            bad, *futures = [worker.submit(text) for text in (f"{WITH_HUGE} film", *GOOD[:3])]
        assert [future.result(30).tokens for future in futures] == alone
        assert str(bad.exception(30)) == "a batch that fails"


@pytest.mark.parametrize("missing_kv", ["copy_state", "recompute"])
def test_what_a_text_made_nan_is_wiped_before_the_next_takes_its_place(decoder, overflow, missing_kv):
    runtime = Runtime(decoder.folder, threads=1, max_new_tokens=4, missing_kv=missing_kv)
    alone = [runtime.run([text])[0].tokens for text in GOOD]
    with Worker(TextEngine(runtime, room=1)) as worker:
        assert NOT_FINITE in str(worker.submit(f"{WITH_HUGE} and a very very good film").exception(30))
        assert [worker.submit(text).result(30).tokens for text in GOOD] == alone


def test_answers_over_http_are_those_alone_and_the_culprits_get_their_line(rows, overflow, caplog):
    bodies = [{"text": text} for text in (*GOOD, WITH_BEYOND, WITH_HUGE) * 2]
    with serving(engine_of(rows), max_wait=0.05) as (_, port):
        replies = together(port, bodies)
    alone = {text: rows.run([text], 1)[0] for text in GOOD}
    for body, (status, message, _) in zip(bodies, replies):
        if body["text"] == WITH_BEYOND:
            assert status == 400 and message["error"].startswith(NOT_KNOWN)
        elif body["text"] == WITH_HUGE:
            assert status == 500 and message["error"].startswith(NOT_FINITE)
        else:
            expected = alone[body["text"]]
            assert status == 200 and (message["label"], message["layers"]) == (expected.label, expected.layers)
    assert "Traceback" not in caplog.text and caplog.text.count(NOT_FINITE) == 2


def test_of_several_texts_in_a_request_each_has_its_answer_or_its_line(rows, overflow):
    with serving(engine_of(rows)) as (_, port):
        status, result, _ = ask(port, {"texts": [GOOD[0], WITH_BEYOND, GOOD[1], WITH_HUGE, ""]})
    assert status == 200 and [set(line) == {"error"} for line in result["answers"]] == [False, True, False, True, True]
    assert [answer["label"] for answer in result["answers"][:3:2]] == [answer.label for answer in rows.run(GOOD[:2])]


@pytest.mark.parametrize("which", ["rows", "decoder"])
@pytest.mark.parametrize("word, line", [(BEYOND, NOT_KNOWN), (HUGE, NOT_FINITE)], ids=["token", "logits"])
def test_run_reports_a_bad_line_with_its_number_and_answers_the_others(
    request, overflow, tmp_path, capsys, which, word, line
):
    runtime = request.getfixturevalue(which)
    (tmp_path / "lines.txt").write_text(f"{GOOD[0]}\nthe film was very {word}\n{GOOD[1]}\n")
    words = ["run", runtime.folder, tmp_path / "lines.txt", "--out", tmp_path / "out.jsonl", "--threads", 1]
    assert (
        main([str(word_or_path) for word_or_path in words] + (["--max-new-tokens", "4"] if which == "decoder" else []))
        == 1
    )
    first, bad, last = map(json.loads, (tmp_path / "out.jsonl").read_text().splitlines())
    key = "label" if which == "rows" else "text"
    assert [first[key], last[key]] == [getattr(runtime.run([text])[0], key) for text in GOOD[:2]]
    assert set(bad) == {"line", "error"} and bad["line"] == 2 and bad["error"].startswith(line)
    (error,) = [
        reported for reported in capsys.readouterr().err.splitlines() if reported.startswith("mini-ee run: line")
    ]
    assert error == f"mini-ee run: line 2: {bad['error']}"


def test_the_error_of_the_runtime_names_the_row_the_text_and_the_token(rows, decoder):
    with pytest.raises(
        ValueError, match="^row 1: expected token ids below 60, .* found 60 .'beyond'. in 'the film beyond'"
    ):
        rows.run([GOOD[0], WITH_BEYOND])
    with pytest.raises(ValueError, match="^expected token ids below 60, .* found 60 .'beyond'. in 'the film beyond'"):
        decoder.run([WITH_BEYOND])


def test_a_graph_that_fails_says_so_in_one_line(rows):
    encoded = rows.tokenizer.encode([WITH_BEYOND])  # not checked
    with pytest.raises(ValueError, match="model.onnx: ONNX Runtime cannot run this batch: .*idx=60") as error:
        rows.segments()._run(encoded.batch(slice(None)), {})
    assert "\n" not in str(error.value)


def test_a_padding_token_beyond_the_vocabulary_pads_all_the_same(rows, tmp_path):
    """As where [PAD] was added to a model's tokenizer: rows of different lengths in one batch, as each alone."""
    import shutil

    from mini_ee.lab.data.files import file_sha256

    folder = shutil.copytree(rows.folder, tmp_path / "padded")
    text = (folder / "tokenizer.json").read_text().replace("[PAD]", "[NONE]").replace(f'"{BEYOND}"', '"[PAD]"')
    (folder / "tokenizer.json").write_text(text)
    manifest = read_json(folder / "manifest.json")
    manifest["files"]["tokenizer.json"] = file_sha256(folder / "tokenizer.json")
    write_json(folder / "manifest.json", manifest)
    padded = Runtime(folder, threads=1)
    assert padded.tokenizer.pad_token_id == 60
    assert [answer.label for answer in padded.run(GOOD, 8)] == [rows.run([text])[0].label for text in GOOD]


def test_an_export_without_the_size_of_its_vocabulary_is_refused_with_advice(rows, tmp_path):
    folder = shutil.copytree(rows.folder, tmp_path / "exported")
    manifest = read_json(folder / "manifest.json")
    del manifest["backbone"]["vocab_size"]
    write_json(folder / "manifest.json", manifest)
    with pytest.raises(ValueError, match="has no key 'backbone.vocab_size'; export the run again"):
        Runtime(folder)


def test_training_and_export_say_which_tokens_the_model_does_not_have(
    checkpoint_folder, task_folder, tmp_path, capsys, caplog
):
    checkpoint = shutil.copytree(checkpoint_folder, tmp_path / "checkpoint")
    tokenizer = Tokenizer.from_folder(checkpoint)
    size = tokenizer.backend.get_vocab_size()
    tokenizer.backend.add_special_tokens(["<added>"])
    tokenizer.save(checkpoint / "tokenizer.json")
    words = ["train", "joint", "--model", checkpoint, "--task", task_folder, "--epochs", 1, "--out", tmp_path / "run"]
    assert main(list(map(str, words))) == 0
    line = f"the model has {size} tokens, its tokenizer has 1 beyond them: '<added>' ({size}). A text that contains"
    assert f"{checkpoint}: {line}" in capsys.readouterr().out
    with caplog.at_level(logging.WARNING):
        assert main(["export", str(tmp_path / "run"), "--out", str(tmp_path / "exported")]) == 0
    assert f"{tmp_path / 'run'}: {line}" in caplog.text
