"""A Hugging Face checkpoint on disk <-> a backbone, strict both ways; tensors with a checksum.

A backbone folder is what one downloads: config.json and model.safetensors, or several shards with their index. Tensor
names may carry the model's prefix (`bert.`, a decoder's `model.`) or not. Every tensor must find its parameter and
every parameter its tensor; the few that carry no weight of ours (position ids, the next-sentence head) are named in
IGNORED. Files in half precision are read as float32. Nothing is unpickled.

What mini_ee writes carries a checksum: safetensors files in their metadata, JSON files (files.py) in a key of theirs.
"""

import hashlib
import json
import re
from importlib.resources import files
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor, nn

from mini_ee.backbones.bert import Bert, BertConfig
from mini_ee.backbones.llama import Decoder, DecoderConfig
from mini_ee.data.files import atomic_folder, file_sha256, read_json, write_bytes, write_json

BUILT_IN_MODEL = Path(str(files("mini_ee.weights") / "bert-12x128"))
"""The 12-layer BERT that comes with the project (weights/README.md)."""

BUILT_IN_DECODER = BUILT_IN_MODEL.with_name("llama-8x192")
"""The 8-layer Llama that comes with the project."""

# ---- Names: ours -> Hugging Face's. {i} is the layer, counted from 0; {a|b} are several tensors that ours stacks. ----
_BERT_NAMES = {
    "embeddings.word": "embeddings.word_embeddings",
    "embeddings.position": "embeddings.position_embeddings",
    "embeddings.token_type": "embeddings.token_type_embeddings",
    "embeddings.norm": "embeddings.LayerNorm",
    "layers.{i}.qkv": "encoder.layer.{i}.attention.self.{query|key|value}",
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

_DECODER_NAMES = {
    "embeddings": "embed_tokens",
    "layers.{i}.attention_norm": "layers.{i}.input_layernorm",
    "layers.{i}.qkv": "layers.{i}.self_attn.{q|k|v}_proj",
    "layers.{i}.attention_output": "layers.{i}.self_attn.o_proj",
    "layers.{i}.mlp_norm": "layers.{i}.post_attention_layernorm",
    "layers.{i}.gate": "layers.{i}.mlp.gate_proj",
    "layers.{i}.up": "layers.{i}.mlp.up_proj",
    "layers.{i}.down": "layers.{i}.mlp.down_proj",
    "norm": "norm",
    "lm_head": "lm_head",
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
        "layers.{i}.qkv": f"{_LAYER}.attention.{{query|key|value}}",
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
    "llama": _DECODER_NAMES,
    "gemma": _DECODER_NAMES,
    "phi": _DECODER_NAMES
    | {
        "layers.{i}.attention_output": "layers.{i}.self_attn.dense",
        "layers.{i}.up": "layers.{i}.mlp.fc1",
        "layers.{i}.down": "layers.{i}.mlp.fc2",
        "norm": "final_layernorm",
    },
}

DECODERS = ("llama", "gemma", "phi")

ARCHITECTURES = {
    "bert": "Bert",
    "elasticbert": "ElasticBert",
    "roberta": "Roberta",
    "albert": "Albert",
    "llama": "Llama",
    "gemma": "Gemma",
    "phi": "Phi",
}

IGNORED = re.compile(r"(.*\.)?(position_ids|cls\.seq_relationship\..*|sop_classifier\..*|rotary_emb\.inv_freq)$")


def hugging_face_names(model_type: str, name: str) -> tuple[str, ...]:
    """The Hugging Face names, without prefix, of one of our parameters: several where ours stacks them.

    >>> hugging_face_names("bert", "layers.3.up.weight")
    ('encoder.layer.3.intermediate.dense.weight',)
    """
    module, leaf = name.rsplit(".", 1)
    number = re.search(r"\.(\d+)", module)
    if module.startswith("poolers"):
        pattern = NAMES[model_type].get("poolers.{i}", NAMES[model_type]["poolers"])
        pattern = pattern.replace("{i}", str(int(number[1]) - 1))
    else:
        pattern = NAMES[model_type][re.sub(r"\.\d+", ".{i}", module)]
        pattern = pattern.replace("{i}", number[1]) if number else pattern
    before, parts, after = re.fullmatch(r"([^{]*)\{?([^{}]*\|[^{}]*)?\}?([^}]*)", pattern).groups(default="")
    return tuple(f"{before}{part}{after}.{leaf}" for part in parts.split("|"))


# ---- A backbone ----
def load_backbone(folder: str | Path) -> Bert | Decoder:
    """The backbone in a Hugging Face folder, float32, in eval mode, on the CPU, with `backbone.config`.

    The kind is taken from model_type in config.json. Pooler and masked-LM head are there if the file has them; a
    decoder's head must be, unless config.json ties it to the embeddings.
    Raises FileNotFoundError for a missing folder or file, ValueError for a config or tensors that do not fit.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(
            f"{folder}: no such folder; expected a checkpoint with config.json and model.safetensors"
        )
    config = read_config(folder / "config.json")
    tensors = _without_prefix(_read_shards(folder), config.model_type, folder)
    with torch.device("meta"):  # the weights come from the file: draw none
        backbone = Decoder(config) if config.model_type in DECODERS else _bert(config, tensors)
    _fold_tied(tensors, _tied(backbone), folder)
    load_strict(backbone, tensors, _name_map(backbone), folder)
    return backbone.eval()


def empty_backbone(config: dict, lm_head: bool = False) -> Bert | Decoder:
    """A backbone with weights yet to come, from what its config's to_dict gave; with its head to words or without."""
    if config["model_type"] in DECODERS:
        decoder = Decoder(DecoderConfig.from_dict(config))
        if not lm_head:
            decoder.lm_head = decoder.norm = None
        return decoder
    return Bert(BertConfig(**config), pooler=False, lm_head=lm_head)


def _bert(config: BertConfig, tensors: dict[str, Tensor]) -> Bert:
    """With the parts that the file has."""
    head = _head_prefix(config.model_type)
    (pooler,) = hugging_face_names(config.model_type, f"poolers.{config.num_hidden_layers}.weight")
    return Bert(config, pooler=pooler in tensors, lm_head=any(name.startswith(head) for name in tensors))


def save_backbone(backbone: Bert | Decoder, folder: str | Path) -> None:
    """Write the backbone as a Hugging Face folder that `load_backbone` and transformers read.

    The folder appears whole or not at all. Raises FileExistsError where it is there already.
    """
    with atomic_folder(folder) as partial:
        write_backbone(backbone, partial)


def backbone_sha256(folder: str | Path) -> str:
    """One digest over the config and the weight files of a backbone's folder, so that a run knows it again."""
    digest = hashlib.sha256()
    for path in [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]:
        digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def write_backbone(backbone: Bert | Decoder, folder: Path) -> None:
    """config.json and model.safetensors into a folder that is there. Names carry the prefix where there is a head."""
    config = backbone.config
    if isinstance(backbone, Decoder):
        prefix, kind = _prefix(config.model_type), "ForCausalLM"
    elif backbone.lm_head is not None:
        prefix, kind = _prefix(config.model_type), "ForMaskedLM"
    else:
        prefix, kind = "", "Model"
    head = _head_prefix(config.model_type)
    tensors = {
        name if name.startswith(head) else prefix + name: part
        for name, part in _parts(backbone, _name_map(backbone)).items()
    }
    architecture = ARCHITECTURES[config.model_type] + kind
    write_tensors(folder / "model.safetensors", tensors)
    write_json(folder / "config.json", config.to_dict() | {"architectures": [architecture], "torch_dtype": "float32"})


def read_config(path: Path) -> BertConfig | DecoderConfig:
    """The config of a backbone, from its config.json. Errors name the file."""
    config = read_json(path)
    if "format_version" in config:
        raise ValueError(f"{path.parent}: holds a run; expected a checkpoint, such as the one that it was trained on")
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in NAMES:
        raise ValueError(f"{path}: model_type must be one of {', '.join(NAMES)}, found {model_type!r}")
    try:
        return (DecoderConfig if model_type in DECODERS else BertConfig).from_dict(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None


def load_strict(module: nn.Module, tensors: dict[str, Tensor], names: dict[str, tuple[str, ...]], source: Path) -> None:
    """Give `module` (on any device, meta too) its parameters, or say what is missing, unexpected or of another shape.

    names: parameter -> the tensors that it is made of, stacked along the first axis. Raises ValueError.
    """
    wanted = {name: part.shape for name, part in _parts(module, names).items()}
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(name for name in tensors.keys() - wanted.keys() if not IGNORED.match(name))
    if missing or unexpected:
        found = (("missing", missing), ("unexpected", unexpected))
        parts = [f"{len(some)} {what} ({_some(some)})" for what, some in found if some]
        raise ValueError(f"{source}: the tensors do not fit this model: {'; '.join(parts)}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name} must have shape {tuple(shape)}, found {tuple(tensors[name].shape)}")
        if not tensors[name].is_floating_point():
            raise ValueError(f"{source}: {name} must hold floating-point numbers, found {tensors[name].dtype}")
    # torch.cat copies: the parameters are no views of the file.
    own = {ours: torch.cat([tensors[name].float() for name in theirs]) for ours, theirs in names.items()}
    module.load_state_dict(own, strict=True, assign=True)


def _parts(module: nn.Module, names: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """The tensors that the parameters are made of: several where a StackedLinear has them in one."""
    parts, state = {}, module.state_dict()
    for ours, theirs in names.items():
        holder = module.get_submodule(ours.rpartition(".")[0])
        split = state[ours].split(holder.sizes) if len(theirs) > 1 else [state[ours]]
        parts |= zip(theirs, split, strict=True)
    return parts


def _name_map(backbone: Bert | Decoder) -> dict[str, tuple[str, ...]]:
    return {name: hugging_face_names(backbone.config.model_type, name) for name in backbone.state_dict()}


def _head_prefix(model_type: str) -> str:
    return hugging_face_names(model_type, "lm_head.bias")[0].removesuffix("bias")


def _prefix(model_type: str) -> str:
    return "model." if model_type in DECODERS else f"{model_type}."


def _without_prefix(tensors: dict[str, Tensor], model_type: str, folder: Path) -> dict[str, Tensor]:
    """Names without `bert.` or `model.`, and with weight and bias where the oldest checkpoints say gamma and beta."""
    plain = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(_prefix(model_type))
        name = re.sub(r"LayerNorm\.gamma$", "LayerNorm.weight", re.sub(r"LayerNorm\.beta$", "LayerNorm.bias", name))
        if name in plain:
            raise ValueError(f"{folder}: {name} is there twice, under two spellings of its name; keep one")
        plain[name] = tensor
    return plain


def _tied(backbone: Bert | Decoder) -> dict[str, str]:
    """Tensors of the head that a file may hold once more -> what they are tied to."""
    head = _head_prefix(backbone.config.model_type)
    if isinstance(backbone, Decoder):
        return {f"{head}weight": "embed_tokens.weight"} if backbone.config.tie_word_embeddings else {}
    if backbone.lm_head is None:
        return {}
    return {f"{head}decoder.weight": "embeddings.word_embeddings.weight", f"{head}decoder.bias": f"{head}bias"}


def _fold_tied(tensors: dict[str, Tensor], tied: dict[str, str], folder: Path) -> None:
    """Take the copies out, if they are what they are tied to."""
    for copy, original in tied.items():
        if copy in tensors:
            tensor = tensors.pop(copy)
            if not torch.equal(tensor, tensors.setdefault(original, tensor)):
                raise ValueError(f"{folder}: {copy} must be tied to {original}, found other values: not supported")


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
    if not shards or not all(isinstance(shard, str) and shard == Path(shard).name for shard in shards):
        raise ValueError(f"{index}: expected a weight_map from tensor names to files in this folder")
    tensors = {}
    for shard in sorted(set(shards)):
        found = read_tensors(folder / shard)
        differ = sorted(found.keys() ^ {name for name, file in weight_map.items() if file == shard})
        if differ:
            raise ValueError(f"{index}: the index and {shard} name different tensors ({_some(differ)})")
        tensors |= found
    return tensors


def _some(names: list[str]) -> str:
    return ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")


# ---- Tensors ----
def read_tensors(path: Path, sha256: str | None = None, signed: bool = False) -> dict[str, Tensor]:
    """All tensors of a safetensors file, which must be finite.

    The checksum is compared with `sha256`, or with the one that the file carries, where there is one; `signed`: there
    must be one.
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
    if expected is None and signed:
        raise ValueError(f"{path}: damaged: the checksum that was written with it is gone")
    if expected is not None and expected != tensors_sha256(tensors):
        raise ValueError(f"{path}: damaged: the content does not have the checksum that was written with it")
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and not torch.isfinite(tensor.float()).all():
            raise ValueError(f"{path}: {name} must be finite, found NaN or infinity")
    return tensors


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """A safetensors file with its checksum in the metadata, written whole or not at all. Returns the checksum."""
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    metadata = {"format": "pt", "sha256": tensors_sha256(tensors)}
    write_bytes(path, *_ordered(save(tensors, metadata=metadata), metadata))
    return metadata["sha256"]


def tensor_places(path: Path) -> dict[str, tuple[int, int]]:
    """Where in a safetensors file each tensor's bytes stand: name -> (offset, length)."""
    with open(path, "rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(size))
    header.pop("__metadata__", None)
    places = {name: entry["data_offsets"] for name, entry in header.items()}
    return {name: (8 + size + start, end - start) for name, (start, end) in places.items()}


def _ordered(content: bytes, metadata: dict[str, str]) -> tuple[bytes, bytes, memoryview]:
    """A safetensors file with its metadata in this order: safetensors shuffles it, and equal runs are equal bytes."""
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.dumps(json.loads(content[8:end]) | {"__metadata__": metadata}, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the values stay aligned
    return len(header).to_bytes(8, "little"), header, memoryview(content)[end:]


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """One digest over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(tensor.reshape(-1).view(torch.uint8).numpy())
    return digest.hexdigest()
