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
    HOLDS,
    LEAST_SEEDS,
    MISSING,
    MOST_SEEDS,
    WIDE,
)

OVERVIEW_HEADING, JUDGING_HEADING = "# Results", "# How a claim is judged"
CHART = "verdicts.png"

JUDGING_PAGE = f"""{JUDGING_HEADING}

A verdict is *{HOLDS}*, *{FAILS}*, or one of three reasons why a claim cannot be decided: *{WIDE}*, *{ELSEWHERE}*,
*{CONSTANT}*. `mini-ee reproduce` computes every verdict from the records of the runs.

- *{HOLDS}*: the whole {CONFIDENCE_LEVEL:.0%} interval of the difference lies above the required difference.
- *{FAILS}*: the whole interval lies below it.
- *{WIDE}*: the required difference lies inside the interval. More seeds may decide.
- *{ELSEWHERE}*: the claim is about a GPU or a larger model. Or too few seeds have the figure, for example because no
  example exits at that layer.
- *{CONSTANT}*: every seed gives the same two figures, so nothing is known about their spread.

**One comparison.** We run both sides with the same seeds, at least {LEAST_SEEDS}. For each seed we take the difference
of the two figures. We report the mean difference over the seeds and Student's t interval at {CONFIDENCE_LEVEL:.0%}.
The required difference is 0 unless the claim gives another. Exact counts, such as bytes, may be equal on all seeds and
still decide.

**One claim.** A claim needs all of its comparisons, unless it gives a number. So it fails as soon as one of them
fails. If the two sides of a comparison are in truth equal, it fails by chance in 2.5 % of the cases. Some claims name
other settings to be tried. Such a claim fails only after these have been run. If runs are missing, the verdict is
given only if they cannot change it; otherwise it is *{MISSING}*.

**How many seeds would decide.** This is an estimate. It takes the measured mean difference and spread as the true
ones. With that number of seeds, the interval then excludes the required difference with a probability of {CHANCE:.0%}.
With three to ten seeds both are known roughly, and if the true difference is the required one, no number of seeds
decides. We do not count above {MOST_SEEDS} seeds.

**What an interval covers.** It covers the choice of the seed, not that of the test examples. In tables, ± is the
standard deviation over seeds.

**Controls.** A control is a claim of ours that the paper does not make, for example that a method beats random exits.
"""

ONE_ANSWER = """If you need one answer: train all exits jointly, and calibrate a confidence threshold on held-out
examples ([ConsistentEE](consistentee.md), main result).
"""

INDEPENDENT = """## What independent work found

- Learned halting gates lose to plain confidence, on synthetic tasks and on Ouro
  ([arXiv:2607.20519](https://arxiv.org/abs/2607.20519)). The same came out for [ConsistentEE](consistentee.md): a
  confidence threshold saves more layers than the learned policy.
- How well confidence predicts the errors of an exit predicts what early exit saves; calibration error does not
  ([arXiv:2508.21495](https://arxiv.org/abs/2508.21495)). So we report layers saved and broken guarantees
  ([guarantees](guarantees.md)).
- If training data are limited, exits that share weights are on average 2.3 points less accurate than separate models
  (SWEET, [arXiv:2306.02307](https://arxiv.org/abs/2306.02307)). Claim 4 of [LoRAExit](loraexit.md) asks the same.
- 2D Matryoshka embeddings are not better than models that are trained for one depth
  ([arXiv:2411.17299](https://arxiv.org/abs/2411.17299)). Our [embeddings](embeddings.md) are measured at each depth.
- Newer language models have fewer layers to skip ([arXiv:2603.23701](https://arxiv.org/abs/2603.23701)).
  [`mini-ee estimate`](estimate.md) estimates this for a model before any training.
"""

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
            rows.append([number, control + one.claim["text"], one.in_words()])
        table = markdown_table(["no.", f"claim ([figures]({paper}.md#claims))", "verdict"], rows)
        lines += folded(f"{escape(card.title)}: {len(rows)} claims and controls", table)
    others = [] if quick else [INDEPENDENT, OTHER_PAGES]
    return "\n".join([*lines, *others]).rstrip() + "\n"


def judging_page() -> str:
    """results/judging.md."""
    return wrapped(JUDGING_PAGE)
