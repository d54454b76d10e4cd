"""`python -m asyncrl_node.sampler --run-dir DIR --index I`."""

from asyncrl_node.process import run_process
from asyncrl_node.sampler.process import main

if __name__ == "__main__":
    run_process("sampler", main)
