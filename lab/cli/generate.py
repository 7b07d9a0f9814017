"""`mini-ee generate`: one text from a decoder, printed as it is generated."""

import time
from argparse import ArgumentParser, Namespace
from bisect import bisect_right
from collections.abc import Callable, Iterator
from pathlib import Path

from mini_ee.lab.cli.command_options import add_where, number, positive, refuse, share
from mini_ee.lab.data.values import checked_text
from mini_ee.lab.errors import WrongArguments
from mini_ee.lab.exits.decoding import MISSING_KV, Step
from mini_ee.lab.registry import SKIPPERS

HELP = "generate text with a decoder, printed as it is generated"
EXAMPLE = 'mini-ee generate --prompt "Once upon a time, there was a little dog." --temperature .8 --top-p .95'
USUAL = "--temperature", "--max-new-tokens", "--show-exits"
WRITTEN_TOKENS, DRAFT = 100, 4
COLOURS = (46, 118, 190, 220, 208, 196)  # of a terminal's 256: from green, the first exit, to red


def add(sub: ArgumentParser) -> None:
    from mini_ee.lab.cli.rule_options import add_rule

    folder = "folder of a run or of a decoder's checkpoint (default the built-in Llama)"
    sub.add_argument("run", type=Path, nargs="?", metavar="RUN", help=folder)
    prompt = sub.add_mutually_exclusive_group(required=True)
    prompt.add_argument("--prompt", metavar="TEXT", help="beginning of the text")
    prompt.add_argument(
        "--prompt-file", type=Path, metavar="FILE", help="file with the beginning of the text, in UTF-8"
    )
    most = "maximum number of generated tokens (default 100, or the rest of the context)"
    sub.add_argument("--max-new-tokens", type=positive, metavar="N", help=most)
    stop = "text before which the generation ends; may be repeated"
    sub.add_argument("--stop", action="append", default=[], metavar="TEXT", help=stop)
    add_sampling(sub)
    penalty = "penalty on tokens that the text already contains; above 1 makes them rarer"
    sub.add_argument("--repetition-penalty", type=number, default=1.0, help=penalty)
    add_where(sub)
    add_rule(sub)
    early = sub.add_argument_group("a run with exits")
    early.add_argument(
        "--missing-kv",
        choices=MISSING_KV,
        help="keys and values of skipped layers: copy_state (from the exit's state) or recompute (default as trained)",
    )
    drafts = "generate the full model's text: an exit drafts, or --draft-by; the model verifies"
    early.add_argument("--lossless", action="store_true", help=drafts)
    early.add_argument("--draft", type=positive, metavar="N", help="maximum number of tokens per draft (default 4)")
    skips = "method that chooses the layers a draft skips, without exits: swift (at random) or clasp (by their states)"
    early.add_argument("--draft-by", choices=SKIPPERS, help=skips)
    early.add_argument("--show-exits", action="store_true", help="colour each token by its exit layer, also in a pipe")


def add_sampling(sub: ArgumentParser) -> None:
    """Add the options of sampling."""
    sub.add_argument("--temperature", type=number, default=0.0, help="sampling temperature; 0 is greedy")
    sub.add_argument("--top-k", type=positive, metavar="K", help="number of most likely tokens to sample from")
    sub.add_argument(
        "--top-p", type=share, metavar="P", help="total probability of the most likely tokens to sample from"
    )


def sampling_of(args: Namespace, **more):
    """The Sampling of the arguments. Raises WrongArguments."""
    from mini_ee.lab.exits.generation import Sampling

    if args.temperature == 0:
        refuse(args, ("top_k", "top_p"), "is for sampling: give a --temperature above 0")
    try:
        return Sampling(temperature=args.temperature, top_k=args.top_k, top_p=args.top_p, **more)
    except ValueError as error:
        raise WrongArguments(str(error)) from None


