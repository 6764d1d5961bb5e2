"""Two workers by torchrun, as a user starts them; they end with the test, come what may."""

import os
import signal
import subprocess
import sys


def torchrun(*arguments, timeout, cwd=None, env=None, options=()):
    """Run to the end and return the outputs.

    torchrun starts its workers in sessions of their own, and ends them where it is asked to end
    itself. Killed, it would leave them.
    """
    launch = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *options]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", **(env or {})}
    with subprocess.Popen(
        [sys.executable, *launch, *map(str, arguments)],
        cwd=cwd,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
                sys.stdout.writelines(process.communicate(timeout=45))  # what they said
    assert process.returncode == 0, err
    return out
