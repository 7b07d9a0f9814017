"""Loads a Hugging Face checkpoint as a backbone and writes it back; tensors with a checksum.

A backbone folder has config.json and model.safetensors, or several shards with their index, as downloaded. Tensor names
may have the model's prefix (`bert.`, a decoder's `model.`) or not. Tensors and parameters must match one to one, except
for tensors that do not belong to the backbone: those that its Layout ignores, and the head of a fine-tuned classifier,
which `backbone.left_out` lists. Half precision is converted to float32. Nothing is unpickled. This file does not know
the families: registry.py names the module of each model_type.

Files that mini_ee writes have a checksum: safetensors files in the metadata, JSON files (files.py) in a key.
"""

import hashlib
import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mini_ee.backbones.backbone import Backbone, Layout, some_of
from mini_ee.backbones.fine_tuned import classification_head
from mini_ee.data.files import (
    atomic_folder,
    check_folder,
    check_regular,
    file_sha256,
    read_json,
    write_bytes,
    write_json,
)
from mini_ee.data.values import shortened
from mini_ee.errors import WrongArguments
from mini_ee.registry import BACKBONES

BUILT_IN_MODEL = Path(str(files("mini_ee.weights") / "bert-12x128"))
"""The built-in 12-layer BERT (weights/README.md)."""

BUILT_IN_DECODER = BUILT_IN_MODEL.with_name("llama-12x256")
"""The built-in 12-layer Llama."""

OTHER_HEADS = re.compile(r"(classifier|classification_head|pre_classifier|score|qa_outputs)\..*")
"""Tensors of a fine-tuned model that are not part of its backbone: the head of another task."""

CONVERT = (
    'python -c "from glob import glob; from torch import load; from safetensors.torch import save_file; '
    "save_file({name: tensor.contiguous().clone() for file in glob('DIR/pytorch_model*.bin') "
    "for name, tensor in load(file, weights_only=True).items()}, 'DIR/model.safetensors')\""
)
"""A command that converts a .bin checkpoint to safetensors."""

LARGEST_WEIGHT = 1e18  # its square is infinite in float32; trained weights are below 1e6


def backbone_class(model_type: object) -> type[Backbone]:
    """The class for a model_type of config.json. Raises ValueError if it is not in registry.py."""
    return _module(model_type).BACKBONE


def generates(model_type: object) -> bool:
    """Whether this is the model_type of a backbone that generates text; False if it is not in registry.py."""
    return isinstance(model_type, str) and model_type in BACKBONES and backbone_class(model_type).generates


def check_generates(folder: str | Path, model_type: str) -> None:
    """Raise WrongArguments if backbones of this model_type do not generate text."""
    if not generates(model_type):
        found = ", ".join(filter(generates, BACKBONES))
        raise WrongArguments(f"{folder}: holds a {model_type}, which writes no text; give one of {found}")


def layout_of(model_type: str) -> Layout:
    """The Layout of this model_type. Raises ValueError if it is not in registry.py."""
    return _module(model_type).LAYOUTS[model_type]


def _module(model_type: object) -> ModuleType:
    if not isinstance(model_type, str) or model_type not in BACKBONES:
        raise ValueError(f"model_type must be one of {', '.join(BACKBONES)}, found {shortened(model_type)}")
    return import_module(BACKBONES[model_type])


def hugging_face_names(model_type: str, name: str) -> tuple[str, ...]:
    """The Hugging Face names, without prefix, of one of our parameters; several if ours stacks them.

    >>> hugging_face_names("bert", "layers.3.up.weight")
    ('encoder.layer.3.intermediate.dense.weight',)
    """
    module, leaf = name.rsplit(".", 1)
    pattern = layout_of(model_type).names[re.sub(r"\.\d+", ".{i}", module)]
    if number := re.search(r"\.(\d+)", module):
        pattern = pattern.replace("{i}", number[1]).replace("{i-1}", str(int(number[1]) - 1))
    # "before.{a|b|c}.after" -> its three parts; without braces all is `before`, and `parts` is one empty string.
    before, parts, after = re.findall(r"^([^{]*)\{?([^{}]*\|[^{}]*)?\}?([^}]*)$", pattern)[0]
    return tuple(f"{before}{part}{after}.{leaf}" for part in parts.split("|"))


