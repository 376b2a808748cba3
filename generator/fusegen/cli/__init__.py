"""The command line: a file per verb, which parses, asks `fusegen.api`, prints, and sets the code.

Nothing heavy is imported before a verb runs, so that `--help` answers at once: what a verb asks is
imported in its function. The answer goes to stdout, everything else to stderr.
"""

from .exits import TRACEBACK, ExitCode
from .program import main, program

__all__ = ["TRACEBACK", "ExitCode", "main", "program"]
