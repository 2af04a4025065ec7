"""Vision-language models of transformers."""

import sys, torch
from transformers import (
    Idefics3Config,
    Idefics3ForConditionalGeneration,
    LlavaConfig,
    LlavaForConditionalGeneration,
    CLIPVisionConfig,
    LlamaConfig,
    Qwen2VLConfig,
    Qwen2VLForConditionalGeneration,
)

B, kind = int(sys.argv[1]), sys.argv[2]
text = dict(
    vocab_size=2000,
    hidden_size=256,
    intermediate_size=512,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=4,
)
if kind == "llava":
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=CLIPVisionConfig(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=3,
                num_attention_heads=4,
                image_size=56,
                patch_size=14,
                projection_dim=128,
            ),
            text_config=LlamaConfig(**text),
            image_token_index=1999,
        )
    )

    def batch():
        ids = torch.randint(0, 1990, (B, 64))
        ids[:, 1:17] = 1999
        return dict(
            input_ids=ids,
            pixel_values=torch.randn(B, 3, 56, 56),
            attention_mask=torch.ones_like(ids),
            labels=ids.clone(),
        )
elif kind == "qwen":
    model = Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=dict(
                text,
                num_key_value_heads=2,
                rope_scaling={"type": "mrope", "mrope_section": [8, 12, 12]},
            ),
            vision_config=dict(depth=2, embed_dim=128, hidden_size=256, num_heads=4),
            image_token_id=1999,
            vision_start_token_id=1998,
            vision_end_token_id=1997,
            video_token_id=1996,
        )
    )

    def batch():
        ids = torch.randint(0, 1990, (B, 64))
        ids[:, 1] = 1998
        ids[:, 2:18] = 1999
        ids[:, 18] = 1997
        types = torch.zeros_like(ids)
        types[:, 2:18] = 1
        return dict(
            input_ids=ids,
            pixel_values=torch.randn(B * 64, 1176),
            image_grid_thw=torch.tensor([[1, 8, 8]] * B),
            attention_mask=torch.ones_like(ids),
            labels=ids.clone(),
            mm_token_type_ids=types,
        )
else:
    model = Idefics3ForConditionalGeneration(
        Idefics3Config(
            text_config=dict(text, model_type="llama", pad_token_id=0),
            vision_config=dict(
                hidden_size=128,
                intermediate_size=256,
                num_hidden_layers=2,
                num_attention_heads=4,
                image_size=64,
                patch_size=8,
            ),
            image_token_id=1999,
            scale_factor=2,
        )
    )

    def batch():
        ids = torch.randint(0, 1990, (B, 64))
        ids[:, 1:17] = 1999
        return dict(
            input_ids=ids,
            pixel_values=torch.randn(B, 1, 3, 64, 64),
            pixel_attention_mask=torch.ones(B, 1, 64, 64, dtype=torch.long),
            attention_mask=torch.ones_like(ids),
            labels=ids.clone(),
        )


model = model.cuda()
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10):
    with torch.autocast("cuda", torch.bfloat16):
        loss = model(**{k: v.cuda() for k, v in batch().items()}).loss
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    print(step, loss.item())
