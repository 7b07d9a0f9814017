"""Requests and responses in the formats of other servers, so that their clients work with an exported folder. No torch.

    POST /predict         text-embeddings-inference, for a classifier: {"inputs": "A film."}, a pair ["a", "b"], or
                          several [["A film."], ["A book."]]; raw_scores -> [{"score": 0.98, "label": "positive"}, ...],
                          the most likely label first; for several inputs a list of these. Scores are probabilities;
                          that of a model with one label is the sigmoid, and the number itself is its raw score
    POST /predict_tokens  text-embeddings-inference, for a token classifier: {"inputs": ["Ada lives in Paris."]} or one
                          text; raw_scores, aggregation_strategy none or simple, ignore_labels (default ["O"])
                          -> for each text [{"token": "Paris", "token_id": 3000, "start": 13, "end": 18, "results":
                          {"B-LOC": 0.99}}, ...]; with raw_scores those of all labels
    POST /rerank          text-embeddings-inference, for pairs with one label: {"query": "A film?", "texts": [...]};
                          raw_scores, return_text -> [{"index": 2, "score": 0.98}, ...], the best text first
    POST /v1/rerank       Jina and Cohere, whose second client has /v2/rerank: {"query": "A film?", "documents": [...]},
                          each a text or {"text": ...}; top_n, return_documents (default true)
                          -> {"model": ..., "results": [{"index": 2, "relevance_score": 0.98, "document": {...}}], ...}
    POST /embed           text-embeddings-inference, for a sentence encoder: {"inputs": "A film."} or a list of texts;
                          normalize (default true), dimensions -> [[0.1, ...], ...]
    POST /v1/embeddings   OpenAI: {"input": "A film."} or a list of texts; encoding_format float or base64, dimensions
                          -> {"object": "list", "data": [{"object": "embedding", "index": 0, "embedding": [...]}], ...}

    GET /v1/models        OpenAI: the models             GET /info   text-embeddings-inference: limits and labels

Those of text-embeddings-inference take truncate: with false a text that would be cut is refused. The fields HARMLESS
are not read; another field that is not known here is refused, because it could change the answer elsewhere. With
`dimensions` an embedding is cut and scaled to length 1. Those of embeddings take prompt_name, a prompt of the encoder;
without it a text gets the default prompt. In place of a text, they take the token ids of this model's tokenizer.
"""

import base64
from collections.abc import Callable, Container
from typing import NamedTuple

import numpy as np

from mini_ee import __version__
from mini_ee.lab.confidence import sigmoid
from mini_ee.lab.data.files import MANIFEST
from mini_ee.lab.data.rankings import best_first
from mini_ee.lab.data.sentence_prompts import Prompted, with_prompt
from mini_ee.lab.data.values import shortened
from mini_ee.lab.export.runtime import Answer, Runtime
from mini_ee.lab.token_tasks import SPAN, TokenLabel
from mini_ee.rules import log_softmax

Rows = list[tuple[str, ...]]

HARMLESS = {"model", "user", "id", "idx", "index", "label", "metadata", "priority"}  # fields that change no answer

POOLING = {"first": "cls", "mean": "mean", "last": "last_token"}  # by the names of text-embeddings-inference


class Format(NamedTuple):
    """How a request is read and answered."""

    fields: tuple[str, ...]  # that a request may have
    rows: Callable[[Runtime, dict], Rows]  # raises ValueError for a request that cannot be answered
    reply: Callable[[Runtime, dict, Rows, list, int], dict | list]
    """(runtime, fields of the request, its rows, their answers, their tokens) -> the body of the response."""


def formats_of(runtime: Runtime) -> dict[str, Format]:
    """Path -> its Format, for the kind of this runtime."""
    if runtime.embeds:
        tei = ("inputs", "normalize", "dimensions", *CUT)
        openai = Format(("input", "encoding_format", "dimensions", "prompt_name"), _openai_rows, _openai_reply)
        return {"/embed": Format(tei, _embed_rows, _embed_reply), "/v1/embeddings": openai}
    if runtime.generates or runtime.token_task is not None and runtime.token_task.kind == SPAN:
        return {}
    if runtime.token_task is not None:
        fields = ("inputs", "raw_scores", "aggregation_strategy", "ignore_labels", *CUT)
        return {"/predict_tokens": Format(fields, _tokens_rows, _tokens_reply)}
    return {
        "/predict": Format(("inputs", "raw_scores", *CUT), _predict_rows, _predict_reply),
        "/rerank": Format(("query", "texts", "raw_scores", "return_text", *CUT), _rerank_rows, _rerank_reply),
        "/v1/rerank": (jina := Format(("query", "documents", "top_n", "return_documents"), _jina_rows, _jina_reply)),
        "/v2/rerank": jina,  # the path of Cohere's second client
    }


