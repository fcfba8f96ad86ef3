"""How a user's mistake is told apart from a bug, and how a command line ends on each."""

import os
import sys
from collections.abc import Callable
from typing import NoReturn


class UserError(Exception):
    """A user's mistake: a bad file, flag, shape or prompt, or a missing compiler.

    The message is one or two lines that say what is wrong, where, and what to do.
    """


def run_cli(main: Callable[[], int | None]) -> NoReturn:
    """Call `main` and exit with its value (None is 0).

    A UserError becomes one `error:` line on stderr and exit code 2. Ctrl-C exits with 130 and a
    closed pipe with 141, as shells report those signals. Any other exception keeps its traceback.
    """
    try:
        code = main() or 0
        sys.stdout.flush()
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        code = 2
    except KeyboardInterrupt:
        code = 130
    except BrokenPipeError:
        # The interpreter flushes stdout once more at exit, which must not fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = 141
    sys.exit(code)
