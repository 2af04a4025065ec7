"""Lets torchvision, which Composer imports, be imported beside a torch for the CPU.

It registers shapes for operators of its compiled half, which is built for CUDA and does not load
here. Nothing calls them.
"""

from __future__ import annotations

import torch

LIBRARY = torch.library.Library("torchvision", "FRAGMENT")
for name in ("nms", "qnms"):
    if not hasattr(torch.ops.torchvision, name):
        LIBRARY.define(f"{name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
