"""Loads a Hugging Face checkpoint as a backbone and writes it back; tensors with a checksum.

A backbone folder has config.json and model.safetensors, or several shards with their index, as downloaded. Tensor names
may have the model's prefix (`bert.`, a decoder's `model.`) or not. Tensors and parameters must match one to one, except
for tensors that do not belong to the backbone: those that its Layout ignores, and the head of a fine-tuned classifier,
which `backbone.left_out` lists. Half precision is converted to float32. Nothing is unpickled. This file does not know
the families: registry.py names the module of each model_type.

Files that mini_ee writes have a checksum: safetensors files in the metadata, JSON files (files.py) in a key.
"""

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from mini_ee.lab.backbones.adapter import CONFIG as ADAPTER_CONFIG
from mini_ee.lab.backbones.adapter import adapter_tensors, is_adapter, merged, model_config, model_folder
from mini_ee.lab.backbones.backbone import Backbone, Layout, some_of
from mini_ee.lab.backbones.config_keys import check_keys
from mini_ee.lab.backbones.families import backbone_class, generates, layout_of
from mini_ee.lab.backbones.own_head import classification_head
from mini_ee.lab.backbones.tensor_files import read_checkpoint, write_tensors
from mini_ee.lab.data.files import atomic_folder, check_folder, file_sha256, write_json
from mini_ee.lab.data.sentence_files import SETFIT_SAVED, is_setfit, transformer_folder
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.registry import BACKBONES

BUILT_IN_MODEL = Path(str(files("mini_ee.weights") / "bert-12x128"))
"""The built-in 12-layer BERT (weights/README.md)."""

BUILT_IN_DECODER = BUILT_IN_MODEL.with_name("llama-12x256")
"""The built-in 12-layer Llama."""

OTHER_HEADS = re.compile(r"(classifier|classification_head|pre_classifier|score|qa_outputs)\..*")
"""Tensors of a fine-tuned model that are not part of its backbone: the head of another task."""

LARGEST_WEIGHT = 1e18  # its square is infinite in float32; trained weights are below 1e6


def check_generates(folder: str | Path, model_type: str) -> None:
    """Raise WrongArguments if backbones of this model_type do not generate text."""
    if not generates(model_type):
        decoders = ", ".join(filter(generates, BACKBONES))
        raise WrongArguments(f"{folder}: holds a {model_type}, which writes no text; give one of {decoders}")


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
    whole, folder = folder, transformer_folder(folder)
    config = read_config(folder / "config.json")
    kind, layout = backbone_class(config.model_type), layout_of(config.model_type)
    stored = read_checkpoint(model_folder(folder))
    plain, of_model = _plain_names(stored, layout, folder)
    if is_adapter(folder):
        replaced, added = (_plain_names(group, layout, folder)[0] for group in adapter_tensors(folder))
        plain = merged(plain, replaced, added, folder)
    if setfit := is_setfit(whole):
        from mini_ee.lab.backbones.setfit_head import setfit_classifier

        own_head = setfit_classifier(whole, plain, layout)
    else:
        own_head = classification_head(plain, layout, model_config(folder))
    tensors = _of_modules(plain, layout)
    tensors = {name: part for name, part in tensors.items() if not re.fullmatch(kind.unused(config), name)}
    check_weights(tensors, folder)
    config = kind.fitted(config, tensors)
    left_out = [name for name in tensors if OTHER_HEADS.fullmatch(name)]
    required = kind.generates and not own_head and _names_its_head(folder, kind)
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
    names = _name_map(backbone)
    backbone.foreign = _foreign(tensors, names, of_model)
    for name in backbone.foreign:
        del tensors[name]
    load_strict(backbone, tensors, names, folder)
    left_out += [SETFIT_SAVED] if setfit else []
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
    """One digest over the config and the weight files of a backbone's folder, by which a run recognises it.

    Those of an adapter and of its base model count together.
    """
    digest, transformer, base = hashlib.sha256(), transformer_folder(folder), model_folder(Path(folder))
    paths = [base / "config.json", *sorted(base.glob("*.safetensors"))]
    if base != transformer:
        paths += [transformer / ADAPTER_CONFIG, *sorted(transformer.glob("*.safetensors"))]
    for path in paths:
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
    architecture = {"architectures": [layout.architecture + ending], "torch_dtype": dtype}
    write_json(folder / "config.json", config.to_dict() | architecture)


