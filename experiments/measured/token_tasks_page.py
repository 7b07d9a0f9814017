"""results/token-tasks.md: `mini-ee add-exits` on models that label tokens or answer questions.

A set has three files: rows of train fine-tune MiniLM, texts of dev make the exits, without their labels, and test is
reported. Every exit is recorded on all texts of test. Lines are drawn from this record again and again, and choose and
test thresholds as add-exits does, without the model. So the true agreement of a rule, on the record, is known exactly.
"""

from functools import partial
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

from mini_ee.experiments.measured import frequent_lines
from mini_ee.experiments.measured.add_exits_cases import call, stored
from mini_ee.experiments.measured.add_exits_guarantee import REPEATS, Observer, summary
from mini_ee.experiments.measured.command import answer_of_command
from mini_ee.experiments.measured.fine_tuning import BATCH, FineTuned, learn, minutes_of, new_head
from mini_ee.experiments.measured.guarantees_page import record_of
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.data.files import atomic_folder, read_json
from mini_ee.lab.data.tasks import Split
from mini_ee.lab.data.text_files import read_rows
from mini_ee.lab.data.token_files import questions_of, squad_data
from mini_ee.lab.recording import Record, predictions, record
from mini_ee.lab.token_tasks import LABELS, SPAN, WEAKEST
from mini_ee.lab.training.run_folder import Run, load_run

SETS = {"BC5CDR-disease": (LABELS, 3_000, 2), "SQuADShifts": (SPAN, 10_000, 2)}
"""name -> kind, rows of train on which a model is fine-tuned, epochs."""

AGREE = {LABELS: ("texts", "every label"), SPAN: ("questions", "the span of the answer")}
HEADS = {LABELS: "TokenClassification", SPAN: "QuestionAnswering"}
MODEL, LR, SEED, LENGTH, AGREEMENT, SCORED = "MiniLM", 2e-4, 0, 384, 0.95, 1_000
VIOLATED = 0.05  # of the guarantees, at most: the confidence of add-exits is 95%
KEPT = "pays", "exits", "texts", "guarantee", "compared"  # of the summary of add-exits
IGNORED, BEYOND = -100, 1 << 20  # for the losses of transformers: no label, and a token that was cut


def shuffled(rows: list) -> list:
    """The rows in an order drawn with SEED."""
    return [rows[at] for at in np.random.default_rng(SEED).permutation(len(rows))]


# ---- Fine-tuning ----
def fine_tuned(work: Path, sources: Sources, files: dict[str, Path], name: str) -> FineTuned:
    """The model of a set, fine-tuned unless the work folder has it, and the texts of dev."""
    folder, (kind, count, epochs) = work / "models" / name, SETS[name]
    if not folder.is_dir():
        folder.parent.mkdir(exist_ok=True)
        with atomic_folder(folder) as out:
            _fine_tune(sources, out, shuffled(_labelled(files["train"], kind))[:count], kind, epochs)
    return FineTuned(folder, shuffled([row.texts for row in read_rows([files["dev"]])[0]]), None, None, None)


def _labelled(path: Path, kind: str) -> list[tuple]:
    """(texts, tags of the words or first answer) of each row."""
    if kind == LABELS:
        return [(row.texts, row.gold) for row in read_rows([path])[0]]
    questions = [question for question, _ in questions_of(squad_data(path.read_text(encoding="utf-8")))]
    return [((row["question"], row["context"]), row["answers"][0]) for row in questions]


def _fine_tune(sources: Sources, out: Path, rows: list[tuple], kind: str, epochs: int) -> None:
    texts, gold = zip(*rows)
    tags = sorted({tag for row in gold for tag in row}) if kind == LABELS else []
    names = {"id2label": dict(enumerate(tags)), "label2id": dict(zip(tags, range(len(tags))))} if tags else {}
    with new_head(sources, out, MODEL, SEED, HEADS[kind], **names) as (network, tokenizer):
        tokenizer.model_max_length = LENGTH

        def loss_of(some: np.ndarray) -> torch.Tensor:
            columns, wanted = zip(*(texts[row] for row in some)), [gold[row] for row in some]
            if tags:  # words, so that the tokenizer knows the first token of each
                columns = [[text.split(" ") for text in column] for column in columns]
            options = {"truncation": True if tags else "only_second", "is_split_into_words": bool(tags)}
            tokens = tokenizer(*map(list, columns), padding=True, return_tensors="pt", **options)
            targets = _tag_targets(tokens, wanted, names["label2id"]) if tags else _span_targets(tokens, wanted)
            return network(**tokens, **targets).loss

        learn(network, Split(texts, None), loss_of, LR, epochs, SEED)


