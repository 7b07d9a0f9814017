"""Exits for models that label tokens or answer questions: a text exits as a whole, and all its labels agree."""

import json
import os
import re
import shutil
import subprocess
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import onnxruntime
import pytest
import torch
from method_cases import few_epochs_and_no_picture  # noqa: F401
from tokenizers import Tokenizer as Backend
from words import BAD, GOOD, THINGS

import mini_ee
from mini_ee.lab.backbones.tensor_files import read_tensors, write_tensors
from mini_ee.lab.cli.main import main
from mini_ee.lab.data.files import read_json, write_json
from mini_ee.lab.data.tasks import Split, Task
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.early_exit import early_exit
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.evaluation import row_evaluation
from mini_ee.lab.evaluation.gold_labels import word_tags
from mini_ee.lab.export.add_exits import line_of
from mini_ee.lab.export.runtime import Runtime
from mini_ee.lab.recording import Record, Recorded, record
from mini_ee.lab.rules import Fixed, Never, Threshold
from mini_ee.lab.token_tasks import LABELS, LONGEST_ANSWER, SPAN, WEAKEST, Span, TokenLabel, TokenTask, spans
from mini_ee.lab.training.default_rule import default_rule
from mini_ee.serve.engines import engine_of
from mini_ee.serve.formats import formats_of

TAGS = ("O", "B-X", "I-X", "B-Y")
TEXTS = [f"{a} {t} is {'very ' * n}{b}" for n, (t, a, b) in product(range(2), product(THINGS, GOOD, GOOD + BAD))][::2]
ROWS = {LABELS: TEXTS, SPAN: [(f"the {THINGS[i % 5]} is", text) for i, text in enumerate(TEXTS)]}
ENDINGS = {LABELS: "ForTokenClassification", SPAN: "ForQuestionAnswering"}
SPECIAL = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
CLS, SEP = 2, 3


@pytest.fixture(scope="module")
def folders(checkpoint_folder, tmp_path_factory):
    """The BERT of the tests with a drawn head for tokens, as transformers writes such models."""
    made = {}
    for kind, ending in ENDINGS.items():
        folder = made[kind] = tmp_path_factory.mktemp(ending)
        tensors = read_tensors(checkpoint_folder / "model.safetensors")
        weights = {name: part for name, part in tensors.items() if not name.startswith(("cls.", "bert.pooler"))}
        head, count = ("classifier", len(TAGS)) if kind == LABELS else ("qa_outputs", 2)
        drawn = torch.randn(count, 16, generator=torch.Generator().manual_seed(3))
        weights |= {f"{head}.weight": drawn - drawn.mean(1, keepdim=True), f"{head}.bias": torch.zeros(count)}
        write_tensors(folder / "model.safetensors", weights)
        config = read_json(checkpoint_folder / "config.json") | {"architectures": [f"Bert{ending}"]}
        config |= {"id2label": dict(enumerate(TAGS))} if kind == LABELS else {}
        config.pop("sha256", None)
        write_json(folder / "config.json", config)
        tokenizer = Backend.from_file(str(checkpoint_folder / "tokenizer.json"))
        tokenizer.add_special_tokens([*SPECIAL.values()])  # which clients leave out of answers
        tokenizer.save(str(folder / "tokenizer.json"))
        write_json(folder / "tokenizer_config.json", read_json(checkpoint_folder / "tokenizer_config.json") | SPECIAL)
    return made


@pytest.fixture(scope="module", params=(LABELS, SPAN))
def added(request, folders, tmp_path_factory):
    out, kind = tmp_path_factory.mktemp("added") / "fast", request.param
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mini_ee.lab.export.add_exits.LEAST_SAVED", -1.0)  # the export is made in any case
        patch.setattr(row_evaluation, "TIMED_REPEATS", 1)
        run = mini_ee.add_exits(folders[kind], ROWS[kind], out, agreement=0.5, exits=(1, 3))
    exported = Runtime(out / "exported", threads=1)
    return SimpleNamespace(kind=kind, run=run, exported=exported, out=out, summary=read_json(out / "summary.json"))


