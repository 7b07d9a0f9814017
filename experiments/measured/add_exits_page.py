"""results/add-exits.md: `mini-ee add-exits` on models that transformers fine-tuned.

The measurements are in add_exits_cases, add_exits_guarantee and one_file. All cases with seed 0 are measured first; the
page shows how many seeds each figure has.
"""

import textwrap
from collections import Counter
from collections.abc import Iterable

import numpy as np

from mini_ee.experiments.markdown import listed, made_by_measuring, markdown_table, wrapped
from mini_ee.experiments.measured import MADE
from mini_ee.experiments.measured.add_exits_cases import (
    AGREEMENT,
    COUNTS,
    KEPT,
    MEMORY,
    REQUESTS,
    SHADOW,
    exit_0_cases,
    memory_cases,
    model_cases,
    same_labels,
    shifts,
)
from mini_ee.experiments.measured.add_exits_guarantee import OF, guarantee
from mini_ee.experiments.measured.add_exits_pictures import column, draw, grouped, largest
from mini_ee.experiments.measured.fine_tuning import MODELS, SEEDS, TASKS
from mini_ee.experiments.measured.one_file import EXITS, TOKENS, one_file

__all__ = ["PAGE_TEXT", "PARTS", "draw", "page"]
BAR = 0.03  # largest difference between the time at an exit and its share of the layers

PARTS = {
    "models": model_cases,
    "memory": memory_cases,
    "exit-0": exit_0_cases,
    "same-labels": same_labels,
    "guarantee": guarantee,
    "shift": shifts,
    "one-file": one_file,
}

PAGE_TEXT = """# Exits for fine-tuned models, from texts without labels

{answer}

{made_by} {cores}

{models}

*Texts* is the number of texts without labels that the command reads. *Agreement* is the share of the examples of dev or
test whose prediction equals that of the model as transformers computes it. On SICK-R the model predicts a number; two
numbers agree if they differ by at most a tenth of the standard deviation of the model's numbers. *Score* is the
accuracy, for SICK-R the Spearman correlation times 100. *Time* is that of model.onnx at batch size 1 on one thread, in
percent of the same model without exits. *Guaranteed* counts the seeds with which the command guarantees the agreement.
*Minutes* are processor time of the whole command. {memory} ± is the standard deviation over seeds. There
are {examples}. {not_paid} Other pages train the exits with labels, mostly together with the model, so they have other
figures for these tasks.

![Agreement against layers saved, a panel per task](add-exits.png)

Each line is one seed: it shows what other thresholds would give with the same heads, on dev or test. A star marks the
thresholds that the command chose on its own texts.

## More texts

![Agreement against layers saved for different numbers of texts](add-exits-texts.png)

{texts}

## The model itself is unchanged

{own}

## Is the guarantee violated?

`add-exits` guarantees an agreement of at least {agreement} with 95 % confidence for texts like those that it was given.
Here {repetitions} repetitions each draw {drawn:,} of the same {pool:,} texts of SST-2, train heads on {model} and
choose thresholds. The agreement is measured on all other texts. A guarantee is violated if this agreement is lower than
guaranteed. At most 5 % of the guarantees should be violated. The interval is the 95 % interval of Clopper and Pearson;
the repetitions share texts, so it is slightly too narrow. The rows *no test* leave out the statistical test on
purpose: the thresholds only have to reach the agreement on the texts that choose them. If many more of these
guarantees are violated, the measurement would notice a missing test.

{guarantee}

## Texts of another kind

Heads and thresholds come from {kept_texts:,} texts of SST-2 ({kept_model}, agreement {agreement}). `mini-ee serve
--shadow {shadow}` then answers {requests} texts, one after the other, of the dev set of SST-2, of MR (whole sentences
of film reviews, among them those of SST-2's phrases) and of TREC (questions). `--shadow {shadow}` also runs this share
of the requests without exits, so that the agreement is known for them. With `--tighten`, the server raises thresholds
once a statistical test on these requests shows that the agreement is below `--epsilon {agreement}`.

{shift}

*True agreement* counts all answers. *Reported* is what `/metrics` shows for the shadow requests, with its 95 %
interval; with `--tighten`, it counts the requests since the last change. *Drift* compares how many texts exit at each
exit with how many did in the calibration (0: equal shares, 1: other exits only). *Tightened* is how often thresholds
were raised.

{shift_verdict}

## One file runs at four depths

A ModernBERT of the published base shape (22 layers, width 768, vocabulary 50,368) with random weights and exits after
layers {exits} is one model.onnx. All examples exit at the same exit; all heads up to there are evaluated. Batch size 1,
{tokens} tokens, one thread; all cases take turns in one process, and medians of processor time count. The target is a
difference between time and share of the layers of at most {bar}.

{one_file}

{one_file_verdict}

## Exit 0

Exit 0 is a head on the mean of the embeddings, before the first layer. Here it is added to the exits that the command
chose (`--exits 0,...`), with agreement {agreement}, {exit_0_texts} texts and {kept_model}.

{exit_0}

{exit_0_verdict}

## How it was measured

{fine_tuning}
- Texts without labels: examples of the train file that the fine-tuning did not use, without their labels and without
  repeats. The train files of TREC, MRPC and SICK-R are small, so there are few examples for the fine-tuning and few
  texts for the command. The built-in BERT was pretrained on texts of SST-2, TREC and MRPC, without labels.
- SST-2 has phrases in train and whole sentences in dev. So dev is not quite like the texts that choose the thresholds.
- The table reports dev of SST-2, MRPC and SICK-R and test of TREC, without examples whose text is in train.
- {machine}
"""


