"""What exits cost a decoder: log-likelihoods by a slow loop, positions that leave as the loop says, and the sweep."""

import copy
import functools
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from conftest import answer, refused, save_small_llama

import mini_ee.lab.evaluation.comparison as measure_compare
import mini_ee.lab.evaluation.token_evaluation as measure_texts
from mini_ee.lab.backbones.hub import backbone_sha256, load_backbone, save_backbone
from mini_ee.lab.backbones.llama import Decoder
from mini_ee.lab.calibration import agreement, calibrate, end_to_end, observe, replay
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.multiple_choice import Benchmark, Question, QuestionRequests, Request
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.evaluation.plots import draw_decoder, new_figure, save_figure
from mini_ee.lab.evaluation.token_evaluation import (
    AGREEMENT_LEVELS,
    COMPARED_MEASURES,
    EPSILON_GRID,
    BenchmarkScores,
    at_equal_agreement,
    benchmark_answer,
    perplexity,
    score_benchmark,
    sweep,
    timed_decoding,
    written_texts,
)
from mini_ee.lab.exits.decoding import Generated, gather
from mini_ee.lab.exits.generation import generate, generated_texts
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.methods.consistent import PolicyNetworks
from mini_ee.lab.rules import Fixed, Never, Patience, PatienceConfidence, Policy, Threshold
from mini_ee.lab.training.default_rule import Chosen
from mini_ee.lab.training.run_folder import load_run, save_run
from mini_ee.lab.training.train_settings import TextOptions
from mini_ee.lab.training.training_text import Source, texts_to_calibrate, texts_to_learn, texts_to_test
from mini_ee.self_supervised import CALIBRATION_PROMPTS

SHARED = os.environ.get("MINI_EE_SHARED")
ATOL = 1e-4  # log p in float32, padded and batched, against float64 and one text at a time; measured max 4e-6
RULES = (
    *(Never(), Fixed(1), Threshold(0.015, "breaking_ties")),
    *(Threshold((0.02, 0.01, 0.0), "breaking_ties"), Patience(1), PatienceConfidence(2, 0.005, "breaking_ties")),
    *(Policy(), Policy(0.45)),
)
LETTERS = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory):
    """A random 3-layer Llama over single bytes, with a bos token and a context of 96 tokens."""
    folder = tmp_path_factory.mktemp("decoder") / "llama"
    vocabulary = {letter: i for i, letter in enumerate(["<s>", *LETTERS])}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return save_small_llama(folder, tokenizer, max_position_embeddings=96, eos_token_id=5)


def write_run(folder, decoder_folder, exits, rule, settings=None, metrics=None):
    """A run of heads that are copies of the model's own."""
    model, tokenizer = TokenExits(load_backbone(decoder_folder), exits), Tokenizer.from_folder(decoder_folder)
    config = {
        "method": "self-supervised",
        "unit": "tokens",
        "settings": {"penalty": 0.95, "target": "soft", "init": "copy"} | (settings or {}),
        "backbone": {"folder": str(decoder_folder), "sha256": backbone_sha256(decoder_folder)},
        "text": {"text": None, "kind": "pieces", "texts": None, "new_tokens": 8, "prompt": None},
        "rank": None,
        "seed": 0,
        "training": {},
    }
    save_run(folder, model, tokenizer, Chosen(rule, None), config, metrics or {})


@pytest.fixture(scope="module")
def run_folder(decoder_folder):
    """A run on it: heads after layers 1 and 2, copied, with a rule under which tokens leave everywhere."""
    folder = decoder_folder.with_name("run")
    history = [{"step": s, "loss": 1.0, "agreement": [0.1 * s, 0.2 * s], "entropy": [2.0, 1.0]} for s in (0, 1, 2)]
    rule = Threshold((0.015, 0.012, -math.inf), "breaking_ties")
    metrics = {"history": history, "agreement": [0.2, 0.4], "entropy": [2.0, 1.0]}
    write_run(folder, decoder_folder, (1, 2, 3), rule, metrics=metrics)
    return folder


@pytest.fixture(scope="module")
def opened(run_folder):
    return load_run(run_folder)


