"""The benchmark decode: seconds per generated token."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from mini_ee.experiments.bench.common import forced_out, from_transformers, medians, row_of
from mini_ee.experiments.bench.one_decoder import bench_one_decoder
from mini_ee.lab.backbones.backbone import Tensors
from mini_ee.lab.backbones.cache import Cache
from mini_ee.lab.backbones.hub import BUILT_IN_DECODER, generates, load_backbone, read_config
from mini_ee.lab.backbones.llama import Decoder, DecoderConfig
from mini_ee.lab.exits.decoding import MISSING_KV, Generated, gather
from mini_ee.lab.exits.generation import generate
from mini_ee.lab.exits.heads import VocabularyHead
from mini_ee.lab.exits.lossless import generate_lossless
from mini_ee.lab.rules import Rule

STORIES = DecoderConfig(
    model_type="llama",
    vocab_size=512,
    hidden_size=64,
    num_hidden_layers=5,
    num_attention_heads=8,
    num_key_value_heads=4,
    intermediate_size=172,
    max_position_embeddings=512,
    hidden_act="silu",
    norm_eps=1e-5,
    tie_word_embeddings=True,
)

LLAMA = replace(
    STORIES, vocab_size=4096, hidden_size=768, num_hidden_layers=12, num_attention_heads=12, intermediate_size=2048
)

LOSSLESS_PROMPTS, TIMED_PROMPTS = 50, 4  # prompts of one token whose texts are compared; those that are timed


def bench_decode(model: Path | None, seed: int, gguf: Path | None = None) -> Iterator[dict]:
    """Cases: `stories260k|llama-12x768 bB transformers`, `llama-12x768 b1 eE copy_state|recompute`,
    `llama-12x256 b1 lossless`; of a decoder in the folder `model` those of one_decoder.py instead.
    """
    if model is not None and generates(read_config(model / "config.json").model_type):
        yield from bench_one_decoder(model, gguf)
        return
    stories, llama = random_decoder(STORIES, seed), random_decoder(LLAMA, seed)
    for name, decoder, new_tokens in (("stories260k", stories, 64), ("llama-12x768", llama, 12)):
        yield from _over_transformers(name, decoder, new_tokens, seed)
    for layer in (3, 6, 9):
        for missing_kv in MISSING_KV:
            yield _forced_decoding(f"llama-12x768 b1 e{layer} {missing_kv}", llama, layer, missing_kv, new_tokens=16)
    yield _lossless("llama-12x256 b1 lossless", load_backbone(BUILT_IN_DECODER), 64, seed)


def random_decoder(config: DecoderConfig, seed: int) -> Decoder:
    """A random decoder in eval mode."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        return Decoder(config).eval()


def _over_transformers(name: str, decoder: Decoder, new_tokens: int, seed: int) -> Iterator[dict]:
    """Continue 8 random tokens; the time includes the prompt. Raises ValueError if the texts differ."""
    random = np.random.default_rng(seed)
    for batch in (1, 8):
        prompts = random.integers(3, decoder.config.vocab_size, (batch, 8)).tolist()
        runs = [partial(_decoded, decoder, prompts, new_tokens), generate_of_transformers(decoder, prompts, new_tokens)]
        ours, expected = [row.tokens for row in runs[0]()], runs[1]()[:, 8:].tolist()
        if ours != expected:
            raise ValueError(f"bench decode: {name} b{batch}: expected the greedy text of transformers, found another")
        seconds, other = medians(runs, f"decode {name} b{batch}")
        yield row_of(f"{name} b{batch} transformers", seconds / new_tokens, other / new_tokens, bar=1.0)


def generate_of_transformers(
    decoder: Decoder, prompts: list[list[int]], new_tokens: int, device: str = "cpu"
) -> Callable[[], torch.Tensor]:
    """A function with the greedy continuation of prompts of one length by transformers; no text ends early."""
    theirs, ids = from_transformers("AutoModelForCausalLM", decoder).to(device), torch.tensor(prompts, device=device)
    end = theirs.generation_config
    end.eos_token_id = end.bos_token_id = end.pad_token_id = None
    settings = {"max_new_tokens": new_tokens, "do_sample": False, "attention_mask": torch.ones_like(ids)}
    return partial(theirs.generate, ids, **settings)


def _decoded(decoder: Decoder, prompts: list[list[int]], new_tokens: int, **settings) -> list[Generated]:
    return gather(generate(decoder, prompts, max_new_tokens=new_tokens, **settings), len(prompts))


