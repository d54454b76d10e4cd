"""One process of a run, `python -m perf.gpu_checks.child ROLE --run-dir ...`: the program's own
process; packages that this box lacks have stand-ins."""

from __future__ import annotations

import importlib
import sys

from asyncrl_node.process import run_process


def main() -> None:
    """Run the process that the first argument names."""
    role = sys.argv.pop(1)
    run_process(role, importlib.import_module(f"asyncrl_node.{role}.process").main)


if __name__ == "__main__":
    main()
