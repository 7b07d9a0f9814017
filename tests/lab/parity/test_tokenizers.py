"""Token ids of texts and pairs, short and too long, equal transformers' own, with the tokenizer's own length."""

import json
import random
import shutil
from pathlib import Path

import pytest
import tokenizers

import mini_ee.lab.data.tokenizer_config as tokenizer_config
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.data.tokenizer_config import own_max_length
from mini_ee.lab.errors import WrongArguments

GOLDEN = Path(__file__).parents[2] / "golden" / "tokenizers"
KINDS = sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_types_are_those_of_transformers(kind):
    expected = json.loads((GOLDEN / kind / "expected.json").read_text(encoding="utf-8"))
    assert own_max_length(GOLDEN / kind) == expected["max_length"]
    rows = expected["rows"]
    encoded = Tokenizer.from_folder(GOLDEN / kind, own_max_length(GOLDEN / kind)).encode(
        [tuple(row["texts"]) for row in rows]
    )
    assert [row_ids.tolist() for row_ids in encoded.ids] == [row["input_ids"] for row in rows]
    typed = [row for row in rows if "token_type_ids" in row]
    assert [types.tolist() for types in encoded.type_ids[: len(typed)]] == [row["token_type_ids"] for row in typed]
    assert encoded.truncated >= 5 and {len(row["texts"]) for row in rows} == {1, 2}


def test_the_types_are_compared_for_the_models_that_have_some():
    typed = {kind for kind in KINDS if "token_type_ids" in (GOLDEN / kind / "expected.json").read_text()}
    assert "bert" in typed and "modernbert" not in typed


def test_types_are_0_if_transformers_gives_the_model_none():
    rows = json.loads((GOLDEN / "generic" / "expected.json").read_text(encoding="utf-8"))["rows"]
    assert not any("token_type_ids" in row for row in rows)
    generic, other = (Tokenizer.from_folder(GOLDEN / kind).encode([("a", "song")]) for kind in ("generic", "bert"))
    assert not generic.type_ids[0].any() and other.type_ids[0].any()


@pytest.mark.parametrize(
    ("config", "has_types"),
    [
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, False),  # version 4 gave types
        ({}, True),
    ],
)
@pytest.mark.parametrize("post_processor", ["BertProcessing", "TemplateProcessing"])
def test_the_input_names_of_tokenizer_config_json_decide(tmp_path, post_processor, config, has_types):
    backend = tokenizers.Tokenizer.from_file(str(GOLDEN / "bert" / "tokenizer.json"))
    if post_processor == "BertProcessing":
        special = [(name, backend.token_to_id(name)) for name in ("[SEP]", "[CLS]")]
        backend.post_processor = tokenizers.processors.BertProcessing(*special)
    pair, one = ("a", "song"), ("song",)
    expected = [backend.encode(*pair).ids, backend.encode(*one).ids]
    backend.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    encoded = Tokenizer.from_folder(tmp_path).encode([pair])
    alone = Tokenizer.from_folder(tmp_path).encode([one])
    assert [encoded.ids[0].tolist(), alone.ids[0].tolist()] == expected
    assert bool(encoded.type_ids[0].any()) == has_types and not alone.type_ids[0].any()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"model_max_length": 512}', 512),
        ('{"model_max_length": 1000000000000000019884624838656}', None),  # transformers' "no limit"
        ('{"model_max_length": null, "max_len": 16}', None),
        ('{"max_len": 16}', 16),  # of transformers 1 and 2
        ("{}", None),
        (None, None),
    ],
)
def test_the_own_length_is_that_of_tokenizer_config_json(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    assert own_max_length(tmp_path) == expected


# ---- What AutoTokenizer reads in other files than tokenizer.json ----
def changed(folder, kind="bert", config=None, **files):
    """A copy of a golden folder whose tokenizer_config.json has these keys. files: contents by name, __ for a dot."""
    shutil.copytree(GOLDEN / kind, folder)
    path = folder / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | (config or {})))
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(json.dumps(content))
    return folder


