"""`phantomgpu model`: a configuration of transformers or diffusers instead of a script."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner, Result

import phantomgpu
from phantomgpu import Answer, Report
from phantomgpu.cli import app
from stretto.memory import phantom

pytest.importorskip("transformers")
from phantomgpu.models import Inputs, Model, _called, _fill, _loss

LLAMA = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 128,
}


def ask(folder: Path, *options: str, **changes: Any) -> Result:
    (folder / "config.json").write_text(json.dumps({**LLAMA, **changes}))
    return CliRunner().invoke(app, ["model", str(folder), "--gpu", "l4", *options])


def test_a_row_for_each_length_checkpointing_and_number_of_ranks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def search(train: Any, *, args: Any, ranks: int, **_: Any) -> Answer:
        model, length, shared, again = args
        assert shared == ranks
        built = model.build(checkpointing=again)
        assert next(built.parameters()).is_meta
        peak = length - built.is_activation_checkpointing
        report = Report(status="fits", gpu="l4", memory=0, context=0, peak_reserved=peak)
        return Answer(64, {64: report})

    monkeypatch.setattr("phantomgpu.searching.search", search)
    options = ("--length", "32,64", "--ranks", "1,8")
    said = ask(tmp_path, *options, "--json")
    assert said.exception is None, said.exception
    found = json.loads(said.output)
    assert "computed in bf16" in found["model"]
    rows = [(row["tokens"], row["checkpointing"], row["ranks"]) for row in found["rows"]]
    assert rows == [(n, again, m) for n in (32, 64) for again in (False, True) for m in (1, 8)]
    assert [row["reserved_bytes"] for row in found["rows"]] == [32, 32, 31, 31, 64, 64, 63, 63]
    assert "64    512" in ask(tmp_path, *options).output


@pytest.mark.parametrize(
    ("options", "changes", "word"),
    [
        (("--length", "256"), {}, "max_position_embeddings"),
        (("--length", "many"), {}, "numbers"),
        (("--length", "32"), {"architectures": 3}, "config.json"),
        (("--length", "32"), {"text_config": [1]}, "config.json"),
        (("--length", "32"), {"max_position_embeddings": "many"}, "config.json"),
        (("--length", "32"), {"model_type": "llamma"}, "model_type"),
    ],
)
def test_mistakes(
    tmp_path: Path, options: tuple[str, ...], changes: dict[str, Any], word: str
) -> None:
    assert word in str(ask(tmp_path, *options, **changes).exception)


@pytest.mark.parametrize("name", ["adamw", "sgd", "adafactor"])
def test_the_optimizer_has_the_weights_that_are_trained(name: str, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    causal = Model(tmp_path, name)
    model = causal.build(checkpointing=False).to_empty(device="cpu")
    model.lm_head.requires_grad_(requires_grad=False)
    (group,) = causal.optimizer_of(list(model.parameters())).param_groups
    assert len(group["params"]) == len(list(model.parameters())) - 1


T: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 128,
    "max_position_embeddings": 128,
}
OLD = {name: value for name, value in T.items() if name != "head_dim"}
SOUND = {**OLD, "vocab_size": 16, "conv_dim": [16] * 7, "num_conv_pos_embedding_groups": 2}
SIGHT = {**T, "image_size": 32, "patch_size": 8}
PAIR = {"text_config": T, "vision_config": SIGHT}
SEQ: dict[str, Any] = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 64,
    "decoder_start_token_id": 2,
}
T5 = {"d_model": 32, "d_ff": 64, "d_kv": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 128}
STAGES = {"hidden_sizes": [8, 16, 32, 32], "depths": [1, 1, 1, 1]}
WHISPER = {"num_mel_bins": 8, "max_source_positions": 32, "max_target_positions": 64}
TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 1, "decoder_start_token_id": 2}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 2, "vocab_size": 128, "n_positions": 64}
IMAGE = {"image_token_index": 5, "image_token_id": 5}
MROPE = {**T, "rope_scaling": {"type": "mrope", "mrope_section": [2, 3, 3]}}
QWEN = {**IMAGE, "vision_start_token_id": 8, "vision_end_token_id": 9, "video_token_id": 10}
EYES = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 2, "patch_size": 14}
EXPERTS = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 1, "topk_group": 1}
LATENT = {"q_lora_rank": 16, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8}
UNET = {
    "sample_size": 16,
    "block_out_channels": [32, 32],
    "layers_per_block": 1,
    "down_block_types": ["DownBlock2D", "CrossAttnDownBlock2D"],
    "cross_attention_dim": 32,
    "up_block_types": ["CrossAttnUpBlock2D", "UpBlock2D"],
    "attention_head_dim": 8,
}
DIT = {"num_layers": 2, "attention_head_dim": 8, "num_attention_heads": 2, "in_channels": 4}
FLUX = {"attention_head_dim": 16, "joint_attention_dim": 32, "pooled_projection_dim": 32}
PERCEIVER = {"d_latents": 32, "num_latents": 8, "d_model": 32, "max_position_embeddings": 64}
FEW = [
    ("bert", "BertForMaskedLM", T, 32),
    ("t5", "T5ForConditionalGeneration", {**T5, "decoder_start_token_id": 0}, 32),
    ("vit", "ViTForImageClassification", SIGHT, None),
    ("whisper", "WhisperForConditionalGeneration", {**SEQ, **WHISPER, **TOKENS}, 32),
    (
        "qwen2_vl",
        "Qwen2VLForConditionalGeneration",
        {"text_config": MROPE, "vision_config": EYES, **QWEN},
        80,
    ),
]
MANY = [
    *(
        (name, f"{kind}ForCausalLM", T, 32)
        for name, kind in {
            "mistral": "Mistral",
            "qwen3": "Qwen3",
            "gemma2": "Gemma2",
            "gpt_neox": "GPTNeoX",
        }.items()
    ),
    ("mixtral", "MixtralForCausalLM", {**T, "num_local_experts": 4}, 32),
    ("falcon", "FalconForCausalLM", OLD, 32),
    ("mamba", "MambaForCausalLM", {**OLD, "num_hidden_layers": 2}, 32),
    ("deepseek_v3", "DeepseekV3ForCausalLM", {**OLD, **EXPERTS, **LATENT, "v_head_dim": 16}, 32),
    ("gpt2", "GPT2LMHeadModel", GPT2, None),
    ("llama", "LlamaForSequenceClassification", T, 32),
    ("bert", "BertForQuestionAnswering", T, 32),
    ("bert", "BertForMultipleChoice", T, 32),
    ("bert", "BertForPreTraining", T, 32),
    ("roberta", "RobertaForMaskedLM", T, 32),
    ("deberta-v2", "DebertaV2ForMaskedLM", {**T, "pad_token_id": 0}, 32),
    ("bart", "BartForSequenceClassification", SEQ, None),
    ("marian", "MarianMTModel", {**SEQ, "pad_token_id": 1}, None),
    ("perceiver", "PerceiverForMaskedLM", PERCEIVER, 64),
    ("convnext", "ConvNextForImageClassification", STAGES, 64),
    ("beit", "BeitForImageClassification", SIGHT, None),
    ("videomae", "VideoMAEForVideoClassification", {**SIGHT, "num_frames": 4}, None),
    ("segformer", "SegformerForSemanticSegmentation", {"image_size": 64}, None),
    ("clip", "CLIPModel", PAIR, 32),
    (
        "llava",
        "LlavaForConditionalGeneration",
        {
            **IMAGE,
            "image_seq_length": 16,
            "text_config": {"model_type": "llama", **T},
            "vision_config": {"model_type": "clip_vision_model", **SIGHT},
        },
        32,
    ),
    ("gemma3", "Gemma3ForConditionalGeneration", {**PAIR, **IMAGE, "mm_tokens_per_image": 4}, 32),
    ("wav2vec2", "Wav2Vec2ForCTC", SOUND, 4000),
    ("wav2vec2-bert", "Wav2Vec2BertForCTC", {**OLD, "feature_projection_input_dim": 16}, 64),
    (
        "speech_to_text",
        "Speech2TextForConditionalGeneration",
        {**SEQ, "input_feat_per_channel": 8},
        64,
    ),
    (
        "audio-spectrogram-transformer",
        "ASTForAudioClassification",
        {**SIGHT, "max_length": 64},
        None,
    ),
    ("", "UNet2DConditionModel", UNET, None),
    ("", "DiTTransformer2DModel", {**DIT, "sample_size": 8, "num_embeds_ada_norm": 10}, None),
    (
        "",
        "PixArtTransformer2DModel",
        {**DIT, "sample_size": 8, "cross_attention_dim": 16, "caption_channels": 32},
        None,
    ),
    (
        "",
        "SD3Transformer2DModel",
        {**DIT, **FLUX, "attention_head_dim": 8, "sample_size": 16, "caption_projection_dim": 16},
        None,
    ),
    (
        "",
        "FluxTransformer2DModel",
        {**DIT, **FLUX, "axes_dims_rope": [4, 4, 8], "guidance_embeds": True},
        None,
    ),
]


def written(folder: Path, kind: str, name: str, config: dict[str, Any]) -> Model:
    head = {"model_type": kind, "architectures": [name]} if kind else {"_class_name": name}
    (folder / "config.json").write_text(json.dumps({**head, **config}))
    return Model(folder)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("kind", "name", "config", "length"),
    [*FEW, *(pytest.param(*one, marks=pytest.mark.long) for one in MANY)],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_model_is_fed_from_its_configuration(
    kind: str, name: str, config: dict[str, Any], length: int | None, tmp_path: Path
) -> None:
    if not kind:
        pytest.importorskip("diffusers")
    model = written(tmp_path, kind, name, config)
    built = model.build().train()
    tied = len(list(built.parameters()))
    _fill(built, "cpu")
    assert len(list(built.parameters())) == tied
    for weight in built.parameters():
        torch.nn.init.normal_(weight, std=0.02)
    outputs = _called(built, Inputs(built, 2, length).all())
    assert getattr(outputs, "loss", None) is not None or not kind
    _loss(outputs).backward()
    assert any(weight.grad is not None for weight in built.parameters())


def feed(model: Model, length: int | None) -> None:
    built = model.build()
    _fill(built, "cpu")
    _called(built, Inputs(built, 2, length).all())


@pytest.mark.parametrize(
    ("name", "config", "length", "word"),
    [
        ("llama LlamaForFlying", T, 32, "no such class"),
        ("t5 T5ForConditionalGeneration", T5, None, "--length"),
        ("gemma3 Gemma3ForConditionalGeneration", {**PAIR, **IMAGE}, 8, "256 tokens"),
        ("clip CLIPModel", PAIR, 256, "cannot feed CLIPModel"),
        ("yolos YolosForObjectDetection", {**SIGHT, "image_size": [32, 32]}, None, "boxes"),
    ],
)
def test_what_cannot_be_fed_is_refused(
    name: str, config: dict[str, Any], length: int | None, word: str, tmp_path: Path
) -> None:
    kind, _, named = name.partition(" ")
    model = written(tmp_path, kind, named, config)
    with pytest.raises(phantomgpu.PhantomError, match=word):
        feed(model, length)


def test_an_argument_that_is_not_known_is_named() -> None:
    class Odd(torch.nn.Linear):
        config = LLAMA

        def forward(self, molecules: Any, *, labels: Any = None) -> Any:
            del molecules, labels

    with pytest.raises(phantomgpu.PhantomError, match=r"Odd .* molecules is not known"):
        Inputs(Odd(2, 2), 2, 8).all()


def test_inference_takes_no_options_of_training(tmp_path: Path) -> None:
    for wrong in (("--checkpointing",), ("--ranks", "2")):
        said = ask(tmp_path, "--length", "8", "--generate", "8", *wrong)
        assert "--generate" in str(said.exception)
    assert "256" in str(ask(tmp_path, "--length", "128", "--generate", "128").exception)


def test_weights_are_of_the_type_that_was_asked_for(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
        model = Model(tmp_path, weights=name).build(checkpointing=False)
        assert {one.dtype for one in model.parameters()} == {dtype}


@pytest.mark.slow
@pytest.mark.parametrize("ranks", ["1", "2"])
def test_the_phantom_trains_the_model(ranks: str, tmp_path: Path) -> None:
    missing = phantom.setup_problem()
    if missing is not None:
        pytest.skip(missing)
    asked = ("--length", "32", "--checkpointing", "--ranks", ranks)
    said = ask(tmp_path, *asked, "--largest", "8", "--json")
    (row,) = json.loads(said.output)["rows"]
    assert row["micro_batch"] == 8
    wrong = ask(tmp_path, *asked, model_type="abacus")
    assert "abacus" in str(wrong.exception)


@pytest.mark.long
@pytest.mark.parametrize("cache", ["static", "dynamic"])
def test_the_phantom_writes_tokens(cache: str, tmp_path: Path) -> None:
    missing = phantom.setup_problem()
    if missing is not None:
        pytest.skip(missing)
    asked = ("--length", "32", "--generate", "64", "--cache", cache)
    (row,) = json.loads(ask(tmp_path, *asked, "--largest", "8", "--json").output)["rows"]
    assert row["micro_batch"] == 8
