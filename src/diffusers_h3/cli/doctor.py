"""`diffusers-h3 doctor`: what this machine can run, and what would make it better."""

from typing import TYPE_CHECKING

import typer
from rich.markup import escape
from rich.table import Table

from . import options
from .console import print_json, results


if TYPE_CHECKING:
    from ..machine_report import Check, MachineReport

_MARKS = {"ok": "[green]ok[/green]", "missing": "[yellow]missing[/yellow]", "failed": "[red]failed[/red]"}


def doctor(as_json: options.Json = False) -> None:
    """Look at this machine: GPU, libraries, kernels, encoders, disk. Downloads and changes nothing.

    For each missing thing it names the command that gets it and what that would change. With --json: "schema",
    "can_generate", "window_backend", and "checks", each with "name", "status" (ok, missing, failed), "found",
    "importance" (required, faster, optional), "command" and "effect".

    Exit code 0 if videos can be generated here, 1 if something required is missing.

    [bold]Examples[/bold]

    diffusers-h3 doctor

    diffusers-h3 doctor --json
    """
    from ..machine_report import inspect_machine

    report = inspect_machine()
    if as_json:
        print_json(report.to_dict())
    else:
        _print_report(report)
    if not report.can_generate:
        raise typer.Exit(1)


def _print_report(report: "MachineReport") -> None:
    table = Table.grid(padding=(0, 2))
    for check in report.checks:
        table.add_row(_MARKS[check.status], escape(check.name), escape(check.found))
    results.print(table, soft_wrap=False)
    # What nothing can be done about, a kernel for other cards for instance, has its reason in the table.
    lacking = [c for c in report.checks if c.status != "ok" and (c.command or c.importance == "required")]
    for importance in ("required", "faster", "optional"):
        _print_remedies(importance, [check for check in lacking if check.importance == importance])
    verdict = "[green]can[/green]" if report.can_generate else "[red]cannot[/red]"
    results.print(f"\nThis machine {verdict} generate videos.")


def _print_remedies(importance: str, checks: list["Check"]) -> None:
    if not checks:
        return
    results.print(f"\n[bold]{importance.capitalize()}[/bold]")
    for check in checks:
        results.print(f"  {check.name}: {check.effect or check.found}", markup=False)
        if check.command:
            # On a line of its own, so that it can be copied.
            results.print(f"    {check.command}", markup=False)
