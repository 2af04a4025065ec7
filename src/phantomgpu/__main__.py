"""Run `python -m phantomgpu`."""

from phantomgpu.cli import main

main()
