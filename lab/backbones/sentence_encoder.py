"""How a sentence encoder makes its embedding, as sentence-transformers stores it in a folder. No torch here.

    modules.json                        the modules in their order: transformer, pooling, linear maps, norms to length 1
    sentence_bert_config.json           of the transformer: max_seq_length, do_lower_case; older names below
    1_Pooling/config.json               the pooling
    2_Dense/config.json                 a linear map; its weights are in model.safetensors beside it
    config_sentence_transformers.json   prompts, and how many numbers of an embedding remain

A key that is not known here may change the embedding, so it is refused by name.
"""

import json
import re
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.sentence_files import MODULES, listed_modules, transformer_folder
from mini_ee.lab.data.sentence_prompts import check_prompt_name
from mini_ee.lab.data.tokenizer_config import own_max_length
from mini_ee.lab.data.values import fits, shortened
from mini_ee.lab.errors import WrongArguments

POOLING, MODEL = "1_Pooling", "config_sentence_transformers.json"

TRANSFORMER = (
    "sentence_bert_config.json",
    "sentence_roberta_config.json",
    "sentence_distilbert_config.json",
    "sentence_camembert_config.json",
    "sentence_albert_config.json",
    "sentence_xlm-roberta_config.json",
    "sentence_xlnet_config.json",
)
"""Names of the transformer's file: the first that is there and not empty counts."""

OWN_MODULE = re.compile(r"sentence_transformers\.(models|sentence_transformer\.modules|base\.modules)\.(\w+\.)*\w+")

POOLS = {"mean": "mean", "cls": "first", "lasttoken": "last"}
"""Name of a pooling of sentence-transformers -> ours. Its other poolings are not supported."""

OLD_POOLINGS = {
    "pooling_mode_cls_token": "cls",
    "pooling_mode_max_tokens": "max",
    "pooling_mode_mean_tokens": "mean",
    "pooling_mode_mean_sqrt_len_tokens": "mean_sqrt_len_tokens",
    "pooling_mode_weightedmean_tokens": "weightedmean",
    "pooling_mode_lasttoken": "lasttoken",
}
"""Key of a pooling before sentence-transformers 5.4 -> its name since then."""

ACTIVATIONS = {"torch.nn.modules.linear.Identity": "identity", "torch.nn.modules.activation.Tanh": "tanh"}

ENCODER = {
    "transformer_task": "feature-extraction",
    "modality_config": {"text": {"method": "forward", "method_output_name": "last_hidden_state"}},
    "module_output_name": "token_embeddings",
}
RERANKER = {
    "transformer_task": "sequence-classification",
    "modality_config": {"text": {"method": "forward", "method_output_name": "logits"}},
    "module_output_name": "scores",
}
"""What the transformer's file says of a model that reads texts alone."""

HARMLESS_MODEL_KEYS = {
    "add_pooling_layer",
    "attn_implementation",
    "dtype",
    "low_cpu_mem_usage",
    "torch_dtype",
    "trust_remote_code",
    "use_safetensors",
}
"""Arguments of from_pretrained with which a model computes the same in float32."""


class SentenceModules(NamedTuple):
    """How the hidden states of the last layer become an embedding, and what is done to a text before."""

    pool: str = "mean"  # or first, last
    modules: tuple[dict, ...] = ()
    """After the pooling, in order: {"kind": "normalize"}, to length 1, or {"kind": "dense", "path", "in_features",
    "out_features", "bias", "activation"}, a linear map whose weights are in the folder `path`."""
    size: int | None = None  # how many of the first numbers remain after the modules; None: all
    max_length: int | None = None  # in tokens; None: as many as the model has positions
    lower: bool = False  # texts are lowercased
    prompts: dict[str, str] = {"query": "", "document": ""}  # the prompts that every encoder has
    default_prompt: str | None = None


