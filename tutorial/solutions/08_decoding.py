"""Solutions of chapter 8."""

from __main__ import predictions


def passes(layers):
    """A token needs the deepest layer of itself and of all later tokens."""
    total = deepest = 0
    for depth in reversed(layers):
        deepest = max(deepest, depth)
        total += deepest
    return total


def draft_and_verify(prompt, count, draft):
    """Drafts are kept as long as the full model predicts the same token at their place."""
    tokens, rounds = [], 0
    while len(tokens) < count:
        begin, ids = len(prompt) + len(tokens), [*prompt, *tokens]
        for _ in range(draft):
            ids.append(predictions(1, ids)[-1])
        verified, rounds = predictions(2, ids)[begin - 1 :], rounds + 1  # what the full model writes at each place
        right = 0
        while right < draft and ids[begin + right] == verified[right]:
            right += 1
        tokens += verified[: right + 1]
    return tokens[:count], rounds