# ---- A backbone ----
class _Undrawn(TorchFunctionMode):
    """Skips the initialisation of parameters, which is slow on the meta device and first imports a second of torch."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if getattr(function, "__module__", None) == "torch.nn.init":
            return kwargs["tensor"]
        return function(*args, **kwargs)


@contextmanager
def without_memory() -> Iterator[None]:
    """Modules created in this block have parameters on the meta device, for weights that are loaded later."""
    with torch.device("meta"), _Undrawn():
        yield


def load_backbone(folder: str | Path) -> Backbone:
    """The backbone in a Hugging Face folder, float32, in eval mode, on the CPU, with `backbone.config`.

    model_type in config.json selects the class. The backbone has poolers and an LM head if the file has them; the LM
    head is required if config.json names an architecture that generates text (`...ForCausalLM`). `left_out` lists the
    tensors of other heads. These include a masked-LM head that is not tied to the embeddings, because ours is tied;
    then `untied_head` is True. Raises FileNotFoundError for a missing folder or file, ValueError for a config or
    tensors that do not fit.
    """
    folder = Path(folder)
    config = read_config(folder / "config.json")
    kind, layout = backbone_class(config.model_type), layout_of(config.model_type)
    shards = _read_shards(folder)
    own_head = classification_head(shards, layout, folder)
    tensors = _plain_names(shards, layout, folder)
    tensors = {name: part for name, part in tensors.items() if not re.fullmatch(kind.unused(config), name)}
    check_weights(tensors, folder)
    config = kind.fitted(config, tensors)
    left_out = [name for name in tensors if OTHER_HEADS.fullmatch(name)]
    required = kind.generates and _names_its_head(folder, kind)
    untied = _fold_tied(tensors, kind, config, folder)
    left_out += untied
    for name in left_out:
        del tensors[name]
    there = {part: _has(tensors, config.model_type, module) for part, module in kind.parts(config).items()}
    if required and "lm_head" in there:
        there["lm_head"] = True
    if there.get("lm_head") is False:  # some classifiers have a dense map and a norm under the names of the head's
        left_out += (others := [name for name in tensors if name.startswith(_head_prefixes(config.model_type))])
        tensors = {name: part for name, part in tensors.items() if name not in others}
    with without_memory():
        backbone = kind(config, **there)
    load_strict(backbone, tensors, _name_map(backbone), folder)
    backbone.left_out, backbone.untied_head = tuple(sorted(left_out)), bool(untied)
    backbone.classification_head = own_head
    return backbone.eval()


def empty_backbone(config: dict, lm_head: bool = False) -> Backbone:
    """A backbone for weights that are loaded later, from the dict of its config's to_dict. lm_head: with its LM head.

    Raises ValueError for an invalid config.
    """
    kind = backbone_class(config.get("model_type"))
    made = kind.Config.from_hugging_face(config)
    backbone = kind(made, **{part: part == "lm_head" and lm_head for part in kind.parts(made)})
    return backbone if lm_head else backbone.without_heads()


def save_backbone(backbone: Backbone, folder: str | Path) -> None:
    """Write the backbone as a Hugging Face folder that `load_backbone` and transformers read.

    If the write is interrupted, there is no folder. Raises FileExistsError if the folder exists.
    """
    with atomic_folder(folder) as partial:
        write_backbone(backbone, partial)


def backbone_sha256(folder: str | Path) -> str:
    """One digest over the config and the weight files of a backbone's folder, by which a run recognises it."""
    digest = hashlib.sha256()
    for path in [Path(folder) / "config.json", *sorted(Path(folder).glob("*.safetensors"))]:
        digest.update(bytes.fromhex(file_sha256(path)))
    return digest.hexdigest()


def write_backbone(backbone: Backbone, folder: Path) -> None:
    """Write config.json and model.safetensors to an existing folder. Names have the prefix if there is an LM head."""
    config, layout = backbone.config, layout_of(backbone.config.model_type)
    prefix, ending = (layout.prefix, backbone.head_architecture) if backbone.has_lm_head else ("", "Model")
    head = _head_prefixes(config.model_type)
    tensors = {
        name if name.startswith(head) else prefix + name: part
        for name, part in _parts(backbone, _name_map(backbone)).items()
    }
    write_tensors(folder / "model.safetensors", _fused(tensors, layout))
    dtype = str(next(backbone.parameters()).dtype).removeprefix("torch.")
    about = {"architectures": [layout.architecture + ending], "torch_dtype": dtype}
    write_json(folder / "config.json", config.to_dict() | about)


def read_config(path: Path) -> Any:
    """The config of a backbone, from its config.json. Errors name the file."""
    check_folder(path.parent)
    config = read_json(path)
    if "format_version" in config:
        raise ValueError(f"{path.parent}: holds a run; expected a checkpoint, such as the one that it was trained on")
    try:
        return backbone_class(config.get("model_type")).Config.from_hugging_face(config)
    except (ValueError, OverflowError) as error:
        raise ValueError(f"{path}: {error}") from None


