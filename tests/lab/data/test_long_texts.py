"""A long text is cut by characters before it is encoded only where that changes no token that is kept.

The oracle is the backend itself on the whole text. Tokenizers are trained on texts of the same odd characters, with
every normalizer and pre-tokenizer that is known, and some that must not be cut.
"""

import functools
import random

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers, processors, trainers

import mini_ee.lab.data.tokenizer as tokenizer_module
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, BUILT_IN_MODEL
from mini_ee.lab.data.tokenizer import HEAD, Tokenizer

ODD = [*"abeEA12!.-_ \t\n", "  ", "'s", "中", "文", "é", "e\u0301", " \u0301", "ß", "ﬁ", "ﾞ", "Σ", "\u200b", "\x07"]
ODD += ["\u3000", "\ufffd", "’", "😀", "▁", "[MASK]", "<x>", "½", "\u00a0", "ŉ", "!!", "[["]
PLAIN = [*"abeé12!?中文-", " ", " "]

NORMALIZERS = {
    "none": lambda: None,
    "bert": normalizers.BertNormalizer,
    "bert, cased": lambda: normalizers.BertNormalizer(lowercase=False, handle_chinese_chars=False),
    "nfkc": normalizers.NFKC,
    "nfd": normalizers.NFD,
    "stripped": lambda: normalizers.Sequence([normalizers.NFKD(), normalizers.StripAccents(), normalizers.Lowercase()]),
    "sentencepiece": lambda: normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]),
}
SPLITTERS = {
    "bert": pre_tokenizers.BertPreTokenizer,
    "words": pre_tokenizers.Whitespace,
    "spaces": pre_tokenizers.WhitespaceSplit,
    "bytes": pre_tokenizers.ByteLevel,
    "bytes, no prefix": lambda: pre_tokenizers.ByteLevel(add_prefix_space=False),
    "metaspace": pre_tokenizers.Metaspace,
    "one word": lambda: pre_tokenizers.Metaspace(split=False),
    "two": lambda: pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()]),
    "none": lambda: None,
}
MODELS = [
    lambda: (models.BPE(unk_token="[UNK]"), trainers.BpeTrainer),
    lambda: (models.WordPiece(unk_token="[UNK]", max_input_chars_per_word=20), trainers.WordPieceTrainer),
]
ADDED = ([], ["a", "ab", "中"], ["é1"], ["a b"], ["!!x", "中文"], ["[[", "--"])


built_in = functools.cache(Tokenizer.from_folder)


def drawn(chance, count):
    odd = chance.random()
    return "".join(chance.choice(ODD if chance.random() < odd else PLAIN) for _ in range(count))


def trained(chance, normalizer, splitter):
    model, trainer = chance.choice(MODELS)()
    backend = tokenizers.Tokenizer(model)
    for name, part in (("normalizer", NORMALIZERS[normalizer]()), ("pre_tokenizer", SPLITTERS[splitter]())):
        if part is not None:
            setattr(backend, name, part)
    corpus = [drawn(chance, 100) for _ in range(20)]
    backend.train_from_iterator(corpus, trainer(vocab_size=150, special_tokens=["[UNK]"], show_progress=False))
    backend.add_tokens(chance.choice(ADDED))
    mask, end = tokenizers.AddedToken("[MASK]", lstrip=True), tokenizers.AddedToken("<x>", rstrip=True)
    backend.add_special_tokens([mask, end])
    if chance.random() < 0.5:
        special = [(token, backend.token_to_id(token)) for token in ("[MASK]", "<x>")]
        backend.post_processor = processors.TemplateProcessing(single="[MASK] $A <x>", special_tokens=special)
    backend.enable_truncation(99, direction=chance.choice(["left", "right"]))
    return Tokenizer(backend, chance.choice([4, 8, 13]))


@pytest.mark.parametrize("splitter", SPLITTERS)
@pytest.mark.parametrize("normalizer", NORMALIZERS)
def test_the_tokens_of_a_cut_text_are_those_of_the_whole_text(normalizer, splitter):
    """By hand 2,880 were drawn of more tokenizers."""
    chance, cut = random.Random(f"{normalizer} {splitter}"), 0
    for _ in range(2):
        tokenizer = trained(chance, normalizer, splitter)
        for size in (300, 1200):
            text = "\x07" * chance.choice([0, 0, 900]) + drawn(chance, size) + "x"
            (whole,), encoded = tokenizer.backend.encode_batch([text]), tokenizer.encode([text])
            cut += len(tokenizer._head(text)) < len(text)
            assert encoded.ids[0].tolist() == whole.ids and encoded.type_ids[0].tolist() == whole.type_ids
            assert encoded.truncated == bool(whole.overflowing) and encoded.texts == ((text,),)
    assert not cut or "none" != splitter != "one word" and normalizer != "sentencepiece"


