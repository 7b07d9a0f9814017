"""Pretrains a small Llama (12 layers, width 256, 9 million parameters): tokenizer and next-token loss.

Its vocabulary is small, so that a vocabulary head costs a third of a layer: an exit has something to save.
Text: the first nine tenths of the TinyStories sample; stories that stories260K writes, which are more but plainer; and
single sentences of the tasks' train splits, none that also stands in a dev or test split (`pretrain_bert.read_corpus`).
Held out: the sample's last tenth. A document begins after <|endoftext|>, which is the bos and the eos token.

    python -m mini_ee.weights.pretrain_llama --shared ../shared --out weights/llama-12x256 --state /tmp/llama-12x256

Killed, the same command goes on from the last state in --state. The learning rate is constant, then falls to 0 over the
last fifth of --steps: to end early, go on with fewer --steps; to train longer, with more, from a state before the fall.
"""

import argparse
import json
import math
import platform
import sys
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor
from torch.nn import functional as F
from tqdm import tqdm

from mini_ee.backbones.hub import load_backbone, read_tensors, write_backbone, write_tensors
from mini_ee.backbones.llama import Decoder, DecoderConfig
from mini_ee.data.files import atomic_folder, write_bytes, write_json
from mini_ee.exits.decoding import gather
from mini_ee.exits.generation import Sampling, generate
from mini_ee.weights.pretrain_bert import read_corpus

END = "<|endoftext|>"
CONTEXT = 512
STEPS = 3_600
SAMPLED_ROWS, TEMPERATURE = 256, 0.8  # of sampled stories: how many are written together, and how they are drawn
PACKAGES = ("torch", "tokenizers", "numpy")
TOKENIZER_CONFIG = {
    "tokenizer_class": "PreTrainedTokenizerFast",
    "bos_token": END,
    "eos_token": END,
    "model_max_length": CONTEXT,
}
PROMPT = "Once upon a time, there was a little girl named Lily."


# ---- the corpus ----------------------------------------------------------------------------------------------------


def read_stories(path: Path) -> tuple[list[str], list[str]]:
    """TinyStories for training, of the sample's first nine tenths, and for the held-out score, of its last tenth.

    A story that the cut goes through is in neither, and so is the last, which the sample cuts.
    """
    text = path.read_text(encoding="utf-8")
    cut = len(text) * 9 // 10
    parts = (text[:cut].split(END)[:-1], text[cut:].split(END)[1:-1])
    train, held_out = ([story.strip() for story in part if story.strip()] for part in parts)
    return train, [story for story in held_out if story not in set(train)]


def read_sentences(shared: Path, seed: int) -> list[str]:
    """The single sentences of the tasks' train splits; RTE and MRPC give theirs one by one."""
    corpus, counts = read_corpus(shared, seed)
    stories = counts["TinyStories"]["kept"]
    return [text for text, second in corpus[:-stories] if second is None]


def sampled_stories(shared: Path, folder: Path, count: int, seed: int) -> list[str]:
    """What stories260K writes from its first token, those that ended within its context; kept in `folder` as it goes.

    A story is over where the next would begin.
    """
    source = shared / "weights" / "stories260K"
    tokenizer = Tokenizer.from_file(str(source / "tokenizer.json"))
    decoder, stories = load_backbone(source), []
    config = decoder.config
    folder.mkdir(exist_ok=True)
    settings = {"max_new_tokens": config.max_tokens - 1, "stop": [config.bos_token_id, *config.stop_tokens]}
    for begin in tqdm(range(0, count, SAMPLED_ROWS), desc="sampling", unit="batch"):
        path = folder / f"{begin:06}.txt"
        if not path.exists():
            steps = generate(
                decoder,
                [[config.bos_token_id]] * SAMPLED_ROWS,
                sampling=Sampling(temperature=TEMPERATURE),
                seed=seed * 1_000_000 + begin,
                **settings,
            )
            ended = [row.tokens for row in gather(steps, SAMPLED_ROWS) if row.tokens[-1] in settings["stop"]]
            texts = tokenizer.decode_batch(ended)
            write_bytes(path, END.join(text.strip() for text in texts).encode())
        stories += filter(None, path.read_text(encoding="utf-8").split(END))
    return stories[:count]


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Byte-level BPE: every text comes back as it was. <|endoftext|> is token 0 and goes before a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.post_processor = processors.TemplateProcessing(single=f"{END} $A", special_tokens=[(END, 0)])
    return tokenizer


def windows(documents: list[list[int]], rng: np.random.Generator) -> np.ndarray:
    """Documents in random order, end to end, cut into windows of CONTEXT + 1 tokens that share their border token."""
    order = rng.permutation(len(documents))
    stream = np.concatenate([documents[i] for i in order])
    count = (len(stream) - 1) // CONTEXT
    return np.stack([stream[i * CONTEXT : (i + 1) * CONTEXT + 1] for i in range(count)])


