"""`mini-ee add-exits`: the model stays as it is, the agreement is that of the exported graph, refusals are one line."""

import json
import re
import shutil
from math import comb
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from lab_fixtures import one_number_of
from method_cases import TEXTS, few_epochs_and_no_picture  # noqa: F401

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation.plots import can_draw
from mini_ee.lab.export import add_exits as add_exits_module
from mini_ee.lab.export.add_exits import card, line_of
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.rules import Never
from mini_ee.lab.training import doubts
from mini_ee.lab.training.holdout import split_rows

EXACT = 1e-6
"""Of a logit, against the classifier written out; measured maximum 1.2e-7."""


def call(model, out, agreement, **options):
    run = mini_ee.add_exits(model, TEXTS, out, agreement=agreement, **options)
    return SimpleNamespace(run=run, summary=read_json(out / "summary.json"))


@pytest.fixture(scope="module")
def added(tmp_path_factory, classifier_folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_exits_module, "can_draw", can_draw)
        return call(classifier_folder, tmp_path_factory.mktemp("added") / "fast", 0.9)


def test_what_does_not_exit_early_gets_the_models_own_logits(added, classifier_folder):
    """The oracle is BERT's classifier written out: the pooler's output times the classifier's weights."""
    inputs = added.run.encode(TEXTS[:40]).batch(slice(None))
    ids, mask, types = (torch.from_numpy(x) for x in (inputs.input_ids, inputs.attention_mask, inputs.token_type_ids))
    backbone = load_backbone(classifier_folder)
    weights = backbone.classification_head.weights
    with torch.no_grad():
        pooled = backbone.pooled(backbone(ids, mask, types))
        expected = (pooled @ weights["out.weight"].T + weights["out.bias"]).numpy()
    for segments in (added.run.segments(), Runtime(added.run.folder.parent / "exported").segments()):
        logits = early_exit(segments, Never(), inputs).logits
        np.testing.assert_allclose(logits, expected, atol=EXACT if segments.engine == "torch" else 1e-5)


def test_the_model_is_not_written_again_and_its_head_is_not_trained(added, classifier_folder):
    config = read_json(added.run.folder / "config.json")
    assert config["backbone"]["folder"] == str(classifier_folder) and not (added.run.folder / "backbone").exists()
    assert added.run.label_names == ["bad", "good"]


def test_the_summary_counts_what_the_exported_graph_answers(added):
    summary, runtime = added.summary, Runtime(added.run.folder.parent / "exported")
    trained, held, tested = (summary["texts"][key] for key in ("trained", "held_out", "tested"))
    assert trained == int(0.6 * len(TEXTS)) and trained + held + tested == len(TEXTS)
    assert sum(summary["exit_counts"]) == tested and summary["exits"] == list(added.run.exits)
    assert summary["exit_counts"] == runtime.config["exit_counts"]  # so a server knows which exits to expect
    assert runtime.config["guarantee"]["epsilon"] == 1 - summary["guarantee"]["max_loss"]  # and which agreement
    curve = runtime.config["curve"]  # by which a request's agreement becomes a threshold; no text has a label
    assert curve["rows"] == tested and curve["points"][-1] == ["inf", 1.0, None, float(summary["exits"][-1])]
    assert summary["per_exit_agreement"][-1] == 1.0
    low, high = summary["agreement_interval"]
    assert low <= summary["agreement"] <= high and summary["layers_saved"] > 0 and summary["speedup"] > 0
    answers = runtime.run(TEXTS)
    full = early_exit(runtime.segments(), Never(), runtime.encode(TEXTS).batch(slice(None))).logits.argmax(1)
    equal = np.mean([answer.label == runtime.label_names[best] for answer, best in zip(answers, full)])
    assert equal >= 0.9 - 0.05


def test_more_layers_run_if_more_must_agree(added, classifier_folder, tmp_path):
    strict = call(classifier_folder, tmp_path / "strict", 0.999)
    assert strict.summary["mean_layers"] >= added.summary["mean_layers"]
    assert strict.summary["guarantee"] is None and "is not guaranteed" in line_of(strict.summary)


