"""ConsistentEE and CALM on a decoder: `mini-ee train consistent|calm --model DECODER`, `mini-ee compare RUN RUN`.

Both methods begin with the same fine-tuning (decoder_exits.fine_tune): with one seed, the same backbone and the same
heads. So a comparison shows what decides, a policy or one of CALM's three measures.
"""

import shutil
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from tqdm import tqdm

import mini_ee.baselines.calm as calm
import mini_ee.methods.consistent_tokens as decoder_policies
from mini_ee import WrongArguments
from mini_ee.backbones.hub import BUILT_IN_DECODER, backbone_sha256, generates
from mini_ee.backbones.llama import Decoder
from mini_ee.baselines.calm import calibrate, learn_classifier
from mini_ee.cli.decoder_commands import WRITERS, holds_writer, open_decoder, unfinished_training
from mini_ee.data.files import read_json, sole_writer
from mini_ee.data.metrics import rouge_l
from mini_ee.data.tasks import TOY
from mini_ee.data.texts import Text, continuations, copies, read_stories
from mini_ee.data.tokens import Tokenizer
from mini_ee.measure.figures import draw_writing, table
from mini_ee.measure.texts import refuse
from mini_ee.methods.consistent import ConsistentEE
from mini_ee.methods.consistent_tokens import learn, said_by_model
from mini_ee.rules import NeverExit, Policy, Rule, rule_from_dict
from mini_ee.training.fit import TrainConfig
from mini_ee.training.fit_tokens import fine_tune
from mini_ee.training.run import versions
from mini_ee.training.run_tokens import DecoderRun, load_decoder_run, save_decoder_run
from mini_ee.units.decoding import Generated
from mini_ee.units.generation import Sampling, generated_texts, write
from mini_ee.units.rows import even_exits
from mini_ee.units.tokens import instances, sweep

MEASURES = {"consistent": {"policy": Policy()}, "calm": calm.MEASURES}

WRITING = ("continue", "copy")

EPOCHS, LR, HEAD_LR, RANK = 3, 2e-3, 8e-3, 8

TEXTS, HELD_TEXTS, TESTED_TEXTS, TIMED_TEXTS = 1500, 150, 100, 2

GIVEN, FOLLOW = 40, 40  # tokens of a story

TESTED_SEED = 10**6  # away from the seeds of the batches before

TOLERANCE, DELTA = 0.3, 0.05  # of the rules that CALM ends with: 1 - Rouge-L against the full model's text

REPEATS = 3


def is_for_decoders(args) -> bool:
    """Whether `train METHOD` teaches a decoder's tokens: consistent on a task's folder teaches it to classify."""
    config = args.model and args.model / "config.json"
    kind = read_json(config).get("model_type") if config and config.is_file() else None
    classifies = args.task is not None and Path(args.task).is_dir()
    return args.method == "calm" or (args.method == "consistent" and generates(kind) and not classifies)


