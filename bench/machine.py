"""What machine a benchmark ran on."""

from __future__ import annotations

import platform
from pathlib import Path


def processor() -> str:
    """Return the name of the processor, as far as the system tells it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    names = [line.partition(":")[2].strip() for line in text.splitlines() if "model name" in line]
    return names[0] if names else platform.processor()
