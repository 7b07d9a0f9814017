"""What holds for every registered method, on every unit that it teaches, on both engines: said once, asked of all.

A method's own tests are its equations. Each is trained briefly here, on a small model, with the settings that it has.
"""

import functools
import math
import random
import shutil
from dataclasses import fields
from itertools import chain
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import WORDS, random_decoder

import mini_ee
from mini_ee import loop
from mini_ee import rules as core
from mini_ee.lab import statistics
from mini_ee.lab.backbones.hub import save_backbone
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.files import read_json
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.exits.decoding import gather
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.export import verification
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.registry import METHODS
from mini_ee.lab.rules import Fixed, Never, Policy, Threshold, rule_from_dict
from mini_ee.lab.training import default_rule, state
from mini_ee.lab.training import train_run as training
from mini_ee.lab.training.method import load_method
from mini_ee.lab.training.run_folder import training_folder
from mini_ee.lab.training.train_settings import RowOptions, TextOptions, TrainOptions
from mini_ee.serve import Worker, engine_of

EXITS = {"rows": (1, 2, 3), "tokens": (1, 2)}
WITH_EXIT_0 = (0, 1, 3)  # on rows, of methods that can have an exit before the first layer
UNITS = {name: [unit for unit in load_method(name).units if unit in EXITS] for name in METHODS}
SHARED = (TrainOptions, RowOptions, TextOptions)
SHORT = {"consistent": {"policy_epochs": 2, "rounds": 2}, "cat": {"meta_epochs": 2}}
CASES = [pytest.param(name, unit, id=f"{name}-{unit}") for name, units in UNITS.items() for unit in units]
PARTS = ("recipe", "model", "policy", "train", "search", "default_rule")


def training_of(method, unit):
    """What is called to train a method: equal for methods that differ in their exit rule alone, as PABEE and joint."""
    return (unit, *(getattr(load_method(method), part) for part in PARTS))


DIFFERENT = list({training_of(*case.values): case for case in reversed(CASES)}.values())[::-1]
"""A case of each training."""
ROWS = [name for name, units in UNITS.items() if "rows" in units]
TOKENS = [name for name, units in UNITS.items() if "tokens" in units]
WRITTEN = [case for case in CASES if load_method(case.values[0]).train is None]  # from the checkpoint on
TRAINED = [case for case in DIFFERENT if load_method(case.values[0]).has_stages]
EXACT = 2e-6
"""Logits of one batch against those of its rows alone, and of a chain against the whole; measured maximum 4.8e-7."""
ENGINES = 1e-5
"""Logits of ONNX Runtime against torch's; measured maximum 1.1e-6."""
TEXTS = ("the film was good", "a very very very awful book", "the room is poor and the song is lovely", "dull")
PROMPTS = ("the film", "a very dull song was", "book")
NEW_TOKENS = 5
THRESHOLDS = (1.0, 0.8, 0.6, 0.52, 0.4, 0.2, 0.0)