def sentence_modules(folder: Path, pool: str | None = None) -> SentenceModules:
    """The modules of a model's folder as sentence-transformers reads it.

    pool: our name of a pooling that replaces its own. Without modules.json the folder is a bare transformer: the mean
    over the tokens, and no other file is read.
    Raises WrongArguments for a pooling, a module or a key that is not supported.
    """
    folder = Path(folder)
    if not (folder / MODULES).is_file():
        return SentenceModules(pool or _bare_pool(folder), max_length=_max_length(folder, {}))
    listed = _modules(folder)
    kinds = [kind for kind, _ in listed]
    if kinds[:2] != ["Transformer", "Pooling"] or set(kinds[2:]) - {"Dense", "Normalize", "Dropout"}:
        _refuse_modules(folder, "Transformer, Pooling, and then any of Dense and Normalize", kinds)
    (_, transformer), (_, pooling), *after = listed
    settings = _transformer(folder / transformer, ENCODER)
    model, prompts = _model(folder, {"model_type": "SentenceTransformer"}), SentenceModules().prompts
    prompts = prompts | {name: text or "" for name, text in model.get("prompts", {}).items()}
    modules = SentenceModules(
        pool or _pool(folder / pooling / "config.json", any(prompts.values())),
        tuple(_after(folder, kind, place) for kind, place in after if kind != "Dropout"),
        model.get("truncate_dim"),
        _max_length(folder, settings),
        settings.get("do_lower_case", False),
        prompts,
        model.get("default_prompt_name"),
    )
    if modules.default_prompt is not None:
        check_prompt_name(prompts, modules.default_prompt, f"{folder / MODEL}: default_prompt_name: ")
    return modules


def check_reranker(folder: Path) -> None:
    """Raise WrongArguments for a classifier with modules.json that sentence-transformers reads in another way than
    transformers: with other modules, a default prompt, lower case, or a length of its own.
    """
    if not (folder / MODULES).is_file():
        return
    kinds = [kind for kind, _ in _modules(folder)]
    if kinds != ["Transformer"]:
        _refuse_modules(folder, "Transformer alone, because the model is a classifier", kinds)
    settings = _transformer(transformer_folder(folder), RERANKER | {"do_lower_case": False})
    max_length = own_max_length(folder)
    if settings.get("max_seq_length", max_length) not in (None, max_length):
        advice = "write it as model_max_length to tokenizer_config.json"
        raise WrongArguments(f"{folder}: max_seq_length is {settings['max_seq_length']}, not {max_length}; {advice}")
    harmless = dict.fromkeys(("activation_fn", "keep_in_fp32_modules"))  # of scores, and of half precision
    model = _model(folder, {"model_type": "CrossEncoder"} | harmless)
    if (name := model.get("default_prompt_name")) and model.get("prompts", {}).get(name):
        problem = f"{folder / MODEL}: default_prompt_name: the prompt {name} stands before each text"
        raise WrongArguments(f"{problem}, which is not supported for a classifier")


# ---- modules.json ----
def _modules(folder: Path) -> list[tuple[str, str]]:
    """(kind, folder) of each module."""
    path, modules = folder / MODULES, listed_modules(folder)
    for module in modules:
        _check(path, module, {"type": str, "path": str}, {"idx": int, "name": str, "kwargs": []})
        if not OWN_MODULE.fullmatch(module["type"]):
            expected = "modules of a SentenceTransformer"
            raise WrongArguments(f"{path}: expected {expected}, found {module['type']}: not supported")
    names = [module["name"] for module in modules if "name" in module]
    if len(set(names)) < len(names):  # of modules with one name sentence-transformers keeps the last
        raise WrongArguments(f"{path}: expected a name for each module, found {', '.join(names)}")
    return [(module["type"].rpartition(".")[2], module["path"]) for module in modules]


def _refuse_modules(folder: Path, expected: str, kinds: list[str]) -> NoReturn:
    raise WrongArguments(f"{folder / MODULES}: expected {expected}, found {', '.join(kinds) or 'none'}: not supported")


