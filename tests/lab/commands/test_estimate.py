"""Will early exit pay? The numbers against loops and hand-made cases, planted models, the command and wrong input."""

import itertools
import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import WORDS, answer, random_decoder, refused, write_task

from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.calibration import Observed
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.evaluation import savings_estimate
from mini_ee.lab.evaluation.probes import (
    PENALTY,
    Costs,
    ProbeResult,
    layer_states,
    linear_probe,
    neighbours,
    probe_rows,
    probe_tokens,
)
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.run_folder import encode

SHARED = os.environ.get("MINI_EE_SHARED")
ATOL = 1e-5  # float32 states of single rows against padded batches; measured max 1.0e-6
ONE = Observed(
    np.array([[0.9, 0.2], [0.4, 0.8], [0.6, 0.7], [0.3, 0.1]]),
    np.array([[True, False], [False, True], [False, True], [False, False]]),
    np.arange(4),
)
"""Four rows, three layers. One stands at layer 1, though layer 2 differs: what is sure leaves all the same."""
FREE = Costs(0.0, 0.0)


@pytest.fixture(autouse=True)
def fewer_resamples(monkeypatch):
    monkeypatch.setattr(savings_estimate, "SAVINGS_RESAMPLES", 20)


def drawn(units, layers, seed=0):
    """Random layers of which the surer ones agree more often."""
    random = np.random.default_rng(seed)
    confidence = random.random((units, layers - 1))
    return Observed(confidence, random.random(confidence.shape) < confidence**0.3, np.arange(units))


# ---- The numbers ----


def test_settled_is_the_first_layer_behind_the_last_difference():
    for predictions in itertools.product((0, 1), repeat=5):
        *before, last = predictions
        row = np.array(before) == last
        expected = next(layer for layer in range(1, 6) if set(predictions[layer - 1 :]) == {last})
        assert savings_estimate.settled_layers(row[None]) == [expected]


def test_layers_and_heads_are_counted_as_by_hand():
    """At .7 the rows leave after layers 1, 2, 2 and 3, through as many heads, and all agree there."""
    savings = savings_estimate.savings_at(ONE, Threshold((0.7, 0.7, -math.inf)), (1, 2, 3), Costs(0.5, 0.0))
    assert savings == pytest.approx((1.0, 1 - 2 / 3, 1 - (8 / 4 + 0.5 * 8 / 4) / 3.5))
    wrong = Threshold((0.6, 0.6, -math.inf))  # the third leaves after layer 1, wrongly
    savings = savings_estimate.savings_at(ONE, wrong, (1, 2, 3), Costs(0.5, 0.0))
    assert savings == pytest.approx((0.75, 1 - 7 / 12, 1 - (7 / 4 + 0.5 * 7 / 4) / 3.5))
    savings = savings_estimate.savings_at(ONE, wrong, (1, 2, 3), Costs(0.5, 6.0))  # an encoder runs before: never saved
    assert savings == pytest.approx((0.75, 1 - 7 / 12, 1 - (6 + 7 / 4 + 0.5 * 7 / 4) / 9.5))


def test_an_exit_that_is_not_there_costs_its_layers_but_no_head():
    """Exits after layers 2 and 3 alone, at .7: leaving after 3, 2, 2 and 3 layers through 2, 1, 1 and 2 heads."""
    savings = savings_estimate.savings_at(
        savings_estimate.at_exits(ONE, (2, 3)), Threshold((0.7, -math.inf)), (2, 3), Costs(1.0, 0.0)
    )
    assert savings == pytest.approx((1.0, 1 - 10 / 12, 1 - (10 / 4 + 6 / 4) / 4))


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("level", [0.6, 0.95, 1.0])
def test_the_threshold_keeps_the_level_and_the_next_lower_does_not(seed, level):
    observed = drawn(60, 5, seed)

    def end_to_end(tau):
        right = []
        for sure, agrees in zip(observed.confidence, observed.agrees):
            right.append(next((ok for confidence, ok in zip(sure, agrees) if confidence >= tau), True))
        return np.mean(right)

    rule = savings_estimate.threshold_at(observed, level)
    (tau,) = set(rule.threshold[:-1])
    assert rule.threshold[-1] == -math.inf and end_to_end(tau) >= level
    lower = observed.confidence[observed.confidence < tau]
    assert not lower.size or end_to_end(lower.max()) < level