@pytest.fixture(scope="module")
def house(tmp_path_factory, checkpoint_folder, classifier_folder, decoder_checkpoint, task_folder):
    """Trainings and exports, each made once: `run(method, unit)`, `folder(method, unit)`, `exported(method, unit)`."""
    root = tmp_path_factory.mktemp("conformance")
    decoder = root / "decoder"
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = random_decoder("llama", 2).config.to_dict() | {"max_position_embeddings": 64}
        save_backbone(Decoder(DecoderConfig.from_hugging_face(config)), decoder)
    shutil.copy(decoder_checkpoint / "tokenizer.json", decoder)
    stories, draw = root / "stories.txt", random.Random(0)
    stories.write_text("\n\n".join(" ".join(draw.choices(WORDS, k=48)) for _ in range(64)))
    models, remaining, killed = {"rows": checkpoint_folder, "tokens": decoder}, {}, {}

    def train(method, unit, out, **more):
        """As the command does, but for brevity; the model as it was before it was saved is kept, and what kills would
        have left on disk: each before a step whose predecessor was not saved, so that one would be made again."""
        zero = unit == "rows" and not load_method(method).no_exit_0
        options = {"epochs": 2, "batch_size": 32, "exits": WITH_EXIT_0 if zero else EXITS[unit]}
        texts = {"text": stories, "texts": 40, "epochs": 1, "batch_size": 16, "new_tokens": 4}
        options |= texts if unit == "tokens" else {}
        options |= SHORT.get(method, {})
        lacks = load_method(method).lacks
        model, task = models[unit], task_folder if unit == "rows" else None
        if unit == "rows" and load_method(method).keeps_model:
            model = classifier_folder
        if load_method(method).train is not None:  # collected on exits that are trained already
            model, options = folder("joint", unit), {}
        options = {name: value for name, value in (options | more).items() if name not in lacks}
        with pytest.MonkeyPatch.context() as patch:
            saved, step, save, made, saved_at = training.save_run, torch.optim.AdamW.step, state.State.save, 0, 0
            killed[out] = []

            def save_run(folder, model, *others):
                remaining[folder] = model
                saved(folder, model, *others)

            def counted(*args, **settings):
                nonlocal made
                if made > saved_at > 0 and "device" not in more:
                    killed[out].append(shutil.copytree(training_folder(out), out.with_name(f"{out.name} {made}")))
                made += 1
                patch.setattr(state, "SAVE_SECONDS", -1.0 if made % 3 == 1 else math.inf)
                return step(*args, **settings)

            def save_state(*args):
                nonlocal saved_at
                saved_at = made
                save(*args)

            patch.setattr(training, "save_run", save_run)
            patch.setattr(torch.optim.AdamW, "step", counted)
            patch.setattr(state.State, "save", save_state)
            patch.setattr("mini_ee.lab.training.training_text.HELD_STORIES", 16)
            patch.setattr(default_rule, "CANDIDATES", 8)
            patch.setattr(statistics, "FEW", 0)  # the number of examples that a guarantee needs is approximate ...
            patch.setattr(default_rule, "rows_needed", statistics.rows_needed.__wrapped__)  # ... and not remembered
            return mini_ee.train(method, model, task, out, **options)

    @functools.cache
    def folder(method, unit):
        train(method, unit, root / f"{method}-{unit}")
        return root / f"{method}-{unit}"

    @functools.cache
    def exported(method, unit):
        out = root / f"{method}-{unit}.onnx"
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(verification, "VERIFIED_TOKENS", 4)
            texts = [(text,) for text in TEXTS[:2]] if unit == "rows" else PROMPTS[:2]
            mini_ee.export(mini_ee.load_run(folder(method, unit)), out, texts=texts, segments=unit == "rows")
        return Runtime(out, threads=1)

    run = functools.cache(lambda method, unit: mini_ee.load_run(folder(method, unit)))
    return SimpleNamespace(
        train=train, folder=folder, run=run, exported=exported, remaining=remaining, killed=killed, models=models
    )


def answers(run, rule, texts=TEXTS):
    """(logits, exit index) of some texts in one batch."""
    result = early_exit(run.segments(), rule, run.encode(texts).batch(slice(None)))
    return result.logits, result.exit_index


def each_exit(model, inputs):
    """Logits of every exit as training computes them, layer after layer without a loop: an oracle of (B, K, C)."""
    arrays = inputs.input_ids, inputs.attention_mask, inputs.token_type_ids
    tensors = [torch.from_numpy(array) for array in arrays]
    with torch.inference_mode():
        return torch.stack(model(*tensors), 1).numpy()


def ids_of(run, prompts=PROMPTS):
    return [run.tokenizer.ids_of(prompt) for prompt in prompts]


def texts_of(run):
    return [Text(ids, 0) for ids in ids_of(run)]


def decoded(run, rule, prompts=PROMPTS, missing_kv="copy_state", stop=()):
    """(tokens, layers) that each prompt is continued with."""
    ids, settings = ids_of(run, prompts), {"max_new_tokens": NEW_TOKENS, "missing_kv": missing_kv, "stop": stop}
    written = gather(run.model.generate(ids, rule, **settings), len(ids))
    return [(text.tokens, text.layers_run) for text in written]


