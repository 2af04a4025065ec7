"""Processes end: after their time, by a signal, and with the run that they belong to."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import asdict
from importlib import metadata
from pathlib import Path

import pytest

from phantomgpu import PhantomError, RunFailedError, SetupNeededError, child, cli, standins
from phantomgpu.child import Settings
from phantomgpu.running import Session
from phantomgpu.searching import _served

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="needs Linux")

SLEEPS = """
import os, subprocess, sys, time
from pathlib import Path
other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
Path(sys.argv[1]).write_text(f"{os.getpid()} {other.pid}")
time.sleep(60)
"""


@pytest.fixture
def sleeper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """A command that starts another process; their numbers are in a file. Temporary files: here."""
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    monkeypatch.setattr("tempfile.tempdir", None)
    script = tmp_path / "sleeps.py"
    script.write_text(SLEEPS)
    return [sys.executable, str(script), str(tmp_path / "numbers")]


def is_running(number: int) -> bool:
    try:
        state = Path(f"/proc/{number}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"


def numbers(folder: Path) -> list[int]:
    """Wait for the numbers of the processes."""
    file, end = folder / "numbers", time.monotonic() + 60
    while time.monotonic() < end:
        found = [int(one) for one in file.read_text().split()] if file.exists() else []
        if len(found) == 2:
            return found
        time.sleep(0.02)
    raise AssertionError("it did not start")


def ended(folder: Path) -> bool:
    """Return whether nothing is left, soon."""
    end = time.monotonic() + 20
    while any(map(is_running, numbers(folder))) and time.monotonic() < end:
        time.sleep(0.02)
    return not any(map(is_running, numbers(folder))) and not list((folder / "temporary").iterdir())


def test_a_run_has_a_time_limit(tmp_path: Path, sleeper: list[str]) -> None:
    with pytest.raises(RunFailedError, match="--timeout"):
        Session("h100", None, Settings()).start(sleeper, 2)
    assert ended(tmp_path)


def test_a_trial_has_a_time_limit(tmp_path: Path, sleeper: list[str]) -> None:
    session = Session("h100", None, Settings())
    with (
        pytest.raises(RunFailedError, match="the run with 8 did not end within 2 seconds"),
        _served(session, sleeper, 2) as trial,
    ):
        trial(8)
    assert ended(tmp_path)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("raise SystemExit(7)", "it failed with exit code 7 before it used CUDA"),
        ("import no_such_module", "ModuleNotFoundError"),
        ("pass", "it ended without using CUDA; choose the GPU"),
        ("import os; os.kill(os.getpid(), 9)", "SIGKILL ended it, perhaps because"),
        ("import os; os.kill(os.getpid(), 6)", "SIGABRT ended it$"),
    ],
    ids=["fails", "lacks-a-module", "cpu", "killed", "aborted"],
)
def test_why_there_is_no_report(code: str, why: str) -> None:
    command = [sys.executable, "-c", code]
    with pytest.raises(RunFailedError, match=why):
        Session("h100", None, Settings()).start(command, None)


def test_a_setup_without_torch_says_what_to_write(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def missing(name: str) -> str:
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr("importlib.metadata.version", missing)
    monkeypatch.setattr(sys, "argv", ["phantomgpu", "setup"])
    with pytest.raises(SystemExit, match="4"):
        cli.main()
    assert "add --version" in capsys.readouterr().err


CALLS = {
    "run": "Session('h100', None, Settings()).start(sys.argv[1:], None)",
    "search": (
        "served = _served(Session('h100', None, Settings()), sys.argv[1:])\n"
        "with served as trial: trial(8)"
    ),
}


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
@pytest.mark.parametrize("call", CALLS)
def test_a_signal_leaves_nothing_behind(
    call: str, number: signal.Signals, tmp_path: Path, sleeper: list[str]
) -> None:
    code = (
        "import sys\nfrom phantomgpu.child import Settings\n"
        "from phantomgpu.running import Session\nfrom phantomgpu.searching import _served\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code + CALLS[call], *sleeper], stderr=subprocess.DEVNULL
    ) as process:
        numbers(tmp_path)
        process.send_signal(number)
        code_of_it = process.wait(30)
    assert code_of_it in (128 + number, -number)
    assert ended(tmp_path)


def test_a_process_that_is_killed_takes_its_trials_with_it(
    tmp_path: Path, sleeper: list[str]
) -> None:
    """SIGKILL: the system ends what was started directly."""
    code = (
        "import sys\nfrom phantomgpu.child import Settings\n"
        "from phantomgpu.running import Session\n" + CALLS["run"]
    )
    with subprocess.Popen([sys.executable, "-c", code, *sleeper]) as process:
        first, other = numbers(tmp_path)
        process.kill()
    end = time.monotonic() + 20
    while is_running(first) and time.monotonic() < end:
        time.sleep(0.02)
    assert not is_running(first)
    os.kill(other, signal.SIGKILL)


def test_an_environment_that_was_kept_has_no_phantom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, count in ((tmp_path, 1), (tmp_path / "gone", 0)):
        finders: list[object] = []
        monkeypatch.setattr(sys, "meta_path", finders)
        monkeypatch.setenv("PHANTOMGPU_RUN", json.dumps(asdict(Settings(str(folder)))))
        child.install()
        assert len(finders) == count


def test_a_user_without_a_home_is_told_what_to_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PHANTOMGPU_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    with pytest.raises(PhantomError, match="PHANTOMGPU_CACHE"):
        standins.check_system()


def test_a_cache_that_cannot_be_written_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").touch()
    monkeypatch.setenv("PHANTOMGPU_CACHE", str(tmp_path / "lib" / "libtorch_cuda.so"))
    with pytest.raises(PhantomError, match="PHANTOMGPU_CACHE"):
        standins.build(tmp_path)


class Pip:
    """Installs files instead of packages."""

    def __init__(self, *names: str) -> None:
        self.names = names
        self.calls = 0
        self.folders: set[Path] = set()

    def __call__(self, command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        self.calls += 1
        folder = Path(command[command.index("--target") + 1])
        self.folders.add(folder)
        for name in self.names:
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            (folder / name).write_text("new")
        return subprocess.CompletedProcess(command, 0)


WHOLE = ("torch/lib/libtorch_cuda.so", "torch/version.py")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("PHANTOMGPU_CACHE", str(tmp_path))
    monkeypatch.setattr(
        cli,
        "trouble",
        lambda folder, names: None if (folder / "torch/version.py").exists() else "half of it",
    )
    return standins.setup_folder("2.13.0")


def test_half_a_torch_is_installed_again(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (cache / "torch" / "lib").mkdir(parents=True)
    (cache / "torch" / "lib" / "libtorch_cuda.so").write_text("half")
    pip = Pip(*WHOLE)
    monkeypatch.setattr("subprocess.run", pip)
    cli.setup("2.13.0")
    assert (cache / "torch" / "lib" / "libtorch_cuda.so").read_text() == "new"
    cli.setup("2.13.0")
    assert pip.calls == 1
    assert [one.name for one in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize("names", [(), ("torch/version.py",), WHOLE[:1]])
def test_what_is_not_whole_is_not_ready(
    names: tuple[str, ...], cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("subprocess.run", Pip(*names))
    with pytest.raises(SetupNeededError):
        cli.setup("2.13.0")
    assert [one.name for one in cache.parent.iterdir()] in ([], [cache.name])


def test_two_setups_at_once_leave_a_whole_folder(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each installs into a folder of its own; what is there is whole at any time."""
    both, pip = threading.Barrier(2, timeout=30), Pip(*WHOLE)

    def waits(command: list[str], **how: object) -> subprocess.CompletedProcess[str]:
        done = pip(command, **how)
        assert not (cache / "torch").exists()
        both.wait()
        return done

    monkeypatch.setattr("subprocess.run", waits)
    threads = [threading.Thread(target=cli.setup, args=["2.13.0"]) for _ in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    assert pip.calls == 2
    assert len(pip.folders) == 2
    assert [one.name for one in cache.parent.iterdir()] == [cache.name]
    assert all((cache / name).read_text() == "new" for name in WHOLE)


def test_triton_is_put_beside_torch(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("subprocess.run", Pip(*WHOLE))
    cli.setup("2.13.0")
    monkeypatch.setattr("subprocess.run", Pip("triton/__init__.py"))
    cli.setup("2.13.0", triton=True)
    assert (cache / "triton" / "__init__.py").exists()
    assert standins.has_cuda(cache)
    assert [one.name for one in cache.parent.iterdir()] == [cache.name]


@pytest.mark.parametrize(
    ("cuda", "installed", "ready"),
    [
        ("13.0", (), True),
        ("12.8", (), True),
        ("11.8", (), False),
        (None, (), False),
        ("", (), False),
        (None, ("torch/version.py",), False),
        (None, WHOLE, True),
        ("11.8", WHOLE, True),
    ],
)
def test_what_is_set_up_is_known_in_one_place(
    cuda: str | None, installed: tuple[str, ...], ready: bool, cache: Path
) -> None:
    cache.mkdir(parents=True)  # an interrupted download
    for name in installed:
        (cache / name).parent.mkdir(parents=True, exist_ok=True)
        (cache / name).touch()
    assert standins.is_ready("2.13.0", cuda) == ready


def test_damaged_libraries_of_torch_are_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_cuda.so").write_text("half")
    monkeypatch.setenv("PHANTOMGPU_CACHE", str(tmp_path / "cache"))
    with pytest.raises(PhantomError, match="cannot read"):
        standins.build(tmp_path)
