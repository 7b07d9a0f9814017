"""results/guarantees.md: how often each guarantee is violated on rows other than those it was computed from.

For each task, `joint` is trained once on MiniLM, and every exit is recorded once on rows of the train split that the
training did not use. Then rows are drawn again and again: some give the guarantee, all others show whether it is
violated. The recordings stay in the work folder, so a second call only draws.
"""

import math
from pathlib import Path

import numpy as np

from mini_ee.experiments.markdown import fold_sections, listed, made_by_measuring, markdown_table, share, wrapped
from mini_ee.experiments.measured import frequent_lines, repeated_trainings
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


def record_of(logits: np.ndarray) -> Record:
    """A record of logits (N, K, C) on which rules can be replayed."""
    layers = np.diff((0, *EXITS)).tolist()
    return Record(Recorded(EXITS, logits, np.ones((*logits.shape[:2], 2)), layers), logits, 1.0)


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
    everything, random, found = record_of(logits), np.random.default_rng(SEED), []
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
        found.append(
            {
                "guaranteed": guaranteed,
                "exceeded": guaranteed and loss[~held_out].mean() > MAX_LOSS,
                "exceeded_all_rows": guaranteed and loss.mean() > MAX_LOSS,
                "saved": saved[~held_out].mean(),
                "without_bound_exceeded": free_loss[~held_out].mean() > MAX_LOSS,
                "without_bound_saved": free_saved[~held_out].mean(),
            }
        )
    means = {key: float(np.mean([each[key] for each in found])) for key in found[0]}
    return {"task": name, "hold_out": size, "rest": len(labels) - size} | means


def calibrated(name: str, logits: np.ndarray) -> list[dict]:
    """The agreement and the violated guarantees of `calibrate`, over SETS draws of rows, for each of EPSILONS."""
    observed, found = observe(record_of(logits), CONFIDENCE_MEASURE), []
    for epsilon in EPSILONS:
        agreement = agreement_by_sets(observed, epsilon, SETS, SEED)
        broken = broken_guarantees(observed, epsilon, COMPARED_DELTA, CONFIDENCE_MEASURE, SETS, SEED)
        found.append({"task": name, "epsilon": epsilon, "rows": agreement.pop("groups_a_set"), "kept": agreement})
        found[-1]["broken"] = {key: broken[key] for key in ("paper", "delta")}
    return found


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
    found = {"tasks": [], "default": [], "calibrate": []}
    for name, (rows, most, sizes) in TASKS.items():
        with np.load(record_unseen(work, sources, name, rows, most)) as saved:
            logits, labels = saved["logits"], saved["labels"]
        accuracy = (logits.argmax(-1) == labels[:, None]).mean(0)
        found["tasks"].append({"task": name, "trained": rows, "recorded": len(labels), "accuracy": accuracy.tolist()})
        found["default"] += [resample(name, logits, labels, size) for size in sizes]
        found["calibrate"] += calibrated(name, logits)
    return found


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


