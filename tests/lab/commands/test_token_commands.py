"""`mini-ee train self-supervised`, `generate` and `calibrate` on its runs, and wrong input as one line."""

import re
import shutil
from functools import partial

import numpy as np
import pytest
import tokenizers
from conftest import answer, refused, save_small_llama

import mini_ee.lab.calibration as calibration
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.calibration import calibrate, intervals, observe
from mini_ee.lab.cli.generate import colours_of, painted
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.generation import generate, generated_texts
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.exits.skipped_layers import generate_skipping, load_skipper
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TextData
from mini_ee.lab.methods.self_supervised import metrics
from mini_ee.lab.registry import SKIPPERS
from mini_ee.lab.rules import Patience, PatienceConfidence, Threshold
from mini_ee.lab.training import training_text
from mini_ee.lab.training.run_folder import load_run
from mini_ee.self_supervised import CALIBRATION_PROMPTS, TRAINING_PROMPTS

LETTERS = " abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ^2:,.é"
PROMPTS = ("abc", "the cat", "A dog is", "z")
SMALL = ("--texts", "24", "--new-tokens", "12", "--batch-size", "8", "--epochs", "4", "--head-lr", "1e-2")
SMALL = (*SMALL, "--target", "soft")
BRIEF = (*SMALL, "--texts", "12", "--new-tokens", "8", "--epochs", "1")  # the last of equal options counts
SETTINGS_OF_RULES = ("threshold", ".5"), ("patience", "1"), ("cut", ".5")
CONFIDENT = PatienceConfidence(2, 0.01, "breaking_ties")


def decoder_in(folder, seed):
    """A random 4-layer Llama over single letters, with a context of 48 tokens, of which 0 begins and ends a text."""
    tokenizer = tokenizers.Tokenizer(
        tokenizers.models.BPE({"<s>": 0} | {letter: i for i, letter in enumerate(LETTERS, 1)}, [])
    )
    tokenizer.add_special_tokens(["<s>"])
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    tokenizer.decoder = tokenizers.decoders.Fuse()
    settings = {"num_hidden_layers": 4, "max_position_embeddings": 48, "initializer_range": 0.25}
    return save_small_llama(folder, tokenizer, seed, **settings, bos_token_id=0, eos_token_id=0)


