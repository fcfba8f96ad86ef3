"""Compare every kernel and the whole model with PyTorch: exit code 1 if an error is past its bound.

Errors are measured against float64 math and held to a multiple of eager PyTorch's in that dtype.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict
from importlib.metadata import version
from pathlib import Path

import torch
from tqdm import tqdm

from minifused import parity
from minifused.columns import padded
from minifused.engine import DEMO_FOLDER, DTYPES, resolve_device
from minifused.errors import run_cli
from minifused.parity import Result

TITLES = ("check", "case", "dtype", "max error", "RMS error", "eager RMS", "ratio", "bound", "")


def parse_args(argv: list[str] | None) -> Namespace:
    """Read the command line; `argv` None means that of the process."""
    p = ArgumentParser(description=__doc__)
    p.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="auto: GPU")
    text = "repeatable; default: all on a GPU, float32 on a CPU, where the kernels are float32"
    p.add_argument("--dtype", action="append", choices=(*DTYPES, "all"), help=text)
    text = f"repeatable; default: all of {', '.join(parity.CHECKS)}"
    p.add_argument("--check", action="append", choices=parity.CHECKS, metavar="NAME", help=text)
    text = "a model folder; default: the bundled one"
    p.add_argument("--model", type=Path, default=DEMO_FOLDER, metavar="DIR", help=text)
    p.add_argument("--json", action="store_true", help="print one JSON document, not a table")
    return p.parse_args(argv)


def pick_dtypes(names: list[str] | None, device: torch.device) -> list[torch.dtype]:
    """The dtypes that `--dtype` means, each once."""
    names = names or (["all"] if device.type == "cuda" else ["float32"])
    return [dtype for name, dtype in DTYPES.items() if name in names or "all" in names]


def table(results: Sequence[Result]) -> str:
    """One aligned line a result, under a line of titles."""
    rows = [TITLES] + [
        (
            *(r.check, r.case, r.dtype),
            *(f"{x:.1e}" for x in (r.max_error, r.rms_error, r.eager_rms_error)),
            "-" if r.ratio is None else f"{r.ratio:.2f}",
            f"{r.bound:.1e}",
            " ".join(filter(None, ("ok" if r.ok else "FAIL", r.note))),
        )
        for r in results
    ]
    left = range(len(TITLES))
    return "\n".join("  ".join(row).rstrip() for row in padded(rows, left))


def document(results: Sequence[Result], device: torch.device, model: Path) -> str:
    """The results as strict JSON: a number that is NaN or infinite is null."""
    rows = [
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in r.items()}
        for r in map(asdict, results)
    ]
    facts = {
        "device": torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu",
        "torch": torch.__version__,
        "tilelang": version("tilelang"),
        "model": str(model),
        "failed": sum(not r.ok for r in results),
    }
    return json.dumps({**facts, "results": rows}, indent=1, allow_nan=False)


def main(argv: list[str] | None = None) -> int:
    """Run the checks and print them; returns 1 if one failed, otherwise 0."""
    args = parse_args(argv)
    device = resolve_device(args.device)
    dtypes = pick_dtypes(args.dtype, device)
    checks = [name for name in parity.CHECKS if name in (args.check or parity.CHECKS)]
    running = parity.run(device, dtypes, args.model, checks)
    results = list(tqdm(running, unit=" comparisons", leave=False))
    failed = sum(not r.ok for r in results)
    if args.json:
        print(document(results, device, args.model))
    else:
        print(table(results))
        print(f"{len(results)} comparisons on {device.type}, {failed} past their bound")
    return 1 if failed else 0


if __name__ == "__main__":
    run_cli(main)
