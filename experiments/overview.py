"""results/README.md, the verdicts of all papers, and results/judging.md, how a verdict is computed."""

from html import escape
from typing import NamedTuple

from mini_ee.experiments.claims import Judged, counted
from mini_ee.experiments.markdown import folded, markdown_table, wrapped
from mini_ee.experiments.result_page import JUDGING
from mini_ee.experiments.verdicts import (
    ABOVE,
    BELOW,
    CHANCE,
    CONSTANT,
    ELSEWHERE,
    FAILS,
    FEW,
    HOLDS,
    LEAST_SEEDS,
    LEVEL,
    MISSING,
    MOST_SEEDS,
    WIDE,
)

OVERVIEW_HEADING, JUDGING_HEADING = "# Results", "# How a claim is judged"
CHART = "verdicts.png"
SIZE = "models of 5 to 12 small layers"

IN_INTERVAL, BOTH_SIDES, ONE_SIDE = (f"{100 * each:g} %" for each in (1 - LEVEL, LEVEL, LEVEL / 2))

JUDGING_PAGE = f"""{JUDGING_HEADING}

**When does a claim of a paper hold here?** If in each of its comparisons the {IN_INTERVAL} interval of the difference
lies on the claimed side. A verdict is about our models and data: {SIZE}, two to five tasks. It says whether an effect
shows at this size, not whether a paper is wrong. `mini-ee reproduce` computes every verdict from the records of the
runs. The leaderboard has statistics of its own, which its page explains.

**One comparison** is the difference of two figures, for example of two accuracies. They are ordered so that the claim
needs the first one to be larger: if a method should lose less, the loss of the other method is named first. Both
figures have the same seeds, at least {LEAST_SEEDS}. If a claim makes the same comparison in several settings, such as
tasks, kinds of head or heads, we take the mean over the settings for each seed; the page lists these parts below the
mean. The mean uses the seeds that all of its parts have, a part all of its own. Then we report the mean difference
over the seeds and an interval that contains the true difference with a probability of at least {IN_INTERVAL}. A
difference is *{ABOVE}* if the whole interval lies above the required difference, and *{BELOW}* if it lies below. The
required difference is 0 unless the claim gives another. An exact count, such as a number of bytes, may be the same
with every seed; then the difference alone decides.

**What an interval covers.** It covers two standard errors:

- The seeds: their choice changes the training, the held-out set and generated texts. If S differences have the standard
  deviation s, the standard error is s / sqrt(S), with Student's t for S - 1 degrees of freedom.
- The test examples: all seeds share them, so this error does not shrink with more seeds. If the runs of both sides have
  records of each prediction, we compute the difference of each test example, the mean over the seeds. Its variance
  divided by the number N of examples is the square of the standard error. A figure that no record gives has a bound
  instead. A share p of N test examples has a variance of at most p (1 - p) / N. For a difference on the same examples,
  we add the variances of both sides. That is exact if the errors of the two models are independent. The sum is too
  large if both models tend to be wrong on the same examples, as models of the same data are. It would be too small if
  one tended to be wrong where the other is right; we assume that this is not so.

With t as above and the standard error r from the test examples, the interval is the mean difference
± sqrt((t s)^2 / S + (1.96 r)^2). A proof is in the file verdicts.py. The second error counts for accuracies and
shares of layers on a task's test examples. Decoders generate new texts for each seed, so the first error covers
the texts; speed-ups, bytes, entropies, perplexities and correlations have the first error alone.

**One claim** has one decision. It *{HOLDS}* if every comparison is {ABOVE}. No correction for their number is needed:
if one of them is in truth not above, the claim holds by chance in at most {ONE_SIDE} of the cases. For *{FAILS}* it is
the opposite: one comparison that is {BELOW} is enough, and the more comparisons there are, the more likely one of them
is below by chance. So we use Holm's correction. With n comparisons, the first one has to be below with an interval at
the level {BOTH_SIDES} / n instead of {BOTH_SIDES}, the next one with {BOTH_SIDES} / (n - 1), and so on. A true claim
then fails by chance in at most {ONE_SIDE} of the cases. Some claims name other settings to be tried. Such a claim fails
only after these have been run.

**Otherwise a claim cannot be decided**, for one of three reasons:

- *{WIDE}*: the required difference lies inside an interval. The page says how many seeds would probably
  decide, or that no number of seeds would: then the error from the test examples is too large. More test examples make
  it smaller, and a record of each prediction makes its bound smaller.
- *{ELSEWHERE}*: the claim is about a larger model, or too few seeds have the figure,
  for example because no example exits at that layer.
- *{CONSTANT}*: every seed gives the same two figures, so nothing is known about their spread.

*{MISSING}* and *{FEW}* mean that the command was stopped, or ran with fewer seeds. Then there is a verdict
only if the missing runs cannot change it.

**How many seeds would decide.** This is an estimate of the total number of seeds. It takes the measured mean
difference and spread of each comparison as the true ones. With that number of seeds, an interval excludes the
required difference with a probability of {100 * CHANCE:g} %, for each comparison and not for the claim. With three to
ten seeds, mean and spread are known only roughly. We do not count above {MOST_SEEDS} seeds.

**Best of several settings.** Settings that were tried are compared on the same kind of data and on the seeds that all
of them have, which is often one seed. They are ranked by the figure that is compared, mostly one of the test set, so
the best one may be best by chance.

**Tables.** In the tables of the four papers, ± is the standard deviation over seeds. On the leaderboard, it is half of
the {IN_INTERVAL} interval.

**Controls.** A control is a claim of ours that the paper does not make, for example that a method is more accurate than
exits at random.
"""