@pytest.fixture(scope="module", autouse=True)
def few_resamples_and_texts():
    """A thousand resamples take a second, and are tested with calibration. Eight texts are held out of a training."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calibration, "intervals", partial(intervals, resamples=5))
        patch.setattr(training_text, "HELD_PIECES", 8)
        yield


@pytest.fixture(scope="module")
def decoder_folder(tmp_path_factory):
    return decoder_in(tmp_path_factory.mktemp("decoder") / "llama", seed=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory, decoder_folder):
    """A run with exits after every layer; tests that change its rule copy it."""
    out = tmp_path_factory.mktemp("heads") / "run"
    argv = ("train", "self-supervised", "--model", decoder_folder, "--out", out, "--init", "copy", *SMALL)
    assert main([*map(str, argv)]) == 0
    return out


@pytest.fixture
def run_folder(trained, tmp_path):
    return shutil.copytree(trained, tmp_path / "copy")


def greedy(decoder_folder, prompt, tokens, **settings):
    """What the library writes."""
    ids = Tokenizer.from_folder(decoder_folder).backend.encode(prompt).ids
    steps = generate(load_backbone(decoder_folder), [ids], max_new_tokens=tokens, stop=[0], **settings)
    return gather(steps, 1)[0]


# ---- train ----


def test_a_run_contains_heads_history_rule_and_tokenizer(trained, decoder_folder):
    files = {path.name for path in trained.iterdir()}
    assert files == {"config.json", "model.safetensors", "metrics.json", "tokenizer.json"}
    assert read_json(trained / "tokenizer.json") == read_json(decoder_folder / "tokenizer.json")
    run = load_run(trained)
    config, model, rule = run.config, run.model, run.rule
    assert model.exits == (1, 2, 3, 4) and config["settings"]["init"] == "copy" and config["unit"] == "tokens"
    assert {"seed", "versions"} <= config.keys() and config["rank"] is None and config["text"]["kind"] == "pieces"
    assert isinstance(rule, Threshold) and rule.measure == "breaking_ties" and len(rule.threshold) == 4
    history = read_json(trained / "metrics.json")["history"]
    assert [set(entry) for entry in history] == [{"stage", "step", "loss", "agreement", "entropy"}] * len(history)
    assert history[0]["step"] == 0 and history[-1]["step"] == 4 * 3 and len(history) > 10
    assert history[-1]["agreement"][0] > history[0]["agreement"][0]


def test_fig1_is_measured_on_texts_that_were_not_trained_on(trained, decoder_folder):
    model = load_run(trained).model
    backend = Tokenizer.from_folder(decoder_folder).backend
    prompts = [backend.encode(text).ids for text in TRAINING_PROMPTS]
    held = generated_texts(model.backbone, prompts, 8, 12, stop=[0], seed=10**6)
    figures, expected = read_json(trained / "metrics.json"), metrics(model, TextData(held, every=True))
    np.testing.assert_allclose(figures["agreement"], expected["agreement"], atol=1e-9)
    np.testing.assert_allclose(figures["entropy"], expected["entropy"], atol=1e-5)
    ends = [entry["agreement"] for entry in figures["history"]]
    assert figures["agreement"] in ends  # an epoch ends where one is measured


def test_the_default_rule_is_the_papers_on_half_of_the_calibration_texts(trained, decoder_folder):
    model, rule = load_run(trained).model, load_run(trained).rule
    assert rule == calibrate(calibration_half(model, decoder_folder, 24, 12), 0.95, measure="breaking_ties")


def calibration_half(model, decoder_folder, count, new_tokens):
    """What exits say of the drawn half of the texts that the model writes from Table 1's prompts."""
    backend = Tokenizer.from_folder(decoder_folder).backend
    prompts = [backend.encode(text).ids for text in CALIBRATION_PROMPTS]
    texts = generated_texts(model.backbone, prompts, count, new_tokens, stop=[0], seed=2 * 10**6)
    half = np.random.default_rng(0).permutation(count)[: count // 2]
    return observe(record_texts(model, [texts[at] for at in half]), "breaking_ties")


@pytest.mark.parametrize("texts", ["prompt", "file"])
def test_the_default_rule_comes_from_text_that_was_not_learned(decoder_folder, tmp_path, texts):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    source = ("--prompt", "ab", "--greedy") if texts == "prompt" else ("--text", tmp_path / "text.txt")
    argv = ("train", "self-supervised", "--model", decoder_folder, *BRIEF, *source)
    assert main([*map(str, argv), "--out", str(tmp_path / "run")]) == 0
    run = load_run(tmp_path / "run")
    assert run.rule == calibrate(calibration_half(run.model, decoder_folder, 12, 8), 0.95, measure="breaking_ties")


def test_train_prints_the_metrics(capsys, decoder_folder, tmp_path):
    argv = ("train", "self-supervised", "--model", decoder_folder, "--exits", "1,3", *BRIEF)
    training = answer(capsys, *argv, "--out", tmp_path / "run")
    metrics = read_json(tmp_path / "run" / "metrics.json")
    assert training["exits"] == [1, 3, 4] and training["agreement"] == metrics["agreement"]
    assert training["calibration"] == metrics["calibration"] and training["texts"] == 12
    assert {"seed", "threads", "versions", "seconds", "rule", "entropy", "loss", "run"} <= training.keys()
    assert main([*map(str, argv), "--out", str(tmp_path / "again")]) == 0
    shown = capsys.readouterr().out
    assert f"{training['agreement'][1]:.3f}" in shown and f"{training['entropy'][0]:.3f}" in shown and "95%" in shown


def test_a_text_file_teaches_instead(capsys, decoder_folder, tmp_path):
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat, and é was there. " * 12, encoding="utf-8")
    argv = (
        "train",
        "self-supervised",
        "--model",
        decoder_folder,
        "--text",
        text,
        "--exits",
        "2",
        *SMALL,
        "--epochs",
        1,
    )
    training = answer(capsys, *argv, "--texts", 100, "--out", tmp_path / "run")
    pieces = len(text.read_text(encoding="utf-8")) // 12
    assert training["texts"] == pieces - pieces // 10 < 90 and training["tokens"] == 13 * training["texts"]
    fewer = answer(capsys, *argv, "--texts", 20, "--out", tmp_path / "fewer")
    assert fewer["texts"] == 18


def test_greedy_text_is_written_once_from_each_prompt(capsys, decoder_folder, tmp_path):
    argv = ("train", "self-supervised", "--model", decoder_folder, "--greedy", "--exits", "2", *BRIEF)
    training = answer(capsys, *argv, "--prompt", "ab", "--prompt", "c", "--out", tmp_path / "run")
    assert training["texts"] == 2
    assert read_json(tmp_path / "run" / "config.json")["text"]["prompt"] == ["ab", "c"]


@pytest.mark.parametrize("options", [("--texts", 1), ("--texts", 2, "--new-tokens", 45, "--prompt", "a")])
def test_what_a_training_takes_its_rule_takes_too(capsys, decoder_folder, tmp_path, options):
    """Its thresholds come from other prompts, which are longer, and from two texts at least."""
    argv = ("train", "self-supervised", "--model", decoder_folder, "--exits", "2", *BRIEF)
    assert answer(capsys, *argv, *options, "--out", tmp_path / "run")["method"] == "self-supervised"


UNKNOWN = ("lr", "weight-decay", "rank", "epsilon", "k")
OF_ROWS = (("pool", "mean"), ("max-train", "1"), ("max-length", "1"), ("max-loss", ".1"))


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--prompt", "abc" * 20), "expected at most 48 tokens, prompt and continuation together, got 61 and 12"),
        (("--prompt", " "), "--prompt: expected a prompt, found no text"),
        (("--prompt", "a\udcff"), "--prompt: expected text in UTF-8"),
        (("--text", "EMPTY"), "expected at least 24 tokens, two pieces of 12, found 0; give a longer text"),
        (("--text", "SHORT", "--texts", "1"), "--texts: expected at least 2, one to train on and one to hold out"),
        (("--text", "LATIN"), "expected text in UTF-8, found invalid continuation byte at byte 1"),
        (("--text", "NONE"), "none.txt: No such file"),
        (("--text", "SHORT", "--new-tokens", "48"), "--new-tokens: expected at most 47, got 48"),
        (("--text", "SHORT", "--greedy"), "--greedy is for generated text"),
        (("--text", "SHORT", "--prompt", "a"), "--prompt is for generated text"),
        (("--exits", "5"), "exits must ascend from at least 1 and end at the last layer, 4, got 5,4"),
        (("--exits", "4"), "expected exits before the last layer, got only 4"),
        (("--head-lr", "-1"), "head_lr must be a number of at least 0, got -1.0"),
        (("--lambda", "2"), "penalty (--lambda) must be a number from 0 to 1, got 2.0"),
        (("--task", "reviews2"), "--task: expected a task's folder, or for a decoder continue or copy, found reviews2"),
        (("--task", "reviews"), "self-supervised on rows has no option new_tokens"),
        (("--task", "copy"), "--task copy needs a file of text: give --text FILE"),
        *(((f"--{name}", "1"), f"unrecognized arguments: --{name} 1") for name in UNKNOWN),
        *(((f"--{name}", value), f"on tokens has no option {name.replace('-', '_')}") for name, value in OF_ROWS),
        (("--resume",), "no unfinished training here; start without --resume"),
        (("--device", "tpu"), "--device tpu: cannot be used here"),
    ],
)
def test_what_train_refuses(capsys, decoder_folder, tmp_path, argv, message):
    (tmp_path / "empty.txt").write_text("")
    (tmp_path / "latin.txt").write_bytes("né".encode("latin-1") + b"a")
    (tmp_path / "short.txt").write_text("abc " * 40)
    argv = [tmp_path / f"{value.lower()}.txt" if value.isupper() else value for value in argv]
    settings = SMALL[2:] if "--new-tokens" not in argv else ()
    command = ("train", "self-supervised", "--model", decoder_folder, "--out", tmp_path / "run", *settings)
    assert message in refused(capsys, *command, *argv)
    assert not (tmp_path / "run").exists() and not (tmp_path / "run.training").exists()


