"""torchtune's model, chunked loss and checkpointing in a loop of one device."""

import sys
import torch
from torchtune import training, modules
from torchtune.models.llama3_2 import llama3_2
from torchtune.modules.loss import CEWithChunkedOutputLoss
from torchtune.training import set_activation_checkpointing, set_default_dtype

training.set_seed(1)
with set_default_dtype(torch.bfloat16), torch.device("cuda"):
    model = llama3_2(
        vocab_size=32000,
        num_layers=4,
        num_heads=8,
        num_kv_heads=4,
        embed_dim=512,
        max_seq_len=512,
        intermediate_dim=1408,
    )
set_activation_checkpointing(model, auto_wrap_policy={modules.TransformerSelfAttentionLayer})
loss_fn = CEWithChunkedOutputLoss()
model.set_num_output_chunks(loss_fn.num_output_chunks)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-5, fused=True)
B = int(sys.argv[1])
for step in range(10):
    tokens = torch.randint(0, 32000, (B, 512)).to("cuda")
    labels = torch.cat([tokens[:, 1:], torch.full((B, 1), loss_fn.ignore_index, device="cuda")], 1)
    n = (labels != loss_fn.ignore_index).sum()
    loss = loss_fn(model(tokens), labels)
    (loss * n).backward()
    training.scale_grads(model, 1 / n)
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    print(step, loss.item(), norm.item())
