"""Safetensors files: those of a checkpoint, and those that mini_ee writes, with a checksum in the metadata."""

import hashlib
import json
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_ee.lab.backbones.backbone import some_of
from mini_ee.lab.data.files import check_regular, read_json, write_bytes

CONVERT = (
    'python -c "from glob import glob; from torch import load; from safetensors.torch import save_file; '
    "save_file({name: tensor.contiguous().clone() for file in glob('DIR/pytorch_model*.bin') "
    "for name, tensor in load(file, weights_only=True).items()}, 'DIR/model.safetensors')\""
)
"""A command that converts a .bin checkpoint to safetensors."""


def read_checkpoint(folder: Path) -> dict[str, Tensor]:
    """All tensors of model.safetensors, or of the shards that its index names. Raises ValueError if damaged."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").exists() or not index.exists():  # in the order of transformers
        return read_tensors(folder / "model.safetensors")
    weight_map = read_json(index).get("weight_map")
    weight_map = weight_map if isinstance(weight_map, dict) else {}
    shards = list(weight_map.values())
    if not shards or not all(isinstance(shard, str) and shard == Path(shard).name for shard in shards):
        raise ValueError(f"{index}: expected a weight_map from tensor names to files in this folder")
    tensors: dict[str, Tensor] = {}
    for shard in sorted(set(shards)):
        shard_tensors = read_tensors(folder / shard)
        differ = sorted(shard_tensors.keys() ^ {name for name, file in weight_map.items() if file == shard})
        if differ:
            raise ValueError(f"{index}: the index and {shard} name different tensors ({some_of(differ)})")
        tensors |= shard_tensors
    return tensors


def shapes_of(folder: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors of a folder, from the headers of its files. Raises FileNotFoundError if it has none."""
    paths = sorted(folder.glob("*.safetensors"))
    if not paths:
        read_tensors(folder / "model.safetensors")
    shapes: dict[str, tuple[int, ...]] = {}
    for path in paths:
        try:
            with safe_open(path, "pt") as file:
                shapes |= {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}
        except (SafetensorError, OSError) as error:
            raise _damaged(path, error) from None
    return shapes


def _damaged(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: truncated or damaged ({error}); fetch or write it again")


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
        raise _damaged(path, error) from None
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