def check_fields(fields: dict, known: Container[str]) -> None:
    """Raises ValueError for a field that is not known, and not HARMLESS or empty."""
    for name, value in fields.items():
        if name not in known and name not in HARMLESS and value not in (None, False, "", [], {}):
            raise ValueError(f"the field {name[:40]!r} is not supported here, found {shortened(value)}; leave it out")


def model_of(runtime: Runtime) -> dict:
    """The model as OpenAI's GET /v1/models shows it."""
    created = int((runtime.folder / MANIFEST).stat().st_mtime)
    return {"id": runtime.name, "object": "model", "created": created, "owned_by": "mini_ee"}


def info_of(runtime: Runtime, max_open: int, batch: int) -> dict:
    """The model as text-embeddings-inference's GET /info shows it."""
    longest = runtime.config["max_length"]
    labels = {str(at): name for at, name in enumerate(runtime.label_names or ["LABEL_0"])}
    named = {"id2label": labels, "label2id": {name: int(at) for at, name in labels.items()}}
    kind = "classifier" if len(labels) > 1 else "reranker"
    pooling = runtime.config.get("pool")
    return {
        "model_id": runtime.name,
        "model_sha": runtime.model_id,
        "model_dtype": runtime.config["precision"],
        "model_type": {"embedding": {"pooling": POOLING.get(pooling, pooling)}} if runtime.embeds else {kind: named},
        "max_concurrent_requests": max_open,
        "max_input_length": longest,
        "max_batch_tokens": longest * batch,
        "max_batch_requests": batch,
        "max_client_batch_size": max_open,
        "auto_truncate": True,
        "tokenization_workers": 1,
        "version": __version__,
        "sha": None,
        "docker_label": None,
    }


# ---- text-embeddings-inference ----

CUT = ("truncate", "truncation_direction", "prompt_name")


def _predict_rows(runtime: Runtime, fields: dict) -> Rows:
    inputs = fields.get("inputs")
    rows = [tuple(row) if isinstance(row, list) else (row,) for row in (inputs if _is_batch(inputs) else [inputs])]
    _flag(fields, "raw_scores", False)
    return _uncut(runtime, fields, rows)


def _predict_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list, tokens: int) -> list:
    scores = [_scores(runtime, answer.logits, fields.get("raw_scores") is True) for answer in answers]
    return scores if _is_batch(fields["inputs"]) else scores[0]


def _is_batch(inputs: object) -> bool:
    """Whether these are several inputs: then each is a list."""
    return isinstance(inputs, list) and bool(inputs) and isinstance(inputs[0], list)


def _scores(runtime: Runtime, logits: np.ndarray, raw: bool) -> list[dict]:
    """Score and label of each class, the most likely first."""
    names, scores = runtime.label_names or ["LABEL_0"], logits
    if not raw:
        each_alone = runtime.multi_label or len(names) == 1
        scores = sigmoid(logits) if each_alone else np.exp(log_softmax(logits[None])[0])
    order = np.argsort(-scores, kind="stable")
    return [{"score": float(scores[at]), "label": names[at]} for at in order]


def _tokens_rows(runtime: Runtime, fields: dict) -> Rows:
    inputs = fields.get("inputs")
    texts = inputs if isinstance(inputs, list) else [inputs]
    rows = [tuple(row) if isinstance(row, list) else (row,) for row in texts]
    strategy, ignored = fields.get("aggregation_strategy") or "none", fields.get("ignore_labels") or []
    if strategy not in ("none", "simple"):
        raise ValueError(f"expected aggregation_strategy none or simple, found {shortened(strategy)}: not supported")
    if not isinstance(ignored, list) or not all(isinstance(label, str) for label in ignored):
        raise ValueError(f"expected ignore_labels as a list of labels, found {shortened(ignored)}")
    if _flag(fields, "raw_scores", False) and strategy == "simple":
        raise ValueError(
            "expected raw_scores with aggregation_strategy none: a group of tokens has no scores of its own"
        )
    return _uncut(runtime, fields, rows)


