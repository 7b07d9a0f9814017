"""Pretrains a small BERT (12 layers, hidden 128, 3.5 million parameters): tokenizer, masked LM, distillation.

No labels and no dev or test texts are used. Loss = masked LM + weight * (2 - cosine - pooler_cosine), on one forward
pass: the mean of the last layer and the pooler's output, each through a projection that is discarded afterwards, learn
the sentence embedding of all-MiniLM-L6-v2. The word embeddings are initialised with a PCA of the teacher's.

    python -m mini_ee.weights.pretrain_bert --shared ../shared --out weights/bert-12x128

On two cores the teacher's embeddings take 7 minutes (once, with --cache), and 4,000 steps 33 minutes, at 4,200 tokens
per second. The trainer of the library `tokenizers` breaks ties at random, so vocabularies of two runs differ in a few
tokens, unless --tokenizer gives the tokenizer.json of an earlier run. Everything else is seeded, up to the rounding of
sums over threads.
"""

import argparse
import json
import platform
import random
import re
import sys
import time
from collections import Counter
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch import nn
from torch.nn import functional as F
from tqdm import tqdm

from mini_ee.lab.backbones.bert import Bert, BertConfig
from mini_ee.lab.backbones.hub import load_backbone, write_backbone
from mini_ee.lab.data.files import atomic_folder, write_json
from mini_ee.lab.data.reviews import read_reviews

