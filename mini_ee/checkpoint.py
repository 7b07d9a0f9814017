"""Folders on disk: a Hugging Face checkpoint <-> a backbone, strict both ways; atomic writes; tensors with a checksum.

A backbone folder is what one downloads: config.json and model.safetensors, or several shards with their index. Tensor
names may carry the model's prefix (`bert.`) or not. Every tensor must find its parameter and every parameter its tensor;
the few that carry no weight of ours (position ids, the next-sentence head) are named in IGNORED. Nothing is unpickled.

What mini_ee writes carries a checksum: safetensors files in their metadata, JSON files in a key of their own.
"""

import hashlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mini_ee.bert import Bert, BertConfig

# ---- Names: ours -> Hugging Face's. {i} is the layer, counted from 0. ----

_BERT_NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.query": "encoder.layer.{i}.attention.self.query",
    "layers.{i}.key": "encoder.layer.{i}.attention.self.key",
    "layers.{i}.value": "encoder.layer.{i}.attention.self.value",
    "layers.{i}.attention_output": "encoder.layer.{i}.attention.output.dense",
    "layers.{i}.attention_norm": "encoder.layer.{i}.attention.output.LayerNorm",
    "layers.{i}.up": "encoder.layer.{i}.intermediate.dense",
    "layers.{i}.down": "encoder.layer.{i}.output.dense",
    "layers.{i}.output_norm": "encoder.layer.{i}.output.LayerNorm",
    "poolers": "pooler.dense",
    "lm_head.dense": "cls.predictions.transform.dense",
    "lm_head.norm": "cls.predictions.transform.LayerNorm",
    "lm_head": "cls.predictions",
}
_LAYER = "encoder.albert_layer_groups.0.albert_layers.0"
NAMES = {
    "bert": _BERT_NAMES,
    "elasticbert": _BERT_NAMES | {"poolers.{i}": "encoder.pooler.{i}.dense"},
    "roberta": _BERT_NAMES
    | {"lm_head.dense": "lm_head.dense", "lm_head.norm": "lm_head.layer_norm", "lm_head": "lm_head"},
    "albert": _BERT_NAMES
    | {
        "embeddings.to_hidden": "encoder.embedding_hidden_mapping_in",
        "layers.{i}.query": f"{_LAYER}.attention.query",
        "layers.{i}.key": f"{_LAYER}.attention.key",
        "layers.{i}.value": f"{_LAYER}.attention.value",
        "layers.{i}.attention_output": f"{_LAYER}.attention.dense",
        "layers.{i}.attention_norm": f"{_LAYER}.attention.LayerNorm",
        "layers.{i}.up": f"{_LAYER}.ffn",
        "layers.{i}.down": f"{_LAYER}.ffn_output",
        "layers.{i}.output_norm": f"{_LAYER}.full_layer_layer_norm",
        "poolers": "pooler",
        "lm_head.dense": "predictions.dense",
        "lm_head.norm": "predictions.LayerNorm",
        "lm_head": "predictions",
    },
}
ARCHITECTURES = {"bert": "Bert", "elasticbert": "ElasticBert", "roberta": "Roberta", "albert": "Albert"}
IGNORED = re.compile(r"(.*\.)?(position_ids|cls\.seq_relationship\..*|sop_classifier\..*)$")


def hugging_face_name(model_type: str, name: str) -> str:
    """The Hugging Face name, without prefix, of one of our parameters.

    >>> hugging_face_name("bert", "layers.3.up.weight")
    'encoder.layer.3.intermediate.dense.weight'
    """
    module, leaf = name.rsplit(".", 1)
    number = re.search(r"\.(\d+)", module)
    if module.startswith("poolers"):
        depth = int(number[1]) - 1
        pattern = NAMES[model_type].get("poolers.{i}", NAMES[model_type]["poolers"])
        return f"{pattern.replace('{i}', str(depth))}.{leaf}"
    pattern = NAMES[model_type][re.sub(r"\.\d+", ".{i}", module)]
    return f"{pattern.replace('{i}', number[1]) if number else pattern}.{leaf}"


# ---- A backbone ----


