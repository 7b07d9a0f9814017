"""The model card of an exported folder, README.md: exits, rule, guarantee, how they were measured. No torch here.

It is made from the manifest, so `mini-ee calibrate EXPORTED` writes it again. It has no checksum: it may be edited.
"""

from collections.abc import Sequence

import numpy as np

from mini_ee.lab.confidence import NUMBER_MEASURES
from mini_ee.lab.export.engine import Engine, calibrated_engine
from mini_ee.lab.token_tasks import LABELS, SPAN

CARD = "README.md"

KINDS = {
    "rows": "A text classifier",
    "prompts": "A text classifier, which reads texts through a prompt,",
    "embeddings": "A sentence encoder",
    "tokens": "A language model",
    LABELS: "A token classifier",
    SPAN: "A model that answers a question by a span of its context",
}
"""Kind of a folder -> what it is. The kind is its unit, or what it decides about tokens."""

HUB = {
    "rows": ("text-classification", "transformers.js"),
    "prompts": ("text-classification", "onnx"),
    "embeddings": ("sentence-similarity", "sentence-transformers"),
    "tokens": ("text-generation", "onnx"),
    LABELS: (LABELS, "transformers.js"),
    SPAN: (SPAN, "transformers.js"),
}
"""Kind of a folder -> its task and the library that loads it, as Hugging Face's Hub names them."""

PYTHON = """from optimum.onnxruntime import ORTModelFor%s
from transformers import AutoTokenizer, pipeline

model, tokenizer = ORTModelFor%s.from_pretrained("DIR"), AutoTokenizer.from_pretrained("DIR")
print(pipeline("%s", model=model, tokenizer=tokenizer)(%s))"""
JAVASCRIPT = """import { pipeline } from "@huggingface/transformers";

console.log(await (await pipeline("%s", "DIR"))(%s));"""

CLIENTS = {
    "rows": (
        PYTHON % (*["SequenceClassification"] * 2, "text-classification", '"A text."'),
        JAVASCRIPT % ("text-classification", '"A text."'),
    ),
    LABELS: (PYTHON % (*["TokenClassification"] * 2, LABELS, '"A text."'), JAVASCRIPT % (LABELS, '"A text."')),
    SPAN: (
        PYTHON % (*["QuestionAnswering"] * 2, SPAN, 'question="A question?", context="A text."'),
        """import { pipeline } from "@huggingface/transformers";

const answer = await pipeline("question-answering", "DIR");
answer.tokenizer.return_token_type_ids = true; // which tell the context from the question; else BERT reads one text
console.log(await answer("A question?", "A text."));""",
    ),
    "embeddings": (
        """from sentence_transformers import SentenceTransformer

print(SentenceTransformer("DIR", backend="onnx").encode("A text."))""",
        """import { pipeline } from "@huggingface/transformers";

console.log(await (await pipeline("feature-extraction", "DIR"))("A text.", { pooling: "cls" }));""",
    ),
}
"""Kind of a folder -> the same in Python (optimum-onnx; sentence-transformers) and in JavaScript (transformers.js)."""

COMMANDS = {
    "tokens": ('echo "Once upon a time" | mini-ee run DIR', '{"text": "Once upon a time"}', "/generate"),
    "embeddings": ('echo "A text." | mini-ee run DIR', '{"input": "A text."}', "/v1/embeddings"),
    LABELS: ('echo "A text." | mini-ee run DIR', '{"inputs": "A text."}', "/predict_tokens"),
}
ANSWERS = ('echo "A text." | mini-ee run DIR', '{"text": "A text."}', "/classify")
PAIRS = (r"printf 'A text.\tAnother.\n' | mini-ee run DIR", '{"text": "A text.", "text_b": "Another."}', "/classify")
RANKING = (PAIRS[0], '{"query": "A text.", "texts": ["Another.", "A third."]}', "/rerank")
"""Of a kind: the command for one text, the body of a request, and its path."""


def card(manifest: dict) -> str:
    """The model card, as Markdown."""
    name = manifest.get("task", {}).get("name") or manifest["backbone"].get("model_type", "model")
    exits = manifest["exits"]
    parts = [_metadata(manifest), f"# {name}: {manifest['method']} with {len(exits)} exits", _summary(manifest)]
    parts += ["## Exits and rule", _rule(manifest), _exits(manifest)]
    parts += ["## Guarantee", guarantee_line(manifest), "## How it was measured", *_measured(manifest)]
    return "\n\n".join([*parts, "## Use", _use(manifest), ""])


