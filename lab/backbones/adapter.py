"""A folder of a PEFT adapter, read as the model that peft's merge_and_unload gives. peft is not needed.

adapter_config.json names the base model, and adapter_model.safetensors has the factors A and B of each linear map:
W + B A lora_alpha / r, and for embeddings W + (B A)^T lora_alpha / r. With use_rslora the divisor is sqrt(r). Other
tensors of the file (a classifier, biases) replace those of the base model.
"""

import math
import re
from pathlib import Path

from torch import Tensor

from mini_ee.lab.backbones.backbone import some_of
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.sentence_files import transformer_folder
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments

CONFIG, TENSORS = "adapter_config.json", "adapter_model.safetensors"

TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "vocab.json", "spiece.model", "spm.model")

CLASSES = {"SEQ_CLS": "SequenceClassification", "CAUSAL_LM": "CausalLM", "SEQ_2_SEQ_LM": "Seq2SeqLM"}
"""task_type -> the ending of the class in peft that opens such an adapter; FeatureExtraction for others."""

PROMPTS = ("PROMPT_TUNING", "PREFIX_TUNING", "P_TUNING", "MULTITASK_PROMPT_TUNING", "CPT", "ADAPTION_PROMPT")
"""Adapters that no weights contain."""

READ = {
    *("peft_type", "task_type", "base_model_name_or_path", "r", "lora_alpha", "use_rslora", "rank_pattern"),
    *("alpha_pattern", "init_lora_weights", "target_modules", "exclude_modules", "modules_to_save"),
    *("layers_to_transform", "layers_pattern", "lora_bias"),
}
HARMLESS = {  # bias: the file has the biases; fan_in_fan_out: for Conv1D, which no family here has
    *("auto_mapping", "revision", "peft_version", "inference_mode", "lora_dropout", "bias", "fan_in_fan_out"),
    *("lora_bias", "megatron_core", "qalora_group_size", "runtime_config", "eva_config"),
}
INITS = (True, False, None, "gaussian", "eva", "orthogonal")
"""Initialisations that leave the base model as it is."""


def is_adapter(folder: Path) -> bool:
    """Whether a folder holds a PEFT adapter."""
    return (transformer_folder(folder) / CONFIG).is_file()


def model_folder(folder: Path) -> Path:
    """The folder of config.json and of the weights: that of an adapter's base model, else the folder itself.

    A folder that holds both an adapter and a whole model is its own base, as in transformers.

    Raises WrongArguments for an adapter that is not supported, or whose base model is not on this machine.
    """
    folder = transformer_folder(folder)
    weights = (folder / name for name in ("model.safetensors", "model.safetensors.index.json"))
    if not is_adapter(folder) or (folder / "config.json").is_file() and any(path.is_file() for path in weights):
        return folder
    named = _config(folder).get("base_model_name_or_path")
    places = [Path(named), folder / named] if isinstance(named, str) and named else []
    base = next((place for place in places if place.is_dir()), None)
    if base is None:
        raise WrongArguments(
            f"{folder / CONFIG}: base_model_name_or_path must be a folder on this machine, found {shortened(named)}; "
            f"this line downloads the base model and merges the adapter: {merge_line(folder)}"
        )
    if is_adapter(base):
        raise WrongArguments(f"{folder / CONFIG}: the base model {base} is an adapter itself: merge that one first")
    return base


def model_config(folder: Path) -> dict:
    """The config.json of a folder, or of an adapter's base model; an adapter can make it a classifier."""
    config = read_json(model_folder(folder) / "config.json")
    if is_adapter(folder) and _config(transformer_folder(folder)).get("task_type") == "SEQ_CLS":
        config["architectures"] = ["ForSequenceClassification"]
    return config


def tokenizer_folder(folder: str | Path) -> Path:
    """The folder of the tokenizer: the base model's if an adapter has none."""
    folder = transformer_folder(folder)
    return folder if any((folder / name).is_file() for name in TOKENIZERS) else model_folder(folder)


def merge_line(folder: Path) -> str:
    """The command that merges an adapter with peft, and writes the folder DIR-merged."""
    task = CLASSES.get(str(read_json(folder / CONFIG).get("task_type")), "FeatureExtraction")
    heads = [] if task != "SequenceClassification" or not (folder / TENSORS).is_file() else _rows_of_head(folder)
    labels = f", num_labels={heads[0]}" if heads else ""
    return (
        f'python -c "from peft import AutoPeftModelFor{task} as Model; from transformers import AutoTokenizer; '
        f"Model.from_pretrained('{folder}'{labels}).merge_and_unload().save_pretrained('{folder}-merged'); "
        f"AutoTokenizer.from_pretrained('{folder}').save_pretrained('{folder}-merged')\""
    )


def _rows_of_head(folder: Path) -> list[int]:
    """The rows of the weights of a classification head in the adapter's file, the last linear map first."""
    names = re.compile(r".*\b(classifier|score|classifier\.out_proj)(\.modules_to_save)?\.weight")
    return [len(tensor) for name, tensor in read_tensors(folder / TENSORS).items() if names.fullmatch(name)]


