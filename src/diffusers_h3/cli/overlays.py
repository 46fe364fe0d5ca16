"""`diffusers-h3 overlays`: what there is, what a description says, and whether files are still what was recorded."""

from pathlib import Path
from typing import Annotated, Any

import typer

from . import options, verify, weights
from .console import print_fields, print_json, results


app = typer.Typer(
    no_args_is_help=False,
    rich_markup_mode="rich",
    help="List, show and verify overlays: pinned descriptions of weights and of what is merged into them.",
)

Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A name from 'overlays list', an overlay repository with --revision, a manifest file or a release "
        "folder.",
        show_default=False,
    ),
]


@app.command("list")
def list_overlays(cache_dir: options.CacheDir = None, as_json: options.Json = False) -> None:
    """List the overlays that come with this program, and the folders made from overlays on this machine.

    [bold]Example[/bold]

    diffusers-h3 overlays list --json
    """
    from ..overlays import builtin_overlays

    known = [
        {
            "name": name,
            "num_inference_steps": manifest.sampling.num_inference_steps,
            "description": manifest.description,
            "license_note": manifest.license_note,
        }
        for name, manifest in builtin_overlays().items()
    ]
    made = [
        {
            "name": record["manifest"]["name"],
            "folder": str(folder),
            "created": record["created"],
            "components": record["components"],
            "bytes": sum(output["bytes"] for output in record["outputs"].values()),
        }
        for folder, record in weights.materialized_folders(cache_dir)
    ]
    if as_json:
        print_json({"builtin": known, "materialized": made})
        return
    print_fields({entry["name"]: entry["description"] for entry in known})
    for entry in made:
        results.print(f"\n{entry['folder']}", style="bold", markup=False)
        results.print(f"{entry['name']}, {entry['bytes'] / 1e9:.2f} GB, made {entry['created']}", markup=False)


@app.command("show")
def show(
    source: Source,
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
    allow_unpinned: options.AllowUnpinned = False,
    local_files_only: options.LocalFilesOnly = False,
    as_json: options.Json = False,
) -> None:
    """Show where every part of an overlay comes from, and how it is sampled. No weights are downloaded.

    [bold]Examples[/bold]

    diffusers-h3 overlays show vdn-h3-8step

    diffusers-h3 overlays show vdn-h3-8step --json > my-overlay.json  [dim]# a manifest to start from[/dim]
    """
    overlay = weights.find_overlay(source, revision, allow_unpinned, weights.Access(cache_dir, local_files_only))
    manifest = overlay.manifest
    if as_json:
        print_json(manifest.to_dict())
        return

    def where(source: Any) -> str:
        if source.repo is None:
            return str(overlay.root / source.subfolder)
        return f"{source.repo}/{source.subfolder} at {source.revision}"

    sampling = manifest.sampling
    fields = {
        "name": manifest.name,
        "description": manifest.description,
        "transformer calls": sampling.num_inference_steps
        or f"any number; {sampling.recommended_num_inference_steps} recommended",
        "shifts": f"{sampling.video_shift:g} video, {sampling.audio_shift:g} audio",
        "base transformer": where(manifest.base_transformer.source),
    }
    for adapter in manifest.adapters:
        fields[f"adapter {adapter.name}"] = where(adapter.source)
        fields[f"adapter {adapter.name} sha256"] = adapter.weights.sha256 or "not published"
    fields["linear branch"] = where(manifest.linear_branch.source)
    fields["linear branch sha256"] = manifest.linear_branch.weights.sha256 or "not published"
    fields |= {name: where(source) for name, source in manifest.components.items()}
    fields["licence"] = manifest.license_note
    print_fields(fields)


@app.command("verify")
def verify_files(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE",
            help="A folder that 'materialize' made; or an overlay, to check its downloads and every folder made of "
            "it.",
            show_default=False,
        ),
    ],
    revision: options.Revision = None,
    cache_dir: options.CacheDir = None,
    allow_unpinned: options.AllowUnpinned = False,
    as_json: options.Json = False,
) -> None:
    """Hash files again and compare them with their record or manifest. Opens no connection.

    A materialised folder is compared with the record beside its weights, a download with the manifest's digest or, for
    files the manifest has none for, with the one the Hub published. Exit code 1 if a file is changed or missing.

    [bold]Examples[/bold]

    diffusers-h3 overlays verify vdn-h3-8step

    diffusers-h3 overlays verify ~/.cache/huggingface/diffusers-h3/vdn-h3-8step-0123456789abcdef
    """
    if weights.is_pipeline_folder(source):
        checked = verify.check_folder(Path(source))
    else:
        access = weights.Access(cache_dir, local_files_only=True)
        overlay = weights.find_overlay(source, revision, allow_unpinned, access)
        checked = verify.check_overlay(overlay, access)
    bad = [entry for entry in checked if entry.status in ("changed", "missing")]
    if as_json:
        print_json({"ok": not bad, "files": [entry.to_dict() for entry in checked]})
    else:
        for entry in checked:
            results.print(f"{entry.status:<10}  {entry.file}", markup=False)
        counts = {name: sum(entry.status == name for entry in checked) for name in verify.STATUSES}
        results.print(", ".join(f"{count} {name}" for name, count in counts.items() if count), markup=False)
    if bad:
        raise typer.Exit(1)
