"""One run of PEFT's comparison of image generation: the same allocations, no weights, no data.

What `run.py` of the published commits holds on the GPU is held here, in its order: DINO's encoder,
the model with its adapter, the text encoder and the VAE, which come and go, and whose free memory
is given back only before the first step.
"""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from transformers import Dinov2Config, Dinov2Model, Qwen3Config, Qwen3ForCausalLM

from published.worker import serve

# diffusers asks when it is imported, and after that no process could be forked.
with patch.object(torch.cuda, "is_available", return_value=True):
    from diffusers import AutoencoderKLFlux2, Flux2Transformer2DModel
    from diffusers import Flux2KleinPipeline as Pipeline
    from peft import get_peft_config, get_peft_model

    from published.peft_text_replay import first_weights, leave_frod_out

IMAGES, BATCH, WORDS, SIDE = 14, 2, 512, 512
"""20 images, less two for validation and four for the test; 512 tokens; 512 x 512 pixels."""
PROMPT = 32
"""Tokens of a prompt, about; the others are padding."""
FLUX = {
    "patch_size": 1,
    "in_channels": 128,
    "num_layers": 5,
    "num_single_layers": 20,
    "attention_head_dim": 128,
    "num_attention_heads": 24,
    "joint_attention_dim": 7680,
    "timestep_guidance_channels": 256,
    "mlp_ratio": 3.0,
    "axes_dims_rope": (32, 32, 32, 32),
    "rope_theta": 2000,
    "eps": 1e-6,
    "guidance_embeds": False,
}
"""FLUX.2-klein-base-4B: 3,875,544,576 parameters, as published."""
QWEN = {
    "hidden_size": 2560,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 9728,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
"""Its text encoder is Qwen3-4B."""


def built(make: Any, config: Any, dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a model on the CPU whose weights are whatever memory has."""
    with torch.device("meta"):
        model = make(config).to(dtype)
    placed: dict[int, Tensor] = {}  # tied weights stay tied

    def place(tensor: Tensor) -> Tensor:
        return placed.setdefault(id(tensor), torch.empty_like(tensor, device="cpu"))

    model._apply(place)
    getattr(model, "tie_weights", lambda: None)()
    return model


def leave(module: nn.Module) -> None:
    """Move a module to the CPU; large tensors leave their unknown values behind, to save time."""

    def move(tensor: Tensor) -> Tensor:
        if tensor.numel() <= 1 << 16 or not tensor.is_floating_point():
            return tensor.cpu()
        return torch.empty_like(tensor, device="cpu")

    module._apply(move)


@contextmanager
def visiting(module: nn.Module) -> Iterator[None]:
    """Move a module to the GPU for a while."""
    module.to("cuda")
    yield
    leave(module)


class Log:
    """Bytes over those at the start, as the published run counts them."""

    def __init__(self) -> None:
        torch.cuda.init()
        torch.cuda.memory._record_memory_history(enabled=None)  # half of the time, of no use here
        torch.cuda.reset_peak_memory_stats()
        nn.Linear(1, 1).to("cuda")
        torch.cuda.reset_peak_memory_stats()
        self.start = torch.cuda.max_memory_reserved()
        self.allocated: list[int] = []
        self.reserved: list[int] = []

    def step(self) -> None:
        """Note what is allocated and reserved after a step."""
        self.allocated.append(torch.cuda.memory_allocated() - self.start)
        self.reserved.append(torch.cuda.memory_reserved() - self.start)


def pipeline_parts(adapter: dict[str, Any] | None) -> tuple[Any, nn.Module, nn.Module]:
    """Return transformer, text encoder and VAE, on the CPU."""
    transformer = built(lambda config: Flux2Transformer2DModel(**config), FLUX)
    text_encoder = built(Qwen3ForCausalLM, Qwen3Config(**QWEN)).eval()
    vae = built(lambda config: AutoencoderKLFlux2(**config), {}).eval()
    transformer.enable_gradient_checkpointing()
    for module in (text_encoder, vae):
        module.requires_grad_(requires_grad=False)
    transformer.to("cuda")  # here, a phantom is faster than the CPU; it is empty again afterwards
    if adapter is None:
        transformer.requires_grad_(requires_grad=True)
    else:
        config = get_peft_config(dict(adapter))
        if adapter["peft_type"] == "SHIRA":
            config.mask_fn = first_weights
        transformer = get_peft_model(transformer, config)
    leave(transformer)
    torch.cuda.empty_cache()
    return transformer.train(), text_encoder, vae


def encode(text_encoder: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the cached embeddings and ids of the prompts."""
    embeddings, ids = [], []
    with torch.no_grad(), visiting(text_encoder):
        for _ in range(IMAGES):
            found = embedding(text_encoder).repeat(1, 1, 1).view(1, WORDS, -1)
            embeddings.append(found)
            ids.append(Pipeline._prepare_text_ids(found).to("cuda"))
        del found
    return torch.cat(embeddings), torch.cat(ids)


def embedding(text_encoder: nn.Module) -> Tensor:
    """Return the embedding of a prompt; the logits are dropped with the other results."""
    ids, mask = torch.full((1, WORDS), 7), torch.ones(1, WORDS, dtype=torch.long)
    mask[:, PROMPT:] = 0  # prompts are padded, so that attention takes a mask
    given = {"input_ids": ids.to("cuda"), "attention_mask": mask.to("cuda")}
    output = text_encoder(**given, output_hidden_states=True, use_cache=False)
    found = torch.stack([output.hidden_states[k] for k in (10, 20, 30)], dim=1)
    return found.permute(0, 2, 1, 3).reshape(1, WORDS, -1)


def encode_images(vae: Any) -> Tensor:
    """Return the cached latents."""
    cached = []
    pixels = [torch.zeros(3, SIDE, SIDE) for _ in range(IMAGES)]
    mean = vae.bn.running_mean.view(1, -1, 1, 1)
    deviation = torch.sqrt(vae.bn.running_var.view(1, -1, 1, 1) + vae.config.batch_norm_eps)
    with torch.no_grad(), visiting(vae):
        mean, deviation = mean.to("cuda"), deviation.to("cuda")
        for first in range(0, IMAGES, BATCH):
            batch = torch.stack(pixels[first : first + BATCH]).to("cuda", torch.bfloat16)
            latents = Pipeline._patchify_latents(vae.encode(batch).latent_dist.mode())
            latents = (latents - mean) / deviation
            cached.append(latents)
    return torch.cat(cached)


def replay(settings: dict[str, Any]) -> dict[str, Any]:
    """Train so many steps, and return what the memory was after each."""
    adapter = settings["adapter"]
    torch.manual_seed(0)
    log = Log()
    transformer, text_encoder, vae = pipeline_parts(adapter)
    indices = torch.arange(IMAGES).repeat(1000).to("cuda")
    dino = built(Dinov2Model, Dinov2Config(image_size=518), torch.float32).to("cuda").eval()  # noqa: F841 - stays
    transformer.to("cuda")
    trained = torch.optim.AdamW(transformer.parameters(), **settings["optimizer"])
    embeddings, text_ids = encode(text_encoder)
    cached = (encode_images(vae), embeddings, text_ids)
    del text_encoder, embeddings, text_ids
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    losses = []
    for step in range(settings["steps"]):
        # One function, as it is published: what it names lives until the next step.
        index = indices[BATCH * step : BATCH * (step + 1)].to(dtype=torch.long)
        latents, embeds, ids = (one.index_select(0, index) for one in cached)
        image_ids = Pipeline._prepare_latent_ids(latents).to("cuda")
        noise = torch.randn_like(latents)
        timesteps = torch.full((BATCH,), 500.0).to("cuda")
        sigmas = torch.full((BATCH, 1, 1, 1), 0.5, dtype=latents.dtype).to("cuda")
        noisy = (1.0 - sigmas) * latents + sigmas * noise
        packed = Pipeline._pack_latents(noisy)
        trained.zero_grad(set_to_none=True)
        predicted = transformer(
            hidden_states=packed,
            timestep=timesteps / 1000,
            guidance=None,
            encoder_hidden_states=embeds,
            txt_ids=ids,
            img_ids=image_ids,
            return_dict=False,
        )[0]
        predicted = predicted[:, : packed.size(1)]
        predicted = Pipeline._unpack_latents_with_ids(predicted, image_ids)
        weighting = torch.ones_like(sigmas)
        target = noise - latents
        squares = weighting.float() * (predicted.float() - target.float()) ** 2
        loss = torch.mean(squares.reshape(BATCH, -1), 1)
        del squares
        loss = loss.mean()
        loss.backward()
        nn.utils.clip_grad_norm_(transformer.parameters(), 1.0)
        trained.step()
        if adapter and adapter["peft_type"] == "ADALORA":
            transformer.base_model.update_and_allocate(step + 1)
        losses.append(loss)
        log.step()
    counts = [one.numel() for one in transformer.parameters() if one.requires_grad]
    return {"allocated": log.allocated, "reserved": log.reserved, "trainable": sum(counts)}


def places(permuted: Any) -> Any:
    """Return `torch.randperm` that draws some places of a large matrix instead of ordering all."""

    def drawn(count: int, **how: Any) -> Tensor:
        if count <= 1 << 20:
            return permuted(count, **how)  # type: ignore[no-any-return]
        return torch.randint(count, (1 << 16,), **how)

    return drawn


def main() -> None:
    """Import what all rows need, and answer."""
    # Each layer would try to build an extension. The published run has no more parameters than
    # without it, so it was not built there.
    boft: Any = importlib.import_module("peft.tuners.boft.layer")
    boft.get_fbd_cuda = lambda: None
    leave_frod_out()
    torch.randperm = places(torch.randperm)  # FourierFT and WaveFT: minutes, on the CPU
    importlib.import_module("torch._dynamo")  # the first optimizer step does
    torch.set_num_threads(1)  # OpenMP's threads do not survive a fork
    serve(replay)


if __name__ == "__main__":
    main()
