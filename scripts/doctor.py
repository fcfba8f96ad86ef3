"""Say whether this machine can run minifused, and what to do where it cannot.

Looks at packages, GPUs, compilers and the kernel cache, and compiles and runs a small kernel on
each target that this machine has. Exit code 0 if generate.py can run here, 1 if not.
"""

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict

from minifused.doctor import Check, can_run, diagnose
from minifused.errors import run_cli

STATES = {"ok": "ok", "note": "note", "fault": "FAULT"}


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__)
    p.add_argument("--json", action="store_true", help="print one JSON document, not lines")
    return p.parse_args(argv)


def lines(check: Check) -> str:
    """One line, and below it the fix where there is one."""
    line = f"{STATES[check.state]:6}{check.name:15}{check.detail}"
    return f"{line}\n{'':21}fix: {check.fix}" if check.fix else line


def verdict(checks: Sequence[Check]) -> str:
    faults = [check.name for check in checks if check.state == "fault"]
    return f"generate.py cannot run: {', '.join(faults)}" if faults else "generate.py can run here"


def main(argv: list[str] | None = None) -> int:
    """Print the report; returns 0 if generate.py can run here, otherwise 1."""
    args = parse_args(argv)
    checks = []
    for check in diagnose():
        checks.append(check)
        if not args.json:
            print(lines(check), flush=True)
    ok = can_run(checks)
    print(json.dumps({"ok": ok, "checks": [asdict(c) for c in checks]}, indent=1)
          if args.json else verdict(checks))  # fmt: skip
    return 0 if ok else 1


if __name__ == "__main__":
    run_cli(main)
