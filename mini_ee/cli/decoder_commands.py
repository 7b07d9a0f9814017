"""The commands on decoders: train heads with no labels, choose their thresholds, and write text with them.

Without --text the text that heads learn from, and that thresholds are taken from, is what the decoder itself writes
from prompts; both are remade from --seed.
"""

import math
import shutil
import time
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import torch
from tqdm import tqdm

from mini_ee import WrongArguments
from mini_ee.backbones.hub import BUILT_IN_DECODER, DECODERS, backbone_sha256, load_backbone, read_config
from mini_ee.backbones.llama import Decoder
from mini_ee.baselines.calm import CalmDecoder
from mini_ee.data.files import read_json, read_text, sole_writer
from mini_ee.data.tasks import TOY
from mini_ee.data.texts import Text, cut_text
from mini_ee.data.tokens import Tokenizer
from mini_ee.export.manifest import MANIFEST
from mini_ee.export.writer import export
from mini_ee.measure.figures import table
from mini_ee.measure.texts import Opened, WithoutExits, decoder_rule, encoder, holds_decoder, open_decoder_run, refuse
from mini_ee.methods.consistent_tokens import ConsistentDecoder
from mini_ee.methods.self_supervised import (
    CALIBRATION_PROMPTS,
    TRAINING_PROMPTS,
    HeadTraining,
    SelfSupervised,
    calibrate_heads,
    save_heads,
    train_heads,
)
from mini_ee.rules import Policy
from mini_ee.training.fit import STATE, NothingToResume
from mini_ee.training.methods import CONFIGURED
from mini_ee.training.run import Run, training_folder, versions, write_rule
from mini_ee.training.run_tokens import load_decoder_run
from mini_ee.units.decoding import Step
from mini_ee.units.generation import Sampling, generate, generate_lossless, generated_texts
from mini_ee.units.rows import even_exits

EPSILON = 0.95  # of the rule that a training ends with

MEASURE = "breaking_ties"  # section 3.3.1

BUILT_IN_LR = 4e-3  # a small model wants larger steps

TEXTS, NEW_TOKENS = 512, 64  # to learn from, and as many to calibrate on

HELD_TEXTS, FIGURE_POINTS = 32, 20  # of Fig. 1

HELD_SEED, CALIBRATION_SEED = 10**6, 2 * 10**6  # away from the seeds of the batches before

WRITTEN_TOKENS, DRAFT = 100, 4

WRITERS = {"consistent": ConsistentDecoder, "calm": CalmDecoder}  # their runs are read here, trained elsewhere

COLOURS = (46, 118, 190, 220, 208, 196)  # of a terminal's 256: from green, the first exit, to red


# ---- train self-supervised ----
def unfinished_training(args) -> Path:
    """Where the state of the training stands. Raises where one was stopped and --resume is missing, and the reverse."""
    folder = training_folder(args.out)
    unfinished = (folder / STATE).exists()
    if unfinished and not args.resume:
        raise FileExistsError(f"{folder}: an unfinished training is there; go on with --resume or remove it")
    if args.resume and not unfinished:
        raise NothingToResume(f"{folder}: no unfinished training here; start without --resume")
    return folder


