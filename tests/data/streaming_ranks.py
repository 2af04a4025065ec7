"""MosaicML's StreamingDataset, iterated on several ranks: `torchrun streaming_ranks.py FOLDER`."""

from __future__ import annotations

import importlib
import json
import os
import sys
import warnings
from itertools import chain
from pathlib import Path

import torch.distributed as dist

from stretto import DataSpec, StepLoader
from stretto.errors import DataError

if __name__ == "__main__":
    warnings.simplefilter("ignore")
    folder = Path(sys.argv[1])
    sys.path.insert(0, str(Path(__file__).parents[2]))
    importlib.import_module("tests.integrations.torchvision_operators")
    streaming = importlib.import_module("streaming")
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    importlib.import_module("streaming.base.util").clean_stale_shared_memory()  # ranks meet there
    data = streaming.StreamingDataset(local=str(folder / "mds"), batch_size=4, shuffle=False)
    found: dict[str, object] = {}
    for how, spec in (("plain", data), ("sharded", DataSpec(data, sharded=True))):
        own: list[int] = []
        try:
            for step in StepLoader(spec, 8, max_duration="1ep", rank=rank, world_size=ranks):
                own += [i for micro in step if micro.weight for i in micro.batch["id"].tolist()]
            everyone: list[list[int]] = [[]] * ranks
            dist.all_gather_object(everyone, own)
            found[how] = sorted(chain(*everyone))
        except DataError as error:
            found[how] = str(error)
    (folder / f"found{os.environ['RANK']}.json").write_text(json.dumps(found))
    dist.destroy_process_group()