def logits_of(added, rows, k):
    """Of exit k, row by row: nothing is padded."""
    encoded, segments = added.run.encode(rows), added.run.segments()
    return [early_exit(segments, Fixed(k), encoded.batch([row])).logits[0] for row in range(len(rows))]


def decided(added, logits, row):
    """What these logits (T, C) decide about a row, in plain loops."""
    ids = added.run.tokenizer.encode([row]).ids[0].tolist()
    counts = [at for at, token in enumerate(ids) if token not in (CLS, SEP)]
    if added.kind == LABELS:
        return [TAGS[logits[at].argmax()] for at in counts]
    counts = [at for at in counts if at > ids.index(SEP)]
    pairs = [(a, b) for a in counts for b in counts if a <= b < a + LONGEST_ANSWER]
    first, last = max(pairs, key=lambda pair: logits[pair[0], 0] + logits[pair[1], 1])
    words = row[1].split()
    return " ".join(words[first - counts[0] : last - counts[0] + 1])


def shown(answer):
    return answer.label.answer if isinstance(answer.label, Span) else [label.label for label in answer.label]


def test_what_does_not_exit_early_has_the_labels_of_the_original(added):
    rows = ROWS[added.kind][:20]
    for row, logits, answer in zip(rows, logits_of(added, rows, 1), added.exported.run(rows, rule=Never())):
        assert shown(answer) == decided(added, logits, row)


def test_the_agreement_is_that_of_all_labels_of_a_text(added):
    rows = ROWS[added.kind]
    early, full = added.exported.run(rows), added.exported.run(rows, rule=Never())
    same = np.mean([one.agrees(other) for one, other in zip(early, full)])
    expected = [shown(one) == shown(other) for one, other in zip(early, full)]
    if added.kind == LABELS:  # two spans may have the same words
        assert same == np.mean(expected)
    assert same == pytest.approx(added.summary["agreement"], abs=0.2) and added.summary["rule"]["measure"] == WEAKEST
    assert {"token-classification": "every token on", SPAN: "the answer's span on"}[added.kind] in line_of(
        added.summary
    )
    assert {answer.layers for answer in early} == {1, 3}


def test_torch_and_the_graph_exit_alike_in_any_batch(added):
    rows = ROWS[added.kind][:24]
    alone, together, torchs = added.exported.run(rows, 1), added.exported.run(rows, 24), added.run.classify(rows)
    for one, other, third in zip(alone, together, torchs):
        assert one.layers == other.layers == third.layers and shown(one) == shown(other) == shown(third)
        assert one.confidence == pytest.approx(other.confidence, abs=1e-5) == pytest.approx(third.confidence, abs=1e-5)
    threshold = added.run.rule.threshold
    assert all(one.layers == 3 or one.confidence >= threshold for one in alone)


def test_the_graph_has_the_outputs_that_clients_of_transformers_read(added):
    session = onnxruntime.InferenceSession(added.out / "exported" / "onnx/model.onnx")
    inputs = added.exported.encode(ROWS[added.kind][:5]).batch(slice(None))
    feeds = {node.name: getattr(inputs, node.name) for node in session.get_inputs()}
    outputs = dict(zip([node.name for node in session.get_outputs()], session.run(None, feeds)))
    config = read_json(added.out / "exported" / "config.json")
    assert config["architectures"] == [f"Bert{ENDINGS[added.kind]}"]
    if added.kind == LABELS:
        assert config["id2label"] == {str(at): tag for at, tag in enumerate(TAGS)}
        np.testing.assert_array_equal(outputs["label"], outputs["logits"].argmax(-1))
    else:
        ends = np.stack((outputs["start_logits"], outputs["end_logits"]), -1)
        np.testing.assert_array_equal(outputs["logits"], ends)
    assert outputs["confidence"].shape == outputs["layers"].shape == (5,) and "label" in outputs or added.kind == SPAN


