"""What tokenizer_config.json says of a tokenizer: its largest length, and whether its model gets token types."""

import json
import os
from pathlib import Path

import tokenizers

from mini_ee.data.sentence_files import transformer_folder

NO_LIMIT = 10**9  # transformers writes 1e30 for a tokenizer without a largest length


def _config(folder: str | os.PathLike) -> dict:
    """The content of tokenizer_config.json; empty if there is no such file."""
    path = transformer_folder(folder) / "tokenizer_config.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}


def own_max_length(folder: str | os.PathLike) -> int | None:
    """model_max_length of tokenizer_config.json, up to which transformers truncates; None if it gives no limit."""
    length = _config(folder).get("model_max_length")
    return int(length) if isinstance(length, int | float) and 0 < length < NO_LIMIT else None


def reads_types(folder: Path) -> bool:
    """Whether a model gets the token types of the tokenizer. TokenizersBackend is transformers' class without a family,
    since version 5: its models get no types unless model_input_names contains them.
    """
    config = _config(folder)
    default = ["input_ids"] if config.get("tokenizer_class") == "TokenizersBackend" else ["token_type_ids"]
    return "token_type_ids" in (config.get("model_input_names") or default)


def without_types(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, whose token types are all 0: the second text of a pair has the type of the first."""
    settings = json.loads(backend.to_str())
    waiting = [settings]
    while waiting:
        each = waiting.pop()
        if each.get("type") == "BertProcessing":
            each.update(_template(each.pop("cls"), each.pop("sep")))
        if "type_id" in each:
            each["type_id"] = 0
        for value in each.values():
            waiting += [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict)]
    return tokenizers.Tokenizer.from_str(json.dumps(settings))


def _template(cls: list, sep: list) -> dict:
    """The settings of a TemplateProcessing equal to a BertProcessing, whose special tokens are (text, id)."""
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    begin, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text, _ in (cls, sep))
    tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in (cls, sep)}
    single = [begin, first, end]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second, end], "special_tokens": tokens}
