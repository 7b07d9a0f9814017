"""Names and the modules that define them: methods, rules, measurements, units, heads and backbones, one per line.

Strings only: a module is imported when it is first used.
"""

METHODS = {  # name on the command line -> the module that ends with METHOD
    "lora-exits": "mini_ee.methods.lora_exits",
    "self-supervised": "mini_ee.methods.self_supervised",
    "raee": "mini_ee.methods.raee",
    "consistent": "mini_ee.methods.consistent",
    "embedding-maps": "mini_ee.methods.embedding_maps",
    "joint": "mini_ee.baselines.joint",
    "two-stage": "mini_ee.baselines.two_stage",
    "mixed": "mini_ee.baselines.mixed",
    "sweet": "mini_ee.baselines.sweet",
    "deebert": "mini_ee.baselines.deebert",
    "fastbert": "mini_ee.baselines.fastbert",
    "right-tool": "mini_ee.baselines.right_tool",
    "pabee": "mini_ee.baselines.pabee",
    "pcee-bert": "mini_ee.baselines.pcee_bert",
    "berxit": "mini_ee.baselines.berxit",
    "multi-model": "mini_ee.baselines.multi_model",
    "calm": "mini_ee.baselines.calm",
    "dree": "mini_ee.baselines.dree",
    "cat": "mini_ee.baselines.cat",
    "elasticbert": "mini_ee.baselines.elasticbert",
    "palbert": "mini_ee.baselines.palbert",
    "adainfer": "mini_ee.baselines.adainfer",
    "sleb": "mini_ee.baselines.sleb",
    "free": "mini_ee.baselines.free",
    "layerskip": "mini_ee.baselines.layerskip",
    "del": "mini_ee.baselines.dynamic_exit_layer",
    "balcony": "mini_ee.baselines.balcony",
    "hashee": "mini_ee.baselines.hashee",
    "tr-bert": "mini_ee.baselines.tr_bert",
    "2dmse": "mini_ee.baselines.matryoshka_2d",
    "starbucks": "mini_ee.baselines.starbucks",
    "one-depth": "mini_ee.baselines.one_depth",
    "cosine-predictor": "mini_ee.baselines.cosine_predictor",
}

RULES = {  # name in a run's config.json -> the module of the method that defines the rule, and adds it to rules.RULES
    "raee": "mini_ee.methods.raee",
    "adainfer": "mini_ee.baselines.adainfer",
    "similarity": "mini_ee.methods.embedding_maps_rule",
}

MEASUREMENTS = {  # NAME of `mini-ee evaluate --NAME`, an extra measurement of any run -> the module that defines it
    "hardness": "mini_ee.methods.consistent_hardness",
}

UNITS = {  # `unit` in a run's config.json: the kind of thing that exits -> the module that ends with UNIT
    "rows": "mini_ee.training.row_unit",
    "prompts": "mini_ee.training.prompt_unit",
    "tokens": "mini_ee.training.token_unit",
    "embeddings": "mini_ee.training.embedding_unit",
}

HEADS = {  # `head` in a run's config.json: the kind of head of an example's exit -> module:function
    "dense": "mini_ee.exits.heads:dense",
    "linear": "mini_ee.exits.heads:linear",
}

BACKBONES = {  # model_type in config.json -> the module that ends with BACKBONE and LAYOUTS
    "bert": "mini_ee.backbones.bert",
    "roberta": "mini_ee.backbones.bert",
    "xlm-roberta": "mini_ee.backbones.bert",
    "albert": "mini_ee.backbones.bert",
    "elasticbert": "mini_ee.backbones.bert",
    "deberta": "mini_ee.backbones.deberta",
    "deberta-v2": "mini_ee.backbones.deberta",
    "electra": "mini_ee.backbones.electra",
    "distilbert": "mini_ee.backbones.distilbert",
    "mpnet": "mini_ee.backbones.mpnet",
    "modernbert": "mini_ee.backbones.modernbert",
    "t5": "mini_ee.backbones.t5",
    "llama": "mini_ee.backbones.llama",
    "gemma": "mini_ee.backbones.llama",
    "phi": "mini_ee.backbones.llama",
    "mistral": "mini_ee.backbones.llama",
    "qwen2": "mini_ee.backbones.llama",
    "qwen3": "mini_ee.backbones.llama",
    "phi3": "mini_ee.backbones.llama",
}

TOKENIZERS = {  # model_type in config.json -> the tokenizer that transformers takes if the folder names none
    **dict.fromkeys(("bert", "distilbert", "electra"), "Bert"),
    "roberta": "Roberta",
    "mpnet": "MPNet",
    "xlm-roberta": "XLMRoberta",
    "albert": "Albert",
    "deberta": "Deberta",
    "deberta-v2": "DebertaV2",
}

# the same, for folders that have a tokenizer_config.json
DECODER_TOKENIZERS = {"llama": "Llama", "gemma": "Gemma", "qwen3": "Qwen2", "phi": "GPT2", "t5": "T5"}

# model_type -> the tokenizer that transformers takes whatever tokenizer_config.json names
ONLY_TOKENIZERS = {"qwen2": "Qwen2", **dict.fromkeys(("modernbert", "phi3", "mistral"), "TokenizersBackend")}
