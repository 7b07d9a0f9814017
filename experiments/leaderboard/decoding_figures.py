"""Decoding with a rule against decoding in full: text, agreement and speed, with both fills of missing keys and values.

Speed is processor time on one thread at batch size 1. All ways decode the same prompts in turns; the median over
ROUNDS counts. So another process on the machine changes a ratio little.
"""

import time
from collections.abc import Callable, Sequence
from functools import partial
from itertools import product

import numpy as np
import torch

from mini_ee.lab.data.decoder_texts import Text
from mini_ee.lab.data.metrics import rouge_l
from mini_ee.lab.data.tokenizer import Tokenizer
from mini_ee.lab.exits.decoding import MISSING_KV, Generated, gather
from mini_ee.lab.exits.text_record import record_texts
from mini_ee.lab.exits.token_exits import TokenExits
from mini_ee.lab.rules import Fixed, Never, Rule

TIMED_TEXTS, ROUNDS = 4, 3


def decoding_figures(model: TokenExits, rule: Rule, texts: Sequence[Text], tokenizer: Tokenizer) -> dict:
    """For each fill of missing keys and values, of text after the beginnings of `texts`: layers saved, Rouge-L against
    the full model's text and against the text itself, agreement of a token with the full model's prediction after the
    same tokens, speed-up. Empty if no token exits early.
    """
    if isinstance(rule, Never):
        return {}
    rule = Never() if isinstance(rule, Fixed) else rule  # the model itself has fewer layers
    ways = {name: partial(_written, model, rule, name) for name in MISSING_KV}
    full = partial(_written, model.whole, Never(), MISSING_KV[0])
    decode = tokenizer.backend.decode
    references = [decode(text.ids[text.start + 1 :]) for text in texts]
    full_texts = [decode(generation.tokens) for generation in full(texts)]
    speedups = speed_ups(full, [*ways.values()], texts)
    figures = {}
    for (name, write), speedup in zip(ways.items(), speedups):
        written = write(texts)
        early_texts = [decode(generation.tokens) for generation in written]
        layers = np.concatenate([generation.layers_run for generation in written]).mean()
        figures[name] = {
            "layers_saved": float(1 - layers / model.whole.exits[-1]),
            "rouge_l": float(np.mean([rouge_l(*pair) for pair in zip(early_texts, full_texts)])),
            "rouge_l_reference": float(np.mean([rouge_l(*pair) for pair in zip(early_texts, references)])),
            "agreement": _agreement(model, texts, written),
            "speedup": speedup,
        }
    return figures


def lossless_figures(model: TokenExits, calibration: Sequence[Text], texts: Sequence[Text]) -> dict:
    """The full model's text, drafted by exits: the drafting layer, the share of tokens that are drafted, the share of
    texts equal to the full model's, and the speed-up. Empty without an exit before the last.

    The layer is the one that saves most layers on calibration text; None if the model chooses one for each draft.
    """
    if len(model.exits) < 2:
        return {}
    layers = (None,) if model.chooses_drafter else model.exits[:-1]
    drafters = {layer: partial(_drafted, model, layer) for layer in layers}
    saved = {layer: _saved(model, write(calibration)) if len(layers) > 1 else 0.0 for layer, write in drafters.items()}
    layer = max(saved, key=saved.__getitem__)
    write, full = drafters[layer], partial(_written, model, Never(), MISSING_KV[0])
    written, expected = write(texts), full(texts)
    (speedup,) = speed_ups(full, [write], texts)
    drafted = np.concatenate([np.array(generation.layers_run) < model.exits[-1] for generation in written]).mean()
    equal = np.mean([one.tokens == other.tokens for one, other in zip(written, expected)])
    return {"layer": layer, "drafted": float(drafted), "equal_texts": float(equal), "speedup": speedup}


def speed_ups(full: Callable, ways: Sequence[Callable], texts: Sequence[Text]) -> list[float]:
    """Processor time of `full` over that of each way, each over the first TIMED_TEXTS texts, one at a time."""
    timed, few = [full, *ways], texts[:TIMED_TEXTS]
    seconds, threads = np.zeros((1 + ROUNDS, len(few), len(timed))), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for repeat, number, at in product(*map(range, seconds.shape)):
            begin = time.process_time()
            timed[at]([few[number]])
            seconds[repeat, number, at] = time.process_time() - begin
    finally:
        torch.set_num_threads(threads)
    total = np.median(seconds[1:], axis=0).sum(axis=0)  # the first round warms up
    return (total[0] / total[1:]).tolist()


def _written(model: TokenExits, rule: Rule, missing_kv: str, texts: Sequence[Text]) -> list[Generated]:
    return model.write(texts, rule, max_new_tokens=_follow(texts), missing_kv=missing_kv, stop=())


def _drafted(model: TokenExits, layer: int | None, texts: Sequence[Text]) -> list[Generated]:
    prompts, follow = [text.ids[: text.start + 1] for text in texts], _follow(texts)
    return [gather(model.generate_lossless([prompt], follow, layer, stop=()), 1)[0] for prompt in prompts]


def _follow(texts: Sequence[Text]) -> int:
    return max(len(text.ids) - text.start - 1 for text in texts)


def _saved(model: TokenExits, written: Sequence[Generated]) -> float:
    return 1 - float(np.concatenate([generation.layers_run for generation in written]).mean()) / model.exits[-1]


def _agreement(model: TokenExits, texts: Sequence[Text], written: Sequence[Generated]) -> float:
    """The share of generated tokens that the full model predicts after the same text."""
    whole = [
        Text([*text.ids[: text.start + 1], *generation.tokens], text.start) for text, generation in zip(texts, written)
    ]
    return float(record_texts(model.whole, whole, last=False).logits[:, -1, 1].mean())
