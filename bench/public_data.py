"""Data, tokenizers and models, made up, for the public scripts: one function a kind."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

TEXT = "the quick brown fox jumps over the lazy dog and runs away from the cat "


def tokens(folder: Path) -> None:
    """Make the binary files of nanoGPT, inside its own folder of data."""
    import numpy

    made = Path("data/made")
    made.mkdir(parents=True, exist_ok=True)
    for name in ("train.bin", "val.bin"):
        numpy.arange(1 << 20, dtype=numpy.uint16).tofile(made / name)
    (folder / "input.txt").write_text(TEXT * 2000)


def text(folder: Path) -> None:
    """Make the text of minGPT's chargpt, which it reads from its own folder."""
    (folder / "made").touch()
    Path("input.txt").write_text((TEXT + "O God, O God! ") * 2000)


def images(folder: Path, labels: Sequence[str] = ("cat", "dog")) -> None:
    """Make folders of images, two classes."""
    from PIL import Image

    for split in ("train", "val", "validation"):
        for label in labels:
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            for number in range(96):
                image = Image.new("RGB", (256, 256), (number, 30, 200))
                image.save(folder / split / label / f"{number}.jpg")


def kinds(folder: Path) -> None:
    """Make folders of images, five classes, for a script that counts the best five answers."""
    images(folder, "abcde")


def language(folder: Path) -> None:
    """Make a small Llama, its tokenizer, and data for TRL."""
    import torch
    from safetensors.torch import save_file
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {word: index for index, word in enumerate(["<pad>", "<s>", "</s>", *set(TEXT.split())])}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    (folder / "model").mkdir(exist_ok=True)
    tokenizer.save(str(folder / "model" / "tokenizer.json"))
    template = "{% for m in messages %}{{ m['content'] }} </s>{% endfor %}"
    named = {"bos_token": "<s>", "eos_token": "</s>", "pad_token": "<pad>"}
    named |= {"chat_template": template, "tokenizer_class": "PreTrainedTokenizerFast"}
    (folder / "model" / "tokenizer_config.json").write_text(json.dumps(named))
    width, inner, vocabulary, layers = 512, 1376, 32000, 8
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "torch_dtype": "bfloat16",
        "vocab_size": vocabulary, "hidden_size": width, "intermediate_size": inner,
        "num_hidden_layers": layers, "num_attention_heads": 8, "num_key_value_heads": 8,
        "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False,
    }  # fmt: skip
    (folder / "model" / "config.json").write_text(json.dumps(config))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens": (vocabulary, width)}
    shapes["lm_head"] = (vocabulary, width)
    shapes["model.norm"] = (width,)
    for layer in range(layers):
        at = f"model.layers.{layer}"
        shapes |= {f"{at}.self_attn.{one}_proj": (width, width) for one in "qkvo"}
        shapes |= {f"{at}.mlp.{one}_proj": (inner, width) for one in ("gate", "up")}
        shapes |= {f"{at}.mlp.down_proj": (width, inner), f"{at}.input_layernorm": (width,)}
        shapes[f"{at}.post_attention_layernorm"] = (width,)
    weights = {f"{name}.weight": torch.ones(shape).bfloat16() for name, shape in shapes.items()}
    save_file(weights, folder / "model" / "model.safetensors", {"format": "pt"})
    for name, row in {
        "sft": {"text": TEXT * 20},
        "dpo": {"prompt": TEXT, "chosen": TEXT * 5, "rejected": TEXT * 4},
        "grpo": {"prompt": [{"role": "user", "content": TEXT}]},
    }.items():
        (folder / name).mkdir(exist_ok=True)
        lines = "\n".join([json.dumps(row)] * 64)
        (folder / name / "train.jsonl").write_text(lines)


def coco(folder: Path) -> None:
    """Make images with boxes and masks, as COCO has them."""
    from PIL import Image

    (folder / "annotations").mkdir(exist_ok=True)
    kinds = [{"id": number, "name": str(number)} for number in range(1, 91)]
    for split in ("train2017", "val2017"):
        (folder / split).mkdir(exist_ok=True)
        shown: list[dict[str, Any]] = []
        boxes: list[dict[str, Any]] = []
        for number in range(24):
            name = f"{number:012}.jpg"
            Image.new("RGB", (640, 480), (number, 30, 200)).save(folder / split / name)
            shown.append({"id": number, "file_name": name, "width": 640, "height": 480})
            for x in (20, 220, 420):
                corners = [x, 60, x + 150, 60, x + 150, 260, x, 260]
                at = {"bbox": [x, 60, 150, 200], "area": 30000, "segmentation": [corners]}
                ids = {"id": len(boxes) + 1, "image_id": number, "category_id": 1 + x % 9}
                boxes.append(at | ids | {"iscrowd": 0})
        made = {"images": shown, "annotations": boxes, "categories": kinds}
        (folder / "annotations" / f"instances_{split}.json").write_text(json.dumps(made))


