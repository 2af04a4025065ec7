"""Two ranks with a device each, gloo between them; the second runs out of memory."""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from tests.accelerator import is_phantom, warm_up
from tests.training.numbered import ROOM, NumberedRun
from torch import nn

folder = Path(sys.argv[1])
where: Any = sys.argv[2]


class WithoutValues(nn.parallel.DistributedDataParallel):
    """Does not read from the device which parameters are in which bucket."""

    def __init__(self, module: nn.Module, **settings: Any) -> None:
        super().__init__(module, find_unused_parameters=True, **settings)


if is_phantom():
    distributed: Any = torch.nn.parallel.distributed
    distributed._verify_param_shape_across_processes = lambda *_, **__: None
    nn.parallel.DistributedDataParallel = WithoutValues  # type: ignore[assignment,misc]

warnings.simplefilter("ignore")
dist.init_process_group("gloo")
torch.cuda.set_device(dist.get_rank())
warm_up()
run = NumberedRun(where, rooms={2: ROOM} if dist.get_rank() else {})
run.trainer.fit()
result = {
    "device": str(run.trainer._ranks.device),
    "passes": run.passes,
    "splits": run.splits,
    "sample": run.trainer.timer.sample,
}
(folder / f"{dist.get_rank()}.json").write_text(json.dumps(result))