def test_train_refuses_a_name_that_is_taken_and_a_model_that_is_no_decoder(capsys, run_folder, checkpoint_folder):
    train = ("train", "self-supervised")
    assert "is there already" in refused(capsys, *train, "--out", run_folder)
    out = run_folder.with_name("new")
    line = refused(capsys, *train, "--model", checkpoint_folder, "--out", out)
    assert "expected a fine-tuned classifier" in line and "found 'BertForMaskedLM'" in line
    line = refused(capsys, *train, "--model", run_folder, "--out", out)
    assert "found a run of self-supervised; give a checkpoint" in line


@pytest.mark.parametrize("task, foreign", [("TASK", "--texts"), ("TASK", "--rank"), ("continue", "--max-train")])
def test_an_option_of_tokens_is_not_for_rows_nor_one_of_rows_for_tokens(capsys, task_folder, tmp_path, task, foreign):
    task, unit = (task_folder, "rows") if task == "TASK" else (task, "tokens")
    line = refused(capsys, "train", "joint", "--task", task, "--out", tmp_path / "run", foreign, 3)
    assert (
        f"joint on {unit} has no option {foreign[2:].replace('-', '_')}; see `mini-ee train joint --help-all`" in line
    )


# ---- generate ----


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_generate_writes_what_the_library_writes_with_the_runs_exits_heads_and_rule(
    capsys, trained, decoder_folder, prompt
):
    generated = answer(capsys, "generate", trained, "--prompt", prompt, "--max-new-tokens", 20)
    run = load_run(trained)
    model, rule = run.model, run.rule
    expected = greedy(decoder_folder, prompt, 20, exits=model.exits, heads=model.heads, rule=rule)
    assert (generated["tokens"], generated["layers"]) == expected
    assert generated["mean_layers"] == np.mean(expected.layers_run) and generated["exits"] == [1, 2, 3, 4]
    assert generated["layers_saved"] == pytest.approx(1 - generated["mean_layers"] / 4)
    assert generated["rule"] == rule.to_dict() and generated["method"] == "self-supervised"