def greedy(run, k, prompt):
    """What exit k says token by token, the whole text read anew each time: an oracle without cache and loop."""
    ids, written = ids_of(run, (prompt,))[0], []
    for _ in range(NEW_TOKENS):
        tokens = torch.tensor([ids + written])
        with torch.inference_mode():
            states = run.model.states(tokens, torch.ones_like(tokens, dtype=torch.bool))
            written.append(int(run.model.classify(k, states[k][-1]).argmax()))
    return written


# ---- The loop, on torch ----
@pytest.mark.parametrize("method", ROWS)
def test_rows_that_never_leave_are_the_full_model_and_rows_that_always_leave_the_first_head(house, method):
    run = house.run(method, "rows")
    expected = each_exit(run.model, run.encode(TEXTS).batch(slice(None)))
    for k in range(len(run.exits)):  # the chain of segments, as far as any exit
        np.testing.assert_allclose(answers(run, Fixed(k))[0], expected[:, k], atol=EXACT)
    for segments in (run.segments(), run.whole_model()):
        result = early_exit(segments, Never(), run.encode(TEXTS).batch(slice(None)))
        np.testing.assert_allclose(result.logits, expected[:, -1], atol=EXACT)
        assert set(result.layers_run) == {run.exits[-1]}
    logits, exit_index = answers(run, Threshold(0.0))
    assert not exit_index.any()
    np.testing.assert_allclose(logits, expected[:, 0], atol=EXACT)


@pytest.mark.parametrize("method", ROWS)
def test_the_loop_of_the_core_runs_the_segments_of_any_run_and_of_its_export(house, method):
    """Also of methods whose tokens exit within a row."""
    run = house.run(method, "rows")
    inputs = run.encode(TEXTS).batch(slice(None))
    for rule in (core.Never(), core.Fixed(0), core.Threshold(0.55), core.Patience(1)):
        result = loop.early_exit(run.segments(), rule, inputs)
        exported = loop.early_exit(house.exported(method, "rows").segments(), rule, inputs)
        lab_rule = rule_from_dict({"name": type(rule).__name__.lower()} | vars(rule))
        expected = early_exit(run.segments(), lab_rule, inputs)
        assert result.layers.tolist() == exported.layers.tolist() == expected.layers_run.tolist()
        np.testing.assert_array_equal(result.logits, expected.logits)
        np.testing.assert_allclose(exported.logits, expected.logits, atol=ENGINES)


@pytest.mark.parametrize("method", ROWS)
def test_a_batch_of_rows_is_its_rows_alone_padding_included(house, method):
    run = house.run(method, "rows")
    for rule in (run.rule, Never(), Threshold(0.55)):
        logits, exit_index = answers(run, rule)
        alone = [answers(run, rule, [text]) for text in TEXTS]
        np.testing.assert_allclose(logits, np.concatenate([one for one, _ in alone]), atol=EXACT)
        assert exit_index.tolist() == [int(index[0]) for _, index in alone]


@pytest.mark.parametrize("method", ROWS)
def test_rows_run_no_more_layers_as_a_rule_loosens(house, method):
    run = house.run(method, "rows")
    rules = [[Threshold(threshold) for threshold in THRESHOLDS]]
    if getattr(run.model, "policy", None) is not None:
        rules.append([Policy(cut) for cut in THRESHOLDS])
    for loosening in rules:
        layers = np.array([answers(run, rule)[1] for rule in loosening])
        assert (np.diff(layers, axis=0) <= 0).all() and layers[-1].max() == 0


@pytest.mark.parametrize("method", TOKENS)
def test_tokens_that_never_leave_are_the_full_model_and_tokens_that_always_leave_the_first_head(house, method):
    run = house.run(method, "tokens")
    for k, rules in ((0, (Fixed(0), Threshold(0.0))), (len(run.exits) - 1, (Never(),))):
        expected = [greedy(run, k, prompt) for prompt in PROMPTS]
        for rule in rules:
            assert decoded(run, rule) == [(tokens, [run.exits[k]] * NEW_TOKENS) for tokens in expected]


@pytest.mark.parametrize("method", TOKENS)
def test_a_batch_of_prompts_is_its_prompts_alone(house, method):
    run = house.run(method, "tokens")
    for rule, missing_kv in ((run.rule, "copy_state"), (Threshold(0.1), "recompute")):
        together = decoded(run, rule, missing_kv=missing_kv)
        assert together == [decoded(run, rule, [prompt], missing_kv=missing_kv)[0] for prompt in PROMPTS]