def word_pieces(folder, config, *words, model=None):
    """A folder with vocab.txt alone."""
    special = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
    (folder / "vocab.txt").write_text("\n".join((*special, *words)) + "\n", encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "config.json").write_text(json.dumps({"model_type": "bert"} | (model or {})))
    return folder


@pytest.fixture
def without_transformers(monkeypatch):
    monkeypatch.setattr(tokenizer_config, "find_spec", lambda name: None)


LSTRIP = {
    "content": "[MASK]",
    "lstrip": True,
    "rstrip": False,
    "normalized": False,
    "single_word": False,
    "special": True,
}


@pytest.mark.parametrize(
    ("kind", "config", "files", "reason"),
    [
        ("bert", {"do_lower_case": False}, {}, "do_lower_case False"),
        ("bert", {"strip_accents": False}, {}, "strip_accents False"),
        ("bert", {"tokenize_chinese_chars": False}, {}, "tokenize_chinese_chars False"),
        ("bert", {"cls_token": "[SEP]"}, {}, "another tokenizer than BertTokenizer builds"),
        ("bert", {"unk_token": "[MASK]"}, {}, "another tokenizer than BertTokenizer builds"),
        ("bert", {"pad_token": "<pad>"}, {}, "pad_token '<pad>'"),
        ("bert", {"additional_special_tokens": ["[user]"]}, {}, "additional_special_tokens ['[user]']"),
        ("bert", {"extra_special_tokens": {"image_token": "[user]"}}, {}, "extra_special_tokens {"),
        ("bert", {"added_tokens_decoder": {"4": LSTRIP}}, {}, "added_tokens_decoder with other tokens"),
        ("bert", {"truncation_side": "middle"}, {}, "truncation_side 'middle'"),
        ("bert", {"key": 1}, {}, "key 1"),
        ("bert", {"tokenizer_class": "RobertaTokenizerFast"}, {}, "another tokenizer than RobertaTokenizer builds"),
        ("bert", {}, {"added_tokens__json": {"[user]": 90}}, "added_tokens.json with ['[user]']"),
        ("bert", {}, {"special_tokens_map__json": {"cls_token": "[SEP]"}}, "another tokenizer"),
        ("roberta", {"add_prefix_space": True}, {}, "add_prefix_space True"),
        ("roberta", {"bos_token": "<bos>"}, {}, "bos_token '<bos>'"),
        ("xlm-roberta", {"add_prefix_space": False}, {}, "add_prefix_space False"),
        ("xlm-roberta", {"eos_token": "<pad>"}, {}, "other special tokens than those around texts"),
        ("xlm-roberta", {"tokenizer_class": "AlbertTokenizer"}, {}, "do_lower_case True"),
        ("xlm-roberta", {"backend": None}, {}, "XLMRobertaTokenizer, for which transformers builds another one"),
        ("generic", {"split_special_tokens": True}, {}, "split_special_tokens True; tokenizer.json cannot keep it"),
        ("bert", {"tokenizer_class": "BertJapaneseTokenizer"}, {}, "BertJapaneseTokenizer; its Python code"),
    ],
)
def test_what_may_change_a_token_is_refused_by_name(tmp_path, without_transformers, kind, config, files, reason):
    folder = changed(tmp_path / "model", kind, config, **files)
    with pytest.raises(WrongArguments) as caught:
        Tokenizer.from_folder(folder)
    message = str(caught.value)
    assert reason in message and "\n" not in message
    converts = f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}')" in message
    assert converts == ("cannot" not in message)


