"""T5 models that several tests share: golden ones, and a small one with its tokenizer."""

from pathlib import Path

import pytest
import tokenizers
import torch
from conftest import WORDS

from mini_ee.lab.backbones.hub import load_backbone, save_backbone
from mini_ee.lab.backbones.t5 import T5
from mini_ee.lab.backbones.t5_layers import Pairs, T5Config
from mini_ee.lab.backbones.tensor_files import read_tensors

GOLDEN = Path(__file__).parents[2] / "golden"
KINDS = ("t5", "t5-v1.1")
TOLERANCE = 2e-5  # absolute, and relative above one
"""Measured maximum against transformers on the golden files: states 2.4e-6, logits 6e-6; on random configs 1.3e-5."""
ENGINES = 1e-5
"""Logits of ONNX Runtime against torch's; measured maximum 1.3e-6."""


def assert_close(output, expected, tolerance=TOLERANCE):
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)


def golden(kind):
    """The backbone, its inputs, and what transformers computed."""
    expected = read_tensors(GOLDEN / kind / "expected.safetensors")
    inputs = Pairs(*(expected.pop(name) for name in Pairs._fields))
    return load_backbone(GOLDEN / kind), inputs, expected


def unigram():
    """As T5 has it: pieces with the space before them, </s> behind each text, no other mark."""
    backend, marks = tokenizers.Tokenizer(tokenizers.models.Unigram()), ["<pad>", "</s>", "<unk>"]
    split = tokenizers.pre_tokenizers
    backend.pre_tokenizer = split.Sequence([split.WhitespaceSplit(), split.Metaspace()])
    backend.decoder = tokenizers.decoders.Metaspace()
    trainer = tokenizers.trainers.UnigramTrainer(
        vocab_size=90, special_tokens=marks, unk_token="<unk>", show_progress=False
    )
    backend.train_from_iterator([word + end for word in WORDS for end in ("", ".", ",", "ly", "s")] * 20, trainer)
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return backend


@pytest.fixture(scope="session")
def t5_folder(tmp_path_factory):
    """A random T5 v1.0 with its tokenizer; its vocabulary is larger than the tokenizer's, as the published ones are."""
    folder = tmp_path_factory.mktemp("checkpoint") / "t5"
    sizes = {"d_model": 16, "d_kv": 6, "d_ff": 24, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 3}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_backbone(T5(T5Config.from_hugging_face({"model_type": "t5", "vocab_size": 96} | sizes)), folder)
    unigram().save(str(folder / "tokenizer.json"))
    return folder