def test_what_fills_skipped_layers_changes_what_is_written(capsys, trained, decoder_folder):
    model, prompt, texts = load_run(trained).model, "the cat", {}
    settings = {"exits": model.exits, "heads": model.heads, "rule": Threshold(0.05, "breaking_ties")}
    for missing_kv in ("copy_state", "recompute"):
        generated = answer(
            capsys, "generate", trained, "--prompt", prompt, "--threshold", 0.05, "--missing-kv", missing_kv
        )
        expected = greedy(decoder_folder, prompt, 48 - generated["prompt_tokens"], **settings, missing_kv=missing_kv)
        assert (generated["tokens"], generated["layers"]) == expected and generated["missing_kv"] == missing_kv
        assert len(set(generated["layers"])) > 2
        texts[missing_kv] = expected
    assert texts["copy_state"] != texts["recompute"]


@pytest.mark.parametrize(
    "prompt, rule",
    [
        (PROMPTS[0], ("--rule", "never")),
        (PROMPTS[1], ("--threshold", "1")),
        (PROMPTS[2], ("--layer", "4")),
        (PROMPTS[3], ("--threshold", "inf")),
    ],
)
def test_exits_off_is_plain_decoding(capsys, trained, decoder_folder, prompt, rule):
    argv = ("--prompt", prompt, "--max-new-tokens", 16)
    generated = answer(capsys, "generate", trained, *argv, *rule)
    plain = answer(capsys, "generate", decoder_folder, *argv)
    assert generated["tokens"] == plain["tokens"] == greedy(decoder_folder, prompt, 16).tokens
    assert set(generated["layers"]) == set(plain["layers"]) == {4}


@pytest.mark.parametrize("prompt, layer, draft", list(zip(PROMPTS, (1, 2, 3), (4, 1, 7))))
def test_lossless_text_is_the_full_models_greedy_text(capsys, trained, decoder_folder, prompt, layer, draft):
    argv = ("generate", trained, "--prompt", prompt, "--lossless", "--layer", layer, "--draft", draft)
    generated = answer(capsys, *argv, "--max-new-tokens", 20)
    assert generated["tokens"] == greedy(decoder_folder, prompt, 20).tokens
    model, ids = load_run(trained).model, Tokenizer.from_folder(decoder_folder).backend.encode(prompt).ids
    settings = {"exit_layer": layer, "head": model.heads[layer - 1], "draft": draft, "stop": [0]}
    (expected,) = gather(generate_lossless(model.backbone, [ids], max_new_tokens=20, **settings), 1)
    assert generated["layers"] == expected.layers_run
    assert (generated["draft_layer"], generated["draft"]) == (layer, draft)
    assert not {"mean_layers", "layers_saved", "rule"} & generated.keys()


