"""Recognise the adapters that an overlay has merged into the weights."""

import hashlib
import os
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE, _best_guess_weight_name
from diffusers.utils.hub_utils import _get_model_file
from safetensors import safe_open


# How a release spells its adapters: the adapter's name in every key, the attention below another module.
_NAMED_LORA_KEY = re.compile(r"\.lora_[AB]\.([^.]+)\.weight$")
_RELEASE_ATTENTION = ".attn.orig."

_FILE_ARGUMENTS = ("subfolder", "cache_dir", "force_download", "proxies", "local_files_only", "token", "revision")


def find_adapter_file(source: str | os.PathLike, options: dict[str, Any]) -> Path:
    """Return the local file that Diffusers' arguments mean, downloaded to the cache where it is on the Hub."""
    weight_name = options.get("weight_name") or _best_guess_weight_name(
        source, file_extension=".safetensors", local_files_only=options.get("local_files_only")
    )
    arguments = {name: options[name] for name in _FILE_ARGUMENTS if name in options}
    return Path(_get_model_file(source, weights_name=weight_name or LORA_WEIGHT_NAME_SAFE, **arguments))


def file_sha256(file: Path) -> str:
    """Return the hexadecimal sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def adapter_keys(file: Path) -> list[str]:
    """Return the tensor names of a safetensors file; none of another, which Diffusers itself refuses or reads."""
    if file.suffix != ".safetensors":
        return []
    with safe_open(file, "pt") as tensors:
        return list(tensors.keys())


def refuse_merged_adapter(fused: list[dict[str, str]], keys: Iterable[str], sha256: str | None = None) -> None:
    """Refuse an adapter that is merged already or spelled as no module is.

    Args:
        fused (`list[dict]`): The transformer's `fused_adapters`, each with `name` and `sha256`.
        keys (`Iterable[str]`): The adapter's tensor names.
        sha256 (`str`, *optional*): The digest of its file.

    Raises:
        ValueError: With the way out.
    """
    keys = list(keys)
    names = {match[1] for match in map(_NAMED_LORA_KEY.search, keys) if match}
    for adapter in fused:
        if adapter["name"] in names or (sha256 is not None and adapter["sha256"] == sha256):
            raise ValueError(
                f"The adapter {adapter['name']!r} is already merged into this transformer's weights: loading it again "
                "would apply it twice."
            )
    if any(_RELEASE_ATTENTION in key for key in keys):
        raise ValueError(
            "This adapter is spelled as in a VDN-H3 release, whose adapters have to be merged into the weights: "
            "`materialize_overlay` does so. To run another one beside the weights, rename "
            f"`{_RELEASE_ATTENTION}` to `.attn.` and `.lora_A.<name>.weight` to `.lora_A.weight` (`lora_B` likewise) "
            "in its keys, and load the dictionary with `prefix=None`."
        )
