"""What every test may use. The tests of the core and of its export need this file alone: the lab may be deleted."""

import gc
import json
import os
from importlib.util import find_spec

import pytest
import torch
from safetensors.torch import save_file
from words import BAD, GOOD, THINGS, WORDS, words_tokenizer

from mini_ee import bert, llama

collect_ignore = ["make_golden.py", "make_golden_tokenizers.py", "golden/random_heads.py"]  # these need transformers
torch.set_num_threads(1)  # small models: threads would only wait for each other
gc.set_threshold(50_000, 20, 50)  # a collection of garbage reads all objects: 8,000 tests and their modules


if find_spec("mini_ee.lab"):  # its fixtures, for the tests of the lab and of what stands around it
    from lab_fixtures import *  # noqa: F403


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk():
    """Tests kill processes but not the machine, so files are complete without fsync."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def pytest_collection_modifyitems(items):
    """The tutorial first: it takes longest, and with `-n` the others run at the same time."""
    items.sort(key=lambda item: item.path.name != "test_tutorial.py")
    if "MINI_EE_SLOW" not in os.environ:
        for item in items:
            if item.get_closest_marker("slow"):
                item.add_marker(pytest.mark.skip(reason="slow: set MINI_EE_SLOW=1, as .ci/run does"))


def pytest_collection_finish():
    """What was collected stays, so no collection of garbage looks at it again."""
    gc.freeze()


def save_random(module, kind, folder, std, **sizes):
    """A random model of the core with WORDS as vocabulary, in Hugging Face's layout. Returns the folder."""
    config = {"model_type": module.__name__.split(".")[-1], "vocab_size": 5 + len(WORDS), "hidden_size": 16} | sizes
    config |= {"num_hidden_layers": 3, "num_attention_heads": 4, "intermediate_size": 32}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        weights = {module.theirs(name): value for name, value in kind(config).state_dict().items()}
        for value in weights.values():
            if value.dim() > 1:
                value.normal_(std=std)
    folder.mkdir()
    save_file(weights, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    words_tokenizer().save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def bert_folder(tmp_path_factory):
    """A random BERT of three layers, of width 16 and 24 positions."""
    return save_random(bert, bert.Bert, tmp_path_factory.mktemp("core") / "bert", 0.02, max_position_embeddings=24)


@pytest.fixture(scope="session")
def llama_folder(tmp_path_factory):
    """A random Llama of three layers, in which two query heads share a key head."""
    sizes = {"max_position_embeddings": 256, "num_key_value_heads": 2}
    return save_random(llama, llama.Llama, tmp_path_factory.mktemp("core") / "llama", 0.3, **sizes)


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """A task with 60 + 20 sentences; one word decides the label."""
    folder = tmp_path_factory.mktemp("task") / "words"
    folder.mkdir()
    rows = [
        {"sentence": f"the {thing} was {'very ' * (i % 2)}{word}", "label": name}
        for i, thing in enumerate(THINGS * 2)
        for name, words in (("bad", BAD), ("good", GOOD))
        for word in words
    ]
    for split, part in (("train", rows[:60]), ("dev", rows[60:])):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
    return folder
