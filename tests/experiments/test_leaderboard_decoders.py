"""The leaderboard's decoders: what is trained and when, records against live decoding, rules, speed, and the tables."""

import json
import time

import numpy as np
import pytest
import tokenizers
import torch
from conftest import random_decoder, save_small_llama

from mini_ee.experiments import trainings
from mini_ee.experiments.leaderboard import decoder_section as section
from mini_ee.experiments.leaderboard import decoders, decoding_figures, token_figures
from mini_ee.experiments.leaderboard.token_rules import (
    GAP,
    WITHIN,
    gap_rules,
    outcome,
    own_rules,
    rule_at,
    rule_within,
    score_of_rates,
)
from mini_ee.experiments.records import SeedRecord, read_about, read_records, write_record
from mini_ee.experiments.trainings import Sources
from mini_ee.lab import calibration
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER
from mini_ee.lab.baselines.dynamic_exit_layer import DynamicExits
from mini_ee.lab.baselines.sleb import ShortDecoder
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.files import file_sha256, sole_writer
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.token_exits import TokenExits, record_texts
from mini_ee.lab.rules import Fixed, Never, Threshold
from mini_ee.lab.training import training_text
from mini_ee.lab.training.method import load_method

pytestmark = pytest.mark.slow
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
    (folder / "data" / "stories.txt").write_text("\n\n".join("".join(each) for each in letters))
    return Sources(folder, folder / "made")


def run(out, sources, seeds=(0,), only=None):
    lines = []
    return decoders.run_decoders(out, sources, seeds, only, False, lines.append), lines


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
    return [Text(each, 3) for each in ids]


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
    assert ran == 0 and lines[-1] == "1 trainings are left to other processes."
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
    about, tried = made.about, made.about["tried"]
    chosen = next(each for each in tried if each["rates"] == about["rates"])
    assert chosen["score"] == pytest.approx(score_of_rates(made.held_out), abs=2e-3)
    assert [(each["rates"]["lr"], each["rates"]["head_lr"]) for each in tried] == [*TINY.rates]
    assert all(each["seed"] == 0 for each in tried)
    assert about["rates"] == max(tried, key=lambda each: each["score"])["rates"] and about["rates"] in training.rates
    assert {"search", "training", "recording", "decoding"} == about["cpu_seconds"].keys()


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
    both = "tiny joint, seed 0: all rates diverge; tiny sleb, seed 0: no memory"
    with pytest.raises(ValueError, match=f"^2 trainings of decoders failed: {both}$"):
        run(tmp_path, sources)


# ---- Records and rules ----


def test_a_rule_on_a_record_that_was_read_back_exits_as_in_decoding(tmp_path, exits):
    prompts, threshold = [Text(text.ids[:6], 5) for text in random_texts(8, 12)], 0.2
    rule = Threshold((threshold, threshold, -np.inf), GAP)
    written = exits.write(prompts, rule, max_new_tokens=10, missing_kv="recompute", stop=())
    whole = [Text([*prompt.ids, *each.tokens], 5) for prompt, each in zip(prompts, written)]
    made = decoders.token_record(exits, whole)
    read = write_record(tmp_path / "a.npz", 0, SeedRecord(made, made, {})).reported
    assert abs(made.confidence(GAP) - threshold).min() > 1e-4  # float16 changes no decision
    found = outcome(read, rule)
    assert found.depth.tolist() == [layers for each in written for layers in each.layers_run]
    assert set(found.depth) == {1, 2, 4}
    full = record_texts(exits, whole, last=False)
    exit_index = np.searchsorted(exits.exits, found.depth)
    predicted = full.predictions[np.arange(len(exit_index)), exit_index]
    assert predicted.tolist() == [token for each in written for token in each.tokens]
    assert found.agreement == (predicted == full.predictions[:, -1]).mean()
    assert np.allclose(found.log_p, full.logits[np.arange(len(exit_index)), exit_index, 0], rtol=2e-3)
    paid = [costs[: k + 1].sum() for costs, k in zip(read.segments.costs[0], exit_index)]  # layers and heads
    assert np.allclose(found.flops, paid / read.full, rtol=1e-3) and found.flops.max() > 1 > found.flops.min()


