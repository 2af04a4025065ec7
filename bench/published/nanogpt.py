"""Records of modded-nanogpt: their logs hold the script and the peak of memory of 8 H100."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np

from published.rows import Family, Row, source

MIB = 1 << 20
FOLDER = "records/track_1_short"
MODULES = Path(__file__).parent / "nanogpt_modules"
RULE = re.compile(r"^={100}\n", re.MULTILINE)
PEAK = re.compile(
    r"^peak(?: memory (?:allocated|consumption)|_vram_mb): +([\d.]+)(?: MiB)?"
    r"(?: reserved: (\d+) MiB)?$",
    re.MULTILINE,
)
SECONDS = 3000
WITHOUT_CHECKS = {"TORCHINDUCTOR_SIZE_ASSERTS": "0"}
"""Newer torch refuses the fake kernel of the first records' FP8 matmul: its strides are wrong."""
BEGINS = 50256
"""The token that begins a document."""


class Edit(NamedTuple):
    """A change of a script: what a regular expression matches, and what stands there instead."""

    text: str
    """What it does, for the page."""
    pattern: str
    into: str


EDITS = {
    "steps": Edit(
        "the first four steps and the last one, for its validation",
        r"^for step in range\((train_steps|args\.num_iterations) \+ 1\):",
        r"for step in (0, 1, 2, 3, \1):",
    ),
    "warm-up": Edit(
        "6 steps of warm-up for 30",
        r"^warmup_steps = 30$",
        "warmup_steps = 6",
    ),
    "windows": Edit(
        "one length of the attention windows in training: it changes no size",
        r"^( +ws_schedule: tuple = )\(3, 7, 11\)",
        r"\1(11, 11, 11)",
    ),
    "last windows": Edit(
        "and the same in validation",
        r"^( +ws_(?:validate|final|long)\w*: int = )\d+",
        r"\g<1>11",
    ),
    "batch 96": Edit("batches of 96 rows", r"^DEVICE_BATCH_SIZE = 128", "DEVICE_BATCH_SIZE = 96"),
    "393,216 tokens": Edit(
        "and steps of 393,216 tokens", r"^TOTAL_BATCH_SIZE = 2\*\*19", "TOTAL_BATCH_SIZE = 393_216"
    ),
    "eager step": Edit(
        "Adam's step not compiled: it breaks in a loop, so it ran eagerly; torch 2.13 refuses it",
        r"^    @torch\.compile\n(?=    @torch\.no_grad\(\)\n    def step\()",
        "",
    ),
    "streams": Edit(
        "tensors of collectives marked as used on NCCL's stream, which torch 2.7 did itself",
        r"^import torch\.distributed as dist$",
        r"\g<0>\nimport record_streams",
    ),
    "segments": Edit(
        "segments that do not expand: builds of then did not read `PYTORCH_ALLOC_CONF` "
        "(pytorch issue 183387)",
        r'^os\.environ\["PYTORCH_ALLOC_CONF"\] = "expandable_segments:True"$',
        "",
    ),
    "tuning": Edit(
        "Inductor's coordinate descent tuning off",
        r"^((?:torch\._inductor\.)?config)\.coordinate_descent_tuning = True",
        r"\1.coordinate_descent_tuning = False",
    ),
}


def script_of(log: str) -> str:
    """Return the script that a log begins with.

    Raises:
        ValueError: It holds none.
    """
    parts = RULE.split(log)
    script = next((part for part in parts if part.strip()), "")
    if len(parts) < 2 or "import torch" not in script:
        raise ValueError("cannot read the log: it does not begin with a script")
    return script


def peak_of(log: str) -> dict[str, float]:
    """Return the peak of memory that a log ends with, in bytes.

    Raises:
        ValueError: It has none.
    """
    found = PEAK.findall(log)
    if not found:
        raise ValueError("cannot read the log: no line 'peak memory allocated: ... MiB'")
    return {
        what: float(size) * MIB
        for what, size in zip(("allocated", "reserved"), found[-1], strict=True)
        if size
    }


def edited(script: str, names: list[str]) -> str:
    """Return a script with some of `EDITS`.

    Raises:
        ValueError: One of them matches nothing.
    """
    for name in names:
        edit = EDITS[name]
        script, count = re.subn(edit.pattern, edit.into, script, flags=re.MULTILINE)
        if not count:
            raise ValueError(f"cannot change the script: {name!r} ({edit.text}) matches nothing")
    return script