# ---- Numbers ----
def percent(values: Iterable[float], digits: int = 1) -> str:
    """The mean in percent, and the standard deviation over seeds."""
    return number([100 * value for value in values], digits)


def number(values: Iterable[float], digits: int = 1) -> str:
    """The mean, and the standard deviation over seeds if there are several."""
    found = list(values)
    shown = f"{np.mean(found):.{digits}f}"
    return f"{shown} ± {np.std(found, ddof=1):.{digits}f}" if len(found) > 1 else shown


# ---- Tables ----
def models_table(cases: list[dict]) -> str:
    """One row per task, model and number of texts."""
    titles = ["task", "model", "texts", "seeds", "agreement, %", "score of the model", "score with exits"]
    titles += ["layers saved, %", "time, %", "guaranteed", "minutes"]
    order = {name: at for at, name in enumerate((*TASKS, *MODELS))}
    rows = []
    groups = grouped(cases, "task", "model", "wanted")
    for task, model, wanted in sorted(groups, key=lambda key: (order[key[0]], order[key[1]], key[2])):
        some = groups[task, model, wanted]
        row = [task, model, f"{max(column(some, 'texts')):,}", len(some), percent(column(some, "agreement"))]
        row += [percent(column(some, key)) for key in ("score", "score_with_exits", "layers_saved")]
        row += [percent(column(some, "time"), 0), f"{sum(column(some, 'guaranteed'))} of {len(some)}"]
        rows.append([*row, number(column(some, "processor_minutes"))])
    return "\n".join(markdown_table(titles, rows))


def guarantee_table(levels: list[dict]) -> str:
    """One row per level of agreement, then those with the planted mistake."""
    titles = ["guaranteed agreement", "guarantees", "violated", "95 % interval of the share violated"]
    titles += ["mean agreement, %", "lowest agreement, %", "layers saved, %"]
    rows = []
    for each in sorted(levels, key=lambda one: (one["planted"] is not None, -one["level"])):
        name = f"{each['level']:.0%}" + (f", {each['planted']}" if each["planted"] else "")
        low, high = each["interval"]
        row = [name, f"{each['guaranteed']} of {each['repetitions']}", each["broken"], f"{low:.1%} to {high:.1%}"]
        shown = (each["agreement"], each["least"], each["saved"])
        rows.append(row + ["" if value is None else f"{100 * value:.1f}" for value in shown])
    return "\n".join(markdown_table(titles, rows))


