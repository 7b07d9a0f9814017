"""The leaderboard's decoders: what is trained and when, records against live decoding, rules, speed, and the tables."""

import json
import time

import numpy as np
import pytest
import tokenizers
import torch
from conftest import random_decoder, save_small_llama

from mini_ee.experiments import trainings
from mini_ee.experiments.leaderboard import decoders, decoding_figures, pictures, token_figures
from mini_ee.experiments.leaderboard.token_rules import (
    GAP,
    gap_rules,
    outcome,
    own_rules,
    rule_at,
    rule_within,
    score_of_rates,
)
from mini_ee.experiments.pages import page_of
from mini_ee.experiments.records import SeedRecord, read_about, read_records, write_record
from mini_ee.experiments.trainings import Sources
from mini_ee.lab import calibration
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER
from mini_ee.lab.baselines.dynamic_exit_layer import DynamicExits
from mini_ee.lab.baselines.sleb import ShortDecoder
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.files import file_sha256, sole_writer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.rules import Fixed, Never, Threshold
from mini_ee.lab.training import training_text
from mini_ee.lab.training.method import load_method

pytestmark = pytest.mark.slow
NO_PICTURE = {"picture": {"leaderboard-decoders": False}, "least_seeds": 3}
LETTERS = "abcdefghijklmnopqrstuvwxyz "
TINY = decoders.DecoderExam("tiny", "tiny", "stories.txt", 12, 1, decoders.RATES[:2], new_tokens=8, recorded_texts=6)