def test_no_example_exits_if_none_agrees_and_all_exit_if_all_agree():
    observed = drawn(15, 4)  # one of them is more than 5 %
    never, always = (observed._replace(agrees=np.full_like(observed.agrees, value)) for value in (False, True))
    assert savings_estimate.threshold_at(never).threshold[:-1] == (math.inf,) * 3
    assert savings_estimate.savings_at(always, savings_estimate.threshold_at(always), (1, 2, 3, 4), FREE).saved == 0.75


@pytest.mark.parametrize("head", [0.0, 0.3])
def test_the_few_exits_save_nearly_what_the_best_of_all_choices_does(head):
    observed, costs = drawn(300, 5, 1), Costs(head, 0.0)

    def net(exits):
        some = savings_estimate.at_exits(observed, exits)
        return savings_estimate.savings_at(some, savings_estimate.threshold_at(some), exits, costs).net_saved

    choices = [(*some, 5) for count in range(1, 5) for some in itertools.combinations(range(1, 5), count)]
    few, saved = savings_estimate.few_exits(observed, costs)
    assert saved == pytest.approx(net(few)) and saved >= max(map(net, choices)) - 0.03


def test_a_head_that_costs_more_than_it_saves_is_not_chosen():
    observed = drawn(300, 5, 1)
    assert len(savings_estimate.few_exits(observed, FREE)[0]) > 1
    assert savings_estimate.few_exits(observed, Costs(50.0, 0.0)) == ((5,), 0.0)
    none = savings_estimate.estimate(observed, (5,), Costs(50.0, 0.0), 0)
    assert none["kept"] == 1 and none["net_saved"] == none["saved"] == none["high"] == 0


@pytest.mark.parametrize("seed", range(5))
def test_what_is_judged_keeps_the_level(seed):
    """Exits that were chosen on some rows, at a threshold of the same rows, would keep less of others."""
    judged = savings_estimate.suitability(ProbeResult("linear probe", drawn(200, 5, seed), Costs(0.05, 0.0)), seed)
    for savings in (judged["estimate"], judged["few_exits"]):
        assert savings["agreement"] == 0.95 <= savings["kept"] < 1 and len(savings["exits"]) > 2
        assert savings["low"] <= savings["saved"] <= savings["high"]
    assert f"and {judged['few_exits']['kept']:.1%} agree with the last layer" in judged["advice"]


def test_what_exits_save_is_counted_at_their_own_threshold():
    observed, exits, costs = drawn(80, 4, 1), (1, 3, 4), Costs(0.2, 0.0)
    some = Observed(observed.confidence[:, [0, 2]], observed.agrees[:, [0, 2]], observed.groups)
    savings, expected = (
        savings_estimate.estimate(observed, exits, costs, 0),
        savings_estimate.savings_at(some, savings_estimate.threshold_at(some), exits, costs),
    )
    assert (savings["kept"], savings["saved"], savings["net_saved"]) == pytest.approx(expected)


def test_texts_are_drawn_whole():
    """Twenty equal tokens a text say no more than one of them does: the interval stays as wide."""
    one = drawn(100, 4)
    many = Observed(*(np.repeat(row_array, 20, axis=0) for row_array in one))
    apart = many._replace(groups=np.arange(2000))
    wide, same, narrow = (savings_estimate.estimate(observed, (1, 2, 3, 4), FREE, 0) for observed in (one, many, apart))
    assert same.pop("exits") == wide.pop("exits") and same == pytest.approx(wide)
    assert narrow["high"] - narrow["low"] < (wide["high"] - wide["low"]) / 2
    assert wide["low"] <= wide["saved"] <= wide["high"]