# ---- The page ----
PAGE_TEXT = """# How often are the guarantees violated?

**Does a guarantee hold on new examples?** {holds} The default rule decides at which layer an example exits. Its
guarantee says: with 95 % confidence, the rule loses at most {max_loss} of accuracy (one point) compared with the last
exit. So at most 5 % of the held-out sets should give a guarantee that is violated. For each task and size in the table
we drew {draws} sets; {least} to {most} of them gave such a guarantee. In {repeated_count} repetitions of the whole
training, on generated examples, it was {repeated_share} (95 % interval {repeated_interval}). For comparison, we also
chose rules without a bound: they only have to lose at most one point on the held-out set itself. For {free_least} to
{free_most} of the sets they lose more on new examples. The price of the bound: fewer layers are saved, for example
{saved} instead of {free_saved} on {first_task} with {first_size} held-out examples. The model is MiniLM, trained once
for each task.

{default}

{frequent_summary}

*Other examples* are those that are not in the held-out set, *all examples* include it. *Layers saved* is a mean over
the sets, on other examples. The sets are drawn from the same examples, so they overlap.

{made_by}

## What is drawn

A guarantee is computed on some examples and holds, with a stated confidence, for new examples of the same kind. Here
examples are drawn again and again from one task. Some of them give a guarantee. All others show whether it is
violated.

The model is MiniLM with exits after layers {exits}, trained by `joint` with one seed. Examples are drawn from those of
the task's train split that were not used for training. So the accuracies differ from those on the test sets, which are
on other pages.

{tasks}

## The default rule: at most {max_loss} of accuracy lost, with 95 % confidence

For each task and size, {draws} held-out sets are drawn. A tenth of a set, at most {proposing} examples, proposes
rules, and the rest tests them. A guarantee is violated if the rule loses more than {max_loss} of accuracy on all
other examples. These are a sample, too, so another column counts the violations on all recorded examples. They contain
the held-out set, so this count is favourable to the rule. The last two columns show the rule without a bound that saves
most layers among those that lose at most {max_loss} on the held-out set itself. The table is at the top of the page.

The next table shows how many held-out examples are needed so that 80 % of the sets give a guarantee. It depends on the
share of examples on which the rule is wrong and the last exit is right (*rule is worse*), on the share of the opposite
case (*rule is better*), and on the bound. The bounds are the test that mini_ee uses (Tango's score, exact), betting
(Waudby-Smith & Ramdas 2024), and the empirical Bernstein bound (Maurer & Pontil 2009).

{bounds}

## The default rule in repeated trainings: at most {repeated_loss} of accuracy lost, with 95 % confidence

Here the whole training is repeated, {trainings} times for each method. Each repetition draws new examples: those to
train on, those that select epochs, temperatures and candidate rules, and those that test the default rule. The loss is
measured on fresh examples. The examples are generated, and the BERT has {layers} layers of width {width}
(`experiments/measured/repeated_trainings.py`). A guarantee
is violated if it is given and the rule loses more than {repeated_loss} on the fresh examples. The interval is the 95
% interval of Clopper and Pearson for the share of trainings with a violated guarantee.

The last {planted_count} rows contain a mistake on purpose, to see whether the measurement finds it. *Test examples also
select*: the examples that test the rule also select epochs, temperatures and candidate rules, as in an earlier
version. *No test*: the rule only has to lose at most {repeated_loss} on the test examples themselves. The violations
without a test are {no_test}; where test examples also select, they are {selecting_least} to {selecting_most}.

In one repetition, all methods have the same examples. So the interval for all methods together is slightly too narrow.
On {fresh:,} fresh examples, a loss is known to a few thousandths only. Most true losses are below {repeated_loss}, so
this error creates more violations than it hides. The row with {more_fresh:,} fresh examples shows its size for one
method.

{repeated}

## Lines of which a few texts make up a large share

In real traffic some texts come again and again. Here {frequent_lines:,} lines are drawn {frequent_repetitions} times
from {frequent_recorded:,} recorded texts of {frequent_task} (seed {frequent_seed}), with probabilities under which a
few texts, which are drawn anew each time, make up a share of the lines. The lines are divided as `mini-ee add-exits`
divides them, and tested with its default rule, for an agreement with the last exit and 95 % confidence. The
probabilities are known, so the true agreement of the chosen rule is, too. *Unlike the rest*: on half of the frequent
texts the first exit disagrees with the last. The last two columns contain a mistake on purpose, the one of an earlier
version: each different text is tested once, however often it stands among the lines.

{frequent}

## `calibrate`: agreement with the last exit

{sets:,} times, a random quarter of the examples is drawn, and thresholds on the maximum probability are calibrated on
it. *Agreement* is the share of the other examples whose prediction equals that of the last exit, as a mean over the
draws. There are three ways. `--guarantee conformal` (of the method CAT) guarantees that this mean is at least epsilon.
`--delta` guarantees that at each exit, the agreement of the examples whose confidence reaches the threshold is at
least epsilon. Tau (section 3.3 of the paper on self-supervised exits) aims at the same, but without a bound, so it
guarantees nothing. The last two columns show the share of draws in which some exit is below epsilon. With `--delta
{delta}` it should be at most {allowed}. Model and examples are those of the default rule above.

{calibrate}

The agreement of conformal thresholds may be above epsilon: calibration also counts errors of later exits, which an
example never reaches.
"""


COLUMNS = {  # table -> titles
    "frequent": frequent_lines.TITLES,
    "tasks": ("task", "training examples", "examples to draw from", "accuracy after layers {exits}"),
    "default": (
        "task",
        "size of the held-out set",
        "sets with a guarantee",
        "violated on other examples",
        "violated on all examples",
        "layers saved",
        "without a bound: violated on other examples",
        "without a bound: layers saved",
    ),
    "bounds": (
        "rule is worse",
        "rule is better",
        "our test: examples",
        "betting: examples",
        "empirical Bernstein: examples",
    ),
    "repeated": (
        "method",
        "fresh examples",
        "examples that select",
        "examples that test",
        "trainings with a guarantee",
        "violated",
        "95 % interval",
        "mean loss of accuracy",
        "layers saved",
    ),
    "calibrate": (
        "task",
        "epsilon",
        "examples per draw",
        "agreement: conformal",
        "agreement: tau",
        "agreement: delta {delta}",
        "some exit violates: tau",
        "some exit violates: delta {delta}",
    ),
}
PLANTED_NAMES = {"the test rows choose": "test examples also select", "no test": "no test"}  # JSON -> page


