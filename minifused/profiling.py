"""How long a kernel of `inspection` takes: by TileLang's own profiler, and by our clock.

Both run it on this machine, with the inputs of its workload. TileLang's `do_bench` calls the kernel
as TileLang does, and so with the checks of its arguments, which on a CPU take 10 to 40 us; our
clock calls it as the launchers do. On a GPU both time between events, behind a flush of L2.
"""

import torch

from minifused.arguments import OF_KERNEL, Arguments, for_kernel
from minifused.benchmark import clock
from minifused.benchmark.records import Spread
from minifused.errors import UserError
from minifused.inspection import Case, lower
from minifused.kernels.build import compile_kernel, compile_program, tile_for
from minifused.kernels.limits import violation

WARM_CALLS, ROUNDS = 3, 30


def profile(case: Case) -> dict[str, float | None]:
    """Latency, TFLOP/s and GB/s of a case, by both.

    Raises UserError where its architecture is not this machine's, its schedule cannot run, or it
    is only a part of its operation.
    """
    if case.kernel not in OF_KERNEL or getattr(case.schedule, "splits", 1) > 1:
        raise UserError(
            f"{case.kernel} is one of several launches of its operation here: benchmark.py kernels "
            "times them together"
        )
    device, workload = device_of(case), case.workload
    assert workload is not None  # as make_case gives it
    head_dim = getattr(workload, "head_dim", 0)
    if reason := violation(case.tile, case.kernel, case.dtype, case.schedule, head_dim):
        raise UserError(f"{case.kernel} with {case.schedule} cannot run: {reason}")
    lower(case)  # says in a line why a schedule does not compile
    dtype = getattr(torch, case.dtype)
    inputs = workload.inputs(device, dtype, torch.Generator(device).manual_seed(0))
    arguments = for_kernel(case.kernel, inputs, device)
    theirs, ours = builtin_seconds(case, arguments, device), our_seconds(case, arguments, device)
    flops, moved = workload.flops, workload.bytes(dtype)
    return {
        "TileLang's profiler, us": 1e6 * theirs,
        "our clock, us": 1e6 * ours.median,
        "our clock, 10%, us": 1e6 * ours.low,
        "our clock, 90%, us": 1e6 * ours.high,
        "TFLOP/s by TileLang's profiler": flops / theirs / 1e12 if flops else None,
        "TFLOP/s by our clock": flops / ours.median / 1e12 if flops else None,
        "GB/s by TileLang's profiler": moved / theirs / 1e9,
        "GB/s by our clock": moved / ours.median / 1e9,
    }


def device_of(case: Case) -> torch.device:
    """Where a case can run; raises UserError if that is not here."""
    if not case.tile.is_cuda:
        return torch.device("cpu")
    here = tile_for(torch.device("cuda")) if torch.cuda.is_available() else None
    if here != case.tile:
        own = f"--arch {here.arch}, or --arch c" if here else "--arch c"
        raise UserError(
            f"--profile runs the kernel, and this machine is no {case.tile.arch}: give {own}"
        )
    return torch.device("cuda")


def builtin_seconds(case: Case, arguments: Arguments, device: torch.device) -> float:
    """The median of TileLang's profiler."""
    kernel = compile_program(case.builder, case.tile, *case.static, case.schedule)
    backend = "event" if device.type == "cuda" else "wall"
    profiler = kernel.get_profiler()
    return profiler.do_bench(input_tensors=arguments, backend=backend, return_mode="median") / 1e3


def our_seconds(case: Case, arguments: Arguments, device: torch.device) -> Spread:
    kernel = compile_kernel(case.builder, case.tile, *case.static, case.schedule)
    measure = clock.Stopwatch(device)
    seconds = [measure(lambda: kernel(*arguments)) for _ in range(WARM_CALLS + ROUNDS)]
    return Spread.of(seconds[WARM_CALLS:])
