"""What early exits cost a decoder and what they save: benchmarks, perplexity, and the figures over epsilon.

Source: Valade 2024, Accelerating Large Language Model Inference with Self-Supervised Early Exits, section 4.2.

Scored is teacher-forced: one pass reads every exit at every position, and a position's distribution is then that of the
exit at which the rule lets it leave. Each position has seen all layers of those before it, as a prompt has, and as
decoding has when its fill is "recompute": so one pass serves every epsilon, exactly. Speed is measured on decoding.

Symbols:   N positions, K exits; p_k: what exit k says of the next token; epsilon as in calibration.py.
"""

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from tqdm import tqdm

from mini_ee import WrongArguments
from mini_ee.backbones.hub import DECODERS, load_backbone
from mini_ee.calibration import Observed, agreement, calibrate, end_to_end, exit_indices
from mini_ee.confidence import MEASURES
from mini_ee.data.files import read_json, read_text
from mini_ee.data.multiple_choice import Asked, Benchmark, ask, load_benchmark, standard_error
from mini_ee.data.texts import Text, cut_text
from mini_ee.data.tokens import Tokenizer
from mini_ee.early_exit import Reading
from mini_ee.measure.figures import draw_decoder, draw_training, table
from mini_ee.methods.self_supervised import CALIBRATION_PROMPTS, SelfSupervised, load_heads, observe_texts
from mini_ee.rules import FixedExit, NeverExit, Rule, Threshold, confidence
from mini_ee.units.decoding import FILLS, Generated, gather
from mini_ee.units.generation import generate, generated_texts
from mini_ee.units.tokens import WithoutExits

EPSILONS = (0.5, 0.6, 0.7, 0.8, 0.9, 0.95, 0.99)

COMPARED = tuple(measure for measure in MEASURES if measure != "normalised_entropy")  # entropy over a constant

LEVELS = (0.8, 0.9, 0.95)  # of end-to-end agreement, at which measures are compared

LEVEL = 0.9  # at which runs are compared

GRID = np.linspace(0.5, 1, 101).round(3)  # values of epsilon tried for a level

REPEATS = 3  # of each timed decoding, after one that warms; the median counts

BATCH = 16  # texts that are read together

TEXTS, NEW_TOKENS = 256, 64  # generated to calibrate on, and as many to check on

PIECES, PIECE = 200, 128  # of a text for perplexity, at most, and the tokens in each

DECODED = 64  # tokens from each prompt, where speed is measured


class Heard(NamedTuple):
    """What every exit says at N positions, in the order of the texts and of their tokens."""

    log_p: np.ndarray  # (N, K), of the token that comes next, in nats
    likeliest: np.ndarray  # (N, K) bool: that token is the exit's likeliest
    observed: Observed  # of the exits but the last; a text is a group
    measure: str  # in which the confidence was observed

    def leave(self, rule: Rule) -> np.ndarray:
        """(N,): index of the exit at which each position leaves; what early_exit finds.

        Raises ValueError for a rule other than never, fixed and threshold, and for a threshold on another measure.
        """
        positions, exits = self.log_p.shape
        if isinstance(rule, NeverExit) or exits == 1:
            return np.full(positions, exits - 1)
        if isinstance(rule, FixedExit):
            return np.full(positions, rule.exit)
        if isinstance(rule, Threshold):
            each = rule.threshold if isinstance(rule.threshold, tuple) else (rule.threshold,) * exits
            if rule.measure != self.measure:
                raise ValueError(f"expected a threshold on {self.measure}, which was observed, got {rule.measure}")
            return exit_indices(self.observed, Threshold(each, rule.measure))
        raise ValueError(f"a decoder's positions leave by never, fixed or threshold, got the rule {rule.name}")


