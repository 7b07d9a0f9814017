"""Solutions of chapter 9."""

import math

from mini_ee.lab.rules import Never


def texts_needed(agreement, confidence):
    """The smallest n with agreement ** n <= 1 - confidence."""
    return math.ceil(math.log(1 - confidence) / math.log(agreement) - 1e-9)


def differences(run, texts):
    """The texts whose labels differ."""
    pairs = zip(texts, run.classify(texts), run._replace(rule=Never()).classify(texts))
    return [text for text, early, full in pairs if early.label != full.label]