def _tokens_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list, tokens: int) -> list:
    given, raw = fields.get("ignore_labels"), fields.get("raw_scores") is True
    ignored = {"O"} if given is None else set(given)
    simple = fields.get("aggregation_strategy") == "simple"
    return [
        _groups(answer.label, row[0], ignored) if simple else _tokens(runtime, answer, row, ignored, raw)
        for row, answer in zip(rows, answers)
    ]


def _tokens(runtime: Runtime, answer: Answer, row: tuple[str], ignored: set[str], raw: bool) -> list[dict]:
    """Each token whose label is not ignored."""
    (encoded,), names = runtime.encode([row]).ids, runtime.label_names
    counted = runtime.token_task.counted(encoded[None], np.ones((1, len(encoded)), np.int64))[0]
    tokens = []
    for token_label, id, logits in zip(answer.label, encoded[counted].tolist(), answer.logits[: len(encoded)][counted]):
        results = dict(zip(names, logits.tolist())) if raw else {token_label.label: token_label.score}
        if token_label.label not in ignored:
            place = {"token": token_label.token, "token_id": id, "start": token_label.start, "end": token_label.end}
            tokens.append(place | {"results": results})
    return tokens


def _groups(labels: list[TokenLabel], text: str, ignored: set[str]) -> list[dict]:
    """Neighbours with the same entity as one: transformers' aggregation "simple". A label B-X begins a new X."""
    groups: list[tuple[str, list[TokenLabel]]] = []
    for token_label in labels:
        begins, entity = token_label.label.startswith("B-"), token_label.label.removeprefix("B-").removeprefix("I-")
        if groups and groups[-1][0] == entity and not begins:
            groups[-1][1].append(token_label)
        else:
            groups.append((entity, [token_label]))
    return [
        {"token": text[some[0].start : some[-1].end], "token_id": 0, "start": some[0].start, "end": some[-1].end}
        | {"results": {entity: sum(token_label.score for token_label in some) / len(some)}}
        for entity, some in groups
        if entity not in ignored
    ]


def _rerank_rows(runtime: Runtime, fields: dict) -> Rows:
    _flag(fields, "raw_scores", False)
    _flag(fields, "return_text", False)
    return _uncut(runtime, fields, _pairs(runtime, fields, "texts", fields.get("texts")))


def _rerank_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list, tokens: int) -> list:
    text = fields.get("return_text") is True
    ranked = _ranked(answers, fields.get("raw_scores") is True)
    return [{"index": at} | ({"text": rows[at][1]} if text else {}) | {"score": score} for at, score in ranked]


def _pairs(runtime: Runtime, fields: dict, key: str, texts: object) -> Rows:
    """The query with each of the texts."""
    labels, query = runtime.config["num_labels"], fields.get("query")
    if labels != 1 or runtime.num_texts != 2:
        actual = f"{labels} of {'pairs' if runtime.num_texts == 2 else 'single texts'}"
        raise ValueError(f"expected a model that gives pairs of texts one label, found {actual}; use /predict")
    if not isinstance(query, str):
        raise ValueError(f"expected query as a text, found {shortened(query)}")
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) for text in texts):
        raise ValueError(f"expected {key} as a list of texts, found {shortened(fields.get(key))}")
    return [(query, text) for text in texts]


def _ranked(answers: list, raw: bool) -> list[tuple[int, float]]:
    """The index and the score of each text, the best first."""
    logits = np.array([answer.logits[0] for answer in answers])
    scores = (logits if raw else sigmoid(logits)).tolist()
    return [(at, scores[at]) for at in best_first(logits).tolist()]


def _embed_rows(runtime: Runtime, fields: dict) -> Rows:
    _flag(fields, "normalize", True)
    return _uncut(runtime, fields | {"prompt_name": None}, _texts(runtime, fields, "inputs"))


def _embed_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list, tokens: int) -> list:
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


# ---- OpenAI, Jina ----


def _openai_rows(runtime: Runtime, fields: dict) -> Rows:
    kind = fields.get("encoding_format")
    if kind not in (None, "float", "base64"):
        raise ValueError(f"expected encoding_format float or base64, found {shortened(kind)}")
    return _texts(runtime, fields, "input")


def _openai_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list, tokens: int) -> dict:
    vectors = _vectors(answers, fields.get("dimensions"), False)
    packed = fields.get("encoding_format") == "base64"
    values = [
        base64.b64encode(vector.astype("<f4").tobytes()).decode() if packed else vector.tolist() for vector in vectors
    ]
    data = [{"object": "embedding", "index": index, "embedding": value} for index, value in enumerate(values)]
    return {"object": "list", "data": data, "model": runtime.name, "usage": _usage(tokens)}


