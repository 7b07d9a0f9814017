"""results/README.md, the verdicts of all papers, and results/judging.md, how a verdict is computed."""

from html import escape
from typing import NamedTuple

from mini_ee.experiments.claims import Judged, counted
from mini_ee.experiments.markdown import folded, markdown_table, wrapped
from mini_ee.experiments.result_page import JUDGING
from mini_ee.experiments.verdicts import (
    CHANCE,
    CONFIDENCE_LEVEL,
    CONSTANT,
    ELSEWHERE,
    FAILS,
    FEW,
    HOLDS,
    LEAST_SEEDS,
    MISSING,
    MOST_SEEDS,
    WIDE,
)

OVERVIEW_HEADING, JUDGING_HEADING = "# Results", "# How a claim is judged"
CHART = "verdicts.png"

JUDGING_PAGE = f"""{JUDGING_HEADING}

A verdict is about our models and data. The verdict *{FAILS}* is no
evidence that a paper's own numbers are wrong.
`mini-ee reproduce` computes every verdict from the records of the runs. A comparison *{HOLDS}* if the whole
{CONFIDENCE_LEVEL:.0%} interval of the difference lies above the required difference. It *{FAILS}* if the whole interval
lies below. Otherwise it cannot be decided, for one of four reasons:

- *{WIDE}*: the required difference lies inside the interval. More seeds may decide.
- *{ELSEWHERE}*: the claim is about a GPU or a larger model, or too few seeds have the figure,
  for example because no example exits at that layer.
- *{CONSTANT}*: every seed gives the same two figures, so nothing is known about their spread.
- *{MISSING}*, or *{FEW}*: the command was stopped, or ran with fewer seeds.

**One comparison.** We run both sides with the same seeds, at least {LEAST_SEEDS}. For each seed we take the difference
of the two figures. The claim needs the first figure to be
the larger. So if a loss should be lower, the other side is named first. We report the mean
difference over the seeds and Student's t interval at {CONFIDENCE_LEVEL:.0%}.
The required difference is 0 unless the claim gives another. Exact counts, such as bytes, may be equal on all seeds and
still decide.

**One claim.** A claim needs all of its comparisons, unless it says how many, such as "on at least three of five
tasks". So one comparison that fails is enough, and the number after each verdict tells how many hold, do not hold and
are undecided. If the two sides of a comparison are in truth equal, this comparison fails by chance in 2.5 % of the
cases. A claim with many comparisons fails by chance more often; we do not correct for this. Some claims name other
settings to be tried. Such a claim fails only after these have been run. If runs are missing, the verdict is given
only if they cannot change it. A claim can fail although the data of another of its comparisons do not vary.

**How many seeds would decide.** This is an estimate for the total number of seeds. It takes the measured mean
difference and spread of a comparison as the true ones. With that number of seeds, the interval of this comparison
then excludes the required difference with a probability of {CHANCE:.0%}, and the page gives the verdict that follows.
For a claim, the number is the smallest one at which the comparisons that are decided by then decide the claim; the
{CHANCE:.0%} is for each comparison, not for the claim. With three to ten seeds both are known roughly, and if the true
difference is the required one, no number of seeds decides. We do not count above {MOST_SEEDS} seeds.

**Best of several settings.** Settings that were tried are compared on the same kind of data and on the seeds that all
of them have, which is often one seed. Then the best one may be best by chance.

**What an interval covers.** It covers the choice of the seed, not that of the test examples. In tables, ± is the
standard deviation over seeds.

**Controls.** A control is a claim of ours that the paper does not make, for example that a method beats random exits.
"""

ONE_ANSWER = """If you need one answer: use a confidence threshold chosen on held-out examples. Joint and two-stage
training save about the same on TREC ([ConsistentEE](consistentee.md), main result).
"""

FOUND = (  # they found, we found, agrees
    (
        "Learned halting gates lose to plain confidence, on synthetic tasks and on Ouro "
        "([arXiv:2607.20519](https://arxiv.org/abs/2607.20519)).",
        "A confidence threshold saves more layers than the learned policy of [ConsistentEE](consistentee.md).",
        "yes",
    ),
    (
        "How well confidence predicts the errors of an exit predicts what early exit saves; calibration error does "
        "not ([arXiv:2508.21495](https://arxiv.org/abs/2508.21495)).",
        "We report layers saved and violated [guarantees](guarantees.md), and no calibration error.",
        "not tested",
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
        "([embeddings](embeddings.md); one or two seeds).",
        "yes",
    ),
    (
        "Newer language models have fewer layers to skip ([arXiv:2603.23701](https://arxiv.org/abs/2603.23701)).",
        "We measured no large language model; [`mini-ee estimate`](estimate.md) estimates this for a model.",
        "not tested",
    ),
)

OTHER_PAGES = """## Other pages

`mini-ee reproduce NAME` makes each of them; NAME is the name of the file.

| page | what it shows |
|---|---|
| [shortest.md](shortest.md) | the results of the default settings |
| [estimate.md](estimate.md) | how well `mini-ee estimate` predicts the share of the layers saved |
| [onnx.md](onnx.md) | the exported ONNX graph: speed, equality with torch, size, memory |
| [guarantees.md](guarantees.md) | how often each guarantee is violated on new examples |
| [shards.md](shards.md) | RAEE's datastore in shards, and a projection to a billion examples |
| [serving.md](serving.md) | latency and goodput of the server under load |
| [embeddings.md](embeddings.md) | embeddings of a sentence encoder at each depth |
| [add-exits.md](add-exits.md) | exits for fine-tuned models, from texts without labels |

`mini-ee bench all` runs the benchmarks on your machine and prints ratios of times, each with its target. For the
comparisons with transformers, install `pip install -e '.[bench]'`.
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
    lines += ["", f"![Verdicts on the claims of each paper]({CHART})", ""] if chart else [""]
    lines += [] if quick else [ONE_ANSWER]
    for paper, card in cards.items():
        lines += [f"### [{card.title}]({paper}.md)", ""]
        for paragraph in card.answer:
            lines += [paragraph, ""]
        lines += [f"Claims: {counted(card.judged)}.", ""] if counted(card.judged) else []
    lines += ["## All claims", ""]
    if controls:
        lines += [f"Verdicts of our {controls} controls: {counted(every, True)}.", ""]
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
