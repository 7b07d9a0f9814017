"""Solutions of chapter 2."""

from mini_ee.loop import early_exit
from mini_ee.rules import Never


def cheapest(rules, table, labels):
    """Try them all."""

    def score(rule):
        result = early_exit(table, rule, range(len(labels)))
        return (result.logits.argmax(1) == labels).mean(), result.layers.mean()

    full, _ = score(Never())
    return min((rule for rule in rules if score(rule)[0] >= full), key=lambda rule: score(rule)[1])


def reaching(layer, exits):
    """The weights of the exits at or above the layer."""
    return sum(depth for depth in exits if depth >= layer) / sum(exits)
