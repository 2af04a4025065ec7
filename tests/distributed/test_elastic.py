"""torchrun with a number of nodes that changes: killed nodes, killed workers, nodes that join."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from tests.scale import reference

ROOT = Path(__file__).parents[2]
EVENTS = int(os.environ.get("STRETTO_ELASTIC_EVENTS", "4"))
MOST_SECONDS = 60.0 * EVENTS
CLOSE = 1e-12


class Cluster:
    """Agents of torchrun on this machine; the first one hosts the rendezvous."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.nodes: dict[int, subprocess.Popen[bytes]] = {}
        self.started = 0

    def add(self) -> None:
        conf = f"is_host={str(not self.started).lower()},join_timeout=600,last_call_timeout=2"
        conf += ",keep_alive_interval=1,keep_alive_max_attempt=3"
        command = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:3"]
        command += ["--nproc-per-node=1", "--max-restarts=50", "--rdzv-backend=c10d"]
        command += [f"--rdzv-endpoint=127.0.0.1:{self.port}", "--rdzv-id=job"]
        command += [f"--rdzv-conf={conf}", "--monitor-interval=0.2"]
        script = str(Path(__file__).with_name("elastic_run.py"))
        with (self.folder / f"node{self.started}.log").open("w") as log:
            self.nodes[self.started] = subprocess.Popen(
                [*command, script, str(self.folder), "0.05", "160sp"],
                stdout=log,
                stderr=log,
                start_new_session=True,
                env={
                    **os.environ,
                    "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
                    "OMP_NUM_THREADS": "1",
                    "PYTHONWARNINGS": "ignore",
                },
            )
        self.started += 1

    def kill_worker(self, node: int) -> None:
        agent = self.nodes[node].pid
        with suppress(OSError):
            children = Path(f"/proc/{agent}/task/{agent}/children").read_text().split()
            for child in children:
                with suppress(ProcessLookupError):
                    os.kill(int(child), signal.SIGKILL)

    def kill(self, node: int) -> None:
        self.kill_worker(node)
        self.nodes[node].kill()
        self.nodes.pop(node).wait()

    @property
    def is_done(self) -> bool:
        return self.nodes[0].poll() is not None

    def wait_for_batches(self, count: int, end: float) -> None:
        before = self.batches()
        while not self.is_done and self.batches() < before + count and time.monotonic() < end:
            time.sleep(0.2)

    def batches(self) -> int:
        return sum(file.read_text().count("\n") for file in self.folder.glob("trace-*"))


@pytest.mark.slow
@pytest.mark.distributed
@pytest.mark.timeout(MOST_SECONDS + 300)
def test_nodes_that_die_and_join_do_not_change_the_result(tmp_path: Path) -> None:
    chance, cluster = random.Random(3), Cluster(tmp_path)
    happened: list[str] = []
    for _ in range(2):
        cluster.add()
    end = time.monotonic() + MOST_SECONDS
    try:
        while len(happened) < EVENTS and not cluster.is_done and time.monotonic() < end:
            cluster.wait_for_batches(6, end)
            alive = [node for node, agent in cluster.nodes.items() if agent.poll() is None]
            others = [node for node in alive if node]  # without the first, there is no rendezvous
            event = chance.choice(["node", "worker", "join"])
            if event == "node" and others:
                cluster.kill(chance.choice(others))
            elif event == "worker":
                cluster.kill_worker(chance.choice(alive))
            elif event == "join" and len(alive) < 3:
                cluster.add()
            else:
                continue
            happened.append(event)
        assert cluster.nodes[0].wait(timeout=250) == 0
    finally:
        for node in list(cluster.nodes):
            cluster.kill(node)
    print(happened, (tmp_path / "began").read_text().splitlines())
    assert len(happened) >= 2
    assert float((torch.load(tmp_path / "weights.pt") - reference()).abs().max()) < CLOSE
