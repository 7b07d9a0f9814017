"""Solutions of appendix A."""


def settled_layer(guesses):
    """One more than the last layer with another prediction."""
    return max((layer + 1 for layer, guess in enumerate(guesses, 1) if guess != guesses[-1]), default=1)


def stopped_layer(guesses):
    """Layers count from 1, so the first that can repeat a prediction is layer 2."""
    repeated = (layer for layer in range(2, len(guesses) + 1) if guesses[layer - 1] == guesses[layer - 2])
    return next(repeated, len(guesses))
