"""Puts uPlot, which the run page draws with, into every build and every editable install."""

import runpy
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class TakeUPlot(BuildHookInterface):  # type: ignore[type-arg]
    """Take uPlot from npm before the files of a build are listed."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:  # noqa: ARG002
        """Take the files; without npm, install everything but them and say so."""
        script = Path(self.root) / "tools" / "vendor_uplot.py"
        problem = runpy.run_path(str(script))["why_not"]()
        if problem:
            self.app.display_warning(f"the run page will not work: {problem}; then run make page")
