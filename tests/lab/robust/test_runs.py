"""A run on disk: what is written is read back the same; what was damaged is told, in one line, and never loaded."""

import json
import random
import shutil
from copy import deepcopy
from dataclasses import replace
from functools import reduce
from operator import getitem

import numpy as np
import pytest
import torch

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import load_task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.rules import Threshold
from mini_ee.lab.training.run_folder import encode, load_run, write_rule


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory, checkpoint_folder, task_folder):
    out = tmp_path_factory.mktemp("runs") / "run"
    mini_ee.train("joint", checkpoint_folder, task_folder, out, epochs=1, batch_size=8)
    return out


@pytest.fixture
def copy(run_folder, tmp_path):
    return shutil.copytree(run_folder, tmp_path / "copy")


def answers(run):
    encoded = run.tokenizer.encode([("the film was lovely",), ("a very dull song",)])
    return early_exit(run.segments(), Threshold(0.5001), encoded.batch(np.arange(2))).logits


def test_a_run_contains_the_files_of_the_design_and_nothing_else(run_folder, task_folder):
    assert sorted(path.name for path in run_folder.iterdir()) == [
        "config.json",
        "metrics.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    config = json.loads((run_folder / "config.json").read_text())
    assert (config["format_version"], config["unit"], config["method"]) == (2, "rows", "joint")
    assert config["exits"] == [1, 2, 3]
    task = {"name": "words", "label_names": ["bad", "good"], "metrics": ["accuracy"], "texts": 1}
    task |= {"folder": str(task_folder), "options": {}}
    assert config["task"] == task | {"train_sha256": load_task(task_folder).split("train").sha256()}
    assert {"backbone", "rule", "seed", "versions", "pool", "max_length", "training", "files"} <= config.keys()


def test_an_answer_that_is_not_finite_is_an_error(run_folder, embedding_run, monkeypatch, capsys):
    """Weights may be finite and have the right checksum, and still be too large to compute with."""
    forged, encoder = load_run(run_folder), load_run(embedding_run.folder)
    with torch.no_grad():
        for parameter in (*forged.model.parameters(), *encoder.model.parameters()):
            parameter.mul_(1e30)
    for compute in (forged.classify, encoder.embed):
        with pytest.raises(ValueError, match="the logits must be finite, found NaN or infinity"):
            compute(["the film"])
    monkeypatch.setattr("mini_ee.lab.cli.open.load_run", lambda *_: forged)
    assert main(["classify", str(run_folder), "--text", "the film"]) == 1
    printed = capsys.readouterr()
    assert "must be finite" in printed.err and printed.err.count("\n") == 1 and not printed.out


def test_a_run_is_read_back_as_it_was_and_loading_draws_no_random_numbers(run_folder):
    torch.manual_seed(1)
    first = answers(load_run(run_folder))
    drawn = torch.rand(2)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(2), drawn)
    assert np.array_equal(first, answers(load_run(run_folder)))


def test_a_byte_flipped_anywhere_in_a_run_is_an_error_or_changes_nothing(run_folder, tmp_path):
    rng, expected, refusals = random.Random(0), answers(load_run(run_folder)), 0
    for number in range(80):
        folder = shutil.copytree(run_folder, tmp_path / str(number))
        path = rng.choice(sorted(folder.iterdir()))
        content = bytearray(path.read_bytes())
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
        path.write_bytes(content)
        try:
            run = load_run(folder)
        except (ValueError, FileNotFoundError) as error:
            assert "\n" not in str(error) and str(folder) in str(error)
            refusals += 1
        else:
            assert np.array_equal(answers(run), expected)
            assert run.config == load_run(run_folder).config
        shutil.rmtree(folder)
    assert refusals > 60


def gone(name):
    return lambda run: (run / name).unlink()


