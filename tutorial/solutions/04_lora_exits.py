"""Solutions of chapter 4."""


def layer_passes(exits, together):
    """Restart runs exits[k] layers for each exit; together, those of the exits that are still open run each layer."""
    passes, total, before = [], 0, 0
    for k, layer in enumerate(exits):
        total += (len(exits) - k) * (layer - before) if together else layer
        passes.append(total)
        before = layer
    return passes


def merged(linear, adapter, scale):
    """A weight of nn.Linear is stored as (outputs, inputs), so the product is transposed."""
    return linear.weight + scale * (adapter.A @ adapter.B).T
