"""Token ids of texts and pairs, short and too long, equal transformers' own, with the tokenizer's own length."""

import json
from pathlib import Path

import pytest

from mini_ee.data.tokenizer import Tokenizer, own_max_length

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
