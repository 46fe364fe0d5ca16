"""What the commands print: results on stdout, everything else on stderr, errors in one or two lines."""

import json
import logging
import sys
import warnings
from typing import Any

import typer
from rich.console import Console
from typer.core import TyperGroup


results = Console(soft_wrap=True, highlight=False)
messages = Console(stderr=True, soft_wrap=True, highlight=False)

# typer may bring its own copy of click, so the base class of usage errors is taken from typer's public names.
_CommandError = typer.BadParameter.__mro__[2]

# Errors that say what to do about them; any other type is a defect of the program.
_EXPECTED_ERRORS = (ImportError, MemoryError, OSError, RuntimeError, ValueError)

_ARGUMENT_OPTIONS = {
    "allow_unpinned=True": "--allow-unpinned",
    "cache_dir": "--cache-dir",
    "height": "--height",
    "local_files_only": "--local-files-only",
    "num_frames": "--frames",
    "overwrite=True": "--overwrite",
    "revision": "--revision",
    "width": "--width",
}


class UsageError(typer.BadParameter):
    """An argument that cannot work, found before any model is loaded. Exit code 2."""

    def format_message(self) -> str:
        """Return the message alone: it names the option itself."""
        return self.message


class WorkError(_CommandError):
    """Work that failed. Exit code 1."""

    exit_code = 1


class Application(TyperGroup):
    """A command group that turns every failure into one or two lines on stderr and an exit code."""

    def invoke(self, ctx: typer.Context) -> Any:
        """Run the command; with `--traceback`, a failure keeps its Python traceback."""
        try:
            return super().invoke(ctx)
        except (typer.Exit, typer.Abort, _CommandError, BrokenPipeError):
            raise
        except Exception as error:
            if ctx.params["traceback"]:
                raise
            raise WorkError(_describe(error)) from error

    def main(self, *args, standalone_mode: bool = True, **kwargs) -> None:
        """Run the command line and exit the process."""
        try:
            code = super().main(*args, standalone_mode=False, **kwargs)
        except typer.Abort:
            code = 130
        except _CommandError as error:
            code = error.exit_code
            messages.print("error:", style="bold red", end=" ")
            messages.print(error.format_message().strip(), markup=False)
            context = getattr(error, "ctx", None)
            if context is not None:
                messages.print(f"Try '{context.command_path} --help'.", markup=False)
        if code == 130:
            messages.print("Interrupted; nothing was left half written.")
        sys.exit(code if isinstance(code, int) else 0)


def _describe(error: Exception) -> str:
    """Return an error's first two lines, which say all there is for errors of this package and its libraries."""
    lines = [line for line in option_names(str(error)).splitlines() if line.strip()]
    if isinstance(error, _EXPECTED_ERRORS) and lines:
        return "\n".join(lines[:2])
    first = f": {lines[0]}" if lines else ""
    return f"unexpected {type(error).__name__}{first}\nRun again with 'diffusers-h3 --traceback …' and report it."


def option_names(message: str) -> str:
    """Return a library's message with the names of Python arguments as the options they are here."""
    for argument, option in _ARGUMENT_OPTIONS.items():
        message = message.replace(f"`{argument}`", option)
    return message


class _MessageHandler(logging.Handler):
    """Print log records as they are, to wherever stderr points now."""

    def emit(self, record: logging.LogRecord) -> None:
        messages.print(self.format(record), markup=False)


def set_up_messages() -> None:
    """Send this package's log to stderr and keep warnings no user can act on out of it."""
    logger = logging.getLogger("diffusers_h3")
    logger.setLevel(logging.INFO)
    logger.handlers = [_MessageHandler()]
    # diffusers' audio VAE still uses the older of two equal weight norms.
    warnings.filterwarnings("ignore", message=".*weight_norm.*", category=FutureWarning)


def print_json(result: dict[str, Any] | list[Any]) -> None:
    """Print a command's machine-readable result, the only thing on stdout then."""
    sys.stdout.write(json.dumps(result, indent=2) + "\n")


def print_fields(fields: dict[str, Any]) -> None:
    """Print names and values in two columns. Long values keep their line, so that they can be copied."""
    indent = max(map(len, fields)) + 2
    for name, value in fields.items():
        results.print(f"{name:<{indent}}", style="bold", end="")
        results.print(str(value), markup=False)
