"""Today's implementation ("project") and the core's, under one spec. Where an interface differs, the adapter is here.

A test asks the fixture for one of them: `loop`, or `paper` in the file of a paper. Functions are looked up when they
are called, so a bug that is planted in a module (tests/mutants.py) is found.
"""

from types import SimpleNamespace

import numpy as np

import mini_ee.lab.confidence
import mini_ee.lab.early_exit
import mini_ee.lab.rules
from mini_ee import loop as core_loop
from mini_ee import raee, rules
from mini_ee.lab.methods import raee as project_raee
from mini_ee.lab.methods.raee_datastore import Datastore
from mini_ee.lab.segments import Reading, Segments

IMPLEMENTATIONS = ("project", "core")


# ---- The loop and the rules ----
class Examples(SimpleNamespace):
    """The state: which examples are still in the model."""

    def keep(self, rows):
        return Examples(ids=self.ids[rows])


class ProjectTable(Segments):
    """A model whose logits (N, K, C), and policy logits (N, K), are known. It records what is run and what is read."""

    def __init__(self, logits, exit_logits=None):
        self.logits, self.exit_logits = logits, exit_logits
        self.exits = tuple(range(1, logits.shape[1] + 1))
        self.ran, self.were_read = [], []

    def start(self, inputs):
        return Examples(ids=np.asarray(inputs))

    def advance(self, k, state):
        self.ran.append((k, state.ids.tolist()))
        return state

    def read(self, k, state):
        self.were_read.append((k, state.ids.tolist()))
        exit_logit = None if self.exit_logits is None else self.exit_logits[state.ids, k]
        return Reading(self.logits[state.ids, k], exit_logit)

    def flops(self, k, inputs):
        return 1.0, 1.0


class CoreTable(core_loop.Table):
    """The same of the core."""

    def __init__(self, logits, exit_logits=None):
        super().__init__(tuple(range(1, logits.shape[1] + 1)), logits, exit_logits)
        self.ran, self.were_read = [], []

    def advance(self, k, state):
        self.ran.append((k, state.rows.tolist()))
        return state

    def read(self, k, state):
        self.were_read.append((k, state.rows.tolist()))
        return super().read(k, state)


LOOP = {
    "project": SimpleNamespace(
        early_exit=lambda *given: mini_ee.lab.early_exit.early_exit(*given),
        Table=ProjectTable,
        Rule=mini_ee.lab.rules.Rule,
        Never=mini_ee.lab.rules.NeverExit,
        Fixed=mini_ee.lab.rules.FixedExit,
        Threshold=mini_ee.lab.rules.Threshold,
        Patience=mini_ee.lab.rules.Patience,
        Policy=mini_ee.lab.rules.Policy,
        measure=lambda name, logits: mini_ee.lab.confidence.MEASURES[name][0](logits),
    ),
    "core": SimpleNamespace(
        early_exit=lambda *given: core_loop.early_exit(*given),
        Table=CoreTable,
        **{name: getattr(rules, name) for name in ("Rule", "Never", "Fixed", "Threshold", "Patience", "Policy")},
        measure=lambda name, logits: rules.MEASURES[name](logits),
    ),
}


# ---- RAEE ----
class CoreRAEE:
    """The core's functions. A rule is made of the examples and the queries."""

    def __getattr__(self, name):
        return getattr(raee, name)

    @staticmethod
    def retrieval(vectors, values, queries, k=12, tau=0.9, fallback_top=0):
        return raee.Retrieval(lambda inputs: queries, vectors, values, k, tau, fallback_top)


class ProjectRAEE:
    """The same of the project."""

    def __getattr__(self, name):
        return getattr(project_raee, name)

    @staticmethod
    def retrieval(vectors, values, queries, k=12, tau=0.9, fallback_top=0):
        store = Datastore("an encoder", vectors.shape[1], (1, 2, 4, 6))
        store.add(vectors, values, np.zeros(len(values), int), [("text",)] * len(values))
        rule = project_raee.Retrieval(k=k, tau=tau, fallback_top=fallback_top)
        return rule.with_datastore(store, lambda inputs: queries)


RAEE = {"project": ProjectRAEE(), "core": CoreRAEE()}
