"""results/guarantees.md: how often each guarantee is broken on rows that it was not made on.

One training of `joint` on MiniLM for each task; every exit is recorded once on rows of the task's own train split that
the training never saw. Then rows are drawn again and again: some make the guarantee, all others say whether it is kept.
Recordings stay in the work folder, so that a second call only draws.
"""

import math
from pathlib import Path

import numpy as np

from mini_ee.calibration import COMPARED_DELTA, agreement_by_sets, broken_guarantees, observe
from mini_ee.data.progress import tqdm
from mini_ee.data.tasks import Task, load_task
from mini_ee.experiments.markdown import made_by_measuring, markdown_rows, wrapped
from mini_ee.experiments.measured import repeated_trainings
from mini_ee.experiments.trainings import Sources
from mini_ee.recording import Record, Recorded, predictions, record
from mini_ee.rules import NeverExit, Rule, Threshold
from mini_ee.statistics import POWER, paired_p_values, share_interval
from mini_ee.training.default_rule import default_rule, sweep
from mini_ee.training.run_folder import load_run
from mini_ee.training.train_run import train

SEED = 0

EXITS = (2, 4, 6)

MAX_LOSS = 0.01

TASKS = {"SST-2": (6_000, 20_000, (600, 3_000)), "TREC": (2_000, None, (600, 1_500))}
"""name -> rows to train on, rows to record at most, sizes of the hold-out."""

TRAININGS = 100  # of each method, each on rows of its own
PROPOSING = 200  # rows at most, and a tenth of a hold-out, that propose rules; the others test them
DRAWS, SETS, EPSILONS, MEASURE = 200, 1000, (0.9, 0.95), "max_probability"


def record_unseen(work: Path, sources: Sources, name: str, rows: int, most: int | None) -> Path:
    """Train on `rows` rows of train, and record what every exit says of the others: logits (N, K, C), labels (N,)."""
    path = work / f"{name}.npz"
    if path.exists():
        return path
    header, *lines = (sources.find("data", name) / "train.tsv").read_text().splitlines()
    lines = [lines[row] for row in np.random.default_rng(SEED).permutation(len(lines))]
    first = round(rows / 0.9)  # training holds a tenth of its rows out
    folder = work / name
    folder.mkdir(parents=True, exist_ok=True)
    for split, some in (("train", lines[:first]), ("dev", lines[first:][:most])):
        (folder / f"{split}.tsv").write_text("\n".join([header, *some]) + "\n")
    if not (work / f"{name}-run").exists():
        train("joint", sources.find("weights", "all-MiniLM-L6-v2"), folder, work / f"{name}-run", exits=EXITS)
    run, unseen = load_run(work / f"{name}-run"), load_task(folder).split("dev")
    recorded = record(run.segments(), run.encode(unseen.texts), 64, progress=f"recording {name}")
    partial = path.with_suffix(".part.npz")
    np.savez(partial, logits=recorded.logits, labels=unseen.labels)
    partial.rename(path)
    return path


def rows_of(logits: np.ndarray) -> Record:
    """Logits (N, K, C) as a record that rules are replayed on."""
    layers = np.diff((0, *EXITS)).tolist()
    return Record(Recorded(EXITS, logits, np.ones((*logits.shape[:2], 2)), layers), logits, 1.0)


def without_bound(recorded: Record, labels: np.ndarray) -> Rule:
    """The rule that saves most among those that lose at most MAX_LOSS on the hold-out itself."""
    best, most = NeverExit(), 0.0
    for rule in sweep(Threshold(math.inf))(recorded):
        loss, saved = outcome(recorded, labels, rule)
        if loss.mean() <= MAX_LOSS and saved.mean() > most:
            best, most = rule, saved.mean()
    return best


def outcome(recorded: Record, labels: np.ndarray, rule: Rule) -> tuple[np.ndarray, np.ndarray]:
    """For each row: right(last) - right(rule), and the share of the layers that is saved."""
    result = recorded.replay(rule)
    right = predictions(recorded.logits[:, -1]) == labels, predictions(result.logits) == labels
    return right[0].astype(int) - right[1], 1 - result.layers_run / EXITS[-1]