@pytest.fixture(scope="module")
def with_policies(opened):
    """The run, with policies that are unsure to a different degree from token to token."""
    with torch.random.fork_rng():
        torch.manual_seed(2)
        model = TokenExits(opened.model.backbone, (1, 2, 3), "copy", PolicyNetworks).eval()
        for network in model.policy.networks:
            torch.nn.init.normal_(network[2].weight, std=0.5)
    return opened._replace(model=model)


@pytest.fixture
def benchmark():
    """Questions of two and three options, of different lengths, one with more shots than fit."""
    questions = (
        Question(("ab", "ab"), (" cd", " wxyz"), 1, 0),
        Question(("the cat", "a dog"), (" ran", " ran"), 0, 1),
        Question(("q",) * 3, (" A", " B", " C"), 2, 2, "in ", ("one " * 9, "two " * 9, "three " * 9)),
        Question(("a longer context of words",) * 2, (" is", " is not"), 0, 2),
    )
    return Benchmark("tiny", "test", questions, "log_p per character")


@functools.cache
def slow(model, text):
    """log p of the next token, logits, and the policy's logit of every exit: one text, in float64."""
    model, rows = copy.deepcopy(model).double(), []
    states = model.backbone.hidden_states(torch.tensor([text.ids]))
    for at in range(text.start, len(text.ids) - 1):
        row = []
        for k, layer in enumerate(model.exits):
            hidden, leave = states[layer][0, at], None
            if k < len(model.heads):
                logits = model.heads[k].linear(model.heads[k].norm(hidden)).numpy()
                leave = float(model.policy.networks[k](model.heads[k].norm(hidden))[0])
            else:
                logits = model.backbone.lm_logits(hidden).double().numpy()
            row.append((logits[text.ids[at + 1]] - math.log(np.exp(logits).sum()), logits, leave))
        rows.append(row)
    return rows


def left_at(rule, row):
    """The exit, from 0, at which a token leaves, from what `slow` says of it."""
    streak = 0
    for k, (_, logits, leave) in enumerate(row[:-1]):
        second, first = np.sort(np.exp(logits) / np.exp(logits).sum())[-2:]
        match rule:
            case Fixed():
                leaves = k == rule.exit
            case Threshold():
                leaves = first - second >= np.broadcast_to(rule.threshold, 3)[k]
            case Patience():
                streak = streak + 1 if k and logits.argmax() == row[k - 1][1].argmax() else 0
                leaves = streak >= rule.patience
            case PatienceConfidence():
                streak = streak + 1 if first - second >= rule.threshold else 0
                leaves = streak >= rule.patience
            case Policy():
                leaves = 1 / (1 + math.exp(-leave)) > rule.cut
            case Never():
                leaves = False
        if leaves:
            return k
    return len(row) - 1


def test_perplexity_is_exp_of_the_mean_log_loss_at_the_exits(opened):
    texts, rule = [Text([0, *range(20, 50)], 0), Text([0, 7, 9, 8], 1)], RULES[2]
    recorded = record_texts(opened.model, texts, last=False)
    log_p, exit_index = recorded.logits[:, :, 0], recorded.replay(rule).exit_index
    assert len(log_p) == 32 and len(set(exit_index)) == 3
    total = -sum(row[k] for row, k in zip(log_p, exit_index))
    assert perplexity(recorded, rule) == pytest.approx(math.exp(total / 32))
    assert perplexity(recorded, Never()) == pytest.approx(math.exp(-log_p[:, -1].mean()))


# ---- Benchmarks ----


