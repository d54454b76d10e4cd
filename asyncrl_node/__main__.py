"""`python -m asyncrl_node verify RUN_DIR [--json]`: what can be asked of a run directory."""

from __future__ import annotations

import argparse
import sqlite3
import sys
from pathlib import Path

import msgspec

from asyncrl_node.errors import EXIT_USER_ERROR, ConfigError
from asyncrl_node.inspect.verify import Verdict, verify


def main(arguments: list[str]) -> int:
    """Run one command; return its exit code."""
    parser = argparse.ArgumentParser(prog="python -m asyncrl_node")
    commands = parser.add_subparsers(dest="command", required=True)
    command = commands.add_parser("verify", help="prove exactly-once and the bound, offline")
    command.add_argument("run_dir", type=Path, metavar="RUN_DIR")
    command.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args(arguments)
    try:
        verdict = _verify(options.run_dir)
    except ConfigError as error:
        sys.stderr.write(f"error: {error}\n")
        return EXIT_USER_ERROR
    if options.json:
        sys.stdout.write(msgspec.json.encode(verdict).decode() + "\n")
    else:
        sys.stdout.write(_words(verdict))
    return 0 if verdict.ok else 1


def _verify(run_dir: Path) -> Verdict:
    for name in ("config.toml", "ledger.sqlite"):
        if not (run_dir / name).is_file():
            raise ConfigError("run_dir", f"must be a run directory, with a {name}", run_dir)
    try:
        return verify(run_dir)
    except (OSError, KeyError, ValueError, TypeError, sqlite3.Error) as error:
        rule = f"must hold readable records: {type(error).__name__}: {error}"
        raise ConfigError("run_dir", rule, run_dir) from error


def _words(verdict: Verdict) -> str:
    bound = "no bound" if verdict.bound is None else f"bound {verdict.bound}"
    lines = [
        f"admitted {verdict.problems} = trained {verdict.trained} + filtered {verdict.filtered} + "
        f"failed {verdict.failed} + leftover {verdict.leftover} + carried {verdict.carried}",
        f"trained twice {verdict.trained_twice}, lost {verdict.lost}, "
        f"staleness at most {verdict.max_staleness} ({bound})",
        *(f"breach: {breach}" for breach in verdict.breaches),
        "ok" if verdict.ok else f"{len(verdict.breaches)} breaches",
    ]
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