def test_the_rule_at_a_level_saves_most_among_those_that_reach_it(exits):
    recorded = decoders.token_record(exits, random_texts(12, 16))
    rules = gap_rules(recorded)
    results = [(outcome(recorded, rule), rule) for rule in rules]
    for level in (0.5, 0.9):
        reached = [each.depth.mean() for each, _ in results if each.agreement >= level]
        chosen = outcome(recorded, rule_at(rules, recorded, level))
        assert chosen.agreement >= level and chosen.depth.mean() == min(reached) < 4
    assert rule_at(rules[:1], recorded, 1.01) == Never()
    fixed = [Fixed(k) for k in range(2)]
    log_p = [outcome(recorded, rule).log_p.mean() for rule in fixed]
    assert rule_within([], recorded, 0.5) == fixed[int(np.argmax(log_p))]
    assert rule_within([], recorded, 0.25) == fixed[0] and rule_within(fixed, recorded, 0.2) is None
    within = [each for each, _ in results] + [outcome(recorded, rule) for rule in fixed]
    assert score_of_rates(recorded) == max(each.log_p.mean() for each in within if each.depth.mean() <= 3)
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
        found = decoding_figures.lossless_figures(model, random_texts(2, 9), random_texts(4, 12, 1))
        assert found["equal_texts"] == 1 and found["layer"] in layers and 0 <= found["drafted"] < 1


def test_both_fills_are_measured_and_recomputing_agrees_as_the_rule_does(exits):
    class Letters:
        backend = type("Backend", (), {"decode": staticmethod(lambda ids: " ".join(map(str, ids)))})

    rule, texts = Threshold((0.1, 0.1, -np.inf), GAP), random_texts(6, 16)
    found = decoding_figures.decoding_figures(exits, rule, texts, Letters)
    written = exits.write(texts, rule, max_new_tokens=12, missing_kv="recompute", stop=())
    whole = [Text([*text.ids[:4], *each.tokens], 3) for text, each in zip(texts, written)]
    again = outcome(decoders.token_record(exits, whole), rule)
    assert found["recompute"]["agreement"] == pytest.approx(again.agreement)
    assert found["recompute"]["layers_saved"] == pytest.approx(1 - again.depth.mean() / 4)
    assert found.keys() == {"copy_state", "recompute"} and found["copy_state"] != found["recompute"]
    assert decoding_figures.decoding_figures(exits, Never(), texts, Letters) == {}


# ---- The section ----