@pytest.mark.parametrize("folder", [BUILT_IN_MODEL, BUILT_IN_DECODER], ids=["encoder", "decoder"])
def test_a_long_text_costs_no_more_than_its_head(folder, monkeypatch):
    tokenizer, given = built_in(folder, 16), []
    encode = Tokenizer._encode_batch
    monkeypatch.setattr(
        Tokenizer, "_encode_batch", lambda self, texts, *of, **so: given.extend(texts) or encode(self, texts, *of, **so)
    )
    text = "the film was not good, and very long. " * 2_000
    encoded = tokenizer.encode([text])
    assert given and max(map(len, given)) < 2 * HEAD * 16 and encoded.truncated == 1
    assert encoded.ids[0].tolist() == tokenizer.backend.encode(text).ids


def test_marks_and_ideographs_end_a_head_if_they_are_words():
    tokenizer = built_in(BUILT_IN_MODEL, 16)
    for text in ("!?" * 2_000, "中文" * 2_000):
        assert len(tokenizer._head(text)) < 2 * HEAD * 16
        assert tokenizer.encode([text]).ids[0].tolist() == tokenizer.backend.encode(text).ids


@pytest.mark.parametrize("max_length", [12, 13])
@pytest.mark.parametrize("sizes", [(20, 100), (100, 20), (100, 101), (101, 100), (100, 100), (2, 100), (100, 9)])
def test_a_cut_pair_has_the_tokens_of_the_pair_of_whole_texts(max_length, sizes, monkeypatch):
    """Words of different lengths, so that the text with more characters often is the one with fewer tokens.

    The head is shorter than usual: the backend's time on the whole pair grows with the product of the lengths.
    """
    monkeypatch.setattr(tokenizer_module, "HEAD", 8)
    chance, tokenizer = random.Random(f"{sizes} {max_length}"), built_in(BUILT_IN_MODEL, max_length)
    for _ in range(2):
        words = [chance.choice((["a"], ["!", "b"], ["wonderful", "unforgettable"])) for _ in sizes]
        pair = tuple(" ".join(chance.choice(some) for _ in range(size)) for some, size in zip(words, sizes))
        whole, encoded = tokenizer.backend.encode(*pair), tokenizer.encode([pair])
        assert encoded.ids[0].tolist() == whole.ids and encoded.type_ids[0].tolist() == whole.type_ids
        assert encoded.truncated == bool(whole.overflowing)


def test_two_long_texts_take_no_time_that_grows_with_their_product(monkeypatch):
    tokenizer, given = built_in(BUILT_IN_MODEL, 16), []
    encode = Tokenizer._encode_batch
    monkeypatch.setattr(
        Tokenizer, "_encode_batch", lambda self, texts, *of, **so: given.extend(texts) or encode(self, texts, *of, **so)
    )
    tokenizer.encode([("a film " * 20_000, "a meal " * 30_000)])
    pairs = [text for text in given if isinstance(text, tuple)]
    assert pairs and all(len(text) < 8 * HEAD * 16 for pair in pairs for text in pair)


def test_lower_puts_lower_case_before_everything_else_also_in_the_saved_file(tmp_path):
    (tmp_path / "a").mkdir()
    backend = tokenizers.Tokenizer(models.WordLevel({"[UNK]": 0, "film": 1, "FILM": 2}, unk_token="[UNK]"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    backend.save(str(tmp_path / "a" / "tokenizer.json"))
    lower = Tokenizer.from_folder(tmp_path / "a", lower=True)
    lower.save(tmp_path / "tokenizer.json")
    for tokenizer, expected in (
        (Tokenizer.from_folder(tmp_path / "a"), 2),
        (lower, 1),
        (Tokenizer.from_folder(tmp_path), 1),
    ):
        assert tokenizer.encode(["FILM"]).ids[0].tolist() == [expected]