def shift_table(found: list[dict]) -> str:
    """One row per set of texts, without and with --tighten."""
    titles = ["texts", "`--tighten`", "true agreement, %", "reported, %", "layers saved, %", "drift", "tightened"]
    rows = []
    for each in found:
        metrics = each["metrics"]
        mean, low, high = (metrics.get(f"agreement end {end}") for end in ("mean", "low", "high"))
        reported = "none yet" if mean is None else f"{100 * mean:.1f} ({100 * low:.1f} to {100 * high:.1f})"
        row = [each["task"], "yes" if each["tighten"] else "no", f"{100 * each['served_agreement']:.1f}", reported]
        row += [f"{100 * each['served_saved']:.1f}", f"{metrics['exit_drift']:.2f}"]
        rows.append([*row, f"{metrics['tightened_total']:.0f}"])
    return "\n".join(markdown_table(titles, rows))


def one_file_table(found: dict) -> str:
    """One row per exit."""
    titles = ["exit after layer", "share of the layers, %", "time, % of all layers", "difference, points", "ms"]
    rows = [
        [each["layer"], *(f"{100 * value:.1f}" for value in (each["share"], each["time"]))]
        + [f"{100 * (each['time'] - each['share']):+.1f}", f"{each['ms']:.0f}"]
        for each in found["exits"]
    ]
    return "\n".join(markdown_table(titles, rows))


def exit_0_table(found: list[dict]) -> str:
    """One row per task, without and with exit 0."""
    titles = ["task", "exit 0", "seeds", "agreement, %", "layers saved, %", "time, %"]
    rows = []
    for (task, model, first), some in grouped(with_first(found), "task", "model", "first").items():
        shown = [percent(column(some, name)) for name in ("agreement", "layers_saved", "time")]
        rows.append([task, "yes" if first == 0 else "no", len(some), *shown])
    return "\n".join(markdown_table(titles, sorted(rows)))


def with_first(found: list[dict]) -> list[dict]:
    """The cases, each with `first`: 0 if its first exit is 0, else 1."""
    return [each | {"first": min(1, each["exits"][0])} for each in found]


# ---- Sentences ----
def answer(figures: dict) -> str:
    """What is saved and what stays the same, how often the guarantee is violated, and what other texts change."""
    best = largest(figures["models"])
    paid = {task: some for (task,), some in grouped(best, "task").items() if any(column(some, "pays"))}
    groups = grouped([each for some in paid.values() for each in some], "task", "model").values()
    saved, agreement = ([float(np.mean(column(some, key))) for some in groups] for key in ("layers_saved", "agreement"))
    never = [task for task in dict.fromkeys(column(best, "task")) if task not in paid]
    refused = f" On {listed(never)} exits do not pay, so it exports nothing." if never else ""
    changes = [0.0, *(each["score_with_exits"] - each["score"] for each in best)]
    given = [each for each in figures["guarantee"]["levels"] if not each["planted"] and each["level"] == AGREEMENT]
    (level,) = given
    away = {each["task"]: each for each in figures["shift"] if not each["tighten"]}
    return (
        f"On {listed([*paid])}, `mini-ee add-exits` saves {100 * min(saved):.0f} to {100 * max(saved):.0f} % of the "
        f"layers at its default agreement of {100 * AGREEMENT:.0f} %, with the largest number of texts and two models. "
        f"On dev or test, {100 * min(agreement):.1f} to {100 * max(agreement):.1f} % of the predictions stay the same."
        f"{refused} In no single training does the score fall by more than {-100 * min(changes):.1f} points or rise by "
        f"more than {100 * max(changes):.1f}. On SST-2, we repeated the command {level['repetitions']} times with "
        f"newly drawn texts. The agreement was below the guaranteed {100 * AGREEMENT:.0f} % in {level['broken']} "
        f"repetitions; {0.05 * level['repetitions']:.0f} are allowed. "
        f"The guarantee covers only texts like those that were given. With thresholds from SST-2, the agreement is "
        f"{100 * away['MR']['served_agreement']:.1f} % on MR and {100 * away['TREC']['served_agreement']:.1f} % on "
        f"TREC. Of the layers, {100 * away['MR']['served_saved']:.0f} and {100 * away['TREC']['served_saved']:.0f} % "
        f"are saved there, compared with {100 * away['SST-2']['served_saved']:.0f} % on SST-2."
    )