@pytest.mark.parametrize(
    ("kind", "config", "files"),
    [
        ("bert", {"do_lower_case": True, "never_split": None, "do_basic_tokenize": True, "chat_template": "x"}, {}),
        ("bert", {"tokenizer_class": "BertTokenizerFast", "backend": None}, {}),  # as version 4 writes it
        ("bert", {"tokenizer_class": None}, {"config__json": {"model_type": "bert"}}),
        ("roberta", {"tokenizer_class": "RobertaTokenizerFast", "backend": None, "padding_side": "left"}, {}),
        ("xlm-roberta", {"truncation_side": "right"}, {"special_tokens_map__json": {"cls_token": "<s>"}}),
        ("modernbert", {"tokenizer_class": "BertTokenizer"}, {"config__json": {"model_type": "modernbert"}}),
    ],
)
def test_what_changes_no_token_is_read(tmp_path, without_transformers, kind, config, files):
    of_folder = Tokenizer.from_folder(changed(tmp_path / "model", kind, config, **files))
    rows = [tuple(row["texts"]) for row in json.loads((GOLDEN / kind / "expected.json").read_text())["rows"]]
    expected = Tokenizer.from_folder(GOLDEN / kind).encode(rows)
    assert [ids.tolist() for ids in of_folder.encode(rows).ids] == [ids.tolist() for ids in expected.ids]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({}, ["schon", "schon", "映", "画"]),
        ({"tokenizer_class": "DistilBertTokenizer", "strip_accents": False}, ["schön", "schön", "映", "画"]),
        ({"tokenizer_class": "ElectraTokenizerFast", "do_lower_case": False}, ["[UNK]", "schön", "映", "画"]),
        ({"tokenize_chinese_chars": False}, ["schon", "schon", "映画"]),
        ({"unk_token": "schon", "do_lower_case": False}, ["schon", "schön", "映", "画"]),
    ],
)
def test_vocab_txt_is_read_with_the_settings_of_bert(tmp_path, config, expected):
    """The tokens are those of transformers 5.24."""
    folder = word_pieces(tmp_path, config, "schon", "schön", "映画", "映", "画")
    tokenizer = Tokenizer.from_folder(folder)
    tokens = map(tokenizer.backend.id_to_token, tokenizer.encode(["SCHÖN schön 映画"]).ids[0].tolist())
    assert [*tokens] == ["[CLS]", *expected, "[SEP]"]


@pytest.mark.parametrize(
    ("config", "model", "more", "reason"),
    [
        ({"tokenizer_class": "BertJapaneseTokenizer"}, {}, "", "BertJapaneseTokenizer; its Python code"),
        ({}, {"tokenizer_class": "BertJapaneseTokenizer"}, "", "BertJapaneseTokenizer; its Python code"),
        (
            {"tokenizer_class": "PhobertTokenizer"},
            {"model_type": "roberta"},
            "bpe.codes",
            "PhobertTokenizer; its Python",
        ),
        ({}, {"model_type": "roberta"}, "", "found vocab.txt; pip install"),
        ({}, {}, "bpe.codes", "found bpe.codes; pip install"),
        ({}, {}, "added_tokens.json", "added_tokens.json with ['[user]']"),
        ({"additional_special_tokens": ["[user]"]}, {}, "", "additional_special_tokens ['[user]']"),
    ],
)
def test_vocab_txt_of_another_tokenizer_is_refused(tmp_path, without_transformers, config, model, more, reason):
    folder = word_pieces(tmp_path, config, "film", model=model)
    if more:
        (folder / more).write_text('{"[user]": 6}')
    with pytest.raises(WrongArguments, match=reason.replace("[", r"\[")):
        Tokenizer.from_folder(folder)


@pytest.mark.parametrize("name", ["vocab.json", "spm.model", "sentencepiece.bpe.model", "tokenizer.model"])
def test_a_vocabulary_that_only_transformers_reads_is_named(tmp_path, without_transformers, name):
    (tmp_path / name).write_text("{}")
    with pytest.raises(WrongArguments, match=rf"found {name}; pip install 'mini-ee\[hf\]', or convert it: python -c"):
        Tokenizer.from_folder(tmp_path)


# ---- Texts that are cut on the left ----
@pytest.mark.parametrize("where", ["tokenizer_config.json", "tokenizer.json"])
def test_the_side_on_which_texts_are_cut_stays_in_the_saved_file(tmp_path, where):
    folder = changed(tmp_path / "model", config={"truncation_side": "left"} if where == "tokenizer_config.json" else {})
    if where == "tokenizer.json":
        backend = tokenizers.Tokenizer.from_file(str(folder / where))
        backend.enable_truncation(99, direction="left")
        backend.save(str(folder / where))
    text, pair = "the film was good and the town was old", ("the film was very good", "a song")
    whole = tokenizers.Tokenizer.from_file(str(GOLDEN / "bert" / "tokenizer.json"))
    cls, *ids, sep = whole.encode(text).ids
    whole.enable_truncation(8, direction="left")
    for length in (None, 8):  # None: as for decoders, whose runs are saved without a length
        Tokenizer.from_folder(folder, length).save(tmp_path / "tokenizer.json")
        encoded = Tokenizer.from_file(tmp_path / "tokenizer.json", 8).encode([text, pair])
        assert encoded.ids[0].tolist() == [cls, *ids[-6:], sep] and encoded.truncated == 2
        assert encoded.ids[1].tolist() == whole.encode(*pair).ids