def test_the_section_is_made_from_records_alone_and_names_what_is_missing(results, sources, tmp_path):
    def written():
        return section.decoder_section(results, token_figures.read_decoders(results, False), False)

    assert section.decoder_section(tmp_path, token_figures.read_decoders(tmp_path, False), False) == [
        "Not run yet.",
        "",
    ]
    lines = written()
    assert lines == written() and (results / section.PICTURE).stat().st_size > 1000
    table = {line.split(" | ")[0].strip("| "): line for line in lines if line.startswith("| ")}
    assert {"joint", "pabee", "sleb", "joint, lossless", "joint, pabee"} <= table.keys()
    found = token_figures.read_exam(results, TINY, False)
    for name, each in found.items():
        made = read_records(results / "records" / "decoders-tiny" / f"{each.abouts[0]['settings']['method']}.npz")[0]
        rules = made.about["methods"][name]["rules"]
        own = outcome(made.reported, token_figures.rule_from_dict(rules["0.9"]))
        assert each.values["saved 0.9"].mean() == pytest.approx(1 - own.depth.mean() / 5)
        assert each.values["FLOPs 0.9"].mean() == pytest.approx(1 - own.flops.mean())
        candidates = own_rules(load_method(name), made.held_out)
        assert json.loads(json.dumps(rule_at(candidates, made.held_out, 0.9).to_dict())) == rules["0.9"]
        assert f"{np.exp(-made.reported.logits[:, -1, 0].mean()):.2f} ±?" in "".join(
            line for line in lines if line.startswith(f"| {name} |")
        )
    config = json.loads((sources.folder / "weights" / "tiny" / "config.json").read_text())
    hidden, inner, letters = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
    tokens = 47 - (TINY.new_tokens - 1) / 2  # that a token attends to, on average
    layer = 2 * (3 * hidden**2 + 3 * hidden * inner + 2 * tokens * hidden)  # keys and values have half of the width
    text = " ".join(line for line in lines if line)
    assert found["joint"].head_layers == pytest.approx(2 * hidden * letters / layer, rel=1e-6)
    assert f"One head costs as many FLOPs as {found['joint'].head_layers:.2g} layers." in text
    assert "The model is tiny, with 5 layers. It learns from 12 texts (stories.txt);" in text
    assert "figures are of 6 other texts for each seed, 8 tokens each." in text
    cells = {name: next(line for line in lines if line.startswith(f"| {name} |")).split(" | ")[2] for name in found}
    saved = {name: cells[name] for name in ("joint", "pabee") if cells[name] != "–"}
    assert saved and token_figures.flops_saved({TINY: found}) == ("tiny", saved) and cells["sleb"] == "–"
    assert token_figures.flops_saved({}) == ("", {})
    processor, version, commit = (found["joint"].abouts[0]["how"][name] for name in ("processor", "torch", "commit"))
    read = file_sha256(sources.folder / "data" / "stories.txt")
    assert f"processor: {processor}; torch: {version}; commit: {commit}; texts: stories.txt, sha256 {read}." in text
    assert "sleb saves no layers: with every seed, all rules that skip a layer have less than 90 % agreement" in text
    assert "share a row. No exit can draft, so there is no row: sleb." in text
    (results / "records" / "decoders-tiny" / "sleb.npz").rename(tmp_path / "sleb.npz")
    lines = written()
    (tmp_path / "sleb.npz").rename(results / "records" / "decoders-tiny" / "sleb.npz")
    assert not [line for line in lines if line.startswith("| sleb")]
    assert "Not run yet: sleb." in " ".join(lines) and "nan" not in " ".join(lines).split()


def test_seconds_of_trainings_on_a_gpu_are_not_in_the_table(results):
    (joint, sleb) = (token_figures.read_exam(results, TINY, False)[name] for name in ("joint", "sleb"))
    on_a_gpu = [about | {"how": about["how"] | {"gpu": "G100"}} for about in joint.abouts]
    cost = {"training": 90.0, "decoding": 5.0}
    both = [
        each | {"cpu_seconds": cost | {"training": value}} for each, value in zip([*on_a_gpu, *joint.abouts], (9, 70))
    ]
    (line,) = (
        line for line in section._cost_table({"joint": joint._replace(abouts=both)}) if line.startswith("| joint")
    )
    assert line.endswith("| 70 | 5 |")
    lines = section._cost_table({"joint": joint._replace(abouts=on_a_gpu), "sleb": sleb})
    (line,) = (line for line in lines if line.startswith("| joint"))
    assert line.split(" | ")[-2] == "on a GPU"
    assert "Trained on a GPU (G100): 1 of 2 trainings." in " ".join(lines)
    hours = section._hours([[{"how": {}, "cpu_seconds": {"training": 3600.0, "decoding": 1800.0}}], on_a_gpu, on_a_gpu])
    assert "1.50 processor hours for 1 trainings on the CPU. 0.00 processor hours for 2 trainings on a GPU" in hours


def test_the_section_says_where_the_smallest_or_the_largest_rates_were_chosen():
    pairs = [{"lr": rate, "head_lr": 4 * rate} for rate in (0.1, 0.2, 0.3)]
    tried = [{"rates": pair, "score": 0.0, "seed": 0} for pair in pairs]
    seen = [[{"rates": pair, "tried": tried}] for pair in (pairs[0], pairs[0], pairs[1])]
    seen.append([{"rates": {}, "tried": []}])  # nothing is learned by gradients
    assert section._at_an_end(seen) == (
        "In 2 of 3 searches the smallest of the tried pairs of rates is chosen, so a still smaller one might be better."
    )
    assert "In 1 of 4 searches the largest of the tried pairs" in section._at_an_end(
        [[{"rates": pairs[2], "tried": tried}], *seen]
    )
    assert section._at_an_end(seen[2:]) == ""


