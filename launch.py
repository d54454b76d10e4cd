"""Start the processes of a run, own their lifetime, show what happens, leave nothing behind.

    launch.py --spawns--> scheduler, learner, sampler 0 .. N-1     (each `python -m asyncrl_node.X`)
        |   <--reports--  scheduler (status, warnings, the end)
        +-- view or plain lines on the terminal; summary at the end

Ctrl-C once: a step in training is finished, a checkpoint is written, all ends (exit code 130).
Ctrl-C twice: all is killed now. Whatever happens to this process, the kernel kills its children.
"""

from __future__ import annotations

import os
import signal
import sys


def start() -> int:
    """Run; until the supervisor listens for signals nothing is started, and one ends us at once.

    An exception would not do: raised inside a callback of the import system it is printed and lost.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda *_: os._exit(130))
    from asyncrl_node.supervisor import main

    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(start())