@pytest.mark.parametrize("method", TOKENS)
def test_tokens_run_no_more_layers_as_a_rule_loosens(house, method):
    run = house.run(method, "tokens")
    recorded = record_texts(run.model, texts_of(run))
    rules = [[Threshold(threshold) for threshold in THRESHOLDS]]
    if run.model.policy is not None:
        rules.append([Policy(cut) for cut in THRESHOLDS])
    for loosening in rules:
        layers = np.array([recorded.replay(rule).layers_run for rule in loosening])
        assert (np.diff(layers, axis=0) <= 0).all() and set(layers[-1]) == {run.exits[0]}


# ---- The run on disk ----
@pytest.mark.parametrize(("method", "unit"), WRITTEN)
def test_a_run_that_is_loaded_is_the_one_that_was_saved(house, method, unit):
    run, model = house.run(method, unit), house.remaining[house.folder(method, unit)].eval()
    assert run.config["method"] == method and run.unit == unit
    if unit == "rows":
        inputs = run.encode(TEXTS).batch(slice(None))
        assert (each_exit(model, inputs) == each_exit(run.model, inputs)).all()
    else:
        record, again = record_texts(model, texts_of(run)), record_texts(run.model, texts_of(run))
        np.testing.assert_allclose(record.logits, again.logits, atol=ENGINES)  # adapters are folded as it is loaded


def without_seconds(value):
    """JSON without what the clock said."""
    if isinstance(value, dict):
        return {key: without_seconds(entry) for key, entry in value.items() if "seconds" not in key}
    return [without_seconds(entry) for entry in value] if isinstance(value, list) else value


def report(folder):
    """What a run says of itself, weights by their digest, and what its training measured."""
    config, metrics = (without_seconds(read_json(folder / name)) for name in ("config.json", "metrics.json"))
    del config["files"]["metrics.json"]
    return config, metrics