SINGLE = ["SST-2", "SST-5", "TREC", "MR", "MPQA"]  # sentence, label
PAIRS = ["RTE", "MRPC"]
COLUMNS = {
    "RTE": ("sentence1", "sentence2"),
    "MRPC": ("#1 String", "#2 String"),
    "SICK": ("sentence1", "sentence2"),
}
SPECIALS = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, UNK, CLS, SEP, MASK = range(5)
WORDS = """
    terrible bad okay good great negative positive description entity abbreviation expression person human location
    number quantity subjective objective correct incorrect yes no maybe true false not never nothing but however
    although very too really quite hardly barely same different excellent awful boring hated loved love hate
    wonderful disappointing disappointed disappointment brilliant dull funny superb horrible amazing perfect poor
    worst best enjoyable enjoyed mediocre weak strong fantastic delightful charming tedious predictable masterpiece
    waste pointless painful dreadful lovely fine average decent acting plot story film movie actor actress director
    script ending scene cast review music dialogue characters
""".split()
MAX_TOKENS = 128
STEPS = 4_000
PACKAGES = ("torch", "tokenizers", "numpy")
TOKENIZER_CONFIG = {
    "tokenizer_class": "BertTokenizer",
    "do_lower_case": True,
    "model_max_length": MAX_TOKENS,
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


# ---- the corpus: train splits only ---------------------------------------------------------------------------------


def fold(text: str) -> str:
    """A text in lower case with single spaces; texts that are equal in this form count as the same."""
    return " ".join(text.lower().split())


def bare(text: str) -> str:
    """The letters and digits of a text, to find a sentence in another tokenisation ("film's" and "film 's")."""
    return re.sub(r"[\W_]+", "", text.lower())


def rows(path: Path) -> list[dict]:
    """The rows of a GLUE file: tabs, no quoting; only a line feed ends a row, not Unicode's other line breaks."""
    lines = path.read_text(encoding="utf-8").rstrip("\n").split("\n")
    header = lines[0].split("\t")
    return [dict(zip(header, line.split("\t"))) for line in lines[1:]]


def stories(path: Path, rng: random.Random) -> list[str]:
    """The first nine tenths of TinyStories, cut between sentences into pieces of 12 to 100 words.

    Long pieces train the embeddings of late positions.
    """
    text = path.read_text(encoding="utf-8")
    text = text[: len(text) * 9 // 10]
    pieces = []
    for story in text.split("<|endoftext|>")[:-1]:  # the last one is incomplete
        piece, size = [], rng.randint(12, 100)
        for sentence in re.split(r"(?<=[.!?])\s+|(?<=[.!?]\")\s+", fold_space(story)):
            words = sentence.split()
            if piece and len(piece) + len(words) > size:
                pieces.append(" ".join(piece))
                piece, size = [], rng.randint(12, 100)
            piece += words
        if piece:
            pieces.append(" ".join(piece))
    return pieces


def fold_space(text: str) -> str:
    """A text with single spaces in place of white space."""
    return " ".join(text.split())


def read_corpus(shared: Path, seed: int) -> tuple[list[tuple[str, str | None]], dict]:
    """(A, B or None) for each training text or pair that is in no dev or test split, without repeats; and counts."""
    data, rng = shared / "data", random.Random(seed)
    sources = {task: [(row["sentence"], None) for row in rows(data / task / "train.tsv")] for task in SINGLE}
    for task in PAIRS:
        a, b = COLUMNS[task]
        pairs = [(row[a], row[b]) for row in rows(data / task / "train.tsv")]
        sources[task] = pairs + [(text, None) for pair in pairs for text in pair]
    sources["TinyStories"] = [(text, None) for text in stories(data / "TinyStories" / "tinystories_sample.txt", rng)]

    reported = [review.text for split, reviews in read_reviews().items() if split != "train" for review in reviews]
    for task in SINGLE + PAIRS + ["SICK"]:
        for split in ("dev", "test"):
            path = data / task / f"{split}.tsv"
            if path.exists():
                reported += [row[name] for row in rows(path) for name in COLUMNS.get(task, ("sentence",))]
    folded, barred = {fold(text) for text in reported}, {bare(text) for text in reported} - {""}

    corpus, seen, counts = [], set(), {}
    for source, texts in sources.items():
        count = {"rows": len(texts), "same_as_dev_or_test": 0, "same_but_for_punctuation": 0, "repeated": 0, "kept": 0}
        counts[source] = count
        for a, b in texts:
            parts = [a] if b is None else [a, b]
            key = tuple(fold(part) for part in parts)
            if any(part in folded for part in key):
                count["same_as_dev_or_test"] += 1
            elif any(bare(part) in barred for part in parts):
                count["same_but_for_punctuation"] += 1
            elif key in seen or not key[0]:
                count["repeated"] += 1
            else:
                seen.add(key)
                count["kept"] += 1
                corpus.append((fold_space(a), None if b is None else fold_space(b)))
    return corpus, counts


# ---- the tokenizer -------------------------------------------------------------------------------------------------


def train_tokenizer(texts: list[str], size: int) -> Tokenizer:
    """Uncased WordPiece. A third of the vocabulary is learned; the rest are whole words, first WORDS, then the most
    frequent ones. A word that is one token has an embedding from the teacher (`place_words`) and can be a label word.
    """
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer(lowercase=True)
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(
        vocab_size=size // 3, special_tokens=SPECIALS, limit_alphabet=100, show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    vocabulary = dict(sorted(tokenizer.get_vocab().items(), key=lambda item: item[1]))
    split = tokenizer.pre_tokenizer.pre_tokenize_str
    frequency = Counter(word for text in texts for word, _ in split(tokenizer.normalizer.normalize_str(text)))
    for word in WORDS + sorted(frequency, key=lambda word: (-frequency[word], word)):
        if len(vocabulary) < size:
            vocabulary.setdefault(word, len(vocabulary))
    tokenizer.model = models.WordPiece(vocabulary, unk_token="[UNK]")
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIALS)
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)],
    )
    assert [tokenizer.token_to_id(piece) for piece in SPECIALS] == [PAD, UNK, CLS, SEP, MASK]
    return tokenizer


# ---- the teacher ---------------------------------------------------------------------------------------------------


def teacher_embeddings(texts: list[str], folder: Path, cache: Path | None, batch_tokens: int = 4096) -> np.ndarray:
    """The mean over tokens of the teacher's last layer, (N, 384) float16 of length 1; from the cache if possible."""
    known: dict[str, np.ndarray] = {}
    if cache and cache.exists():
        known = dict(zip(json.loads(cache.with_suffix(".json").read_text()), np.load(cache)))
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.no_padding()
    tokenizer.enable_truncation(MAX_TOKENS)
    missing = sorted(set(texts) - known.keys(), key=lambda text: (len(text), text))
    ids = [encoding.ids for encoding in tokenizer.encode_batch(missing)]
    if missing:
        teacher = load_backbone(folder)
        for batch in tqdm(token_batches([len(row) for row in ids], batch_tokens), desc="teacher"):
            input_ids, mask = pad([ids[i] for i in batch])
            with torch.inference_mode():
                embedded = F.normalize(mean_pool(teacher(input_ids, mask), mask), dim=-1)
            known |= zip((missing[i] for i in batch), embedded.numpy().astype(np.float16))
        if cache:
            np.save(cache, np.stack(list(known.values())))
            cache.with_suffix(".json").write_text(json.dumps(list(known)))
    return np.stack([known[text] for text in texts])


