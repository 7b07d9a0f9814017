"""Requests and responses in the formats of other servers, so that their clients work with an exported folder. No torch.

    POST /predict         text-embeddings-inference, for a classifier: {"inputs": "A film."}, a pair ["a", "b"], or
                          several [["A film."], ["A book."]]; raw_scores -> [{"score": 0.98, "label": "positive"}, ...],
                          the most likely label first; for several inputs a list of these
    POST /embed           text-embeddings-inference, for a sentence encoder: {"inputs": "A film."} or a list of texts;
                          normalize (default true), dimensions -> [[0.1, ...], ...]
    POST /v1/embeddings   OpenAI: {"input": "A film."} or a list of texts; encoding_format float or base64, dimensions
                          -> {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [...]}], ...}

Both of text-embeddings-inference take truncate: with false a text that would be cut is refused. Fields without meaning
here, such as `model` and `user`, are not read. With `dimensions` an embedding is cut and scaled to length 1.
"""

import base64
from collections.abc import Callable
from typing import NamedTuple

import numpy as np

from mini_ee.confidence import log_softmax, sigmoid
from mini_ee.data.values import shortened
from mini_ee.export.runtime import Runtime

Rows = list[tuple[str, ...]]


class Format(NamedTuple):
    """How a request is read and answered."""

    rows: Callable[[Runtime, dict], Rows]  # raises ValueError for a request that cannot be answered
    reply: Callable[[Runtime, dict, Rows, list], dict | list]
    """(runtime, fields of the request, its rows, their answers) -> the body of the response, for json.dumps."""


def formats_of(runtime: Runtime) -> dict[str, Format]:
    """Path -> its Format, for the kind of this runtime."""
    if runtime.embeds:
        return {"/embed": Format(_embed_rows, _embed_reply), "/v1/embeddings": Format(_openai_rows, _openai_reply)}
    return {} if runtime.generates else {"/predict": Format(_predict_rows, _predict_reply)}


# ---- text-embeddings-inference ----


def _predict_rows(runtime: Runtime, fields: dict) -> Rows:
    inputs = fields.get("inputs")
    several = _is_batch(inputs)
    found = inputs if several else [inputs]
    if not isinstance(found, list) or not found:
        raise ValueError(f"expected inputs as a text, a pair of texts, or a list of these, found {shortened(inputs)}")
    rows = [tuple(each) if isinstance(each, list) else (each,) for each in found]
    _flag(fields, "raw_scores", False)
    return _uncut(runtime, fields, rows)


def _predict_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list) -> list:
    found = [_scores(runtime, answer.logits, fields.get("raw_scores") is True) for answer in answers]
    return found if _is_batch(fields["inputs"]) else found[0]


def _is_batch(inputs: object) -> bool:
    """Whether these are several inputs: then each is a list."""
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], list)


def _scores(runtime: Runtime, logits: np.ndarray, raw: bool) -> list[dict]:
    """Score and label of each class, the most likely first. A regression has one raw score."""
    names = runtime.label_names
    scores = logits
    if names and not raw:
        scores = sigmoid(logits) if runtime.multi_label else np.exp(log_softmax(logits[None])[0])
    order = np.argsort(-scores, kind="stable")
    return [{"score": float(scores[at]), "label": names[at] if names else "LABEL_0"} for at in order]


def _embed_rows(runtime: Runtime, fields: dict) -> Rows:
    _flag(fields, "normalize", True)
    return _uncut(runtime, fields, _texts(runtime, fields, "inputs"))


def _embed_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list) -> list:
    normalize = fields.get("normalize") is not False
    return _vectors(answers, fields.get("dimensions"), normalize).tolist()


def _uncut(runtime: Runtime, fields: dict, rows: Rows) -> Rows:
    """The rows. Raises ValueError if the request allows no cut text, and one would be cut."""
    for name, usual in (("truncation_direction", runtime.tokenizer.side), ("prompt_name", None)):
        value = fields.get(name)
        if value is not None and str(value).lower() != usual:
            raise ValueError(f"expected {name} {usual or 'left out'}, found {shortened(value)}: not supported")
    if not _flag(fields, "truncate", True) and any(map(runtime.check, rows)):
        most = runtime.config["max_length"]
        raise ValueError(f"expected at most {most} tokens in each text, found more; give truncate as true")
    return rows


# ---- OpenAI ----


def _openai_rows(runtime: Runtime, fields: dict) -> Rows:
    kind = fields.get("encoding_format", "float")
    if kind not in ("float", "base64"):
        raise ValueError(f"expected encoding_format float or base64, found {shortened(kind)}")
    return _texts(runtime, fields, "input")


def _openai_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list) -> dict:
    vectors = _vectors(answers, fields.get("dimensions"), False)
    packed = fields.get("encoding_format") == "base64"
    values = [base64.b64encode(each.astype("<f4").tobytes()).decode() if packed else each.tolist() for each in vectors]
    data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
    tokens = sum(map(len, runtime.encode(rows).ids))
    usage = {"prompt_tokens": tokens, "total_tokens": tokens}
    return {"object": "list", "data": data, "model": runtime.folder.name, "usage": usage}


# ---- Both ----


def _texts(runtime: Runtime, fields: dict, key: str) -> Rows:
    """The texts of a request for embeddings, and a check of `dimensions`."""
    given, size = fields.get(key), runtime.config["num_labels"]
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected {key} as a text or a list of texts, found {shortened(given)}")
    dimensions = fields.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= size):
        raise ValueError(f"expected dimensions from 1 to {size}, found {shortened(dimensions)}")
    return [(text,) for text in texts]


def _vectors(answers: list, dimensions: int | None, normalize: bool) -> np.ndarray:
    """(N, d) or (N, dimensions) float32; cut ones are scaled to length 1, others if `normalize`."""
    found = np.stack([answer.embedding for answer in answers])[:, :dimensions]
    if not normalize and dimensions is None:
        return found
    return found / np.maximum(np.linalg.norm(found, axis=1, keepdims=True), np.float32(1e-12))


def _flag(fields: dict, name: str, usual: bool) -> bool:
    """A field that is true, false or left out. Raises ValueError for another value."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"expected {name} as true or false, found {shortened(value)}")
    return usual if value is None else value
