"""The tokenizer of a Hugging Face folder as the AutoTokenizer of transformers 5 reads it. No torch here.

The plain cases are read here: what tokenizer.json describes alone, and BERT's vocab.txt. `_doubt` names what may make
another tokenizer of it; then AutoTokenizer reads the folder. Without transformers the folder is refused.
"""

import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import models, processors

from mini_ee.lab.data.sentence_files import transformer_folder
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.registry import DECODER_TOKENIZERS, ONLY_TOKENIZERS, TOKENIZERS

NO_LIMIT = 10**9  # transformers writes 1e30 for a tokenizer without a largest length

VOCABULARIES = ["tokenizer.json", "bpe.codes", "vocab.txt", "vocab.json", "spm.model", "spiece.model"]
VOCABULARIES += ["sentencepiece.bpe.model", "tokenizer.model", "tekken.json", "tiktoken.model"]

BERT = ("Bert", "DistilBert", "Electra", "MobileBert", "SqueezeBert", "LayoutLM", "Lxmert")
CHECKED = (*BERT, "Roberta", "MPNet")  # of which _shape tells what transformers builds from the vocabulary
TYPED = (None, *BERT[:1], *BERT[2:], "ConvBert", "Deberta", "DebertaV2")  # of which models get token types
AS_IT_IS = (None, "PreTrained", "TokenizersBackend")  # transformers takes tokenizer.json as it is
PYTHON_ONLY = ("BertJapanese", "Bertweet", "Phobert", "Flaubert", "XLM", "CTRL", "FSMT", "ProphetNet", "BioGpt", "Esm")
"""Classes of tokenizers without Tokenizer and Fast; None: no class is named."""

HARMLESS = """add_bos_token add_eos_token added_tokens_decoder backend chat_control_tokens chat_template
clean_up_tokenization_spaces do_basic_tokenize errors extra_ids files_loaded from_slow full_tokenizer_file init_inputs
is_local language legacy local_files_only max_len max_length model_input_names model_max_length name name_or_path
never_split pad_to_multiple_of pad_token_type_id padding padding_side processor_class remove_space response_schema
response_template sha256 sp_model_kwargs spaces_between_special_tokens special_tokens_map_file stride task
tokenizer_class tokenizer_file transformers_version trim_offsets truncation truncation_side truncation_strategy unk_id
use_default_system_prompt use_fast verbose vocab_file vocab_type""".split()
"""Keys of tokenizer_config.json that change no token of a text, or that are compared or applied on their own."""

DEFAULTS = {
    "Albert": {"do_lower_case": True, "keep_accents": False},
    "DebertaV2": {"do_lower_case": False, "split_by_punct": False},
    "XLMRoberta": {"add_prefix_space": True},
}
"""Of classes that build another tokenizer if a key is left out."""

LISTS = ("additional_special_tokens", "extra_special_tokens", "model_specific_special_tokens")
"""Keys with special tokens, in a list or an object."""

BEGIN, END = ("bos", "cls"), ("eos", "sep")
KINDS = ("unk", "sep", "pad", "cls", "mask")
OF_BERT, OF_ROBERTA = tuple(f"[{kind.upper()}]" for kind in KINDS), ("<unk>", "</s>", "<pad>", "<s>", "<mask>")
"""Special tokens, if tokenizer_config.json names no others."""

CONVERT = "from transformers import AutoTokenizer; AutoTokenizer.from_pretrained('DIR').save_pretrained('DIR')"


def own_max_length(folder: str | os.PathLike) -> int | None:
    """model_max_length of tokenizer_config.json, up to which transformers truncates; None if it gives no limit."""
    config = _tokenizer_config(transformer_folder(folder))
    length = config.get("model_max_length", config.get("max_len"))  # max_len: of transformers 1 and 2
    return int(length) if isinstance(length, int | float) and 0 < length < NO_LIMIT else None