def test_the_answer_depends_on_the_seed_alone_and_is_json():
    probed = ProbeResult("linear probe", drawn(200, 4), Costs(0.1, 0.0), [0.5, 0.6, 0.7, 0.7], 0.5)
    judged, again, other = (savings_estimate.suitability(probed, seed) for seed in (0, 0, 1))
    assert judged == again != other and json.loads(json.dumps(judged, allow_nan=False)) == judged
    assert judged["agreement"] == [*probed.observed.agrees.mean(axis=0), 1] and sum(judged["oracle_counts"]) == 200
    layers = [layer for layer, count in enumerate(judged["oracle_counts"], 1) for _ in range(count)]
    assert judged["oracle_saved"] == pytest.approx(1 - np.mean(layers) / 4)
    assert judged["oracle_net_saved"] <= judged["oracle_saved"]
    assert judged["estimate"]["agreement"] == 0.95 and judged["estimate"]["exits"] == [1, 2, 3, 4]


def estimated(net, low, oracle, settle=4, accuracy=0.9):
    few = {"exits": [1, 3, 4] if net else [4], "kept": 0.951, "net_saved": net, "net_low": low, "net_high": net}
    probes = {"accuracy": [0.5, accuracy], "majority": 0.5}
    return {
        "layers": 4,
        "head_layers": 0.0,
        "start_layers": 0.0,
        "settle_layer": settle,
        "few_exits": few,
        "oracle_net_saved": oracle,
    } | probes


@pytest.mark.parametrize(
    ("given", "begins", "says"),
    [
        (estimated(0.3, 0.1, 0.5), "Early exit should pay", "after layer 1 or 3 saves 30% (10% to 30%)"),
        (
            estimated(0.3, 0.09, 0.5),
            "Early exit may pay once exits are trained",
            "an oracle would save 50% (cut-off 25%)",
        ),
        (
            estimated(0, 0, 0.25),
            "Early exit may pay once exits are trained",
            "no exit saves more than its head costs (cut-off 10%",
        ),
        (estimated(0.3, 0.09, 0.24), "Early exit will hardly pay", "an oracle would save only 24% (cut-off 25%)"),
        (estimated(0.3, 0.1, 0.5, settle=2), "Remove the upper layers", "from layer 2 of 4"),
        (
            estimated(0.2, 0.1, 0.5, settle=2) | {"start_layers": 4.0},
            "Remove the upper layers",
            "saves 25% of the FLOPs",
        ),
        (estimated(0.3, 0.1, 0.5, settle=3), "Early exit should pay", "and 95.1% agree"),
        (estimated(0.3, 0.1, 0.5, accuracy=0.51), "There is no answer", "best probe is 51.0%"),
    ],
)
def test_the_advice_goes_by_the_cut_offs_that_it_names(given, begins, says):
    advice = savings_estimate.advice(given, 100)
    assert advice.startswith(begins) and says in advice and advice.endswith(".")


# ---- What layers say ----


def test_a_probe_is_at_the_minimum_of_its_loss():
    """The gradient of cross-entropy and penalty, in float64, of the weights that its logits tell."""
    random = np.random.default_rng(0)
    fitted, labels = random.normal(2, 3, (90, 4)).astype(np.float32), random.integers(0, 3, 90)
    mean, std = fitted.mean(axis=0), fitted.std(axis=0)
    bias, *rows = linear_probe(fitted, np.stack([mean, *(mean + np.diag(std))]), labels, 3).astype(np.float64)
    weight, x = np.array(rows) - bias, (fitted - mean) / std
    odds = np.exp(x @ weight + bias)
    differs = odds / odds.sum(axis=1, keepdims=True) - np.eye(3)[labels]
    np.testing.assert_allclose(x.T @ differs / 90 + PENALTY * weight, 0, atol=1e-4)
    np.testing.assert_allclose(differs.mean(axis=0), 0, atol=1e-4)
    flat = np.column_stack((fitted, np.full(90, 7.0, np.float32)))  # a state that never changes says nothing
    np.testing.assert_allclose(linear_probe(flat, flat, labels, 3), linear_probe(fitted, fitted, labels, 3), atol=1e-2)


