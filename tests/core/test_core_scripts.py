"""The four scripts, with tiny settings; the files that they read; what train() promises. Mistakes are one line."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from torch import nn

from mini_ee import consistent, lora_exits, raee, self_supervised
from mini_ee.bert import Bert, Exits
from mini_ee.data import of_all, open_task, read_task, score_of, scored, usual_rules
from mini_ee.llama import Llama, TokenExits, generate, pieces, read_texts
from mini_ee.load import load_tokenizer
from mini_ee.rules import Never, Patience, Policy, Threshold
from mini_ee.train import script, task_loss, train

SCRIPTS = {
    lora_exits: lora_exits.LoRAOptions,
    raee: raee.RAEEOptions,
    consistent: consistent.ConsistentOptions,
    self_supervised: self_supervised.SelfSupervisedOptions,
}


def options_of(module, folder, **more):
    settings = {"model": str(folder), "exits": (1, 3), "epochs": 1, "rows": 60}
    return SCRIPTS[module](**(settings | more))


@pytest.mark.parametrize("module", [lora_exits, raee, consistent], ids=lambda module: module.__name__.split(".")[-1])
def test_a_script_prints_its_table_and_draws_twice_the_same(module, bert_folder, task_folder, tmp_path, capsys):
    options = options_of(module, bert_folder, task=str(task_folder), picture=str(tmp_path / "exits.png"))
    printed = []
    for _ in range(2):
        module.main(options)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1]
    assert "on 20 test rows" in printed[0] and "full model" in printed[0] and "The paper" in printed[0]
    assert (tmp_path / "exits.png").stat().st_size > 1000


def test_the_script_of_self_supervised_exits(llama_folder, tmp_path, capsys):
    more = {"rows": 120, "picture": str(tmp_path / "exits.png"), "prompt": "the film"}
    options = options_of(self_supervised, llama_folder, **more)
    printed = []
    for _ in range(2):
        self_supervised.main(options)
        printed.append(capsys.readouterr().out)
    assert printed[0] == printed[1] and "agreement" in printed[0] and "layers a token" in printed[0]


def test_consistentee_on_tokens(llama_folder, tmp_path):
    """With a high price of depth tokens stop early, and those of other texts are continued."""
    words = "the film was very good and the meal was bad " * 8
    (tmp_path / "texts.txt").write_text("\n\n".join(f"{words}{'good ' * row}" for row in range(20)))
    texts = pieces(read_texts(tmp_path / "texts.txt"), load_tokenizer(llama_folder), 2, 64)
    torch.manual_seed(0)
    model = TokenExits(Llama.load(llama_folder), (1, 3))
    model.policies = consistent.policy_networks(16, (1, 3))
    settings = consistent.Settings(alpha=2.0, guided=False, epochs=1, rounds=1, policy_epochs=2)
    consistent.fit_tokens(model.eval(), texts[:16], texts[16:], settings)
    full, policy = (generate(model, rule, texts[16:, :32].tolist(), 4) for rule in (Never(), Policy()))
    assert np.mean([text.layers for text in policy]) < np.mean([text.layers for text in full]) == 3


@pytest.mark.parametrize("module", SCRIPTS, ids=lambda module: module.__name__.split(".")[-1])
def test_help_fits_on_a_screen_and_a_mistake_is_one_line(module, tmp_path, monkeypatch, capsys):
    for status, argv in ((0, ["--help"]), (2, ["--model", str(tmp_path)])):
        monkeypatch.setattr(sys, "argv", ["script", *argv])
        with pytest.raises(SystemExit) as stopped:
            script(module.main, SCRIPTS[module], module.__doc__)
        printed = capsys.readouterr()
        assert stopped.value.code == status and len(printed.out.splitlines()) <= 25
    assert printed.out == "" and len(printed.err.splitlines()) == 1 and str(tmp_path) in printed.err


WRONG = {
    "--rows 0": "--rows must be at least 1, got 0",
    "--epochs -1": "--epochs must be at least 1, got -1",
    "--seed -1": "--seed must be at least 0, got -1",
    "--lr nan": "--lr must be at least 0.* got nan",
    "--exits a,b": "argument --exits: .* 'a,b'",
    "--picture no/exits.png": "--picture no/exits.png: its folder is not there",
}


@pytest.mark.parametrize("given", WRONG)
def test_a_wrong_option_is_one_line_before_the_training(given, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["script", *given.split()])
    with pytest.raises(SystemExit) as stopped:
        script(pytest.fail, lora_exits.LoRAOptions, lora_exits.__doc__)
    printed = capsys.readouterr()
    assert stopped.value.code == 2 and printed.out == "" and re.fullmatch(f".*{WRONG[given]}.*\n", printed.err)


@pytest.mark.parametrize("paper", ["raee", "self_supervised"])
def test_a_paper_is_a_script(paper, tmp_path):
    done = subprocess.run([sys.executable, "-m", f"mini_ee.{paper}", "--task", "no"], capture_output=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.decode().lower().startswith("error: no: no such file")


# ---- Files ----


def read(folder, bert_folder, name, content, **more):
    (folder / name).write_text(content)
    return read_task(folder / name, load_tokenizer(bert_folder), **more)


TEXTS = ("the film", "a meal"), ("the book", "very bad"), ("a song", "the room"), ("fine", "dull"), ("a", "the")


def test_pairs_have_kinds_and_a_single_file_is_split(tmp_path, bert_folder):
    lines = [json.dumps({"sentence1": a, "sentence2": b, "label": row % 2}) for row, (a, b) in enumerate(TEXTS)]
    learn, test = read(tmp_path, bert_folder, "pairs.jsonl", "\n".join(lines))
    assert (len(learn), len(test), learn.names) == (4, 1, ("0", "1"))
    assert all(set(kinds) == {0, 1} for kinds in (*learn.kinds, *test.kinds))
    batch = learn.batch([0, 1])
    assert batch.ids.shape == batch.mask.shape == batch.kinds.shape and (batch.ids[batch.mask == 0] == 0).all()


def test_numbers_with_a_point_are_a_regression_and_others_are_classes(tmp_path, bert_folder):
    for values, names in ((("1.5", "2", "3", "0.25", "5"), ()), (("10", "9", "9", "10", "2"), ("10", "2", "9"))):
        table = "sentence\tscore\n" + "".join(f"{a}\t{value}\n" for (a, _), value in zip(TEXTS, values))
        task = read(tmp_path, bert_folder, "numbers.tsv", table)
        assert task.learn.outputs == (len(task.learn.names) or 1) and bool(task.learn.names) == bool(names)
        assert task.learn.labels.is_floating_point() == (not names)
        assert list(task.learn.names) == sorted(task.learn.names, key=float)


def test_classes_are_those_of_all_training_rows(tmp_path, bert_folder):
    """A class that no drawn row has is one of the test's, nevertheless."""
    table = "sentence\tlabel\n" + "".join(f"the film\t{label}\n" for label in "aaaaaaaaab" * 10)
    learn, test = read(tmp_path, bert_folder, "rare.tsv", table, most=2)
    assert learn.names == ("a", "b") and len(learn) == 2 and len(test) == 20


