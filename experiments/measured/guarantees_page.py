"""results/guarantees.md: how often each guarantee is violated on rows other than those it was computed from.

For each task, `joint` is trained once on MiniLM, and every exit is recorded once on rows of the train split that the
training did not use. Then rows are drawn again and again: some give the guarantee, all others show whether it is
violated. The recordings stay in the work folder, so a second call only draws.
"""

import math
from pathlib import Path

import numpy as np

from mini_ee.calibrate import binomial_cdf
from mini_ee.experiments.measured import frequent_lines, repeated_trainings
from mini_ee.experiments.pages import number, percent
from mini_ee.experiments.trainings import Sources, trained
from mini_ee.lab.calibration import COMPARED_DELTA, agreement_by_sets, broken_guarantees, observe
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tasks import Split, Task, load_task
from mini_ee.lab.recording import Record, Recorded, predictions, record
from mini_ee.lab.rules import Never, Rule, Threshold
from mini_ee.lab.statistics import POWER, paired_p_values, share_interval
from mini_ee.lab.training.default_rule import default_rule, sweep
from mini_ee.lab.training.run_folder import Run

SEED = 0
EXITS = (2, 4, 6)
MAX_LOSS = 0.01
TASKS = {"SST-2": (6_000, 20_000, (600, 3_000)), "TREC": (2_000, None, (600, 1_500))}
"""name -> rows to train on, rows to record at most, sizes of the held-out set."""

FREQUENT = ("SICK", 1_500)  # the task of frequent_lines.py, and rows to train on

TRAININGS = 100  # per method, each on its own rows
TEST_SIZES = (100, 299, 500, 1000, 2000, 3000)  # texts that test a rule
LEVELS, TRUE_AGREEMENTS = (0.99, 0.98, 0.95), (0.995, 0.998)  # agreements that are tested; those that a rule may have
PROPOSING = 200  # at most, and at most a tenth of a held-out set: rows that propose rules; the others test them
DRAWS, SETS, EPSILONS, CONFIDENCE_MEASURE = 200, 1000, (0.9, 0.95), "max_probability"


def trained_on_part(work: Path, sources: Sources, name: str, rows: int, most: int | None) -> tuple[Run, Split]:
    """`joint` on `rows` rows of train, and the other rows, at most `most`. The run stays in `work`."""
    header, *lines = (sources.find("data", name) / "train.tsv").read_text().splitlines()
    lines = [lines[row] for row in np.random.default_rng(SEED).permutation(len(lines))]
    first = round(rows / 0.9)  # training holds a tenth of its rows out
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, some in (("train", lines[:first]), ("dev", lines[first:][:most])):
        (folder / f"{split}.tsv").write_text("\n".join([header, *some]) + "\n")
    options = {"method": "joint", "model": "all-MiniLM-L6-v2", "task": folder, "exits": EXITS}
    return trained(work / f"{name}-run", options, SEED, sources), load_task(folder).split("dev")


def record_unseen(work: Path, sources: Sources, name: str, rows: int, most: int | None) -> Path:
    """Write the logits (N, K, C) of every exit and the labels (N,) of rows that the training did not use."""
    path = work / f"{name}.npz"
    if path.exists():
        return path
    run, unseen = trained_on_part(work, sources, name, rows, most)
    recorded = record(run.segments(), run.encode(unseen.texts), 64, progress=f"recording {name}")
    partial = path.with_suffix(".part.npz")
    np.savez(partial, logits=recorded.logits, labels=unseen.labels)
    partial.rename(path)
    return path


def record_of(
    logits: np.ndarray, exits: tuple[int, ...] = EXITS, measures: dict[str, np.ndarray] | None = None
) -> Record:
    """A record of logits (N, K, C), and of measures (N, K - 1), on which rules can be replayed."""
    layers = np.diff((0, *exits)).tolist()
    return Record(Recorded(exits, logits, np.ones((*logits.shape[:2], 2)), layers, measures), logits, 1.0)


def without_bound(recorded: Record, labels: np.ndarray) -> Rule:
    """A baseline without a guarantee: of the rules whose measured loss of accuracy on the held-out set is at most
    MAX_LOSS, with no confidence bound added, the one that saves most layers.
    """
    best, most = Never(), 0.0
    for rule in sweep(Threshold(math.inf))(recorded):
        loss, saved = outcome(recorded, labels, rule)
        if loss.mean() <= MAX_LOSS and saved.mean() > most:
            best, most = rule, saved.mean()
    return best


