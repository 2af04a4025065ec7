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
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from public_data import (
    coco,
    graded,
    images,
    kinds,
    language,
    lessons,
    painter,
    pairs,
    sentences,
    text,
    titan,
    tokens,
    wiki,
    zero,
)

RESULTS = Path(__file__).resolve().parent / "results" / "public_scripts.json"


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
    variables: Mapping[str, str] = {}


SECONDS = 60
HERE = ("tokens", "text", "graded", "pairs", "wiki", "titan")
"""What is made in the folder of the script itself."""
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
        "--no-gradient-accumulation-fusion --eval-iters 0 --eval-interval 10",
        "fc61ce5a", options="--ranks 8 --every-stage",
        variables={"CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    ),
    Script(
        "torchvision: classification, ResNet-50", "vision", "references/classification",
        "train.py --data-path {data} --model resnet50 -b 32 -j 0 --epochs 1 --output-dir {data}",
        "acccf864", kinds,
    ),
    Script(
        "torchvision: detection, Faster R-CNN", "vision", "references/detection",
        "train.py --data-path {data} --model fasterrcnn_resnet50_fpn -j 0 -b 2 --epochs 1 "
        "--output-dir {data}",
        "acccf864", coco,
    ),
    Script(
        "torchvision: segmentation, FCN", "vision", "references/segmentation",
        "train.py --data-path {data} --dataset coco --model fcn_resnet50 -j 0 -b 4 --epochs 1 "
        "--output-dir {data}",
        "acccf864", coco,
    ),
    Script(
        "transformers: run_clm.py", "transformers", "examples/pytorch/language-modeling",
        "run_clm.py --config_name {data}/model --tokenizer_name {data}/model --train_file "
        "{data}/text/a.txt --do_train --block_size 512 --output_dir {data}/out --bf16",
        "5a67f0a7ac", lessons,
    ),
    Script(
        "transformers: run_mlm.py", "transformers", "examples/pytorch/language-modeling",
        "run_mlm.py --model_name_or_path {data}/bert --train_file {data}/text/a.txt --do_train "
        "--max_seq_length 256 --output_dir {data}/out",
        "5a67f0a7ac", lessons,
    ),
    Script(
        "transformers: run_glue.py", "transformers", "examples/pytorch/text-classification",
        "run_glue.py --model_name_or_path {data}/bert --train_file {data}/train.csv "
        "--validation_file {data}/validation.csv --do_train --output_dir {data}/out",
        "5a67f0a7ac", graded,
    ),
    Script(
        "sentence-transformers: STS", "sentence-transformers",
        "examples/sentence_transformer/training/sts", "training_stsbenchmark.py {data}/bert",
        "85ec6455", pairs, path=".",
    ),
    Script(
        "Lightning: FSDP2 and TP, 4 ranks", "lightning", "examples/pytorch/tensor_parallel",
        "train.py", "7f0c3436cd", options="--ranks 4",
    ),
    Script(
        "Lightning: language model", "lightning", "examples/pytorch/basics", "transformer.py",
        "7f0c3436cd", wiki,
    ),
    Script(
        "DeepSpeed: ZeRO 3 by its launcher", "DeepSpeedExamples", "training/bf16_master_weight",
        "-m deepspeed.launcher.runner --num_gpus 2 train.py --deepspeed_config {data}/zero3.json",
        "45b4b715", zero, options="--ranks 2",
    ),
    Script(
        "torchtune: full_finetune_single_device", "torchtune", "recipes",
        "full_finetune_single_device.py --config {data}/full.yaml", "bd2a0fc7c", sentences,
        path=".",
    ),
    Script(
        "litgpt: pretrain pythia-160m", "litgpt", ".",
        "-m litgpt pretrain --model_name pythia-160m --tokenizer_dir {data}/model --data TextFiles "
        "--data.train_data_path {data}/text --data.num_workers 0 --train.micro_batch_size 4 "
        "--train.global_batch_size 8 --out_dir {data}/out --precision bf16-true",
        "26857050", lessons, path=".",
    ),
    Script(
        "torchtitan: debug model, 8 ranks", "torchtitan", ".",
        "-m torchtitan.train --job.config_file "
        "torchtitan/models/llama3/train_configs/debug_model.toml",
        "e7c0cae", titan, options="--ranks 8", path=".",
    ),
    Script(
        "diffusers: train_text_to_image.py, SD 1.5", "diffusers", "examples/text_to_image",
        "train_text_to_image.py --pretrained_model_name_or_path {data}/model --train_data_dir "
        "{data}/train --resolution 512 --train_batch_size 4 --output_dir {data}/out "
        "--mixed_precision bf16 --gradient_checkpointing",
        "58eb52c0", painter, path="src",
    ),
)  # fmt: skip


def run(script: Script, source: Path, data: Path) -> dict[str, object]:
    """Run a script, and return its row."""
    root = source / script.project
    os.chdir(root / script.folder)
    made = data / script.make.__name__
    if not made.exists() or script.make.__name__ in HERE:
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
        env={**os.environ, "PYTHONPATH": ":".join(filter(None, paths)), "WANDB_MODE": "disabled",
             **script.variables},
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    row: dict[str, object] = {"commit": script.commit, "command": script.command}
    row |= {"options": script.options, "cpu_seconds": round(seconds, 1)}
    row |= {"variables": dict(script.variables)} if script.variables else {}
    if not out.exists():
        return row | {"status": "no report", "problem": (done.stderr or done.stdout)[-600:]}
    report = json.loads(out.read_text())
    names = ("status", "peak_allocated", "peak_reserved", "rank", "stages", "problem", "torch")
    row |= {name: report[name] for name in names}
    return row | {"unknown": len(report["unknown"])}


def summary(rows: dict[str, dict[str, Any]]) -> str:
    """Return the sentence that the docs have."""
    reported = [row for row in rows.values() if row["status"] in ("fits", "does not fit")]
    quick = sum(row["cpu_seconds"] < SECONDS for row in reported)
    count = (
        f"Of {len(rows)} public training scripts, unmodified but for data, {len(reported)} report"
    )
    return f"{count}, {quick} of them in under {SECONDS} CPU seconds"


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
        row = run(script, asked.source.resolve(), asked.data.resolve())
        rows = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        rows[script.name] = row
        RESULTS.write_text(json.dumps(rows, indent=1) + "\n")
        print(script.name, {k: v for k, v in row.items() if k != "command"}, flush=True)


if __name__ == "__main__":
    main()