# ---- train ----
def train_writer(args, say) -> dict:
    """Fine-tune a decoder with exits, then teach what decides; written as a run."""
    options = "max_train", "init", "prompt", "greedy", "pool", "max_loss", "max_length"
    refuse(args, options, f"is not for {args.method} on a decoder")
    if args.target and (args.method, args.target) != ("consistent", "hard"):
        raise WrongArguments("--target: consistent on a decoder learns from the text, or with hard from what it says")
    if args.out.exists():
        raise FileExistsError(f"{args.out}: is there already; name another folder or remove it")
    state_folder = unfinished_training(args)
    kind = "continue" if args.task == TOY else args.task
    if kind not in WRITING:
        raise WrongArguments(f"--task: a decoder learns to {' or to '.join(WRITING)} text, found {kind}")
    how, config = settings_of(args)
    begin, folder = time.perf_counter(), args.model or BUILT_IN_DECODER
    decoder, tokenizer = open_decoder(folder).to(args.device), open_tokenizer(folder)
    exits = args.exits or even_exits(decoder.config.num_hidden_layers, 4)
    try:
        with torch.random.fork_rng():
            torch.manual_seed(args.seed)
            model = WRITERS[args.method](decoder, exits, rank=args.rank or RANK).to(args.device)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    writing = {
        "kind": kind,
        "given": GIVEN,
        "follow": args.new_tokens or FOLLOW,
        "text": args.text and str(args.text.resolve()),
    }
    train, held = texts_to_learn(writing, decoder, tokenizer, args.texts or TEXTS, args.seed)
    say(f"{len(exits) - 1} heads, and adapters of rank {model.rank}, on {folder.name} learn {len(train)} texts.")
    about = {"method": args.method, "backbone": backbone_sha256(folder)}
    with sole_writer(state_folder):
        metrics = {"fine_tuning": fine_tune(model, train, config, state_folder, args.resume, about)}
    learned, kept = instances(model, train), instances(model, held)
    if args.target:
        learned, kept = said_by_model(model, learned), said_by_model(model, kept)
    with torch.random.fork_rng():
        if args.method == "consistent":
            metrics["history"] = learn(model, learned, kept, how, config)
        else:
            learn_classifier(model, learned, config)
    rules = {measure: sweep(model, learned, rule) for measure, rule in MEASURES[args.method].items()}
    if args.method == "consistent":
        own = MEASURES["consistent"]
        headings = {"step": "step", "reward": "reward, held out:.4f", "mean_layers": "layers of a token:.2f"}
        say(table(metrics["history"], headings))
    else:
        own = calibrated(partial_write(model, held, writing), rules, tokenizer)
        say(f"Rules under which texts lose {TOLERANCE} of Rouge-L in the mean, but for a chance of {DELTA}:")
        lines = [{"measure": measure, "rule": str(rule)} for measure, rule in own.items()]
        say(table(lines, {"measure": "measure", "rule": "rule"}))
    metrics["own"] = {measure: rule.to_dict() for measure, rule in own.items()}
    metrics["sweep"] = {measure: [rule.to_dict() for rule in some] for measure, some in rules.items()}
    training = asdict(config) | {"texts": len(train)}
    if args.method == "consistent":
        training |= asdict(how) | {"target": args.target}
    about = {"method": args.method, "writing": writing, "seed": args.seed, "training": training, "versions": versions()}
    save_decoder_run(model, args.out, folder, next(iter(own.values())), about, metrics)
    shutil.rmtree(state_folder)
    say(f"Run: {args.out}")
    answer = {"method": args.method, "model": str(folder), "exits": list(exits), "run": str(args.out)}
    return answer | metrics | {"texts": len(train), "seconds": time.perf_counter() - begin}


def settings_of(args) -> tuple[ConsistentEE, TrainConfig]:
    """ConsistentEE's settings, and those of the fine-tuning."""
    names = ("alpha", "reward", "estimator", "trajectories", "epsilon", "rounds")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    if given and args.method != "consistent":
        raise WrongArguments(f"{args.method} has no setting {', '.join(given)}: that is for consistent")
    rates = {"epochs": args.epochs, "lr": args.lr, "head_lr": args.head_lr}
    rates = {"epochs": EPOCHS, "lr": LR, "head_lr": HEAD_LR} | {k: v for k, v in rates.items() if v is not None}
    try:
        how = replace(decoder_policies.DEFAULTS, **given)
        return how, TrainConfig(**rates, batch_size=args.batch_size, seed=args.seed)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def open_tokenizer(folder: Path) -> Tokenizer:
    """A checkpoint's tokenizer, which cuts nothing."""
    tokenizer = Tokenizer.from_folder(folder)
    tokenizer.backend.no_truncation()
    return tokenizer


