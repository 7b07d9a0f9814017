"""Write tests/golden: small checkpoints as transformers saves them, and what transformers computes with them.

    pip install transformers
    python tests/make_golden.py                                          the small checkpoints
    MINI_EE_SHARED=/path/to/shared python tests/make_golden.py           and the values of the real ones

Every parameter is drawn at random, norms and biases too: a norm that forgets its weight must not pass. For each kind

    config.json, model.safetensors  a Hugging Face folder, by save_pretrained (ElasticBERT by hand)
    expected.safetensors            input_ids, attention_mask, token_type_ids, hidden.{0..L}, lm_logits, pooled.{depth}
                                    decoders: no types; normed in place of hidden.{L}; greedy, (B, N) new tokens
                                    ModernBERT: normed in place of hidden.{L}
                                    T5: decoder_input_ids and encoder.{0..L} besides, the last normed too
    provenance.json                 command, seed, versions

In classifiers/ there is a fine-tuned classifier of each family; expected.safetensors holds its logits. In token_heads/
are token classifiers and models for question answering, whose logits of start and end stand side by side.

The tests need none of this: they read the files. This script imports nothing of mini_ee.
"""

import inspect
import json
import os
from pathlib import Path

import torch
import transformers
from safetensors.torch import save_file

GOLDEN = Path(__file__).parent / "golden"
SEED = 20250701
COUNTED = ("roberta", "xlm-roberta", "mpnet")
"""Model types whose positions count the tokens that are no padding."""
SIZES = {
    "vocab_size": 64,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 40,
    "max_position_embeddings": 16,
}
DECODER_SIZES = {
    "vocab_size": 64,
    "hidden_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "intermediate_size": 16,
    "max_position_embeddings": 64,
}
NEW_TOKENS = 24
EAGER = 2e-5
"""How far transformers' two ways to attend may differ."""
DEBERTA = {  # of base, xlarge and xxlarge, but for the sizes: spans and buckets are shorter than the rows
    "relative_attention": True,
    "position_biased_input": False,
    "pos_att_type": "c2p|p2c",
}
DEBERTA_V2 = {
    "max_relative_positions": 8,
    "position_buckets": 6,
    "share_att_key": True,
    "norm_rel_ebd": "layer_norm",
    "conv_kernel_size": 3,
    "conv_act": "gelu",
}
MODERNBERT = {  # rows are longer than the window, which reads two tokens to each side
    "local_attention": 4,
    "rope_parameters": {
        kind: {"rope_type": "default", "rope_theta": theta}
        for kind, theta in (("full_attention", 500.0), ("sliding_attention", 20.0))
    },
    **dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0),
}
T5_SIZES = {  # heads are wider than D / H; the decoder has more layers; rows are longer than the largest distance
    "vocab_size": 64,
    "d_model": 8,
    "d_kv": 5,
    "d_ff": 12,
    "num_heads": 2,
    "num_layers": 2,
    "num_decoder_layers": 3,
    "relative_attention_num_buckets": 8,
    "relative_attention_max_distance": 7,
    "decoder_start_token_id": 0,
}
LLAMA3_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 40,
}
PHI_ROPE = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.4}
QWEN2_WINDOW = {"use_sliding_window": True, "sliding_window": 5, "max_window_layers": 1}
QWEN3_WINDOW = {
    "use_sliding_window": True,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
PHI3_ROPE = {
    "rope_type": "longrope",
    "rope_theta": 100.0,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0, 1.1, 1.4],
    "long_factor": [1.2, 3.0, 7.0],
}
STORIES_TOKENS = [1, 403, 407, 261, 378]  # <s> Once upon a time
EVERY = 8
"""Of the hidden states and logits of the real models, every eighth number is kept."""
MINILM_TOKENS = [  # [CLS] this is a test . [SEP], and two more
    [101, 2023, 2003, 1037, 3231, 1012, 102],
    [101, 1996, 3185, 2001, 6919, 1010, 1998, 2061, 2001, 1996, 2338, 102],
    [101, 2204, 102],
]


