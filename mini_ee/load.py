"""Weights from a Hugging Face folder: config.json, model.safetensors (or its shards) and tokenizer.json.

Reading is strict. A key of config.json that can change a result and has another value than the one implemented, a
weight that is missing or too many, a shape that does not fit, and a damaged file are each an error of one line.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.resources import files
from pathlib import Path

from safetensors import SafetensorError, safe_open
from tokenizers import Tokenizer
from torch import Tensor, nn

BUILT_IN = {"bert": "bert-12x128", "llama": "llama-12x256"}
"""Checkpoints of this project, by the name that stands for their folder."""

ABOUT = """architectures model_type torch_dtype dtype transformers_version _name_or_path name_or_path sha256 use_cache
bos_token_id eos_token_id pad_token_id sep_token_id cls_token_id initializer_range id2label label2id num_labels
problem_type classifier_dropout gradient_checkpointing output_past pruned_heads pretraining_tp finetuning_task
return_dict output_attentions output_hidden_states auto_map vocab_size""".split()
"""Keys that change no hidden state: who wrote the file, special tokens, how heads were trained, and so on."""


def folder_of(name: str | Path) -> Path:
    """The folder of a model: a path, or "bert" or "llama" for the built-in ones. Raises FileNotFoundError."""
    folder = Path(str(files("mini_ee.weights") / BUILT_IN[name])) if name in BUILT_IN else Path(name)
    if not (folder / "config.json").is_file():
        raise FileNotFoundError(
            f"{folder}: expected a model's folder with config.json, model.safetensors, tokenizer.json"
        )
    return folder


def model_type(name: str | Path) -> str:
    """The family that a model's config.json names."""
    return str(read_json(folder_of(name) / "config.json").get("model_type"))


def read_json(path: Path) -> dict:
    """The object in a JSON file. Raises ValueError if there is none."""
    try:
        content = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path}: damaged, expected JSON: {error}") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    return content


def read_config(folder: Path, family: str, sizes: Iterable[str], fixed: Mapping[str, tuple]) -> dict:
    """config.json, checked: of this family, with all `sizes`, and nothing that the family's file does not implement.

    fixed: a key that may be left out -> the values that are implemented; () for every value.
    """
    path = folder / "config.json"
    config = read_json(path)
    if (actual := config.get("model_type")) != family:
        raise ValueError(
            f"{path}: expected model_type {family!r}, found {actual!r}; the command mini-ee reads more families"
        )
    for key in sizes:
        if not isinstance(value := config.get(key), int | float) or isinstance(value, bool) or value <= 0:
            raise ValueError(f"{path}: expected a number above 0 as {key}, found {value!r}")
    for key, value in config.items():
        if key in fixed and fixed[key] and value not in fixed[key]:
            allowed = " or ".join(map(repr, fixed[key]))
            raise ValueError(f"{path}: {key} must be {allowed}, found {value!r}; the core implements no other")
        if key not in fixed and key not in sizes and key not in ABOUT:
            raise ValueError(f"{path}: unknown key {key!r}, which may change the result; remove it if it does not")
    return config


def load_weights(model: nn.Module, folder: Path, theirs: Callable[[str], str], ignored: tuple[str, ...]) -> None:
    """Copy the weights of a folder into a model, as its dtype. theirs: our name of a weight -> the file's name.

    A prefix such as `bert.` or `model.` may be there or not. ignored: what names of parts that are not used contain.
    """
    stored, prefix = read_weights(folder), theirs("")
    for old, new in (("LayerNorm.gamma", "LayerNorm.weight"), ("LayerNorm.beta", "LayerNorm.bias")):  # of 2018
        stored = {name.replace(old, new): value for name, value in stored.items()}
    stored = {name.removeprefix(prefix): value for name, value in stored.items()}
    ours = {theirs(name).removeprefix(prefix): parameter for name, parameter in model.state_dict().items()}
    if missing := sorted(ours.keys() - stored.keys()):
        raise ValueError(f"{folder}: {len(missing)} weights are missing, such as {missing[0]}")
    extra = sorted(stored.keys() - ours.keys())
    if unknown := [name for name in extra if not any(part in name for part in ignored)]:
        raise ValueError(f"{folder}: {len(unknown)} weights are unknown, such as {unknown[0]}")
    for name, parameter in ours.items():
        if stored[name].shape != parameter.shape:
            shapes = f"expected shape {tuple(parameter.shape)} by config.json, found {tuple(stored[name].shape)}"
            raise ValueError(f"{folder}: {name}: {shapes}")
        if not stored[name].is_floating_point() or not stored[name].isfinite().all():
            raise ValueError(f"{folder}: {name}: expected finite floating-point numbers")
        parameter.copy_(stored[name])


def read_weights(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that model.safetensors.index.json names."""
    index = folder / "model.safetensors.index.json"
    shards = sorted(set(read_json(index)["weight_map"].values())) if index.exists() else ["model.safetensors"]
    tensors: dict[str, Tensor] = {}
    for shard in shards:
        if not (folder / shard).is_file():
            raise FileNotFoundError(f"{folder / shard}: no weights here")
        try:
            with safe_open(folder / shard, "pt") as file:
                tensors |= {name: file.get_tensor(name) for name in file.keys()}
        except SafetensorError as error:
            raise ValueError(f"{folder / shard}: damaged: {error}") from None
    return tensors


def load_tokenizer(name: str | Path, most: int | None = None) -> Tokenizer:
    """The tokenizer of a model's folder; it cuts texts to `most` tokens and does not pad."""
    path = folder_of(name) / "tokenizer.json"
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises this class itself
        raise ValueError(f"{path}: expected a tokenizer.json of the library tokenizers: {error}") from None
    tokenizer.no_padding()
    if most is None:
        tokenizer.no_truncation()
    else:
        tokenizer.enable_truncation(most)
    return tokenizer


def exits_of(given: Sequence[int], of_twelve: Sequence[int], layers: int) -> Sequence[int]:
    """The given exits; without any, the exits of a model of twelve layers, at the same shares of its depth."""
    return given or sorted({max(1, round(layers * exit / 12)) for exit in of_twelve})


def check_exits(exits: Sequence[int], layers: int) -> None:
    """Raise ValueError unless the exits ascend from 1 or more to the last layer."""
    if not exits or list(exits) != sorted(set(exits)) or exits[0] < 1 or exits[-1] != layers:
        raise ValueError(f"exits must ascend and end with the last layer, {layers}, got {list(exits)}")