def lessons(folder: Path) -> None:
    """Make a Llama's folder, text files, and labelled sentences with BERT's configuration."""
    language(folder)
    (folder / "text").mkdir(exist_ok=True)
    for name in ("a", "b", "c"):
        (folder / "text" / f"{name}.txt").write_text("\n".join([TEXT * 20] * 400))
    rows = [f"{TEXT},{TEXT * 2},{number % 2}" for number in range(512)]
    for name in ("train", "validation"):
        (folder / f"{name}.csv").write_text("\n".join(["sentence1,sentence2,label", *rows]))
    _bert(folder / "bert")


METRIC = """
import datasets
import evaluate

class Accuracy(evaluate.Metric):
    def _info(self):
        names = ("predictions", "references")
        kinds = datasets.Features({one: datasets.Value("int32") for one in names})
        return evaluate.MetricInfo(description="", citation="", features=kinds)

    def _compute(self, predictions, references):
        return {"accuracy": sum(a == b for a, b in zip(predictions, references)) / len(references)}
"""


def graded(folder: Path) -> None:
    """Make what `lessons` makes, and the metric that the script would ask the hub for."""
    Path("accuracy").mkdir(exist_ok=True)
    Path("accuracy/accuracy.py").write_text(METRIC)
    if not (folder / "bert").exists():
        lessons(folder)


def _bert(folder: Path) -> None:
    """Make BERT base, with a vocabulary of a few words, and weights of its initialization."""
    if folder.exists():
        return
    from transformers import BertConfig, BertModel

    BertModel(BertConfig()).save_pretrained(folder)
    named = {"tokenizer_class": "BertTokenizer", "do_lower_case": True, "model_max_length": 512}
    (folder / "tokenizer_config.json").write_text(json.dumps(named))
    marks = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    (folder / "vocab.txt").write_text("\n".join([*marks, *dict.fromkeys(TEXT.split())]))


def pairs(folder: Path) -> None:
    """Make the pairs of sentences that sentence-transformers' scripts ask the hub for."""
    made = Path("sentence-transformers/stsb")
    made.mkdir(parents=True, exist_ok=True)
    row = {"sentence1": TEXT, "sentence2": TEXT * 2, "score": 0.5}
    for split in ("train", "validation", "test"):
        (made / f"{split}.jsonl").write_text("\n".join([json.dumps(row)] * 512))
    _bert(folder / "bert")


def wiki(folder: Path) -> None:
    """Make the text that Lightning's language model reads from its own folder."""
    (folder / "made").touch()
    Path("data").mkdir(exist_ok=True)
    Path("data/wikitext-2.txt").write_text((TEXT + "\n") * 20000)


def zero(folder: Path) -> None:
    """Make DeepSpeed's settings: ZeRO 3, with torch's Adam, because nvcc must compile its own."""
    adam = {"type": "AdamW", "params": {"lr": 1e-4, "torch_adam": True}}
    settings: dict[str, Any] = {"train_micro_batch_size_per_gpu": 4, "optimizer": adam}
    settings |= {"bf16": {"enabled": True}, "zero_optimization": {"stage": 3}}
    (folder / "zero3.json").write_text(json.dumps(settings))


def titan(folder: Path) -> None:
    """Make torchtitan's test data, which its repository has as one large file."""
    (folder / "made").touch()
    made = Path("tests/assets/c4_test")
    made.mkdir(parents=True, exist_ok=True)
    (made / "data.json").write_text("\n".join([json.dumps({"text": TEXT * 50})] * 2000))