def by_kind(found: list[dict]) -> tuple[list[dict], list[dict], list[dict]]:
    """Repeated trainings without mistakes, those measured on more fresh rows, and those with planted mistakes."""
    planted = [each for each in found if each["planted"]]
    finer = [each for each in found if each["fresh"] == repeated_trainings.MORE_FRESH]
    return [each for each in found if each not in planted + finer], finer, planted


def together(trainings: list[dict]) -> dict:
    """The sums and means of the repeated trainings of several methods."""
    sums = {name: sum(each[name] for each in trainings) for name in ("trainings", "guaranteed", "broken")}
    means = {name: float(np.mean([each[name] for each in trainings])) for name in ("loss", "saved")}
    interval = share_interval(sums["broken"], sums["trainings"])
    return trainings[0] | sums | means | {"method": "all methods", "interval": interval}


def found_most(figures: dict) -> float:
    """The largest share of held-out sets whose guarantee is violated on other examples."""
    return max(each["exceeded"] for each in figures["default"])


def summary_of(usual: list[dict], planted: list[dict]) -> dict:
    """The fields of the template on repeated trainings."""
    every, selecting = together(usual), [each for each in planted if each["planted"] == "the test rows choose"]
    broken = {each["method"]: share(each["broken"] / each["trainings"]) for each in planted if each not in selecting}
    shares = [each["broken"] / each["trainings"] for each in selecting]
    return {
        "repeated_count": every["trainings"],
        "repeated_share": share(every["broken"] / every["trainings"]),
        "repeated_interval": " to ".join(map(share, every["interval"])),
        "planted_count": len(planted),
        "no_test": listed([f"{value} for {method}" for method, value in broken.items()]),
        "selecting_least": share(min(shares)),
        "selecting_most": share(max(shares)),
    }


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
            ", ".join(filter(None, (each["method"], PLANTED_NAMES.get(each["planted"])))),
            f"{each['fresh']:,}",
            str(each["selecting"]),
            str(each["tested"]),
        ]
        + [f"{each['guaranteed']} of {each['trainings']}", share(each["broken"] / each["trainings"])]
        + [" to ".join(map(share, each["interval"])), f"{each['loss']:.3f}", share(each["saved"])]
        for each in [*usual, together(usual), *finer, *planted]
    ]
    tables = {"tasks": tasks, "default": default, "repeated": repeated, "bounds": bounds, "calibrate": calibrate}
    tables |= {"frequent": frequent_lines.rows(figures["frequent"])}
    exits = ", ".join(map(str, EXITS[:-1])) + f" and {EXITS[-1]}"
    fields = frequent_lines.fields(figures["frequent"])
    fields |= {"max_loss": MAX_LOSS, "draws": DRAWS, "sets": SETS, "delta": COMPARED_DELTA, "proposing": PROPOSING}
    fields |= {
        "trainings": TRAININGS,
        "repeated_loss": repeated_trainings.REPEATED_MAX_LOSS,
        "fresh": repeated_trainings.FRESH,
    }
    for key, name in (("exceeded", ""), ("without_bound_exceeded", "free_")):
        found = [each[key] for each in figures["default"]]
        fields |= {f"{name}least": share(min(found)), f"{name}most": share(max(found))}
    first, *_ = figures["default"]
    fields |= {"saved": share(first["saved"]), "free_saved": share(first["without_bound_saved"])}
    fields |= {"first_task": first["task"], "first_size": first["hold_out"], "allowed": share(COMPARED_DELTA)}
    fields |= summary_of(usual, planted) | {"holds": "Yes." if found_most(figures) <= ALPHA else "Not always."}
    fields |= {"layers": repeated_trainings.LAYERS, "width": repeated_trainings.WIDTH}
    fields |= {"more_fresh": repeated_trainings.MORE_FRESH, "exits": exits, "made_by": made_by_measuring("guarantees")}
    for name, rows in tables.items():
        titles = [title.format(exits=exits, delta=COMPARED_DELTA) for title in COLUMNS[name]]
        fields[name] = "\n".join(markdown_table(titles, rows))
    return wrapped(fold_sections(PAGE_TEXT.format(**fields), 0))