@torch.inference_mode()
def listen(
    model: SelfSupervised | WithoutExits, texts: Sequence[Text], measure: str = "breaking_ties", batch_size: int = BATCH
) -> Heard:
    """Read every exit at the positions of each text from its `start` on that have a next token.

    measure: one of confidence.MEASURES.
    """
    device = model.decoder.embeddings.weight.device
    order = sorted(range(len(texts)), key=lambda row: len(texts[row].ids))
    parts = []
    for begin in tqdm(range(0, len(order), batch_size), desc="scoring", unit="batch", delay=2):
        rows = order[begin : begin + batch_size]
        read = [tuple(texts[row].ids[:-1]) for row in rows]
        unique = {ids: at for at, ids in enumerate(dict.fromkeys(read))}  # MMLU's letters all follow one text
        ids = nn.utils.rnn.pad_sequence(list(map(torch.tensor, unique)), batch_first=True).to(device)
        which = [unique[ids] for ids in read]
        counted = torch.zeros(len(rows), ids.shape[1], dtype=torch.bool, device=device)
        for at, row in enumerate(rows):
            counted[at, texts[row].start : len(texts[row].ids) - 1] = True
        following = torch.tensor([token for row in rows for token in texts[row].ids[texts[row].start + 1 :]]).to(device)
        states = model.decoder.hidden_states(ids)
        log_p, said, sure = [], [], []
        for k, layer in enumerate(model.exits):  # one at a time: logits of all would be K times as large
            hidden = states[layer][which][counted]
            logits = model.heads[k](hidden).float() if k < len(model.heads) else model.decoder.lm_logits(hidden)
            log_p.append(logits.log_softmax(-1).gather(-1, following[:, None])[:, 0])
            said.append(logits.argmax(-1))
            if k < len(model.heads):
                sure.append(confidence(Reading(logits.numpy(force=True)), measure))
        log_p, said = (torch.stack(each, dim=1).numpy(force=True) for each in (log_p, said))
        likeliest, agrees = said == following[:, None].numpy(force=True), said[:, :-1] == said[:, -1:]
        groups = np.repeat(rows, counted.sum(1).numpy(force=True))
        parts.append((log_p, likeliest, np.stack(sure, axis=1) if sure else log_p[:, :0], agrees, groups))
    log_p, likeliest, sure, agrees, groups = (np.concatenate(part) for part in zip(*parts))
    back = np.argsort(groups, kind="stable")
    return Heard(log_p[back], likeliest[back], Observed(sure, agrees, groups).take(back), measure)


# ---- Benchmarks and perplexity ----
def encoder(tokenizer: Tokenizer) -> Callable[[str], list[int]]:
    """A text's token ids, whole, with what the tokenizer puts before them: what `ask` takes."""
    tokenizer.backend.no_truncation()
    return lambda text: tokenizer.backend.encode(text).ids