def test_neighbours_are_cosines_around_the_mean():
    random = np.random.default_rng(0)
    fitted, queries = random.normal(5, 1, (7, 3)), random.normal(5, 1, (4, 3))
    similarity, middle = neighbours(fitted, queries), fitted.mean(axis=0)
    for n, m in np.ndindex(4, 7):
        a, b = queries[n] - middle, fitted[m] - middle
        assert similarity[n, m] == pytest.approx(a @ b / math.sqrt(a @ a * (b @ b)))


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_states_are_the_means_of_each_row_alone(kind, checkpoint_folder):
    torch.manual_seed(0)
    backbone = load_backbone(checkpoint_folder) if kind == "bert" else random_decoder("llama", 3)
    texts = [("the film was good",), ("a very dull book",), ("song",)]
    encoded = encode(Tokenizer.from_folder(checkpoint_folder), texts, backbone)
    states = layer_states(backbone, encoded)
    assert states.shape == (3, 3, backbone.config.hidden_size)
    for row, ids in enumerate(encoded.ids):
        with torch.inference_mode():
            layers = backbone.hidden_states(torch.from_numpy(ids)[None])[1:]
        for k, hidden in enumerate(layers):
            if kind == "llama":  # RMSNorm with a weight of ones
                hidden = hidden / (hidden.square().mean(-1, keepdim=True) + backbone.config.norm_eps).sqrt()
            np.testing.assert_allclose(states[row, k], hidden[0].mean(0), atol=ATOL)


def texts_of(decoder, count=40, seed=0):
    random = np.random.default_rng(seed)
    return [Text(random.integers(0, 60, random.integers(4, 12)).tolist(), 1) for _ in range(count)]


def test_the_lens_reads_every_layer_through_the_models_own_head():
    torch.manual_seed(0)
    decoder, same = random_decoder("llama", 3), []
    texts = texts_of(decoder)
    probed = probe_tokens(decoder, texts)
    for text in texts:
        with torch.inference_mode():
            logits = [
                decoder.lm_logits(hidden[0, text.start :]) for hidden in decoder.hidden_states(torch.tensor([text.ids]))
            ]
        predictions = torch.stack(logits[1:]).argmax(-1)
        same += (predictions[:-1] == predictions[-1]).T.tolist()
    np.testing.assert_array_equal(probed.observed.agrees, same)
    attended = [at + 1 for text in texts for at in range(text.start, len(text.ids))]
    c, width = decoder.config, 24
    layer = width * (c.head_width * (4 + 2 * 2)) + width * width + 3 * width * 48 + 2 * width * np.mean(attended)
    assert probed.costs.head == pytest.approx(60 * width / layer)


def planted(count, unused):
    """A decoder whose layers of these numbers, from 0, add nothing to what comes in."""
    torch.manual_seed(1)
    decoder = random_decoder("llama", count)
    for depth in unused:
        for name in ("attention_output", "down"):
            torch.nn.init.zeros_(getattr(decoder.layers[depth], name).weight)
    return decoder


def test_a_decoder_whose_later_layers_do_nothing_is_settled_at_the_first():
    judged = savings_estimate.suitability(probe_tokens(planted(4, (1, 2, 3)), texts_of(None)))
    assert judged["settle_layer"] == 1 and judged["agreement"] == [1] * 4 and judged["oracle_saved"] == 0.75
    assert judged["estimate"]["saved"] == judged["estimate"]["low"] == 0.75 and judged["advice"].startswith(
        "Remove the upper layers"
    )