ONE_ANSWER = """If you need one answer, use a confidence threshold chosen on held-out examples. `mini-ee train joint`
trains the exits and chooses the threshold. Joint and two-stage training save about the same on TREC
([ConsistentEE](consistentee.md), main result). The [leaderboard](leaderboard.md) compares all methods for classifiers.
"""

FOUND = (  # they found, we found, agrees
    (
        "Learned halting gates lose to plain confidence, on synthetic tasks and on Ouro "
        "([arXiv:2607.20519](https://arxiv.org/abs/2607.20519)).",
        "A confidence threshold saves more layers than the learned policy of ConsistentEE "
        "([ConsistentEE](consistentee.md), claim 1).",
        "yes",
    ),
    (
        "How well confidence predicts the errors of an exit predicts what early exit saves; calibration error does "
        "not ([arXiv:2508.21495](https://arxiv.org/abs/2508.21495)).",
        "The [leaderboard](leaderboard/hardness.md#does-a-property-of-the-exits-predict-how-many-layers-are-saved) has the "
        "correlations of both with the layers saved. They have no intervals, so they decide nothing.",
        "not decided",
    ),
    (
        "If training data are limited, exits that share weights are on average 2.3 points less accurate than "
        "separate models (SWEET, [arXiv:2306.02307](https://arxiv.org/abs/2306.02307)).",
        "At the first exit on TREC, two-stage training is less accurate than separate models. For joint training the "
        "interval is too wide ([LoRAExit](loraexit.md), claim 4).",
        "partly",
    ),
    (
        "2D Matryoshka embeddings are not better than models that are trained for one depth "
        "([arXiv:2411.17299](https://arxiv.org/abs/2411.17299)).",
        "After one and after three of six layers, 2DMSE scores lower than training for this depth alone "
        "([embeddings](embeddings.md)).",
        "yes",
    ),
    (
        "Newer language models have fewer layers to skip ([arXiv:2603.23701](https://arxiv.org/abs/2603.23701)).",
        "We measured no large language model; [`mini-ee estimate`](estimate.md) estimates this for a model.",
        "not tested",
    ),
)

