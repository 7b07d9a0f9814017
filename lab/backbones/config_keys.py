"""Which keys of config.json may be passed over: any other one is refused, because it may change what a model computes.

A key is read by the family (a field of its Config, or in Layout.config_keys), or it is listed here because it changes
no result: names of labels and files, of tokens, options of training and generation, and what trainers and model cards
add.
"""

import re
from dataclasses import fields
from typing import Any

from mini_ee.lab.backbones.backbone import Layout
from mini_ee.lab.data.values import shortened

NEUTRAL: tuple = (None, False, "", [], {})  # and 0
"""Values with which an unknown key is off."""

HARMLESS = re.compile(
    # private keys of transformers, and dropout, which is off when a model is used
    r"_.*|.*(dropout|dropout_prob|dropout_rate|_pdrop|drop_rate|layerdrop)"
    # what a file is, and for whom
    r"|architectures|model_type|name_or_path|(transformers|adapter_transformers|peft|unsloth)_version|(torch_)?dtype"
    r"|finetuning_task|fine_?tuned?_from|base_model(_.*)?|task(s|_.*)?|language(s)?|(model_)?name|author|license|tags"
    r"|description|date|version|pipeline_tag|library_name|revision|model_card.*|url|citation|format|framework"
    # labels of a classifier (fine_tuned.py) and tokens
    r"|id2label|label2id|num_labels|problem_type|label(s|_.*)|num_classes|class(es|_names|_weights?)"
    r"|(bos|eos|pad|sep|cls|mask|unk|decoder_start)_token(_id)?|tokenizer_.*|vocab_file|do_lower_case|keys_to_ignore.*"
    r"|(model_)?max_(seq_)?len(gth)?|max_seq_length|max_sequence_length|max_new_tokens|prefix|n_positions"
    # outputs, speed and memory
    r"|output_.*|(use_)?return_dict(_in_generate)?|torchscript|use_(cache|bfloat16|return_dict|flash_attn(_2)?)"
    r"|attn_implementation|experts_implementation|gradient_checkpointing|chunk_size_feed_forward|pretraining_tp"
    r"|reference_compile|repad_logits_with_grad|deterministic_flash_attn|cross_attention_hidden_size|model_parallel"
    # generation
    r"|min_length|do_sample|early_stopping|num_beams?(_groups)?|num_return_sequences|diversity_penalty|temperature"
    r"|top_[kp]|typical_p|(repetition|length|exponential_decay_length)_penalty|(encoder_)?no_repeat_ngram_size"
    r"|bad_words_ids|forced_(bos|eos)_token_id|(begin_)?suppress_tokens|remove_invalid_values|generation_config"
    # initialisation and training
    r"|initializer_(range|factor|cutoff_factor)|(train|trainer|training|eval|evaluation|wandb|mlflow|optim|unsloth)(_.*)?"
    r"|(optimizer|scheduler|loss|metric|dataset|data)(s|_.*)?|.*loss(es)?(_.*)?|.*_loss|.*metrics?|(random_)?seed|epochs?"
    r"|num_(train_)?epochs|learning_rate|lr|(train|eval)?_?batch_size|weight_decay|warmup.*|sentence_transformers"
    r"|adapters|adapter_fusion.*|threshold|best_.*|.*accuracy|.*f1(_score)?|sparse_pred.*|head|summary_.*"
    # of the first BERT and ALBERT, which no model reads
    r"|directionality|pooler_(fc_size|num_attention_heads|num_fc_layers|size_per_head|type)|net_structure_type"
    r"|down_scale_factor|gap_size|num_memory_blocks|layers_to_keep"
)


def check_keys(config: dict, kind: Any, layout: Layout) -> None:
    """Raise ValueError for a key of config.json that is not known, and whose value may change what a model computes.

    kind: the family's Config.
    """
    read = {field.name for field in fields(kind)} | layout.config_keys
    for key, value in config.items():
        if key not in read and value not in NEUTRAL and not HARMLESS.fullmatch(key):
            raise ValueError(
                f"{key} is not known for a {config['model_type']} and may change its results, found "
                f"{shortened(value)}: not supported; remove it if transformers reads the same model without it"
            )
