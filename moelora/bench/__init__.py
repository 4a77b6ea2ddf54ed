"""Benchmarks of an installed moelora: `moelora bench`, a layer on the machine at hand.

The commands in a checkout's benchmarks/, which produced the numbers in README and docs, share its
cases, shapes, timers and result files.

A *baseline* is one way to run a layer (moelora is one of them). All baselines of a case read the
same tensors, are compared with float64 before timing, and are timed in turn in one process.
"""

from rich.console import Console

PATH_MAX = 4096  # Linux


def console() -> Console:
    """A console on the terminal; if output is redirected, one so wide that no path is wrapped."""
    terminal = Console()
    return terminal if terminal.is_terminal else Console(width=2 * PATH_MAX)
