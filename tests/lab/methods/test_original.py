"""add-exits proves, on some of the texts, that it reads a folder as transformers or sentence-transformers does.

Where these libraries are not installed, a module made here stands for transformers.
"""

import json
import re
import shutil
import sys
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import tokenizers
import torch
from method_cases import TEXTS, few_epochs_and_no_picture  # noqa: F401

import mini_ee
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.backbones.sentence_encoder import POOLS
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.export import add_exits as add_exits_module
from mini_ee.lab.export import original
from mini_ee.lab.export.original import COMPARED, compare, compared_texts


class Network:
    """The classifier of the module in place of transformers: ours."""

    def __init__(self, folder):
        backbone = load_backbone(folder)
        self.model = FrozenClassifier(backbone.without_heads(), (3,), 2, backbone.poolings[0]).eval()

    def float(self):
        return self

    eval = float

    def __call__(self, **row):
        state = self.model.states(row["input_ids"], row["attention_mask"], row["token_type_ids"])[0]
        return SimpleNamespace(logits=self.model.classify(0, state))


class FakeTokenizer:
    """tokenizer.json, read by the library tokenizers alone."""

    model_max_length = 10**30

    def __init__(self, folder, changed):
        self.backend, self.changed = tokenizers.Tokenizer.from_file(f"{folder}/tokenizer.json"), changed

    def __call__(self, *row, truncation, max_length, return_tensors):
        assert truncation and return_tensors == "pt" and max_length < 99
        ids = self.backend.encode(*row).ids[:max_length]
        if self.changed:
            ids[1:-1] = ids[-2:0:-1]  # it reads from right to left
        ids = torch.tensor([ids])
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "token_type_ids": torch.zeros_like(ids)}


@pytest.fixture
def fake(monkeypatch):
    """Puts a module in place of transformers. `changed`: its tokenizer reads in another way than ours."""

    def install(changed=False, error=None):
        def opened(kind):
            def from_pretrained(folder, local_files_only):
                assert local_files_only
                if error:
                    raise error
                return kind(folder)

            return SimpleNamespace(from_pretrained=from_pretrained)

        logging = SimpleNamespace(get_verbosity=lambda: 30, is_progress_bar_enabled=lambda: True)
        for name in ("set_verbosity", "set_verbosity_error", "disable_progress_bar", "enable_progress_bar"):
            setattr(logging, name, lambda *level: None)
        module = SimpleNamespace(__version__="9.9", utils=SimpleNamespace(logging=logging))
        module.AutoTokenizer = opened(lambda folder: FakeTokenizer(folder, changed))
        module.AutoModelForSequenceClassification = opened(Network)
        monkeypatch.setitem(sys.modules, "transformers", module)

    return install


@pytest.fixture
def argv(classifier_folder, tmp_path, monkeypatch):
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", 1.0)  # nothing is exported
    (tmp_path / "in.txt").write_text("\n".join(TEXTS[::2]))
    return ["add-exits", str(classifier_folder), "--text", str(tmp_path / "in.txt"), "--out", str(tmp_path / "fast")]


def test_a_tokenizer_that_transformers_reads_in_another_way_stops_before_anything_is_written(
    argv, fake, tmp_path, capsys
):
    fake(changed=True)
    assert main(argv) == 2 and not (tmp_path / "fast").exists()
    (line,) = capsys.readouterr().err.splitlines()
    assert "is read in another way than by transformers 9.9: outputs differ by 0.0" in line
    assert any(repr(text)[1:40] in line for text in TEXTS) and "nothing was trained" in line


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ({}, r"Equal to transformers on 64 of your texts \(largest difference (0|\de-0[6-9])\)\."),
        ({"error": OSError("no\nway")}, r"Not compared with transformers: transformers 9.9 cannot read .* \('no'\)\."),
        (None, r"Not compared with transformers \(pip install 'mini-ee\[hf\]'\)\."),
    ],
)
def test_the_result_is_printed_and_in_the_summary(argv, fake, kind, expected, monkeypatch, tmp_path, capsys):
    fake(**kind) if kind is not None else monkeypatch.setitem(sys.modules, "transformers", None)
    assert main(argv) == 0
    compared = read_json(tmp_path / "fast" / "summary.json")["compared"]
    assert compared in capsys.readouterr().out.splitlines()
    assert re.fullmatch(expected, compared), compared


