"""`diffusers-h3 materialize`: an overlay becomes a plain diffusers folder."""

from typing import Annotated

import typer

from . import options, weights
from .console import UsageError, print_json, results


def materialize(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A name from 'overlays list', an overlay repository with --revision ('owner/name' or, of several, "
            "'owner/name//stage'), a manifest file, or a release directory.",
            show_default=False,
        ),
    ],
    revision: options.Revision = None,
    components: Annotated[
        str | None,
        typer.Option(
            help="Make only these parts, separated by commas, for instance transformer,vae. Default: all.",
            show_default=False,
        ),
    ] = None,
    cache_dir: options.CacheDir = None,
    allow_unpinned: options.AllowUnpinned = False,
    local_files_only: options.LocalFilesOnly = False,
    as_json: options.Json = False,
) -> None:
    """Merge an overlay into its base weights, and print the folder that holds the result.

    The folder is a plain diffusers pipeline: VDNH3Pipeline.from_pretrained(folder) loads it. What is downloaded is
    checked, weights no adapter changes are linked instead of copied, and a run that was stopped is taken up where it
    was. Private or gated repositories need HF_TOKEN or 'hf auth login'.

    [bold]Examples[/bold]

    diffusers-h3 materialize vdn-h3-8step

    diffusers-h3 materialize ./my-release/stage-dmd-step-250 --components transformer

    diffusers-h3 materialize owner/name --revision 0123456789abcdef0123456789abcdef01234567 --json
    """
    names = None if components is None else tuple(name.strip() for name in components.split(",") if name.strip())
    if names is not None:
        _check_components(names)
    access = weights.Access(cache_dir, local_files_only)
    overlay = weights.find_overlay(source, revision, allow_unpinned, access)
    folder = weights.make_folder(overlay, access, names)
    if as_json:
        print_json(
            {
                "folder": str(folder),
                "name": overlay.name,
                "components": sorted(path.name for path in folder.iterdir() if path.is_dir()),
                "num_inference_steps": overlay.manifest.sampling.num_inference_steps,
            }
        )
    else:
        results.print(str(folder), markup=False)


def _check_components(names: tuple[str, ...]) -> None:
    from ..overlays.materialize import COMPONENT_CLASSES

    unknown = [name for name in names if name not in COMPONENT_CLASSES]
    if unknown or not names:
        raise UsageError(
            f"--components may name {', '.join(COMPONENT_CLASSES)}; got {', '.join(unknown) or 'nothing'}."
        )