def read_tokenizer(folder: Path) -> tokenizers.Tokenizer:
    """The tokenizer. Its `truncation` has the direction of transformers; its types are 0 if the model gets none.

    Raises ValueError if there is no vocabulary, or it is damaged; WrongArguments if only transformers can read it and
    is not installed, or if it cannot become a tokenizer.json.
    """
    folder = transformer_folder(folder)
    name = next((name for name in VOCABULARIES if (folder / name).is_file()), None)
    if name is None:
        raise ValueError(f"{folder}: expected tokenizer.json or vocab.txt, found neither; copy one to this folder")
    config = _tokenizer_config(folder)
    family = _family(folder, config)
    backend, side = None, "right"
    doubt: str | None = name
    if name == "tokenizer.json" or name == "vocab.txt" and family in (None, *BERT):
        backend = read_file(folder / name, config)
        side = config.get("truncation_side") or direction(backend)
        backend.no_padding()
        backend.no_truncation()
        doubt = _doubt(folder, backend, config, family)
    rebuilt = family not in (*AS_IT_IS, *CHECKED)
    saved = config.get("backend") == "tokenizers" and _without_suffixes(config.get("tokenizer_class")) == family
    if doubt is None and rebuilt and (family in PYTHON_ONLY or not saved):  # saved: by version 5, as it builds it
        doubt = f"{family}Tokenizer, for which transformers builds another one"
    if (doubt or rebuilt) and family not in PYTHON_ONLY and find_spec("transformers"):
        return _from_transformers(folder)
    if backend is None or doubt:
        raise _refusal(folder, family, doubt)
    types = "token_type_ids" in (config.get("model_input_names") or ["token_type_ids"] * (family in TYPED))
    return _directed(backend, side, types)


def direction(backend: tokenizers.Tokenizer) -> str:
    """The side on which a tokenizer cuts texts, right by default."""
    return (backend.truncation or {}).get("direction", "right")


def read_file(path: Path, config: dict | None = None) -> tokenizers.Tokenizer:
    """tokenizer.json as it is, or BERT's vocab.txt with the settings of its tokenizer_config.json.

    Raises ValueError if it is damaged.
    """
    try:
        with errors_of_tokenizers(), _without_panic_messages():
            if path.suffix == ".json":
                return tokenizers.Tokenizer.from_file(str(path))
            return _word_pieces(str(path), config or {})
    except ValueError as error:
        actual = shortened(str(error))
        raise ValueError(f"{path}: expected a tokenizer, found {actual}; copy the file again") from None


