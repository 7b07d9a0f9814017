"""A decoder, with heads or without -> a folder of ONNX segments that writes text, verified against torch.

exported/manifest.json         as of a classifier's folder (segments.py); model is "Decoder"
exported/segment_{layer}.onnx  the layers up to an exit; head_{layer}.onnx what it says; fill_{layer}.onnx the keys and
                               values of those layers alone, for tokens that left below; policy_{layer}.onnx
                               whether to leave, where the model has policies (see decoder_graphs.py)
exported/model.safetensors     the weights of all graphs, each once, under torch's names
exported/tokenizer.json
"""

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import onnx
import torch
from torch import nn

import mini_ee.export.decoder_graphs as decoder_graphs
import mini_ee.export.graphs as graphs
from mini_ee.backbones.hub import load_strict, read_tensors
from mini_ee.backbones.llama import Decoder, DecoderConfig
from mini_ee.data.files import atomic_folder, file_sha256, write_json
from mini_ee.data.tokens import Tokenizer
from mini_ee.early_exit import Reading
from mini_ee.export.decoder_runtime import OrtTokenSegments, open_sessions
from mini_ee.export.runtime import DECODER, FORMAT_VERSION, MANIFEST
from mini_ee.export.segments import (
    TOLERANCE,
    WEIGHTS,
    check_torch_runs,
    has_outliers,
    interface,
    quantized,
    write_graphs,
)
from mini_ee.methods.consistent import policy_network
from mini_ee.methods.self_supervised import CALIBRATION_PROMPTS
from mini_ee.rules import Policy, Rule
from mini_ee.training.run import versions
from mini_ee.units.decoding import FILLS, CachedSegments, decode, gather, greedy
from mini_ee.units.generation import TokenSegments
from mini_ee.units.heads import VocabularyHead

POLICIES = ("networks", "classifier")  # of ConsistentDecoder and CalmDecoder

VERIFIED_TOKENS = 32  # written from each prompt


def export_decoder(
    model,
    tokenizer: Tokenizer,
    rule: Rule,
    out: Path,
    *,
    method: str,
    precision: str = "float32",
    prompts: Sequence[str] = CALIBRATION_PROMPTS,
    seed: int = 0,
) -> dict:
    """Write the exported folder and return its manifest.

    model: has a `decoder`, `exits`, a VocabularyHead for each exit but the last in `heads`, and may have `policies`,
    made of `networks` (ConsistentDecoder) or a `classifier` (CalmDecoder). precision: float32, float16, or int8 for
    maps inside the layers. prompts: from which torch and ONNX Runtime write, with each fill, to show that every exit
    says the same.
    Raises FileExistsError where `out` is there, ValueError where a weight is NaN or infinite, where the rule asks for
    more than heads say, or where float32 logits differ from torch's by more than TOLERANCE; then there is no folder.
    """
    config = model.decoder.config
    rule.check(len(model.exits))
    policies = getattr(model, "policies", ())
    if rule.glances and not (policies and isinstance(rule, Policy)):
        raise ValueError(f"the rule {rule.name} asks for more than this model's graphs say; choose another with --rule")
    parameters = _parameters(model, precision)
    for name, values in parameters.items():
        if not np.isfinite(values).all():
            raise ValueError(f"the decoder's {name} must be finite, found NaN or infinity; no folder was written")
    layer = sum(weight.numel() for weight in model.decoder.layers[0].parameters() if weight.dim() == 2)
    attention, head = config.num_attention_heads * config.head_width, config.hidden_size * config.vocab_size
    with atomic_folder(out) as partial_folder:
        made = _graphs(config, parameters, model.exits, bool(policies))
        if precision == "int8":
            segments = [name for name in made if name.startswith("segment_")]
            made |= {name: quantized(made[name], has_outliers) for name in segments}
        write_graphs(made, partial_folder)
        tokenizer.save(partial_folder / "tokenizer.json")
        manifest = {
            "format_version": FORMAT_VERSION,
            "method": method,
            "model": DECODER,
            "rule": rule.to_dict(),
            "opset": graphs.OPSET,
            "precision": precision,
            "backbone": config.to_dict(),
            "exits": list(model.exits),
            "max_tokens": config.max_tokens,
            "stop": config.stop_tokens,
            "cache_width": config.key_value_heads * config.head_width,
            "policies": [name for name in POLICIES if hasattr(model, name)],
            "weights": {"layer": layer, "attention": attention, "head": head},
            "graphs": {name: interface(graph) for name, graph in made.items()},
            "versions": versions() | {"onnx": onnx.__version__},
        }
        manifest["verified"] = _verify(model, tokenizer, rule, partial_folder, manifest, prompts, seed)
        names = sorted(path.name for path in partial_folder.iterdir())
        manifest["files"] = {name: file_sha256(partial_folder / name) for name in names}
        write_json(partial_folder / MANIFEST, manifest)
    return manifest