def check_weights(tensors: dict[str, Tensor], source: Path) -> None:
    """Raise ValueError for weights so large that results would overflow."""
    for name, tensor in tensors.items():
        if tensor.is_floating_point() and tensor.numel() and float(tensor.float().abs().max()) > LARGEST_WEIGHT:
            raise ValueError(
                f"{source}: {name} holds numbers above {LARGEST_WEIGHT:g}, with which nothing can be computed: "
                f"damaged; fetch the weights again"
            )


def load_strict(module: nn.Module, tensors: dict[str, Tensor], names: dict[str, tuple[str, ...]], source: Path) -> None:
    """Load the parameters of `module` (on any device, meta too); those that are not in `names` stay as they are.

    names: parameter -> the tensors that it stacks along the first axis. Raises ValueError if tensors are missing,
    unexpected, of another shape or not floating-point.
    """
    wanted = {name: part.shape for name, part in _parts(module, names).items()}
    missing = sorted(wanted.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - wanted.keys())
    if missing or unexpected:
        found = (("missing", missing), ("unexpected", unexpected))
        parts = [f"{len(some)} {what} ({some_of(some)})" for what, some in found if some]
        raise ValueError(f"{source}: the tensors do not fit this model: {'; '.join(parts)}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name} must have shape {tuple(shape)}, found {tuple(tensors[name].shape)}")
        if not tensors[name].is_floating_point():
            raise ValueError(f"{source}: {name} must hold floating-point numbers, found {tensors[name].dtype}")
    # torch.cat copies, so the parameters are not views of the file.
    own = {ours: torch.cat([tensors[name].float() for name in theirs]) for ours, theirs in names.items()}
    for ours, theirs in names.items():
        # Equal names mean a run's own model.safetensors, whose rows are in our order already.
        if theirs != (ours,) and hasattr(holder := _holder(module, ours), "from_file"):
            own[ours] = holder.from_file(own[ours])
    module.load_state_dict(module.state_dict() | own, strict=True, assign=True)


def _parts(module: nn.Module, names: dict[str, tuple[str, ...]]) -> dict[str, Tensor]:
    """The tensors of a file for these parameters; several for a parameter of a StackedLinear.

    If a module has to_file(weight) and from_file(weight), the rows of its weight are in another order than in a file.
    """
    parts: dict[str, Tensor] = {}
    state = module.state_dict()
    for ours, theirs in names.items():
        holder: Any
        holder, value = _holder(module, ours), state[ours]
        value = holder.to_file(value) if hasattr(holder, "to_file") else value
        split = value.split(holder.sizes) if len(theirs) > 1 else [value]
        parts |= zip(theirs, split, strict=True)
    return parts


def _holder(module: nn.Module, parameter: str) -> nn.Module:
    return module.get_submodule(parameter.rpartition(".")[0])


def _name_map(backbone: Backbone) -> dict[str, tuple[str, ...]]:
    return {name: hugging_face_names(backbone.config.model_type, name) for name in backbone.state_dict()}


def _prefix_of(model_type: str, module: str) -> str:
    """The Hugging Face name of one of our modules, with a dot at its end."""
    return hugging_face_names(model_type, f"{module}.bias")[0].removesuffix("bias")


def _head_prefixes(model_type: str) -> tuple[str, ...]:
    """What the Hugging Face names of the head to words begin with: some families have it in several modules."""
    names = layout_of(model_type).names
    return tuple(f"{theirs}." for ours, theirs in names.items() if ours.startswith("lm_head"))


def _has(tensors: dict[str, Tensor], model_type: str, module: str) -> bool:
    return any(name.startswith(_prefix_of(model_type, module)) for name in tensors)


def _names_its_head(folder: Path, kind: type[Backbone]) -> bool:
    """Whether config.json names an architecture with an LM head, not a bare backbone or a classifier."""
    named = read_json(folder / "config.json").get("architectures")
    return isinstance(named, list) and any(str(name).endswith(kind.head_architecture) for name in named)


def _plain_names(tensors: dict[str, Tensor], layout: Layout, folder: Path) -> dict[str, Tensor]:
    """The tensors that the layout does not ignore, with names without prefix and old names replaced."""
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        name = name.removeprefix(layout.prefix).removeprefix(layout.classifier_prefix)
        for old, new in layout.renamed:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name in plain:
            raise ValueError(f"{folder}: {name} is there twice, under two spellings of its name; keep one")
        if not re.fullmatch(layout.ignored, name):
            plain |= _shares(name, tensor, layout)
    return plain