def test_a_decoder_whose_last_layer_is_random_is_not():
    decoder = planted(4, (1, 2))
    with torch.no_grad():
        for name in ("attention_output", "down"):
            getattr(decoder.layers[3], name).weight.mul_(30)
    judged = savings_estimate.suitability(probe_tokens(decoder, texts_of(None)))
    assert judged["settle_layer"] == 4 and max(judged["agreement"][:-1]) < 0.5 and judged["oracle_saved"] < 0.4
    assert judged["agreement"][0] == judged["agreement"][1] == judged["agreement"][2]
    assert not judged["advice"].startswith(("Remove the upper layers", "Early exit should pay"))


@pytest.mark.parametrize("labelled", [True, False])
def test_an_encoder_whose_later_layers_do_nothing_is_settled_at_the_first(labelled, checkpoint_folder, words_task):
    backbone, rows = load_backbone(checkpoint_folder), load_task(words_task).split("train")
    for layer in backbone.layers[1:]:
        for linear in (layer.attention_output, layer.down):
            torch.nn.init.zeros_(linear.weight)
    encoded = encode(Tokenizer.from_folder(checkpoint_folder), rows.texts, backbone)
    probed = probe_rows(backbone, encoded, rows.labels if labelled else None, 2, 0)
    judged = savings_estimate.suitability(probed)
    assert judged["settle_layer"] == 1 and judged["oracle_saved"] == pytest.approx(2 / 3)
    assert ("accuracy" in judged) == labelled and judged["how"] == ("linear probe" if labelled else "nearest neighbour")


def test_probes_learn_from_one_half_of_the_rows_and_are_held_against_the_labels_of_the_other(
    checkpoint_folder, words_task
):
    backbone, rows = load_backbone(checkpoint_folder), load_task(words_task).split("train")
    encoded = encode(Tokenizer.from_folder(checkpoint_folder), rows.texts, backbone)
    labels = (np.arange(len(rows)) % 3 == 0).astype(np.int64)
    fitted, tested = np.split(np.random.default_rng(0).permutation(len(rows)), 2)
    of_taught, of_tested = ((labels[half] == 0).mean() for half in (fitted, tested))
    probed, states = probe_rows(backbone, encoded, labels, 2, 0), layer_states(backbone, encoded)
    assert probed.majority == of_tested != of_taught
    predictions = [
        linear_probe(states[fitted, k], states[tested, k], labels[fitted], 2).argmax(axis=1) for k in range(3)
    ]
    assert probed.accuracy == [(predicted == labels[tested]).mean() for predicted in predictions]


# ---- The command ----


@pytest.fixture(scope="module")
def words_task(tmp_path_factory):
    return write_task(tmp_path_factory.mktemp("estimate") / "words")


@pytest.fixture(scope="module")
def words_text(tmp_path_factory):
    path, random = tmp_path_factory.mktemp("estimate") / "words.txt", np.random.default_rng(0)
    path.write_text("".join(" ".join(random.choice(WORDS, 9)) + "\n" for _ in range(200)))
    return path


KEYS = {"model", "unit", "how", "source", "layers", "agreement", "settle_layer", "oracle_counts", "oracle_saved"}
KEYS |= {
    "oracle_net_saved",
    "head_layers",
    "start_layers",
    "estimate",
    "few_exits",
    "advice",
    "seconds",
    "seed",
    "threads",
    "versions",
}
NUMBERS = {"exits", "agreement", "kept", "saved", "low", "high", "net_saved", "net_low", "net_high"}


@pytest.mark.slow
def test_the_built_in_encoder_and_reviews_are_the_defaults(capsys, tmp_path):
    report = answer(capsys, "estimate", "--max-rows", 80, "--picture", tmp_path / "estimate.png")
    assert KEYS | {"accuracy", "majority", "rows", "task"} <= report.keys() and NUMBERS == report["estimate"].keys()
    assert report["model"] == "bert-12x128" and report["unit"] == "rows" and report["rows"] == 80
    assert report["layers"] == len(report["agreement"]) == len(report["accuracy"]) == 12 and report["task"] == "reviews"
    assert report["source"] == "reviews, train" and 0 < report["head_layers"] < 0.01
    assert (tmp_path / "estimate.png").read_bytes().startswith(b"\x89PNG")


