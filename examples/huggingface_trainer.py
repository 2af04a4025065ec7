"""Train a small GPT-2 with the trainer of Hugging Face, on sequences that it can learn."""

import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

torch.manual_seed(0)
rows = (torch.randint(64, (640, 1)) + 7 * torch.arange(32)) % 64
data = [{"input_ids": row, "labels": row} for row in rows]
model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=32, n_embd=32, n_layer=2, n_head=2))
arguments = TrainingArguments(
    "run",
    per_device_train_batch_size=16,
    num_train_epochs=2,
    learning_rate=3e-3,
    logging_steps=5,
    save_strategy="no",
    report_to=[],
)
trainer = Trainer(model, arguments, train_dataset=data)
trainer.train()
print(trainer.state.global_step, "steps, loss", trainer.state.log_history[-2]["loss"])