def train_exits(args, say) -> dict:
    """Heads on a frozen decoder: trained, calibrated, and written as a run."""
    settings_of_others = {name for _, known in CONFIGURED.values() for name in known} - {"weight"}
    others = {"head_lr", "max_train", "pool", "max_loss", "max_length", *settings_of_others}
    refuse(args, sorted(others), "is not for self-supervised")
    if args.task != TOY:
        raise WrongArguments("self-supervised takes no --task: the model writes its own text, or --text FILE gives it")
    if args.out.exists():
        raise FileExistsError(f"{args.out}: is there already; name another folder or remove it")
    state_folder = unfinished_training(args)
    given = {
        "penalty": args.weight,
        "target": args.target,
        "epochs": args.epochs,
        "lr": BUILT_IN_LR if args.lr is None and args.model is None else args.lr,
    }
    given = {name: value for name, value in given.items() if value is not None}
    try:
        how = HeadTraining(**given, batch_size=args.batch_size, seed=args.seed)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    begin, folder = time.perf_counter(), args.model or BUILT_IN_DECODER
    decoder, init = open_decoder(folder).to(args.device), args.init or "scratch"
    last = decoder.config.num_hidden_layers
    exits = args.exits or even_exits(last, 4)
    exits = exits if exits[-1] == last else (*exits, last)  # the LM head is always there
    try:
        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            model = SelfSupervised(decoder, exits, init)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    tokenizer = Tokenizer.from_folder(folder)
    texts, held = training_texts(decoder, tokenizer, args)
    tokens = sum(len(text.ids) for text in texts)
    say(
        f"{len(exits) - 1} heads on {folder.name}, after layers {', '.join(map(str, exits[:-1]))} of {last}; "
        f"they learn what it says at {tokens} tokens of {len(texts)} texts."
    )
    source = {"backbone": backbone_sha256(folder), "init": init}
    steps = how.epochs * -(-len(texts) // how.batch_size)
    how = replace(how, measure_every=max(1, steps // FIGURE_POINTS))
    with sole_writer(state_folder):
        history = train_heads(model, texts, held, how, state_folder, args.resume, source)
    say(fig1(model, history))
    calibration = written_texts(decoder, tokenizer, CALIBRATION_PROMPTS, args, CALIBRATION_SEED)
    rule, answer = calibrate_heads(model, calibration, EPSILON, None, MEASURE, args.seed)
    say(
        f"Rule: leave where {MEASURE} is at least a threshold at which {EPSILON:.0%} agree with the full model, taken "
        f"from text that it wrote; on other text {answer['end_to_end']:.1%} agree, after {answer['mean_layers']:.2f} "
        f"layers of {last}. `mini-ee calibrate` chooses another."
    )
    settings = asdict(how) | {"init": init, "texts": len(texts), "tokens": tokens}
    settings |= {
        "text": args.text and str(args.text),
        "prompts": None if args.text else args.prompt or TRAINING_PROMPTS,
    }
    metrics = {"history": history, "calibration": answer}
    about = {"seed": args.seed, "training": settings, "versions": versions()}
    save_heads(model, args.out, folder, rule=rule, about=about, metrics=metrics)
    shutil.rmtree(state_folder, ignore_errors=True)
    say(f"Run: {args.out}")
    return {
        "method": args.method,
        "model": str(folder),
        "exits": list(exits),
        "loss": history[-1]["loss"],
        "agreement": history[-1]["agreement"],
        "entropy": history[-1]["entropy"],
        "calibration": answer,
        "rule": rule.to_dict(),
        "run": str(args.out),
        "texts": len(texts),
        "tokens": tokens,
        "seconds": time.perf_counter() - begin,
    }


def fig1(model: SelfSupervised, history: list[dict]) -> str:
    """Where the heads stand before and after the training."""
    first, final = history[0], history[-1]
    rows = [
        {"layer": layer, "before": before, "agreement": agreement, "entropy": entropy}
        for layer, before, agreement, entropy in zip(
            model.exits, first["agreement"], final["agreement"], final["entropy"]
        )
    ]
    headings = {
        "layer": "exit",
        "before": "agreement before:.3f",
        "agreement": "after:.3f",
        "entropy": "entropy in nats:.3f",
    }
    return table(rows, headings)


# ---- The text that a command asks for ----
def refuse_text(args) -> None:
    """Raise WrongArguments where a classifier's command is given what only a decoder's heads take."""
    options = "init", "target", "text", "prompt", "greedy", "texts", "new_tokens"
    refuse(args, options, "is for self-supervised exits on a decoder")


def training_texts(decoder: Decoder, tokenizer: Tokenizer, args) -> tuple[list[Text], list[Text]]:
    """What heads learn from, and what Fig. 1 is measured on: other texts of the same kind."""
    if args.text is None:
        prompts = args.prompt or TRAINING_PROMPTS
        texts = written_texts(decoder, tokenizer, prompts, args, greedy=args.greedy)
        return texts, written_texts(decoder, tokenizer, prompts, args, HELD_SEED, HELD_TEXTS)
    pieces = file_texts(decoder, tokenizer, args)
    held = max(1, min(HELD_TEXTS, len(pieces) // 10))
    return pieces[held:], pieces[:held]


def calibration_texts(decoder: Decoder, tokenizer: Tokenizer, args) -> list[Text]:
    """What thresholds are taken from, and checked on."""
    if args.text is not None:
        return file_texts(decoder, tokenizer, args)
    prompts = args.prompt or CALIBRATION_PROMPTS
    return written_texts(decoder, tokenizer, prompts, args, CALIBRATION_SEED, greedy=args.greedy)


def written_texts(
    decoder: Decoder,
    tokenizer: Tokenizer,
    prompts: Sequence[str],
    args,
    seed: int = 0,
    count: int | None = None,
    greedy: bool = False,
) -> list[Text]:
    """What the full model writes from the prompts; greedily, each of them once."""
    prompts = [prompt_ids(tokenizer, prompt, "--prompt") for prompt in prompts]
    room = decoder.config.max_tokens - max(map(len, prompts))
    new_tokens = args.new_tokens or max(1, min(NEW_TOKENS, room))
    count = len(prompts) if greedy else count or args.texts or TEXTS
    settings = {"greedy": greedy, "stop": decoder.config.stop_tokens, "seed": args.seed + seed}
    return generated_texts(decoder, prompts, count, new_tokens, **settings)


def file_texts(decoder: Decoder, tokenizer: Tokenizer, args) -> list[Text]:
    """--text FILE in pieces, in an order drawn with the seed; --texts of them at most."""
    given = [name for name in ("prompt", "greedy") if getattr(args, name)]
    if given:
        raise WrongArguments(f"--{given[0]} is for text that the model writes: leave it out, or --text")
    first = encoder(tokenizer)("")
    length = args.new_tokens or min(NEW_TOKENS, decoder.config.max_tokens - len(first))
    if length + len(first) > decoder.config.max_tokens:
        raise WrongArguments(f"--new-tokens: expected at most {decoder.config.max_tokens - len(first)}, got {length}")
    ids = tokenizer.backend.encode(read_text(args.text), add_special_tokens=False).ids
    if len(ids) < 2 * length:
        raise WrongArguments(
            f"{args.text}: expected at least {2 * length} tokens, two pieces of {length}, found {len(ids)}; "
            f"give a longer text or smaller --new-tokens"
        )
    pieces = cut_text(ids, length, first)
    order = np.random.default_rng(args.seed).permutation(len(pieces))
    return [pieces[at] for at in order[: args.texts]]


def prompt_ids(tokenizer: Tokenizer, prompt: str, name: str) -> list[int]:
    """Token ids of a prompt. Raises WrongArguments, with the name of what held it, where there is no text in it."""
    if not prompt.strip():
        raise WrongArguments(f"{name}: expected a prompt, found no text")
    try:
        prompt.encode()
    except UnicodeEncodeError as error:  # the command line passes bytes that are no text as surrogates
        raise WrongArguments(f"{name}: expected text in UTF-8, found another byte at {error.start}") from None
    return encoder(tokenizer)(prompt)


# ---- calibrate ----
def calibrate_exits(args, say) -> dict:
    """Thresholds of a decoder's heads, on text that they were not trained on; they become the run's rule."""
    opened = open_decoder_run(args.run, args.model, "cpu")
    if isinstance(opened.model, WithoutExits):
        raise WrongArguments(f"{args.run}: a decoder without exits has no thresholds; give a run of self-supervised")
    if args.task is not None:
        raise WrongArguments(f"{args.run}: holds a decoder, which takes --text, or writes its own text; no --task")
    texts = calibration_texts(opened.model.decoder, opened.tokenizer, args)
    measure = args.measure or MEASURE
    rule, answer = calibrate_heads(opened.model, texts, args.epsilon, args.delta, measure, args.seed, args.sets or 0)
    write_rule(args.run, rule, answer["exit_counts"])
    intervals = (" to ".join(f"{float(end):.3g}" for end in ends) for ends in answer["tau_intervals"])
    rows = [
        {"layer": layer, "threshold": f"{float(tau):.3g}", "interval": ends, "agreement": _share(share), "left": left}
        for layer, tau, ends, share, left in zip(
            opened.model.exits, answer["thresholds"], intervals, answer["agreement"], answer["exit_counts"]
        )
    ]
    headings = {
        "layer": "exit",
        "threshold": "threshold",
        "interval": "95 % of bootstraps",
        "agreement": "agreement",
        "left": "tokens left here",
    }
    say(table(rows, headings))
    source = args.text or "text that the model wrote"
    say(
        f"Thresholds on {measure} from {answer['rows_calibration']} tokens of {source}; of {answer['rows_fresh']} "
        f"other tokens {answer['end_to_end']:.1%} are the full model's, after {answer['mean_layers']:.2f} layers of "
        f"{opened.model.exits[-1]}."
    )
    if args.sets:
        say(broken_line(answer))
    say(f"The rule of {args.run} is now these thresholds.")
    return {"method": opened.method, "run": str(args.run), "exits": list(opened.model.exits), **answer}


def broken_line(answer: dict) -> str:
    """How often a promise broke, in words; the answer of a calibration with --sets."""
    broken = answer["broken"]
    line = (
        f"Of {broken['sets']} calibration sets of {broken['groups_a_set']} the paper's rule breaks the promise of "
        f"{answer['epsilon']} on the rest for {broken['paper']:.1%}"
    )
    if "delta" in broken:
        error = math.sqrt(broken["delta"] * (1 - broken["delta"]) / broken["sets"])
        line += f", with delta {answer['delta']} for {broken['delta']:.1%} (standard error {error:.1%})"
    return line + "."


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.3f}"


# ---- generate ----
def write_text(args, say) -> dict:
    """One text from a decoder, printed as it comes, its prompt before it."""
    try:
        sampling = Sampling(
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            repetition_penalty=args.repetition_penalty,
        )
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    if "" in args.stop:
        raise WrongArguments("--stop: expected some text, found none")
    name = "--prompt" if args.prompt_file is None else str(args.prompt_file)
    prompt = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    folder = args.run or BUILT_IN_DECODER
    opened = open_writer(folder, args)
    tokenizer = opened.tokenizer.backend
    ids, decoder = prompt_ids(opened.tokenizer, prompt, name), opened.model.decoder
    count = args.max_new_tokens or max(1, min(WRITTEN_TOKENS, decoder.config.max_tokens - len(ids)))
    steps, about = written_steps(opened, ids, count, sampling, args)
    write = (lambda piece: None) if args.json else (lambda piece: print(piece, end="", flush=True))
    colours = colours_of(opened.model.exits) if args.show_exits else {}
    tokens, layers, ends, text, written = [], [], [], "", 0
    before, begin = len(tokenizer.decode(ids)), time.perf_counter()
    write(prompt)
    for step in tqdm(steps, total=count, unit="token", delay=2, leave=False, disable=not args.json):
        tokens += step.tokens
        layers += step.layers_run
        text = tokenizer.decode(ids + tokens)[before:]
        ends.append(whole_length(text))
        cuts = [text.index(end) for end in args.stop if end in text]
        if cuts:
            text = text[: min(cuts)]
            break
        settled = max(written, settled_length(text, args.stop))
        write(painted(text, written, settled, ends, layers, colours))
        written = settled
    seconds = time.perf_counter() - begin
    write(painted(text, written, len(text), ends, layers, colours) + "\n")
    if colours:
        left = (f"{paint(f'after layer {layer}', colours[layer])}: {layers.count(layer)}" for layer in colours)
        say(f"Tokens by the layer that wrote them: {', '.join(left)}.")
    if not args.lossless:
        mean_layers = float(np.mean(layers))
        about |= {"mean_layers": mean_layers, "layers_saved": 1 - mean_layers / opened.model.exits[-1]}
    return {
        "method": opened.method,
        "model": str(folder),
        "prompt": prompt,
        "text": text,
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "layers": layers,
        "exits": list(opened.model.exits),
        **about,
        "ended": "stop" if cuts or tokens[-1] in decoder.config.stop_tokens else "length",
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
    }


def written_steps(opened: Opened, ids: list[int], count: int, sampling: Sampling, args) -> tuple[Iterator[Step], dict]:
    """The steps of one text, and what the answer says of how they come about."""
    model, stop = opened.model, opened.model.decoder.config.stop_tokens
    if not args.lossless:
        if args.draft:
            raise WrongArguments("--draft is for --lossless")
        rule, fill = decoder_rule(opened, args), args.fill or "propagate"
        settings = {"exits": model.exits, "heads": model.heads, "rule": rule, "fill": fill}
        if isinstance(rule, Policy):
            settings["policies"] = model.policies
        settings |= {"sampling": sampling, "stop": stop, "seed": args.seed}
        steps = generate(model.decoder, [ids], max_new_tokens=count, **settings)
        return steps, {"rule": rule.to_dict(), "fill": fill}
    if sampling != Sampling():
        raise WrongArguments("--lossless writes the full model's greedy text: leave out what changes it")
    for option in ("rule", "threshold", "measure", "fill"):
        if getattr(args, option) is not None:
            raise WrongArguments(f"--lossless takes no --{option}: every draft of --layer is verified")
    if isinstance(model, WithoutExits):
        raise WrongArguments("--lossless needs an exit that drafts: give a run of self-supervised")
    layer, draft = args.layer or model.exits[0], args.draft or DRAFT
    if layer not in model.exits[:-1]:
        drafters = ",".join(map(str, model.exits[:-1]))
        raise WrongArguments(f"--layer: expected an exit that can draft, one of {drafters}, got {layer}")
    head = model.heads[model.exits.index(layer)]
    settings = {"exit_layer": layer, "head": head, "draft": draft, "stop": stop}
    steps = generate_lossless(model.decoder, [ids], max_new_tokens=count, **settings)
    return steps, {"lossless": True, "draft": draft, "draft_layer": layer}


def colours_of(exits: tuple[int, ...]) -> dict[int, int | None]:
    """layer -> colour; the last layer, where the full model speaks, keeps the terminal's own.

    >>> colours_of((2, 4, 6, 8))
    {2: 46, 4: 190, 6: 196, 8: None}
    """
    steps = max(1, len(exits) - 2)
    early = {layer: COLOURS[k * (len(COLOURS) - 1) // steps] for k, layer in enumerate(exits[:-1])}
    return early | {exits[-1]: None}


def paint(text: str, colour: int | None) -> str:
    """Text in a colour of the terminal's 256."""
    return text if colour is None else f"\033[38;5;{colour}m{text}\033[0m"


def painted(
    text: str, begin: int, stop: int, ends: list[int], layers: list[int], colours: dict[int, int | None]
) -> str:
    """text[begin:stop], each token's letters in the colour of its layer; ends: how long the text was after each."""
    if not colours:
        return text[begin:stop]
    pieces = []
    while begin < stop:
        token = min(bisect_right(ends, begin), len(layers) - 1)
        end = max(begin + 1, min(ends[token], stop))
        pieces.append(paint(text[begin:end], colours[layers[token]]))
        begin = end
    return "".join(pieces)


def whole_length(text: str) -> int:
    """How much of a text is whole characters: half a one at its end is decoded as a replacement character."""
    return len(text.rstrip("\N{REPLACEMENT CHARACTER}"))


def settled_length(text: str, stops: list[str]) -> int:
    """How much of a text no later token takes back: neither half a character nor what may begin one of `stops`.

    >>> settled_length("It was a big bo", ["boat", "\\n"])
    13
    """
    length = whole_length(text)
    begun = (i for end in stops for i in range(max(0, length - len(end)), length) if end.startswith(text[i:length]))
    return min(begun, default=length)


# ---- export ----
def export_precision(args) -> str:
    """What --fp16 and --int8 ask for."""
    return "float16" if args.fp16 else "int8" if args.int8 else "float32"


def export_writer(args, say) -> dict:
    """ONNX segments of a decoder, verified on text that it writes."""
    options = "task", "schedule", "patience", "cut", "k", "tau", "fallback_top"
    refuse(args, options, f"is for classifiers; {args.run} holds a decoder")
    opened = open_writer(args.run, args)
    begin = time.perf_counter()
    run = Run({"method": opened.method, "unit": "tokens"}, opened.model, opened.tokenizer, decoder_rule(opened, args))
    manifest = export(run, args.out, CALIBRATION_PROMPTS, export_precision(args), args.seed)
    verified = manifest["verified"]
    say(
        f"{len(manifest['graphs'])} graphs in {manifest['precision']}, against torch on {verified['tokens']} tokens "
        f"after each of {verified['prompts']} prompts: logits within {verified['max_logit_difference']:.2g}, "
        f"{verified['token_agreement']:.1%} of the tokens and {verified['exit_agreement']:.1%} of the exits equal."
    )
    say(f"Exported: {args.out}")
    answer = {key: manifest[key] for key in ("method", "exits", "rule", "precision", "opset", "verified")}
    size = sum(path.stat().st_size for path in args.out.iterdir())
    return answer | {"export": str(args.out), "bytes": size, "seconds": time.perf_counter() - begin}


# ---- Folders ----
def open_decoder(folder: Path) -> Decoder:
    """The decoder in a checkpoint folder. Errors as in check_decoder and load_backbone."""
    check_decoder(folder)
    return load_backbone(folder)


def check_decoder(folder: Path) -> None:
    """Raise WrongArguments for a folder that holds something else than a decoder's checkpoint."""
    if not folder.is_dir():
        raise FileNotFoundError(f"{folder}: no such folder; expected a decoder's checkpoint, or a run of one")
    found = read_json(folder / "config.json")
    if "method" in found:
        raise WrongArguments(f"{folder}: holds a run of {found['method']}; give a decoder's checkpoint")
    if (kind := read_config(folder / "config.json").model_type) not in DECODERS:
        raise WrongArguments(f"{folder}: holds a {kind}, which writes no text; give one of {', '.join(DECODERS)}")


def holds_writer(folder: Path) -> bool:
    """Whether a folder holds a run of WRITERS."""
    config = folder / "config.json"
    found = read_json(config) if config.is_file() else {}
    return found.get("method") in WRITERS and "task" not in found


def open_writer(folder: Path, args) -> Opened:
    """A decoder's run, or a plain decoder."""
    if (folder / MANIFEST).is_file():
        raise WrongArguments(f"{folder}: is exported already; `mini-ee run` writes with it")
    if holds_writer(folder):
        config, model, tokenizer, rule = load_decoder_run(folder, WRITERS, args.model)
        return Opened(config["method"], model.to(args.device), tokenizer, rule, [], config)
    config = folder / "config.json"
    method = read_json(config).get("method") if config.is_file() else None
    if method is None:
        if args.model:
            raise WrongArguments(f"--model says where the decoder of a run is now; {folder} is none")
        check_decoder(folder)
    elif not holds_decoder(folder):
        raise WrongArguments(f"{folder}: holds a run of {method}, which writes no text; give a decoder's")
    return open_decoder_run(folder, args.model, args.device)