def _metadata(manifest: dict) -> str:
    """The block that Hugging Face's Hub reads."""
    task, library = HUB[_kind(manifest)]
    task = "text-ranking" if _ranks(manifest) else task
    front_matter = (
        {"pipeline_tag": task, "library_name": library} | manifest.get("original", {}) | {"tags": "[onnx, early-exit]"}
    )
    return "\n".join(["---", *(f"{key}: {value}" for key, value in front_matter.items()), "---"])


def _ranks(manifest: dict) -> bool:
    """Whether it gives a pair of texts one number."""
    task = manifest.get("task", {})
    return _kind(manifest) == "rows" and task.get("texts") == 2 and not task["label_names"]


def _kind(manifest: dict) -> str:
    return manifest.get("task", {}).get("tokens") or manifest["unit"]


def _summary(manifest: dict) -> str:
    backbone, labels = manifest["backbone"], manifest.get("task", {}).get("label_names", [])
    layers = manifest["exits"][-1]
    text = f"{KINDS[_kind(manifest)]} ({backbone.get('model_type', 'transformer')}, {layers} layers)"
    named = bool(labels) and _kind(manifest) != SPAN
    text += f" with the labels {', '.join(labels[:20])}{', ...' * (len(labels) > 20)}" * named
    opset = f"`onnx/model.onnx` has opset {manifest['opset']} and weights in {manifest['precision']}"
    return (
        f"{text}. It stops after the layer that a text needs. {opset}. Its licence is that of the model it came from."
    )


def _rule(manifest: dict) -> str:
    rule = manifest["rule"]
    settings = ", ".join(f"{name} {_shown(value)}" for name, value in rule.items() if name != "name")
    return f"The rule `{rule['name']}`" + (f": {settings}." if settings else ".")


def _shown(value) -> str:
    if isinstance(value, list | tuple):
        return "(" + ", ".join(map(_shown, value)) + ")" if len(value) <= 24 else f"{len(value)} numbers"
    return f"{float(value):.4g}" if isinstance(value, float) or value in ("inf", "-inf") else str(value)


def _exits(manifest: dict) -> str:
    """A table of the exits, with the held-out examples that stop there, if they are known."""
    counts = manifest.get("exit_counts")
    scores = manifest.get("exit_scores")
    columns: list[tuple[str, Sequence[str]]] = [("exit after layer", list(map(str, manifest["exits"])))]
    if counts:
        shares = np.array(counts) / max(1, sum(counts))
        columns.append(("held-out examples that exit here", [f"{share:.1%}" for share in shares]))
    if scores:
        columns.append(("held-out accuracy, if all exited here", [f"{score:.3f}" for score in scores]))
    agreement = manifest.get("calibration", {}).get("agreement")
    if agreement:
        shown = ["-" if share is None else f"{share:.1%}" for share in agreement]
        columns.append(("agreement with the last exit", [*shown, "100.0%"][: len(manifest["exits"])]))
    lines = [[heading for heading, _ in columns], ["---"] * len(columns), *zip(*(values for _, values in columns))]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def guarantee_line(manifest: dict) -> str:
    """The guarantee of the rule in words."""
    terms = manifest.get("guarantee")
    if not terms:
        return _no_guarantee(manifest)
    if terms.get("guarantee") == "conformal":
        what = f"a new text has the full model's prediction with probability {terms['epsilon']:g} or more"
    elif "cosine" in terms:
        what = f"at least {terms['epsilon']:.1%} of texts have a cosine of {terms['cosine']:g} to the full embedding"
        what += f", with confidence {1 - terms['delta']:.1%}"
    elif "top_k" in terms:
        what = f"at least {1 - terms['max_loss']:.1%} of queries keep the {terms['top_k']} best texts of the full model"
        what += f", with confidence {terms['confidence']:.0%}, by a test on {terms['rows']} other queries"
    elif "delta" in terms:
        what = (
            f"at each exit, at least {terms['epsilon']:.1%} of the texts that are as confident have the prediction of"
        )
        what += f" the full model, with confidence {1 - terms['delta']:.1%} for all exits together"
    else:
        what = (
            f"the rule loses at most {terms['max_loss']:g} of {terms.get('of', 'score')} compared with the full model"
        )
        what += f", with confidence {terms['confidence']:.0%}, by a test on {terms['rows']} held-out examples"
    engine = calibrated_engine(manifest)
    where = "" if engine == Engine() else f" with `{engine.options}`"
    if (weights := manifest.get("calibration", {}).get("weights", "float32")) != "float32":
        where += f" and weights in {weights}" if where else f" with weights in {weights}"
    return f"{what[0].upper()}{what[1:]}. It holds for texts like those that gave it{where}."