def run(args: Namespace, say: Callable[[str], None]) -> dict:
    """Generate one text after its prompt, and print it token by token."""
    import numpy as np

    from mini_ee.lab.backbones.hub import BUILT_IN_DECODER
    from mini_ee.lab.cli.open import of_rows, open_run
    from mini_ee.lab.data.progress import tqdm

    if "" in args.stop:
        raise WrongArguments("--stop: expected some text, found none")
    prompt = _prompt(args)
    folder = args.run or BUILT_IN_DECODER
    opened = open_run(folder, args, plain=True)
    if of_rows([opened]):
        raise WrongArguments(
            f"{folder}: expected a decoder, found a classifier of {opened.config['method']}; use mini-ee classify"
        )
    backend, ids = opened.tokenizer.backend, opened.tokenizer.ids_of(prompt)
    backbone = opened.model.backbone
    stop, count = backbone.config.stop_tokens, args.max_new_tokens or max(1, min(WRITTEN_TOKENS, backbone.room([ids])))
    steps, fields = written_steps(opened, ids, count, args)
    write = (lambda piece: None) if args.json else (lambda piece: print(piece, end="", flush=True))
    colours = colours_of(opened.exits) if args.show_exits else {}
    tokens, layers, ends, text, written, cuts = [], [], [], "", 0, []
    before, begin = len(backend.decode(ids)), time.perf_counter()
    write(prompt)
    for step in tqdm(steps, total=count, unit="token", delay=2, leave=False, disable=not args.json):
        tokens += step.tokens
        layers += step.layers_run
        text = backend.decode(ids + tokens)[before:]
        ends.append(whole_length(text))
        cuts = [text.index(end) for end in args.stop if end in text]
        if cuts:
            text = text[: min(cuts)]
            break
        settled = max(written, settled_length(text, args.stop))
        write(painted(text[written:settled], written, ends, layers, colours))
        written = settled
    seconds = time.perf_counter() - begin
    write(painted(text[written:], written, ends, layers, colours) + "\n")
    if colours:
        counts = (f"{paint(f'after layer {layer}', colours[layer])}: {layers.count(layer)}" for layer in colours)
        say(f"Number of tokens by exit layer: {', '.join(counts)}.")
    if not args.lossless:
        mean_layers = float(np.mean(layers))
        fields |= {"mean_layers": mean_layers, "layers_saved": 1 - mean_layers / opened.model.whole.exits[-1]}
    return {
        "method": opened.config["method"],
        "model": str(folder),
        "prompt": prompt,
        "text": text,
        "prompt_tokens": len(ids),
        "tokens": tokens,
        "layers": layers,
        "exits": list(opened.exits),
        **fields,
        "ended": "stop" if cuts or tokens[-1] in stop else "length",
        "seconds": seconds,
        "tokens_per_second": len(tokens) / seconds,
    }


def _prompt(args: Namespace) -> str:
    from mini_ee.lab.data.files import read_text

    given = args.prompt if args.prompt_file is None else read_text(args.prompt_file)
    return checked_text(given, str(args.prompt_file or "--prompt"))