def randomise(model: torch.nn.Module, generator: torch.Generator) -> None:
    """Draw every parameter: matrices so that signals keep their size, norms around one, biases around zero."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():  # names a tied one once
            parameter.normal_(generator=generator)
            if parameter.dim() == 1:
                parameter.mul_(0.3).add_("norm" in name.lower() and name.endswith("weight"))
            else:
                parameter.mul_(0.5 if "embeddings." in name else parameter.shape[1] ** -0.5)


def draw_batch(config, generator: torch.Generator, lengths: tuple[int, ...]) -> dict[str, torch.Tensor]:
    """Rows of so many tokens, padded to the first; both token types where there are two."""
    shape = (len(lengths), lengths[0])
    ids = torch.randint(5, config.vocab_size, shape, generator=generator)
    mask = torch.zeros(shape, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, :length] = 1
    if config.model_type in COUNTED:  # pads one row on the left: positions must be counted there, not numbered
        mask[-1] = mask[-1].flip(0)
    types = (torch.arange(shape[1]).expand(shape) >= 3).long() % max(1, getattr(config, "type_vocab_size", 1))
    return {
        "input_ids": ids.where(mask.bool(), config.pad_token_id),
        "attention_mask": mask,
        "token_type_ids": types.contiguous(),
    }


def run(model: torch.nn.Module, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What transformers computes: the inputs, every hidden state, and logits and pooled output where there are any."""
    taken = inspect.signature(model.base_model.forward).parameters  # some have no token types
    given = {name: values for name, values in batch.items() if name in taken}
    with torch.no_grad():
        output = model(**given, output_hidden_states=True)
        pooled = getattr(model.base_model(**given), "pooler_output", None)
    expected = batch | {f"hidden.{depth}": state for depth, state in enumerate(output.hidden_states)}
    if model.config.model_type == "modernbert":  # the last is returned behind the final norm
        expected["normed"] = expected.pop(f"hidden.{model.config.num_hidden_layers}")
    if pooled is not None:
        expected[f"pooled.{model.config.num_hidden_layers}"] = pooled
    for name in ("logits", "prediction_logits"):
        if name in output:
            expected["lm_logits"] = output[name]
    return expected


def write(name: str, expected: dict[str, torch.Tensor]) -> None:
    """expected.safetensors and provenance.json of one folder."""
    folder = GOLDEN / name
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: tensor.contiguous() for key, tensor in expected.items()}, folder / "expected.safetensors")
    versions = {module.__name__: module.__version__ for module in (torch, transformers)}
    provenance = {"command": "python tests/make_golden.py", "seed": SEED, "versions": versions}
    (folder / "provenance.json").write_text(json.dumps(provenance, indent=2) + "\n")