def _shares(name: str, tensor: Tensor, layout: Layout) -> dict[str, Tensor]:
    """A tensor of the file, split if it stacks several of our modules (Layout.fused)."""
    module, _, leaf = name.rpartition(".")
    parts = next((parts for whole, parts in layout.fused if module.endswith(whole) and tensor.dim()), None)
    if parts is None:
        return {name: tensor}
    return {f"{module}.{part}.{leaf}": share for part, share in zip(parts, tensor.tensor_split(len(parts)))}


def _fused(tensors: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The inverse of `_shares`: the tensors of a file, with those of fused modules stacked."""
    found: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        whole = next(
            (whole for whole, parts in layout.fused for part in parts if module.endswith(f"{whole}.{part}")), None
        )
        name = name if whole is None else f"{module.rpartition('.')[0]}.{leaf}"
        found.setdefault(name, []).append(tensor)
    return {name: some[0] if len(some) == 1 else torch.cat(some) for name, some in found.items()}


def _fold_tied(tensors: dict[str, Tensor], kind: type[Backbone], config: Any, folder: Path) -> list[str]:
    """Remove copies of tied tensors. Returns the names of the masked-LM head's tensors if the head is not tied.

    Raises ValueError for an untied head of a model that generates text, and for any other copy with other values.
    """
    untied, head = False, _head_prefixes(config.model_type)
    for copy, original in kind.tied(config).items():
        if copy not in tensors:
            untied |= copy.startswith(head) and copy.endswith(".weight") and not config.tie_word_embeddings
        elif torch.equal(tensors[copy], tensors.setdefault(original, tensors[copy])):
            del tensors[copy]
        elif kind.generates or not copy.startswith(head):
            raise ValueError(f"{folder}: {copy} must be tied to {original}, found other values: not supported")
        else:
            untied = True
    return [name for name in tensors if untied and name.startswith(head)]


def _read_shards(folder: Path) -> dict[str, Tensor]:
    index = folder / "model.safetensors.index.json"
    if not index.exists():
        return read_tensors(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    weight_map = weight_map if isinstance(weight_map, dict) else {}
    shards = list(weight_map.values())
    if not shards or not all(isinstance(shard, str) and shard == Path(shard).name for shard in shards):
        raise ValueError(f"{index}: expected a weight_map from tensor names to files in this folder")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shards)):
        found = read_tensors(folder / shard)
        differ = sorted(found.keys() ^ {name for name, file in weight_map.items() if file == shard})
        if differ:
            raise ValueError(f"{index}: the index and {shard} name different tensors ({some_of(differ)})")
        tensors |= found
    return tensors


# ---- Tensors ----
def read_tensors(path: Path, sha256: str | None = None, signed: bool = False) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises ValueError unless they are finite and the checksum is right.

    sha256: the expected checksum; None: the one in the file's metadata, if there is one. signed: there must be one.
    """
    if not path.exists():
        line = CONVERT.replace("DIR", str(path.parent))
        hint = f"; only safetensors are read, convert the .bin file: {line}" if list(path.parent.glob("*.bin")) else ""
        raise FileNotFoundError(f"{path}: no such file{hint}")
    check_regular(path)
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


DTYPES = {  # as safetensors orders them in a file
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}


def write_tensors(path: Path, tensors: dict[str, Tensor]) -> str:
    """Write a safetensors file with its checksum in the metadata, atomically. Returns the checksum.

    Equal tensors give equal bytes; safetensors' own writer shuffles the metadata. Raises KeyError for other dtypes.
    """
    tensors = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    sha256, order, end = tensors_sha256(tensors), list(DTYPES), 0
    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "sha256": sha256}}
    values = []
    for name, tensor in sorted(tensors.items(), key=lambda item: (order.index(item[1].dtype), item[0])):
        values.append(_bytes(tensor))
        begin, end = end, end + len(values[-1])
        shape = list(tensor.shape)
        entries[name] = {"dtype": DTYPES[tensor.dtype], "shape": shape, "data_offsets": [begin, end]}
    header = json.dumps(entries, separators=(",", ":")).encode()
    header += b" " * (-len(header) % 8)  # the values stay aligned
    write_bytes(path, len(header).to_bytes(8, "little"), header, *values)
    return sha256


def _bytes(tensor: Tensor) -> memoryview:
    return memoryview(tensor.reshape(-1).view(torch.uint8).numpy())


def tensors_sha256(tensors: dict[str, Tensor]) -> str:
    """One digest over names, dtypes, shapes and values."""
    digest = hashlib.sha256()
    for name in sorted(tensors):
        tensor = tensors[name].cpu().contiguous()
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        digest.update(_bytes(tensor))
    return digest.hexdigest()
