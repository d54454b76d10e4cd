"""`python -m asyncrl_node.scheduler --run-dir DIR`."""

from asyncrl_node.process import run_process
from asyncrl_node.scheduler.process import main

if __name__ == "__main__":
    run_process("scheduler", main)