def test_answers_are_json(added):
    answer = json.loads(json.dumps(added.exported.run(ROWS[added.kind][:1])[0].to_dict()))
    if added.kind == LABELS:
        assert answer["label"][0].keys() == {"token", "label", "score", "start", "end"}
        assert [TEXTS[0][span["start"] : span["end"]] for span in answer["label"]] == TEXTS[0].split()
    else:
        label = answer["label"]
        assert TEXTS[0][label["start"] : label["end"]] == label["answer"] and 0 < label["score"] <= 1


CLIENT = """
import json, sys
from optimum import onnxruntime
from transformers import AutoTokenizer, pipeline

folder, kind, rows = sys.argv[1], sys.argv[2], json.loads(sys.argv[3])
tokenizer = AutoTokenizer.from_pretrained(folder)
if kind == "token-classification":
    model = onnxruntime.ORTModelForTokenClassification.from_pretrained(folder)
    answer = pipeline(kind, model=model, tokenizer=tokenizer, ignore_labels=[])
    print(json.dumps([[(each["entity"], float(each["score"])) for each in answer(row)] for row in rows]))
else:
    model = onnxruntime.ORTModelForQuestionAnswering.from_pretrained(folder)
    answer = pipeline(kind, model=model, tokenizer=tokenizer, align_to_words=False)
    found = [answer(question=question, context=context) for question, context in rows]
    print(json.dumps([[(each["answer"], float(each["score"]))] for each in found]))
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "MINI_EE_HUGGING_FACE" not in os.environ, reason="needs MINI_EE_HUGGING_FACE, a Python with optimum"
)
def test_optimum_and_the_pipelines_of_transformers_give_the_same_answers(added):
    rows = ROWS[added.kind][:40]
    command = [os.environ["MINI_EE_HUGGING_FACE"], "-c", CLIENT, added.out / "exported", added.kind, json.dumps(rows)]
    piped = json.loads(subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()[-1])
    compare_answers(added, rows, piped)


def compare_answers(added, rows, answers):
    """(label or answer, score) of each row, against `mini-ee run`."""
    for theirs, answer in zip(answers, added.exported.run(rows), strict=True):
        labels = answer.label if added.kind == LABELS else [answer.label]
        ours = [
            (labelled.label, labelled.score) if added.kind == LABELS else (labelled.answer, labelled.score)
            for labelled in labels
        ]
        assert [label for label, _ in theirs] == [label for label, _ in ours]
        np.testing.assert_allclose([score for _, score in theirs], [score for _, score in ours], atol=1e-5)


IN_NODE = """
import { readFileSync } from "node:fs";
import { basename, dirname } from "node:path";
import { pipeline, env } from "@huggingface/transformers";