def _after(folder: Path, kind: str, place: str) -> dict:
    """A module after the pooling, see SentenceModules.modules."""
    path = folder / place / "config.json"
    here = {"module_input_name": "sentence_embedding", "module_output_name": ("sentence_embedding", None)}
    if kind == "Normalize":
        if place and path.is_file():  # written since sentence-transformers 5.4
            _check(path, read_json(path), {}, here)
        return {"kind": "normalize"}
    config = read_json(path)
    required = {"in_features": 1, "out_features": 1}
    _check(path, config, required, {"bias": bool, "activation_function": str, "use_residual": False} | here)
    activation = config.get("activation_function", "torch.nn.modules.activation.Tanh")
    if activation not in ACTIVATIONS:
        expected = " or ".join(ACTIVATIONS)
        raise WrongArguments(f"{path}: expected activation_function {expected}, found {activation}: not supported")
    sizes = {name: config[name] for name in required}
    return {"kind": "dense", "path": place, **sizes, "bias": config.get("bias", True)} | {
        "activation": ACTIVATIONS[activation]
    }


# ---- The other files ----
def _bare_pool(folder: Path) -> str:
    """The pooling of a folder without modules.json: the mean; refused if there is a pooling and it names another."""
    pooling = folder / POOLING / "config.json"
    if pooling.is_file() and (named := _pool(pooling, False)) != "mean":
        raise WrongArguments(f"{folder / MODULES}: no such file, and {pooling} names the pooling {named}; copy it, too")
    if (folder / "chat_template.jinja").is_file() or "chat_template" in _json(folder / "tokenizer_config.json"):
        actual = "a chat template, with which sentence-transformers reads a text"
        raise WrongArguments(f"{folder}: expected a tokenizer without chat template, found {actual}: not supported")
    return "mean"


def _pool(path: Path, prompted: bool) -> str:
    """Our name of a pooling. prompted: texts may have a prompt, which the pooling must include."""
    config = read_json(path)
    modes = [name for key, name in OLD_POOLINGS.items() if config.get(key, False)] or ["mean"]
    mode = config.get("pooling_mode", modes[0] if len(modes) == 1 else modes)
    mode = mode[0] if isinstance(mode, list) and len(mode) == 1 else mode
    included = None if not prompted else True
    keys = {"pooling_mode": None, "embedding_dimension": None, "word_embedding_dimension": None}
    _check(path, config, {}, keys | dict.fromkeys(OLD_POOLINGS) | {"include_prompt": included})
    if not isinstance(mode, str) or mode not in POOLS:
        actual = " with ".join(map(str, mode)) if isinstance(mode, list) else shortened(mode)
        raise WrongArguments(f"{path}: expected a pooling of {', '.join(POOLS)}, found {actual}: not supported")
    return POOLS[mode]


def _transformer(folder: Path, extra_forms: dict[str, Any]) -> dict:
    """The content of sentence_bert_config.json. A length among the tokenizer's arguments becomes max_seq_length.

    extra_forms: forms of `_check` for what depends on the kind of model.
    """
    path, config = next(
        ((folder / name, content) for name in TRANSFORMER if (content := _json(folder / name))), (folder, {})
    )
    arguments = {"model_args": HARMLESS_MODEL_KEYS, "config_args": {"trust_remote_code"}}
    arguments["tokenizer_args"] = {"trust_remote_code", "model_max_length"}
    newer = {"model_args": "model_kwargs", "config_args": "config_kwargs", "tokenizer_args": "processor_kwargs"}
    arguments |= {newer[name]: known for name, known in arguments.items()}
    form: dict[str, Any] = {
        "max_seq_length": (None, 1),
        "do_lower_case": bool,
        "processing_kwargs": (None, {}),
        "unpad_inputs": None,
        **dict.fromkeys(("query_length", "document_length", "query_expansion", "tokenizer_name_or_path"), (None,)),
        **dict.fromkeys(arguments, dict),
    }
    _check(path, config, {}, form | extra_forms)
    for name, known in arguments.items():
        if foreign := sorted(config.get(name, {}).keys() - known):
            raise WrongArguments(
                f"{path}: {name} holds {foreign[0]}: not supported; remove the key if it changes nothing"
            )
    lengths = [config.get(name, {}).get("model_max_length") for name in ("tokenizer_args", "processor_kwargs")]
    for length in (length for length in lengths if length is not None):
        _check(path, {"model_max_length": length}, {}, {"model_max_length": 1})
        config = config | {"max_seq_length": length}
    return config


