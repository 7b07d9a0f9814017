"""Token ids of texts and pairs, short and too long, equal transformers' own, with the tokenizer's own length."""

import json
from pathlib import Path

import pytest
import tokenizers

from mini_ee.data.tokenizer import Tokenizer
from mini_ee.data.tokenizer_config import own_max_length

GOLDEN = Path(__file__).parents[1] / "golden" / "tokenizers"
KINDS = sorted(path.name for path in GOLDEN.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_ids_and_types_are_those_of_transformers(kind):
    expected = json.loads((GOLDEN / kind / "expected.json").read_text(encoding="utf-8"))
    assert own_max_length(GOLDEN / kind) == expected["max_length"]
    rows = expected["rows"]
    encoded = Tokenizer.from_folder(GOLDEN / kind, own_max_length(GOLDEN / kind)).encode(
        [tuple(row["texts"]) for row in rows]
    )
    assert [each.tolist() for each in encoded.ids] == [row["input_ids"] for row in rows]
    typed = [row for row in rows if "token_type_ids" in row]
    assert [each.tolist() for each in encoded.type_ids[: len(typed)]] == [row["token_type_ids"] for row in typed]
    assert encoded.truncated >= 5 and {len(row["texts"]) for row in rows} == {1, 2}


def test_the_types_are_compared_for_the_models_that_have_some():
    typed = {kind for kind in KINDS if "token_type_ids" in (GOLDEN / kind / "expected.json").read_text()}
    assert "bert" in typed and "modernbert" not in typed


def test_types_are_0_if_transformers_gives_the_model_none():
    rows = json.loads((GOLDEN / "generic" / "expected.json").read_text(encoding="utf-8"))["rows"]
    assert not any("token_type_ids" in row for row in rows)
    found, other = (Tokenizer.from_folder(GOLDEN / kind).encode([("a", "song")]) for kind in ("generic", "bert"))
    assert not found.type_ids[0].any() and other.type_ids[0].any()


@pytest.mark.parametrize(
    ("config", "has_types"),
    [
        ({"tokenizer_class": "TokenizersBackend", "model_input_names": ["input_ids", "token_type_ids"]}, True),
        ({"tokenizer_class": "BertTokenizer", "model_input_names": ["input_ids", "attention_mask"]}, False),
        ({"tokenizer_class": "PreTrainedTokenizerFast"}, True),  # written by version 4, which gives types
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
    found = Tokenizer.from_folder(tmp_path).encode([pair])
    alone = Tokenizer.from_folder(tmp_path).encode([one])
    assert [found.ids[0].tolist(), alone.ids[0].tolist()] == expected
    assert bool(found.type_ids[0].any()) == has_types and not alone.type_ids[0].any()


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ('{"model_max_length": 512}', 512),
        ('{"model_max_length": 1000000000000000019884624838656}', None),  # transformers' "no limit"
        ('{"model_max_length": null}', None),
        ("{}", None),
        (None, None),
    ],
)
def test_the_own_length_is_that_of_tokenizer_config_json(tmp_path, content, expected):
    if content is not None:
        (tmp_path / "tokenizer_config.json").write_text(content)
    assert own_max_length(tmp_path) == expected