class _LastGoesOn(Rule):
    """Confidence is evaluated for all of num_tokens tokens. All exit at the first exit except the last token."""

    def __init__(self, num_tokens: int):
        self.remaining, self.first_exit, self.last_exit = num_tokens - 1, forced_out(0, 2), forced_out(1, 2)

    def stop(self, k: int, read, memory: dict[str, np.ndarray]) -> np.ndarray:
        rule = self.first_exit if self.remaining else self.last_exit
        self.remaining -= 1
        return rule.stop(k, read, memory)


def _forced_decoding(case: str, decoder: Decoder, layer: int, missing_kv: str, new_tokens: int) -> dict:
    """All tokens but the last are forced to exit at `layer`; the last one needs their keys and values above it.

    Compared with the parts, called by hand: the layers up to the exit and its head for each token; filling in the
    missing keys and values in one block; the layers above and the LM head for the last token. Each token has its own
    copy of the head: one head would stay in the processor's cache, unlike in real decoding.
    """
    depth, earlier = decoder.config.num_hidden_layers, list(range(new_tokens - 1))
    cache = Cache(decoder, 1, new_tokens)
    with torch.inference_mode():
        blocks = [decoder.block(torch.tensor([[position]]), cache) for position in range(new_tokens)]
        gap = decoder.block(torch.tensor([earlier]), cache)
        hidden = decoder.embed(Tensors(torch.zeros(1, 1, dtype=torch.int64)))
        gaps = hidden.expand(1, len(earlier), -1).contiguous()
    heads = [VocabularyHead(decoder, "copy") for _ in blocks]
    fill_up = decoder.copy_state if missing_kv == "copy_state" else decoder.run_layers
    parts = {
        "layers": lambda: [decoder.run_layers(hidden, block, 0, layer) for block in blocks],
        "head": lambda: [head(hidden[:, 0]) for head in heads],
        "fill": lambda: fill_up(gaps, gap, layer, depth),
        "eager_fill": lambda: [fill_up(hidden, block, layer, depth) for block in blocks[:-1]],
        "last": lambda: decoder.lm_logits(decoder.run_layers(hidden, blocks[-1], layer, depth)),
    }

    def forced_out():
        settings = {
            "exits": (layer, depth),
            "heads": heads[:1],
            "rule": _LastGoesOn(new_tokens),
            "missing_kv": missing_kv,
        }
        return _decoded(decoder, [[0]], new_tokens, **settings)

    runs = [forced_out, *(torch.inference_mode()(part) for part in parts.values())]
    ours, *times = medians(runs, f"decode {case}")
    seconds = {f"{name}_seconds": time / new_tokens for name, time in zip(parts, times)}
    against = sum(seconds[f"{name}_seconds"] for name in ("layers", "head", "fill", "last"))
    return row_of(case, ours / new_tokens, against, bar=1.10) | seconds


def _lossless(case: str, decoder: Decoder, new_tokens: int, seed: int) -> dict:
    """Drafts after half of the layers by a copied LM head, compared with full decoding; also the equal texts."""
    depth = decoder.config.num_hidden_layers
    head = VocabularyHead(decoder, "copy")
    settings = {"max_new_tokens": new_tokens, "exit_layer": depth // 2, "head": head, "draft": 2}
    begins = np.random.default_rng(seed).integers(3, decoder.config.vocab_size, LOSSLESS_PROMPTS)
    prompts = [[decoder.config.bos_token_id, int(token)] for token in begins]

    def lossless(some):
        return [gather(generate_lossless(decoder, [prompt], **settings), 1)[0] for prompt in some]

    def full(some):
        return [_decoded(decoder, [prompt], new_tokens)[0] for prompt in some]

    drafted = lossless(prompts)
    equal = sum(one.tokens == other.tokens for one, other in zip(drafted, full(prompts)))
    ours, other = medians([partial(write, prompts[:TIMED_PROMPTS]) for write in (lossless, full)], f"decode {case}")
    tokens = TIMED_PROMPTS * new_tokens
    drafts = np.mean([text.layers_run.count(depth // 2) / new_tokens for text in drafted[:TIMED_PROMPTS]])
    counts = {"drafted_share": float(drafts), "prompts": LOSSLESS_PROMPTS, "equal_texts": equal}
    return row_of(case, ours / tokens, other / tokens, bar=1.0) | counts
