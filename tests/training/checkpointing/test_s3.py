"""Copies in S3 while the network fails: moto's server behind a proxy that injects faults."""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.scale import reference
from tests.training.checkpointing.s3_proxy import KINDS, Proxy

from stretto.checkpoint import (
    UrlStore,
    checkpoint_path,
    describe,
    read_checkpoint,
    write_checkpoint,
)
from stretto.checkpoint.folder import position_of
from stretto.errors import CheckpointError
from stretto.runtime.ranks import Ranks
from stretto.training.checkpointing.copies import Uploader, newest_copy
from stretto.training.checkpointing.resuming import find_checkpoint

WHY = "needs moto and s3fs: make test-adapters ARGS=s3"
pytest.importorskip("moto.server", reason=WHY)
pytest.importorskip("s3fs", reason=WHY)
ROOT = Path(__file__).parents[3]
KEYS = {
    "AWS_ACCESS_KEY_ID": "x",
    "AWS_SECRET_ACCESS_KEY": "x",
    "AWS_DEFAULT_REGION": "us-east-1",
    "AWS_EC2_METADATA_DISABLED": "true",
}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Server:
    """An S3 server, its proxy, and a client that sees the server itself."""

    def __init__(self, port: int) -> None:
        import boto3

        self.proxy = Proxy(port, seed=3)
        self.options = {
            "endpoint_url": f"http://127.0.0.1:{self.proxy.port}",
            "config_kwargs": {
                "connect_timeout": 3,
                "read_timeout": 5,
                "retries": {"max_attempts": 2},
            },
        }
        self.client: Any = boto3.client("s3", endpoint_url=f"http://127.0.0.1:{port}")
        self.client.create_bucket(Bucket="bucket")

    def whole(self, run: str, folder: Path) -> tuple[list[int], int]:
        """Return the positions of copies that are whole to the last byte, and how many are half."""
        found: dict[str, list[str]] = {}
        for page in self.client.get_paginator("list_objects_v2").paginate(
            Bucket="bucket", Prefix=f"{run}/"
        ):
            for one in page.get("Contents", ()):
                _, copy, file = one["Key"].split("/")
                found.setdefault(copy, []).append(file)
        whole, half = [], 0
        for copy, files in found.items():
            place = folder / "seen" / copy / copy.rpartition("-")[0]
            shutil.rmtree(place, ignore_errors=True)
            place.mkdir(parents=True)
            for file in files:
                self.client.download_file("bucket", f"{run}/{copy}/{file}", str(place / file))
            if "manifest.json" in files:
                assert describe(place).is_whole, copy  # it is never committed in part
                whole.append(position_of(copy))
            else:
                half += 1
        return sorted(whole), half

    def start(self, run: str, folder: Path, how: str) -> subprocess.Popen[str]:
        arguments = [f"s3://bucket/{run}", str(folder), str(folder) + ".pt", how]
        code = "import runpy; runpy.run_module('tests.training.checkpointing.s3_run', "
        code += "run_name='__main__')"
        return subprocess.Popen(
            [sys.executable, "-c", code, *arguments],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=ROOT,
            env={
                **os.environ,
                "PYTHONPATH": f"{ROOT}:{ROOT / 'src'}",
                "OMP_NUM_THREADS": "1",
                "FSSPEC_S3": json.dumps(self.options),
            },
        )


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    before = dict(os.environ)
    os.environ.update(KEYS)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    moto = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        for _ in range(150):
            try:
                urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=1).close()
                break
            except OSError:
                time.sleep(0.2)
        here = Server(port)
        yield here
        here.proxy.close()
    finally:
        moto.terminate()
        moto.wait()
        os.environ.clear()
        os.environ.update(before)


@pytest.fixture
def configured(server: Server) -> Iterator[Server]:
    from fsspec.config import conf

    conf["s3"] = server.options
    yield server
    server.proxy.fault(None)
    del conf["s3"]


@pytest.mark.filterwarnings("ignore")
def test_thirty_faulty_uploads_leave_nothing_half_to_resume_from(
    configured: Server, tmp_path: Path
) -> None:
    chance, proxy = random.Random(5), configured.proxy
    outcomes: Counter[str] = Counter()
    content = {"model": {"weight": torch.randn(2000, 3)}}
    for number in range(30):
        folder, run = tmp_path / str(number), f"cheap{number}"
        proxy.fault(None)
        store = UrlStore(f"s3://bucket/{run}")
        proxy.fault(chance.choice(KINDS), chance.choice([0.3, 0.6, 1.0]))
        uploader = Uploader(store, keep=1, patience=60)
        for sample in (8, 16):
            path = checkpoint_path(folder, sample)
            write_checkpoint(path, content, {"sample": sample})
            uploader.submit(path, ())
            uploader.close()
        outcomes["faults"] += proxy.hits
        proxy.fault(None)
        whole, half = configured.whole(run, tmp_path)
        outcomes["half"] += half
        if not whole:
            assert newest_copy(store, None, {}) is None
            continue
        outcomes["whole"] += 1
        with find_checkpoint(store.url, None, Ranks(torch.device("cpu"))) as found:
            assert found is not None
            assert position_of(found.name) == whole[-1]
            assert torch.equal(
                read_checkpoint(found).tensors["model"]["weight"], content["model"]["weight"]
            )
    print(dict(outcomes))
    assert outcomes["whole"]
    assert outcomes["half"]


def test_killed_in_an_upload_and_resumed_through_faults(server: Server, tmp_path: Path) -> None:
    expected, chance, proxy = reference(), random.Random(1), server.proxy
    began, killed = [], 0
    for number, at in enumerate((1, 9, 14, 23, None)):
        run, kind = f"run{number}", chance.choice(KINDS)
        first, puts = tmp_path / f"{number}a", 0
        process = server.start(run, first, "fresh")

        def kill_at(process: Any = process, at: int | None = at) -> None:
            nonlocal puts
            puts += 1
            if puts == at:
                process.kill()

        proxy.on_put = kill_at
        proxy.fault(kind, 0.3)
        text, _ = process.communicate(timeout=200)
        proxy.on_put = None
        proxy.fault(None)
        time.sleep(0.3)  # requests that are on their way
        killed += process.returncode == -signal.SIGKILL
        if at is None:
            assert process.returncode == 0, text
            assert torch.equal(torch.load(f"{first}.pt"), expected)
        whole, _ = server.whole(run, tmp_path)
        shutil.rmtree(first, ignore_errors=True)  # the disk is gone, too
        proxy.fault(chance.choice(KINDS), 0.2, ("GET", "PUT", "HEAD"))
        second = tmp_path / f"{number}b"
        process = server.start(run, second, "resume")
        text, _ = process.communicate(timeout=200)
        proxy.fault(None)
        assert process.returncode == 0, text
        began.append(json.loads(text.splitlines()[0])["began"])
        assert began[-1] == (whole[-1] if whole else 0), text
        assert torch.equal(torch.load(f"{second}.pt"), expected)
    print("killed", killed, "resumed at", began)
    assert killed
    assert any(began)


@pytest.mark.parametrize("kind", ["403", "503", "cut"])
def test_what_cannot_be_reached_is_an_error_and_not_nothing(configured: Server, kind: str) -> None:
    store = UrlStore("s3://bucket/empty")
    assert newest_copy(store, None, {}) is None
    configured.proxy.fault(kind, 1.0, ("GET", "HEAD"))
    with pytest.raises(CheckpointError):
        newest_copy(store, None, {})
    configured.proxy.fault(None)
    with pytest.raises(FileNotFoundError):
        UrlStore("s3://no-such-bucket/run").list()