def load_backbone(folder: str | Path) -> Bert:
    """The backbone in a Hugging Face folder, float32, in eval mode, on the CPU, with `backbone.config`.

    The kind is taken from model_type in config.json. Pooler and masked-LM head are there if the file has them.
    Raises FileNotFoundError for a missing folder or file, ValueError for a config or tensors that do not fit.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected a checkpoint with config.json and model.safetensors")
    config = read_config(folder / "config.json")
    tensors = _without_prefix(_read_shards(folder), config.model_type)
    head = hugging_face_name(config.model_type, "lm_head.bias").removesuffix("bias")
    pooler = hugging_face_name(config.model_type, f"poolers.{config.num_hidden_layers}.weight")
    with torch.device("meta"):  # the weights come from the file: draw none
        backbone = Bert(config, pooler=pooler in tensors, lm_head=any(name.startswith(head) for name in tensors))
    if backbone.lm_head is not None:
        _fold_tied(tensors, head, folder)
    load_strict(backbone, {ours: tensors.pop(theirs, None) for ours, theirs in _name_map(backbone).items()}, tensors, folder)
    return backbone.eval()


def save_backbone(backbone: Bert, folder: str | Path) -> None:
    """Write the backbone as a Hugging Face folder that `load_backbone` and transformers read.

    The folder appears whole or not at all. Raises FileExistsError where it is there already.
    """
    with atomic_folder(folder) as partial:
        write_backbone(backbone, partial)


def backbone_sha256(folder: str | Path) -> str:
    """One digest over the config and the weight files of a backbone's folder, so that a run knows it again."""
    digest = hashlib.sha256()
    for path in [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]:
        digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()


def write_backbone(backbone: Bert, folder: Path) -> None:
    """config.json and model.safetensors into a folder that is there. Names carry the prefix where there is a head."""
    config, with_head = backbone.config, backbone.lm_head is not None
    prefix = f"{config.model_type}." if with_head else ""
    heads = hugging_face_name(config.model_type, "lm_head.bias").removesuffix("bias")
    state = backbone.state_dict()
    tensors = {
        theirs if theirs.startswith(heads) else prefix + theirs: state[ours]
        for ours, theirs in _name_map(backbone).items()
    }
    architecture = ARCHITECTURES[config.model_type] + ("ForMaskedLM" if with_head else "Model")
    write_tensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config.to_dict() | {"architectures": [architecture], "torch_dtype": "float32"})


