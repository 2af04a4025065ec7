"""Train Llama 3 8B with FSDP2, on random tokens: torchrun --nproc-per-node 8 llama_8b.py.

On a machine without a GPU: phantomgpu run --gpu h100 --ranks 8 -- python examples/llama_8b.py
"""

import torch
from torch import distributed
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from transformers import LlamaConfig, LlamaForCausalLM

distributed.init_process_group("nccl")
torch.cuda.set_device(distributed.get_rank() % torch.cuda.device_count())
config = LlamaConfig(
    vocab_size=128_256,
    hidden_size=4096,
    intermediate_size=14_336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    max_position_embeddings=8192,
    rope_theta=500_000.0,
)
with torch.device("meta"):
    model = LlamaForCausalLM(config)
model.gradient_checkpointing_enable()
half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
for layer in model.model.layers:
    fully_shard(layer, mp_policy=half)
fully_shard(model, mp_policy=half)
model.to_empty(device="cuda")
with torch.no_grad():
    for parameter in model.parameters():
        parameter.normal_(std=0.02)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
for _ in range(100):
    tokens = torch.randint(config.vocab_size, (2, 8192), device="cuda")
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    optimizer.zero_grad()
distributed.destroy_process_group()