def test_the_answer_names_who_saves_most_layers_and_who_saves_most_flops():
    def figures(name, layers, flops):
        draw = np.random.default_rng(0).normal(0, 0.01, (2, 3, 20))
        values = {"saved 0.9": layers + draw[0], "FLOPs 0.9": flops + draw[1], "ln p full": np.full((3, 20), -1.0)}
        speeds = np.array([[1.0], [1.01], [0.99]])
        values |= {
            "speed-up copy_state": speeds + flops,
            "speed-up recompute": speeds - 0.5,
            "ln p 0.9": layers - draw[0],
            f"ln p {WITHIN}": layers - draw[0] - 1,
        }
        abouts = [{"original": {"perplexity": 4.5}}]
        return token_figures.Figures((0, 1, 2), values, abouts, name, (3, 5), np.zeros((3, 2)), 0.5)

    found = {"deep": figures("deep", 0.4, -0.1), "heads": figures("heads", 0.3, 0.2), "few": figures("few", 0.1, 0.01)}
    text = section._answer(TINY, found)
    assert (
        text.startswith("`deep` saves the most layers at 90 % agreement: 40.")
        and "`heads` saves the most FLOPs with" in text
    )
    assert text.count("All others save significantly less") == 2
    more = -100 * found["deep"].values["FLOPs 0.9"].mean()
    assert more > 0 and f"With its heads, it needs {more:.1f} % more FLOPs than its full model. `heads`" in text
    assert text.endswith("The perplexity of its full model is 2.72; before any training it was 4.50.")
    pays = section._pays({TINY: found})
    assert "On tiny, 1 of 3 methods is shown to be faster than decoding without exits (by" in pays
    assert (
        "The highest speed-up is that of `heads`: 1.20x ±0.02 with copy_state; its perplexity goes from 2.72 to" in pays
    )
    lowest = np.exp(-found["deep"].values[f"ln p {WITHIN}"].mean())
    assert pays.endswith(f"With at most 75 % of the layers, `deep` has the lowest perplexity: {lowest:.2f}.")
    slow = {"few": found["few"]._replace(values=found["few"].values | {"speed-up copy_state": np.ones((3, 1))})}
    assert "On tiny, none of 1 methods is shown to be faster" in section._pays({TINY: slow})
    none = {"deep": figures("deep", 0.4, -0.1)}
    assert section._answer(TINY, none).endswith("No method saves FLOPs with these rules.")
    assert section._answer(TINY, {"none": figures("none", -1, -1)}) == "No method saves layers at 90 % agreement."


def test_a_seed_without_a_rule_decodes_in_full(results, tmp_path):
    (joint, _) = decoders.trainings(False)
    made = read_records(joint.record(results))[0]
    methods = {name: each | {"decoding": {}} for name, each in made.about["methods"].items()}
    for seed, each in enumerate((made, made._replace(about=made.about | {"methods": methods}))):
        write_record(joint.record(tmp_path), seed, each)
    found, measured = (
        token_figures.read_exam(tmp_path, TINY, False)["joint"],
        made.about["methods"]["joint"]["decoding"],
    )
    for fill in ("copy_state", "recompute"):
        assert found.values[f"speed-up {fill}"].tolist() == [[measured[fill]["speedup"]], [1.0]]
        assert found.decoding(fill, "rouge_l") == pytest.approx((measured[fill]["rouge_l"] + 1) / 2)
    sleb = token_figures.read_exam(results, TINY, False)["sleb"]
    assert sleb.decoding("copy_state", "rouge_l") is None and "speed-up copy_state" not in sleb.values