@torch.no_grad()
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_accuracy_is_that_of_a_loop_over_options_one_by_one_under_every_rule(with_policies, benchmark, rule):
    run = with_policies
    answer = benchmark_answer(score_benchmark(run, benchmark, 3), rule)
    encode = run.tokenizer.backend.encode
    rights, layers, right_log_p, alone = [], [], [], [[], [], []]
    for question in benchmark.questions:
        shots = [*question.shots]
        while len(encode(question.introduction + "".join(shots) + question.contexts[0] + question.options[0])) > 96:
            shots.pop()
        scores, scores_at = [], [[], [], []]
        for context, option in zip(question.contexts, question.options):
            before = encode(question.introduction + "".join(shots) + context).ids
            text = Text((*before, *encode(option, add_special_tokens=False).ids), len(before) - 1)
            rows = slow(run.model, text)
            exits = [left_at(rule, row) for row in rows]
            layers += [k + 1 for k in exits]
            for k in range(3):
                scores_at[k].append(sum(row[k][0] for row in rows) / len(option.strip()))
            scores.append(sum(row[k][0] for row, k in zip(rows, exits)) / len(option.strip()))
        rights.append(int(np.argmax(scores)) == question.answer)
        right_log_p.append(scores[question.answer] * len(question.options[question.answer].strip()))
        for k in range(3):
            alone[k].append(int(np.argmax(scores_at[k])) == question.answer)
    assert answer["accuracy"] == np.mean(rights) and answer["mean_layers"] == pytest.approx(np.mean(layers))
    assert answer["exit_counts"] == [layers.count(1), layers.count(2), layers.count(3)]
    assert answer["per_exit_accuracy"] == [np.mean(rights_of_exit) for rights_of_exit in alone]
    assert answer["log_likelihood"] == pytest.approx(np.mean(right_log_p), abs=1e-3)
    assert answer["shots"] == [3, 0, 1, 0] and answer["rows_truncated"] == 0 and answer["rows"] == 4
    assert answer["rule"] == rule.to_dict()
    assert isinstance(rule, Never | Fixed) or len(set(layers)) > 1


def test_a_cloze_is_right_if_every_token_is_that_of_greedy_decoding(opened):
    requests, right = [], []
    for context in ([0, 65, 66], [0, 80], [0, 7, 7, 9]):
        (text,) = gather(generate(opened.model.backbone, [context], max_new_tokens=2), 1)
        first, second = text.tokens
        for option in ([first, second], [first, second ^ 1], [first ^ 1, second], [first], [first ^ 1]):
            requests.append(QuestionRequests([Request([*context, *option], len(context))], 0, False))
            right.append(option == text.tokens[: len(option)])
    benchmark = Benchmark("cloze", "test", (Question(("",), ("",), 0, 0),) * len(requests), "greedy")
    texts = [Text(one.requests[0].ids, one.requests[0].start - 1) for one in requests]
    hearing = BenchmarkScores(benchmark, requests, record_texts(opened.model, texts, last=False))
    assert hearing.right(np.full(len(hearing.recorded.logits), 2)).tolist() == right


# ---- Over epsilon ----


SMALL = {"WRITTEN_TEXTS": 24, "WRITTEN_TOKENS": 12, "TIMED_TOKENS": 3, "TIMED_DECODINGS": 1}
SMALL |= {"CALIBRATION_PROMPTS": CALIBRATION_PROMPTS[:4]}
SMALL |= {"EPSILONS": (0.1, 0.5, 0.9, 1.0), "EPSILON_GRID": np.linspace(0.5, 1, 6)}


@pytest.fixture(scope="module")
def swept(opened):
    """The sweep, and the records that it makes: of calibration texts, of fresh ones, and of a held-out one."""
    held = record_texts(opened.model, [Text(list(range(1, 40)))], last=False)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SMALL.items():
            patch.setattr(measure_texts, name, value)
        _, calibration, fresh = written_texts(opened, 0)
        answer = sweep(opened, "breaking_ties", held)
    return answer, record_texts(opened.model, calibration), record_texts(opened.model, fresh), held


def test_the_sweep_takes_thresholds_from_one_text_and_checks_them_on_another(swept):
    answer, calibration, fresh, held = swept
    taken, checked = (observe(recorded, "breaking_ties") for recorded in (calibration, fresh))
    assert [row["epsilon"] for row in answer["rows"]] == [0.1, 0.5, 0.9, 1.0]
    for row in answer["rows"]:
        rule = calibrate(taken, row["epsilon"], measure="breaking_ties")
        exit_index = replay(checked, rule).exit_index
        assert [float(tau) for tau in row["thresholds"]] == list(rule.threshold[:-1])
        assert row["agreement"] == agreement(checked, rule) and row["end_to_end"] == end_to_end(checked, rule)
        assert row["exit_counts"] == [int((exit_index == k).sum()) for k in range(3)]
        assert row["mean_layers"] == pytest.approx((exit_index + 1).mean())
        assert row["perplexity"] == perplexity(held, rule)
    assert answer["full_perplexity"] == perplexity(held, Never()) and answer["tokens_text"] == 38
    assert answer["tokens_fresh"] == len(checked.groups) != answer["tokens_calibration"] == len(taken.groups)
    assert not (calibration.logits.shape == fresh.logits.shape and (calibration.logits == fresh.logits).all())


