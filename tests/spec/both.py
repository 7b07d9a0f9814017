"""Today's implementation ("project") and the core's, under one spec. Where an interface differs, the adapter is here.

A test asks the fixture `paper` for one of them. Functions are looked up when they
are called, so a bug that is planted in a module (tests/mutants.py) is found.
"""

import numpy as np

from mini_ee import raee
from mini_ee.lab.methods import raee as project_raee
from mini_ee.lab.methods.raee_datastore import Datastore

IMPLEMENTATIONS = ("project", "core")


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
