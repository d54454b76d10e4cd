"""Start the processes of a run, own their lifetime, show what happens, leave nothing behind.

    launch.py --spawns--> scheduler, learner, sampler 0 .. N-1     (each `python -m asyncrl_node.X`)
        |   <--reports--  scheduler (status, warnings, the end)
        +-- view or plain lines on the terminal; summary at the end

Ctrl-C once: a step in training is finished, a checkpoint is written, all ends (exit code 130).
Ctrl-C twice: all is killed now. Whatever happens to this process, the kernel kills its children.
"""

from __future__ import annotations

import sys

from asyncrl_node.supervisor import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