def sentences(folder: Path) -> None:
    """Make torchtune's settings for the Llama of `language`."""
    import sentencepiece

    language(folder)
    model = {"vocab_size": 32000, "num_layers": 8, "num_heads": 8, "num_kv_heads": 8}
    model |= {"embed_dim": 512, "intermediate_dim": 1376, "max_seq_len": 2048}
    text = folder / "sft" / "text.txt"
    text.write_text((TEXT + "\n") * 100)
    sentencepiece.SentencePieceTrainer.train(
        input=str(text), model_prefix=str(folder / "words"), vocab_size=40, hard_vocab_limit=False
    )
    named = {"_component_": "torchtune.models.llama2.llama2_tokenizer"}
    named |= {"path": f"{folder}/words.model"}
    data = {"_component_": "torchtune.datasets.text_completion_dataset", "source": "json"}
    saved: dict[str, Any] = {"_component_": "torchtune.training.FullModelHFCheckpointer"}
    saved |= {"checkpoint_dir": f"{folder}/model", "checkpoint_files": ["model.safetensors"]}
    saved |= {"output_dir": f"{folder}/out", "model_type": "LLAMA3"}
    logs = {"_component_": "torchtune.training.metric_logging.DiskLogger", "log_dir": f"{folder}"}
    settings: dict[str, Any] = {
        "output_dir": f"{folder}/out",
        "model": model | {"_component_": "torchtune.models.llama3.llama3"},
        "tokenizer": named,
        "dataset": data | {"data_files": f"{folder}/sft/train.jsonl", "packed": False},
        "seed": 1, "shuffle": True, "checkpointer": saved, "resume_from_checkpoint": False,
        "batch_size": 4, "epochs": 1, "max_steps_per_epoch": None, "clip_grad_norm": None,
        "gradient_accumulation_steps": 1, "optimizer_in_bwd": False, "compile": False,
        "optimizer": {"_component_": "torch.optim.AdamW", "lr": 2e-5},
        "loss": {"_component_": "torchtune.modules.loss.LinearCrossEntropyLoss"},
        "device": "cuda", "dtype": "bf16", "enable_activation_checkpointing": True,
        "enable_activation_offloading": False, "metric_logger": logs, "log_every_n_steps": 1,
        "log_peak_memory_stats": True, "log_level": "INFO",
    }  # fmt: skip
    (folder / "full.yaml").write_text(json.dumps(settings))


def painter(folder: Path) -> None:
    """Make Stable Diffusion 1.5's parts from their configurations, and captioned images."""
    import torch
    from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
    from PIL import Image
    from transformers import CLIPTextConfig, CLIPTextModel

    model = folder / "model"
    with torch.device("meta"):
        unet = UNet2DConditionModel(
            sample_size=64, cross_attention_dim=768, attention_head_dim=8,
        )  # fmt: skip
        vae = AutoencoderKL(
            block_out_channels=(128, 256, 512, 512), layers_per_block=2, sample_size=512,
            down_block_types=("DownEncoderBlock2D",) * 4, up_block_types=("UpDecoderBlock2D",) * 4,
        )  # fmt: skip
    for name, part in {"unet": unet, "vae": vae}.items():
        part.to_empty(device="cpu").bfloat16().save_pretrained(model / name)
    words = CLIPTextConfig(
        vocab_size=49408, hidden_size=768, intermediate_size=3072, num_attention_heads=12,
        projection_dim=768,
    )  # fmt: skip
    CLIPTextModel(words).save_pretrained(model / "text_encoder")
    DDPMScheduler(num_train_timesteps=1000).save_pretrained(model / "scheduler")
    (model / "tokenizer").mkdir(exist_ok=True)
    marks = ["<|startoftext|>", "<|endoftext|>"]
    letters = sorted(set(TEXT.replace(" ", "")))
    vocabulary = [*letters, *(f"{one}</w>" for one in letters), *marks]
    numbered = {word: index for index, word in enumerate(vocabulary)}
    (model / "tokenizer" / "vocab.json").write_text(json.dumps(numbered))
    (model / "tokenizer" / "merges.txt").write_text("#version: 0.2\n")
    named = {"tokenizer_class": "CLIPTokenizer", "model_max_length": 77, "pad_token": marks[1]}
    (model / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(named))
    (folder / "train").mkdir(exist_ok=True)
    lines = []
    for number in range(32):
        Image.new("RGB", (512, 512), (number, 30, 200)).save(folder / "train" / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": TEXT}))
    (folder / "train" / "metadata.jsonl").write_text("\n".join(lines))