CONTROL = "A *control* is a claim of ours that the paper does not make."
COMPARISONS = f"""A claim has one or more comparisons. A comparison is *{ABOVE}* if its {IN_INTERVAL} interval lies
above the difference that the claim requires, *{BELOW}* if it lies below, and otherwise undecided.
"""

OTHER_PAGES = """## Other pages

`mini-ee reproduce NAME` makes each of them; NAME is the name of the file.

| page | what it shows |
|---|---|
| [leaderboard.md](leaderboard.md) | which method to use: all methods under one protocol, computed from records |
| [METHODS.md](METHODS.md) | each method: paper, what it trains, its exit rule, its file (`reproduce leaderboard`) |
| [shortest.md](shortest.md) | the results of the default settings |
| [estimate.md](estimate.md) | how well `mini-ee estimate` predicts the share of the layers saved |
| [onnx.md](onnx.md) | the exported ONNX graph: speed, equality with torch, size, memory |
| [guarantees.md](guarantees.md) | how often each guarantee is violated on new examples |
| [shards.md](shards.md) | RAEE's datastore in shards, and a projection to a billion examples |
| [serving.md](serving.md) | latency and goodput of the server under load |
| [embeddings.md](embeddings.md) | embeddings of a sentence encoder at each depth |
| [add-exits.md](add-exits.md) | exits for fine-tuned models, from texts without labels |

`mini-ee bench all` runs the benchmarks on your machine and prints ratios of times, each with its target. For the
comparisons with transformers, install `pip install -e '.[hf]'`.
"""


class Card(NamedTuple):
    """A paper on the overview."""

    title: str
    answer: list[str]
    judged: list[Judged]


def overview_page(cards: dict[str, Card], chart: bool, quick: bool) -> str:
    """results/README.md. cards: by paper; chart: whether CHART was drawn; quick: without the text on full runs."""
    every = [one for card in cards.values() for one in card.judged]
    claims, controls = (sum(bool(one.claim.get("control")) == kind for one in every) for kind in (False, True))
    lines = [OVERVIEW_HEADING, "", f"**{claims} claims of {len(cards)} papers, on small models: {counted(every)}.** "]
    lines[-1] += f"[How a claim is judged]({JUDGING})"
    lines += [
        "",
        f"The runs use {SIZE} and two to five tasks. So a verdict is about this size: it says whether an effect",
        "shows here, not whether a paper is wrong. Figures are means over seeds; each page names the models, the data",
        "and the number of seeds.",
    ]
    lines += ["", f"![Verdicts on the claims of each paper]({CHART})", ""] if chart else [""]
    lines += [] if quick else [ONE_ANSWER]
    for paper, card in cards.items():
        lines += [f"### [{card.title}]({paper}.md)", ""]
        for paragraph in card.answer:
            lines += [paragraph, ""]
        lines += [f"Claims: {counted(card.judged)}.", ""] if counted(card.judged) else []
    lines += ["## All claims", ""]
    if controls:
        lines += [f"{CONTROL} Verdicts of our {controls} controls: {counted(every, True)}.", ""]
    lines += [COMPARISONS]
    for paper, card in cards.items():
        rows = []
        for number, one in enumerate(card.judged, 1):
            control = "*control:* " if one.claim.get("control") else ""
            rows.append([number, control + one.claim["text"], one.in_words(), one.counts()])
        table = markdown_table(["no.", f"claim ([figures]({paper}.md#claims))", "verdict", "comparisons"], rows)
        lines += folded(f"{escape(card.title)}: {len(rows)} claims and controls", table)
    if not quick:
        found = markdown_table(["they found", "we found", "agrees?"], FOUND)
        lines += ["## What independent work found", "", *found, "", OTHER_PAGES]
    return "\n".join(lines).rstrip() + "\n"


def judging_page() -> str:
    """results/judging.md."""
    return wrapped(JUDGING_PAGE)
