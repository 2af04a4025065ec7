"""Public training scripts, unmodified but for data, on a GPU that is not there.

    python bench/public_scripts.py --source FOLDER [NAME...]

FOLDER has a checkout of each project under its name (`nanoGPT`, `examples`, ...). Their packages
are those of the Python that runs this; add folders with PYTHONPATH. Data, tokenizers and models are
made up. Results: `bench/results/public_scripts.json`, one row written after each run.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import NamedTuple

RESULTS = Path(__file__).resolve().parent / "results" / "public_scripts.json"
TEXT = "the quick brown fox jumps over the lazy dog and runs away from the cat "


class Script(NamedTuple):
    """A script of a project: `{data}` in its command is the folder of what `make` makes."""

    name: str
    project: str
    folder: str
    command: str
    """What stands behind `python`."""
    commit: str
    make: Callable[[Path], object] = lambda folder: folder
    options: str = ""
    """Of `phantomgpu run`."""
    path: str = ""
    """Folders of the project for PYTHONPATH."""


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


def images(folder: Path) -> None:
    """Make folders of images, two classes."""
    from PIL import Image

    for split in ("train", "val", "validation"):
        for label in ("cat", "dog"):
            (folder / split / label).mkdir(parents=True, exist_ok=True)
            for number in range(96):
                image = Image.new("RGB", (256, 256), (number, 30, 200))
                image.save(folder / split / label / f"{number}.jpg")


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


TRL = "--model_name_or_path {data}/model --output_dir {data}/out --report_to none"
SCRIPTS = (
    Script(
        "nanoGPT, eager", "nanoGPT", ".", "train.py --dataset=made --eval_iters=20 --compile=False",
        "3adf61e1", tokens,
    ),
    Script(
        "nanoGPT, compiled", "nanoGPT", ".", "train.py --dataset=made --eval_iters=20", "3adf61e1",
        tokens,
    ),
    Script("minGPT adder", "minGPT", "projects/adder", "adder.py", "37baab7", path="."),
    Script("minGPT chargpt", "minGPT", "projects/chargpt", "chargpt.py", "37baab7", text, path="."),
    Script(
        "examples: ImageNet, ResNet-50", "examples", "imagenet",
        "main.py --dummy -a resnet50 -j 0 --gpu 0", "77f55b9",
    ),
    Script(
        "examples: DCGAN", "examples", "dcgan",
        "main.py --dataset fake --accel --workers 0 --outf {data}", "77f55b9",
    ),
    Script(
        "examples: DDP by torchrun, rank 3 of 4", "examples", "distributed/ddp-tutorial-series",
        "-m torch.distributed.run --nproc-per-node 4 multigpu_torchrun.py 5 10", "77f55b9",
        options="--ranks 4 --rank 3",
    ),
    Script(
        "examples: FSDP2 by torchrun, 8 ranks", "examples", "distributed/FSDP2",
        "-m torch.distributed.run --nproc-per-node 8 example.py", "77f55b9", options="--ranks 8",
    ),
    Script(
        "examples: FSDP and TP by torchrun, 64 ranks", "examples", "distributed/tensor_parallelism",
        "fsdp_tp_example.py", "77f55b9", options="--ranks 64",
    ),
    Script(
        "timm: ResNet-50", "pytorch-image-models", ".",
        "train.py --data-dir {data} --model resnet50 -b 32 -j 1 --num-classes 2 --output {data}",
        "aa4b5850", images,
    ),
    Script(
        "timm: ViT-B/16, AMP", "pytorch-image-models", ".",
        "train.py --data-dir {data} --model vit_base_patch16_224 -b 32 -j 1 --num-classes 2 --amp "
        "--amp-dtype bfloat16 --opt adamw --output {data}",
        "aa4b5850", images,
    ),
    Script(
        "diffusers: unconditional", "diffusers", "examples/unconditional_image_generation",
        "train_unconditional.py --train_data_dir {data}/train --resolution 64 "
        "--train_batch_size 16 --output_dir {data}/out --mixed_precision no",
        "58eb52c0", images, path="src",
    ),
    Script(
        "TRL: sft.py", "trl", "trl/scripts", f"sft.py --dataset_name {{data}}/sft {TRL}",
        "f2cd5771", language, path=".",
    ),
    Script(
        "TRL: dpo.py", "trl", "trl/scripts", f"dpo.py --dataset_name {{data}}/dpo {TRL}",
        "f2cd5771", language, path=".",
    ),
    Script(
        "TRL: grpo.py", "trl", "trl/scripts",
        f"grpo.py --dataset_name {{data}}/grpo {TRL} --reward_funcs think_format_reward "
        "--max_completion_length 32",
        "f2cd5771", language, path=".",
    ),
    Script(
        "open_clip: ViT-B-32", "open_clip", "src",
        "-m open_clip_train.main --dataset-type synthetic --train-num-samples 1024 --batch-size 64 "
        "--model ViT-B-32 --workers 0 --logs {data}",
        "89fb801", path="src",
    ),
    Script(
        "Megatron-LM: pretrain_gpt.py, TP 2, PP 2, 8 ranks", "Megatron-LM", ".",
        "pretrain_gpt.py --mock-data --tokenizer-type NullTokenizer --vocab-size 32000 "
        "--num-layers 8 --hidden-size 1024 --num-attention-heads 16 --seq-length 1024 "
        "--max-position-embeddings 1024 --micro-batch-size 2 --global-batch-size 16 --lr 1e-4 "
        "--train-iters 10 --bf16 --transformer-impl local --tensor-model-parallel-size 2 "
        "--pipeline-model-parallel-size 2 --no-masked-softmax-fusion --no-persist-layer-norm "
        "--no-gradient-accumulation-fusion --eval-iters 0",
        "d98e8a64", options="--ranks 8 --every-stage",
    ),
)  # fmt: skip


def run(script: Script, source: Path, data: Path) -> dict[str, object]:
    """Run a script, and return its row."""
    root = source / script.project
    os.chdir(root / script.folder)
    made = data / script.make.__name__
    if not made.exists() or script.make.__name__ in ("tokens", "text"):
        made.mkdir(parents=True, exist_ok=True)
        script.make(made)
    paths = [str(root / one) for one in script.path.split()] + [os.environ.get("PYTHONPATH", "")]
    command = script.command.format(data=made).split()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    out = data / "report.json"
    out.unlink(missing_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "phantomgpu", "run", "--gpu", "h100", "--quiet", "--timeout", "900",
         "--json", str(out), *script.options.split(), "--", sys.executable, *command],
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "WANDB_MODE": "disabled"},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row: dict[str, object] = {"commit": script.commit, "command": script.command}
    row |= {"options": script.options, "cpu_seconds": round(seconds, 1)}
    if not out.exists():
        return row | {"status": "no report", "problem": (done.stderr or done.stdout)[-600:]}
    report = json.loads(out.read_text())
    names = ("status", "peak_allocated", "peak_reserved", "rank", "stages", "problem", "torch")
    row |= {name: report[name] for name in names}
    return row | {"unknown": len(report["unknown"])}


def main(arguments: Iterable[str] | None = None) -> None:
    """Run the scripts that are named, or all."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--source", type=Path, required=True, help="a checkout of each project")
    parser.add_argument("--data", type=Path, default=Path("/tmp/public_scripts"))  # noqa: S108
    parser.add_argument("names", nargs="*", help="parts of names")
    asked = parser.parse_args(arguments)
    for script in SCRIPTS:
        if asked.names and not any(name in script.name for name in asked.names):
            continue
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        rows[script.name] = run(script, asked.source.resolve(), asked.data.resolve())
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        print(
            script.name, {k: v for k, v in rows[script.name].items() if k != "command"}, flush=True
        )


if __name__ == "__main__":
    main()