@pytest.mark.parametrize("name", SKIPPERS)
def test_a_decoder_without_exits_drafts_with_layers_skipped(capsys, decoder_folder, name):
    argv = ("generate", decoder_folder, "--prompt", PROMPTS[0], "--lossless", "--draft-by", name, "--draft", 3)
    generated = answer(capsys, *argv, "--max-new-tokens", 20)
    assert generated["tokens"] == greedy(decoder_folder, PROMPTS[0], 20).tokens
    ids = Tokenizer.from_folder(decoder_folder).backend.encode(PROMPTS[0]).ids
    steps = generate_skipping(
        load_backbone(decoder_folder), ids, load_skipper(name)(most=3), max_new_tokens=20, stop=[0]
    )
    assert generated["layers"] == gather(steps, 1)[0].layers_run and {*generated["layers"]} <= {0, 4}
    assert (generated["draft_by"], generated["draft"]) == (name, 3)


def test_a_fixed_layer_and_a_threshold_for_each_exit(capsys, trained):
    generated = answer(capsys, "generate", trained, "--prompt", "abc", "--layer", "2")
    assert set(generated["layers"]) == {2}
    generated = answer(capsys, "generate", trained, "--prompt", "abc", "--threshold", "1,0,1,1")
    assert set(generated["layers"]) == {2} and generated["rule"]["measure"] == "breaking_ties"
    generated = answer(capsys, "generate", trained, "--prompt", "abc", "--threshold=-inf", "--measure", "entropy")
    assert set(generated["layers"]) == {1} and generated["rule"]["measure"] == "entropy"


def test_a_prompt_is_read_whole_however_long(capsys, trained):
    assert answer(capsys, "generate", trained, "--prompt", "a" * 46)["prompt_tokens"] == 47


# ---- Exits in colour ----

ESCAPE = re.compile(r"\033\[(?:38;5;(\d+)|0)m")


def coloured(text):
    """(letter, colour) of a terminal's text, read as a terminal reads it."""
    letters, colour, at = [], None, 0
    for escape in ESCAPE.finditer(text):
        letters += [(letter, colour) for letter in text[at : escape.start()]]
        colour, at = escape[1] and int(escape[1]), escape.end()
    return letters + [(letter, colour) for letter in text[at:]]


@pytest.mark.parametrize("prompt", PROMPTS[:2])
def test_show_exits_colours_each_token_by_its_layer_and_counts_them(capsys, trained, prompt):
    argv = ("generate", str(trained), "--prompt", prompt, "--threshold", ".05")
    generated = answer(capsys, *argv)
    assert len(set(generated["layers"])) > 2 and main([*argv, "--show-exits"]) == 0
    text, legend = capsys.readouterr().out.rstrip("\n").split("\n")
    colours = colours_of((1, 2, 3, 4))
    letters = coloured(text)
    assert letters[: len(prompt)] == [(letter, None) for letter in prompt]
    spoken = [layer for token, layer in zip(generated["tokens"], generated["layers"]) if token]  # a token is a letter
    written = list(generated["text"])
    assert letters[len(prompt) :] == [(letter, colours[layer]) for letter, layer in zip(written, spoken, strict=True)]
    for layer, colour in colours.items():
        counted = f"after layer {layer}: {generated['layers'].count(layer)}"
        assert counted in ESCAPE.sub("", legend)
        assert colour is None or f"\033[38;5;{colour}mafter layer {layer}" in legend


def test_without_show_exits_there_is_no_colour_and_no_legend(capsys, trained):
    assert main(["generate", str(trained), "--prompt", "abc"]) == 0
    out = capsys.readouterr().out
    assert "\033" not in out and out.count("\n") == 1


def test_letters_belong_to_the_token_with_which_they_were_whole():
    """Three tokens, the second one half a character: both halves are shown as the third's."""
    ends, layers, colours = [2, 2, 4], [1, 2, 3], {1: 7, 2: 8, 3: 9, 4: None}
    assert coloured(painted("abéc", 0, ends, layers, colours)) == [("a", 7), ("b", 7), ("é", 9), ("c", 9)]
    assert coloured(painted("bé", 1, ends, layers, colours)) == [("b", 7), ("é", 9)]
    assert painted("bé", 1, ends, layers, {}) == "bé"


