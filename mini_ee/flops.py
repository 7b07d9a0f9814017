"""Floating-point operations of the parts of a model, a multiply-add as two."""


def layer_flops(width: int, intermediate: int, tokens: int) -> float:
    """One post-norm layer on one row: the matrix products, a multiply-add as two operations."""
    projections = 4 * width * width + 2 * width * intermediate
    return 2.0 * tokens * projections + 4.0 * tokens * tokens * width


def head_flops(width: int, num_labels: int, averaged_tokens: int) -> float:
    """One exit head on one row, with the mean over tokens where there is one."""
    return 2.0 * width * (width + num_labels) + float(averaged_tokens * width)


def backbone_layer_flops(backbone, tokens: int) -> float:
    """One layer of an encoder or a decoder on one row: the matrix products, and every token against every other."""
    config = backbone.config
    width = getattr(config, "head_width", config.hidden_size // config.num_attention_heads) * config.num_attention_heads
    weights = sum(weight.numel() for weight in backbone.layers[0].parameters() if weight.dim() == 2)
    return 2.0 * tokens * weights + 4.0 * tokens * tokens * width
