"""Small checkpoints and tasks in the layouts of real ones, made afresh: nothing is downloaded."""

import json

import pytest
import tokenizers
import torch

from mini_ee.bert import Bert, BertConfig
from mini_ee.checkpoint import save_backbone

GOOD, BAD = ("good", "great", "fine", "lovely"), ("bad", "awful", "poor", "dull")
THINGS = ("film", "meal", "book", "song", "room")
WORDS = ("the", "a", "was", "is", "very", "and", *THINGS, *GOOD, *BAD)


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory):
    """A random 3-layer BERT with pooler and masked-LM head, and its tokenizer.json."""
    folder = tmp_path_factory.mktemp("checkpoint") / "bert"
    vocab = {token: i for i, token in enumerate(("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", *WORDS))}
    config = BertConfig(
        model_type="bert", vocab_size=len(vocab), hidden_size=16, num_hidden_layers=3, num_attention_heads=2,
        intermediate_size=32, max_position_embeddings=24,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        save_backbone(Bert(config), folder)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordPiece(vocab, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", pair="[CLS] $A [SEP] $B:1 [SEP]:1", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


@pytest.fixture(scope="session")
def task_folder(tmp_path_factory):
    """A plain task with 60 + 20 rows that one word decides."""
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