def resample(name: str, logits: np.ndarray, labels: np.ndarray, size: int) -> dict:
    """The default rule of so many hold-outs of this size, beside the rule without a bound: means over the draws."""
    task = Task(name, tuple(map(str, range(logits.shape[2]))), ("accuracy",), {})
    everything, random, found = rows_of(logits), np.random.default_rng(SEED), []
    for _ in tqdm(range(DRAWS), desc=f"{name} {size}", delay=2):
        held = np.zeros(len(labels), bool)
        held[random.permutation(len(labels))[:size]] = True
        recorded = rows_of(logits[held])._replace(labels=labels[held])
        some = np.zeros(size, bool)
        some[random.permutation(size)[: min(PROPOSING, size // 10)]] = True
        chosen = default_rule(recorded.take(some), recorded.take(~some), task, MAX_LOSS)
        loss, saved = outcome(everything, labels, chosen.rule)
        free_loss, free_saved = outcome(everything, labels, without_bound(recorded, labels[held]))
        guaranteed = chosen.guarantee is not None
        found.append(
            {
                "guaranteed": guaranteed,
                "exceeded": guaranteed and loss[~held].mean() > MAX_LOSS,
                "exceeded_all_rows": guaranteed and loss.mean() > MAX_LOSS,
                "saved": saved[~held].mean(),
                "without_bound_exceeded": free_loss[~held].mean() > MAX_LOSS,
                "without_bound_saved": free_saved[~held].mean(),
            }
        )
    means = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
    return {"task": name, "hold_out": size, "rest": len(labels) - size} | means


def calibrated(name: str, logits: np.ndarray) -> list[dict]:
    """What `calibrate` guarantees, over SETS draws of the rows that it is made on, for each of EPSILONS."""
    observed, found = observe(rows_of(logits), MEASURE), []
    for epsilon in EPSILONS:
        agreement = agreement_by_sets(observed, epsilon, SETS, SEED)
        broken = broken_guarantees(observed, epsilon, COMPARED_DELTA, MEASURE, SETS, SEED)
        found.append({"task": name, "epsilon": epsilon, "rows": agreement.pop("groups_a_set"), "kept": agreement})
        found[-1]["broken"] = {key: broken[key] for key in ("paper", "delta")}
    return found


# ---- Other bounds ----
ALPHA = 0.05

SIZES = (300, 350, 400, 500, 600, 800, 1000, 1250, 1500, 2000, 2500, 3000, 4000, 5000, 6000, 8000, 10000, 14000)


def exact(losses: np.ndarray) -> np.ndarray:
    """The test that is used: Tango's score, exact."""
    return paired_p_values(losses, MAX_LOSS) <= ALPHA


def betting(losses: np.ndarray) -> np.ndarray:
    """Waudby-Smith & Ramdas 2024: plug-in bets against a loss of MAX_LOSS, won at a capital of 1 / ALPHA."""
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
    """The fewest of SIZES with which a guarantee is made for POWER of the hold-outs; None where the most do not do."""
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
    """The default rule and `calibrate`, on rows that are drawn from each task."""
    found = {"tasks": [], "default": [], "calibrate": []}
    for name, (trained, most, sizes) in TASKS.items():
        with np.load(record_unseen(work, sources, name, trained, most)) as saved:
            logits, labels = saved["logits"], saved["labels"]
        accuracy = (logits.argmax(-1) == labels[:, None]).mean(0)
        found["tasks"].append(
            {"task": name, "trained": trained, "recorded": len(labels), "accuracy": accuracy.tolist()}
        )
        found["default"] += [resample(name, logits, labels, size) for size in sizes]
        found["calibrate"] += calibrated(name, logits)
    return found


PARTS = {
    "tasks": measure_tasks,
    "bounds": lambda sources, work: {"bounds": rows_by_bound()},
    "repeated": lambda sources, work: {"repeated": repeated_trainings.every_method(work, TRAININGS)},
}


# ---- The page ----
PAGE_TEXT = """# Are the guarantees kept?

A guarantee holds for rows like those that it was made on. Here rows are drawn again and again from one task: some make
the guarantee, all others say whether it is kept.

{made_by}

MiniLM with exits after layers {exits}, trained by `joint`; the rows drawn from are those of the task's train split that
were not trained on.

| task | rows trained on | rows drawn from | accuracy at the exits |
|---|---|---|---|
{tasks}

## The default rule: at most {max_loss} of accuracy lost, with confidence .95

{draws} hold-outs of each size; a tenth of each, at most {proposing} rows, proposes rules, the others test them. Broken:
on all other rows the rule loses more than was guaranteed. Beside it the rule that saves most among those that lose at
most {max_loss} on the hold-out itself, which guarantees nothing. Where few rows are left to check on, luck moves what
they say; so the loss over all recorded rows is given too. The model is the same for all hold-outs.

| task | hold-out | guarantee made | broken | broken, by all rows | layers saved | without a bound: broken | saved |
|---|---|---|---|---|---|---|---|
{default}

How large a hold-out must be, so that four in five lead to a guarantee, for a rule that is worse and better than the
last exit on so many rows: by the test that is used (Tango's score, exact), by betting (Waudby-Smith & Ramdas 2024), and
by an empirical Bernstein bound (Maurer & Pontil 2009).

| worse | better | exact | betting | empirical Bernstein |
|---|---|---|---|---|
{bounds}

## The default rule of trainings that are repeated: at most {repeated_loss} of accuracy lost, with confidence .95

Each of the {trainings} trainings of a method draws its own rows to train on, to select epochs, temperatures and
candidate rules, and to test the default rule; the loss is measured on fresh rows. The rows are generated and the BERT
is small (`experiments/measured/repeated_trainings.py`). Broken: a guarantee is given, and on fresh rows the rule loses
more; the interval of the share that is broken is that of Clopper and Pearson at 95 %. The last rows are planted
mistakes. "The test rows choose": the rows that test the rule select everything else too, as they once did. "No test":
the rule loses at most {repeated_loss} on the test rows themselves, which the measure finds. All methods draw the same
rows, so the interval of all of them together is somewhat too narrow. On {fresh:,} fresh rows a loss is known to a few
thousandths: some that are just below {repeated_loss} are counted as broken, and fewer the other way round, which the
row with more fresh rows shows.

| method | fresh rows | rows that select | rows that test | guarantees | broken | interval | mean loss | layers saved |
|---|---|---|---|---|---|---|---|---|
{repeated}

## `calibrate`: agreement with the last exit

{sets:,} draws of a quarter of the rows; the thresholds are of the largest probability. Kept: the share of fresh rows
that leave with the last exit's answer, the mean over draws. `--guarantee conformal` (CAT) guarantees epsilon of that
mean. The paper's tau (self-supervised exits, section 3.3) and `--delta` guarantee something else: that at every exit
the rows that are sure enough agree so often. Broken: the share of draws in which some exit does not.

| task | epsilon | rows a draw | kept: conformal | by tau | by delta {delta} | exits broken: by tau | by delta {delta} |
|---|---|---|---|---|---|---|---|
{calibrate}

Conformal's mean may lie above epsilon: a cut counts every exit that would be wrong above it, also one behind the exit
where the row has left.
"""


def share(value: float) -> str:
    """As percent."""
    return f"{value:.1%}"


def by_kind(found: list[dict]) -> tuple[list[dict], list[dict], list[dict]]:
    """Repeated trainings as they are, those that were measured on more fresh rows, and those with planted mistakes."""
    planted = [each for each in found if each["planted"]]
    finer = [each for each in found if each["fresh"] == repeated_trainings.MORE_FRESH]
    return [each for each in found if each not in planted + finer], finer, planted


def together(trainings: list[dict]) -> dict:
    """Repeated trainings of several methods as one."""
    sums = {name: sum(each[name] for each in trainings) for name in ("trainings", "guaranteed", "broken")}
    means = {name: float(np.mean([each[name] for each in trainings])) for name in ("loss", "saved")}
    interval = share_interval(sums["broken"], sums["trainings"])
    return trainings[0] | sums | means | {"method": "all of these", "interval": interval}


def page(figures: dict) -> str:
    """results/guarantees.md."""
    tasks = [
        [each["task"], f"{each['trained']:,}", f"{each['recorded']:,}", ", ".join(f"{a:.3f}" for a in each["accuracy"])]
        for each in figures["tasks"]
    ]
    shares = "guaranteed", "exceeded", "exceeded_all_rows", "saved", "without_bound_exceeded", "without_bound_saved"
    default = [
        [each["task"], f"{each['hold_out']:,}", *(share(each[key]) for key in shares)] for each in figures["default"]
    ]
    bounds = [
        [share(each["worse"]), share(each["better"])]
        + [f"{each[bound.__name__] or f'over {SIZES[-1]}'}" for bound in (exact, betting, empirical_bernstein)]
        for each in figures["bounds"]
    ]
    calibrate = [
        [each["task"], str(each["epsilon"]), f"{each['rows']:,}"]
        + [f"{each['kept'][key]:.4f}" for key in ("conformal", "paper", "delta")]
        + [share(each["broken"][key]) for key in ("paper", "delta")]
        for each in figures["calibrate"]
    ]
    usual, finer, planted = by_kind(figures["repeated"])
    repeated = [
        [
            ", ".join(filter(None, (each["method"], each["planted"]))),
            f"{each['fresh']:,}",
            str(each["selecting"]),
            str(each["tested"]),
        ]
        + [f"{each['guaranteed']} of {each['trainings']}", share(each["broken"] / each["trainings"])]
        + [" to ".join(map(share, each["interval"])), f"{each['loss']:.3f}", share(each["saved"])]
        for each in [*usual, together(usual), *finer, *planted]
    ]
    tables = {"tasks": tasks, "default": default, "repeated": repeated, "bounds": bounds, "calibrate": calibrate}
    lines = {name: markdown_rows(rows) for name, rows in tables.items()}
    exits = ", ".join(map(str, EXITS[:-1])) + f" and {EXITS[-1]}"
    numbers = {"max_loss": MAX_LOSS, "draws": DRAWS, "sets": SETS, "delta": COMPARED_DELTA, "proposing": PROPOSING}
    numbers |= {"trainings": TRAININGS, "repeated_loss": repeated_trainings.MAX_LOSS, "fresh": repeated_trainings.FRESH}
    return wrapped(PAGE_TEXT.format(**lines, **numbers, exits=exits, made_by=made_by_measuring("guarantees")))