@pytest.mark.slow
@pytest.mark.parametrize(("method", "unit"), TRAINED)
def test_a_training_that_is_killed_and_resumed_is_the_one_that_was_not(house, method, unit, tmp_path):
    """It is killed in the middle. LoRA exits are killed twice, the others once."""
    last = whole = house.folder(method, unit)
    for number in range(2 if method == "lora-exits" else 1):
        left = house.killed[last]
        last = tmp_path / str(number)
        shutil.copytree(left[len(left) // 2], training_folder(last))
        house.train(method, unit, last, resume=True)
    assert report(last) == report(whole)


# ---- The export ----
@pytest.mark.parametrize("method", ROWS)
def test_onnx_answers_rows_as_torch_does(house, method):
    run, runtime = house.run(method, "rows"), house.exported(method, "rows")
    assert runtime.exits == run.exits
    for rule in (Never(), *(Fixed(k) for k in range(len(run.exits))), run.rule):
        expected, left = answers(run, rule)
        exported = runtime.run(list(TEXTS), rule=None if rule is run.rule else rule)
        np.testing.assert_allclose([answer.logits for answer in exported], expected, atol=ENGINES)
        assert [answer.exit for answer in exported] == [run.exits[k] for k in left]


@pytest.mark.parametrize("method", TOKENS)
def test_onnx_writes_tokens_as_torch_does(house, method):
    run, runtime = house.run(method, "tokens"), house.exported(method, "tokens")
    ids = ids_of(run)
    for rule in (Never(), Fixed(0), run.rule):
        steps = runtime.generate(ids, max_new_tokens=NEW_TOKENS, rule=rule)
        texts = [(text.tokens, text.layers_run) for text in gather(steps, len(ids))]
        assert texts == decoded(run, rule, stop=run.model.backbone.config.stop_tokens)


@pytest.mark.parametrize("method, unit", CASES)
def test_a_worker_answers_each_request_as_if_it_were_alone(house, method, unit):
    """Rows of different requests go on together after each exit; texts begin and end at any time."""
    runtime, texts = house.exported(method, unit), [*(TEXTS if unit == "rows" else PROMPTS)] * 3
    settings = {"max_new_tokens": NEW_TOKENS} if unit == "tokens" else {}
    alone = [runtime.run([text], **settings)[0] for text in texts]
    with Worker(engine_of(runtime), batch=3) as worker:
        served = [future.result(60) for future in [worker.submit(text, **settings) for text in texts]]
    assert [answer.layers for answer in served] == [answer.layers for answer in alone]
    if unit == "rows":
        assert [answer.label for answer in served] == [answer.label for answer in alone]
        np.testing.assert_allclose(
            [answer.logits for answer in served], [answer.logits for answer in alone], atol=EXACT
        )
        assert len(worker.engine.queues) >= len(runtime.exits)
    else:
        assert [answer.tokens for answer in served] == [answer.tokens for answer in alone]


# ---- Bad input is one line ----
def one_line(capsys, *argv):
    """(status, what the command says) of one that fails."""
    capsys.readouterr()
    try:
        status = main([*map(str, argv)])
    except SystemExit as ended:
        status = ended.code
    captured = capsys.readouterr()
    message = captured.err.rstrip("\n").split("\n")[-1]
    assert not captured.out and "Traceback" not in captured.err and len(captured.err.rstrip("\n").split("\n")) == 1
    return status, message


@pytest.mark.parametrize("method", METHODS)
def test_an_option_of_another_method_is_refused(method, tmp_path, capsys):
    known = {field.name for part in (load_method(method).config, *SHARED) for field in fields(part)}
    others = (sorted(load_method(other).config.__dataclass_fields__.keys() - known)[:1] for other in METHODS)
    for name in ("no-such", *sorted(set(chain(*others)))):
        option = f"--{name.replace('_', '-')}"
        status, message = one_line(capsys, "train", method, "--out", tmp_path / "x", option, "1")
        assert status == 2 and option in message
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("method", "unit"), CASES)
def test_an_exit_0_is_taken_or_refused_in_one_line(house, method, unit, task_folder, tmp_path, capsys):
    known, model = load_method(method), house.models[unit]
    if unit == "rows" and known.has_stages and not known.no_exit_0 and "exits" not in known.lacks:
        assert house.run(method, unit).exits == WITH_EXIT_0
        return
    task = ("--task", task_folder) if unit == "rows" else ()
    options = (
        "--out",
        tmp_path / "run",
        "--exits",
        "0,1,3",
        "--template",
        "{text} {mask}",
        "--words",
        "bad=a,good=the",
    )
    status, message = one_line(capsys, "train", method, "--model", model, *task, *options[: None if known.train else 4])
    reason = "unrecognized arguments: --exits" if "exits" in known.lacks else f"{method} cannot have an exit 0, "
    assert status == 2 and reason in message and not list(tmp_path.iterdir())


@pytest.mark.parametrize(("method", "unit"), CASES)
def test_a_damaged_run_is_refused(house, method, unit, tmp_path, capsys):
    command = ("classify", "--text", "a film") if unit == "rows" else ("generate", "--prompt", "a film")
    for file in sorted(path.name for path in house.folder(method, unit).glob("*.*") if path.is_file()):
        copy = shutil.copytree(house.folder(method, unit), tmp_path / file)
        data = bytearray((copy / file).read_bytes())
        data[len(data) // 2] ^= 255
        (copy / file).write_bytes(data)
        status, message = one_line(capsys, command[0], copy, *command[1:])
        assert status == 1 and str(copy) in message
    status, message = one_line(capsys, command[0], tmp_path, *command[1:])
    assert status in (1, 2) and str(tmp_path) in message


@pytest.mark.parametrize(("method", "unit"), CASES)
def test_a_damaged_export_is_refused(house, method, unit, tmp_path, capsys):
    source = house.exported(method, unit).folder
    for file in ("manifest.json", "weights.safetensors", "segment_1.onnx"):
        if not (source / file).is_file():
            continue
        copy = shutil.copytree(source, tmp_path / file)
        data = bytearray((copy / file).read_bytes())
        data[len(data) // 2] ^= 255
        (copy / file).write_bytes(data)
        status, message = one_line(capsys, "run", copy)
        assert status == 1 and str(copy) in message