def test_deeper_on_the_whole_as_epsilon_rises(swept):
    layers = [row["mean_layers"] for row in swept[0]["rows"]]
    assert layers[0] < layers[-1]


def test_speed_is_a_ratio_of_seconds_measured_here(swept):
    answer, *_ = swept
    recomputed = [row["recompute"] for row in answer["rows"]]
    assert [row["seconds"] for row in recomputed] != [row["seconds"] for row in answer["rows"]]
    for row in (*answer["rows"], *recomputed):
        assert row["tokens_per_second"] == pytest.approx(3 * 4 / row["seconds"])
        assert row["speedup"] == pytest.approx(row["tokens_per_second"] / answer["full_tokens_per_second"])


def test_a_row_contains_the_times_of_copy_state_and_of_recompute(opened, monkeypatch):
    for name, value in SMALL.items():
        monkeypatch.setattr(measure_texts, name, value)
    time = {"seconds": 1.0, "tokens_per_second": 1.0}
    monkeypatch.setattr(measure_texts, "timed_decoding", lambda ways, *_: [time | {"way": way} for way in ways])
    for row in sweep(opened, "breaking_ties")["rows"]:
        rule, missing_kv = row["way"]
        assert list(rule.threshold[:-1]) == [float(tau) for tau in row["thresholds"]] and missing_kv == "copy_state"
        assert row["recompute"]["way"] == (rule, "recompute")


def test_each_way_is_decoded_with_its_rule_and_its_fill(opened, monkeypatch):
    ways, wrote, write = [(Fixed(0), "recompute"), (Never(), "copy_state")], [], opened.model.write

    def written(texts, rule, missing_kv, **settings):
        wrote.append((rule, missing_kv))
        return write(texts, rule, missing_kv=missing_kv, **settings)

    monkeypatch.setattr(opened.model, "write", written)
    timed_decoding(ways, opened.model, [[0, 65]], 2)
    assert wrote == ways * (1 + measure_texts.TIMED_DECODINGS)  # in turns


def test_the_depth_of_written_texts_is_that_of_a_mean_token(opened):
    written = [Generated([5, 6, 7], [3, 3, 3]), Generated([8], [1])]
    quality = measure_texts.quality(opened, written, ["", ""], ["", ""])
    assert (quality["mean_layers"], quality["layers_saved"]) == (10 / 4, pytest.approx(1 - 10 / 4 / 3))