def batches(stories: list, others: list[tuple[list, float]], size: int, seed: int) -> Iterator[Tensor]:
    """(B, CONTEXT + 1) int64 without end: epochs over all stories, with so large a share of other documents mixed in.

    others: documents, and their share of all tokens.
    """
    in_all = sum(map(len, stories)) / (1 - sum(share for _, share in others))
    for epoch in range(sys.maxsize):
        rng = np.random.default_rng([seed, epoch])
        mixed = list(stories)
        for documents, share in others:
            order = rng.permutation(len(documents))
            lengths = np.cumsum([len(documents[i]) for i in order])
            mixed += [documents[i] for i in order[: int(np.searchsorted(lengths, share * in_all))]]
        shuffled = rng.permutation(windows(mixed, rng))
        for start in range(0, len(shuffled) - size + 1, size):
            yield torch.from_numpy(shuffled[start : start + size])


# ---- the losses ----------------------------------------------------------------------------------------------------


def next_token_loss(decoder: Decoder, tokens: Tensor) -> Tensor:
    """Mean over (B, T) of -ln p(token t+1 | tokens up to t), in nats. tokens: (B, T + 1)."""
    logits = decoder.lm_logits(decoder(tokens[:, :-1]))
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


@torch.inference_mode()
def held_out_scores(decoder: Decoder, documents: list[list[int]], num_bytes: int) -> dict:
    """Of texts of their own, each from its beginning to its end token, cut at CONTEXT tokens.

    loss in nats a token and perplexity = exp(loss); bits a byte of text, which another tokenizer may be compared by.
    """
    total, count = 0.0, 0
    for document in documents:
        tokens = torch.tensor([document[: CONTEXT + 1]])
        size = tokens.shape[1] - 1
        total, count = total + next_token_loss(decoder, tokens).item() * size, count + size
    loss = total / count
    whole = all(len(document) <= CONTEXT + 1 for document in documents)
    scores = {"loss": round(loss, 4), "perplexity": round(math.exp(loss), 2), "tokens": count}
    return scores | ({"bits_per_byte": round(total / num_bytes / math.log(2), 4)} if whole else {})


def unigram_loss(train: list[list[int]], held_out: list[list[int]], vocab_size: int) -> float:
    """What guessing by frequency alone costs, in nats a token."""
    count = np.bincount(np.concatenate(train), minlength=vocab_size) + 1
    seen = np.concatenate([document[1:] for document in held_out])
    return float(-np.log(count / count.sum())[seen].mean())


# ---- the run -------------------------------------------------------------------------------------------------------


def learning_rate(step: int, args: argparse.Namespace) -> float:
    """Linear warm-up, constant, linear to 0 over the last fifth (Hu et al. 2024, MiniCPM); step counts from 1."""
    return args.lr * min(step / args.warm_up, 1.0, (args.steps - step + 1) / (args.steps / 5))


def write_state(path: Path, decoder: Decoder, optimizer: torch.optim.AdamW, step: int, seconds: float) -> None:
    """All that the next step depends on: weights, AdamW's moments, the count. The batches follow from the seed."""
    tensors = {f"model.{name}": value for name, value in decoder.state_dict().items()}
    for index, state in optimizer.state_dict()["state"].items():
        tensors |= {f"optimizer.{index}.{key}": value for key, value in state.items()}
    write_tensors(path, tensors | {"step": torch.tensor(step), "seconds": torch.tensor(seconds)})


def read_state(path: Path, decoder: Decoder, optimizer: torch.optim.AdamW) -> tuple[int, float]:
    """Puts weights and moments back. Returns the steps done and the seconds they took."""
    saved, state = read_tensors(path), {}
    decoder.load_state_dict(
        {name.removeprefix("model."): value for name, value in saved.items() if name.startswith("model.")}
    )
    for name, value in saved.items():
        if name.startswith("optimizer."):
            _, index, key = name.split(".")
            state.setdefault(int(index), {})[key] = value
    optimizer.load_state_dict({"state": state, "param_groups": optimizer.state_dict()["param_groups"]})
    return int(saved["step"]), float(saved["seconds"])