def _model(folder: Path, extra_forms: dict[str, Any]) -> dict:
    """The content of config_sentence_transformers.json. extra_forms: as of `_transformer`."""
    path, config = folder / MODEL, _json(folder / MODEL)
    form = {"prompts": dict, "default_prompt_name": (None, str)}
    harmless = dict.fromkeys(("__version__", "similarity_fn_name", "requirements"))
    _check(path, config, {}, form | {"truncate_dim": (None, 1)} | harmless | extra_forms)
    for name, text in config.get("prompts", {}).items():
        if not isinstance(text, str | None):
            raise WrongArguments(f"{path}: expected the prompt {name} as a text, found {shortened(text)}")
    return config


def _max_length(folder: Path, settings: dict) -> int | None:
    """max_seq_length, else the tokenizer's own maximum or the number of positions, whichever is smaller."""
    transformer, length = transformer_folder(folder), settings.get("max_seq_length")
    config = _json(transformer / "config.json")
    positions = config.get("max_position_embeddings")
    if length is not None:
        relative = config.get("position_biased_input") is False or any("rope" in key for key in config)
        if relative and fits(positions, int, below=length):  # others cannot read a longer text at all
            problem = f"max_seq_length is {length}, and the model has {positions} positions"
            raise WrongArguments(f"{folder}: {problem}: not supported; write a smaller max_seq_length")
        return length
    lengths = [own_max_length(transformer), positions if fits(positions, int, least=1) else None]
    return min((length for length in lengths if length is not None), default=None)


def _json(path: Path) -> dict:
    """The content of a JSON file; empty if there is no such file."""
    return read_json(path) if path.is_file() else {}


def _check(path: Path, config: dict, required: dict[str, Any], optional: dict[str, Any]) -> None:
    """Raise WrongArguments for a key that is not known, that is missing, or whose value is not supported.

    A form is None: any value; bool, str, int, dict: a value of this type; 1: a whole number of at least 1; a tuple: one
    of these; another value: this value alone.
    """
    for key in required.keys() - config.keys():
        raise WrongArguments(f"{path}: expected the key {key}, found none; copy the file again")
    known = required | optional
    for key, value in config.items():
        if key not in known:
            raise WrongArguments(f"{path}: {key}: not supported; remove the key if it does not change the embeddings")
        if not _fits(value, known[key]):
            expected = " or ".join(map(_named, known[key] if isinstance(known[key], tuple) else (known[key],)))
            raise WrongArguments(f"{path}: expected {key} as {expected}, found {shortened(value)}: not supported")


def _fits(value: object, form: Any) -> bool:
    if isinstance(form, tuple):
        return any(value is None if allowed is None else _fits(value, allowed) for allowed in form)
    if isinstance(form, type):
        return isinstance(value, form)
    if type(form) is int:
        return fits(value, int, least=form)
    return form is None or type(value) is type(form) and value == form


def _named(form: Any) -> str:
    """A form in a message."""
    names: dict[Any, str] = {
        bool: "true or false",
        str: "a text",
        int: "a whole number",
        dict: "an object",
        None: "null",
    }
    if form is None or isinstance(form, type):
        return names[form]
    return "a whole number of at least 1" if type(form) is int else json.dumps(form)