@pytest.mark.parametrize("exits", [(1, 2), (2, 4, 6, 8), tuple(range(1, 13))])
def test_exits_are_green_to_red_and_the_full_model_has_no_colour(exits):
    colours = list(colours_of(exits).values())
    assert colours[0] == 46 and colours[-1] is None and list(colours_of(exits)) == list(exits)
    assert len(exits) < 3 or colours[-2] == 196
    assert len(exits) > 7 or len(set(colours)) == len(exits)


# ---- calibrate ----


@pytest.mark.parametrize("measure", ["breaking_ties", "max_probability", "entropy", "breaking_ties_logits"])
def test_calibrate_keeps_the_guarantee_on_its_half_and_writes_the_rule(capsys, run_folder, decoder_folder, measure):
    argv = ("calibrate", run_folder, "--epsilon", 0.6, "--measure", measure, "--texts", 20, "--new-tokens", 8)
    calibrated = answer(capsys, *argv)
    model, rule = load_run(run_folder).model, load_run(run_folder).rule
    assert rule.measure == measure and rule.to_dict()["threshold"][:-1] == calibrated["thresholds"]
    backend = Tokenizer.from_folder(decoder_folder).backend
    prompts = [backend.encode(text).ids for text in CALIBRATION_PROMPTS]
    texts = generated_texts(model.backbone, prompts, 20, 8, stop=[0], seed=2 * 10**6)
    half = set(np.random.default_rng(0).permutation(20)[:10].tolist())
    observed = observe(record_texts(model, texts), measure)
    taken = np.array([group in half for group in observed.groups])
    for k, threshold in enumerate(rule.threshold[:-1]):
        sure = observed.confidence[:, k] >= threshold
        assert not (taken & sure).any() or observed.agrees[taken & sure, k].mean() >= 0.6
        fresh = observed.agrees[~taken & sure, k]
        assert calibrated["agreement"][k] == (pytest.approx(fresh.mean()) if len(fresh) else None)
    assert calibrated["rows_fresh"] == (~taken).sum() == sum(calibrated["exit_counts"])
    assert {"epsilon", "delta", "end_to_end", "mean_layers", "tau_intervals"} <= calibrated.keys()


def test_a_stricter_epsilon_runs_more_layers(capsys, run_folder):
    argv = ("calibrate", run_folder, "--texts", 20, "--new-tokens", 8, "--epsilon")
    layers = [answer(capsys, *argv, epsilon)["mean_layers"] for epsilon in (0.2, 0.6, 1)]
    assert layers == sorted(layers) and layers[0] < layers[-1]


def test_calibrate_reads_a_text_file_and_prints_its_table(capsys, run_folder, tmp_path):
    (tmp_path / "text.txt").write_text("the cat sat on the mat. " * 40)
    assert main(["calibrate", str(run_folder), "--epsilon", ".5", "--text", str(tmp_path / "text.txt")]) == 0
    shown = capsys.readouterr().out
    assert "agreement" in shown and "text.txt" in shown and "The rule of" in shown and "bootstraps" in shown


def test_calibrate_reports_how_often_sets_break_the_guarantee(capsys, run_folder):
    argv = ("calibrate", run_folder, "--epsilon", 0.3, "--texts", 20, "--new-tokens", 8, "--sets", 4)
    broken = answer(capsys, *argv, "--delta", 0.5)["broken"]
    assert (broken["sets"], broken["groups_a_set"]) == (4, 5)
    share = answer(capsys, *argv)["broken"]["paper"]
    assert broken["paper"] == share and main(list(map(str, argv))) == 0
    assert f"the paper's rule breaks the guarantee of 0.3 for {share:.1%} of the sets." in (capsys.readouterr().out)