# ---- Against transformers ----
CHANGES = {
    "truncation_side": ["left", "right"],
    **dict.fromkeys(("do_lower_case", "strip_accents", "tokenize_chinese_chars", "add_prefix_space"), [True, False]),
    "model_max_length": [9, 10**30, None],
    "max_len": [9],
    "model_input_names": [["input_ids", "attention_mask"], ["input_ids", "token_type_ids", "attention_mask"]],
    **dict.fromkeys(("add_bos_token", "add_eos_token", "split_special_tokens", "backend"), [True, False, None]),
    **dict.fromkeys(("additional_special_tokens", "extra_special_tokens"), [["[user]"], ["[SEP]"], []]),
    **dict.fromkeys(("cls_token", "sep_token", "bos_token", "eos_token"), ["[SEP]", "</s>", "<s>", "<new>"]),
    **dict.fromkeys(("unk_token", "pad_token", "mask_token", "other_token"), ["[MASK]", "</s>", "film"]),
    "tokenizer_class": [f"{name}Tokenizer" for name in ("Bert", "DistilBert", "Roberta", "XLMRoberta", "MPNet")],
    "key": [1],
}
FILES = {
    "added_tokens.json": [{"[user]": 400}, {"[SEP]": 3}],
    "special_tokens_map.json": [{"cls_token": "[SEP]"}, {"cls_token": "<s>"}, {"mask_token": LSTRIP}],
}
ROWS = [
    ("The film was GOOD, ÜBER 東京",),
    ("[user] a </s> [SEP] b",),
    ("the film was good " * 5,),
    ("a town", "old " * 20),
]


def test_random_folders_are_read_as_transformers_reads_them_or_refused(tmp_path, monkeypatch):
    """By hand about 2,500 of 16 families were drawn, and 4,000 of these. Both with transformers and without it."""
    transformers, draw, read = pytest.importorskip("transformers"), random.Random(0), 0
    installed = tokenizer_config.find_spec
    for number in range(150):
        folder, kind = tmp_path / str(number), draw.choice(KINDS)
        keys = draw.sample(sorted(CHANGES), draw.choice([1, 1, 2, 3]))
        changed(folder, kind, {key: draw.choice(CHANGES[key]) for key in keys})
        (folder / "config.json").write_text(json.dumps({"model_type": kind.replace("generic", "bert")}))
        if draw.random() < 0.3:
            name = draw.choice(sorted(FILES))
            (folder / name).write_text(json.dumps(draw.choice(FILES[name])))
        if draw.random() < 0.1:
            (folder / "tokenizer_config.json").unlink()
        try:
            theirs = transformers.AutoTokenizer.from_pretrained(folder)
            expected = [theirs(*row, truncation=True, max_length=12) for row in ROWS]
        except Exception:  # of the tokenizers library
            continue
        for find_spec in (installed, lambda name: None):
            monkeypatch.setattr(tokenizer_config, "find_spec", find_spec)
            try:
                of_folder = Tokenizer.from_folder(folder, 12)
            except WrongArguments as error:
                assert find_spec is not installed or "split_special_tokens" in str(error)
                continue
            encoded, read = of_folder.encode(ROWS), read + 1
            assert (own_max_length(folder) or 10**30) == min(theirs.model_max_length, 10**30)
            for ids, types, row in zip(encoded.ids, encoded.type_ids, expected):
                assert ids.tolist() == row["input_ids"], (kind, keys)
                assert types.tolist() == (row.get("token_type_ids") or [0] * len(ids)), (kind, keys)
    assert read > 150