const [folder, kind] = process.argv.slice(2);
Object.assign(env, { allowRemoteModels: false, localModelPath: dirname(folder) });
const answer = await pipeline(kind, basename(folder));
answer.tokenizer.return_token_type_ids = true;
const found = [];
for (const row of JSON.parse(readFileSync(0, "utf8"))) {
  const labels = Array.isArray(row) ? [await answer(...row)] : await answer(row, { ignore_labels: [] });
  found.push(labels.map((label) => [label.entity ?? label.answer, label.score]));
}
console.log(JSON.stringify(found));
"""


@pytest.mark.slow
@pytest.mark.skipif(
    "MINI_EE_TRANSFORMERS_JS" not in os.environ,
    reason="needs MINI_EE_TRANSFORMERS_JS, a folder in which `npm install @huggingface/transformers` was called",
)
def test_the_pipelines_of_transformers_js_give_the_same_answers(added, tmp_path):
    rows = ROWS[added.kind]
    (tmp_path / "client.mjs").write_text(IN_NODE)
    (tmp_path / "node_modules").symlink_to(Path(os.environ["MINI_EE_TRANSFORMERS_JS"]).resolve() / "node_modules")
    command = ["node", tmp_path / "client.mjs", added.out / "exported", added.kind]
    done = subprocess.run(command, input=json.dumps(rows), capture_output=True, text=True, check=True, timeout=300)
    compare_answers(added, rows, json.loads(done.stdout.splitlines()[-1]))


# ---- The functions ----


def test_the_confidence_is_that_of_the_least_confident_decision():
    random = np.random.default_rng(0)
    ids = np.array([[2, 7, 8, 3, 9, 9, 10, 3, 0], [2, 7, 3, 9, 3, 0, 0, 0, 0]])
    mask, logits = (ids > 0).astype(np.int64), random.normal(0, 2, (2, 9, 2)).astype(np.float32)
    task = TokenTask(LABELS, (CLS, SEP))
    counted = task.counted(ids, mask)
    assert [np.flatnonzero(row).tolist() for row in counted] == [[1, 2, 4, 5, 6], [1, 3]]
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    expected = [min(p[row, at].max() for at in np.flatnonzero(some)) for row, some in enumerate(counted)]
    np.testing.assert_allclose(task.weakest(logits, counted), expected, rtol=1e-5)
    span = TokenTask(SPAN, (CLS, SEP))
    context = span.counted(ids, mask)
    assert [np.flatnonzero(row).tolist() for row in context] == [[4, 5, 6], [3]]
    for row, some in enumerate(context):
        of_ends = []
        for end in logits[row].T:
            terms = {at: np.exp(end[at]) for at in (0, *np.flatnonzero(some))}
            of_ends.append(max(value for at, value in terms.items() if at) / sum(terms.values()))
        assert span.weakest(logits, context)[row] == pytest.approx(min(of_ends), rel=1e-5)


def test_the_likeliest_span_is_found_and_is_not_longer_than_the_longest_answer():
    random = np.random.default_rng(1)
    for _ in range(30):
        tokens = random.integers(1, 40)
        logits, some = random.normal(size=(1, tokens, 2)), random.random((1, tokens)) < 0.7
        some[0, random.integers(tokens)] = True
        (first,), (last,) = spans(logits, some)
        places = np.flatnonzero(some[0])
        pairs = [(a, b) for a in places for b in places if a <= b < a + LONGEST_ANSWER]
        assert (first, last) == max(pairs, key=lambda pair: logits[0, pair[0], 0] + logits[0, pair[1], 1])


def test_numbers_are_equal_when_all_decisions_are_equal_whatever_the_padding():
    random, task = np.random.default_rng(2), TokenTask(LABELS, ())
    logits = random.normal(size=(40, 3, 2))
    counted = np.ones((40, 3), bool)
    padded = np.concatenate((logits, random.normal(size=(40, 2, 2))), axis=1)
    numbers = task.numbers(logits, counted)
    np.testing.assert_array_equal(numbers, task.numbers(padded, np.pad(counted, ((0, 0), (0, 2)))))
    assert len(set(numbers.tolist())) == len({tuple(row) for row in logits.argmax(-1).tolist()})


def test_the_guarantee_is_broken_in_at_most_a_twentieth_of_100_repetitions():
    """Exits that disagree the more often, the less confident the weakest token is: the rule is tested on 300 texts."""
    random, task, broken = np.random.default_rng(3), Task("texts", TAGS, ("accuracy",), {}, token_kind=LABELS), 0

    def drawn(rows):
        confidence = random.random((rows, 1))
        wrong = random.random((rows, 1)) < 0.4 * (1 - confidence)
        numbers = np.concatenate((wrong, np.zeros((rows, 1), bool)), axis=1)[:, :, None].astype(np.int64)
        recorded = Recorded((1, 2), numbers, np.ones((rows, 2, 2)), [1, 1], {WEAKEST: confidence})
        return Record(recorded, numbers, 1.0, labels=numbers[:, -1, 0])

    fresh = drawn(4_000)
    for _ in range(100):
        rule = default_rule(drawn(100), drawn(300), task, max_loss=0.1, confidence=0.95).rule
        assert rule.needs in (None, WEAKEST)
        broken += (fresh.replay(rule).logits != fresh.logits[:, -1]).mean() > 0.1
    assert broken <= 10  # 5 are expected at most; 11 or more of 100 have a probability of .01


# ---- The server ----


def test_a_server_answers_as_text_embeddings_inference(added):
    if added.kind == SPAN:
        assert formats_of(added.exported) == {}
        return
    form = formats_of(added.exported)["/predict_tokens"]
    fields = {"inputs": TEXTS[:2], "ignore_labels": []}
    rows = form.rows(added.exported, fields)
    answers = added.exported.run(rows)
    reply = form.reply(added.exported, fields, rows, answers, 0)
    first = added.exported.tokenizer.encode(TEXTS[:1]).ids[0][1:-1]
    assert [token["token_id"] for token in reply[0]] == first.tolist()
    assert [list(token["results"]) for token in reply[0]] == [[label.label] for label in answers[0].label]
    raw = form.reply(added.exported, fields | {"raw_scores": True}, rows, answers, 0)
    assert raw[0][0]["results"] == pytest.approx(dict(zip(TAGS, answers[0].logits[1])))
    assert all(
        "O" not in token["results"] for token in form.reply(added.exported, {"inputs": "x"}, rows, answers, 0)[0]
    )


def test_neighbours_of_one_entity_are_one_group():
    named = [
        ("EU", "B-ORG", 0.9),
        ("'s", "I-ORG", 0.7),
        ("rejects", "O", 1.0),
        ("A", "B-PER", 0.8),
        ("B", "B-PER", 0.6),
    ]
    text = " ".join(token for token, *_ in named)
    labels = [TokenLabel(*token, text.index(token[0]), text.index(token[0]) + len(token[0])) for token in named]
    answer = SimpleNamespace(label=labels)
    runtime = SimpleNamespace(embeds=False, generates=False, token_task=TokenTask(LABELS, ()))
    fields = {"inputs": [text], "aggregation_strategy": "simple"}
    (groups,) = formats_of(runtime)["/predict_tokens"].reply(runtime, fields, [(text,)], [answer], 0)
    assert [(group["token"], group["results"]) for group in groups] == [
        ("EU 's", {"ORG": pytest.approx(0.8)}),
        ("A", {"PER": pytest.approx(0.8)}),
        ("B", {"PER": pytest.approx(0.6)}),
    ]


def test_the_worker_counts_shadow_rows_that_agree_in_every_label(added):
    answer = added.exported.run(ROWS[added.kind][:1])[0]
    assert answer.agrees(answer) and engine_of(added.exported).rule == added.exported.rule
    other = Span("", 0.1, 0, 0) if added.kind == SPAN else answer.label[:-1]
    assert not answer.agrees(answer._replace(label=other))


# ---- Files and refusals ----

# ---- Gold labels ----


def labelled(added, path):
    """A file with the rows and what the full model answers as gold, but for the first ten rows; and these rows."""
    rows, data = ROWS[added.kind][:40], []
    with open(path, "w") as file:
        for at, (row, answer) in enumerate(zip(rows, added.exported.run(rows, rule=Never()))):
            if added.kind == LABELS:
                tags = ["B-Y"] * len(row.split()) if at < 10 else [label.label for label in answer.label]
                print("\n".join(f"{word} {tag}" for word, tag in zip(row.split(), tags)), end="\n\n", file=file)
            else:
                answers = [{"text": "nothing" if at < 10 else answer.label.answer}, {"text": "none"}]
                qas = [{"id": str(at), "question": row[0], "answers": answers}]
                data.append({"paragraphs": [{"context": row[1], "qas": qas}]})
        if data:
            json.dump({"data": data}, file)
    return rows


def test_gold_labels_score_the_exits_and_the_rule(added, tmp_path, capsys):
    path = tmp_path / ("gold.conll" if added.kind == LABELS else "gold.json")
    rows = labelled(added, path)
    assert main(["evaluate", str(added.out / "exported"), "--task", str(path), "--sweep", "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    full, early = (added.exported.run(rows, rule=rule) for rule in (Never(), None))
    assert answer["agreement"] == np.mean([one.agrees(other) for one, other in zip(early, full)])
    assert answer["exit_counts"] == [sum(one.layers == layer for one in early) for layer in (1, 3)]
    assert answer["per_exit_scores"][-1] == answer["full_scores"]
    right = [at >= 10 for at in range(len(rows))]
    if added.kind == SPAN:  # F1 is at least that of an exact match
        assert answer["full_scores"]["exact_match"] == np.mean(right) <= answer["full_scores"]["f1"]
        same = [one.label.answer == other.label.answer for one, other in zip(early, full)]
        assert answer["scores"]["exact_match"] == np.mean(np.array(right) & same)
    else:
        wanted = [shown(one) if ok else ["B-Y"] * len(shown(one)) for one, ok in zip(full, right)]
        for name, answers in (("full_scores", full), ("scores", early)):
            pairs = [pair for one, tags in zip(answers, wanted) for pair in zip(shown(one), tags)]
            assert answer[name]["accuracy"] == np.mean([ours == gold for ours, gold in pairs])
        assert answer["full_scores"].keys() == {"accuracy", "precision", "recall", "f1"}
    strictest = max(answer["sweep"], key=lambda point: point["mean_layers"])
    assert strictest["agreement"] == 1 and strictest["scores"] == answer["full_scores"]


def test_the_summary_scores_the_test_texts_if_there_are_gold_labels(added, folders, tmp_path, monkeypatch):
    """What the model itself says is right: so the full model has all. Heads and export are those of an earlier call."""
    shutil.copytree(added.out, tmp_path / "o")
    (tmp_path / "o" / "summary.json").unlink()
    full = added.exported.run(ROWS[added.kind], rule=Never())
    gold = [[one.label.answer] if added.kind == SPAN else shown(one) for one in full]
    monkeypatch.setattr("mini_ee.lab.export.add_exits.LEAST_SAVED", -1.0)
    monkeypatch.setattr(row_evaluation, "TIMED_REPEATS", 1)
    mini_ee.add_exits(folders[added.kind], ROWS[added.kind], tmp_path / "o", labels=gold, agreement=0.5, exits=(1, 3))
    summary = read_json(tmp_path / "o" / "summary.json")
    assert set(summary["full_scores"].values()) == {1.0} and "Against gold labels" in line_of(summary)
    assert summary["scores"] == summary["full_scores"] if summary["agreement"] == 1 else summary["scores"]["f1"] < 1


def test_a_word_has_the_label_of_its_first_token():
    text, ends = "EU rejects lamb", [(0, 1, "B-X"), (1, 2, "I-X"), (2, 6, "O"), (6, 10, "I-X")]
    tokens = [TokenLabel(text[start:end], label, 0.9, start, end) for start, end, label in ends]
    assert word_tags(text, tokens) == ["B-X", "O", "O"]  # of the last word nothing was read


SQUAD = {"data": [{"paragraphs": [{"context": "the film is good", "qas": [{"id": "a", "question": "the film is"}]}]}]}


def test_conll_and_squad_files_are_read(added, tmp_path, capsys):
    if added.kind == LABELS:
        path = tmp_path / "some.conll"
        path.write_text("-DOCSTART- -X- O\n\nthe DT O\nfilm NN B-X\n\ngood JJ O\nmeal NN O\n")
    else:
        path = tmp_path / "some.json"
        path.write_text(json.dumps(SQUAD, indent=1))
    assert main(["run", str(added.out / "exported"), str(path)]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    expected = ["the film", "good meal"] if added.kind == LABELS else [("the film is", "the film is good")]
    assert [shown(answer) for answer in added.exported.run(expected)] == [
        line["label"]["answer"] if added.kind == SPAN else [token["label"] for token in line["label"]] for line in lines
    ]


FILES = [  # of a token classifier
    ("a.conll", "the O\nfilm\n", "a.conll:1: expected a token and its tag, found 'film' alone in line 2"),
    ("a.conll", "the DT O\nfilm O\n", "a.conll:1: expected 3 columns, as before, found 2 in line 2"),
    ("a.conll", "\n\n", "a.conll:1: expected texts, found none"),
    (
        "a.json",
        json.dumps({"data": [{"paragraphs": 3}]}),
        r"a.json:1: expected data\[0\].paragraphs as a list, found 3",
    ),
    ("a.json", json.dumps({"data": [5]}), r"a.json:1: expected data\[0\] as an object, found 5"),
    (
        "a.json",
        json.dumps({"data": [{"paragraphs": [{"qas": [{"question": "x"}]}]}]}),
        r"expected context of data\[0\].paragraphs\[0\].qas\[0\] as text, found None",
    ),
    ("a.tsv", "question\tcontext\n" + "a b\tc d\n" * 200, "expected at least 100 different texts"),
]


@pytest.mark.parametrize(("name", "content", "message"), FILES)
def test_bad_files_are_refused_in_one_line(name, content, message, folders, tmp_path, capsys):
    (tmp_path / name).write_text(content)
    kind = LABELS if name.endswith("conll") else SPAN
    assert main(["add-exits", str(folders[kind]), "--text", str(tmp_path / name), "--out", str(tmp_path / "o")]) == 2
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(message, error), error


REFUSED = [
    (["export", "{run}", "--segments", "--out", "{tmp}/w"], "--segments is for one label of a text"),
    (["export", "{run}", "--web", "--out", "{tmp}/w"], "--web: expected a model of one label"),
    (["export", "{run}", "--patience", "1", "--out", "{tmp}/w"], "the rule patience compares one prediction"),
    (
        ["export", "{run}", "--threshold", ".9", "--measure", "entropy", "--out", "{tmp}/w"],
        "each token has a label here, which needs --measure weakest_token",
    ),
    (["export", "{run}", "--rule", "policy", "--out", "{tmp}/w"], "policy needs a model with a policy"),
    (["classify", "{run}", "the film"], "is for {kind}, and `mini-ee classify` for one label"),
    (["evaluate", "{run}"], "is for {kind}, and `mini-ee evaluate` for one label"),
    (["evaluate", "{exported}"], "needs --task FILE with gold tags or answers, found none"),
    (["evaluate", "{exported}", "--task", "{tmp}"], "needs --task FILE with gold tags or answers, found no file"),
    (["evaluate", "{exported}", "--task", "{rows}"], "rows.txt:1: expected gold tags or answers, found none"),
    (["evaluate", "{exported}", "--task", "{rows}", "--overthinking"], "--overthinking is for one label of a text"),
    (["evaluate", "{exported}", "--task", "{rows}", "--label-column", "x"], "--label-column is for one label of a"),
    (["compare", "{run}", "{run}"], "is for {kind}, and `mini-ee compare` for one label"),
    (["calibrate", "{run}", "--epsilon", ".9"], "is for {kind}, and `mini-ee calibrate` for one label"),
    (["embed", "{exported}", "{tmp}/x", "--out", "{tmp}/o.npy"], "is for {kind}, and `mini-ee embed` for one label"),
    (["batch", "{exported}", "--in", "{tmp}/x", "--out", "{tmp}/o"], "is for {kind}, and a job gives one label"),
    (
        ["calibrate", "{exported}", "--epsilon", ".9", "--text", "{rows}", "--measure", "entropy"],
        "is of one label of a",
    ),
]


@pytest.mark.parametrize(("argv", "message"), REFUSED, ids=lambda case: case[0] if isinstance(case, list) else "")
def test_what_is_for_one_label_of_a_text_is_refused_in_one_line(argv, message, added, folders, tmp_path, capsys):
    rows = [row if isinstance(row, str) else "\t".join(row) for row in ROWS[added.kind]]
    (tmp_path / "rows.txt").write_text("\n".join(rows))
    (tmp_path / "x").write_text("the film\n")
    places = {"run": added.out / "run", "exported": added.out / "exported", "tmp": tmp_path}
    places |= {"rows": tmp_path / "rows.txt", "model": folders[added.kind], "kind": added.kind}
    assert main([word.format(**places) for word in argv]) in (1, 2)
    error = capsys.readouterr().err
    assert len(error.splitlines()) == 1 and re.search(message.format(**places), error), error


def test_rows_of_another_number_of_texts_are_refused(folders, tmp_path):
    for kind, other in ((LABELS, SPAN), (SPAN, LABELS)):
        with pytest.raises(
            WrongArguments, match=f"a model for {kind} reads .*, found {2 if kind == LABELS else 1} text"
        ):
            mini_ee.add_exits(folders[kind], ROWS[other], tmp_path / "o")
    with pytest.raises(WrongArguments, match="--pool is for one label of a text"):
        task = Task("t", TAGS, ("accuracy",), {"train": Split(((TEXTS[0],),), np.zeros(1, np.int64))})
        mini_ee.train("self-supervised", folders[LABELS], task, tmp_path / "o", pool="mean")
    with pytest.raises(WrongArguments, match="expected tags among the model's labels O, B-X, I-X, B-Y, found 'PER'"):
        mini_ee.add_exits(folders[LABELS], TEXTS, tmp_path / "o", labels=[["PER"]] * len(TEXTS))
    with pytest.raises(WrongArguments, match="--max-loss is for a model that gives a text one class"):
        mini_ee.add_exits(folders[LABELS], TEXTS, tmp_path / "o", labels=["O"] * len(TEXTS), max_loss=0.1)


def test_an_export_is_calibrated_with_a_guarantee_about_all_labels(added, tmp_path, capsys):
    rows = [row if isinstance(row, str) else "\t".join(row) for row in ROWS[added.kind]]
    (tmp_path / "rows.txt").write_text("\n".join(rows))
    options = ("--text", tmp_path / "rows.txt", "--epsilon", "1", "--out", tmp_path / "new", "--json")
    assert main(["calibrate", *map(str, (added.out / "exported", *options))]) == 0
    report, exported = json.loads(capsys.readouterr().out), Runtime(tmp_path / "new", threads=1)
    pairs = zip(exported.run(ROWS[added.kind]), exported.run(ROWS[added.kind], rule=Never()), strict=True)
    wrong = sum(not early.agrees(full) for early, full in pairs)
    assert report["measure"] == WEAKEST and report["end_to_end"] == pytest.approx(1 - wrong / report["rows_fresh"])


def test_places_of_tokens_are_counted_in_the_whole_text_also_when_it_is_cut_on_the_left(folders):
    tokenizer = Tokenizer.from_folder(folders[LABELS], 6)
    tokenizer.side = "left"
    tokenizer._truncate(6)
    text = " ".join(["the film was"] * 200) + " very good"
    (pieces,) = tokenizer.pieces([(text,)])
    assert [text[a:b] for a, b in pieces.places[1:-1]] == ["film", "was", "very", "good"]


def test_a_record_keeps_some_exits_with_their_confidences(added):
    recorded = record(added.run.segments(), added.run.encode(ROWS[added.kind][:9]), 4)
    assert recorded.logits.shape == (9, 2, 1) and recorded.confidence(WEAKEST).shape == (9, 1)
    alone = recorded.at([1])
    assert alone.confidence(WEAKEST).shape == (9, 0) and (alone.logits[:, 0] == recorded.logits[:, 1]).all()
    depths = {recorded.replay(Threshold(cut, WEAKEST)).layers_run.mean() for cut in (0.0, 1.0)}
    assert depths == {1, 3}
