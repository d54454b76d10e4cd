"""`python -m asyncrl_node.learner --run-dir DIR`."""

from asyncrl_node.learner.process import main
from asyncrl_node.process import run_process

if __name__ == "__main__":
    run_process("learner", main)