def test_of_written_texts_the_median_of_the_rounds_that_are_warm_is_their_time(monkeypatch):
    clock, rounds = [0.0], iter([50.0, *range(1, 1 + measure_texts.TIMED_DECODINGS)])

    def written():
        clock[0] += next(rounds)
        return [Generated([5, 6, 7], [1, 1, 1]), Generated([5], [3])]

    monkeypatch.setattr(measure_texts, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
    point = {}
    measure_texts.measure_speed([(point, written)])
    assert point == {"tokens_per_second": 4 / np.mean([1, measure_texts.TIMED_DECODINGS])}


def test_without_exits_the_text_is_wholly_the_full_models(opened):
    prompts = [[0, 65, 70], [0, 80]]
    rules = [Never(), Fixed(2), Fixed(0)]
    ways = [(rule, "recompute") for rule in rules]
    never, last, first = timed_decoding(ways, opened.model, prompts, 8)
    assert (never["decoded_agreement"], never["decoded_layers"]) == (1, 3)
    assert (last["decoded_agreement"], last["decoded_layers"]) == (1, 3)
    assert first["decoded_agreement"] < 1 and first["decoded_layers"] == 1


def test_measures_are_compared_at_the_epsilon_that_reaches_the_level(swept):
    answer, calibration, fresh, _ = swept
    assert [row["measure"] for row in answer["measures"]] == [
        measure for measure in COMPARED_MEASURES for _ in AGREEMENT_LEVELS
    ]
    strict = set()
    for row in at_equal_agreement(calibration, fresh, COMPARED_MEASURES, (0.9, 0.99, 1.0)):
        taken, checked = (observe(recorded, row["measure"]) for recorded in (calibration, fresh))
        rule = calibrate(taken, row["epsilon"], measure=row["measure"])
        assert end_to_end(taken, rule) >= row["level"] and row["end_to_end"] == end_to_end(checked, rule)
        below = EPSILON_GRID[EPSILON_GRID < row["epsilon"]]
        for epsilon in below[-1:]:
            assert end_to_end(taken, calibrate(taken, epsilon, measure=row["measure"])) < row["level"]
        strict |= {row["measure"]} if len(below) else set()
    assert strict == set(COMPARED_MEASURES)


def test_the_picture_omits_what_was_not_measured(tmp_path, swept):
    rows = [{key: value for key, value in row.items() if key != "perplexity"} for row in swept[0]["rows"]]
    draw_decoder(tmp_path / "picture.png", swept[0] | {"rows": rows}, [])
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


# ---- The command ----


@pytest.fixture
def hellaswag(tmp_path):
    folder = tmp_path / "data"
    folder.mkdir()
    rows = [{"ctx": f"A cat {i}", "label": i % 2, "endings": [" sat.", "ran off."]} for i in range(6)]
    (folder / "hellaswag.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder


def test_evaluate_scores_a_benchmark_under_the_runs_own_rule_or_another(capsys, run_folder, hellaswag):
    evaluated = answer(capsys, "evaluate", run_folder, "--task", hellaswag)
    assert (
        evaluated["rule"]["threshold"][:2] == [0.015, 0.012]
        and evaluated["method"] == "self-supervised"
        and evaluated["rows"] == 6
    )
    assert sum(evaluated["exit_counts"]) == 6 * (6 + 9) and 1 < evaluated["mean_layers"] < 3
    assert evaluated["layers_saved"] == pytest.approx(1 - evaluated["mean_layers"] / 3) and "speedup" not in evaluated
    fixed = answer(capsys, "evaluate", run_folder, "--task", hellaswag, "--layer", 2)
    assert fixed["mean_layers"] == 2 and fixed["accuracy"] == evaluated["per_exit_accuracy"][1]
    loose = answer(
        capsys, "evaluate", run_folder, "--task", hellaswag, "--threshold", 0, "--measure", "max_probability"
    )
    assert loose["exit_counts"][1:] == [0, 0] and loose["rule"]["measure"] == "max_probability"
    agreed = answer(capsys, "evaluate", run_folder, "--task", hellaswag, "--patience", 1)
    assert agreed["exit_counts"][0] == 0 < agreed["exit_counts"][1] and agreed["rule"]["name"] == "patience"
    never = answer(capsys, "evaluate", run_folder, "--task", hellaswag, "--rule", "never", "--max-rows", 4)
    assert never["rows"] == 4 and never["accuracy"] == never["full_accuracy"] and never["mean_layers"] == 3


def test_evaluate_takes_a_plain_decoder(capsys, decoder_folder, run_folder, hellaswag):
    plain = answer(capsys, "evaluate", decoder_folder, "--task", hellaswag)
    full = answer(capsys, "evaluate", run_folder, "--task", hellaswag, "--rule", "never")
    assert plain["exits"] == [3] and plain["exit_counts"] == [90]
    assert plain["accuracy"] == full["full_accuracy"]
    assert plain["log_likelihood"] == pytest.approx(full["log_likelihood"], abs=ATOL)


@pytest.mark.slow
def test_the_sweep_prints_a_table_and_draws(capsys, monkeypatch, tmp_path, run_folder, hellaswag):
    small = {
        "WRITTEN_TEXTS": 12,
        "WRITTEN_TOKENS": 8,
        "TIMED_TOKENS": 2,
        "CALIBRATION_PROMPTS": CALIBRATION_PROMPTS[:4],
        "PERPLEXITY_TOKENS": 16,
        "TIMED_DECODINGS": 1,
        "EPSILONS": (0.5, 0.9),
        "EPSILON_GRID": np.linspace(0.5, 1, 6),
    }
    for name, value in small.items():
        monkeypatch.setattr(measure_texts, name, value)
    text, picture = tmp_path / "held.txt", tmp_path / "picture.png"
    text.write_text("A held-out story of some words. " * 9)
    options = ("--sweep", "--task", hellaswag, "--text", text, "--picture", picture)
    assert main(["evaluate", *map(str, [run_folder, *options])]) == 0
    out = capsys.readouterr().out
    assert "epsilon" in out and "HellaSwag" in out and "perplexity" in out and "breaking_ties_logits" in out
    assert picture.stat().st_size > 10_000
    entropy = answer(capsys, "evaluate", run_folder, "--sweep", "--measure", "entropy")
    assert entropy["measure"] == "entropy" and [row["epsilon"] for row in entropy["rows"]] == [0.5, 0.9]
    assert not {"perplexity", "accuracy"} & set(entropy["rows"][0])


def test_a_name_is_no_formula(tmp_path):
    figure, axes = new_figure()
    axes.plot([0, 1], [0, 1], label="run $a_$")
    axes.set(title="cost$_$", ylabel="$_$", xlabel="$_$")
    axes.legend()
    save_figure(figure, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 1000


def test_compare_shows_runs_on_one_decoder_as_fig_1_does(capsys, monkeypatch, tmp_path, run_folder, decoder_folder):
    for name, value in {"WRITTEN_TEXTS": 12, "WRITTEN_TOKENS": 8, "EPSILON_GRID": np.array([0.1, 1.0])}.items():
        monkeypatch.setattr(measure_texts, name, value)
    monkeypatch.setattr(measure_texts, "TIMED_DECODINGS", 1)
    monkeypatch.setattr(measure_compare, "AGREEMENT_LEVEL", 0.1)
    other, picture = tmp_path / "$a_$", tmp_path / "picture.png"
    history = [{"step": step, "loss": 1.0, "agreement": [0.5], "entropy": [3.0 - step]} for step in (0, 1)]
    metrics = {"history": history, "agreement": [0.5], "entropy": [2.0]}
    write_run(other, decoder_folder, (2, 3), Never(), {"penalty": 0.5}, metrics)
    argv = ["compare", str(run_folder), str(other), "--picture", str(picture), "--max-rows", "2", "--json"]
    assert main(argv) == 0
    compared = json.loads(capsys.readouterr().out)
    first, second = compared["heads"]
    assert compared["level"] == 0.1 and (compared["texts"], compared["task"]) == (2, "pieces")
    assert [(row["run"], row["measure"]) for row in compared["rows"]] == [
        *((str(run_folder), "full model"), (str(run_folder), "threshold")),
        *((str(other), "full model"), (str(other), "never")),
    ]
    assert all(row["rouge_l"] == 1 for row in compared["rows"] if row["mean_layers"] == 3)
    assert (first["agreement"], first["entropy"], first["init"]) == ([0.2, 0.4], [2.0, 1.0], "copy")
    assert (second["entropy"], second["init"], second["penalty"]) == ([2.0], "copy", 0.5)
    opened = load_run(other)
    prompts = [[0, *map(opened.tokenizer.backend.token_to_id, text.replace(" ", "Ġ"))] for text in CALIBRATION_PROMPTS]
    written = (generated_texts(opened.model.backbone, prompts, 12, 8, stop=[5], seed=seed) for seed in (0, 12))
    taken, checked = (observe(record_texts(opened.model, texts), "breaking_ties") for texts in written)
    rule = calibrate(taken, second["equal"]["epsilon"], measure="breaking_ties")
    assert second["equal"]["end_to_end"] == end_to_end(checked, rule) and second["equal"]["exit_counts"][0] > 0
    assert second["equal"]["mean_layers"] == pytest.approx(np.array([2, 3])[replay(checked, rule).exit_index].mean())
    assert picture.stat().st_size > 5000


def test_runs_on_other_decoders_are_compared_by_what_they_write_alone(
    capsys, monkeypatch, tmp_path, run_folder, decoder_folder
):
    monkeypatch.setattr(measure_texts, "TIMED_DECODINGS", 1)
    other = decoder_folder.with_name("decoder-2")
    with torch.random.fork_rng():
        torch.manual_seed(1)
        save_backbone(Decoder(load_backbone(decoder_folder).config), other)
    (other / "tokenizer.json").write_bytes((decoder_folder / "tokenizer.json").read_bytes())
    write_run(tmp_path / "run", other, (1, 3), Never())
    assert main(["compare", str(run_folder), str(tmp_path / "run"), "--max-rows", "2", "--json"]) == 0
    compared = json.loads(capsys.readouterr().out)
    assert compared["heads"] == [] and len(compared["rows"]) == 4
    for argv, message, status in (
        ([run_folder, decoder_folder], "give a folder that `mini-ee train` wrote", 1),
        ([run_folder, run_folder, "--task", "x"], "--task is not for decoders", 2),
        ([run_folder, run_folder, "--schedule", "restart"], "--schedule is for runs of lora-exits", 2),
    ):
        assert main(["compare", *map(str, argv)]) == status
        assert message in capsys.readouterr().err


def test_an_exported_decoder_is_refused_if_a_run_is_expected(capsys, tmp_path, run_folder, hellaswag):
    assert main(["export", str(run_folder), "--out", str(tmp_path / "exported")]) == 0
    a_run = "expected a run, found an export; give the run that it came from"
    for command, message in (
        (["evaluate", "--task", str(hellaswag)], a_run),
        (["compare"], a_run),
    ):
        capsys.readouterr()
        assert main([command[0], str(tmp_path / "exported"), *command[1:]]) == 2
        assert f"exported: {message}" in capsys.readouterr().err


def test_stories_are_read_whole_whatever_a_row_may_hold(tmp_path, opened):
    stories = ["".join(np.random.default_rng(seed).choice(list("abcdefgh"), 300)) for seed in range(3)]
    (tmp_path / "text.txt").write_text("\n\n".join(stories))
    assert json.loads((opened.folder / "config.json").read_text())["max_length"] == 128  # as runs from before have it
    options = TextOptions(text=tmp_path / "text.txt", new_tokens=200)
    assert len(Source(opened.model.backbone, opened.tokenizer, options, 3).stories()) == 3


def test_a_prompt_is_saved_as_it_is_read_again():
    for prompt in ("Once", ("Once", "Long ago")):
        fields = TextOptions(prompt=prompt).to_dict()
        assert json.loads(json.dumps(fields)) == fields and fields["prompt"][0] == "Once"


@pytest.mark.parametrize("text", [None, "file"])
def test_what_pieces_are_tested_on_was_not_learned(tmp_path, opened, text):
    letters = np.random.default_rng(0).choice(list("abcdefghijklmnop"), 1000)
    (tmp_path / "text.txt").write_text("".join(letters))
    options = TextOptions(kind="pieces", text=text and tmp_path / "text.txt", new_tokens=8, texts=60)
    source = Source(opened.model.backbone, opened.tokenizer, options, 3)
    train, held = texts_to_learn(source)
    tested = texts_to_test(source, 50)
    assert len(tested) == (6 if text else 50) and len(train) == (54 if text else 60)
    assert not {tuple(piece.ids) for piece in tested} & {tuple(piece.ids) for piece in train.texts}
    assert all(0 < piece.start < len(piece.ids) for piece in tested)
    if text:  # the first half of each is given
        assert tested == [Text(piece.ids, 4) for piece in held.texts]
    else:
        parts = [
            {tuple(one.ids) for one in some} for some in (train.texts, held.texts, tested, texts_to_calibrate(source))
        ]
        assert len(set().union(*parts)) == sum(map(len, parts))
    assert texts_to_learn(source)[0].texts == train.texts != texts_to_learn(source._replace(seed=4))[0].texts


@pytest.mark.parametrize("kind, text", [("continue", None), ("continue", "file"), ("copy", "file")])
def test_what_stories_are_tested_on_was_neither_learned_nor_held_out(tmp_path, opened, monkeypatch, kind, text):
    monkeypatch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 6)
    monkeypatch.setattr("mini_ee.lab.training.training_text.GIVEN", 8)
    letters = np.random.default_rng(0).choice(list("abcdefgh"), (40, 4, 5))
    (tmp_path / "text.txt").write_text("\n\n".join(f"{' '.join(map(''.join, words))}." for words in letters))
    options = TextOptions(kind=kind, text=text and tmp_path / "text.txt", new_tokens=8, texts=30)
    source = Source(opened.model.backbone, opened.tokenizer, options, 3)
    (train, held), others = texts_to_learn(source), texts_to_learn(source._replace(seed=4))
    parts = [{tuple(story.ids) for story in some} for some in (train.texts, held.texts, texts_to_test(source, 40))]
    assert [len(part) for part in parts] == [30, 6, 4 if text else 40]
    assert len(set().union(*parts)) == sum(map(len, parts))
    assert texts_to_learn(source)[1].texts == held.texts != others[1].texts
    assert text or not parts[0] & {tuple(story.ids) for story in others[0].texts}


@pytest.mark.parametrize(
    "argv, status, message",
    [
        (["RUN"], 2, "without --task a decoder's run goes with --sweep"),
        (["RUN", "--task", "DATA", "--picture", "a.png"], 2, "--text and --picture go with --sweep: add it"),
        (["RUN", "--task", "nowhere"], 2, "nowhere: no such folder; expected one that holds a .jsonl"),
        (["RUN", "--task", "."], 1, "expected a folder that holds a .jsonl file (ctx, "),
        (["RUN", "--task", "DATA", "--layer", "4"], 2, "--layer must be one of the exits 1,2,3, got 4"),
        (["RUN", "--task", "DATA", "--rule", "threshold"], 2, "the rule threshold needs --threshold"),
        (["RUN", "--task", "DATA", "--threshold", ".1,.2"], 2, "expected one threshold or 3"),
        (["RUN", "--task", "DATA", "--threshold", "2"], 2, "a threshold on breaking_ties must be from 0.0 to 1.0"),
        (["RUN", "--task", "DATA", "--rule", "policy"], 2, "the rule policy needs a model with a policy"),
        (["RUN", "--task", "DATA", "--split", "dev"], 2, "unrecognized arguments for a decoder: --split dev"),
        (["RUN", "--task", "DATA", "--rule", "never", "--layer", "1"], 2, "the rule never does not take --layer"),
        (
            ["RUN", "--task", "DATA", "--layer", "1", "--measure", "entropy"],
            2,
            "the rule fixed does not take --measure",
        ),
        (["RUN", "--sweep", "--threshold", ".5"], 2, "--sweep calibrates the thresholds: leave out --threshold"),
        (["RUN", "--sweep", "--text", "missing.txt"], 2, "missing.txt: No such file or directory"),
        (["RUN", "--sweep", "--text", "BYTES"], 2, "expected text in UTF-8, found invalid start byte at byte 3"),
        (["RUN", "--sweep", "--text", "SHORT"], 1, "expected a text of at least 95 tokens, got 4"),
        (["RUN", "--sweep", "--fallback-top", "1"], 2, "unrecognized arguments for a decoder: --fallback-top 1"),
        (["PLAIN", "--sweep"], 2, "a decoder without exits has no epsilon"),
        (["PLAIN", "--task", "DATA", "--threshold", ".5"], 2, "the rule threshold needs exits before the last layer"),
    ],
)
def test_wrong_input_is_one_line(
    capsys, tmp_path, monkeypatch, run_folder, decoder_folder, hellaswag, argv, status, message
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "bytes.txt").write_bytes(b"abc\xff")
    (tmp_path / "short.txt").write_text("abcd")
    names = {"RUN": run_folder, "PLAIN": decoder_folder, "DATA": hellaswag, "BYTES": "bytes.txt", "SHORT": "short.txt"}
    assert message in refused(capsys, "evaluate", *[names.get(part, part) for part in argv], status=status)


@pytest.mark.skipif(not SHARED, reason="needs MINI_EE_SHARED, the folder with the real data (2026-11)")
def test_the_cloze_is_above_chance_on_a_real_decoder(capsys):
    folder, data = Path(SHARED) / "weights" / "stories260K", Path(SHARED) / "data" / "TinyStories"
    evaluated = answer(capsys, "evaluate", folder, "--task", data, "--max-rows", 30)
    assert evaluated["accuracy"] > 0.05