def halved(name):
    return lambda run: (run / name).write_bytes((run / name).read_bytes()[: (run / name).stat().st_size // 2])


def config(**values):
    """Other values in config.json, with its checksum; None: without the key."""

    def damage(run):
        changed = read_json(run / "config.json") | values
        write_json(run / "config.json", {key: value for key, value in changed.items() if value is not None})

    return damage


def edited(run):
    text = (run / "config.json").read_text()
    (run / "config.json").write_text(text.replace('"seed": 0', '"seed": 1'))


def other_weights(run):
    tensors = {name: tensor + 1 for name, tensor in read_tensors(run / "model.safetensors").items()}
    write_tensors(run / "model.safetensors", tensors)


PARTS = "metrics.json", "model.safetensors", "tokenizer.json"
KEYS = "pool num_labels exits rule unit method settings files backbone max_length".split()
DAMAGE = [
    (gone("config.json"), "no run here"),
    *((gone(name), name) for name in PARTS),
    *((halved(name), f"{name}.*damaged") for name in PARTS),
    (other_weights, "checksum"),
    (edited, "damaged or edited"),
    *((config(**{key: None}), f"config.json has no key '{key}'; train the run again$") for key in KEYS),
    (config(format_version=1), "format_version 2, found 1; train it again"),
    (config(format_version=3), "format_version 2, found 3; give a folder that `mini-ee train` wrote"),
    (config(unit="words"), "unit must be one of rows, prompts, tokens, embeddings, found 'words'"),
    (config(method="oracle"), "'oracle'"),
    (config(settings={"rank": 3}), "rank"),
    (config(exits=3), "wrong type .*; train the run again"),
    (config(exits=[2, 1, 3]), "ascend"),
    (config(exits=[1, 2]), "end at the last layer, 3"),
    (config(rule={"name": "oracle"}), "'oracle'"),
    (config(rule={"name": "threshold", "threshold": 7}), "from 0.0 to 1.0, got 7"),
    (config(pool="max"), "pool must be"),
]


@pytest.mark.parametrize(("damage", "message"), DAMAGE, ids=[message for _, message in DAMAGE])
def test_a_damaged_run_is_refused_in_one_line_that_names_it(copy, damage, message):
    damage(copy)
    with pytest.raises((ValueError, FileNotFoundError), match=f"^{copy}.*{message}") as error:
        load_run(copy)
    assert not isinstance(error.value, WrongArguments) and "\n" not in str(error.value)


def places(content, at=()):
    """The keys and indices that lead to each value of a JSON object."""
    for key, value in content.items() if isinstance(content, dict) else enumerate(content):
        yield (*at, key)
        if isinstance(value, dict | list):
            yield from places(value, (*at, key))


def test_a_forged_value_is_an_error_or_does_no_harm(run_folder, copy):
    """With its checksum, which anyone can make."""
    config, refusals = read_json(run_folder / "config.json"), 0
    elsewhere = ("backbone", "versions", "files", "training", "guarantee", "curve")  # a backbone has tests of its own
    for *into, last in places({key: value for key, value in config.items() if key not in elsewhere}):
        for wrong in (None, 10**60, 1.5, {"a": 1}):
            forged = deepcopy(config)
            reduce(getitem, into, forged)[last] = wrong
            write_json(copy / "config.json", forged)
            try:
                run = load_run(copy)
            except (ValueError, FileNotFoundError) as error:
                assert str(copy) in str(error) and "\n" not in str(error)
                refusals += 1
            else:
                answers(run)
                assert len(run.classify(["the film was lovely"])) == 1
    assert refusals > 40


def test_a_run_of_0_1_0_has_its_guarantee_under_the_new_name(run_folder, copy):
    config = read_json(run_folder / "config.json")
    guarantee = config.pop("guarantee")
    write_json(copy / "config.json", config | {"promise": guarantee or {"epsilon": 0.9}})
    run_config = load_run(copy).config
    assert run_config["guarantee"] == (guarantee or {"epsilon": 0.9}) and "promise" not in run_config
    write_rule(copy, load_run(copy).rule, {"epsilon": 0.8}, [1, 2, 3])
    run_config = load_run(copy).config
    assert run_config["guarantee"] == {"epsilon": 0.8} and "promise" not in run_config


def test_an_unfinished_training_is_pointed_to(tmp_path):
    (tmp_path / "run.training").mkdir()
    with pytest.raises(FileNotFoundError, match="`mini-ee train` wrote$"):  # nothing that could go on
        load_run(tmp_path / "run")
    (tmp_path / "run.training" / "state.safetensors").write_bytes(b"")
    with pytest.raises(FileNotFoundError, match="--resume"):
        load_run(tmp_path / "run")


def test_token_types_are_for_encoders_only(checkpoint_folder, decoder_checkpoint):
    tokenizer, decoder = Tokenizer.from_folder(checkpoint_folder), load_backbone(decoder_checkpoint)
    assert encode(tokenizer, [("good film", "bad film")], decoder).type_ids[0].max() == 1
    one_type = load_backbone(checkpoint_folder)
    one_type.config = replace(one_type.config, type_vocab_size=1)
    with pytest.raises(ValueError, match="row 0: expected token types below 1, as the model has them, found 1"):
        encode(tokenizer, [("good film", "bad film")], one_type)
