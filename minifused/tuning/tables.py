"""Where the schedule chosen goes: the user's table, and the package's."""

from dataclasses import asdict
from pathlib import Path

from minifused.kernels import schedule_table, table_file
from minifused.kernels.schedule import tuned
from minifused.tuning.search import Result


def store(result: Result, package: bool = False) -> list[Path]:
    """Put the schedule chosen into the user's table, and with `package` into the package's.

    Where a table would say what is used without it, its entry is taken out instead. Returns the
    files; raises OSError and ValueError as `table_file.store` does.
    """
    task = result.task
    tile, kernel, dtype, bucket = task.tile, task.tunable.name, task.dtype_name, task.bucket
    fields = asdict(result.chosen)
    paths = []
    if package:
        path = schedule_table.packaged_table(tile)
        entry = None if result.chosen == result.rule else fields
        table_file.store(path, schedule_table.arch(tile), kernel, dtype, bucket, entry)
        paths.append(path)
    schedule_table.forget()
    without = tuned(tile, kernel, bucket, dtype, result.rule, task.head_dim, user=False)
    machine = schedule_table.machine(tile)
    if machine is not None:
        path = schedule_table.user_table()
        entry = None if result.chosen == without else fields
        table_file.store(path, machine, kernel, dtype, bucket, entry)
        paths.append(path)
    schedule_table.forget()
    return paths