def _config(folder: Path) -> dict:
    """adapter_config.json. Raises WrongArguments, which names the key, if it is not that of a plain LoRA."""
    path = folder / CONFIG
    config = read_json(path)
    kind = config.get("peft_type")
    if kind in PROMPTS:
        raise WrongArguments(f"{path}: peft_type {kind} adds tokens, which no weights can contain: not supported")
    other = sorted(key for key in config.keys() - READ - HARMLESS if config[key] not in (None, False, "", [], {}))
    if config.get("init_lora_weights", True) not in INITS:
        other.append("init_lora_weights")
    if kind != "LORA" or other:
        actual = f"peft_type {shortened(kind)}" if kind != "LORA" else f"{other[0]} {shortened(config[other[0]])}"
        raise WrongArguments(f"{path}: expected a plain LoRA, found {actual}; merge it: {merge_line(folder)}")
    return config


# ---- Merging ----
def adapter_tensors(folder: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """What an adapter does to the weights of its base model: (those that it replaces, what it adds to others).

    The names are those of the model that was trained, with the prefix of its class.
    """
    folder = transformer_folder(folder)
    config, path = _config(folder), folder / TENSORS
    if not path.is_file():
        raise WrongArguments(f"{path}: no such file; merge the adapter with peft: {merge_line(folder)}")
    replaced: dict[str, Tensor] = {}
    factors: dict[str, dict[str, Tensor]] = {}
    for name, tensor in read_tensors(path).items():
        name = name.removeprefix("base_model.model.")
        module, _, factor = name.partition(".lora_")
        if factor:
            factors.setdefault(module, {})[factor.removesuffix(".weight")] = tensor.float()
        else:
            replaced[re.sub(r"\.(base_layer|modules_to_save)\.", ".", name)] = tensor
    added: dict[str, Tensor] = {}
    for module, parts in factors.items():
        added |= _delta(module, parts, config, path)
    return replaced, added


def _delta(module: str, parts: dict[str, Tensor], config: dict, path: Path) -> dict[str, Tensor]:
    """What is added to the weight of a module, and to its bias if the adapter was trained with lora_bias."""
    if not _is_target(config, module):
        raise ValueError(f"{path}: has factors of {module}, which {CONFIG} does not name (target_modules); keep one")
    names = ("A", "B") if "A" in parts else ("embedding_A", "embedding_B")
    biased = {"B.bias"} if config.get("lora_bias") else set()
    if not {*names} <= parts.keys() <= {*names} | biased or any(parts[name].dim() != 2 for name in names):
        raise ValueError(f"{path}: {module} must have the factors A and B, found {some_of(sorted(parts))}: not a LoRA")
    a, b = (parts[name] for name in names)
    rank, alpha = (
        _of_module(config, module, *keys) for keys in (("rank_pattern", "r"), ("alpha_pattern", "lora_alpha"))
    )
    if len(a) != b.shape[1] or len(a) != rank:
        raise ValueError(f"{path}: {module} must have rank {rank} as in {CONFIG}, found {len(a)} and {b.shape[1]}")
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    product = b @ a * scale
    delta = {f"{module}.weight": product if "A" in parts else product.T}
    return delta | ({f"{module}.bias": parts["B.bias"] * scale} if "B.bias" in parts else {})


def _of_module(config: dict, module: str, patterns: str, default: str) -> float:
    """The rank or alpha of a module: that of the first pattern that its name ends with, else that of all."""
    named = config.get(patterns) or {}
    value = next((named[key] for key in named if re.match(rf"(.*\.)?({key})$", module)), config.get(default, 8))
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise WrongArguments(f"{CONFIG}: {default} must be a number above 0, found {shortened(value)}")
    return value


def _is_target(config: dict, module: str) -> bool:
    """Whether peft puts an adapter on this module: else it would pass over the factors in the file."""

    def names(key: str) -> bool:
        value = config.get(key)
        if isinstance(value, str):
            return value == "all-linear" or re.fullmatch(value, module) is not None
        return any(module == name or module.endswith(f".{name}") for name in value or ())

    saved = any(re.match(rf"(^|.*\.){name}($|\..*)", module) for name in config.get("modules_to_save") or ())
    if saved or names("exclude_modules") or not names("target_modules"):
        return False
    layers, patterns = config.get("layers_to_transform"), config.get("layers_pattern") or [r"[^.]*"]
    if isinstance(config["target_modules"], str) or layers is None or layers == []:
        return True
    patterns = [patterns] if isinstance(patterns, str) else patterns
    numbers = (re.match(rf"(?:^|.*?\.){pattern}\.(\d+)\.", module) for pattern in patterns)
    number = next((int(match[1]) for match in numbers if match), None)
    return number in ([layers] if isinstance(layers, int) else layers)


def merged(tensors: dict[str, Tensor], replaced: dict[str, Tensor], added: dict[str, Tensor], path: Path) -> dict:
    """The tensors of a base model, all under the same names, with those of its adapter."""
    tensors = tensors | replaced
    for name, delta in added.items():
        if name not in tensors or tensors[name].shape != delta.shape:
            actual = "none" if name not in tensors else f"one of shape {tuple(tensors[name].shape)}"
            raise ValueError(f"{path}: expected a base model with {name} of shape {tuple(delta.shape)}, found {actual}")
        tensors[name] = tensors[name].float() + delta
    return tensors
