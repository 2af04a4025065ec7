"""Call a function that came as a pickle: `python call.py FILE`.

With `--serve`, read numbers from standard input, call the function with each in a process of its
own, and print the status that each ended with.
"""

import os
import sys
from pathlib import Path


def main() -> None:
    """Call the function, once or for each number."""
    file, *serve = sys.argv[1:]
    import torch  # before the pickle is read: what it holds must find the CUDA code

    import cloudpickle  # isort: skip

    function, args, kwargs = cloudpickle.loads(Path(file).read_bytes())
    assert torch.version.cuda
    if not serve:
        function(*args, **kwargs)
        return
    import torch._dynamo  # optimizers import it: 2.4 seconds, here once for all

    answers = os.dup(1)
    os.dup2(2, 1)  # what the function prints is no answer
    for line in sys.stdin:
        child = os.fork()  # CUDA has not started here, so it can start in each child
        if child == 0:
            from phantomgpu import child as inside

            number, _, details = line.strip().partition("-")
            inside.start_trial(line.strip(), details=bool(details))
            function(int(number), *args, **kwargs)
            sys.exit(0)
        _, status = os.waitpid(child, 0)
        os.write(answers, f"{os.waitstatus_to_exitcode(status)}\n".encode())


main()
