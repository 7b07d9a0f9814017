"""Texts for a decoder to write, and the commands that train ConsistentEE and CALM on one and compare them."""

import json
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import tokenizers
import torch
from t5_cases import unigram

import mini_ee.lab.baselines.calm as calm
import mini_ee.lab.evaluation.comparison as measure_compare
import mini_ee.lab.evaluation.token_evaluation as measure_texts
import mini_ee.lab.methods.consistent as consistent
import mini_ee.lab.training.default_rule as default_rule
import mini_ee.lab.training.training_text as training_texts
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, save_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text, continuations, copies, read_stories
from mini_ee.lab.data.metrics import rouge_l
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.generation import Sampling
from mini_ee.lab.exits.token_exits import TextData, TokenExits
from mini_ee.lab.rules import Policy, rule_from_dict
from mini_ee.lab.training import policies
from mini_ee.lab.training.run_folder import load_run, write_rule
from mini_ee.lab.training.train_settings import TextOptions
from mini_ee.lab.training.training_text import Source

SHARED = os.environ.get("MINI_EE_SHARED")
NAMES, THINGS = ("Tom", "Lily", "Ben", "Mia", "Sam"), ("ball", "cat", "tree", "boat", "hat", "dog")
STORIES = [
    f"{name} had a {'big' if i % 2 else 'red'} {thing}. {name} gave the {thing} to {NAMES[i % 5]} one day."
    for i, (name, thing) in enumerate((name, thing) for name in NAMES for thing in THINGS)
] * 2


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory):
    """A random 3-layer Llama over single bytes and an end token, with a context of 96 tokens."""
    folder = tmp_path_factory.mktemp("writing") / "llama"
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: i + 1 for i, letter in enumerate(alphabet)} | {"<end>": 0}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.add_special_tokens(["<end>"])
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    config = DecoderConfig.from_hugging_face(
        {
            "model_type": "llama",
            "vocab_size": len(vocabulary),
            "hidden_size": 16,
            "num_hidden_layers": 3,
            "num_attention_heads": 2,
            "intermediate_size": 32,
            "max_position_embeddings": 96,
            "eos_token_id": 0,
            "bos_token_id": 0,
        }
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_backbone(Decoder(config), folder)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "stories.txt"
    path.write_text("\n<|endoftext|>\n".join(STORIES), encoding="utf-8")
    return path


SMALL = {
    training_texts: {"HELD_STORIES": 12, "GIVEN": 20, "FOLLOW": 5},
    measure_compare: {"TESTED_TEXTS": 4, "TIMED_TEXTS": 1},
    measure_texts: {"TIMED_DECODINGS": 1},
    calm: {"TOLERANCE": 0.9},
    default_rule: {"PASSING": (0.2, 0.5, 0.8)},
}


def make_small(patch):
    for module, values in SMALL.items():
        for name, value in values.items():
            patch.setattr(module, name, value)


@pytest.fixture(autouse=True)
def small(monkeypatch):
    make_small(monkeypatch)


def ask(capsys, *argv):
    """Exit status, and the JSON answer or the one line of an error."""
    status = main([*map(str, argv), "--json"])
    out, err = capsys.readouterr()
    return status, json.loads(out) if out else err.strip()


# ---- Texts ----


def test_stories_stand_between_end_tokens(tmp_path, text_file):
    assert read_stories(text_file) == STORIES
    (tmp_path / "empty").write_text(" \n<|endoftext|>\n ")
    (tmp_path / "latin").write_bytes("Märchen".encode("latin-1"))
    for name, error, message in (
        ("none", FileNotFoundError, "No such file or directory"),
        (
            "empty",
            ValueError,
            r"expected texts, found none; texts are separated by <\|endoftext\|> or, in",
        ),
        ("latin", ValueError, "expected text in UTF-8, found .* at byte 1"),
    ):
        with pytest.raises(error, match=message):
            read_stories(tmp_path / name)


def test_without_end_tokens_blank_lines_stand_between_the_texts(tmp_path):
    path = tmp_path / "paragraphs.txt"
    path.write_text("\n\nOne\ntext.\n \t\n\nAnother.\r\n\r\nA third.\n", encoding="utf-8")
    assert read_stories(path) == ["One\ntext.", "Another.", "A third."]
    path.write_text("One.\n\nStill one.<|endoftext|>Two.", encoding="utf-8")
    assert read_stories(path) == ["One.\n\nStill one.", "Two."]


def test_a_continuation_gives_the_beginning_and_asks_for_what_follows(decoder_folder):
    backend = Tokenizer.from_folder(decoder_folder).backend
    backend.no_truncation()
    texts = continuations(backend, ["abcdefgh", "abc", "ABCDEFGHIJ"], 3, 5)
    assert [
        (backend.decode(text.ids[: text.start + 1]), backend.decode(text.ids[text.start + 1 :])) for text in texts
    ] == [
        ("abc", "defgh"),
        ("ABC", "DEFGH"),
    ]


@pytest.mark.parametrize("folder", ["tiny", "built in"])
def test_a_copy_gives_a_sentence_and_asks_for_it_again(decoder_folder, folder):
    backend = Tokenizer.from_folder(decoder_folder if folder == "tiny" else BUILT_IN_DECODER, 512).backend
    backend.no_truncation()
    texts = copies(
        backend, ["A cat sat down. No! The dog ran off again.", "A cat sat down. Too long a sentence"], 0, (3, 5)
    )
    given = [backend.decode(text.ids[: text.start + 1]) for text in texts]
    assert given == ["A cat sat down.\n", "The dog ran off again.\n"]
    for copied, sentence in zip(texts, given):
        assert backend.decode(copied.ids[copied.start + 1 : -1]) == sentence.strip() and copied.ids[-1] == 0


def test_a_copy_by_a_tokenizer_that_ends_texts_asks_for_the_whole_sentence_and_ends_once():
    backend = unigram()
    (copied,) = copies(backend, ["the film was good."], 1, (3, 5))
    pieces = [backend.id_to_token(token) for token in copied.ids]
    assert pieces[: copied.start + 1] == pieces[copied.start + 1 : -1] and pieces.count("</s>") == 1


# ---- Commands ----


@pytest.fixture(scope="module")
def runs(decoder_folder, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    shared = ("--model", str(decoder_folder), "--text", str(text_file), "--epochs", "2", "--batch-size", "8")
    with pytest.MonkeyPatch.context() as patch:
        make_small(patch)
        for method, more in (("consistent", ("--alpha", "0.01", "--rounds", "1")), ("calm", ())):
            assert main(["train", method, *shared, *more, "--exits", "1,2,3", "--out", str(folder / method)]) == 0
    return folder


def test_a_run_says_what_it_is(runs):
    config = json.loads((runs / "consistent" / "config.json").read_text())
    assert config["method"] == "consistent" and config["exits"] == [1, 2, 3]
    assert config["rule"] == {"name": "policy", "cut": 0.5}
    assert config["settings"]["alpha"] == 0.01 and config["settings"]["reward"] == "vanilla"
    assert config["text"]["kind"] == "continue" and config["rank"] == 8
    metrics = json.loads((runs / "calm" / "metrics.json").read_text())
    assert list(metrics["own"]) == list(metrics["sweep"]) == ["gap", "saturation", "classifier"]


def test_compare_measures_every_rule_against_the_full_model(runs, capsys, tmp_path):
    picture = tmp_path / "curves.png"
    status, answer = ask(
        capsys, "compare", runs / "consistent", runs / "calm", "--sweep", "--max-rows", 2, "--picture", picture
    )
    assert status == 0 and answer["texts"] == 2
    assert [row["measure"] for row in answer["rows"]] == [
        *("full model", "policy"),
        *("full model", "gap", "saturation", "classifier"),
    ]
    for row in answer["rows"]:
        if row["measure"] == "full model":
            assert row["mean_layers"] == 3 and row["layers_saved"] == 0 and not row["curve"]
        else:
            assert len(row["curve"]) == 3
            layers = [point["mean_layers"] for point in row["curve"]]
            assert layers[0] >= layers[-1]
        for point in (row, *row["curve"]):
            assert 0 <= point["rouge_l"] <= 1 and point["tokens_per_second"] > 0
            assert point["layers_saved"] == pytest.approx(1 - point["mean_layers"] / 3)
    first, second = (row for row in answer["rows"] if row["measure"] == "full model")
    assert first["rouge_l_reference"] == second["rouge_l_reference"]  # one seed, one backbone
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_a_calibrated_rule_of_the_same_name_stands_beside_it_too(runs, capsys, tmp_path):
    shutil.copytree(runs / "consistent", tmp_path / "run")
    write_rule(tmp_path / "run", Policy(0.25), None, [1, 1, 1])
    status, answer = ask(capsys, "compare", tmp_path / "run", "--max-rows", 1)
    assert status == 0
    cuts = {row["measure"]: row["rule"].get("cut") for row in answer["rows"]}
    assert cuts == {"full model": None, "policy": 0.5, "policy, calibrated": 0.25}


def test_rouge_l_against_the_full_model_is_the_mean_over_texts(runs, capsys, monkeypatch):
    pairs = []
    monkeypatch.setattr(measure_texts, "rouge_l", lambda *pair: (pairs.append(pair), rouge_l(*pair))[1])
    status, answer = ask(capsys, "compare", runs / "consistent", "--max-rows", 3)
    assert status == 0
    rouge = [rouge_l(*pair) for pair in pairs]  # of two rules, against the full model and the references, three each
    rows = [(row["rouge_l"], row["rouge_l_reference"]) for row in answer["rows"]]
    np.testing.assert_allclose(rows, np.reshape(rouge, (2, 2, 3)).mean(2))
    run = load_run(runs / "consistent")
    some, _ = measure_compare._cases(run, None, 3, Sampling())
    for text, (_, reference) in zip(some, pairs[3:6], strict=True):
        given, whole = (run.tokenizer.backend.decode(ids) for ids in (text.ids[: text.start + 1], text.ids))
        assert given and (given + reference).replace(" ", "") == whole.replace(" ", "")


def test_calm_tests_its_rules_on_held_out_texts_that_did_not_propose_them(runs, monkeypatch):
    run, requested = load_run(runs / "calm"), {"proposing": [], "tested": []}
    held = TextData([Text([0, *range(20 + at, 28 + at)], 3) for at in range(12)])
    source = Source(run.model.backbone, run.tokenizer, TextOptions(), 0)
    right, write = calm.record_texts, TokenExits.write
    monkeypatch.setattr(
        calm, "record_texts", lambda model, texts: (requested["proposing"].extend(texts), right(model, texts))[1]
    )
    monkeypatch.setattr(
        TokenExits,
        "write",
        lambda model, texts, *rest, **config: (requested["tested"].extend(texts), write(model, texts, *rest, **config))[
            1
        ],
    )
    chosen = calm.guaranteed_rule(run.model, source, held)
    proposing, tested = ({text.ids[1] for text in requested[name]} for name in ("proposing", "tested"))
    assert len(proposing) == 3 and len(tested) == 9 and not proposing & tested
    assert chosen.guarantee is None or (chosen.guarantee["rows"], chosen.guarantee["max_loss"]) == (9, 0.9)
    assert (
        list(chosen.metrics["own"]) == ["gap", "saturation", "classifier"]
        and chosen.rule.to_dict() == chosen.metrics["own"]["gap"]
    )


def test_a_calibrated_rule_stands_beside_the_trainings_own(runs, capsys, tmp_path):
    run = shutil.copytree(runs / "calm", tmp_path / "run")
    status, answer = ask(capsys, "calibrate", run, "--epsilon", ".6", "--texts", 8, "--new-tokens", 6)
    assert status == 0 and answer["method"] == "calm"
    status, answer = ask(capsys, "compare", run, "--max-rows", 2)
    assert [row["measure"] for row in answer["rows"]] == ["full model", "threshold", "gap", "saturation", "classifier"]
    assert answer["rows"][1]["rule"] == load_run(run).rule.to_dict()


def test_sampled_texts_are_compared_too(runs, capsys):
    settings = ("--temperature", 1, "--top-p", 0.75, "--top-k", 40, "--max-rows", 2)
    status, answer = ask(capsys, "compare", runs / "calm", *settings)
    assert status == 0 and len(answer["rows"]) == 4


def test_without_a_text_the_decoder_writes_its_own(decoder_folder, capsys, tmp_path):
    shared = ("--model", decoder_folder, "--epochs", 1, "--texts", 12, "--exits", "1,3", "--new-tokens", 4)
    status, answer = ask(capsys, "train", "calm", *shared, "--out", tmp_path / "run")
    assert status == 0 and answer["texts"] == 12
    status, answer = ask(capsys, "compare", tmp_path / "run", "--max-rows", 2)
    assert status == 0 and answer["task"] == "continue"


def test_copying_is_a_task_and_train_says_which_rules_keep_calms_guarantee(decoder_folder, text_file, capsys, tmp_path):
    shared = ("--model", decoder_folder, "--task", "copy", "--epochs", 1, "--texts", 12)
    command = ["train", "calm", *shared, "--text", text_file, "--out", tmp_path / "run"]
    assert main([*map(str, command)]) == 0
    shown = capsys.readouterr().out
    assert "Texts lose at most 0.9 of Rouge-L on average, with confidence 95%, under each of:" in shown
    for measure, rule in json.loads((tmp_path / "run" / "metrics.json").read_text())["own"].items():
        assert f"{measure}: {rule_from_dict(rule)}" in shown
    status, line = ask(capsys, "train", "calm", *shared, "--out", tmp_path / "other")
    assert (status, line) == (
        2,
        "mini-ee train: --task copy needs a file of text: give --text FILE",
    )


@pytest.mark.parametrize(
    "argv, status, message",
    [
        (("--alpha", "-1"), 2, "alpha must be a number of at least 0, got -1.0"),
        (("--epsilon", "1.5"), 2, "epsilon must be a number from 0 to 1, got 1.5"),
        (("--exits", "4"), 2, "exits must ascend from at least 1 and end at the last layer, 3, got 4,3"),
        (("--task", "sing"), 2, "--task: expected a task's folder, or for a decoder continue or copy, found sing"),
        (("--target", "soft"), 2, "argument --target: invalid choice: 'soft'"),
        (("--task", "pieces"), 2, "--task pieces: consistent needs labels at the end of a text"),
        (("--pool", "first"), 2, "consistent on tokens has no option pool; see `mini-ee train consistent --help-all`"),
        (("--max-train", "3"), 2, "consistent on tokens has no option max_train"),
        (("--resume",), 2, "no unfinished training here; start without --resume"),
        (("--text", "nowhere.txt"), 2, "nowhere.txt: No such file or directory"),
        (("--lr", "1e30", "--head-lr", "1e30"), 1, "the training diverged; train again with a smaller --lr"),
        (("--device", "tpu"), 2, "--device tpu: cannot be used here"),
    ],
)
def test_wrong_arguments_of_train_are_one_line(decoder_folder, text_file, capsys, tmp_path, argv, status, message):
    texts = () if "--text" in argv else ("--text", str(text_file))
    command = ["train", "consistent", "--model", str(decoder_folder), *texts, *argv, "--out", str(tmp_path / "run")]
    try:
        exit_status = main(command)
    except SystemExit as error:
        exit_status = error.code
    err = capsys.readouterr().err.strip().splitlines()
    assert exit_status == status and message in err[-1]
    assert not list(tmp_path.glob("run*"))


@pytest.mark.parametrize(
    "method, module, step", [(consistent, consistent, "rewards_of_all"), (calm, policies, "agreement")]
)
def test_a_training_that_was_killed_behind_its_fine_tuning_goes_on(
    decoder_folder, text_file, tmp_path, monkeypatch, method, module, step
):
    """What its second stage, the policies or the classifier, asks first."""
    name = method.__name__.rpartition(".")[2]
    command = ["train", name, "--model", str(decoder_folder), "--text", str(text_file), "--epochs", "1"]
    command += ["--texts", "24", "--out"]

    class Killed(BaseException):
        pass

    def kill(*arguments, **settings):
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(module, step, kill)
        with pytest.raises(Killed):
            main([*command, str(tmp_path / "run")])
    assert not (tmp_path / "run").exists()
    assert main([*command, str(tmp_path / "run")]) == 2, "an unfinished training is there"
    assert main([*command, str(tmp_path / "run"), "--resume"]) == main([*command, str(tmp_path / "whole")]) == 0
    weights, expected = (read_tensors(tmp_path / name / "model.safetensors") for name in ("run", "whole"))
    assert weights.keys() == expected.keys() and all(weights[name].equal(expected[name]) for name in expected)
    assert not list(tmp_path.glob("*.training"))


def test_wrong_arguments_of_compare_are_one_line(runs, decoder_folder, capsys, tmp_path):
    for argv, message, expected in (
        ((runs / "calm", decoder_folder), "give a folder that `mini-ee train` wrote", 1),
        ((runs / "calm", "--task", "SST-2"), "--task is not for decoders", 2),
        ((runs / "calm", "--temperature", 1, "--top-p", 0), "top_p must be from 1e-06 to 1, got 0.0", 2),
        ((runs / "calm", "--model", tmp_path), "config.json", 2),
        ((runs / "calm", "--batch-size", 4), "--batch-size is for classifiers; decoders are timed text by text", 2),
        (
            (runs / "calm", "--picture", tmp_path / "a.png"),
            "draws savings and losses of these decoders: give --sweep too",
            2,
        ),
    ):
        status, line = ask(capsys, "compare", *argv)
        assert status == expected and message in line and "\n" not in line


def test_a_prompt_is_not_for_stories(decoder_folder, capsys, tmp_path):
    for given in (("--prompt", "a"), ("--greedy",)):
        status, line = ask(capsys, "train", "calm", "--model", decoder_folder, *given, "--out", tmp_path / "run")
        assert status == 2 and f"{given[0]}: calm learns from stories, which need no prompt; leave it out" in line


def test_a_short_text_is_told(decoder_folder, capsys, tmp_path):
    (tmp_path / "short.txt").write_text("Tom had a ball and it was red and very big indeed.")
    shared = ("--model", decoder_folder, "--text", tmp_path / "short.txt", "--out", tmp_path / "run")
    status, line = ask(capsys, "train", "calm", *shared)
    assert status == 1 and "expected at least 24 texts, half of them to hold out, found 0; give more" in line
    assert "texts are separated by <|endoftext|> or, in a file without it, by blank lines" in line


# ---- Real data ----


@pytest.mark.skipif(not SHARED, reason="needs the real stories260K and TinyStories (2026-11)")
def test_on_real_stories_the_gap_writes_better_the_stricter_it_is(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(training_texts, "FOLLOW", 16)
    monkeypatch.setattr(default_rule, "PASSING", (0.01, 0.15, 0.7))
    untimed = lambda points: [point.update(tokens_per_second=1.0) for point, _ in points]  # noqa: E731
    monkeypatch.setattr(measure_compare, "measure_speed", untimed)
    shared = ("--model", Path(SHARED) / "weights" / "stories260K", "--epochs", 1, "--texts", 24, "--batch-size", 16)
    text = Path(SHARED) / "data" / "TinyStories" / "tinystories_sample.txt"
    status, _ = ask(capsys, "train", "calm", *shared, "--text", text, "--out", tmp_path / "calm")
    assert status == 0
    status, answer = ask(capsys, "compare", tmp_path / "calm", "--sweep", "--max-rows", 4)
    (gap,) = (row for row in answer["rows"] if row["measure"] == "gap")
    scores = [point["rouge_l"] for point in gap["curve"]]
    assert status == 0 and scores[0] > scores[1] > scores[2] and scores[0] > 0.5