@pytest.fixture(scope="module")
def shorter(classifier_folder, tmp_path_factory):
    """A run with named exits, of a model that reads 6 tokens; a first call was killed before its first state."""
    out = tmp_path_factory.mktemp("shorter")
    folder = shutil.copytree(classifier_folder, out / "model")
    settings = '{"tokenizer_class": "PreTrainedTokenizerFast", "model_max_length": 6}'
    (folder / "tokenizer_config.json").write_text(settings)
    (out / "fast" / "run.training").mkdir(parents=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(add_exits_module, "LEAST_SAVED", 1.0)  # nothing is exported
        return mini_ee.add_exits(folder, TEXTS[::2], out / "fast", agreement=0.9, exits=(1, 2, 3))


def test_texts_are_cut_where_the_models_own_tokenizer_cuts_them(added, shorter, classifier_folder):
    assert added.run.config["max_length"] == load_backbone(classifier_folder).config.max_tokens
    assert shorter.config["max_length"] == 6


def test_the_exits_that_are_named_are_kept_by_a_call_after_one_that_was_killed_before_its_first_state(shorter):
    assert shorter.exits == (1, 2, 3)


def test_the_card_and_the_line_say_what_was_measured(added):
    text = (added.run.folder.parent / "README.md").read_text()
    assert text == card(added.summary) and line_of(added.summary) in text
    assert f"on {added.summary['agreement']:.1%} of {added.summary['texts']['tested']:,} test texts" in text


def few(folder, count=3, content=None):
    (folder / "few.txt").write_text(content or "".join(f"the film {i}\n" for i in range(count)))
    return folder / "few.txt"


REFUSED = [
    (lambda tmp, classifier, plain: [plain, "--text", few(tmp, 200)], "expected a fine-tuned classifier"),
    (
        lambda tmp, classifier, plain: [classifier, "--text", few(tmp)],
        "expected at least 100 different texts .* found 3; about",
    ),
    (lambda tmp, classifier, plain: [classifier, "--text", few(tmp, content="\n")], "expected texts, found none"),
    (lambda tmp, classifier, plain: [classifier, "--text", tmp / "none.txt"], "none.txt"),
    (
        lambda tmp, classifier, plain: [classifier, "--text", few(tmp, 200), "--agreement", "1.5"],
        "agreement must be a number above 0 and of at most 1",
    ),
    (
        lambda tmp, classifier, plain: [classifier, "--text", few(tmp, 200), "--agreement", "1"],
        "agreement 1 .* no test on texts",
    ),
    (
        lambda tmp, classifier, plain: [classifier, "--text", few(tmp, 200), "--exits", "2"],
        "exits must ascend .* end at the last",
    ),
]


# ---- A model that predicts a number ----


@pytest.fixture(scope="module")
def regression_folder(tmp_path_factory, classifier_folder):
    return one_number_of(classifier_folder, tmp_path_factory.mktemp("regression") / "model", 200)


@pytest.fixture(scope="module")
def numbers(tmp_path_factory, regression_folder):
    return call(regression_folder, tmp_path_factory.mktemp("numbers") / "fast", 0.75, tolerance=0.24)


def test_numbers_agree_within_the_tolerance(numbers):
    """The share is counted by hand, from what the exported graph answers and what the whole model answers."""
    summary, runtime = numbers.summary, Runtime(numbers.run.folder.parent / "exported")
    assert summary["pays"] and summary["tolerance"] == 0.24 and summary["rule"]["name"] == "patience"
    assert summary["guarantee"]["tolerance"] == 0.24 and summary["guarantee"]["max_loss"] == 0.25
    texts = split_rows(
        add_exits_module._task((), tuple((text,) for text in TEXTS)), 0, int(0.6 * len(TEXTS))
    ).test.texts
    full = early_exit(runtime.segments(), Never(), runtime.encode(texts).batch(slice(None))).logits[:, 0]
    early = np.array([answer.label for answer in runtime.run(texts)])
    assert summary["agreement"] == pytest.approx(np.mean(abs(early - full) <= 0.24), abs=1 / len(texts))
    assert (
        "within 0.24" in line_of(summary) and line_of(summary) in (numbers.run.folder.parent / "README.md").read_text()
    )


def test_by_default_the_tolerance_is_a_tenth_of_the_deviation_of_the_numbers(regression_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", 1.0)  # nothing is exported
    result = call(regression_folder, tmp_path / "fast", 0.8)
    task = add_exits_module._task((), tuple((text,) for text in TEXTS))
    texts = split_rows(task, 0, int(0.6 * len(TEXTS))).train.texts
    rows = result.run.encode(texts).batch(slice(None))
    outputs = early_exit(result.run.segments(), Never(), rows).logits[:, 0]
    assert result.summary["tolerance"] == pytest.approx(0.1 * outputs.std(), rel=1e-4)


def test_a_tolerance_for_classes_is_refused(classifier_folder, tmp_path):
    with pytest.raises(WrongArguments, match="--tolerance is for a model that predicts a number"):
        mini_ee.add_exits(classifier_folder, TEXTS, tmp_path / "fast", tolerance=0.5)


# ---- What was written ----


def test_the_curve_has_a_point_per_threshold_and_is_drawn(added):
    curve, out = added.summary["curve"], added.run.folder.parent
    saved, agreement = ([point[key] for point in curve] for key in ("layers_saved", "agreement"))
    assert len(curve) > 5 and saved == sorted(saved) and min(agreement) < max(agreement)
    assert (out / "curve.png").read_bytes().startswith(b"\x89PNG")
    assert any(point["rule"]["threshold"] >= added.summary["rule"]["threshold"] for point in curve)


def test_if_it_does_not_pay_nothing_is_exported_and_the_summary_is_printed(
    classifier_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", 0.95)
    (tmp_path / "in.txt").write_text("\n".join(TEXTS[::2]))
    argv = ["add-exits", classifier_folder, "--text", tmp_path / "in.txt", "--out", tmp_path / "fast", "--json"]
    assert main([str(word) for word in argv]) == 0
    printed, summary = capsys.readouterr(), read_json(tmp_path / "fast" / "summary.json")
    assert "Early exit does not pay here" in printed.err
    answer = json.loads(printed.out)
    assert answer["out"] == str(tmp_path / "fast") and answer["exits"][-1] == 3
    assert summary["agreement"] == answer["agreement"]
    assert summary["pays"] is False and summary["curve"] and not (tmp_path / "fast" / "exported").exists()
    assert card(summary) == (tmp_path / "fast" / "README.md").read_text()


def test_a_call_that_was_killed_before_the_export_goes_on_with_it(classifier_folder, tmp_path, monkeypatch):
    def killed(*given, **named):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(add_exits_module, "export", killed)
        call(classifier_folder, tmp_path / "fast", 0.9)
    before = (tmp_path / "fast" / "run" / "model.safetensors").stat().st_mtime_ns
    with pytest.raises(FileExistsError, match="holds a call with other texts or options"):
        call(classifier_folder, tmp_path / "fast", 0.8)
    monkeypatch.setattr(add_exits_module, "train", killed)
    assert call(classifier_folder, tmp_path / "fast", 0.9).summary["pays"]
    assert (tmp_path / "fast" / "run" / "model.safetensors").stat().st_mtime_ns == before
    with pytest.raises(FileExistsError, match="is there already"):
        call(classifier_folder, tmp_path / "fast", 0.9)


def test_a_call_that_was_killed_does_not_go_on_with_another_tokenizer(classifier_folder, tmp_path, monkeypatch):
    model = shutil.copytree(classifier_folder, tmp_path / "model")
    with monkeypatch.context() as patch, pytest.raises(TypeError):
        patch.setattr(add_exits_module, "export", None)
        call(model, tmp_path / "fast", 0.9)
    (model / "tokenizer.json").write_text((model / "tokenizer.json").read_text().replace("[UNK]", "[NEW]"))
    with pytest.raises(FileExistsError, match="holds a call with another tokenizer.json; name another folder"):
        call(model, tmp_path / "fast", 0.9)


# ---- Lines that stand in the file again and again ----

FREQUENT = [TEXTS[at] for at in (5, 70, 71, 200)]


@pytest.fixture(scope="module")
def frequent(tmp_path_factory, classifier_folder):
    """A third of the lines are one of four texts."""
    lines, out = [*TEXTS, *FREQUENT * 40], tmp_path_factory.mktemp("frequent") / "fast"
    mini_ee.add_exits(classifier_folder, lines, out, agreement=0.9)
    return SimpleNamespace(lines=lines, summary=read_json(out / "summary.json"), exported=Runtime(out / "exported"))


def test_a_line_counts_as_often_as_it_stands_in_the_file_and_heads_learn_from_it_once(frequent):
    """The shares are counted by hand, line by line."""
    summary, runtime = frequent.summary, frequent.exported
    task = add_exits_module._task(("a", "b"), tuple((text,) for text in frequent.lines))
    parts = split_rows(task, 0, int(0.6 * len(frequent.lines)))
    sizes = {"trained": len(set(parts.train.texts)), "held_out": len(parts.selection), "tested": len(parts.test)}
    assert summary["texts"] == sizes and len(set(parts.test.texts)) < 0.8 * len(parts.test)
    full = early_exit(runtime.segments(), Never(), runtime.encode(parts.test.texts).batch(slice(None))).logits
    answers = runtime.run(parts.test.texts)
    equal = [answer.label == runtime.label_names[at] for answer, at in zip(answers, full.argmax(1))]
    assert summary["agreement"] == pytest.approx(np.mean(equal))
    assert summary["exit_counts"] == [sum(answer.layers == layer for answer in answers) for layer in summary["exits"]]
    assert summary["guarantee"]["rows"] == runtime.config["curve"]["rows"] == len(parts.test)


def test_what_passed_no_test_has_its_exact_bound_and_the_card_says_who_chose(classifier_folder, tmp_path, added):
    strict = call(classifier_folder, tmp_path / "strict", 0.999).summary
    tested, differ = strict["texts"]["tested"], round((1 - strict["agreement"]) * strict["texts"]["tested"])
    bound, text = strict["agreement_bound"], (tmp_path / "strict" / "README.md").read_text()
    at_most = sum(comb(tested, n) * (1 - bound) ** n * bound ** (tested - n) for n in range(differ + 1))
    assert at_most == pytest.approx(0.05, abs=1e-4)  # Clopper and Pearson: so few differ with a probability of 5 %
    assert strict["guarantee"] is None and f"lower 95% confidence bound {bound:.1%}" in line_of(strict) in text
    assert "chose the thresholds, too" in text and "tested them" not in text
    passed = (added.run.folder.parent / "README.md").read_text()
    assert "tested them" in passed and "confidence bound" not in passed and "A guarantee is for one call" in passed


def test_a_model_with_one_prediction_for_nearly_all_texts_says_so_before_the_guarantee(
    classifier_folder, tmp_path, monkeypatch
):
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", 1.0)  # nothing is exported
    monkeypatch.setattr(doubts, "DOMINANT", 0.4)
    lines = []
    mini_ee.add_exits(classifier_folder, TEXTS, tmp_path / "fast", agreement=0.9, say=lines.append)
    warning = read_json(tmp_path / "fast" / "summary.json")["majority_warning"]
    assert re.fullmatch(r"The model predicts (bad|good) for \d+\.\d% of the held-out texts: .*", warning)
    assert warning in lines


@pytest.mark.parametrize(("argv", "message"), REFUSED)
def test_wrong_input_is_one_line(argv, message, tmp_path, classifier_folder, checkpoint_folder, capsys):
    arguments = argv(tmp_path, classifier_folder, checkpoint_folder)
    assert main(["add-exits", *map(str, arguments), "--out", str(tmp_path / "fast")]) in (1, 2)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1
    assert re.search(message, error), error
    assert not (tmp_path / "fast" / "exported").exists()