def make(name: str, model_class: type, config, lengths: tuple[int, ...] = (9, 6, 4)) -> None:
    """A kind that transformers has."""
    generator = torch.Generator().manual_seed(SEED)
    model = model_class(config).eval()
    randomise(model, generator)
    model.save_pretrained(GOLDEN / name)
    (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
    write(name, run(model, draw_batch(config, generator, lengths)))


def make_classifier(kind: str, num_labels: int, name: str | None = None, **config) -> None:
    """A ...ForSequenceClassification of two layers, and its logits for rows that are padded on the right."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = SIZES | {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    config = transformers.AutoConfig.for_model(kind, **sizes, num_labels=num_labels, **{"pad_token_id": 0} | config)
    model = transformers.AutoModelForSequenceClassification.from_config(config).eval()
    randomise(model, generator)
    model.save_pretrained(GOLDEN / "classifiers" / (name or kind))
    mask = (torch.arange(9) < torch.tensor([[9], [6], [1]])).long()
    batch = {"input_ids": torch.randint(3, 64, mask.shape, generator=generator), "attention_mask": mask}
    batch["input_ids"] = batch["input_ids"].where(mask.bool(), config.pad_token_id)
    with torch.no_grad():
        write(f"classifiers/{name or kind}", batch | {"logits": model(**batch).logits})


def make_token_head(kind: str, ending: str, **config) -> None:
    """A token classifier of three labels, or a model for question answering, of two layers, as make_classifier does."""
    generator = torch.Generator().manual_seed(SEED)
    sizes = SIZES | {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 12}
    labels, name = (3, "labels") if ending == "ForTokenClassification" else (2, "span")
    config = transformers.AutoConfig.for_model(kind, **sizes, num_labels=labels, **{"pad_token_id": 0} | config)
    model = getattr(transformers, f"AutoModel{ending}").from_config(config).eval()
    randomise(model, generator)
    model.save_pretrained(GOLDEN / "token_heads" / f"{kind}-{name}")
    mask = (torch.arange(9) < torch.tensor([[9], [6], [2]])).long()
    batch = {"input_ids": torch.randint(3, 64, mask.shape, generator=generator), "attention_mask": mask}
    batch["input_ids"] = batch["input_ids"].where(mask.bool(), config.pad_token_id)
    with torch.no_grad():
        outputs = model(**batch)
        logits = outputs.logits if labels == 3 else torch.stack((outputs.start_logits, outputs.end_logits), dim=-1)
        write(f"token_heads/{kind}-{name}", batch | {"logits": logits})


def make_elasticbert() -> None:
    """A BERT under ElasticBERT's names, with a pooler at every layer."""
    generator = torch.Generator().manual_seed(SEED)
    config = transformers.BertConfig(**SIZES, hidden_act="gelu_pytorch_tanh", layer_norm_eps=1e-3)
    model = transformers.BertForMaskedLM(config).eval()
    randomise(model, generator)
    expected = run(model, draw_batch(config, generator, (9, 6, 4)))
    tensors = {
        name.replace("bert.", "elasticbert.", 1): tensor
        for name, tensor in model.state_dict().items()
        if name not in model.all_tied_weights_keys
    }
    for depth in range(1, config.num_hidden_layers + 1):
        pooler = torch.nn.Linear(config.hidden_size, config.hidden_size).requires_grad_(False)
        randomise(pooler, generator)
        for name, tensor in pooler.state_dict().items():
            tensors[f"elasticbert.encoder.pooler.{depth - 1}.dense.{name}"] = tensor
        expected[f"pooled.{depth}"] = torch.tanh(pooler(expected[f"hidden.{depth}"][:, 0]))
    write("elasticbert", expected)
    save_file(tensors, GOLDEN / "elasticbert" / "model.safetensors", metadata={"format": "pt"})
    content = config.to_dict() | {"model_type": "elasticbert", "architectures": ["ElasticBertForMaskedLM"]}
    (GOLDEN / "elasticbert" / "config.json").write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")


def make_minilm(folder: Path) -> None:
    """The values of the real all-MiniLM-L6-v2, thinned, and none of its weights."""
    ids = torch.nn.utils.rnn.pad_sequence([torch.tensor(row) for row in MINILM_TOKENS], batch_first=True)
    batch = {"input_ids": ids, "attention_mask": (ids != 0).long(), "token_type_ids": torch.zeros_like(ids)}
    expected = run(transformers.AutoModel.from_pretrained(folder).eval(), batch)
    thinned = {name: t[..., ::EVERY] if name.startswith("hidden.") else t for name, t in expected.items()}
    write("all-MiniLM-L6-v2", thinned)


def run_decoder(model: torch.nn.Module, batch: dict[str, torch.Tensor], new_tokens: int) -> dict[str, torch.Tensor]:
    """Hidden states, the last after the final norm, logits, and the greedy continuation of the batch."""
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        output = model(**batch, output_hidden_states=True)
        text = model.generate(**batch, max_new_tokens=new_tokens, do_sample=False, pad_token_id=0)
    *states, normed = output.hidden_states
    expected = batch | {f"hidden.{depth}": state for depth, state in enumerate(states)}
    return expected | {"normed": normed, "lm_logits": output.logits, "greedy": text[:, batch["input_ids"].shape[1] :]}


def make_decoder(name: str, model_class: type, config) -> None:
    """A decoder; its batch is padded on the left: three rows of 9, 6 and 4 tokens."""
    generator = torch.Generator().manual_seed(SEED)
    model = model_class(config).eval()
    randomise(model, generator)
    model.save_pretrained(GOLDEN / name)
    (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
    mask = (torch.arange(9) >= torch.tensor([[0], [3], [5]])).long()
    ids = torch.randint(1, config.vocab_size, mask.shape, generator=generator) * mask
    outputs = {}
    for attention in ("eager", "sdpa"):
        model.set_attn_implementation(attention)
        outputs[attention] = run_decoder(model, {"input_ids": ids, "attention_mask": mask}, NEW_TOKENS)
    for key, values in outputs["eager"].items():
        at = slice(None) if key == "greedy" else mask.bool()
        torch.testing.assert_close(outputs["sdpa"][key][at], values[at], atol=EAGER, rtol=0)
    write(name, outputs["sdpa"])


def make_t5(name: str, **config) -> None:
    """An encoder-decoder: the texts are padded on the right, the answers are not. v1.1 has a head of its own."""
    generator = torch.Generator().manual_seed(SEED + 11)  # with which greedy texts do not stand still
    config = transformers.T5Config(**T5_SIZES, **config)
    model = transformers.T5ForConditionalGeneration(config).eval()
    if not config.scale_decoder_outputs:  # transformers 5 ties it, unless a file says otherwise
        model.lm_head.weight = torch.nn.Parameter(torch.empty(config.vocab_size, config.d_model))
    randomise(model, generator)
    with torch.no_grad():
        model.shared.weight.mul_(3.0)  # the others are drawn by the root of their inputs
    model.save_pretrained(GOLDEN / name)
    (GOLDEN / name / "generation_config.json").unlink(missing_ok=True)
    mask = (torch.arange(9) < torch.tensor([[9], [6], [4]])).long()
    ids, written = (torch.randint(2, config.vocab_size, (3, n), generator=generator) for n in (9, 10))
    written[:, 0] = config.decoder_start_token_id
    batch = {"input_ids": ids * mask, "attention_mask": mask}
    model.generation_config.eos_token_id = None
    with torch.no_grad():
        output = model(**batch, decoder_input_ids=written, output_hidden_states=True)
        options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
        text = model.generate(**batch, **options, use_cache=False)  # theirs has as many layers as the encoder
    *states, normed = output.decoder_hidden_states
    expected = batch | {"decoder_input_ids": written} | {f"hidden.{depth}": state for depth, state in enumerate(states)}
    expected |= {f"encoder.{depth}": state for depth, state in enumerate(output.encoder_hidden_states)}
    write(name, expected | {"normed": normed, "lm_logits": output.logits, "greedy": text[:, 1:]})


def make_stories(folder: Path) -> None:
    """The values of the real stories260K, thinned, and none of its weights."""
    ids = torch.tensor([STORIES_TOKENS])
    model = transformers.AutoModelForCausalLM.from_pretrained(folder).eval()
    expected = run_decoder(model, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}, 200)
    write("stories260K", {name: t[..., ::EVERY] if t.is_floating_point() else t for name, t in expected.items()})


if __name__ == "__main__":
    make("bert", transformers.BertForPreTraining, transformers.BertConfig(**SIZES))
    roberta = transformers.RobertaConfig(**SIZES, type_vocab_size=1, hidden_act="relu")  # the head stays with gelu
    make("roberta", transformers.RobertaForMaskedLM, roberta)
    make("albert", transformers.AlbertForPreTraining, transformers.AlbertConfig(**SIZES, embedding_size=12))
    make_elasticbert()
    small = DECODER_SIZES | {"max_position_embeddings": 32}
    xlm = transformers.XLMRobertaConfig(**small, type_vocab_size=1)
    make("xlm-roberta", transformers.XLMRobertaForMaskedLM, xlm)
    electra = transformers.ElectraConfig(**small, embedding_size=10, hidden_act="relu")  # the head stays with gelu
    make("electra", transformers.ElectraForMaskedLM, electra)
    names = {"hidden_size": "dim", "num_hidden_layers": "n_layers", "num_attention_heads": "n_heads"}
    names |= {"intermediate_size": "hidden_dim"}
    distilbert = {names.get(key, key): value for key, value in small.items()}
    make("distilbert", transformers.DistilBertForMaskedLM, transformers.DistilBertConfig(**distilbert))
    make("mpnet", transformers.MPNetForMaskedLM, transformers.MPNetConfig(**small), (20, 12, 4))
    v1 = transformers.DebertaConfig(**DECODER_SIZES, **DEBERTA, max_relative_positions=5)
    make("deberta", transformers.DebertaForMaskedLM, v1)
    v2 = transformers.DebertaV2Config(**DECODER_SIZES, **DEBERTA, **DEBERTA_V2)
    make("deberta-v2", transformers.DebertaV2ForMaskedLM, v2)
    modern = transformers.ModernBertConfig(**DECODER_SIZES, **MODERNBERT)
    make("modernbert", transformers.ModernBertForMaskedLM, modern)
    make_t5("t5")
    make_t5("t5-v1.1", feed_forward_proj="gated-gelu", tie_word_embeddings=False)
    sizes, llama = DECODER_SIZES, transformers.LlamaForCausalLM
    make_decoder("llama", llama, transformers.LlamaConfig(**sizes, num_key_value_heads=2))
    scaled = sizes | {"num_attention_heads": 2, "rope_parameters": LLAMA3_ROPE, "tie_word_embeddings": True}
    make_decoder("llama3", llama, transformers.LlamaConfig(**scaled, num_key_value_heads=1))
    wide = transformers.GemmaConfig(**sizes, num_key_value_heads=1, head_dim=8)
    make_decoder("gemma", transformers.GemmaForCausalLM, wide)
    part = transformers.PhiConfig(**(sizes | {"hidden_size": 20, "num_attention_heads": 2}), rope_parameters=PHI_ROPE)
    make_decoder("phi", transformers.PhiForCausalLM, part)
    mistral = transformers.MistralConfig(**sizes, num_key_value_heads=2, head_dim=6, sliding_window=6)
    make_decoder("mistral", transformers.MistralForCausalLM, mistral)
    qwen2 = transformers.Qwen2Config(**sizes, **QWEN2_WINDOW, num_key_value_heads=2, tie_word_embeddings=True)
    make_decoder("qwen2", transformers.Qwen2ForCausalLM, qwen2)
    qwen3 = transformers.Qwen3Config(**sizes, **QWEN3_WINDOW, num_key_value_heads=2, head_dim=8, attention_bias=True)
    make_decoder("qwen3", transformers.Qwen3ForCausalLM, qwen3)
    for name, original in (("phi3", 40), ("phi3-long", 3)):  # all rows are below the original length, or above it
        phi3 = sizes | {"num_attention_heads": 2, "num_key_value_heads": 1, "sliding_window": 6}
        phi3 |= {"rope_parameters": dict(PHI3_ROPE), "original_max_position_embeddings": original}
        phi3 |= {"pad_token_id": None, "eos_token_id": None}
        make_decoder(name, transformers.Phi3ForCausalLM, transformers.Phi3Config(**phi3))
    make_classifier("bert", 3)
    make_classifier("roberta", 2)
    make_classifier("roberta", 3, name="several-labels", problem_type="multi_label_classification")
    make_classifier("albert", 1, embedding_size=6)
    make_classifier("deberta", 2, **DEBERTA, pooler_hidden_act="gelu", pooler_hidden_size=8)
    make_classifier("deberta-v2", 3, **DEBERTA, **DEBERTA_V2, pooler_hidden_act="tanh", pooler_hidden_size=8)
    make_classifier("xlm-roberta", 2)
    make_classifier("electra", 2, embedding_size=6)
    make_classifier("distilbert", 3, dim=8, n_layers=2, n_heads=2, hidden_dim=12)
    make_classifier("mpnet", 1, pad_token_id=1)
    modern = {"global_attn_every_n_layers": 2, "local_attention": 4, "classifier_pooling": "mean"}
    make_classifier("modernbert", 3, **modern, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    make_classifier("llama", 3, num_key_value_heads=1)
    make_classifier("gemma", 1, num_key_value_heads=1, head_dim=4)
    make_classifier("phi", 2)
    make_classifier("mistral", 2, num_key_value_heads=1)
    make_classifier("qwen2", 3, num_key_value_heads=1)
    make_classifier("qwen3", 2, num_key_value_heads=1, head_dim=4)
    make_classifier("phi3", 2, num_key_value_heads=1, eos_token_id=1, bos_token_id=2)
    for ending in ("ForTokenClassification", "ForQuestionAnswering"):
        for kind in ("bert", "roberta", "electra"):
            make_token_head(kind, ending)
        make_token_head("distilbert", ending, dim=8, n_layers=2, n_heads=2, hidden_dim=12)
        make_token_head("mpnet", ending, pad_token_id=1)
        make_token_head("modernbert", ending, **modern, bos_token_id=1, eos_token_id=2, cls_token_id=1, sep_token_id=2)
    if "MINI_EE_SHARED" in os.environ:
        make_minilm(Path(os.environ["MINI_EE_SHARED"]) / "weights" / "all-MiniLM-L6-v2")
        make_stories(Path(os.environ["MINI_EE_SHARED"]) / "weights" / "stories260K")