def texts_to_learn(writing: dict, decoder, tokenizer, count: int, seed: int) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and HELD_TEXTS held out of them, in an order drawn with the seed.

    Of a file's texts, all but the last tenth; without a file the decoder writes them, from its first token.
    """
    if writing["text"] is None:
        found = own_texts(writing, decoder, count + HELD_TEXTS, seed)
    else:
        found = file_texts(writing, decoder, tokenizer)
        found = found[: len(found) * 9 // 10]
    if len(found) < 2 * HELD_TEXTS:
        raise ValueError(
            f"{writing['text'] or '--texts'}: expected at least {2 * HELD_TEXTS} texts, half of them to hold out, "
            f"found {len(found)}; give more"
        )
    order = np.random.default_rng(seed).permutation(len(found))
    shuffled = [found[row] for row in order]
    return shuffled[HELD_TEXTS:][:count], shuffled[:HELD_TEXTS]


def texts_to_test(writing: dict, decoder, tokenizer, count: int, seed: int) -> list[Text]:
    """Others: of the last tenth of the file's, or written by the decoder."""
    if writing["text"] is None:
        return own_texts(writing, decoder, count, TESTED_SEED + seed)
    found = file_texts(writing, decoder, tokenizer)
    if len(found) < 10:
        raise ValueError(
            f"{writing['text']}: expected at least 10 texts, the last tenth to test on, found {len(found)}"
        )
    return found[len(found) * 9 // 10 :][:count]


def file_texts(writing: dict, decoder: Decoder, tokenizer: Tokenizer) -> list[Text]:
    """All texts of the file, for the task."""
    stories = read_stories(writing["text"])
    if writing["kind"] == "copy":
        return copies(tokenizer.backend, stories, decoder.config.stop_tokens[0])
    return continuations(tokenizer.backend, stories, writing["given"], writing["follow"])


def own_texts(writing: dict, decoder: Decoder, count: int, seed: int) -> list[Text]:
    """What the decoder writes itself."""
    if writing["kind"] == "copy":
        raise WrongArguments("--task copy: its sentences come from a text; give it with --text FILE")
    first, length = [[decoder.config.bos_token_id or 0]], writing["given"] + writing["follow"]
    written = generated_texts(decoder, first, count, length, seed=seed)
    return [Text(text.ids, writing["given"] - 1) for text in written]


Write = Callable[[Rule], list[Generated]]


def partial_write(model, texts: Sequence[Text], writing: dict, sampling: Sampling = Sampling(), seed: int = 0) -> Write:
    """`write` under a rule, all else given."""
    settings = {
        "new_tokens": writing["follow"],
        "stop": model.decoder.config.stop_tokens,
        "sampling": sampling,
        "seed": seed,
    }
    return lambda rule: write(model, texts, rule, **settings)


def calibrated(written: Write, rules: dict[str, list[Rule]], tokenizer: Tokenizer) -> dict[str, Rule]:
    """For each measure the loosest rule that keeps CALM's promise on greedy text, NeverExit where none does."""
    full = decoded(tokenizer, written(NeverExit()))

    def risk(rule: Rule) -> list[float]:
        return [1 - rouge_l(*pair) for pair in zip(decoded(tokenizer, written(rule)), full)]

    return {measure: calibrate(some, risk, TOLERANCE, DELTA) or NeverExit() for measure, some in rules.items()}


def decoded(tokenizer: Tokenizer, written: Sequence[Generated]) -> list[str]:
    """What was written, as text; tokens that end one say nothing."""
    return [tokenizer.backend.decode(each.tokens) for each in written]


# ---- compare ----
class Case(NamedTuple):
    """A run, and what it is tested on."""

    run: DecoderRun
    texts: list[Text]
    written: Write
    timed: Write  # the same on TIMED_TEXTS, one after the other, which no token ends


def compare_writers(args, say) -> dict:
    """How well and how fast runs write: each under its own rules, with --sweep also under stricter and looser ones."""
    for option in ("task", "split", "schedule"):
        if getattr(args, option):
            raise WrongArguments(f"--{option} is not for decoders' runs: they write what they were trained to write")
    if args.picture and not args.sweep:
        raise WrongArguments("--picture of decoders' runs draws what they save and lose: give --sweep too")
    cases = [open_case(folder, args) for folder in args.runs]
    kinds = {case.run.config["writing"]["kind"] for case in cases}
    if len(kinds) > 1:
        raise WrongArguments(
            f"these runs learned different tasks, {' and '.join(sorted(kinds))}: compare like with like"
        )
    rows, timed = [], []
    for folder, case in zip(args.runs, cases):
        metrics, tokenizer = read_json(folder / "metrics.json"), case.run.tokenizer
        references = [tokenizer.backend.decode(text.ids[text.start + 1 :]) for text in case.texts]
        full = decoded(tokenizer, case.written(NeverExit()))
        for measure, own in {"full model": NeverExit().to_dict(), **metrics["own"]}.items():
            some = metrics["sweep"].get(measure, []) if args.sweep else []
            points = []
            for rule in tqdm([own, *some], desc=measure, unit="rule", delay=2):
                written = case.written(rule_from_dict(rule))
                points.append({"rule": rule} | quality(case.run, written, full, references))
            about = {"run": str(folder), "method": case.run.config["method"], "measure": measure}
            rows.append(about | points[0] | {"exits": list(case.run.model.exits), "curve": points[1:]})
            timed += [(point, case.timed) for point in (rows[-1], *points[1:])]
    measure_speed(timed)
    headings = {
        "run": "run",
        "measure": "what decides",
        "rouge_l": "Rouge-L, full model:.3f",
        "rouge_l_reference": "reference:.3f",
        "mean_layers": "layers:.2f",
        "layers_saved": "saved:.1%",
        "tokens_per_second": "tokens/s:.0f",
    }
    say(table(rows, headings))
    answer = {"task": kinds.pop(), "rows": rows, "texts": len(cases[0].texts), "timed_texts": TIMED_TEXTS}
    if args.sweep:
        say("\n" + table([row | point for row in rows for point in row["curve"]], headings))
        if args.picture:
            draw_writing(args.picture, answer)
            say(f"Picture: {args.picture}")
    return answer


def open_case(folder: Path, args) -> Case:
    """A run of this file, on the device that was asked for, with texts that it was not trained on."""
    if not holds_writer(folder):
        raise WrongArguments(f"{folder}: is no decoder's run of consistent or calm; compare such runs with each other")
    try:
        sampling = Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p)
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    run = load_decoder_run(folder, WRITERS, args.model)
    run.tokenizer.backend.no_truncation()
    model = run.model.to(args.device)
    writing = run.config["writing"] | ({"text": str(args.text)} if args.text else {})
    texts = texts_to_test(writing, model.decoder, run.tokenizer, args.max_rows or TESTED_TEXTS, run.config["seed"])
    settings = {"new_tokens": writing["follow"], "sampling": sampling, "seed": args.seed, "batch_size": 1}
    return Case(
        run,
        texts,
        partial_write(model, texts, writing, sampling, args.seed),
        lambda rule: write(model, texts[:TIMED_TEXTS], rule, **settings),
    )