class Hearing(NamedTuple):
    """A benchmark's questions as token ids, and what every exit said of their options."""

    benchmark: Benchmark
    asked: list[Asked]
    heard: Heard

    def right(self, exit_index: np.ndarray) -> np.ndarray:
        """(Q,) bool: the questions that are answered, where positions (N,) leave at these exits."""
        answers, first = [], 0
        log_p, greedy = self.options(exit_index)
        for row, asked in enumerate(self.asked):
            options = slice(first, first := first + len(asked.requests))
            answers.append(self.benchmark.right(row, log_p[options], greedy[options]))
        return np.array(answers)

    def accuracy(self, exit_index: np.ndarray) -> dict[str, float]:
        """The share of questions that are answered, and its standard error."""
        right = self.right(exit_index)
        sources = np.array([question.source for question in self.benchmark.questions])
        return {"accuracy": float(right.mean()), "standard_error": standard_error(right, sources)}

    def options(self, exit_index: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of every option of every question: its log p, and whether greedy decoding writes it."""
        at, groups = np.arange(len(exit_index)), self.heard.observed.groups
        log_p, missed = self.heard.log_p[at, exit_index], ~self.heard.likeliest[at, exit_index]
        return np.bincount(groups, weights=log_p), np.bincount(groups, weights=missed) == 0


def hear(
    model: SelfSupervised | WithoutExits,
    benchmark: Benchmark,
    tokenizer: Tokenizer,
    measure: str = "breaking_ties",
    batch_size: int = BATCH,
) -> Hearing:
    """Read every exit at every token of every option."""
    encode, most = encoder(tokenizer), model.decoder.config.max_tokens
    asked = [ask(question, encode, most) for question in tqdm(benchmark.questions, desc="tokenizing", delay=2)]
    texts = [Text(request.ids, request.start - 1) for one in asked for request in one.requests]
    return Hearing(benchmark, asked, listen(model, texts, measure, batch_size))


def benchmark_answer(model: SelfSupervised | WithoutExits, hearing: Hearing, rule: Rule) -> dict:
    """The JSON answer of a benchmark under one rule. No speed-up: every exit was read; `sweep` measures it."""
    benchmark, asked, heard = hearing
    positions, last = len(heard.log_p), len(model.exits) - 1
    left = heard.leave(rule)
    each = [hearing.accuracy(np.full(positions, k))["accuracy"] for k in range(last + 1)]
    log_p, _ = hearing.options(left)
    answers = np.cumsum([0, *(len(one.requests) for one in asked)])[:-1] + [q.answer for q in benchmark.questions]
    mean_layers = float(np.asarray(model.exits)[left].mean())
    answer = {
        "task": benchmark.name,
        "split": benchmark.split,
        "rows": len(asked),
        "choice": benchmark.choice,
        **hearing.accuracy(left),
        "full_accuracy": each[-1],
        "log_likelihood": float(log_p[answers].mean()),
        "exits": list(model.exits),
        "per_exit_accuracy": each,
        "exit_counts": np.bincount(left, minlength=last + 1).tolist(),
        "mean_layers": mean_layers,
        "layers_saved": 1 - mean_layers / model.exits[-1],
        "rule": rule.to_dict(),
        "rows_truncated": sum(one.cut for one in asked),
    }
    if benchmark.choice != "greedy":
        answer["chance"] = float(np.mean([1 / len(one.requests) for one in asked]))
    most = max(len(question.shots) for question in benchmark.questions)
    if most:
        answer["shots"] = np.bincount([one.shots for one in asked], minlength=most + 1).tolist()
    return answer


def perplexity(heard: Heard, rule: Rule) -> float:
    """exp of the mean of -ln p of the next token, each position's from the exit at which it leaves."""
    left = heard.leave(rule)
    return float(np.exp(-heard.log_p[np.arange(len(left)), left].mean()))


# ---- Everything over epsilon ----
def sweep(
    model: SelfSupervised,
    calibration: Sequence[Text],
    fresh: Sequence[Text],
    prompts: Sequence[Sequence[int]],
    *,
    measure: str = "breaking_ties",
    new_tokens: int = DECODED,
    held: Heard | None = None,
    hearing: Hearing | None = None,
) -> dict:
    """For every epsilon of EPSILONS: thresholds of the paper's rule, and what they keep, cost and save elsewhere.

    calibration: texts that the thresholds are taken from; fresh: others, on which the promise is checked. prompts: what
    is continued, by new_tokens greedy tokens each, a prompt at a time, where speed is measured: with propagate in the
    row itself, with recompute under that name. held: what was heard of a text, for perplexity; hearing: of a benchmark.
    Both in the same measure.
    """
    taken, checked = (observe_texts(model, texts, measure) for texts in (calibration, fresh))
    rules = [calibrate(taken, epsilon, measure=measure) for epsilon in EPSILONS]
    rows = []
    for epsilon, rule in zip(EPSILONS, rules):
        row = {"epsilon": epsilon, "thresholds": rule.to_dict()["threshold"][:-1]} | kept(model, checked, rule)
        if held is not None:
            row["perplexity"] = perplexity(held, rule)
        if hearing is not None:
            row |= hearing.accuracy(hearing.heard.leave(rule))
        rows.append(row)
    ways = [(rule, fill) for fill in FILLS for rule in rules]
    full, *decoded = timed_decoding([(NeverExit(), FILLS[0]), *ways], model, prompts, new_tokens)
    decoded = [each | {"speedup": full["seconds"] / each["seconds"]} for each in decoded]
    for row, propagated, recomputed in zip(rows, decoded, decoded[len(rows) :]):
        row |= propagated | {"recompute": recomputed}
    answer = {
        "rows": rows,
        "exits": list(model.exits),
        "measure": measure,
        "full_tokens_per_second": full["tokens_per_second"],
        "tokens_calibration": len(taken.groups),
        "tokens_fresh": len(checked.groups),
        "measures": at_equal_agreement(model, calibration, fresh),
    }
    if held is not None:
        answer |= {"full_perplexity": perplexity(held, NeverExit()), "tokens_text": len(held.log_p)}
    if hearing is not None:
        full = hearing.accuracy(hearing.heard.leave(NeverExit()))["accuracy"]
        benchmark = hearing.benchmark
        answer |= {"task": benchmark.name, "split": benchmark.split, "task_rows": len(hearing.asked)}
        answer["full_accuracy"] = full
    return answer


def kept(model: SelfSupervised, observed: Observed, rule: Threshold) -> dict:
    """What a rule keeps of its promise on some rows, and where they leave."""
    left = exit_indices(observed, rule)
    mean_layers = float(np.asarray(model.exits)[left].mean())
    return {
        "agreement": agreement(observed, rule),
        "end_to_end": end_to_end(observed, rule),
        "exit_counts": np.bincount(left, minlength=len(model.exits)).tolist(),
        "mean_layers": mean_layers,
        "layers_saved": 1 - mean_layers / model.exits[-1],
    }


def at_equal_agreement(
    model: SelfSupervised,
    calibration: Sequence[Text],
    fresh: Sequence[Text],
    measures: Sequence[str] = COMPARED,
    levels: Sequence[float] = LEVELS,
) -> list[dict]:
    """For each measure and level: what fresh tokens keep and cost at that end-to-end agreement.

    epsilon is the lowest of GRID at which the calibration texts reach the level.
    """
    rows = []
    for measure in measures:
        taken, checked = (observe_texts(model, texts, measure) for texts in (calibration, fresh))
        rules = [calibrate(taken, epsilon, measure=measure) for epsilon in GRID]
        reached = np.array([end_to_end(taken, rule) for rule in rules])
        for level in levels:
            at = int(np.argmax(reached >= level))  # epsilon 1 reaches every level
            found = kept(model, checked, rules[at])
            rows.append({"measure": measure, "level": level, "epsilon": float(GRID[at])} | found)
    return rows


def timed_decoding(
    ways: Sequence[tuple[Rule, str]], model: SelfSupervised, prompts: Sequence[Sequence[int]], new_tokens: int
) -> list[dict]:
    """Greedy text under each rule and fill, timed in turns in this process, warm, batch 1: median seconds of REPEATS.

    NeverExit is our own cached decoding, without heads. `decoded_agreement` is the share of written
    tokens that the full model would have written there, given the same text before them: with whatever `fill` changes.
    """

    def written(rule: Rule, fill: str, prompt: Sequence[int]) -> Generated:
        exits = {} if isinstance(rule, NeverExit) else {"exits": model.exits, "heads": model.heads}
        return gather(generate(model.decoder, [prompt], max_new_tokens=new_tokens, rule=rule, fill=fill, **exits), 1)[0]

    texts, seconds = [], np.empty((REPEATS, len(prompts), len(ways)))
    for repeat, number in tqdm(list(np.ndindex(1 + REPEATS, len(prompts))), desc="decoding", unit="prompt", delay=2):
        for at, way in enumerate(ways):
            begin = time.perf_counter()
            text = written(*way, prompts[number])
            if repeat:
                seconds[repeat - 1, number, at] = time.perf_counter() - begin
            else:
                texts.append(text)
    answers = []
    for at, taken in enumerate(np.median(seconds, axis=0).sum(axis=0)):
        own = texts[at :: len(ways)]
        whole = [Text([*prompt, *text.tokens], len(prompt) - 1) for prompt, text in zip(prompts, own)]
        layers = np.concatenate([text.layers_run for text in own])
        full = listen(WithoutExits(model.decoder, model.exits[-1:]), whole)
        answers.append(
            {
                "decoded_agreement": float(full.likeliest.mean()),
                "decoded_layers": float(layers.mean()),
                "seconds": float(taken),
                "tokens_per_second": len(layers) / float(taken),
            }
        )
    return answers


# ---- The command ----
class Opened(NamedTuple):
    """A decoder's run, or a plain decoder, whose exits are the last alone."""

    method: str
    model: SelfSupervised | WithoutExits
    tokenizer: Tokenizer
    rule: Rule
    history: list[dict]  # of the training, Fig. 1
    config: dict


def holds_decoder(folder: Path) -> bool:
    """Whether a folder holds a decoder with heads, or a plain decoder."""
    if not (folder / "config.json").is_file():
        return False
    config = read_json(folder / "config.json")
    return config.get("method") == "self-supervised" or config.get("model_type") in DECODERS


def open_decoder_run(folder: Path, backbone_folder: Path | None, device: str) -> Opened:
    """A folder that `holds_decoder`. backbone_folder: where the decoder under the heads is now, if it moved."""
    config = read_json(folder / "config.json")
    if "model_type" in config:
        decoder = load_backbone(folder).to(device)
        model = WithoutExits(decoder, (decoder.config.num_hidden_layers,))
        return Opened("none", model, Tokenizer.from_folder(folder), NeverExit(), [], config)
    model, rule, config = load_heads(folder, backbone_folder)
    own = (folder / "tokenizer.json").is_file()
    tokenizer = Tokenizer.from_folder(folder if own else backbone_folder or config["backbone"]["folder"])
    history = read_json(folder / "metrics.json").get("history", [])
    return Opened(config["method"], model.to(device), tokenizer, rule, history, config)


def evaluate_decoder(args, say) -> dict:
    """`mini-ee evaluate` of a decoder's run: a benchmark under one rule, or with --sweep everything over epsilon."""
    foreign = ("split", "schedule", "overthinking", "hardness", "patience", "cut", "k", "tau", "fallback_top")
    refuse(args, foreign, f"is for classifiers; {args.run} holds a decoder")
    if not args.sweep and (args.text or args.picture or not args.task):
        given = "--text and --picture go" if args.task else "without --task a decoder's run goes"
        raise WrongArguments(f"{given} with --sweep: add it" + ("" if args.task else ", or name a benchmark's folder"))
    opened = open_decoder_run(args.run, args.model, args.device)
    if args.sweep:
        refuse(args, ("rule", "threshold", "layer"), "is not for --sweep, which finds thresholds itself")
        return {"method": opened.method, "run": str(args.run)} | _sweep(opened, args, say)
    rule = decoder_rule(opened, args)
    measure = rule.measure if isinstance(rule, Threshold) else "breaking_ties"
    hearing = _hear(opened, measure, args)
    answer = benchmark_answer(opened.model, hearing, rule)
    rows = [
        {"layer": layer, "accuracy": accuracy, "left": count}
        for layer, accuracy, count in zip(answer["exits"], answer["per_exit_accuracy"], answer["exit_counts"])
    ]
    say(table(rows, {"layer": "layer", "accuracy": "accuracy:.3f", "left": "tokens that left here"}))
    if answer["rows_truncated"]:
        say(f"{answer['rows_truncated']} of {answer['rows']} contexts cut to the model's {_context(opened)} tokens")
    if "shots" in answer:
        shots = ", ".join(f"{count} with {number}" for number, count in enumerate(answer["shots"]) if count)
        say(f"Answered questions that the context had room for: {shots}.")
    chance = f", by chance {answer['chance']:.3f}" if "chance" in answer else ""
    say(
        f"{answer['task']}, {answer['rows']} rows: accuracy {answer['accuracy']:.3f} +- {answer['standard_error']:.3f} "
        f"(full model {answer['full_accuracy']:.3f}{chance}), ln p of the right answer {answer['log_likelihood']:.2f}; "
        f"a scored token takes {answer['mean_layers']:.2f} layers of {answer['exits'][-1]}."
    )
    return {"method": opened.method, "run": str(args.run)} | answer


def is_given(args, option: str) -> bool:
    """Whether the command line says something of an option; 0 is something."""
    value = getattr(args, option, None)
    return value is not None and value is not False


def refuse(args, options: Sequence[str], why: str) -> None:
    """Raise WrongArguments for an option that is given where nothing asks for it: "--option" and why."""
    for option in options:
        if is_given(args, option):
            raise WrongArguments(f"--{option.replace('_', '-')} {why}")


def _context(opened: Opened) -> int:
    return opened.model.decoder.config.max_tokens


def _hear(opened: Opened, measure: str, args) -> Hearing:
    benchmark = load_benchmark(args.task)
    if args.max_rows:
        benchmark = benchmark.subset(args.max_rows, args.seed)
    return hear(opened.model, benchmark, opened.tokenizer, measure, args.batch_size)


def decoder_rule(opened: Opened, args) -> Rule:
    """The rule that the command line names, or the run's own."""
    exits, given = opened.model.exits, {name for name in ("threshold", "layer") if getattr(args, name) is not None}
    name = args.rule or ("threshold" if args.threshold else "fixed" if args.layer else None)
    needs = {None: set(), "never": set(), "fixed": {"layer"}, "threshold": {"threshold"}}
    if name not in needs:
        raise WrongArguments(f"the rule {name} is for classifiers; a decoder takes never, fixed or threshold")
    if args.measure and not args.threshold:
        raise WrongArguments("--measure says what a threshold is on: give --threshold too")
    if given != needs[name]:
        verb, wrong = ("needs", needs[name] - given) if needs[name] - given else ("does not take", given - needs[name])
        raise WrongArguments(f"the rule {name} {verb} --{wrong.pop()}")
    if name == "fixed" and args.layer not in exits:
        raise WrongArguments(f"--layer must be one of the exits {','.join(map(str, exits))}, got {args.layer}")
    try:
        if name == "threshold":
            each = args.threshold * (len(exits) if len(args.threshold) == 1 else 1)
            rule = Threshold(each, args.measure or "breaking_ties")
            rule.check(len(exits))
            return rule
    except ValueError as error:
        raise WrongArguments(str(error)) from None
    return {None: opened.rule, "never": NeverExit()}.get(name) or FixedExit(exits.index(args.layer))


def _sweep(opened: Opened, args, say) -> dict:
    if isinstance(opened.model, WithoutExits):
        raise WrongArguments(f"{args.run}: a decoder without exits has no epsilon; give a run of self-supervised")
    own = opened.rule.measure if isinstance(opened.rule, Threshold) else "breaking_ties"
    measure = args.measure or own
    held = None
    if args.text:
        held = listen(opened.model, held_text(args.text, opened, args.seed), measure, args.batch_size)
    hearing = _hear(opened, measure, args) if args.task else None
    prompts, calibration, fresh = _generated(opened, args.seed)
    settings = {"measure": measure, "new_tokens": min(DECODED, _room(prompts, opened))}
    answer = sweep(opened.model, calibration, fresh, prompts, **settings, held=held, hearing=hearing)
    _say_sweep(answer, say)
    if args.picture:
        draw_decoder(args.picture, answer, opened.history)
        say(f"Picture: {args.picture}")
    return answer


def _room(prompts: list[list[int]], opened: Opened) -> int:
    return _context(opened) - max(map(len, prompts))


def _generated(opened: Opened, seed: int) -> tuple[list[list[int]], list[Text], list[Text]]:
    """Table 1's prompts as tokens, and twice TEXTS texts that the full model writes from them."""
    prompts = [encoder(opened.tokenizer)(prompt) for prompt in CALIBRATION_PROMPTS]
    new_tokens, stop = min(NEW_TOKENS, _room(prompts, opened)), opened.model.decoder.config.stop_tokens
    calibration, fresh = (
        generated_texts(opened.model.decoder, prompts, TEXTS, new_tokens, stop=stop, seed=seed + half * TEXTS)
        for half in (0, 1)
    )
    return prompts, calibration, fresh


def held_text(path: Path, opened: Opened, seed: int) -> list[Text]:
    """A text file in pieces of PIECE tokens, each after the bos token; PIECES of them at most, drawn with the seed."""
    backend, text = opened.tokenizer.backend, read_text(path)
    first = encoder(opened.tokenizer)("")
    pieces = cut_text(
        backend.encode(text, add_special_tokens=False).ids, min(PIECE, _context(opened) - len(first)), first
    )
    drawn = np.sort(np.random.default_rng(seed).permutation(len(pieces))[:PIECES])
    return [pieces[row] for row in drawn]


def _say_sweep(answer: dict, say) -> None:
    lines = []
    for row in answer["rows"]:
        tokens = sum(row["exit_counts"])
        kept_by_head = " ".join("   -" if share is None else f"{share:.3f}" for share in row["agreement"])
        shares = " ".join(f"{count / tokens:4.0%}" for count in row["exit_counts"])
        recomputed = {f"recompute_{key}": value for key, value in row["recompute"].items()}
        lines.append(row | recomputed | {"heads": kept_by_head, "shares": shares})
    after = ", ".join(map(str, answer["exits"]))
    columns = {
        "epsilon": "epsilon",
        "heads": "agreement by head",
        "end_to_end": "end to end:.3f",
        "shares": f"tokens that leave after {after}",
        "mean_layers": "layers:.2f",
        "decoded_agreement": "decoded:.3f",
        "tokens_per_second": "tokens/s:.0f",
        "speedup": "speed-up:.2f",
        "recompute_decoded_agreement": "recomputed:.3f",
        "recompute_speedup": "speed-up:.2f",
    }
    columns |= {key: f"{key}:.2f" for key in ("perplexity",) if key in lines[0]}
    columns |= {key: f"{answer.get('task')}:.3f" for key in ("accuracy",) if key in lines[0]}
    say(table(lines, columns))
    full = [f"{answer['full_tokens_per_second']:.0f} tokens/s"]
    if "full_perplexity" in answer:
        full.append(f"perplexity {answer['full_perplexity']:.2f}")
    if "full_accuracy" in answer:
        full.append(f"{answer['task']} {answer['full_accuracy']:.3f}")
    say(
        f"Full model: {', '.join(full)}. Thresholds on {answer['measure']} from {answer['tokens_calibration']} tokens "
        f"it wrote, agreement on {answer['tokens_fresh']} others. Decoded: the same in greedy text that fills gaps by "
        f"propagate, and recomputed by recompute."
    )
    columns = {
        "measure": "measure",
        "level": "end to end at least",
        "epsilon": "epsilon:.3f",
        "end_to_end": "on fresh text:.3f",
        "mean_layers": "layers:.2f",
    }
    say("\n" + table(answer["measures"], columns))


def compare_heads(args, say) -> dict:
    """`mini-ee compare` of runs on one decoder: Fig. 1, and the layers that each takes at one end-to-end agreement."""
    foreign = ("task", "split", "schedule", "sweep", "text", "max_rows", "top_k", "top_p")
    refuse(args, foreign, "is not for runs of self-supervised: leave it out")
    runs = {str(folder): open_decoder_run(folder, args.model, args.device) for folder in args.runs}
    first = next(iter(runs.values()))
    for folder, opened in runs.items():
        if isinstance(opened.model, WithoutExits) or not opened.history:
            raise WrongArguments(f"{folder}: holds no heads that `mini-ee train self-supervised` trained")
        if opened.config["backbone"]["sha256"] != first.config["backbone"]["sha256"]:
            raise WrongArguments(f"{folder}: has another decoder than {args.runs[0]}; compare runs on the same one")
    _, calibration, fresh = _generated(first, args.seed)
    rows = []
    for folder, opened in runs.items():
        (found,) = at_equal_agreement(opened.model, calibration, fresh, ("breaking_ties",), (LEVEL,))
        training, last = opened.config["training"], opened.history[-1]
        row = {"run": folder, "init": training.get("init"), "penalty": training.get("penalty")}
        row |= {key: last[key] for key in ("step", "loss", "agreement", "entropy")} | {"equal": found}
        rows.append(row | {"exits": list(opened.model.exits), "history": opened.history})
    lines = [
        row
        | {key: " ".join(f"{value:.3f}" for value in row[key]) for key in ("agreement", "entropy")}
        | {"init": str(row["init"]), "kept": row["equal"]["end_to_end"], "layers": row["equal"]["mean_layers"]}
        for row in rows
    ]
    columns = {
        "run": "run",
        "init": "init",
        "penalty": "lambda",
        "agreement": "agreement by head",
        "entropy": "entropy by head, nats",
        "kept": "end to end:.3f",
        "layers": "layers:.2f",
    }
    say(table(lines, columns))
    say(
        f"Agreement and entropy when training ended; end to end and layers on {len(fresh)} fresh texts, at the epsilon "
        f"with which {LEVEL:.0%} of the calibration texts' tokens are the full model's."
    )
    if args.picture:
        draw_training(args.picture, rows)
        say(f"Picture: {args.picture}")
    return {"method": first.method, "rows": rows, "level": LEVEL}