STRANGE = {
    "a.txt": ("sentence\tlabel\n", "expected .tsv, .csv, .jsonl, found '.txt'"),
    "b.tsv": ("words\tlabel\na\t1\nb\t0\nc\t1\nd\t0\ne\t1\n", "expected the columns sentence"),
    "c.tsv": ("sentence\tlabel\na\t1\nb\n", "row 2 does not have one value"),
    "d.jsonl": ('{"sentence": "a", "label": 1}\n{', "not a .jsonl file"),
    "e.csv": ("", "expected rows for training"),
    "f.tsv": ("sentence\tlabel\n" + "".join(f"a\t{label}\n" for label in "abcde"), "is not one of the training's"),
}


@pytest.mark.parametrize("name", STRANGE)
def test_a_strange_file_is_one_line(name, tmp_path, bert_folder):
    content, problem = STRANGE[name]
    with pytest.raises(ValueError, match=problem) as raised:
        read(tmp_path, bert_folder, name, content)
    assert "\n" not in str(raised.value)


def test_the_built_in_reviews_are_a_task():
    learn, test = open_task("", "bert", 128, 50, 0)
    assert len(learn) == 50 and len(test) == 600 and learn.names == ("0", "1")


def test_texts_are_cut_to_pieces_and_short_ones_left_out(tmp_path, bert_folder):
    (tmp_path / "texts.txt").write_text("the film was good\n\na meal\n\nthe book was very bad")
    cut = pieces(read_texts(tmp_path / "texts.txt"), load_tokenizer(bert_folder), 2, 5)
    assert cut.shape == (2, 5) and (cut[:, 0] == 2).all()


# ---- Training ----


