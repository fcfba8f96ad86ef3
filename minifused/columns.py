"""Columns of text: what all tables that are printed share."""

from collections.abc import Collection, Sequence


def padded(
    rows: Sequence[Sequence[str]], left: Collection[int] = (), least: int = 0
) -> list[list[str]]:
    """The rows with all cells of a column as wide as its widest, and `least` at least.

    Cells are flush right, but in the columns of `left`.
    """
    widths = [max(least, *map(len, column)) for column in zip(*rows, strict=True)]
    return [
        [
            cell.ljust(width) if place in left else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        for row in rows
    ]
