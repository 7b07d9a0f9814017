"""Whether a folder is read as its own library reads it: transformers, or sentence-transformers for an encoder.

Some of the user's texts go through the original and through our reading of it. Nothing else imports these libraries.
"""

import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import torch

from mini_ee.lab.backbones.fine_tuned import token_kind_of
from mini_ee.lab.backbones.own_head import CLASSIFIES, TOKEN_HEADS
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.token_tasks import ENDS

COMPARED, LARGEST = 64, 1e-3
"""Texts that are compared, and the largest difference of an output; `_allowed` scales it."""

ADAPTER, SETFIT = "adapter_config.json", "config_setfit.json"

Row = tuple[str, ...]


def compared_texts(texts: Sequence[Row]) -> list[Row]:
    """At most COMPARED different texts: a quarter each of the longest, the shortest, those with most different
    characters, and those with most capitals and characters beyond ASCII; then others, in the order of the file.
    """
    different = list(dict.fromkeys(texts))
    joined = {row: "".join(row) for row in different}
    orders = (
        lambda row: -len(joined[row]),
        lambda row: len(joined[row]),
        lambda row: -len(set(joined[row])),
        lambda row: -sum(letter.isupper() or not letter.isascii() for letter in joined[row]),
    )
    chosen = [row for order in orders for row in sorted(different, key=order)[: COMPARED // len(orders)]]
    return list(dict.fromkeys(chosen + different))[:COMPARED]


def compare(
    model: Path,
    texts: Sequence[Row],
    outputs: Sequence[np.ndarray],
    limit: int,
    encodes: bool,
    prompt_name: str | None = None,
) -> str:
    """The largest difference between the original's outputs for these texts and ours, in a sentence.

    outputs: (C,) of each text, ours: the logits of a classifier, or the embedding of an encoder; or the logits of its
    tokens, (T, C). limit: the number of tokens that the model can read. prompt_name: of an encoder (None: its default
    one). Without the library, or if it cannot open the folder, the sentence says so.
    Raises WrongArguments, with the text, if an output differs by more than `_allowed`.
    """
    library = "sentence-transformers" if encodes else "peft" if (model / ADAPTER).is_file() else "transformers"
    if (model / SETFIT).is_file():
        return "Not compared with setfit, which trained this folder."
    try:
        with _quiet():
            module = import_module(library.replace("-", "_"))
    except ImportError:
        return f"Not compared with {library} (pip install 'mini-ee[hf]')."
    version = f"{library} {getattr(module, '__version__', '')}".rstrip()
    read = {"sentence-transformers": partial(_embeddings, prompt_name), "peft": _adapted, "transformers": _logits}[
        library
    ]
    try:
        with _quiet(), torch.inference_mode():
            expected = read(module, model, texts, limit, outputs[0].shape[-1])
    except Exception as error:  # of another library: any
        reason = str(error).strip().partition("\n")[0]
        return f"Not compared with {library}: {version} cannot read this folder ({shortened(reason or repr(error))})."
    for text, theirs, ours in zip(texts, expected, outputs, strict=True):
        if theirs.shape != ours.shape:
            mismatch = f"{theirs.shape[-1]} outputs for a text, found {ours.shape[-1]} here"
            if theirs.ndim > 1 and len(theirs) != len(ours):
                mismatch = f"{len(theirs)} tokens, found {len(ours)} here for {shortened(text)}"
            raise WrongArguments(f"{model}: expected, as from {version}, {mismatch}; nothing was trained")
    difference = np.array([abs(theirs - ours).max() for theirs, ours in zip(expected, outputs)])
    if not (difference <= _allowed(np.concatenate([np.atleast_2d(output) for output in expected]))).all():
        worst = int(np.nan_to_num(difference, nan=np.inf).argmax())
        raise WrongArguments(
            f"{model}: is read in another way than by {version}: outputs differ by {difference[worst]:.2g} for "
            f"{shortened(texts[worst][0] if len(texts[worst]) == 1 else texts[worst])}; nothing was trained; save the "
            f"folder again with its library, or report the difference"
        )
    return f"Equal to {library} on {len(texts)} of your texts (largest difference {difference.max():.1g})."


def _allowed(expected: np.ndarray) -> float:
    """LARGEST, of outputs (N, C) that lie between 0 and 1 and differ from text to text.

    It is smaller for a model whose outputs hardly differ, because there a text that is read wrongly changes little, but
    not below what rounding can change; and it is larger for large outputs.
    """
    size, spread = abs(expected).max(), np.ptp(expected, axis=0).max()
    return float(LARGEST * min(max(1, size), max(spread, size / 100, 0.01)))


def _auto_model(module: ModuleType, model: Path) -> Any:
    """The class of transformers that opens a model with its head."""
    return getattr(module, "AutoModel" + TOKEN_HEADS.get(token_kind_of(model), CLASSIFIES))


def _logits(module: ModuleType, model: Path, texts: Sequence[Row], limit: int, outputs: int) -> list[np.ndarray]:
    """The logits, float32, of a fine-tuned model."""
    tokenizer = module.AutoTokenizer.from_pretrained(str(model), local_files_only=True)
    network = _auto_model(module, model).from_pretrained(str(model), local_files_only=True)
    return _of_network(network, tokenizer, texts, limit)


def _adapted(module: ModuleType, model: Path, texts: Sequence[Row], limit: int, outputs: int) -> list[np.ndarray]:
    """The same of an adapter of peft, on the base model that it names."""
    transformers = import_module("transformers")
    base = module.PeftConfig.from_pretrained(str(model)).base_model_name_or_path
    source = model if (model / "tokenizer_config.json").is_file() else base
    tokenizer = transformers.AutoTokenizer.from_pretrained(str(source), local_files_only=True)
    network = _auto_model(transformers, model).from_pretrained(base, local_files_only=True, num_labels=outputs)
    return _of_network(module.PeftModel.from_pretrained(network, str(model)), tokenizer, texts, limit)


def _of_network(network, tokenizer, texts: Sequence[Row], limit: int) -> list[np.ndarray]:
    """The logits of each text, (C,) or (T, C): text by text, so nothing depends on padding."""
    network, most = network.float().eval(), min(limit, tokenizer.model_max_length)
    rows = (tokenizer(*row, truncation=True, max_length=most, return_tensors="pt") for row in texts)
    return [_of_outputs(network(**row)).float().numpy(force=True)[0] for row in rows]


def _of_outputs(outputs) -> torch.Tensor:
    """The logits, or those of start and end side by side: (B, C) or (B, T, C)."""
    ends = [getattr(outputs, f"{end}_logits", None) for end in ENDS]
    return outputs.logits if ends[0] is None else torch.stack(ends, -1)


def _embeddings(
    prompt_name: str | None, module: ModuleType, model: Path, texts: Sequence[Row], limit: int, outputs: int
) -> np.ndarray:
    """The embeddings (N, d) float32 of a sentence encoder, text by text."""
    encoder = module.SentenceTransformer(str(model), device="cpu", local_files_only=True).float()
    single = [encoder.encode([text], prompt_name=prompt_name, show_progress_bar=False) for (text,) in texts]
    return np.concatenate(single).astype(np.float32)


@contextmanager
def _quiet() -> Iterator[None]:
    """Without the warnings, reports and progress bars of transformers."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            logging = import_module("transformers").utils.logging
        except ImportError:
            logging = None
        if logging is None:
            yield
            return
        verbosity, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
        logging.set_verbosity_error()
        logging.disable_progress_bar()
        try:
            yield
        finally:
            logging.set_verbosity(verbosity)
            if bars:
                logging.enable_progress_bar()