def test_a_text_too_short_for_epsilon_and_delta_is_an_error_with_a_size_that_is_enough(capsys, run_folder):
    before = read_json(run_folder / "config.json")
    argv = ("calibrate", run_folder, "--epsilon", 0.5, "--delta", 0.2, "--new-tokens", 10, "--texts")
    line = refused(capsys, *argv, 6)
    needed = re.search(r"at least (\d+) texts like these, (\d+) tokens, are needed .*, got 6; give more", line)
    assert needed and read_json(run_folder / "config.json") == before
    texts, tokens = map(int, needed.groups())
    calibrated = answer(capsys, *argv, texts + 10)
    assert tokens == pytest.approx(
        (calibrated["rows_calibration"] + calibrated["rows_fresh"]) * texts / (texts + 10), rel=0.1
    )
    assert calibrated["delta"] == 0.2


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--epsilon", "0"), "epsilon must be above 0 and at most 1, got 0.0"),
        (("--epsilon", "1.1"), "epsilon must be above 0 and at most 1, got 1.1"),
        (("--epsilon", ".9", "--delta", "1"), "delta must be at least 1e-09 and below 1"),
        (("--epsilon", ".9", "--texts", "1"), "expected at least 2 rows or texts, some to calibrate on"),
        (("--epsilon", ".9", "--prompt", ""), "expected a prompt, found no text"),
        (("--epsilon", ".9", "--prompt", "a" * 50), "expected at most 48 tokens"),
        (("--epsilon", ".9", "--task", "x"), "unrecognized arguments for a decoder: --task x"),
    ],
)
def test_what_calibrate_refuses(capsys, run_folder, argv, message):
    settings = () if "--texts" in argv else ("--texts", "4", "--new-tokens", "8")
    assert message in refused(capsys, "calibrate", run_folder, *argv, *settings)


def test_stories_that_are_all_too_short_are_one_line(capsys, run_folder, tmp_path):
    config = read_json(run_folder / "config.json")
    shutil.copytree(run_folder, tmp_path / "run")
    for learned, least in (({}, 80), ({"new_tokens": 4}, 44)):
        text = config["text"] | {"kind": "continue", "new_tokens": None} | learned
        write_json(tmp_path / "run" / "config.json", config | {"text": text})
        (tmp_path / "text.txt").write_text("the film\n\na book\n")
        line = refused(capsys, "calibrate", tmp_path / "run", "--epsilon", 0.5, "--text", tmp_path / "text.txt")
        assert f"text.txt: expected texts of {least} tokens or more, found none" in line


def test_a_plain_decoder_has_nothing_to_calibrate(capsys, decoder_folder):
    assert "give a folder that `mini-ee train` wrote" in refused(capsys, "calibrate", decoder_folder, "--epsilon", 0.9)


# ---- The wrong folder, the wrong backbone ----


def test_a_moved_backbone_is_found_with_model_and_another_one_is_refused(capsys, run_folder, decoder_folder, tmp_path):
    moved, other = shutil.copytree(decoder_folder, tmp_path / "moved"), decoder_in(tmp_path / "other", seed=1)
    shutil.copytree(decoder_folder, tmp_path / "old")
    out = run_folder.with_name("of-old")
    argv = ("train", "self-supervised", "--model", tmp_path / "old", "--out", out, "--exits", "2", *BRIEF)
    answer(capsys, *argv)
    shutil.rmtree(tmp_path / "old")
    generated, calibrated = ("--prompt", "a", "--max-new-tokens", "2"), ("--epsilon", ".9", "--texts", "2")
    for name, *options in (("generate", *generated), ("calibrate", *calibrated)):
        line = refused(capsys, name, out, *options)
        assert "its backbone was in" in line and "give its folder with --model" in line
        with pytest.MonkeyPatch.context() as patch:  # a built-in one is looked for where it is now
            patch.setattr("mini_ee.lab.training.run_folder.BUILT_IN_DECODER", moved)
            answer(capsys, name, out, *options)
        answer(capsys, name, out, *options, "--model", moved)
        assert "trained on another backbone" in refused(capsys, name, out, *options, "--model", other)
    assert read_json(run_folder / "config.json")["backbone"]["folder"] == str(decoder_folder)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--layer", "5"), "--layer must be one of the exits 1,2,3,4, got 5"),
        (("--rule", "threshold"), "the rule threshold needs --threshold"),
        (("--threshold", "2"), "a threshold on breaking_ties must be from 0.0 to 1.0"),
        (("--threshold", ".1,.2"), "expected one threshold or 4"),
        (("--lossless", "--layer", "4"), "expected an exit that can draft, one of 1,2,3, got 4"),
        (("--lossless", "--layer", "0"), "expected an exit that can draft, one of 1,2,3, got 0"),
        (
            ("--lossless", "--threshold", ".5"),
            "--lossless verifies every draft of the exit at --layer: leave out --threshold",
        ),
        (("--lossless", "--q", ".5"), "leave out --q"),
        (("--lossless", "--tolerance", ".5"), "leave out --tolerance"),
        (("--lossless", "--missing-kv", "recompute"), "runs every token through all layers: leave out --missing-kv"),
        (("--lossless", "--temperature", "1"), "--lossless generates the full model's greedy text"),
        (("--rule", "never", "--missing-kv", "recompute"), "--missing-kv is for tokens that exit early"),
        (("--draft", "3"), "--draft is for --lossless"),
        (("--draft-by", "swift"), "--draft-by is for --lossless"),
        (("--lossless", "--draft-by", "swift", "--layer", "2"), "at no exit and by no rule: leave out --layer"),
        (("--lossless", "--draft-by", "clasp", "--show-exits"), "--show-exits colours exits, but --draft-by clasp"),
        (("--prompt", "a" * 48), "expected at most 48 tokens, prompt and continuation together, got 49 and 1"),
        (("--prompt", "\udcff"), "--prompt: expected text in UTF-8"),
        (("--cut", ".5"), "the rule policy needs a model with a policy, and this one has none"),
    ],
)
def test_what_generate_refuses(capsys, trained, argv, message):
    prompt = () if "--prompt" in argv else ("--prompt", "a")
    assert message in refused(capsys, "generate", trained, *prompt, *argv, status=2)