def read_config(path: Path) -> BertConfig:
    """The config of a backbone, from its config.json. Errors name the file."""
    config = read_json(path)
    model_type = config.get("model_type")
    if model_type not in NAMES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(NAMES)}, found {model_type!r}")
    try:
        return BertConfig.from_dict(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_strict(module: nn.Module, found: dict[str, Tensor | None], unexpected, source: Path) -> None:
    """Give `module` (on any device, meta too) its parameters, or say what is missing, unexpected or of another shape."""
    missing = sorted(name for name, tensor in found.items() if tensor is None)
    unexpected = sorted(name for name in unexpected if not IGNORED.match(name))
    if missing or unexpected:
        parts = [f"{len(names)} {what} ({_some(names)})" for what, names in
                 (("missing", missing), ("unexpected", unexpected)) if names]
        raise ValueError(f"{source}: the tensors do not fit this model: {'; '.join(parts)}")
    for name, own in module.state_dict().items():
        if found[name].shape != own.shape:
            raise ValueError(f"{source}: {name} must have shape {tuple(own.shape)}, found {tuple(found[name].shape)}")
        if not found[name].is_floating_point():
            raise ValueError(f"{source}: {name} must hold floating-point numbers, found {found[name].dtype}")
    own = {name: tensor.to(torch.float32, copy=True) for name, tensor in found.items()}  # not a view of the file
    module.load_state_dict(own, strict=True, assign=True)


def _name_map(backbone: Bert) -> dict[str, str]:
    return {name: hugging_face_name(backbone.config.model_type, name) for name in backbone.state_dict()}


def _without_prefix(tensors: dict[str, Tensor], model_type: str) -> dict[str, Tensor]:
    """Names without `bert.`, and with weight and bias where the oldest checkpoints say gamma and beta."""
    plain = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(f"{model_type}.")
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        plain[name] = tensor
    return plain


def _fold_tied(tensors: dict[str, Tensor], head: str, folder: Path) -> None:
    """The decoder's weight and bias may be stored once more: take them out, if they are what they are tied to."""
    for copy, original in ((f"{head}decoder.weight", "embeddings.word_embeddings.weight"), (f"{head}decoder.bias", f"{head}bias")):
        if copy in tensors:
            tied = tensors.pop(copy)
            if not torch.equal(tied, tensors.setdefault(original, tied)):
                raise ValueError(f"{folder}: {copy} must be tied to {original}, found other values: not supported")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ValueError(f"{index}: expected a weight_map from tensor names to files")
    tensors = {}
    for shard in sorted(set(weight_map.values())):
        tensors |= read_tensors(folder / shard)
    if tensors.keys() != weight_map.keys():
        differ = sorted(tensors.keys() ^ weight_map.keys())
        raise ValueError(f"{index}: the index and the shards name different tensors ({_some(differ)})")
    return tensors


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# ---- Files ----


def read_tensors(path: Path, sha256: str | None = None) -> dict[str, Tensor]:
    """All tensors of a safetensors file, which must be finite.

    The checksum is compared with `sha256`, or with the one that the file carries, where there is one.
    """
    if not path.exists():
        hint = "; only safetensors are read, convert the .bin file" if list(path.parent.glob("*.bin")) else ""
        raise FileNotFoundError(f"{path}: no such file{hint}")
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}
    except (SafetensorError, OSError) as error:
        raise ValueError(f"{path}: truncated or damaged ({error}); fetch or write it again") from None
    expected = sha256 or metadata.get("sha256")
    if expected is not None and expected != tensors_sha256(tensors):
        raise ValueError(f"{path}: damaged: the content does not have the checksum that was written with it")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise ValueError(f"{path}: {name} must be finite, found NaN or infinity")
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """A safetensors file with its checksum in the metadata, written whole or not at all. Returns the checksum."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    digest = tensors_sha256(tensors)
    write_bytes(path, save(tensors, metadata={"format": "pt", "sha256": digest}))
    return digest


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """One digest over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()


def read_json(path: Path) -> dict:
    """A JSON object; its checksum is compared where it carries one."""
    if not path.exists():
        raise FileNotFoundError(f"{path}: no such file")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ValueError(f"{path}: expected a JSON object, found text that is none ({error})") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path}: expected a JSON object, found {type(content).__name__}")
    digest = content.pop("sha256", None)
    if digest is not None and digest != json_sha256(content):
        raise ValueError(f"{path}: damaged or edited: the content does not have the checksum that was written with it")
    return content


def write_json(path: Path, content: dict) -> None:
    """A JSON object with a checksum of its own content, written whole or not at all."""
    text = json.dumps(content | {"sha256": json_sha256(content)}, indent=2)
    write_bytes(path, (text + "\n").encode())


def json_sha256(content: dict) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def write_bytes(path: Path, content: bytes) -> None:
    """To a temporary name beside `path`, then renamed: a kill leaves the old file or the new one."""
    partial = path.with_name(f".{path.name}.partial")
    try:
        with open(partial, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(partial, path)
    except BaseException:
        partial.unlink(missing_ok=True)
        raise


@contextmanager
def atomic_folder(folder: str | Path, replace: bool = False) -> Iterator[Path]:
    """A folder to write into that takes its name only when the block ends well.

    Raises FileExistsError where the name is taken, unless it may be replaced.
    """
    folder = Path(folder)
    if folder.exists() and not replace:
        raise FileExistsError(f"{folder}: is there already; name another folder or remove it")
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial, outgoing = (folder.with_name(f".{folder.name}.{state}") for state in ("partial", "old"))
    for leftover in (partial, outgoing):  # of a process that was killed
        if leftover.exists():
            shutil.rmtree(leftover)
    partial.mkdir()
    try:
        yield partial
        if folder.exists():
            os.rename(folder, outgoing)
        os.rename(partial, folder)
        shutil.rmtree(outgoing, ignore_errors=True)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
