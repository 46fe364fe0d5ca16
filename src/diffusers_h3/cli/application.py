"""The commands of `diffusers-h3`, put together."""

from typing import Annotated

import typer

from .._version import __version__
from . import demo, doctor, generate, materialize, overlays, plan
from .console import Application, results, set_up_messages


app = typer.Typer(
    cls=Application,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        results.print(f"diffusers-h3 {__version__}", markup=False)
        raise typer.Exit


@app.callback(invoke_without_command=True)
def root(
    ctx: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where in the program an error arose.")] = False,
) -> None:
    """Make videos with sound from a prompt, with MiniMax-H3 and VDN-H3 weights.

    [bold]First steps[/bold]

    diffusers-h3 demo  [dim]# a tiny model moves a red circle, on any machine, in a minute[/dim]

    diffusers-h3 overlays list  [dim]# the weights this program knows[/dim]

    diffusers-h3 generate "A red fox runs through fresh snow." -o fox.mp4  [dim]# needs a large GPU[/dim]

    Results go to stdout, everything else to stderr. Exit codes: 0 done, 1 failed while working, 2 wrong usage, 130
    interrupted.
    """
    set_up_messages()
    if ctx.invoked_subcommand is None:
        results.print(ctx.get_help(), markup=False)


app.command("generate")(generate.generate)
app.command("materialize")(materialize.materialize)
app.add_typer(overlays.app, name="overlays")
app.command("demo", epilog=demo.GRAMMAR_HELP)(demo.demo)
app.command("doctor")(doctor.doctor)
app.command("plan")(plan.plan)