def read_config(path: Path) -> Any:
    """The config of a backbone, from its config.json. Errors name the file."""
    check_folder(path.parent)
    config, path = model_config(path.parent), model_folder(path.parent) / path.name
    kinds = {"a run": "format_version" in config, "an export": path.with_name("manifest.json").is_file()}
    if here := [kind for kind in kinds if kinds[kind]]:
        raise ValueError(f"{path.parent}: holds {here[0]}; expected a checkpoint, such as the one that was trained")
    try:
        kind = backbone_class(config.get("model_type")).Config
        check_keys(config, kind, layout_of(config["model_type"]))
        return kind.from_hugging_face(config)
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
        differences = (("missing", missing), ("unexpected", unexpected))
        parts = [f"{len(some)} {what} ({some_of(some)})" for what, some in differences if some]
        raise ValueError(f"{source}: the tensors do not fit this model: {'; '.join(parts)}")
    for name, shape in wanted.items():
        if tensors[name].shape != shape:
            raise ValueError(f"{source}: {name} must have shape {tuple(shape)}, found {tuple(tensors[name].shape)}")
        if not tensors[name].is_floating_point():
            raise ValueError(f"{source}: {name} must hold floating-point numbers, found {tensors[name].dtype}")
    # torch.cat copies, so the parameters are not views of the file.
    loaded = {ours: torch.cat([tensors[name].float() for name in theirs]) for ours, theirs in names.items()}
    for ours, theirs in names.items():
        # Equal names mean a run's own model.safetensors, whose rows are in our order already.
        if theirs != (ours,) and hasattr(holder := _holder(module, ours), "from_file"):
            loaded[ours] = holder.from_file(loaded[ours])
    module.load_state_dict(module.state_dict() | loaded, strict=True, assign=True)


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
    named = model_config(folder).get("architectures")
    return isinstance(named, list) and any(str(name).endswith(kind.head_architecture) for name in named)


WRAPPERS = r"((?:(?:_orig_mod|module|_fsdp_wrapped_module|base_model\.model|model)\.)*?)"
"""What torch.compile, DataParallel, FSDP, PEFT and training loops leave before the names of a model's tensors."""


def _plain_names(tensors: dict[str, Tensor], layout: Layout, folder: Path) -> tuple[dict[str, Tensor], set[str]]:
    """(the tensors with names without prefixes and with old names replaced, those whose name had the model's prefix).

    The prefix of a wrapper is what stands before the name of the word embeddings.
    """
    words = layout.names.get("embeddings.word", layout.names.get("embeddings"))
    prefixes = "|".join(re.escape(prefix) for prefix in (layout.prefix, layout.classifier_prefix) if prefix)
    word_names = re.compile(rf"{WRAPPERS}(?:{prefixes})?{re.escape(str(words))}\.weight")
    wrapper = next((match[1] for name in tensors if (match := word_names.fullmatch(name))), "")
    plain: dict[str, Tensor] = {}
    of_model = set()
    for given, tensor in tensors.items():
        unwrapped = given.removeprefix(wrapper).replace("_orig_mod.", "")
        name = unwrapped.removeprefix(layout.prefix).removeprefix(layout.classifier_prefix)
        for old, new in layout.renamed:
            name = name.removesuffix(old) + new if name.endswith(old) else name
        if name in plain:
            raise ValueError(f"{folder}: {name} is there twice, under two spellings of its name; keep one")
        plain[name] = tensor
        if len(unwrapped) > len(name) and unwrapped.endswith(name):
            of_model.add(name)
    return plain, of_model


def _of_modules(plain: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The tensors that the layout does not ignore, split as our modules are."""
    tensors: dict[str, Tensor] = {}
    for name, tensor in plain.items():
        if not re.fullmatch(layout.ignored, name):
            tensors |= _shares(name, tensor, layout)
    return tensors


def _foreign(tensors: dict[str, Tensor], names: dict[str, tuple[str, ...]], of_model: set[str]) -> tuple[str, ...]:
    """The tensors that belong to no module of a whole model, such as a loss's; transformers passes over them, too."""
    wanted = {name for theirs in names.values() for name in theirs}
    if not wanted <= tensors.keys():
        return ()
    modules = {name.partition(".")[0] for name in wanted}
    return tuple(sorted(name for name in tensors if name.partition(".")[0] not in modules and name not in of_model))


def _shares(name: str, tensor: Tensor, layout: Layout) -> dict[str, Tensor]:
    """A tensor of the file, split if it stacks several of our modules (Layout.fused)."""
    module, _, leaf = name.rpartition(".")
    parts = next((parts for whole, parts in layout.fused if module.endswith(whole) and tensor.dim()), None)
    if parts is None:
        return {name: tensor}
    return {f"{module}.{part}.{leaf}": share for part, share in zip(parts, tensor.tensor_split(len(parts)))}


def _fused(tensors: dict[str, Tensor], layout: Layout) -> dict[str, Tensor]:
    """The inverse of `_shares`: the tensors of a file, with those of fused modules stacked."""
    shares: dict[str, list[Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, leaf = name.rpartition(".")
        whole = next(
            (whole for whole, parts in layout.fused for part in parts if module.endswith(f"{whole}.{part}")), None
        )
        name = name if whole is None else f"{module.rpartition('.')[0]}.{leaf}"
        shares.setdefault(name, []).append(tensor)
    return {name: some[0] if len(some) == 1 else torch.cat(some) for name, some in shares.items()}


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
