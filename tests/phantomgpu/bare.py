"""Run a script on a phantom without what `phantomgpu run` adds: no history, no report.

`python bare.py TORCH STEPS SCRIPT ARGUMENTS...` prints the peaks that torch itself counted after so
many optimizer steps. TORCH is the folder of the CUDA build.
"""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

from phantomgpu import standins

folder, steps, script, *arguments = sys.argv[1:]
sys.path.insert(0, str(Path(folder).parent))
library = standins.build(Path(folder))
os.environ["TRITON_LIBCUDA_PATH"] = str(library)
device = standins.load(library)

import torch  # noqa: E402
from torch.optim import optimizer  # noqa: E402

from phantomgpu import values  # noqa: E402

values.start(device, [])
torch.backends.cudnn.enabled = False
torch.backends.cuda.enable_cudnn_sdp(enabled=False)
done = 0


def count(*_: object) -> None:
    global done  # noqa: PLW0603
    done += 1
    if done == int(steps):
        print(f"peaks {torch.cuda.max_memory_allocated()} {torch.cuda.max_memory_reserved()}")
        sys.stdout.flush()
        os._exit(0)


optimizer.register_optimizer_step_post_hook(count)
sys.argv = [script, *arguments]
runpy.run_path(script, run_name="__main__")
