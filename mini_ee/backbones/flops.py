"""Floating-point operations of the parts of a model, a multiply-add as two."""


def layer_flops(weights: int, attention: int, tokens: int) -> float:
    """One layer on one row: its matrix products, and every token against every other.

    weights: of the matrices; attention: the width of all heads together.
    """
    return 2.0 * tokens * weights + 4.0 * tokens * tokens * attention


def layer_weights(backbone) -> dict[str, int]:
    """Of an encoder or a decoder, what layer_flops asks of one layer."""
    config = backbone.config
    width = getattr(config, "head_width", config.hidden_size // config.num_attention_heads)
    weights = sum(weight.numel() for weight in backbone.layers[0].parameters() if weight.dim() == 2)
    return {"weights": weights, "attention": width * config.num_attention_heads}


def backbone_layer_flops(backbone, tokens: int) -> float:
    """One layer of an encoder or a decoder on one row."""
    return layer_flops(**layer_weights(backbone), tokens=tokens)


def head_flops(width: int, num_labels: int, averaged_tokens: int) -> float:
    """One exit head on one row, with the mean over tokens where there is one."""
    return 2.0 * width * (width + num_labels) + float(averaged_tokens * width)