def test_agreement_and_advice_are_printed(capsys, checkpoint_folder, words_task):
    argv = ("estimate", checkpoint_folder, "--task", words_task, "--max-rows", 80)
    report = answer(capsys, *argv)
    assert main([*map(str, argv)]) == 0
    shown = capsys.readouterr().out
    assert shown.splitlines()[-1] == report["advice"] and f"{report['agreement'][1]:.3f}" in shown


@pytest.mark.slow
def test_the_built_in_decoder_reads_what_it_writes(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(Decoder, "room", lambda self, prompts: 9)  # tokens of a text, instead of 64
    report = answer(capsys, "estimate", "llama-12x256", "--texts", 40, "--picture", tmp_path / "estimate.png")
    assert KEYS | {"texts", "tokens"} <= report.keys() and "accuracy" not in report
    assert (
        report["unit"] == "tokens" and report["texts"] == 40 and sum(report["oracle_counts"]) == report["tokens"] > 250
    )
    assert report["layers"] == 12 and 0.2 < report["head_layers"] < 0.5
    assert report["estimate"]["net_saved"] < 0 <= report["few_exits"]["net_saved"]


def test_a_decoder_reads_a_file_and_rows(capsys, decoder_checkpoint, words_task, words_text):
    report = answer(capsys, "estimate", decoder_checkpoint, "--text", words_text, "--texts", 45)
    assert report["source"] == str(words_text) and report["texts"] == 45 and report["how"] == "logit lens"
    others = answer(capsys, "estimate", decoder_checkpoint, "--text", words_text, "--texts", 45, "--seed", 1)
    assert others["agreement"] != report["agreement"]  # pieces are drawn, not the file's first
    report = answer(capsys, "estimate", decoder_checkpoint, "--task", words_task)
    assert report["unit"] == "rows" and report["how"] == "linear probe" and len(report["accuracy"]) == 3


def test_lines_without_labels_are_probed_by_nearest_neighbours(capsys, checkpoint_folder, words_text):
    report = answer(capsys, "estimate", checkpoint_folder, "--text", words_text, "--max-rows", 120)
    assert report["how"] == "nearest neighbour" and report["rows"] == 120 and "accuracy" not in report
    assert sum(report["oracle_counts"]) == 60


def test_the_split_that_is_reported_is_not_looked_at(capsys, checkpoint_folder, words_task, tmp_path):
    (folder := tmp_path / "words").mkdir()
    shutil.copy(words_task / "train.jsonl", folder)
    whole, alone = (answer(capsys, "estimate", checkpoint_folder, "--task", task) for task in (words_task, folder))
    assert {**whole, "seconds": 0} == {**alone, "seconds": 0}


def test_labels_that_no_layer_predicts_are_reported(capsys, checkpoint_folder, tmp_path):
    random = np.random.default_rng(1)
    folder = write_task(tmp_path / "lots", label=lambda name: ("bad", "good")[random.integers(2)])
    assert answer(capsys, "estimate", checkpoint_folder, "--task", folder)["advice"].startswith("There is no answer")


def test_wrong_arguments_are_one_line(capsys, checkpoint_folder, decoder_checkpoint, words_task, words_text, tmp_path):
    (tmp_path / "short.txt").write_text("the film was good\n" * 30)
    (tmp_path / "bytes.txt").write_bytes(b"\xff\xfe\x00")
    few, test = write_task(tmp_path / "few", 20), write_task(tmp_path / "test", splits=("train", "test"))
    (test / "train.jsonl").rename(test / "dev.jsonl")
    shutil.copytree(words_task, tmp_path / "CoLA")
    (sts := tmp_path / "STS-B").mkdir()
    lines = "sentence1\tsentence2\tscore\n" + "".join(f"a film\ta film {row}\t{row / 40:.1f}\n" for row in range(200))
    (sts / "train.tsv").write_text(lines)
    bare = tmp_path / "bare"
    decoder = load_backbone(decoder_checkpoint)
    decoder.lm_head = None
    save_backbone(decoder, bare)
    shutil.copy(decoder_checkpoint / "tokenizer.json", bare)
    one = tmp_path / "one"
    save_backbone(load_backbone(checkpoint_folder).first_layers(1), one)
    for argv, says in (
        ((tmp_path / "nowhere",), "no such folder; expected a checkpoint"),
        ((checkpoint_folder,), "give --task DIR, or --text FILE with one example without label per line"),
        ((checkpoint_folder, "--task", words_task, "--text", words_text), "give one of them"),
        ((checkpoint_folder, "--task", tmp_path / "nowhere"), "expected a task folder, found nothing"),
        ((checkpoint_folder, "--text", tmp_path / "nowhere"), "No such file"),
        ((checkpoint_folder, "--text", tmp_path / "bytes.txt"), "bytes.txt:1: expected UTF-8, found UTF-16"),
        ((checkpoint_folder, "--text", tmp_path / "short.txt"), "expected at least 80 rows, got 30"),
        ((checkpoint_folder, "--task", words_task, "--max-rows", 79), "expected at least 80 rows, got 79"),
        ((checkpoint_folder, "--task", words_task, "--max-rows", 0), "at least 1"),
        ((checkpoint_folder, "--task", few), "expected at least 80 rows, got 20"),
        ((checkpoint_folder, "--task", sts), "STS-B: is a regression"),
        ((checkpoint_folder, "--task", words_task, "--texts", 50), "--texts is for a decoder's tokens"),
        ((checkpoint_folder, "--task", words_task, "--device", "tpu"), "tpu"),
        ((one, "--task", words_task), "expected at least two layers, found one"),
        ((bare,), "has no LM head"),
        ((decoder_checkpoint, "--max-rows", 90), "--max-rows is for examples"),
        ((decoder_checkpoint, "--texts", 39), "expected at least 40 texts"),
        ((decoder_checkpoint, "--text", tmp_path / "short.txt"), "tokens; give a longer text"),
    ):
        assert says in refused(capsys, "estimate", *argv, status=2), argv


def test_a_run_is_no_checkpoint(capsys, checkpoint_folder, words_task, tmp_path):
    train = ("--exits", "1,3", "--epochs", 1, "--max-train", 40, "--out", tmp_path / "run")
    answer(capsys, "train", "joint", "--model", checkpoint_folder, "--task", words_task, *train)
    assert "found a trained run" in refused(capsys, "estimate", tmp_path / "run", "--task", words_task, status=2)
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "manifest.json").write_text("{}")
    assert "found a trained run" in refused(capsys, "estimate", tmp_path / "exported", status=2)


# ---- Real weights and data ----


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
def test_real_models_settle_at_the_layers_that_were_measured(capsys, tmp_path):
    """MiniLM's layers know TREC early; heads of stories260K cost more than they save (results/self-supervised.md)."""
    weights, data = Path(SHARED) / "weights", Path(SHARED) / "data"
    report = answer(capsys, "estimate", weights / "all-MiniLM-L6-v2", "--task", data / "TREC", "--max-rows", 250)
    assert report["layers"] == 6 and min(report["accuracy"]) > report["majority"] + 0.2
    assert report["agreement"] == sorted(report["agreement"]) and report["advice"].startswith("Early exit should pay")
    stories = tmp_path / "stories.txt"
    stories.write_text((data / "TinyStories" / "tinystories_sample.txt").read_text()[:100_000])
    report = answer(capsys, "estimate", weights / "stories260K", "--text", stories, "--texts", 45)
    assert report["layers"] == 5 and report["agreement"] == sorted(report["agreement"]) and report["agreement"][3] < 0.6
    assert 0.5 < report["head_layers"] < 0.8 and report["few_exits"]["exits"] == [5]
    assert report["advice"].startswith("Early exit will hardly pay")
