"""Shared by all benchmarks: model shapes, models with random weights, inputs, and timing."""

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch

from mini_ee.lab.backbones.backbone import Backbone
from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import generates, load_backbone, read_config, save_backbone
from mini_ee.lab.data.progress import tqdm
from mini_ee.lab.data.tokenizer import Inputs
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.row_exits import even_exits
from mini_ee.lab.rules import Threshold

MINILM = BertConfig(
    model_type="bert",
    vocab_size=30522,
    hidden_size=384,
    num_hidden_layers=6,
    num_attention_heads=12,
    intermediate_size=1536,
    max_position_embeddings=512,
)

BERT_BASE = replace(MINILM, hidden_size=768, num_hidden_layers=12, intermediate_size=3072)

MIN_ROUNDS, SECONDS_A_CASE = 15, 12.0  # both are reached at least
WARM_ROUNDS = 3


def medians(runs: list[Callable], name: str, rest: float = 0.0, seconds_a_case: float = SECONDS_A_CASE) -> list[float]:
    """Median seconds of each function. They run in turns, after a warm-up, for at least MIN_ROUNDS and seconds_a_case.

    In its turn, a function runs twice, and the second call is timed: then its weights are in the caches again, as if
    one model runs alone. How warm the caches are still depends a little on the function before, so each round has
    another order. rest: seconds to wait before each turn. If engines differ, the threads of the engine before
    may still be spinning. On a GPU, a call lasts until the GPU has finished.
    """
    finish = torch.cuda.synchronize if torch.cuda.is_initialized() else lambda: None
    for _ in range(WARM_ROUNDS):
        for run in runs:
            run()
    seconds, random = [[] for _ in runs], np.random.default_rng(0)
    begin = time.perf_counter()
    with tqdm(desc=name, unit="round", delay=2, leave=False) as bar:
        while len(seconds[0]) < MIN_ROUNDS or time.perf_counter() - begin < seconds_a_case:
            for number in random.permutation(len(runs)):
                run = runs[number]
                time.sleep(rest)
                run()
                finish()
                start = time.perf_counter()
                run()
                finish()
                seconds[number].append(time.perf_counter() - start)
            bar.update()
    return [float(np.median(times)) for times in seconds]


def row_of(case: str, seconds: float, against: float, bar: float) -> dict:
    """A row: two median times, their ratio, and the largest ratio that passes."""
    ratio = seconds / against
    row = {"case": case, "seconds": seconds, "against_seconds": against}
    return row | {"ratio": ratio, "bar": bar, "holds": ratio <= bar}


def forced_out(k: int, num_exits: int) -> Threshold:
    """A threshold that is evaluated at every exit and reached only at exit k."""
    return Threshold(tuple(-np.inf if exit == k else np.inf for exit in range(num_exits)))


def minilm_of(model: Path | None, seed: int) -> Bert:
    """The encoder in a folder, or a random one with the shape of MiniLM. Raises ValueError for a decoder."""
    if model and generates(kind := read_config(model / "config.json").model_type):
        raise ValueError(f"{model}: holds a {kind}; this benchmark takes an encoder, or no --model")
    return load_backbone(model) if model else random_encoder(MINILM, seed)


def three_exits(backbone: Bert) -> tuple[int, ...]:
    """Exits after each third of the layers. Raises ValueError if there are fewer than three layers."""
    if (layers := backbone.config.num_hidden_layers) < 3:
        raise ValueError(f"this benchmark takes an encoder of three layers or more, or no --model; found {layers}")
    return even_exits(layers, 3)


def random_encoder(config: BertConfig, seed: int) -> Bert:
    """A random encoder without heads, in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Bert(config, lm_head=False).eval()


def load_transformers() -> ModuleType:
    """The library transformers, without its messages. Raises WrongArguments if it is not installed."""
    os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
    try:
        import transformers
    except ImportError:
        raise WrongArguments("this needs transformers, which is not installed: pip install 'mini-ee[hf]'") from None
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


def from_transformers(kind: str, backbone: Backbone):
    """A model of transformers, of its class `kind`, with the same weights, in eval mode."""
    with tempfile.TemporaryDirectory() as folder:
        save_backbone(backbone, Path(folder) / "model")
        return getattr(load_transformers(), kind).from_pretrained(Path(folder) / "model").eval()


def inputs_of(config: BertConfig, batch: int, tokens: int, seed: int) -> Inputs:
    """Rows of random tokens without padding."""
    ids = np.random.default_rng(seed).integers(config.vocab_size // 2, config.vocab_size, (batch, tokens))
    return Inputs(ids, np.ones_like(ids), np.zeros_like(ids), (("",),) * batch)


def full_model(backbone: Bert, inputs: Inputs) -> Callable[[], torch.Tensor]:
    """A function that runs all layers, without heads; the inputs must have no padding."""
    ids, _, types = tensors_of(inputs)
    return torch.inference_mode()(partial(backbone, ids, None, types))


def tensors_of(inputs: Inputs, device: str | torch.device = "cpu") -> list[torch.Tensor]:
    """The arguments of a model's forward."""
    arrays = inputs.input_ids, inputs.attention_mask, inputs.token_type_ids
    return [torch.from_numpy(array).to(device) for array in arrays]