def test_a_regression_learns_and_exits_by_patience(bert_folder, tmp_path):
    """The number is the count of a word: Pearson's correlation of the last exit is high, and patience saves layers."""
    table = "".join(f"{'good ' * (n % 5)}{'the ' * (n % 3)}\t{n % 5}.0\n" for n in range(200))
    learn, test = read(tmp_path, bert_folder, "numbers.tsv", "sentence\tscore\n" + table)
    torch.manual_seed(0)
    model = Exits(Bert.load(bert_folder), (1, 2, 3), learn.outputs)

    def loss(rows):
        logits = model(learn.batch(rows.numpy()))
        return task_loss(logits.flatten(0, 1), learn.labels[rows].repeat_interleave(3))

    train({model: 3e-3}, len(learn), loss, epochs=15)
    full, patient = (scored(model, rule, test) for rule in (Never(), usual_rules(test)["patience 1"]))
    assert full[0] > 0.8 and patient[1] < 3 and patient[2] > 0
    assert isinstance(usual_rules(test)["patience 1"], Patience)


def test_the_best_epoch_stays_and_only_what_is_named_learns():
    torch.manual_seed(0)
    model = nn.ModuleDict({"learns": nn.Linear(2, 1), "frozen": nn.Linear(2, 1)})
    before, scores, weights = model["frozen"].weight.clone(), iter([1.0, 3.0, 2.0]), []

    def score():
        weights.append(model["learns"].weight.detach().clone())
        return next(scores)

    x = torch.randn(8, 2)
    best = train(
        {model["learns"]: 0.1}, 8, lambda rows: model["frozen"](model["learns"](x[rows]) * x[rows]).pow(2).mean(), 3,
        score=score,
    )  # fmt: skip
    assert best == 3.0 and torch.equal(model["learns"].weight, weights[1]) and not torch.equal(weights[1], weights[2])
    assert torch.equal(model["frozen"].weight, before)
    unbeaten = model["learns"].weight.detach().clone()
    learned = model["learns"]
    train({learned: 0.1}, 8, lambda rows: learned(x[rows]).mean(), 1, score=lambda: 3.0, to_beat=3.0)
    assert torch.equal(model["learns"].weight, unbeaten)


def test_a_training_that_diverges_is_an_error():
    layer = nn.Linear(1, 1)
    with pytest.raises(ValueError, match="diverged"):
        train({layer: 1.0}, 4, lambda rows: layer(torch.full((1, 1), torch.inf)).sum(), 1)


def test_policies_learn_to_stop_early_where_depth_has_a_price(bert_folder, task_folder):
    """ConsistentEE, steps 1 to 4: with a high price all examples stop at the first exit, without one they go deeper."""
    layers = []
    for alpha in (0.0, 5.0):
        torch.manual_seed(0)
        learn, test = open_task(str(task_folder), str(bert_folder), 24, None, 0)
        model = consistent.PolicyExits(Bert.load(bert_folder), (1, 2, 3), 2).eval()
        settings = consistent.Settings(alpha, guided=False, epochs=4, lr=1e-3, rounds=1)
        consistent.fit_rows(model, learn, test, settings)
        layers.append(scored(model, Policy(), test)[1])
    assert layers[1] == 1.0 < layers[0]


def test_heads_of_a_decoder_learn_to_agree_with_it(llama_folder):
    model = TokenExits(Llama.load(llama_folder), (1, 3)).eval()
    texts = self_supervised.written(model.llama, [[2, 7], [2, 9, 11]], 40, seed=0)
    assert (texts[::2, :2] == torch.tensor([2, 7])).all() and (texts[1::2, :3] == torch.tensor([2, 9, 11])).all()
    assert torch.equal(texts, self_supervised.written(model.llama, [[2, 7], [2, 9, 11]], 40, seed=0))
    before = self_supervised.confidence_and_agreement(self_supervised.logits_of(model, texts))[1].mean()
    self_supervised.fit(model, texts, epochs=6, lr=1e-2)
    logits = self_supervised.logits_of(model, texts)
    assert self_supervised.confidence_and_agreement(logits)[1].mean() > before + 0.05
    rule = self_supervised.calibrate(logits, 0.7)
    assert isinstance(rule, Threshold) and rule.threshold[-1] == -np.inf


def test_scores():
    logits = np.array([[[2.0, 1.0]], [[0.0, 1.0]]])[:, 0]
    assert score_of(logits, torch.tensor([0, 0])) == 0.5
    assert score_of(np.array([[1.0], [2.0], [4.0]]), torch.tensor([2.0, 4.0, 8.0])) == pytest.approx(1.0)


def test_of_all_keeps_the_order_of_the_rows(bert_folder, task_folder):
    learn, _ = open_task(str(task_folder), str(bert_folder), 24, None, 0)
    lengths = of_all(lambda inputs: inputs.mask.sum(1), learn)
    assert lengths.tolist() == [len(ids) for ids in learn.ids]
