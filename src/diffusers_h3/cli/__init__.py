"""The command line `diffusers-h3`.

Commands import what they need when they run, so that help and wrong usage answer at once.
"""

from .application import app


def main() -> None:
    """Run the command line and exit: 0 done, 1 failed while working, 2 wrong usage, 130 interrupted."""
    app(prog_name="diffusers-h3")