def _tag_targets(tokens, gold: list[list[str]], numbers: dict[str, int]) -> dict:
    """The first token of each word has the word's tag."""
    labels = []
    for row, tags in enumerate(gold):
        words = tokens.word_ids(row)
        first = [word is not None and word != before for before, word in zip([None, *words], words)]
        labels.append([numbers[tags[word]] if begins else IGNORED for word, begins in zip(words, first)])
    return {"labels": torch.tensor(labels)}


def _span_targets(tokens, gold: list[dict]) -> dict:
    """The tokens of the answer's first and last character in the context."""
    ends = []
    for row, answer in enumerate(gold):
        first = answer["answer_start"]
        places = [tokens.char_to_token(row, at, 1) for at in (first, first + len(answer["text"].rstrip()) - 1)]
        ends.append([BEYOND if None in places else place for place in places])
    return dict(zip(("start_positions", "end_positions"), torch.tensor(ends).T))


# ---- Exits ----
def case(sources: Sources, work: Path, name: str) -> dict:
    """A set: the call of add-exits, what `mini-ee evaluate` finds on SCORED texts of test, and the repetitions."""
    torch.set_num_threads(1)
    files = {split: next(sources.find("data", name).glob(f"{split}.*")) for split in ("train", "dev", "test")}
    model, out, kind = fine_tuned(work, sources, files, name), work / "calls" / name, SETS[name][0]
    called = stored(
        work, f"{name} call", lambda: call(model, out, frequent_lines.LINES, SEED, "--agreement", AGREEMENT)
    )
    options = "--task", files["test"], "--max-rows", SCORED, "--batch-size", 1, "--seed", SEED
    evaluated = partial(answer_of_command, "evaluate", out / "exported", *options, threads=1)
    found = stored(work, f"{name} scores", evaluated) if (out / "exported").exists() else None
    of_exits = stored(work, f"{name} record", lambda: recorded_exits(load_run(out / "run"), files["test"]))
    draws = [repetition(record_from(of_exits), kind, seed) for seed in range(REPEATS)]
    figures = {"minutes": minutes_of(model.folder), "recorded": len(of_exits["numbers"]), "calls": called}
    figures |= {"summary": {key: read_json(out / "summary.json")[key] for key in KEPT}, "found": found}
    return {name: figures | {"levels": [summary(list(level)) for level in zip(*draws)]}}


def recorded_exits(run: Run, test: Path) -> dict:
    """Of all texts of a file the number of the decisions of every exit, and the confidence of all but the last."""
    recorded = record(run.segments(), run.encode([row.texts for row in read_rows([test])[0]]), BATCH, "test")
    weakest = recorded.segments.measures[WEAKEST].tolist()
    return {"exits": run.exits, "numbers": recorded.logits[:, :, 0].tolist(), "weakest": weakest}


def record_from(of_exits: dict) -> Record:
    """The record, whose labels are the decisions of the last exit."""
    numbers, weakest = np.array(of_exits["numbers"]), np.array(of_exits["weakest"], np.float32)
    recorded = record_of(numbers[:, :, None], tuple(of_exits["exits"]), {WEAKEST: weakest})
    return recorded._replace(labels=numbers[:, -1])


def repetition(recorded: Record, kind: str, seed: int) -> list[dict]:
    """One draw of lines, with replacement, whose thresholds are replayed on the whole record."""
    lines = np.random.default_rng(seed).integers(len(recorded.logits), size=frequent_lines.LINES)
    with patch.object(frequent_lines, "default_rule", Observer()) as observer:
        frequent_lines.chosen_from(recorded, lines, AGREEMENT, seed, kind)

    def replayed(rule) -> tuple[float, float]:
        result = recorded.replay(rule)
        agreement = (predictions(result.logits) == recorded.labels).mean()
        return float(agreement), 1 - float(result.layers_run.mean()) / recorded.segments.exits[-1]

    return observer.outcomes(replayed)


PARTS = {name: partial(case, name=name) for name in SETS}


def page_figures(figures: dict) -> dict:
    """The cases of all sets, in their order, and the settings that the page names."""
    cases = []
    for name, (kind, rows, epochs) in SETS.items():
        case, (unit, agree) = figures[name], AGREE[kind]
        columns = "exits", "exit_counts", "per_exit_agreement", "per_exit_scores"
        by_exit = list(zip(*(case["found"][column] for column in columns))) if case["found"] else []
        described = {"name": name, "rows": rows, "epochs": epochs, "unit": unit, "agree": agree, "by_exit": by_exit}
        cases.append(case | described)
    tested = [level for case in cases for level in case["levels"] if not level["planted"]]
    exceeded = sum(level["interval"][0] > VIOLATED for level in tested)
    figures = {"cases": cases, "wanted": AGREEMENT, "scored": SCORED, "draws": REPEATS, "lines": frequent_lines.LINES}
    return figures | {"allowed": VIOLATED, "exceeded": exceeded}
