"""Preference optimisation with TRL: the reference model is frozen."""

import sys
from datasets import Dataset
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from tokenizers import Tokenizer, models, pre_tokenizers
from trl import DPOConfig, DPOTrainer

words = ["<pad>", "<s>", "</s>", "<unk>", *(f"w{i}" for i in range(996))]
tok = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, unk_token="<unk>"))
tok.pre_tokenizer = pre_tokenizers.Whitespace()
tokenizer = PreTrainedTokenizerFast(
    tokenizer_object=tok, pad_token="<pad>", bos_token="<s>", eos_token="</s>", unk_token="<unk>"
)
config = LlamaConfig(
    vocab_size=32000,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=4,
    num_attention_heads=8,
    pad_token_id=0,
    bos_token_id=1,
    eos_token_id=2,
)
model, ref = LlamaForCausalLM(config), LlamaForCausalLM(config)
rows = Dataset.from_list(
    [{"prompt": f"w{i} w2 w3", "chosen": " w5" * 200, "rejected": " w6" * 150} for i in range(256)]
)
args = DPOConfig(
    "out",
    per_device_train_batch_size=int(sys.argv[1]),
    bf16=True,
    max_length=256,
    report_to=[],
    save_strategy="no",
    max_steps=10,
)
DPOTrainer(model, ref_model=ref, args=args, train_dataset=rows, processing_class=tokenizer).train()