# ---- The plain cases ----
def _json(path: Path) -> dict:
    """A JSON object; empty if there is no such file."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ValueError(f"{path}: expected a JSON object, found none ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {shortened(content)}")
    return content


def _tokenizer_config(folder: Path) -> dict:
    """tokenizer_config.json, with special_tokens_map.json over it if transformers reads that."""
    config = _json(folder / "tokenizer_config.json")
    return config if "added_tokens_decoder" in config else config | _json(folder / "special_tokens_map.json")


def _family(folder: Path, config: dict) -> str | None:
    """The class that transformers takes, without Tokenizer and Fast; None if the files name none."""
    model = _json(folder / "config.json")
    kind, name = str(model.get("model_type")), config.get("tokenizer_class") or model.get("tokenizer_class")
    only = ONLY_TOKENIZERS.get(kind)
    if only and (config or only in AS_IT_IS):
        return only
    if name is None:
        return (TOKENIZERS | DECODER_TOKENIZERS if config else TOKENIZERS).get(kind)
    return _without_suffixes(name)


def _without_suffixes(name: Any) -> str:
    return str(name).removesuffix("Fast").removesuffix("Tokenizer")


def _names(config: dict, usual: tuple[str, ...]) -> list[str]:
    """The special tokens of KINDS."""
    return [_content(config.get(f"{kind}_token")) or name for kind, name in zip(KINDS, usual)]


def _content(token: Any) -> Any:
    return token.get("content") if isinstance(token, dict) else token


def _shape(family: str | None, config: dict) -> tuple:
    """What transformers builds: normalizer, pre-tokenizer, model without vocabulary, tokens and types of a pair of two
    empty texts, and the special tokens.
    """
    unk, sep, _, cls, _ = names = _names(config, OF_ROBERTA if family in ("Roberta", "MPNet") else OF_BERT)
    if family == "Roberta":
        bytes_of = {"type": "ByteLevel", "trim_offsets": True, "use_regex": True}
        bytes_of["add_prefix_space"] = config.get("add_prefix_space", False)
        return None, bytes_of, {"type": "BPE"}, [cls, sep, sep, sep], [0] * 4, names
    if family == "MPNet":
        unk = names[0] = _content(config.get("unk_token")) or OF_BERT[0]
    normalizer = {
        "type": "BertNormalizer",
        "clean_text": True,
        "handle_chinese_chars": config.get("tokenize_chinese_chars", True),
        "strip_accents": config.get("strip_accents"),
        "lowercase": config.get("do_lower_case", True),
    }
    model = {"type": "WordPiece", "unk_token": unk, "continuing_subword_prefix": "##", "max_input_chars_per_word": 100}
    around = [cls, sep, sep, sep] if family == "MPNet" else [cls, sep, sep]
    types = [0] * 4 if family == "MPNet" else [0, 0, 1]
    return normalizer, {"type": "BertPreTokenizer"}, model, around, types, names


def _word_pieces(vocab: str, config: dict) -> tokenizers.Tokenizer:
    normalizer, splitter, model, (cls, sep, _), _, names = _shape("Bert", config)
    settings = {"normalizer": normalizer, "pre_tokenizer": splitter, "added_tokens": [], "post_processor": None}
    model["vocab"] = models.WordPiece.read_file(vocab)
    backend = tokenizers.Tokenizer.from_str(json.dumps(settings | {"version": "1.0", "model": model}))
    backend.add_special_tokens(names)
    ids: Any = backend.token_to_id  # not None: both were added above
    backend.post_processor = processors.BertProcessing((sep, ids(sep)), (cls, ids(cls)))
    return backend


def _doubt(folder: Path, backend: tokenizers.Tokenizer, config: dict, family: str | None) -> str | None:
    """What may make AutoTokenizer read another tokenizer than this one; None if nothing does."""
    if config.get("truncation_side") not in (None, "left", "right"):
        return f"truncation_side {shortened(config['truncation_side'])}"
    settings = json.loads(backend.to_str())
    parts, added = parts_of(backend.normalizer) + parts_of(backend.pre_tokenizer), settings["added_tokens"]
    special = {token["content"] for token in added if token["special"]}
    for key, value in (DEFAULTS.get(str(family), {}) | config).items():
        if key in LISTS or key.endswith("_token") and key not in HARMLESS:
            several = value if isinstance(value, list) else [*value.values()] if key in LISTS and value else [value]
            if any(_content(token) not in special for token in several if token is not None):
                return f"{key} {shortened(value)}"
        elif value is not None and key not in HARMLESS and _applied(key, parts) != value:
            return f"{key} {shortened(value)}"
    decoder = {int(number): token for number, token in config.get("added_tokens_decoder", {}).items()}
    if decoder and decoder != {token["id"]: {key: token[key] for key in token if key != "id"} for token in added}:
        return "added_tokens_decoder with other tokens"
    ids = {token["content"]: token["id"] for token in added}
    if other := [token for token, number in _json(folder / "added_tokens.json").items() if ids.get(token) != number]:
        return f"added_tokens.json with {shortened(other)}"
    if family in AS_IT_IS:
        return None
    if family not in CHECKED:
        ends = [{_content(config.get(f"{kind}_token")) for kind in kinds} - {None} for kinds in (BEGIN, END)]
        around = backend.encode("", "").tokens
        alike = (
            max(map(len, ends)) < 2 and set.union(*ends).issuperset(around) and (around or "cls_token" not in config)
        )
        return None if alike else "other special tokens than those around texts"
    pair = backend.encode("", "")
    model = {key: value for key, value in settings["model"].items() if value and key not in ("vocab", "merges")}
    *shape, names = _shape(family, config)
    alike = shape == [settings["normalizer"], settings["pre_tokenizer"], model, pair.tokens, pair.type_ids]
    alike = alike and backend.encode("").tokens == pair.tokens[:2] and special.issuperset(names)
    return None if alike else f"another tokenizer than {family}Tokenizer builds"


def _applied(key: str, parts: list[dict]) -> Any:
    """What a normalizer and a pre-tokenizer do of this key of tokenizer_config.json; None: not known."""
    types = {part["type"]: part for part in parts}
    spaces = types.get("ByteLevel") or types.get("Metaspace", {})
    return {
        "do_lower_case": "Lowercase" in types or types.get("BertNormalizer", {}).get("lowercase", False),
        "strip_accents": types.get("BertNormalizer", {}).get("strip_accents"),
        "tokenize_chinese_chars": types.get("BertNormalizer", {}).get("handle_chinese_chars"),
        "keep_accents": "StripAccents" not in types,
        "split_by_punct": "Punctuation" in types,
        "split_special_tokens": False,
        "add_prefix_space": spaces.get("add_prefix_space", spaces.get("prepend_scheme") != "never"),
    }.get(key)


def parts_of(component: Any) -> list[dict]:
    """The settings of a normalizer or a pre-tokenizer, one dict per part of a sequence; empty for None."""
    if component is None:
        return []
    settings = json.loads(component.__getstate__())
    if settings["type"] != "Sequence":
        return [settings]
    return [part for key in ("normalizers", "pretokenizers") for part in settings.get(key, ())]


# ---- What is left to transformers ----
def _from_transformers(folder: Path) -> tokenizers.Tokenizer:
    import transformers

    level = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with errors_of_tokenizers(), _without_panic_messages():
            hub_tokenizer = transformers.AutoTokenizer.from_pretrained(
                folder, local_files_only=True, trust_remote_code=False
            )
    except ValueError as error:
        text = " ".join(str(error).split())
        raise WrongArguments(
            f"{folder}: expected a tokenizer, transformers found: {text[:200]}; correct its files"
        ) from None
    finally:
        transformers.logging.set_verbosity(level)
    if not hub_tokenizer.is_fast:
        raise _refusal(folder, type(hub_tokenizer).__name__.removesuffix("Tokenizer"), None)
    if hub_tokenizer.split_special_tokens:
        raise _refusal(folder, None, "split_special_tokens")
    return _directed(
        hub_tokenizer.backend_tokenizer,
        hub_tokenizer.truncation_side,
        "token_type_ids" in hub_tokenizer.model_input_names,
    )


def _refusal(folder: Path, family: str | None, doubt: str | None) -> WrongArguments:
    if doubt and "split_special_tokens" in doubt:
        advice = "tokenizer.json cannot keep it: remove it from tokenizer_config.json, or give another model"
    elif doubt is None or family in PYTHON_ONLY:
        doubt, advice = f"{family}Tokenizer", "its Python code cannot be exported: give another model"
    else:
        advice = f"pip install 'mini-ee[hf]', or convert it: python -c \"{CONVERT.replace('DIR', str(folder))}\""
    return WrongArguments(f"{folder}: expected a tokenizer that tokenizer.json describes, found {doubt}; {advice}")


def _directed(backend: tokenizers.Tokenizer, side: str, types: bool) -> tokenizers.Tokenizer:
    backend = backend if types else without_types(backend)
    backend.enable_truncation(NO_LIMIT, direction=side)
    return backend


def without_types(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    """The same tokenizer, whose token types are all 0: the second text of a pair has the type of the first."""
    settings = json.loads(backend.to_str())
    waiting = [settings]
    while waiting:
        component = waiting.pop()
        if component.get("type") == "BertProcessing":
            component.update(_template(component.pop("cls"), component.pop("sep")))
        if "type_id" in component:
            component["type_id"] = 0
        for value in component.values():
            waiting += [part for part in (value if isinstance(value, list) else [value]) if isinstance(part, dict)]
    return tokenizers.Tokenizer.from_str(json.dumps(settings))


def _template(cls: list, sep: list) -> dict:
    """The settings of a TemplateProcessing equal to a BertProcessing, whose special tokens are (text, id)."""
    first, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    begin, end = ({"SpecialToken": {"id": text, "type_id": 0}} for text, _ in (cls, sep))
    tokens = {text: {"id": text, "ids": [number], "tokens": [text]} for text, number in (cls, sep)}
    single = [begin, first, end]
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, second, end], "special_tokens": tokens}


@contextmanager
def errors_of_tokenizers() -> Iterator[None]:
    """Convert the library's errors to ValueError: Exception, and for its bugs PanicException, a BaseException."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ValueError(str(error)) from None
        raise


@contextmanager
def _without_panic_messages() -> Iterator[None]:
    """Discard output to file descriptor 2: before the library raises a PanicException, it prints a backtrace."""
    try:
        stderr = os.dup(2)
    except OSError:  # standard error is closed
        yield
        return
    try:
        with open(os.devnull, "w") as nowhere:
            os.dup2(nowhere.fileno(), 2)
        yield
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