def train(decoder: Decoder, stream: Iterator[Tensor], args: argparse.Namespace, snapshot) -> float:
    """AdamW on the next-token loss, gradients clipped at norm 1. Returns the seconds, of all runs of it together."""
    matrices = [p for p in decoder.parameters() if p.ndim > 1]
    norms = [p for p in decoder.parameters() if p.ndim == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": norms, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.95), fused=True)
    path, done, before = args.state / "state.safetensors", 0, 0.0
    if path.exists():
        done, before = read_state(path, decoder, optimizer)
    start, mean = time.time(), None
    with tqdm(total=args.until, initial=done, desc="pretrain", mininterval=10) as bar:
        for step, tokens in zip(range(1, args.until + 1), stream):
            if step <= done:
                continue
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, args)
            with torch.autocast("cpu", torch.bfloat16, enabled=args.precision == "bf16"):
                loss = next_token_loss(decoder, tokens)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(decoder.parameters(), 1.0)
            optimizer.step()
            mean = loss.item() if mean is None else 0.98 * mean + 0.02 * loss.item()
            bar.update()
            bar.set_postfix(loss=f"{mean:.3f}", refresh=False)
            if step % args.every == 0 or step == args.until:
                write_state(path, decoder, optimizer, step, before + time.time() - start)
                snapshot(step)
    return before + time.time() - start


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m mini_ee.weights.pretrain_llama", description=__doc__.split("\n")[0]
    )
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, replaced if it is there")
    parser.add_argument("--state", type=Path, required=True, help="folder of the training's state, to go on from")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (%(default)s)")
    parser.add_argument("--until", type=int, help="end after so many of --steps, whatever the rate is there")
    parser.add_argument("--warm-up", type=int, default=50)
    parser.add_argument("--batch-size", type=int, default=4, help=f"windows of {CONTEXT} tokens (%(default)s)")
    parser.add_argument("--lr", type=float, default=1.5e-3)
    parser.add_argument("--precision", choices=("f32", "bf16"), default="f32", help="of the products (%(default)s)")
    parser.add_argument("--sentences", type=float, default=0.05, help="share of tokens of sentences (%(default)s)")
    parser.add_argument("--sampled", type=float, default=0.55, help="share of sampled stories (%(default)s)")
    parser.add_argument("--samples", type=int, default=10240, help="stories to sample (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=1024, help="tokens in the tokenizer (%(default)s)")
    parser.add_argument("--every", type=int, default=100, help="steps between states (%(default)s)")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    args.until = args.until or args.steps
    return args


def main(argv: list[str] | None = None) -> None:
    """Corpus, tokenizer, training, and the folder with its recipe.json."""
    args = parse(argv)
    torch.set_num_threads(args.threads)
    torch.manual_seed(args.seed)
    args.state.mkdir(parents=True, exist_ok=True)
    stories, held_out = read_stories(args.shared / "data" / "TinyStories" / "tinystories_sample.txt")
    sentences = read_sentences(args.shared, args.seed)
    sampled = sampled_stories(args.shared, args.state / "sampled", args.samples, args.seed)
    tokenizer_path = args.state / "tokenizer.json"
    if not tokenizer_path.exists():  # its trainer breaks ties by chance: one for all runs of a training
        train_tokenizer(stories + sentences, args.vocabulary).save(str(tokenizer_path))
    tokenizer = Tokenizer.from_file(str(tokenizer_path))

    def documents(texts: list[str], close: bool) -> list[list[int]]:
        encoded = tokenizer.encode_batch(texts)
        return [encoding.ids + [0] * close for encoding in encoded]

    train_ids, sentence_ids, sampled_ids = (documents(texts, False) for texts in (stories, sentences, sampled))
    held_ids = documents(held_out, True)
    config = DecoderConfig(
        model_type="llama",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=256,
        num_hidden_layers=12,
        num_attention_heads=4,
        num_key_value_heads=2,
        intermediate_size=688,
        max_position_embeddings=CONTEXT,
        hidden_act="silu",
        norm_eps=1e-5,
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
    )
    decoder = Decoder(config)
    num_bytes = sum(len(text.encode()) for text in held_out)

    def snapshot(step: int) -> None:
        scores = held_out_scores(decoder, held_ids[:50], num_bytes)
        tqdm.write(json.dumps({"step": step, "loss": scores["loss"]}), file=sys.stderr)

    others = [(sentence_ids, args.sentences), (sampled_ids, args.sampled)]
    stream = batches(train_ids, others, args.batch_size, args.seed)
    seconds = train(decoder, stream, args, snapshot)
    decoder.eval().half().float()  # as it is written
    (sample,) = gather(generate(decoder, [tokenizer.encode(PROMPT).ids], max_new_tokens=80, stop=[0]), 1)
    given = sys.argv[1:] if argv is None else argv
    recipe = {
        "command": "python -m mini_ee.weights.pretrain_llama " + " ".join(given),
        "seed": args.seed,
        "steps": args.until,
        "of_steps": args.steps,
        "tokens": args.until * args.batch_size * CONTEXT,
        "lr": args.lr,
        "minutes": round(seconds / 60, 1),
        "threads": args.threads,
        "parameters": sum(p.numel() for p in decoder.parameters()),
        "stories": {"train": len(stories), "held_out": len(held_out)},
        "tokens_of_all_stories": sum(map(len, train_ids)),
        "precision": args.precision,
        "sentences": len(sentences),
        "share_of_sentences": args.sentences,
        "sampled_stories": len(sampled),
        "tokens_of_all_sampled": sum(map(len, sampled_ids)),
        "share_of_sampled": args.sampled,
        "held_out": held_out_scores(decoder, held_ids, num_bytes)
        | {"unigram_loss": round(unigram_loss(train_ids, held_ids, config.vocab_size), 4)},
        "sample": {"prompt": PROMPT, "greedy": tokenizer.decode(sample.tokens)},
        "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
        "licence": "Apache-2.0",
    }
    with atomic_folder(args.out, replace=True) as partial:
        write_backbone(decoder.half(), partial)
        tokenizer.save(str(partial / "tokenizer.json"))
        write_json(partial / "tokenizer_config.json", TOKENIZER_CONFIG)
        write_json(partial / "recipe.json", recipe)
    print(json.dumps(recipe))


if __name__ == "__main__":
    main()
