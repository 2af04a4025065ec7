"""Call a function that came as a pickle: `python call.py FILE`.

With `--serve`, read trials from standard input, a name and a file each, call the file's function in
a process of its own, and print the status that each ended with. `python call.py FILE NAME` is one
trial. A name is the number that the function takes, with `-details` for a whole report.
"""

import gc
import json
import os
import subprocess
import sys
from pathlib import Path


def main() -> None:
    """Call the function, once or for each number."""
    file, *trial = sys.argv[1:]
    if trial:
        gc.disable()  # imports make hundreds of thousands of objects, and hardly any garbage
    import torch  # before the pickle is read: what it holds must find the CUDA code

    import cloudpickle  # isort: skip

    threads = torch.get_num_threads()
    if trial == ["--serve"]:
        torch.set_num_threads(1)  # OpenMP's threads do not survive a fork: a trial would wait
    function, args, kwargs = cloudpickle.loads(Path(file).read_bytes())
    assert torch.version.cuda
    if not trial:
        function(*args, **kwargs)
        return

    def call(name: str) -> None:
        from phantomgpu.watching import start_trial

        gc.freeze()  # nor is it looked for among them in each trial
        gc.enable()
        number, _, details = name.partition("-")
        torch.set_num_threads(threads)
        start_trial(name, details=bool(details))
        function(int(number), *args, **kwargs)
        sys.exit(0)

    if trial != ["--serve"]:
        call(*trial)
    import torch._dynamo  # optimizers import it: 2.4 seconds, here once for all

    from phantomgpu.watching import Run

    if Run.current:
        Run.current.compute()
    answers = os.dup(1)
    os.dup2(2, 1)  # what the function prints is no answer
    for line in sys.stdin:
        name, file = line.strip().split(" ", 1)
        function, args, kwargs = cloudpickle.loads(Path(file).read_bytes())
        # After a fork, torch refuses a CUDA that was started, and threads are gone with their locks
        # held. An import may have started both.
        if torch.cuda.is_initialized() or len([*Path("/proc/self/task").iterdir()]) > 1:
            settings = {**json.loads(os.environ["PHANTOMGPU_RUN"]), "details": "-" in name}
            os.environ["PHANTOMGPU_RUN"] = json.dumps({**settings, "process": os.getpid()})
            command = [sys.executable, __file__, file, name]
            code = subprocess.run(command, check=False).returncode  # noqa: S603
        else:
            child = os.fork()
            if child == 0:
                call(name)
            code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        os.write(answers, f"{code}\n".encode())


main()
