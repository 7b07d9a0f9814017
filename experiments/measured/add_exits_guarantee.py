"""How often is the agreement that add-exits guarantees violated?

The states of a pool of texts are computed once. Every repetition draws its own texts from the pool, trains heads and
chooses thresholds on them as add-exits does, and counts the agreement on the rest of the pool.
"""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from unittest.mock import patch

import numpy as np
import torch

import mini_ee.lab.export.add_exits as adding
import mini_ee.lab.training.default_rule as rule
import mini_ee.lab.training.train_rows as train_rows
from mini_ee.experiments.measured.add_exits_cases import stored
from mini_ee.experiments.measured.fine_tuning import FineTuned, fine_tuned
from mini_ee.experiments.measured.repeated_trainings import accept_observed_loss
from mini_ee.experiments.trainings import Sources
from mini_ee.lab.backbones.hub import load_backbone
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.classification_head import FrozenClassifier
from mini_ee.lab.exits.row_exits import Known, RowData, States, even_exits
from mini_ee.lab.recording import predictions
from mini_ee.lab.rules import Rule
from mini_ee.lab.statistics import share_interval
from mini_ee.lab.training.run_folder import Run, encode, load_run
from mini_ee.lab.training.train_settings import AddOptions

OF = {"name": "SST-2", "model": "BERT-12x128", "seed": 0}
POOL, DRAWN, REPEATS, LEVELS, PLANTED = 12_000, 1_500, 100, (0.99, 0.98, 0.95), "no test"
STATES = RowData.states


class Pool:
    """Texts with their states after the layers at which add-exits trains heads, and the model's own labels."""

    def __init__(self, model: FineTuned):
        self.folder, self.texts, self.task = model.folder, model.texts[:POOL], model.task
        backbone = load_backbone(model.folder)
        layers = backbone.config.num_hidden_layers
        self.exits = even_exits(layers, min(adding.MOST_TRAINED + 1, layers))
        network = FrozenClassifier(backbone, self.exits, self.task.num_labels, "mean")
        self.encoded = encode(Tokenizer.from_folder(model.folder, None), self.texts, backbone)
        states = RowData(self.encoded, np.zeros(len(self.texts), np.int64), self.task).states(network)
        self.states, self.labels = states.states, predictions(states.logits(network)[:, -1])
        self.number = {texts: at for at, texts in enumerate(self.texts)}

    def states_of(self, data: RowData, network: FrozenClassifier) -> States:
        """In place of RowData.states: the states of texts of the pool."""
        known = data.known
        if known is None:
            rows = [self.number[texts] for texts in data.encoded.texts]
            known = Known(self.exits, self.states[rows])
        return STATES(RowData(data.encoded, data.labels, data.task, known), network)

    def agreement(self, run: Run, chosen: Rule, rest: np.ndarray) -> tuple[float, float]:
        """Agreement on the texts of `rest` (N,) bool, and the share of the layers saved there."""
        data = RowData(self.encoded, self.labels, self.task, Known(self.exits, self.states))
        result = data.recorded(run.model, 512, "pool").take(rest).replay(chosen)
        saved = 1 - float(result.cost.depth.mean()) / run.exits[-1]
        return float((predictions(result.logits) == self.labels[rest]).mean()), saved


class Observer:
    """In place of default_rule: keeps the choices for all levels, and those that no test has confirmed."""

    def __init__(self):
        self.chosen, self.untested = {}, {}

    def __call__(self, selection, test, task, **settings) -> rule.Chosen:
        chosen_rule = rule.default_rule(selection, test, task, **settings)
        for level in LEVELS:
            given = settings | {"max_loss": round(1 - level, 6)}
            self.chosen[level] = rule.default_rule(selection, test, task, **given)
            with patch.object(rule, "paired_p_values", accept_observed_loss):
                self.untested[level] = rule.default_rule(selection, test, task, **given)
        return chosen_rule

    def outcomes(self, replayed: Callable[[Rule], tuple[float, float]]) -> list[dict]:
        """For each level, tested and not: whether there is a guarantee, agreement and layers saved on new texts."""
        results = []
        for planted, choices in ((None, self.chosen), (PLANTED, self.untested)):
            for level, chosen in choices.items():
                outcome = {"level": level, "planted": planted, "guaranteed": chosen.guarantee is not None}
                results.append(outcome | dict(zip(("agreement", "saved"), replayed(chosen.rule))))
        return results


def repetition(pool: Pool, out: Path, seed: int) -> dict:
    """Draw texts, train, choose: for each level whether there is a guarantee, the agreement, and layers saved."""
    drawn = np.zeros(len(pool.texts), bool)
    drawn[np.random.default_rng(seed).permutation(len(pool.texts))[:DRAWN]] = True
    task = adding._task(pool.task.label_names, tuple(pool.texts[at] for at in np.flatnonzero(drawn)))
    for folder in (out, out / "run.training"):
        shutil.rmtree(folder, ignore_errors=True)
    observer, count = Observer(), max(int(adding.TRAINED * DRAWN), DRAWN - 2 * adding.TEST_ROWS)
    of_pool = patch.object(RowData, "states", lambda data, network, *_: pool.states_of(data, network))
    no_wait = patch.object(os, "fsync", lambda file: None)  # do not wait for the disk: runs are temporary
    with patch.object(train_rows, "default_rule", observer), of_pool, no_wait:
        adding._trained(pool.folder, task, out, count, AddOptions(), seed, lambda line: None)
    run = load_run(out / "run")
    return {"seed": seed, "levels": observer.outcomes(lambda chosen: pool.agreement(run, chosen, ~drawn))}


def guarantee(sources: Sources, work: Path) -> dict:
    """For each level, without and with the planted mistake: repetitions with a guarantee, and violated guarantees."""

    def measure() -> dict:
        torch.set_num_threads(1)
        pool = Pool(fine_tuned(sources, work, *OF.values()))
        repetitions = [
            stored(work, f"repetition {seed}", lambda: repetition(pool, work / "calls" / "repetition", seed))
            for seed in tqdm(range(REPEATS), desc="guarantee")
        ]
        size = {"pool": len(pool.texts), "drawn": DRAWN, "repetitions": REPEATS}
        return size | {"levels": [summary([one["levels"][at] for one in repetitions]) for at in range(2 * len(LEVELS))]}

    return {"guarantee": stored(work, "guarantee", measure)}


def summary(repetitions: list[dict]) -> dict:
    """The sums and means of one level over the repetitions."""
    given = [one for one in repetitions if one["guaranteed"]]
    broken = sum(one["agreement"] < one["level"] for one in given)
    return {
        "level": repetitions[0]["level"],
        "planted": repetitions[0]["planted"],
        "repetitions": len(repetitions),
        "guaranteed": len(given),
        "broken": broken,
        "interval": share_interval(broken, len(repetitions)),
        "least": min((one["agreement"] for one in given), default=None),
        "agreement": float(np.mean([one["agreement"] for one in given])) if given else None,
        "saved": float(np.mean([one["saved"] for one in given])) if given else None,
    }