@pytest.fixture(scope="module", autouse=True)
def small():
    """A tiny exam, three methods, few texts, and no intervals of thresholds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoders, "EXAMS", (TINY,))
        patch.setattr(token_figures, "EXAMS", (TINY,))
        patch.setattr(decoders, "token_methods", lambda: ["joint", "pabee", "sleb"])
        patch.setattr(decoding_figures, "TIMED_TEXTS", 1)
        patch.setattr(decoders, "DRAFTED_TEXTS", 2)
        patch.setattr(decoders, "LOSSLESS_TEXTS", 2)
        patch.setattr(training_text, "HELD_STORIES", 10)
        patch.setattr(calibration, "intervals", lambda observed, *_: np.zeros((observed.confidence.shape[1], 2)))
        yield


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """A folder with a random Llama over letters, and 130 texts of 60 random letters."""
    folder = tmp_path_factory.mktemp("sources")
    vocabulary = {"<s>": 0} | {letter: number for number, letter in enumerate(LETTERS, 1)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, []))
    tokenizer.decoder = tokenizers.decoders.Fuse()
    (folder / "weights").mkdir()
    save_small_llama(folder / "weights" / "tiny", tokenizer, num_hidden_layers=5, max_position_embeddings=64)
    (folder / "data").mkdir()
    letters = np.random.default_rng(0).choice([*LETTERS[:-1]], (130, 60))
    (folder / "data" / "stories.txt").write_text("\n\n".join("".join(word) for word in letters))
    return Sources(folder, folder / "made")


def run(out, sources, seeds=(0,), only=None):
    lines = []
    return decoders.run_decoders(out, sources, seeds, only, False, lines.append, []), lines


@pytest.fixture(scope="module")
def results(tmp_path_factory, sources):
    out = tmp_path_factory.mktemp("results")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(decoding_figures, "ROUNDS", 1)
        ran, lines = run(out, sources)
    assert ran == 2 and [line for line in lines if "seed 0" in line] == ["tiny joint, seed 0", "tiny sleb, seed 0"]
    return out


@pytest.fixture
def exits():
    with torch.random.fork_rng():
        torch.manual_seed(2)
        return TokenExits(random_decoder("llama", 4), (1, 2, 4)).eval()


def random_texts(count, length, seed=0):
    ids = np.random.default_rng(seed).integers(1, 60, (count, length)).tolist()
    return [Text(row_ids, 3) for row_ids in ids]


# ---- What is trained ----


def test_a_recorded_seed_is_not_trained_again_and_a_deleted_one_is(results, sources):
    joint, sleb = (results / "records" / "decoders-tiny" / f"{name}.npz" for name in ("joint", "sleb"))
    before = joint.read_bytes()
    assert run(results, sources)[0] == 0
    sleb.unlink()
    ran, lines = run(results, sources)
    assert ran == 1 and "tiny sleb, seed 0" in lines and not any("joint" in line for line in lines)
    assert joint.read_bytes() == before and sleb.exists()
    assert not [*(results / "leaderboard" / "runs").rglob("config.json")]


def test_a_record_with_other_settings_or_without_a_method_is_made_again(results, monkeypatch):
    (joint, _) = decoders.trainings(False)
    assert joint.methods == ("joint", "pabee") and decoders.is_recorded(results, joint, 0)
    assert not decoders.is_recorded(results, joint, 1)
    assert not decoders.is_recorded(results, joint._replace(methods=("joint", "pabee", "new")), 0)
    assert not decoders.is_recorded(results, joint._replace(exam=TINY._replace(epochs=2)), 0)


def test_another_process_has_the_training_that_it_runs(results, sources):
    sleb = decoders.trainings(False, "sleb")[0].record(results)
    with sole_writer(sleb):
        ran, lines = run(results, sources, seeds=(1,), only="sleb")
    assert ran == 0 and lines[-1].startswith("1 trainings are left to other processes")
    with pytest.raises(WrongArguments, match="expected one of joint, pabee, sleb"):
        run(results, sources, only="raee")


def test_a_record_names_the_gpu_that_trained(tmp_path, sources, monkeypatch):
    real = decoders.trained
    monkeypatch.setattr(decoders, "trained", lambda folder, options, seed, _: real(folder, options, seed, sources))
    monkeypatch.setattr(trainings, "check_device", lambda device: None)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: f"the card {device}")
    monkeypatch.setattr(decoding_figures, "ROUNDS", 1)
    run(tmp_path, Sources(sources.folder, sources.made, "cuda:1"), only="sleb")
    (training,) = decoders.trainings(False, "sleb")
    assert read_about(training.record(tmp_path))[0]["how"]["gpu"] == "the card cuda:1"


def test_rates_are_chosen_with_the_first_seed_by_ln_p(results, sources):
    (training,) = decoders.trainings(False, "pabee")
    made = read_records(training.record(results))[0]
    metadata, tried = made.about, made.about["tried"]
    chosen = next(trial for trial in tried if trial["rates"] == metadata["rates"])
    assert chosen["score"] == pytest.approx(score_of_rates(made.held_out), abs=2e-3)
    assert [(trial["rates"]["lr"], trial["rates"]["head_lr"]) for trial in tried] == [*TINY.rates]
    assert all(trial["seed"] == 0 for trial in tried)
    assert (
        metadata["rates"] == max(tried, key=lambda trial: trial["score"])["rates"]
        and metadata["rates"] in training.rates
    )
    assert {"search", "training", "recording", "decoding"} == metadata["cpu_seconds"].keys()


def test_methods_share_a_training_only_if_they_are_trained_alike(monkeypatch):
    monkeypatch.undo()  # the methods of the registry
    names = [name for name in decoders.METHODS if "tokens" in load_method(name).units]
    monkeypatch.setattr(decoders, "token_methods", lambda: names)
    groups = [training.methods for training in decoders.trainings(False)]
    assert sorted(name for group in groups for name in group) == sorted(names)
    assert ("joint", "pabee", "pcee-bert") in groups and ("two-stage", "deebert") in groups and ("calm",) in groups


def test_texts_are_the_same_for_all_methods_and_calibration_is_apart(sources):
    joint, sleb = decoders.trainings(False)
    decoder = TokenExits(decoders.load_backbone(TINY.model_folder(sources)), (5,))
    calibration_texts, reported = decoders.texts_of(joint, decoder, sources, 3)
    assert (calibration_texts, reported) == decoders.texts_of(sleb, decoder, sources, 3)
    assert len(calibration_texts) == len(reported) == 6 and all(len(text.ids) == 48 for text in reported)
    assert not {tuple(text.ids) for text in calibration_texts} & {tuple(text.ids) for text in reported}
    assert decoders.QUICK_EXAMS[0].model_folder(sources) == BUILT_IN_DECODER


def test_a_training_that_fails_is_named_and_the_others_go_on(tmp_path, sources, monkeypatch):
    def trained(folder, options, seed, sources):
        raise decoders.Diverged("the loss is NaN") if options["method"] == "joint" else ValueError("no memory")

    monkeypatch.setattr(decoders, "trained", trained)
    failed = []
    assert decoders.run_decoders(tmp_path, sources, (0,), None, False, lambda line: None, failed) == 0
    assert failed == ["tiny joint, seed 0: all rates diverge", "tiny sleb, seed 0: no memory"]


# ---- Records and rules ----


def test_a_rule_on_a_record_that_was_read_back_exits_as_in_decoding(tmp_path, exits):
    prompts, threshold = [Text(text.ids[:6], 5) for text in random_texts(8, 12)], 0.2
    rule = Threshold((threshold, threshold, -np.inf), GAP)
    written = exits.write(prompts, rule, max_new_tokens=10, missing_kv="recompute", stop=())
    whole = [Text([*prompt.ids, *continuation.tokens], 5) for prompt, continuation in zip(prompts, written)]
    made = decoders.token_record(exits, whole)
    read = write_record(tmp_path / "a.npz", 0, SeedRecord(made, made, {})).reported
    assert abs(made.confidence(GAP) - threshold).min() > 1e-4  # float16 changes no decision
    replayed = outcome(read, rule)
    assert replayed.depth.tolist() == [layers for continuation in written for layers in continuation.layers_run]
    assert set(replayed.depth) == {1, 2, 4}
    full = record_texts(exits, whole, last=False)
    exit_index = np.searchsorted(exits.exits, replayed.depth)
    predicted = full.predictions[np.arange(len(exit_index)), exit_index]
    assert predicted.tolist() == [token for continuation in written for token in continuation.tokens]
    assert replayed.agreement == (predicted == full.predictions[:, -1]).mean()
    assert np.allclose(replayed.log_p, full.logits[np.arange(len(exit_index)), exit_index, 0], rtol=2e-3)
    paid = [costs[: k + 1].sum() for costs, k in zip(read.segments.costs[0], exit_index)]  # layers and heads
    assert np.allclose(replayed.flops, paid / read.full, rtol=1e-3) and replayed.flops.max() > 1 > replayed.flops.min()


def test_the_rule_at_a_level_saves_most_among_those_that_reach_it(exits):
    recorded = decoders.token_record(exits, random_texts(12, 16))
    rules = gap_rules(recorded)
    results = [(outcome(recorded, rule), rule) for rule in rules]
    for level in (0.5, 0.9):
        reached = [result.depth.mean() for result, _ in results if result.agreement >= level]
        chosen = outcome(recorded, rule_at(rules, recorded, level))
        assert chosen.agreement >= level and chosen.depth.mean() == min(reached) < 4
    assert rule_at(rules[:1], recorded, 1.01) == Never()
    fixed = [Fixed(k) for k in range(2)]
    log_p = [outcome(recorded, rule).log_p.mean() for rule in fixed]
    assert rule_within([], recorded, 0.5) == fixed[int(np.argmax(log_p))]
    assert rule_within([], recorded, 0.25) == fixed[0] and rule_within(fixed, recorded, 0.2) is None
    within = [result for result, _ in results] + [outcome(recorded, rule) for rule in fixed]
    assert score_of_rates(recorded) == max(result.log_p.mean() for result in within if result.depth.mean() <= 3)
    assert own_rules(load_method("pabee"), recorded)[0].name == "patience"
    assert own_rules(load_method("joint"), recorded) == rules


def test_a_model_of_fewer_layers_is_an_exit_before_its_full_model(exits):
    short = ShortDecoder(random_decoder("llama", 4)).eval()
    short.keep([0, 1, 3])
    texts = random_texts(5, 12)
    recorded = decoders.token_record(short, texts)
    parts = [record_texts(model, texts, last=False) for model in (short, short.whole)]
    assert recorded.segments.exits == (3, 4) and recorded.full_flops == parts[1].full_flops
    assert (recorded.predictions == np.concatenate([part.predictions for part in parts], axis=1)).all()
    for k, part in enumerate(parts):
        cost = recorded.replay(Fixed(k)).cost
        assert np.allclose(cost.flops, part.replay(Fixed(0)).cost.flops) and (cost.depth == 3 + k).all()
    assert own_rules(load_method("sleb"), recorded) == [Fixed(0)]


# ---- Decoding ----


def test_speed_is_processor_time_and_waiting_does_not_count():
    def busy(seconds):
        def work(texts):
            assert len(texts) == 1
            time.sleep(0.02 - seconds)
            end = time.process_time() + seconds
            while time.process_time() < end:
                pass

        return work

    half, double = decoding_figures.speed_ups(busy(0.008), [busy(0.016), busy(0.004)], random_texts(2, 6))
    assert 0.4 < half < 0.65 and 1.6 < double < 2.3


def test_lossless_text_is_the_full_models_whoever_chooses_the_exit(exits):
    with torch.random.fork_rng():
        torch.manual_seed(2)
        dynamic = DynamicExits(random_decoder("llama", 4), (1, 2, 4)).eval()
    for model, layers in ((exits, (1, 2)), (dynamic, (None,))):
        measured = decoding_figures.lossless_figures(model, random_texts(2, 9), random_texts(4, 12, 1))
        assert measured["equal_texts"] == 1 and measured["layer"] in layers and 0 <= measured["drafted"] < 1


def test_both_fills_are_measured_and_recomputing_agrees_as_the_rule_does(exits):
    class Letters:
        backend = type("Backend", (), {"decode": staticmethod(lambda ids: " ".join(map(str, ids)))})

    rule, texts = Threshold((0.1, 0.1, -np.inf), GAP), random_texts(6, 16)
    measured = decoding_figures.decoding_figures(exits, rule, texts, Letters)
    written = exits.write(texts, rule, max_new_tokens=12, missing_kv="recompute", stop=())
    whole = [Text([*text.ids[:4], *continuation.tokens], 3) for text, continuation in zip(texts, written)]
    again = outcome(decoders.token_record(exits, whole), rule)
    assert measured["recompute"]["agreement"] == pytest.approx(again.agreement)
    assert measured["recompute"]["layers_saved"] == pytest.approx(1 - again.depth.mean() / 4)
    assert measured.keys() == {"copy_state", "recompute"} and measured["copy_state"] != measured["recompute"]
    assert decoding_figures.decoding_figures(exits, Never(), texts, Letters) == {}


# ---- The page ----


def test_the_rows_are_made_from_records_alone_and_what_is_missing_is_named(results, sources, tmp_path):
    (shown,) = token_figures.decoder_figures(token_figures.read_decoders(results, False), False)
    assert token_figures.decoder_figures(token_figures.read_decoders(tmp_path, False), False) == []
    assert (shown["name"], shown["layers"], shown["texts"], shown["source"]) == ("tiny", 5, 12, "stories.txt")
    assert shown["missing"] == [] and shown["faster"] == []  # one seed has no interval
    rows = {row[0]: row for row in shown["rows"]}
    csv = {row["method"]: row for row in token_figures.decoder_rows(token_figures.read_decoders(results, False))}
    exam = token_figures.read_exam(results, TINY, False)
    assert rows.keys() == csv.keys() == exam.keys() == {"joint", "pabee", "sleb"}
    for name, of_method in exam.items():
        method = of_method.abouts[0]["settings"]["method"]
        made = read_records(results / "records" / "decoders-tiny" / f"{method}.npz")[0]
        rules = made.about["methods"][name]["rules"]
        at_level = outcome(made.reported, token_figures.rule_from_dict(rules["0.9"]))
        saved, flops = 1 - at_level.depth.mean() / 5, 1 - at_level.flops.mean()
        assert of_method.values["saved 0.9"].mean() == pytest.approx(saved)
        assert of_method.values["FLOPs 0.9"].mean() == pytest.approx(flops)
        candidates = own_rules(load_method(name), made.held_out)
        assert json.loads(json.dumps(rule_at(candidates, made.held_out, 0.9).to_dict())) == rules["0.9"]
        perplexity = np.exp(-made.reported.logits[:, -1, 0].mean())
        assert rows[name][6] == f"{perplexity:.2f}" and float(csv[name]["saved 0.9"]) == pytest.approx(saved, abs=1e-4)
        if name != "sleb":  # all of its rules agree too rarely
            assert rows[name][3:5] == [f"{100 * saved:.1f} ±?", f"{100 * flops:.1f} ±?".replace("-0.0", "0.0")]
    assert rows["sleb"][1:6] == ["–"] * 5 and "lossless speedup" not in csv["sleb"]
    assert [row[0] for row in shown["lossless"]] == ["joint"]  # pabee shares its training, and no exit of sleb drafts
    config = json.loads((sources.folder / "weights" / "tiny" / "config.json").read_text())
    hidden, inner, letters = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    tokens = 47 - (TINY.new_tokens - 1) / 2  # that a token attends to, on average
    layer = 2 * (3 * hidden**2 + 3 * hidden * inner + 2 * tokens * hidden)  # keys and values have half of the width
    assert exam["joint"].head_layers == pytest.approx(2 * hidden * letters / layer, rel=1e-6)
    assert csv["joint"]["sha256 of stories.txt"] == file_sha256(sources.folder / "data" / "stories.txt")
    assert csv["joint"]["processor"] == exam["joint"].abouts[0]["how"]["processor"]
    saved = {name: rows[name][4] for name in ("joint", "pabee") if rows[name][4] != "–"}
    assert saved and token_figures.flops_saved({TINY: exam}) == ("tiny", saved)
    assert token_figures.flops_saved({}) == ("", {})
    page = page_of("leaderboard/decoders", {"decoders": [shown], "level": 0.9, "share": 0.75} | NO_PICTURE)
    assert all(f"| {' | '.join(row)} |" in page for row in shown["rows"])
    (results / "records" / "decoders-tiny" / "sleb.npz").rename(tmp_path / "sleb.npz")
    (shown,) = token_figures.decoder_figures(token_figures.read_decoders(results, False), False)
    (tmp_path / "sleb.npz").rename(results / "records" / "decoders-tiny" / "sleb.npz")
    assert shown["missing"] == ["sleb"] and "sleb" not in [row[0] for row in shown["rows"]]


def test_seconds_of_trainings_on_a_gpu_are_not_given(results):
    joint = token_figures.read_exam(results, TINY, False)["joint"]
    on_a_gpu = [metadata | {"how": metadata["how"] | {"gpu": "G100"}} for metadata in joint.abouts]
    both = [
        metadata | {"cpu_seconds": metadata["cpu_seconds"] | {"training": seconds}}
        for metadata, seconds in zip([*on_a_gpu, *joint.abouts], (9, 70))
    ]
    (row,) = token_figures.decoder_rows({TINY: {"joint": joint._replace(abouts=both)}})
    assert row["training seconds"] == "70" and row["gpu"] == "G100"
    (row,) = token_figures.decoder_rows({TINY: {"joint": joint._replace(abouts=on_a_gpu)}})
    assert row["training seconds"] == ""


def drawn_method(name, speed, spread=0.01):
    """A method on the tiny exam with three seeds; its other fill is slower."""
    draw = np.random.default_rng(0).normal(0, 0.01, (3, 20))
    values = {"saved 0.9": 0.3 + draw, "ln p full": np.full((3, 20), -1.0), "ln p 0.9": np.full((3, 20), -2.0)}
    speeds = np.array([[1.0], [1.0 + spread], [1.0 - spread]])
    values |= {"speed-up copy_state": speeds * (speed - 0.5), "speed-up recompute": speeds * speed}
    return token_figures.Figures((0, 1, 2), values, [], name, (3, 5), np.zeros((3, 2)), 0.5)


def test_the_faster_fill_counts_and_a_method_is_faster_if_its_interval_is_above_1(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    methods = {
        name: drawn_method(name, *speed) for name, speed in {"slow": (0.8,), "open": (1.1, 0.2), "fast": (1.2,)}.items()
    }
    speeds = token_figures.fastest(TINY, methods)
    assert [*speeds] == ["fast", "open", "slow"] and speeds["fast"].mean == pytest.approx(1.2)
    abouts = [{"original": {"perplexity": 4.5}, "lossless": {}}]
    every = {name: of_method._replace(abouts=abouts) for name, of_method in methods.items()}
    monkeypatch.setattr(token_figures, "_row", lambda *_: [])
    (shown,) = token_figures.decoder_figures({TINY: every}, False)
    assert shown["faster"] == ["fast"] and shown["methods"] == 3 and shown["perplexity"] == 4.5
    quickest = shown["quickest"]
    assert quickest["name"] == "fast" and quickest["after"] == pytest.approx(np.exp(2))
    saved = []
    monkeypatch.setattr(pictures, "save_figure", lambda figure, path: saved.append(figure))
    pictures.draw_decoders(tmp_path / "a.png", {TINY: methods})
    (axes,) = saved[0].axes
    dots = [line for line in axes.lines if line.get_marker() == "o"]
    assert [line.get_xdata()[0] for line in dots] == pytest.approx([0.8, 1.1, 1.2]) and len(
        {line.get_color() for line in dots}
    ) == 3
    assert [label.get_text() for label in axes.get_yticklabels()] == ["slow", "open", "fast"]


def test_a_seed_without_a_rule_decodes_in_full(results, tmp_path):
    (joint, _) = decoders.trainings(False)
    made = read_records(joint.record(results))[0]
    methods = {name: figures | {"decoding": {}} for name, figures in made.about["methods"].items()}
    for seed, seed_record in enumerate((made, made._replace(about=made.about | {"methods": methods}))):
        write_record(joint.record(tmp_path), seed, seed_record)
    of_joint, measured = (
        token_figures.read_exam(tmp_path, TINY, False)["joint"],
        made.about["methods"]["joint"]["decoding"],
    )
    for fill in ("copy_state", "recompute"):
        assert of_joint.values[f"speed-up {fill}"].tolist() == [[measured[fill]["speedup"]], [1.0]]
        assert of_joint.decoding(fill, "rouge_l") == pytest.approx((measured[fill]["rouge_l"] + 1) / 2)
    sleb = token_figures.read_exam(results, TINY, False)["sleb"]
    assert sleb.decoding("copy_state", "rouge_l") is None and "speed-up copy_state" not in sleb.values