def _jina_rows(runtime: Runtime, fields: dict) -> Rows:
    top = fields.get("top_n")
    if top is not None and (type(top) is not int or top < 1):
        raise ValueError(f"expected top_n as a whole number above 0, found {shortened(top)}")
    _flag(fields, "return_documents", True)
    texts = fields.get("documents")
    if isinstance(texts, list):
        texts = [text.get("text") if isinstance(text, dict) else text for text in texts]
    return _pairs(runtime, fields, "documents", texts)


def _jina_reply(runtime: Runtime, fields: dict, rows: Rows, answers: list, tokens: int) -> dict:
    shown = fields.get("return_documents") is not False
    results = [
        {"index": at, "relevance_score": score} | ({"document": {"text": rows[at][1]}} if shown else {})
        for at, score in _ranked(answers, False)[: fields.get("top_n")]
    ]
    return {"object": "list", "model": runtime.name, "results": results, "usage": _usage(tokens)}


def _usage(tokens: int) -> dict[str, int]:
    return {"prompt_tokens": tokens, "total_tokens": tokens}


# ---- Both ----


def _texts(runtime: Runtime, fields: dict, key: str) -> Rows:
    """The texts of a request for embeddings, with the prompt of `prompt_name`, and a check of `dimensions`."""
    given, size = fields.get(key), runtime.config["num_labels"]
    texts = [given] if isinstance(given, str) or _are_ids(given) else given
    if not isinstance(texts, list) or not texts or not all(isinstance(text, str) or _are_ids(text) for text in texts):
        raise ValueError(f"expected {key} as a text, a list of texts, or token ids, found {shortened(given)}")
    if any(not isinstance(text, str) for text in texts):
        if fields.get("prompt_name") is not None:
            raise ValueError(f"expected {key} as texts if there is a prompt_name, found token ids; leave it out")
        texts = [text if isinstance(text, str) else _text_of(runtime, text) for text in texts]
    dimensions = fields.get("dimensions")
    if dimensions is not None and (type(dimensions) is not int or not 1 <= dimensions <= size):
        raise ValueError(f"expected dimensions from 1 to {size}, found {shortened(dimensions)}")
    return [(text,) for text in with_prompt(runtime.tokenizer, texts, fields.get("prompt_name"))]


def _are_ids(given: object) -> bool:
    return isinstance(given, list) and bool(given) and all(type(number) is int for number in given)


def _text_of(runtime: Runtime, ids: list[int]) -> str:
    """The text that the encoder's tokenizer turns into these ids; no prompt is put in front.

    Clients may have another tokenizer, whose ids would give a wrong embedding. So the ids must have the special tokens
    around them. Raises ValueError for others, and for ids that no text has.
    """
    tokenizer, known = runtime.tokenizer, range(runtime.config["backbone"]["vocab_size"])
    if len(ids) <= runtime.config["max_length"] and all(number in known for number in ids):
        around = tokenizer.ids_of("")
        before = next((at for at, (one, other) in enumerate(zip(around, ids)) if one != other), len(around))
        inside = ids[before : len(ids) - len(around) + before] if around else []
        text = Prompted(tokenizer.backend.decode(inside, skip_special_tokens=False))
        if text.strip() and runtime.encode([(text,)]).ids[0].tolist() == ids:
            return text
    expected = "token ids of this model's tokenizer, special tokens among them"
    advice = "send the text; in LangChain give check_embedding_ctx_length=False"
    raise ValueError(f"expected {expected}, at most {runtime.config['max_length']}, found {shortened(ids)}; {advice}")


def _vectors(answers: list, dimensions: int | None, normalize: bool) -> np.ndarray:
    """(N, d) or (N, dimensions) float32; cut ones are scaled to length 1, others if `normalize`."""
    vectors = np.stack([answer.embedding for answer in answers])[:, :dimensions]
    if not normalize and dimensions is None:
        return vectors
    return vectors / np.maximum(np.linalg.norm(vectors, axis=1, keepdims=True), np.float32(1e-12))


def _flag(fields: dict, name: str, usual: bool) -> bool:
    """A field that is true, false or left out. Raises ValueError for another value."""
    value = fields.get(name)
    if value is not None and type(value) is not bool:
        raise ValueError(f"expected {name} as true or false, found {shortened(value)}")
    return usual if value is None else value