def written_steps(opened, ids: list[int], count: int, args: Namespace) -> tuple[Iterator[Step], dict]:
    """(steps of one text, fields of the answer)."""
    from mini_ee.lab.cli.rule_options import chosen_rule, refuse_settings
    from mini_ee.lab.exits.generation import Sampling
    from mini_ee.lab.rules import Never

    sampling = sampling_of(args, repetition_penalty=args.repetition_penalty)
    if not args.lossless:
        refuse(args, ("draft", "draft_by"), "is for --lossless")
        rule, missing_kv = chosen_rule(args, opened), args.missing_kv or opened.model.missing_kv
        if args.missing_kv and isinstance(rule, Never):
            raise WrongArguments(
                "--missing-kv is for tokens that exit early, but here every token runs all layers; leave it out"
            )
        settings = {"sampling": sampling, "seed": args.seed, "missing_kv": missing_kv}
        steps = opened.model.generate([ids], rule, max_new_tokens=count, **settings)
        return steps, {"rule": rule.to_dict(), "missing_kv": missing_kv}
    if sampling != Sampling():
        raise WrongArguments("--lossless generates the full model's greedy text: leave out options of sampling")
    if args.missing_kv:
        raise WrongArguments("--lossless runs every token through all layers: leave out --missing-kv")
    if args.draft_by:
        return _skipping_steps(opened.model.backbone, ids, count, args)
    refuse_settings(args, "--lossless verifies every draft of the exit at --layer", "exit")
    if len(opened.exits) == 1:
        raise WrongArguments(
            "--lossless needs an exit before the last layer: give a run of a decoder with exits, or --draft-by NAME"
        )
    layer, draft = args.exit, args.draft
    if layer is None and not opened.model.chooses_drafter:
        layer, draft = opened.exits[0], draft or DRAFT
    if layer is not None and layer not in opened.exits[:-1]:
        drafters = ",".join(map(str, opened.exits[:-1]))
        raise WrongArguments(f"--layer: expected an exit that can draft, one of {drafters}, got {layer}")
    steps = opened.model.generate_lossless([ids], count, layer, draft)
    return steps, {"lossless": True, "draft": draft, "draft_layer": layer}


def _skipping_steps(decoder, ids: list[int], count: int, args: Namespace) -> tuple[Iterator[Step], dict]:
    """The same if no exit drafts, but the decoder without some layers."""
    from mini_ee.lab.cli.rule_options import refuse_settings
    from mini_ee.lab.exits.skipped_layers import generate_skipping, load_skipper

    refuse_settings(args, f"--draft-by {args.draft_by} drafts with layers skipped, at no exit and by no rule")
    refuse(args, ["show_exits"], f"colours exits, but --draft-by {args.draft_by} drafts at none; leave it out")
    draft, stop = args.draft or DRAFT, decoder.config.stop_tokens
    steps = generate_skipping(decoder, ids, load_skipper(args.draft_by)(most=draft), max_new_tokens=count, stop=stop)
    return steps, {"lossless": True, "draft": draft, "draft_by": args.draft_by}


# ---- Colours and the printed text ----


def colours_of(exits: tuple[int, ...]) -> dict[int, int | None]:
    """Exit layer -> colour. The last layer has the colour of the terminal.

    >>> colours_of((2, 4, 6, 8))
    {2: 46, 4: 190, 6: 196, 8: None}
    """
    steps = max(1, len(exits) - 2)
    early = {layer: COLOURS[k * (len(COLOURS) - 1) // steps] for k, layer in enumerate(exits[:-1])}
    return early | {exits[-1]: None}


def paint(text: str, colour: int | None) -> str:
    """The text in one of a terminal's 256 colours."""
    return text if colour is None else f"\033[38;5;{colour}m{text}\033[0m"


def painted(text: str, begin: int, ends: list[int], layers: list[int], colours: dict[int, int | None]) -> str:
    """A piece of the whole text, with the letters of each token in the colour of its exit layer.

    begin: position of the piece in the whole text. ends: length of the whole text after each token.
    """
    if not colours:
        return text
    pieces, stop = [], begin + len(text)
    at = begin
    while at < stop:
        token = min(bisect_right(ends, at), len(layers) - 1)
        end = max(at + 1, min(ends[token], stop))
        pieces.append(paint(text[at - begin : end - begin], colours[layers[token]]))
        at = end
    return "".join(pieces)


def whole_length(text: str) -> int:
    """Length of the text without an unfinished character, which is decoded as a replacement character."""
    return len(text.rstrip("\N{REPLACEMENT CHARACTER}"))


def settled_length(text: str, stops: list[str]) -> int:
    """Length of the text that no later token changes: no unfinished character, and no beginning of one of `stops`.

    >>> settled_length("It was a big bo", ["boat", "\\n"])
    13
    """
    length = whole_length(text)
    begun = (i for end in stops for i in range(max(0, length - len(end)), length) if end.startswith(text[i:length]))
    return min(begun, default=length)