@pytest.mark.parametrize(
    "argv, message",
    [
        (("--lossless",), "needs an exit before the last layer"),
        (("--layer", "2"), "one of the exits 4, got 2"),
        (("--missing-kv", "recompute"), "--missing-kv is for tokens that exit early"),
        (("--model", "x"), "is for the backbone of a run, found a checkpoint"),
        *(((f"--{name}", value), "needs exits before the last layer; ") for name, value in SETTINGS_OF_RULES),
    ],
)
def test_generate_refuses_exits_of_a_plain_decoder(capsys, decoder_folder, argv, message):
    assert message in refused(capsys, "generate", decoder_folder, "--prompt", "a", *argv)


@pytest.mark.parametrize(
    "setting, rule",
    [
        (("--patience", "1"), Patience(1)),
        (("--rule", "patience-confidence", "--patience", "2", "--threshold", ".01"), CONFIDENT),
        (("--threshold", ".7", "--measure", "saturation"), Threshold(0.7, "saturation")),
    ],
)
def test_generate_takes_every_rule_that_the_heads_can_answer(capsys, trained, decoder_folder, setting, rule):
    argv = ("generate", trained, "--prompt", "abc", "--max-new-tokens", 20)
    generated, model = answer(capsys, *argv, *setting), load_run(trained).model
    settings = {"exits": model.exits, "heads": model.heads, "rule": rule}
    assert (generated["tokens"], generated["layers"]) == greedy(decoder_folder, "abc", 20, **settings)
    assert generated["rule"] == rule.to_dict() and len(set(generated["layers"])) > 1


def test_classify_refuses_a_decoders_run_and_generate_a_classifiers(
    capsys, trained, checkpoint_folder, task_folder, tmp_path
):
    line = refused(capsys, "classify", trained, "--text", "a")
    assert "expected a classifier, found a decoder; use mini-ee generate" in line
    out = tmp_path / "run"
    argv = ("train", "joint", "--model", checkpoint_folder, "--task", task_folder, "--out", out, "--epochs", 1)
    assert main([*map(str, argv)]) == 0
    capsys.readouterr()
    assert "expected a decoder, found a classifier of joint" in refused(capsys, "generate", out, "--prompt", "a")
    assert "nowhere: no run here" in refused(capsys, "generate", tmp_path / "nowhere", "--prompt", "a")
    assert "for a classifier: --prompt a" in refused(capsys, "calibrate", out, "--epsilon", ".9", "--prompt", "a")


def test_a_changed_file_of_a_run_is_refused(capsys, run_folder):
    for name in ("tokenizer.json", "metrics.json", "model.safetensors"):
        content = (run_folder / name).read_bytes()
        (run_folder / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
        assert "damaged" in refused(capsys, "generate", run_folder, "--prompt", "a")
        (run_folder / name).write_bytes(content)