def _no_guarantee(manifest: dict) -> str:
    """How to get a guarantee; calibrated.check_calibratable refuses other exports."""
    graphs, row_unit = manifest["graphs"], manifest["unit"] not in ("tokens", "embeddings")
    if manifest["unit"] == "tokens" and "begins_with" not in manifest and "threshold" in graphs["model"]["inputs"]:
        kind = "--guarantee conformal" if manifest["rule"]["name"] == "policy" else "--delta .05"
        return f"None: `mini-ee calibrate DIR --text FILE --epsilon .95 {kind}` gives one."
    ranks = _ranks(manifest) and manifest["rule"].get("measure") in NUMBER_MEASURES
    if row_unit and not manifest["task"]["label_names"] and not ranks or len(manifest["exits"]) == 1:
        return "None."
    if row_unit and "threshold" in graphs["model"]["inputs"] and "model_web" not in graphs:
        top_k = " --top-k 10" * ranks
        return f"None: `mini-ee calibrate DIR --text FILE{top_k} --epsilon .95 --delta .05` gives one."
    return "None: `mini-ee calibrate` gives its run one; then export the run again."


def _measured(manifest: dict) -> list[str]:
    lines = []
    if calibration := manifest.get("calibration"):
        source = ", ".join(str(calibration[key]) for key in ("task", "split") if calibration.get(key))
        noun = "tokens" if manifest["unit"] == "tokens" else "rows"
        others, what = f"{calibration['rows_fresh']} other {noun}", "have the prediction of the last exit"
        if "queries_fresh" in calibration:
            others, what = f"{calibration['queries_fresh']} other queries", "keep the best texts of the last exit"
        lines.append(
            f"Calibrated on this graph with {calibration['rows_calibration']} {noun} of {source}, in batches of "
            f"{calibration['batch_size']}, with `{calibrated_engine(manifest).options}`. Of {others}, "
            f"{calibration['end_to_end']:.1%} {what}, after {calibration['mean_layers']:.2f} layers on average."
        )
    verified = manifest.get("verified")
    if verified:
        tokens = "tokens" in verified
        equal = verified["token_agreement" if tokens else "prediction_agreement"]
        what = f"{verified['prompts']} prompts" if tokens else f"{verified['texts']} texts"
        lines.append(
            f"Compared with torch in float32 when it was exported, on {what}: {equal:.1%} of the "
            f"{'tokens' if tokens else 'predictions'} and {verified['exit_agreement']:.1%} of the exits are equal; "
            f"logits differ by at most {verified['max_logit_difference']:.2g}."
        )
    made = ", ".join(f"{name} {version}" for name, version in manifest.get("versions", {}).items())
    return [*lines, f"Made with {made}."]


def _use(manifest: dict) -> str:
    pairs = manifest.get("task", {}).get("texts") == 2
    usual = RANKING if _ranks(manifest) else PAIRS if pairs else ANSWERS
    line, body, path = COMMANDS.get(_kind(manifest), usual)
    engine = calibrated_engine(manifest)
    options = "" if engine == Engine() else f" {engine.options}"
    shadow = " --shadow .05" if manifest["unit"] in ("rows", "prompts") and manifest["task"]["label_names"] else ""
    joined = pairs and _kind(manifest) != SPAN  # clients would have to join the two texts themselves
    languages = () if joined else zip(("python", "js"), CLIENTS.get(_kind(manifest), ()))
    clients = [f"```{language}\n{code}\n```" for language, code in languages]
    commands = f"""```bash
{line}{options}
mini-ee serve DIR{options}{shadow}
curl localhost:8000{path} --json '{body}'
```

DIR is this folder. Any ONNX Runtime whose version knows opset {manifest["opset"]} can run `onnx/model.onnx`;
`manifest.json` names its inputs and outputs."""
    return "\n\n".join([*clients, commands])
