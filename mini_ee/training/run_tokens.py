"""A decoder's run on disk."""

from pathlib import Path
from typing import NamedTuple

from mini_ee.backbones.hub import backbone_sha256, load_backbone, load_strict, read_tensors, write_tensors
from mini_ee.data.files import atomic_folder, file_sha256, read_json, write_bytes, write_json
from mini_ee.data.tokens import Tokenizer
from mini_ee.rules import Rule, rule_from_dict
from mini_ee.units.tokens import ExitDecoder

FORMAT_VERSION = 1


# ---- On disk ----
def save_decoder_run(
    model: ExitDecoder, folder: str | Path, backbone_folder: str | Path, rule: Rule, about: dict, metrics: dict
) -> None:
    """Write heads, adapters and what decides as a folder, whole or not at all; the backbone is named, not copied.

    about: `method`, and what else config.json is to say. Raises FileExistsError where the folder is there.
    """
    with atomic_folder(folder) as partial:
        digests = {"model.safetensors": write_tensors(partial / "model.safetensors", model.own.state_dict())}
        write_bytes(partial / "tokenizer.json", (Path(backbone_folder) / "tokenizer.json").read_bytes())
        write_json(partial / "metrics.json", metrics)
        digests |= {name: file_sha256(partial / name) for name in ("tokenizer.json", "metrics.json")}
        config = about | {
            "format_version": FORMAT_VERSION,
            "backbone": {
                "folder": str(Path(backbone_folder).resolve()),
                "sha256": backbone_sha256(backbone_folder),
            },
            "exits": list(model.exits),
            "lora": {"rank": model.rank, "alpha": model.alpha},
            "rule": rule.to_dict(),
            "files": digests,
        }
        write_json(partial / "config.json", config)


class DecoderRun(NamedTuple):
    """A loaded run of a decoder."""

    config: dict
    model: ExitDecoder
    tokenizer: Tokenizer
    rule: Rule


def load_decoder_run(
    folder: str | Path, models: dict[str, type[ExitDecoder]], backbone_folder: str | Path | None = None
) -> DecoderRun:
    """Read what save_decoder_run wrote, with its backbone. models: method -> class of the model.

    backbone_folder: where the backbone is now, if not where it was. Raises FileNotFoundError where a folder is missing,
    ValueError for damage, for another method, and for the run of another backbone.
    """
    folder = Path(folder)
    config = read_json(folder / "config.json", signed="format_version")
    if config.get("format_version") != FORMAT_VERSION or config.get("method") not in models:
        raise ValueError(
            f"{folder}: expected a decoder's run of format_version {FORMAT_VERSION} and method "
            f"{' or '.join(models)}, found {config.get('format_version')!r} and {config.get('method')!r}"
        )
    for name in ("tokenizer.json", "metrics.json"):
        if not (folder / name).is_file() or file_sha256(folder / name) != config["files"][name]:
            raise ValueError(f"{folder / name}: missing or damaged; train the run again")
    source = config["backbone"]
    backbone_folder = Path(backbone_folder or source["folder"])
    if not backbone_folder.is_dir():
        raise FileNotFoundError(f"{folder}: its backbone was in {backbone_folder}, nothing is there; say where it is")
    if backbone_sha256(backbone_folder) != source["sha256"]:
        raise ValueError(
            f"{folder}: was trained on another backbone than the one in {backbone_folder}; give that one with --model"
        )
    model = models[config["method"]](load_backbone(backbone_folder), tuple(config["exits"]), **config["lora"])
    tensors = read_tensors(folder / "model.safetensors", config["files"]["model.safetensors"])
    load_strict(model.own, tensors, {name: (name,) for name in model.own.state_dict()}, folder / "model.safetensors")
    model.unfold()
    model.fold()
    rule = rule_from_dict(config["rule"])
    rule.check(len(model.exits))
    tokenizer = Tokenizer.from_folder(folder, model.decoder.config.max_tokens)
    return DecoderRun(config, model.eval(), tokenizer, rule)
