"""The classifier of a SetFit folder: a sentence encoder whose embedding a logistic regression reads.

SetFit saves the head with joblib, which runs code as it is read. Here it is read from model_head.safetensors, which the
line in `export_line` makes of it: coef (C, d) or (1, d) for two classes, intercept, and the classes in the metadata.
"""

import json
import shlex
from pathlib import Path
from typing import NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mini_ee.lab.backbones.backbone import FineTunedHead, Layout
from mini_ee.lab.backbones.sentence_encoder import sentence_modules
from mini_ee.lab.backbones.tensor_files import read_tensors
from mini_ee.lab.data.files import read_json
from mini_ee.lab.data.sentence_files import SETFIT_CONFIG, SETFIT_EXPORTED, SETFIT_SAVED
from mini_ee.lab.data.values import shortened
from mini_ee.lab.errors import WrongArguments

EXPORT = (
    "import joblib, json, sys; from safetensors.numpy import save_file; folder = sys.argv[1]; "
    "head = joblib.load(folder + '/model_head.pkl'); kind = type(head).__name__; of_torch = kind == 'SetFitHead'; "
    "get = lambda part: getattr(head.linear, part).detach().numpy() / (head.temperature + head.eps); "
    "maps = (get('weight'), get('bias')) if of_torch else (head.coef_, head.intercept_); "
    "tensors = {name: part.astype('float32', order='C') for name, part in zip(('coef', 'intercept'), maps)}; "
    "classes = list(range(head.out_features)) if of_torch else head.classes_.tolist(); "
    "about = {name: str(getattr(head, name, None)) for name in ('solver', 'multi_class', 'multitarget')}; "
    "about.update(kind=kind, classes=json.dumps(classes)); "
    "save_file(tensors, folder + '/model_head.safetensors', about)"
)


class LogisticHead(NamedTuple):
    """weight (C, d) and bias (C,) of the logits, the names of the classes, and whether embeddings have length 1."""

    weight: Tensor
    bias: Tensor
    labels: tuple[str, ...]
    pool: str
    normalize: bool


def export_line(folder: Path) -> str:
    """The command that writes model_head.safetensors."""
    return f'python -c "{EXPORT}" {shlex.quote(str(folder))}'


def logistic_head(folder: Path) -> LogisticHead:
    """The head of a SetFit folder. Raises WrongArguments for one that is not exported, or not a logistic regression."""
    config = read_json(folder / SETFIT_CONFIG) if (folder / SETFIT_CONFIG).is_file() else {}
    known = {"normalize_embeddings": bool, "labels": list | None}
    for key, value in config.items():
        if value not in (None, False) and not (key in known and isinstance(value, known[key])):
            raise WrongArguments(
                f"{folder / SETFIT_CONFIG}: {key} {shortened(value)}: not supported for a SetFit classifier"
            )
    path = folder / SETFIT_EXPORTED
    if not path.is_file():
        raise WrongArguments(
            f"{folder}: a SetFit model, whose classifier is in {SETFIT_SAVED}, which is not read because it can run "
            f"code; if you trust the file, this line unpickles it and writes {SETFIT_EXPORTED}: {export_line(folder)}"
        )
    encoder = sentence_modules(folder)
    after = [module["kind"] for module in encoder.modules]
    prompt = encoder.prompts.get(encoder.default_prompt or "")
    for what, present in (("a Dense module", "dense" in after), ("truncate_dim", encoder.size), ("a prompt", prompt)):
        if present:
            raise WrongArguments(f"{folder}: {what} before the classifier of a SetFit model: not supported")
    if encoder.lower:
        raise WrongArguments(f"{folder}: do_lower_case with the classifier of a SetFit model: not supported")
    weight, bias, labels = _read(path, config.get("labels"))
    return LogisticHead(weight, bias, labels, encoder.pool, bool(after or config.get("normalize_embeddings")))


def _read(path: Path, labels: list | None) -> tuple[Tensor, Tensor, tuple[str, ...]]:
    tensors = read_tensors(path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
        classes = json.loads(metadata.get("classes", "null"))
    except (SafetensorError, ValueError) as error:
        raise ValueError(f"{path}: damaged ({error}); export it again") from None
    coef, intercept = (tensors.get(name, torch.zeros(0)).float() for name in ("coef", "intercept"))
    rows = 1 if isinstance(classes, list) and len(classes) == 2 and len(coef) == 1 else len(classes or ())
    if coef.dim() != 2 or coef.shape[0] != rows or intercept.shape != (rows,):
        raise WrongArguments(f"{path}: expected coef, intercept and classes of a logistic regression; export it again")
    one_of_all = metadata.get("solver") == "liblinear" or metadata.get("multi_class") == "ovr"
    if metadata.get("kind") not in ("LogisticRegression", "SetFitHead") or metadata.get("multitarget") == "True":
        kind = "several labels at once" if metadata.get("multitarget") == "True" else metadata.get("kind")
        raise WrongArguments(f"{path}: expected a logistic regression of one label, found {kind}: not supported")
    if one_of_all and len(classes) > 2:
        raise WrongArguments(
            f"{path}: expected one softmax over all classes, found one against the rest: not supported"
        )
    if rows == 1:  # sigmoid(z) is the second value of softmax(0, z)
        coef, intercept = (torch.cat((torch.zeros_like(part), part)) for part in (coef, intercept))
    numbered = bool(labels) and all(isinstance(label, int) for label in classes)
    if numbered and not all(0 <= label < len(labels or ()) for label in classes):
        raise WrongArguments(f"{path}: expected a label in {SETFIT_CONFIG} for each class, found {shortened(labels)}")
    names = tuple(str(labels[label]) if labels and numbered else str(label) for label in classes)
    return coef, intercept, names


def setfit_classifier(folder: Path, plain: dict[str, Tensor], layout: Layout) -> FineTunedHead | None:
    """The head as that of a fine-tuned classifier; None if it is not exported.

    plain: the tensors of the encoder, with names without prefix. Raises WrongArguments as `logistic_head`.
    """
    if layout.head is None or not (folder / SETFIT_EXPORTED).is_file():
        return None
    head = logistic_head(folder)
    weights = {"out.weight": head.weight, "out.bias": head.bias}
    if layout.head.norm is not None:
        weights |= {
            f"norm.{leaf}": plain[name].float()
            for leaf in ("weight", "bias")
            if (name := f"{layout.head.norm}.{leaf}") in plain
        }
    fitted = layout.head._replace(dense=None, dense_norm=None, pool=head.pool, pool_key=None, normalize=head.normalize)
    return FineTunedHead(fitted, weights)
