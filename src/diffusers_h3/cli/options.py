"""Options several commands share."""

from pathlib import Path
from typing import Annotated

import typer


Revision = Annotated[str | None, typer.Option(help="Commit (40 hexadecimal digits) of a repository.")]
AllowUnpinned = Annotated[
    bool, typer.Option("--allow-unpinned", help="Accept a branch or tag, whose content can change, as --revision.")
]
CacheDir = Annotated[
    Path | None,
    typer.Option(
        file_okay=False,
        help="Where downloads and finished folders go. Default: the Hugging Face cache.",
        show_default=False,
    ),
]
LocalFilesOnly = Annotated[
    bool, typer.Option("--local-files-only", help="Use what is on this machine; open no connection.")
]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON on stdout.")]
Overwrite = Annotated[bool, typer.Option("--overwrite", help="Replace an existing output file.")]