def write_tokens(folder: Path, *, train: int = 20_000_000, validation: int = 10_600_000) -> None:
    """Write made-up tokens in the format of the records, in documents of about 700 tokens."""
    folder.mkdir(parents=True)
    chance = np.random.default_rng(0)
    for name, count in (("train_000001", train), ("val_000000", validation)):
        tokens = chance.integers(0, BEGINS, count, dtype=np.uint16)
        lengths = np.clip(chance.lognormal(6.0, 1.0, count // 200), 16, 60_000)
        starts = np.cumsum(lengths.astype(np.int64))
        tokens[0] = tokens[starts[starts < count]] = BEGINS
        header = np.zeros(256, dtype=np.int32)
        header[:3] = 20240520, 1, count
        (folder / f"fineweb_{name}.bin").write_bytes(header.tobytes() + tokens.tobytes())


GROUP = re.compile(r"""run_id(?:: str)? = f["'](\w+)/""")
"""The folder in `logs` of a record's log."""


def measure(row: Row) -> dict[str, float]:
    """Run the script of a record on rank 0 of 8, and read the peak that it prints.

    Raises:
        ValueError: The log is not that of the row, an edit matches nothing, or the script failed.
    """
    settings = row.settings
    if "log" in settings:
        log = (source() / FOLDER / settings["log"]).read_text("utf-8")
        if peak_of(log) != row.published:
            raise ValueError(f"the log says {peak_of(log)}, not {row.published}")
        script = script_of(log)
    else:
        script = (source() / settings["script"]).read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="nanogpt-") as name:
        ranks = settings.get("ranks", 8)
        return peak_of(_run(edited(script, settings["edits"]), Path(name), ranks))


def _run(script: str, folder: Path, ranks: int) -> str:
    """Return what a script printed and logged that ran in a folder."""
    (folder / "train_gpt.py").write_text(script, "utf-8")
    for group in ("", *GROUP.findall(script)):  # not every script makes its folder
        (folder / "logs" / group).mkdir(exist_ok=True)
    write_tokens(folder / "data/fineweb10B")
    tool = folder / "bin/nvidia-smi"
    tool.parent.mkdir()
    tool.write_text("#!/bin/sh\n")  # the scripts copy what it prints into their log
    tool.chmod(0o755)
    first = {"PYTHONPATH": str(MODULES), "PATH": str(tool.parent)}
    joined = {
        name: os.pathsep.join(filter(None, (own, os.environ.get(name))))
        for name, own in first.items()
    }
    options = ("--gpu", "h100", "--ranks", str(ranks), "--whole", "--timeout", str(SECONDS))
    ended = subprocess.run(
        [sys.executable, "-m", "phantomgpu", "run", *options, "--", sys.executable, "train_gpt.py"],
        cwd=folder,
        env={**os.environ, **WITHOUT_CHECKS, **joined, "DATA_PATH": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if ended.returncode:
        print(ended.stdout, file=sys.stderr)
        raise ValueError(f"exit code {ended.returncode}: {ended.stdout[-500:]}")
    logs = [file.read_text("utf-8") for file in sorted(folder.glob("logs/**/*.txt"))]
    return "\n".join([ended.stdout, *logs])


def row_of(line: str, edits: tuple[str, ...] = ()) -> Row:
    """Return the row of a record: its name, its log, MiB allocated and reserved."""
    name, log, *sizes = line.split()
    peaks = dict(zip(("allocated", "reserved"), sizes, strict=False))
    return Row(
        name,
        {what: float(size) * MIB for what, size in peaks.items()},
        {"log": f"{name}/{log}", "edits": ["steps", *edits]},
        KNOWN.get(name, ""),
    )


KNOWN = {
    "2025-01-13_Fp8LmHead": "-3.3 % with tensors not marked and a GPU that is never behind",
    "2025-01-16_Sub3Min": "-3.9 % with tensors not marked and a GPU that is never behind",
    "2025-07-12_BosAlign": "hangs on how far the GPU is behind: if never, -6.8 %",
    "2025-07-13_UpgradeTorch190": "hangs on how far the GPU is behind: if never, -6.3 %",
}
REPLICATED = """\
2024-12-17_SparsifyEmbeds 165384d5-5a41-4fba-9b79-8ecc372616ea.txt 31361 36734
"""
TUNED = """\
2025-01-13_Fp8LmHead c51969c2-d04c-40a7-bcea-c092c3c2d11a.txt 37620 39014
2025-01-16_Sub3Min 1d3bd93b-a69e-4118-aeb8-8184239d7566.txt 37653 39236
2025-01-26_BatchSize 0bdd5ee9-ac28-4202-bdf1-c906b102b0ec.txt 29898 44552
"""
MARKED = """\
2025-02-01_RuleTweak eff63a8c-2f7e-4fc5-97ce-7f600dae0bc7.txt 30724 45952
"""
FLEX = """\
2025-05-24_StableTorch 89d9f224-3b01-4581-966e-358d692335e0.txt 30724 45392
2025-05-25_EvenFasterReduce 6ae86d05-5cb2-4e40-a512-63246fd08e45.txt 30724 46472
2025-05-24_FasterReduce 23f40b75-06fb-4c3f-87a8-743524769a35.txt 31481 46892
2025-05-25_MuonWithAuxAdamExample b01550f9-03d8-4a9c-86fe-4ab434f1c5e0.txt 31330 46752
2025-05-30_noallreduce 8054c239-3a18-499e-b0c8-dbd27cb4b3ab.txt 29784 40536
"""
EAGER = """\
2025-07-12_BosAlign 0c5449cc-0b01-4ecc-bec3-f46a09741d60.txt 33644 48552
2025-07-13_UpgradeTorch190 692f80e0-5e64-4819-97d4-0dc83b7106b9.txt 33278 48294
2025-07-18_TritonMuon record.txt 34460 48914
2025-08-23_SparseAttnGate 020630eb-2191-4ba2-9ee4-4cdc94316943.txt 34004 49660
"""
FLASH = """\
2025-09-03_FA3 44fc1276-0510-4961-92c0-730c65e5feba.txt 34217 49936
2025-09-05_SkipMLPBlocks 07e7ae76-b7d0-4481-b149-01e7d81b5ad4.txt 34489 48516
"""
YARN = """\
2025-09-10_Yarn 0ecdb695-510b-4c3b-b030-09861a162ce8.txt 32470 47536
2025-09-11_VectSigmoidBFloat16 0d0d9882-c34f-4d82-b961-a17d5659c988.txt 32002 46934
2025-09-15_AsyncDataLoadAttnFinalWindow 25db37c7-2bab-4ef4-ae63-d593590ef823.txt 32002 46316
2025-09-18_Smear 18a1e5c7-947e-479d-bc3a-a57a61a98fc9.txt 32074 47316
2025-09-21_DropAttn 01fc4a96-f2a0-47a1-8a6a-c7d10bac99fe.txt 31255 46334
2025-09-23_MuonCustomSizing b067b4ac-72a6-4436-a6f8-ea51c1efeef3.txt 30760 45914
2025-09-27_BF16CE 08c0770f-17fc-44cd-971d-734a7a28a3e3.txt 30760 45934
2025-09-29_PolarExpress 0e3f0af5-ad08-47a6-813d-0c709b50d422.txt 30760 45574
2025-09-30_CustomBatching 40b101b1-77ea-45ea-a089-1d3a647daa22.txt 29512 44036
2025-10-04_Backout 514e7581-fbd4-4338-a3e4-e556f9c958ce.txt 29226 44076
2025-10-24_NorMuon 088a77ee-9b67-475a-bbb9-3e92e4698799.txt 29226 44076
2025-10-31_AdamSyncGradientHook 0c17cdfd-772c-4906-8d11-141b370599a0.txt 29244 44256
"""
FIXED = """\
2025-10-27_FixMuonLR 14afd380-d3d9-48d7-ad23-4c13cb96754b.txt 29250 50528
2025-11-10_CautiousWD 1aac0132-a891-4ed9-b358-0fd2abd1b019.txt 29248 50528
2025-11-18_RefineSkip 00f4e1e6-0044-4a08-b88a-3b7ec0624081.txt 29250 47336
"""
AUTO = {"script": "train.py", "ranks": 1}
ROWS = (
    *(row_of(line, ("tuning",)) for line in REPLICATED.splitlines()),
    *(row_of(line, ("tuning", "streams")) for line in TUNED.splitlines()),
    *(row_of(line, ("streams",)) for line in MARKED.splitlines()),
    *(row_of(line) for line in FLEX.splitlines()),
    *(row_of(line, ("eager step",)) for line in EAGER.splitlines()),
    *(row_of(line, ("eager step", "warm-up", "windows")) for line in FLASH.splitlines()),
    *(
        row_of(line, ("eager step", "warm-up", "windows", "last windows"))
        for line in YARN.splitlines()
    ),
    *(
        row_of(line, ("eager step", "warm-up", "windows", "last windows", "segments"))
        for line in FIXED.splitlines()
    ),
    Row("autoresearch, 128 rows", {"allocated": 45060.2 * MIB}, {**AUTO, "edits": []}),
    Row(
        "autoresearch, 96 rows",
        {"allocated": 33958.2 * MIB},
        {**AUTO, "edits": ["batch 96", "393,216 tokens"]},
    ),
)

SOME = "; ".join(edit.text for name, edit in EDITS.items() if name != "steps")
TEXT = f"""\
Each log holds its script and the peaks that it printed on 8 H100 80GB, with nightly builds of
torch 2.6 to 2.10 (noallreduce: NVIDIA's 2.7). Here the script runs as rank 0 of 8
(`--gpu h100 --ranks 8 --whole`), compiled, with made-up tokens. Nothing was fitted. Give a clone
with `--source`; the record with MuonWithAuxAdam also needs `muon.py` of KellerJordan/Muon on
`PYTHONPATH`.

- Changed in all scripts: {EDITS["steps"].text}.
- Changed in some: {SOME}.
- Inductor's check of strides is off. Newer torch refuses the FP8 matmul of the first records with
  it, because the strides of its fake kernel are wrong.
- Asynchronous collectives hold tensors until the GPU has got that far. How far it is behind the
  program is assumed: 1,024 launches, and as many more until NCCL's watchdog has seen it.
- FlashAttention 3, from September 2025 on, is a stand-in that computes nothing and allocates what
  its source allocates.
"""

FAMILY = Family(
    "nanogpt",
    "Records of modded-nanogpt",
    "https://github.com/KellerJordan/modded-nanogpt/tree/master/records/track_1_short",
    TEXT,
    ROWS,
    measure,
)