def torch_token_segments(
    folder: Path, manifest: dict, fill: str, device: str = "cpu"
) -> Callable[[int, int], TokenSegments]:
    """The same folder through torch: (number of rows, capacity in tokens) -> segments. ValueError for int8."""
    check_torch_runs(folder, manifest)
    with torch.device("meta"):
        decoder = Decoder(DecoderConfig.from_hugging_face(manifest["backbone"]))
        heads = nn.ModuleList(VocabularyHead(decoder, "scratch") for _ in manifest["exits"][1:])
        decides = {
            "networks": nn.ModuleList(policy_network(decoder.config.hidden_size, 0.5) for _ in heads),
            "classifier": nn.Linear(decoder.config.hidden_size, 1),
        }
    decides = {name: decides[name] for name in manifest["policies"]}
    model = nn.ModuleDict({"decoder": decoder, "heads": heads} | decides)
    path = folder / WEIGHTS
    load_strict(model, read_tensors(path), {name: (name,) for name in model.state_dict()}, path)
    model = model.requires_grad_(False).eval().to(device)
    networks = [decides["classifier"]] * len(heads) if "classifier" in decides else decides.get("networks", ())
    policies = [nn.Sequential(head.norm, network, nn.Flatten(0)) for head, network in zip(heads, networks)]
    return partial(TokenSegments, decoder, tuple(manifest["exits"]), heads, fill, policies=policies)


def _parameters(model, precision: str) -> dict[str, np.ndarray]:
    dtype = np.float16 if precision == "float16" else np.float32
    parts = {"decoder": model.decoder, "heads": nn.ModuleList(model.heads)}
    parts |= {name: getattr(model, name) for name in POLICIES if hasattr(model, name)}
    named = nn.ModuleDict(parts).named_parameters()
    return {name: value.detach().float().cpu().numpy().astype(dtype) for name, value in named}


def _graphs(
    config: DecoderConfig, parameters: dict[str, np.ndarray], exits: tuple[int, ...], policies: bool
) -> dict[str, onnx.ModelProto]:
    """File name without suffix -> graph, with its weights inside."""
    made = {}
    for number, layer in enumerate(exits):
        made[f"segment_{layer}"] = decoder_graphs.segment(config, parameters, exits, number)
        made[f"head_{layer}"] = decoder_graphs.head(config, parameters, exits, number)
        if policies and layer != exits[-1]:
            made[f"policy_{layer}"] = decoder_graphs.policy(config, parameters, exits, number)
        if number:
            made[f"fill_{layer}"] = decoder_graphs.fill(config, parameters, exits, number)
    return made


class _Drawn(Rule):
    """Whether a row leaves is drawn: nothing to be unsure about, and every gap in a cache. Notes what it was told."""

    def __init__(self, glances: bool, seed: int):
        self.glances, self.random, self.told = glances, np.random.default_rng(seed), []

    def stop(self, k: int, reading: Reading, memory: dict[str, np.ndarray]) -> np.ndarray:
        sure = reading.max_probability, reading.breaking_ties
        told = reading.exit_logit if self.glances else np.column_stack((reading.logits, *sure))
        self.told.append(told)
        return self.random.random(len(told)) < 0.5


def _verify(
    model, tokenizer: Tokenizer, rule: Rule, folder: Path, manifest: dict, prompts: Sequence[str], seed: int
) -> dict:
    """Write the same tokens through torch and through the graphs, all prompts in one batch padded on the left.

    What exits say is compared where it is drawn who leaves; texts where the rule and greed decide.
    """
    tokenizer.backend.no_truncation()
    ids = [tokenizer.backend.encode(prompt).ids for prompt in prompts]
    longest, policies = max(map(len, ids)), getattr(model, "policies", ())
    count = max(1, min(VERIFIED_TOKENS, manifest["max_tokens"] - longest))
    sizes, differences, equal = (len(ids), longest + count), [], []
    sessions = open_sessions(folder, manifest, "propagate")  # which has all that either fill needs
    for fill in FILLS:
        engines: list[Callable[[], CachedSegments]] = [
            partial(TokenSegments, model.decoder, model.exits, model.heads, fill, *sizes, policies),
            partial(OrtTokenSegments, sessions, manifest, fill, *sizes),
        ]
        expected, tokens = _drawn(engines[0](), ids, count, bool(policies), seed)
        found, _ = _drawn(engines[1](), ids, count, bool(policies), seed, tokens)
        differences += [abs(mine - theirs).max() for mine, theirs in zip(expected, found, strict=True)]
        with torch.inference_mode():
            texts = [gather(decode(engine(), ids, count, rule), len(ids)) for engine in engines]
        equal.append([np.array(mine) == np.array(theirs) for mine, theirs in zip(*texts)])
    difference = float(np.max(differences))
    if not np.isfinite(difference) or (manifest["precision"] == "float32" and difference > TOLERANCE):
        raise ValueError(
            f"the {manifest['precision']} graphs differ from torch by {difference:.2g} (logits; {TOLERANCE} allowed in "
            f"float32); no folder was written"
        )
    tokens, layers = np.array(equal).mean(axis=(0, 1, 3))  # of (fill, prompt, token or layer, step)
    return {
        "prompts": len(ids),
        "tokens": count,
        "max_logit_difference": difference,
        "token_agreement": float(tokens),
        "exit_agreement": float(layers),
    }


@torch.inference_mode()
def _drawn(
    segments: CachedSegments,
    prompts: list[list[int]],
    count: int,
    glances: bool,
    seed: int,
    forced: list[list[int]] | None = None,
) -> tuple[list[np.ndarray], list[list[int]]]:
    """All that is said on the way, and the tokens that are taken: the likeliest, or those of another run."""
    rule, said = _Drawn(glances, seed), []

    def choose(logits: np.ndarray, rows: list[int]) -> list[int]:
        said.append(logits)
        return greedy(logits, rows) if forced is None else forced[len(said) - 1]

    tokens = [step.tokens for step in decode(segments, prompts, count, rule, choose)]
    return said + rule.told, tokens