def not_paid_text(cases: list[dict]) -> str:
    """The calls that left the model as it is."""
    left = [each for each in cases if not each["pays"]]
    counts = Counter(f"{each['task']} with {each['model']} and {each['texts']:,} texts" for each in left)
    named = ", ".join(f"{count} of {name}" for name, count in counts.items())
    where = (
        f": {named}. Then it exports nothing. For these calls the table shows an agreement of 100 %, 0 % saved and a "
        f"time of 100 %, because the model runs as it is; a guarantee may have been found, but not used"
        if left
        else ""
    )
    missing = SEEDS * len(MODELS) * sum(map(len, COUNTS.values())) - len(cases)
    more = f" {missing} further calls, of other seeds among them, are not measured yet." if missing else ""
    return f"In {len(left)} of {len(cases)} calls the command finds that exits do not pay{where}.{more}"


def texts_text(cases: list[dict]) -> str:
    """What more texts give, for the tasks with several numbers of texts."""
    lines = []
    for (task, model), some in grouped(cases, "task", "model").items():
        counts = grouped(some, "wanted")
        if len(counts) > 1:
            shown = [
                f"{100 * np.mean(column(each, 'layers_saved')):.1f} % with {max(column(each, 'texts')):,}"
                for _, each in sorted(counts.items())
            ]
            lines.append(f"- {task}, {model}: layers saved {', '.join(shown)} texts.")
    return "\n".join(lines) or "Each task was measured with one number of texts."


def own_text(figures: dict) -> str:
    """Examples that do not exit, and labels against transformers' pipeline."""
    late = [each for each in figures["models"] if "largest_difference" in each]
    same = figures["same-labels"]
    return (
        f"In all cases of the first table together, {sum(column(late, 'not_exited')):,} examples did not exit early. "
        f"Their logits differ from those of transformers by at most {max(column(late, 'largest_difference')):.1e} "
        f"(float32). We also took {same['texts']:,} more texts of {same['task']} and the model {same['model']}. With "
        f"the exits switched off (the rule `never`), {same['never']:,} labels of model.onnx equal those of "
        f'transformers\' `pipeline("text-classification")`. With the exits on, {same["chosen"]:,} do. The command '
        f"refuses `--agreement 1`, because no test on texts can guarantee it."
    )


def shift_text(found: list[dict]) -> str:
    """Whether the reported interval contains the truth, and what --tighten does."""
    plain = [each for each in found if not each["tighten"]]
    inside = sum(
        each["metrics"]["agreement end low"] <= each["served_agreement"] <= each["metrics"]["agreement end high"]
        for each in plain
    )
    below = [each["task"] for each in plain if each["served_agreement"] < AGREEMENT]
    tightened = [each["task"] for each in found if each["metrics"]["tightened_total"]]
    home, *away = plain
    less = ", ".join(
        f"{100 * each['served_saved']:.1f} % on {each['task']} (drift {each['metrics']['exit_drift']:.2f})"
        for each in away
    )
    return (
        f"The reported interval contains the true agreement in {inside} of {len(plain)} cases. "
        f"The agreement is below {AGREEMENT:.0%} on {', '.join(below) or 'none of them'}. "
        f"The layers saved are {100 * home['served_saved']:.1f} % on {home['task']}, {less}. Texts of another kind "
        f"exit after other layers, and the drift shows this without labels and without shadow requests. `--tighten` "
        f"raised thresholds on {', '.join(tightened) or 'none of them'}. Where the true agreement is too low and no "
        f"threshold was raised, there were too few shadow requests for a significant test."
    )