def test_texts_that_are_long_short_and_odd_are_compared():
    plain = [(f"text number {number:04}",) for number in range(900)]
    odd = [
        ("a",),
        ("of many words " * 50,),
        ("ALL CAPITALS",),
        ("äöü ß – „“",),
        ("the quick brown fox jumps, lazy dog!",),
    ]
    chosen = compared_texts([*plain, *odd, *plain])
    assert len(chosen) == len(set(chosen)) == COMPARED and set(odd) <= set(chosen)
    assert compared_texts([("a", "b"), ("a", "c")] * 9) == [("a", "b"), ("a", "c")]


@pytest.mark.parametrize(
    ("least", "most", "error", "equal"),
    [
        *((0, 1, 9e-4, True), (0, 1, 1.5e-3, False), (0, 1, np.nan, False)),
        *((0, 0.05, 4e-5, True), (0, 0.05, 1e-4, False), (0, 0, 9e-6, True)),  # its outputs hardly differ
        *((999, 1000, 9e-3, True), (999, 1000, 0.02, False), (-20, 20, 0.015, True)),  # it is rounded more
    ],
)
def test_the_largest_difference_is_a_thousandth_of_what_outputs_differ_by(
    fake, monkeypatch, tmp_path, least, most, error, equal
):
    fake()
    expected = np.array([[least, least], [most, least]], np.float32)
    monkeypatch.setattr(original, "_logits", lambda *given: expected)
    outputs = expected + np.array([[0, 0], [error, 0]], np.float32)
    if equal:
        assert "Equal to transformers on 2 of" in compare(tmp_path, [("a",), ("b",)], outputs, 40, False)
    else:
        with pytest.raises(WrongArguments, match="in another way than by transformers 9.9: .* for 'b'; nothing was"):
            compare(tmp_path, [("a",), ("b",)], outputs, 40, False)
    with pytest.raises(WrongArguments, match="as from transformers 9.9, 2 outputs for a text, found 1 here"):
        compare(tmp_path, [("a",), ("b",)], outputs[:, :1], 40, False)


# ---- The libraries themselves ----


def test_transformers_own_folder_is_equal_and_quiet(classifier_folder, tmp_path, monkeypatch, capfd):
    transformers = pytest.importorskip("transformers")
    folder, words = shutil.copytree(classifier_folder, tmp_path / "model"), [text.upper() for text in TEXTS]
    transformers.AutoTokenizer.from_pretrained(folder).save_pretrained(folder)
    monkeypatch.setattr(add_exits_module, "LEAST_SAVED", 1.0)  # nothing is exported
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        mini_ee.add_exits(folder, [*TEXTS, *words[:60]], tmp_path / "fast")
    assert capfd.readouterr() == ("", "")
    assert read_json(tmp_path / "fast" / "request.json")["compared"].startswith("Equal to transformers on 64 of your")


def test_a_sentence_encoder_is_equal_to_that_of_sentence_transformers(encoder_folder, tmp_path, monkeypatch):
    pytest.importorskip("sentence_transformers")
    folder = shutil.copytree(encoder_folder, tmp_path / "model")
    modules = json.loads((folder / "modules.json").read_text())
    named = [module | {"idx": number, "name": str(number)} for number, module in enumerate(modules)]
    (folder / "modules.json").write_text(json.dumps(named))
    pooling = {"word_embedding_dimension": 16, "pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"pad_token": "[PAD]"})
    )  # it pads before it reads
    mini_ee.add_exits(folder, TEXTS, tmp_path / "fast", cosine=0.99999)
    compared = read_json(tmp_path / "fast" / "request.json")["compared"]
    assert re.fullmatch(
        r"Equal to sentence-transformers on 64 of your texts \(largest difference (0|\de-0[6-9])\)\.", compared
    )
    assert compared in (tmp_path / "fast" / "README.md").read_text()
    monkeypatch.setitem(POOLS, "mean", "first")  # planted
    with pytest.raises(WrongArguments, match="is read in another way than by sentence-transformers .*: outputs differ"):
        mini_ee.add_exits(folder, TEXTS, tmp_path / "other", cosine=0.99999)
    assert not (tmp_path / "other").exists()
