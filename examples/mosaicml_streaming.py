"""Train on MosaicML's MDS shards: stretto orders and resumes, `streaming` fetches samples."""

from __future__ import annotations

from typing import Any

from streaming import StreamingDataset
from torch.utils.data import Dataset


class ByIndex(Dataset[Any]):
    """A folder of MDS shards as a map-style data set; a sample is read when it is asked for."""

    def __init__(self, **where: Any) -> None:
        self.shards = StreamingDataset(batch_size=1, shuffle=False, **where)

    def __len__(self) -> int:
        return int(self.shards.num_samples)

    def __getitem__(self, index: int) -> Any:
        return self.shards[int(index)]