def pad(ids: list[list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Rows of token ids -> input_ids and attention_mask (B, T)."""
    width = max(map(len, ids))
    input_ids = torch.tensor([row + [PAD] * (width - len(row)) for row in ids])
    return input_ids, (torch.arange(width) < torch.tensor([len(row) for row in ids])[:, None]).long()


def mean_pool(hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """hidden (B, T, D), mask (B, T) -> (B, D): the mean over tokens without padding."""
    return (hidden * mask[:, :, None]).sum(1) / mask.sum(1, keepdim=True)


def token_batches(lengths: list[int], budget: int, rng: random.Random | None = None) -> list[list[int]]:
    """Batches of rows of similar length, at most `budget` tokens including padding; shuffled if there is an rng."""
    noise = {i: rng.random() * 2 if rng else 0 for i in range(len(lengths))}
    batches, batch = [], []
    for i in sorted(noise, key=lambda i: lengths[i] + noise[i]):
        if batch and (len(batch) + 1) * max(lengths[i], max(lengths[j] for j in batch[-64:])) > budget:
            batches.append(batch)
            batch = []
        batch.append(i)
    batches.append(batch)
    if rng:
        rng.shuffle(batches)
    return batches


# ---- the student ---------------------------------------------------------------------------------------------------


def place_words(words: torch.Tensor, tokenizer: Tokenizer, folder: Path, std: float = 0.05) -> None:
    """Initialise the student's word embeddings, (V, D), with the first D principal components of the teacher's.

    A token that the teacher does not have gets the mean of the teacher's tokens that spell it. So words that are too
    rare to be learned from this corpus have a useful embedding too.
    """
    teacher = load_backbone(folder).embeddings.word.weight.detach()
    pieces = Tokenizer.from_file(str(folder / "tokenizer.json"))
    vocabulary = pieces.get_vocab()
    rows = torch.empty(len(words), teacher.shape[1])
    for piece, i in tokenizer.get_vocab().items():
        spelled = [vocabulary[piece]] if piece in vocabulary else []
        spelled = spelled or pieces.encode(piece.removeprefix("##"), add_special_tokens=False).ids
        rows[i] = teacher[spelled or [vocabulary["[UNK]"]]].mean(0)
    centred = rows - rows.mean(0)
    _, _, directions = torch.linalg.svd(centred, full_matrices=False)
    placed = centred @ directions[: words.shape[1]].T
    with torch.no_grad():
        words.copy_(placed * std / placed.std())


class Student(nn.Module):
    """The backbone and the two projections that only the distillation needs."""

    def __init__(self, backbone: Bert, teacher_width: int):
        super().__init__()
        self.backbone = backbone
        self.from_mean = nn.Linear(backbone.config.hidden_size, teacher_width)
        self.from_pooler = nn.Linear(backbone.config.hidden_size, teacher_width)

    def forward(self, batch: "Batch") -> dict[str, torch.Tensor]:
        """The losses and cosines; `right` is the share of masked tokens that are predicted correctly."""
        last = self.backbone(batch.input_ids, batch.mask, batch.types)
        logits = self.backbone.lm_logits(last[batch.labels >= 0])  # (N, V): masked tokens only
        labels = batch.labels[batch.labels >= 0]
        near = F.cosine_similarity(self.from_mean(mean_pool(last, batch.mask)), batch.teacher, dim=-1)
        pooled_near = F.cosine_similarity(self.from_pooler(self.backbone.pooled(last)), batch.teacher, dim=-1)
        mlm = F.cross_entropy(logits, labels, reduction="sum") / max(len(labels), 1)
        return {
            "mlm": mlm,
            "right": (logits.argmax(-1) == labels).float().sum() / max(len(labels), 1),
            "cosine": near.mean(),
            "pooler_cosine": pooled_near.mean(),
        }


@dataclass
class Batch:
    """A masked batch and the teacher's embeddings of its texts."""

    input_ids: torch.Tensor  # (B, T), some tokens masked
    mask: torch.Tensor  # (B, T)
    types: torch.Tensor  # (B, T)
    labels: torch.Tensor  # (B, T): the original token if it is masked, else -1
    teacher: torch.Tensor  # (B, 384)


def make_batch(encodings: list, teacher: np.ndarray, vocab_size: int, generator: torch.Generator) -> Batch:
    """A batch with a new random mask: 15% of the tokens, of which 80% become [MASK], 10% a random token, 10% stay.

    Texts of one or two tokens are not masked, because nothing would be left for the distillation.
    """
    input_ids, mask = pad([encoding.ids for encoding in encodings])
    types = pad([encoding.type_ids for encoding in encodings])[0]
    chance = torch.rand(input_ids.shape, generator=generator)  # below .12: [MASK]; .12 to .135: stays; to .15: random
    masked = (chance < 0.15) & (input_ids > MASK) & (mask.sum(1, keepdim=True) > 4)
    labels = torch.where(masked, input_ids, -1)
    anything = torch.randint(MASK + 1, vocab_size, input_ids.shape, generator=generator)
    input_ids = torch.where(masked & (chance < 0.12), MASK, input_ids)
    input_ids = torch.where(masked & (chance >= 0.135), anything, input_ids)
    return Batch(input_ids, mask, types, labels, torch.from_numpy(teacher.astype(np.float32)))


def held_out_scores(student: Student, encodings: list, teacher: np.ndarray, seed: int) -> dict[str, float]:
    """The scores on held-out texts, means over tokens or texts, with the same masks each time."""
    generator, total, weight = torch.Generator().manual_seed(seed), Counter(), Counter()
    for rows in token_batches([len(encoding) for encoding in encodings], 4096):
        batch = make_batch([encodings[i] for i in rows], teacher[rows], student.backbone.config.vocab_size, generator)
        with torch.inference_mode():
            losses = student(batch)
        for name, value in losses.items():
            count = int((batch.labels >= 0).sum()) if name in ("mlm", "right") else len(rows)
            total[name] += float(value) * count
            weight[name] += count
    return {name: round(total[name] / weight[name], 4) for name in total}


def unigram_loss(train: list, held_out: list, vocab_size: int) -> float:
    """The loss per held-out token if tokens are predicted by frequency alone, in nats: a masked LM must be lower."""
    count = np.bincount(np.concatenate([encoding.ids for encoding in train]), minlength=vocab_size)[MASK + 1 :] + 1
    seen = np.concatenate([encoding.ids for encoding in held_out])
    return float(-np.log(count / count.sum())[seen[seen > MASK] - MASK - 1].mean())


# ---- the run -------------------------------------------------------------------------------------------------------


def train(student: Student, encodings: list, teacher: np.ndarray, args: argparse.Namespace, snapshot) -> None:
    """AdamW with linear warm-up and decay. Dropout is off, because masking already adds noise."""
    rng, generator = random.Random(args.seed), torch.Generator().manual_seed(args.seed)
    decayed = [p for p in student.parameters() if p.ndim > 1]
    plain = [p for p in student.parameters() if p.ndim == 1]
    groups = [{"params": decayed, "weight_decay": 0.01}, {"params": plain, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=args.lr, betas=(0.9, 0.98), fused=True)
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer,
        lambda step: min((step + 1) / args.warm_up, (args.steps - step) / max(args.steps - args.warm_up, 1)),
    )
    lengths, queue, mean, tokens = [len(encoding) for encoding in encodings], [], Counter(), 0
    student.eval()
    start = time.time()
    with tqdm(total=args.steps, desc="pretrain", mininterval=5) as bar:
        for step in range(1, args.steps + 1):
            queue = queue or token_batches(lengths, args.batch_tokens, rng)  # the next epoch
            rows = queue.pop()
            batch = make_batch(
                [encodings[i] for i in rows], teacher[rows], student.backbone.config.vocab_size, generator
            )
            losses = student(batch)
            loss = losses["mlm"] + args.distil * (2 - losses["cosine"] - losses["pooler_cosine"])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(student.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            tokens += batch.input_ids.numel()
            for name, value in losses.items():
                mean[name] = 0.98 * mean[name] + 0.02 * value.item() if step > 1 else value.item()
            bar.update()
            if step % 25 == 0:
                speed = int(tokens / (time.time() - start))
                bar.set_postfix(**{name: f"{value:.3f}" for name, value in mean.items()}, tokens_per_s=speed)
            if args.snapshots and step % args.every == 0:
                snapshot(step)


def parse(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m mini_ee.weights.pretrain_bert", description=__doc__.split("\n")[0])
    parser.add_argument("--shared", type=Path, required=True, help="folder with data/ and weights/all-MiniLM-L6-v2")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, replaced if it is there")
    parser.add_argument("--steps", type=int, default=STEPS, help="optimizer steps (%(default)s)")
    parser.add_argument("--warm-up", type=int, default=300)
    parser.add_argument(
        "--batch-tokens", type=int, default=2048, help="tokens in a batch, padding included (%(default)s)"
    )
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--distil", type=float, default=5.0, help="weight of the distillation (%(default)s)")
    parser.add_argument("--vocabulary", type=int, default=8000, help="tokens in a new tokenizer (%(default)s)")
    parser.add_argument(
        "--tokenizer", type=Path, help="tokenizer.json of an earlier run, to repeat that run (default: train one)"
    )
    parser.add_argument("--cache", type=Path, help=".npy file of the teacher's embeddings, for later runs")
    parser.add_argument("--snapshots", type=Path, help="folder for the model so far, replaced every --every steps")
    parser.add_argument("--every", type=int, default=1000)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> None:
    """Make the corpus, the tokenizer and the teacher's embeddings, train, and write the folder with recipe.json."""
    args, start = parse(argv), time.time()
    torch.set_num_threads(args.threads)
    corpus, counts = read_corpus(args.shared, args.seed)
    random.Random(args.seed).shuffle(corpus)
    cut = len(corpus) // 100
    if args.tokenizer:
        tokenizer = Tokenizer.from_file(str(args.tokenizer))
    else:
        tokenizer = train_tokenizer([text for row in corpus[cut:] for text in row if text], args.vocabulary)
    encode = Tokenizer.from_str(tokenizer.to_str())
    encode.enable_truncation(MAX_TOKENS)  # only in this copy, not in the stored tokenizer
    encodings = encode.encode_batch([a if b is None else (a, b) for a, b in corpus])
    folder = args.shared / "weights" / "all-MiniLM-L6-v2"
    teacher = teacher_embeddings([a if b is None else f"{a} {b}" for a, b in corpus], folder, args.cache)

    config = BertConfig(
        model_type="bert",
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=128,
        num_hidden_layers=12,
        num_attention_heads=4,
        intermediate_size=512,
        max_position_embeddings=MAX_TOKENS,
    )
    torch.manual_seed(args.seed)  # here, so that results do not depend on whether a teacher was loaded above
    backbone = Bert(config)
    place_words(backbone.embeddings.word.weight, tokenizer, folder)
    student = Student(backbone, teacher.shape[1])
    unigram = round(unigram_loss(encodings[cut:], encodings[:cut], config.vocab_size), 4)

    def write(folder: Path, steps: int) -> dict:
        recipe = {
            "command": "python -m mini_ee.weights.pretrain_bert " + " ".join(sys.argv[1:] if argv is None else argv),
            "seed": args.seed,
            "steps": steps,
            "of_steps": args.steps,
            "batch_tokens": args.batch_tokens,
            "lr": args.lr,
            "distil": args.distil,
            "minutes": round((time.time() - start) / 60, 1),
            "threads": args.threads,
            "parameters": sum(p.numel() for p in backbone.parameters()),
            "texts": {"train": len(corpus) - cut, "held_out": cut},
            "tokens_in_an_epoch": sum(map(len, encodings[cut:])),
            "sources": counts,
            "held_out": held_out_scores(student, encodings[:cut], teacher[:cut], args.seed) | {"unigram_loss": unigram},
            "versions": {"python": platform.python_version(), **{name: version(name) for name in PACKAGES}},
            "licence": "Apache-2.0",
            "teacher": "sentence-transformers/all-MiniLM-L6-v2 (Apache-2.0)",
        }
        folder.parent.mkdir(parents=True, exist_ok=True)
        with atomic_folder(folder, replace=True) as partial:
            write_backbone(backbone, partial)
            tokenizer.save(str(partial / "tokenizer.json"))
            write_json(partial / "tokenizer_config.json", TOKENIZER_CONFIG)
            write_json(partial / "recipe.json", recipe)
        return recipe

    def snapshot(step: int) -> None:
        tqdm.write(json.dumps(write(args.snapshots, step)["held_out"]), file=sys.stderr)

    train(student, encodings[cut:], teacher[cut:], args, snapshot)
    print(json.dumps(write(args.out, args.steps)))


if __name__ == "__main__":
    main()