def outcome(recorded: Record, labels: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """For each row: correct(last exit) - correct(rule), and the share of the layers saved."""
    result = recorded.replay(rule)
    correct = predictions(recorded.logits[:, -1]) == labels, predictions(result.logits) == labels
    return correct[0].astype(int) - correct[1], 1 - result.layers_run / EXITS[-1]


def resample(name: str, logits: np.ndarray, labels: np.ndarray, size: int) -> dict:
    """The default rule and the rule without a bound, as means over DRAWS held-out sets of this size."""
    task = Task(name, tuple(map(str, range(logits.shape[2]))), ("accuracy",), {})
    everything, random, repetitions = record_of(logits), np.random.default_rng(SEED), []
    for _ in tqdm(range(DRAWS), desc=f"{name} {size}", delay=2):
        held_out = np.zeros(len(labels), bool)
        held_out[random.permutation(len(labels))[:size]] = True
        recorded = record_of(logits[held_out])._replace(labels=labels[held_out])
        proposing = np.zeros(size, bool)
        proposing[random.permutation(size)[: min(PROPOSING, size // 10)]] = True
        chosen = default_rule(recorded.take(proposing), recorded.take(~proposing), task, MAX_LOSS)
        loss, saved = outcome(everything, labels, chosen.rule)
        free_loss, free_saved = outcome(everything, labels, without_bound(recorded, labels[held_out]))
        guaranteed = chosen.guarantee is not None
        repetitions.append(
            {
                "guaranteed": guaranteed,
                "exceeded": guaranteed and loss[~held_out].mean() > MAX_LOSS,
                "exceeded_all_rows": guaranteed and loss.mean() > MAX_LOSS,
                "saved": saved[~held_out].mean(),
                "without_bound_exceeded": free_loss[~held_out].mean() > MAX_LOSS,
                "without_bound_saved": free_saved[~held_out].mean(),
            }
        )
    means = {key: float(np.mean([repetition[key] for repetition in repetitions])) for key in repetitions[0]}
    return {"task": name, "hold_out": size, "rest": len(labels) - size} | means


def calibrated(name: str, logits: np.ndarray) -> list[dict]:
    """The agreement and the violated guarantees of `calibrate`, over SETS draws of rows, for each of EPSILONS."""
    observed, cases = observe(record_of(logits), CONFIDENCE_MEASURE), []
    for epsilon in EPSILONS:
        agreement = agreement_by_sets(observed, epsilon, SETS, SEED)
        broken = broken_guarantees(observed, epsilon, COMPARED_DELTA, CONFIDENCE_MEASURE, SETS, SEED)
        cases.append({"task": name, "epsilon": epsilon, "rows": agreement.pop("groups_a_set"), "kept": agreement})
        cases[-1]["broken"] = {key: broken[key] for key in ("paper", "delta")}
    return cases


# ---- Other bounds ----
ALPHA = 0.05
SIZES = (300, 350, 400, 500, 600, 800, 1000, 1250, 1500, 2000, 2500, 3000, 4000, 5000, 6000, 8000, 10000, 14000)


def exact(losses: np.ndarray) -> np.ndarray:
    """The test that mini_ee uses: Tango's score, exact."""
    return paired_p_values(losses, MAX_LOSS) <= ALPHA


def betting(losses: np.ndarray) -> np.ndarray:
    """Waudby-Smith & Ramdas 2024: plug-in bets against a loss of MAX_LOSS, rejected at a capital of 1 / ALPHA."""
    seen = np.arange(1, losses.shape[1] + 1)
    mean = np.cumsum(losses, axis=1) / (seen + 1)
    variance = (0.01 + np.cumsum((losses - mean) ** 2, axis=1)) / (seen + 1)
    before = np.concatenate((np.full((len(losses), 1), 0.02), variance[:, :-1]), axis=1)
    bets = np.minimum(np.sqrt(2 * math.log(1 / ALPHA) / (losses.shape[1] * before)), 0.9 / (1 - MAX_LOSS))
    return np.cumsum(np.log1p(bets * (MAX_LOSS - losses)), axis=1).max(axis=1) >= math.log(1 / ALPHA)


def empirical_bernstein(losses: np.ndarray) -> np.ndarray:
    """Maurer & Pontil 2009, for losses of range 2."""
    rows, log = losses.shape[1], math.log(2 / ALPHA)
    bound = np.sqrt(2 * losses.var(axis=1, ddof=1) * log / rows) + 7 * 2 * log / (3 * (rows - 1))
    return losses.mean(axis=1) + bound <= MAX_LOSS


def rows_by_bound() -> list[dict]:
    """The smallest of SIZES at which a share POWER of the held-out sets gives a guarantee; None if there is none."""
    rows, random = [], np.random.default_rng(SEED)
    for worse, better in ((0, 0), (0.005, 0.005), (0.01, 0.01), (0.02, 0.02), (0.03, 0.03), (0.007, 0.002)):
        row = {"worse": worse, "better": better}
        for bound in (exact, betting, empirical_bernstein):
            row[bound.__name__] = None
            for size in SIZES:
                losses = random.choice(
                    np.array([1, -1, 0], np.int8), (DRAWS, size), p=[worse, better, 1 - worse - better]
                )
                if bound(losses).mean() >= POWER:
                    row[bound.__name__] = size
                    break
        rows.append(row)
    return rows


def measure_tasks(sources: Sources, work: Path) -> dict:
    """The default rule and `calibrate`, on rows drawn from each task."""
    tasks = {"tasks": [], "default": [], "calibrate": []}
    for name, (rows, most, sizes) in TASKS.items():
        with np.load(record_unseen(work, sources, name, rows, most)) as saved:
            logits, labels = saved["logits"], saved["labels"]
        accuracy = (logits.argmax(-1) == labels[:, None]).mean(0)
        tasks["tasks"].append({"task": name, "trained": rows, "recorded": len(labels), "accuracy": accuracy.tolist()})
        tasks["default"] += [resample(name, logits, labels, size) for size in sizes]
        tasks["calibrate"] += calibrated(name, logits)
    return tasks


def measure_frequent(sources: Sources, work: Path) -> dict:
    """Guarantees for lines of which a few texts make up a large share."""
    sources.find("data", FREQUENT[0])  # its checksum is on the page, also if the outputs are recorded already
    with np.load(record_unseen(work, sources, *FREQUENT, None)) as saved:
        return {"frequent": {"task": FREQUENT[0]} | frequent_lines.measure(record_of(saved["logits"]))}


PARTS = {
    "frequent": measure_frequent,
    "tasks": measure_tasks,
    "bounds": lambda sources, work: {"bounds": rows_by_bound()},
    "repeated": lambda sources, work: {"repeated": repeated_trainings.every_method(work, TRAININGS)},
}


# ---- The figures of the page ----
PLANTED_NAMES = {"the test rows choose": "test examples also select", "no test": "no test"}  # JSON -> page


def by_kind(cases: list[dict]) -> tuple[list[dict], list[dict], list[dict]]:
    """Repeated trainings without mistakes, those measured on more fresh rows, and those with planted mistakes."""
    planted = [case for case in cases if case["planted"]]
    finer = [case for case in cases if case["fresh"] == repeated_trainings.MORE_FRESH]
    return [case for case in cases if case not in planted + finer], finer, planted


def together(trainings: list[dict]) -> dict:
    """The sums and means of the repeated trainings of several methods."""
    sums = {name: sum(training[name] for training in trainings) for name in ("trainings", "guaranteed", "broken")}
    means = {name: float(np.mean([training[name] for training in trainings])) for name in ("loss", "saved")}
    interval = share_interval(sums["broken"], sums["trainings"])
    return trainings[0] | sums | means | {"method": "all methods", "interval": interval}


def page_figures(figures: dict) -> dict:
    """What the first paragraphs compare, the settings, and the cases of the tables that are not in the JSON."""
    usual, finer, planted = by_kind(figures["repeated"])
    every, default = together(usual), figures["default"]
    (violated, free) = ([one[key] for one in default] for key in ("exceeded", "without_bound_exceeded"))
    return {
        **{"least": min(violated), "most": max(violated), "free_least": min(free), "free_most": max(free)},
        **{"first": default[0], "repeated": every | {"share": every["broken"] / every["trainings"]}},
        **{"draws": DRAWS, "sets": SETS, "delta": COMPARED_DELTA, "proposing": PROPOSING, "max_loss": MAX_LOSS},
        **{"trainings": TRAININGS, "repeated_loss": repeated_trainings.REPEATED_MAX_LOSS},
        **{"fresh": repeated_trainings.FRESH, "more_fresh": repeated_trainings.MORE_FRESH},
        **{"layers": repeated_trainings.LAYERS, "width": repeated_trainings.WIDTH},
        "exits": ", ".join(map(str, EXITS)),
        "largest": SIZES[-1],
        "repeated_cases": [one | {"method": named(one)} for one in [*usual, every, *finer, *planted]],
        "tests": {str(texts): power(texts) for texts in TEST_SIZES},
        **frequent_lines.page_figures(figures["frequent"]),
    }


def named(one: dict) -> str:
    """The method of repeated trainings, and the planted mistake."""
    return ", ".join(filter(None, (one["method"], PLANTED_NAMES.get(one["planted"]))))


def most_disagreements(texts: int, agreement: float, delta: float = 0.05) -> int:
    """The largest number of disagreements with which texts pass the test of an agreement; -1 if no number does."""
    most = -1
    while binomial_cdf(most + 1, texts, 1 - agreement) <= delta:
        most += 1
    return most


def power(texts: int) -> dict:
    """Of a number of texts: how many may disagree at each level, and how often rules pass the test of the first."""
    most, level = [most_disagreements(texts, level) for level in LEVELS], LEVELS[0]
    chances = [binomial_cdf(most[0], texts, 1 - agreement) for agreement in TRUE_AGREEMENTS]
    row = [number(texts), *("none" if count < 0 else count for count in most), *(percent(one, 0) for one in chances)]
    return {"texts": texts, "most": most[0], "all_agree": level**texts, "chances": chances, "row": row}