def one_file_text(found: dict) -> str:
    """Whether the target is reached."""
    worst = max(found["exits"], key=lambda each: abs(each["time"] - each["share"]))
    difference = worst["time"] - worst["share"]
    verdict = "within" if abs(difference) <= BAR else "not within"
    return (
        f"The largest difference is {100 * difference:+.1f} points, after layer {worst['layer']}: {verdict} the target "
        f"of {100 * BAR:.0f} points. With the rule `never`, the file takes {found['full_ms']:.0f} ms, which is 100 % "
        f"in the table. The model exported without exits takes {found['plain_ms']:.0f} ms."
    )


def exit_0_text(found: list[dict]) -> str:
    """The gain of exit 0, paired by seed."""
    lines = []
    for (task,), some in grouped(with_first(found), "task").items():
        pairs = grouped(some, "seed").values()
        gains = {
            key: [
                100 * (next(e[key] for e in pair if not e["first"]) - next(e[key] for e in pair if e["first"]))
                for pair in pairs
                if len({each["first"] for each in pair}) == 2
            ]
            for key in ("layers_saved", "time")
        }
        lines.append(
            f"On {task}, exit 0 changes the layers saved by {number(gains['layers_saved'])} points and the time by "
            f"{number(gains['time'])} points."
        )
    return " ".join([*lines, "± is the standard deviation over seeds; a longer time is worse."])


def memory_text(found: list[dict]) -> str:
    """The peak memory of the command, by model and number of texts."""
    peaks = [f"{each['peak_mb']:,} MB for {each['model']} and {each['texts']:,} texts" for each in found]
    return f"Its peak memory on {MEMORY} is {listed(peaks)}."


def examples_text(cases: list[dict]) -> str:
    """The number of examples of dev or test of each task."""
    counts = {each["task"]: each["examples"] for each in cases}
    return listed([f"{count:,} examples of {task}" for task, count in counts.items()])


def page(figures: dict) -> str:
    """results/add-exits.md."""
    cases, size, made = figures["models"], figures["guarantee"], figures[MADE]["models"]
    minutes = sum(column(cases, "processor_minutes")) + sum(
        {(each["task"], each["model"], each["seed"]): each["fine_tuning_minutes"] for each in cases}.values()
    )
    tuned = ", ".join(f"{rows:,} examples of {task} for {epochs} epochs" for task, (rows, epochs) in TASKS.items())
    tuned = (
        f"- Models: a plain loop around transformers (AdamW), not this project's training, fine-tunes each model on "
        f"{tuned}. The training is short, so the models are weaker than published ones, most of all on SICK-R. "
        f"`BERT-12x128` is the built-in BERT of 12 layers."
    )
    text = PAGE_TEXT.format(
        answer=answer(figures),
        made_by=made_by_measuring("add-exits"),
        cores=f"Machine: {made['processor']}, {made['machine']} that other programs used as well; one thread, no GPU.",
        models=models_table(cases),
        examples=examples_text(cases),
        memory=memory_text(figures["memory"]),
        not_paid=not_paid_text(cases),
        texts=texts_text(cases),
        own=own_text(figures),
        agreement=AGREEMENT,
        repetitions=size["repetitions"],
        drawn=size["drawn"],
        pool=size["pool"],
        model=OF["model"],
        guarantee=guarantee_table(size["levels"]),
        kept_texts=KEPT[2],
        kept_model=KEPT[1],
        shadow=SHADOW,
        requests=f"up to {REQUESTS}",
        shift=shift_table(figures["shift"]),
        shift_verdict=shift_text(figures["shift"]),
        exits=", ".join(map(str, EXITS)),
        tokens=TOKENS,
        bar=f"{100 * BAR:.0f} points",
        one_file=one_file_table(figures["one-file"]),
        one_file_verdict=one_file_text(figures["one-file"]),
        exit_0_texts=f"{max(column(figures['exit-0'], 'texts')):,}",
        exit_0=exit_0_table(figures["exit-0"]),
        exit_0_verdict=exit_0_text(figures["exit-0"]),
        fine_tuning=textwrap.fill(tuned, 118, subsequent_indent="  ", break_on_hyphens=False),
        machine=f"Fine-tuning and calls of the first table took {minutes:.0f} minutes of processor time in all.",
    )
    return wrapped(text)