def quality(run: DecoderRun, written: list[Generated], full: list[str], references: list[str]) -> dict[str, float]:
    """Mean Rouge-L against the full model's texts and against the references, and the mean depth of a token."""
    found = decoded(run.tokenizer, written)
    layers = float(np.mean([layers for each in written for layers in each.layers_run]))
    return {
        "rouge_l": float(np.mean([rouge_l(*pair) for pair in zip(found, full)])),
        "rouge_l_reference": float(np.mean([rouge_l(*pair) for pair in zip(found, references)])),
        "mean_layers": layers,
        "layers_saved": 1 - layers / run.model.exits[-1],
    }


def measure_speed(points: list[tuple[dict, Write]]) -> None:
    """Tokens a second of every point's rule, put into it: all take turns, and the median over REPEATS counts."""
    seconds = np.zeros((REPEATS + 1, len(points)))  # the first round warms up
    for times in tqdm(seconds, desc="timing", unit="round", delay=2):
        for number, (point, timed) in enumerate(points):
            begin = time.perf_counter()
            tokens = sum(len(each.tokens) for each in timed(rule_from_dict(point["rule"])))
            times[number] = time.perf_counter() - begin
            point["tokens"] = tokens
    for (point, _), median in zip(points, np.median(seconds[1:], axis=0)):
        point["tokens_per_second"] = point.pop("tokens") / float(median)
