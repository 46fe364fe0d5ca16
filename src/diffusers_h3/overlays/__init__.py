"""Overlays: a pinned description of a VDN-H3 release, and the plain diffusers folder made from it.

Reading a manifest needs no torch; only `materialize_overlay` and `verify_folder` load what they need, on first use.
"""

import importlib
from typing import TYPE_CHECKING


_PUBLIC_NAMES = {
    "DiskSpaceError": "errors",
    "IncompatibleWeightsError": "errors",
    "IntegrityError": "errors",
    "ManifestError": "errors",
    "Overlay": "load",
    "OverlayError": "errors",
    "OverlayManifest": "manifest",
    "SourceError": "errors",
    "UnpinnedRevisionError": "errors",
    "builtin_overlays": "manifest",
    "default_cache_dir": "hub",
    "load_overlay": "load",
    "materialize_overlay": "materialize",
    "verify_folder": "record",
}

__all__ = [
    "DiskSpaceError",
    "IncompatibleWeightsError",
    "IntegrityError",
    "ManifestError",
    "Overlay",
    "OverlayError",
    "OverlayManifest",
    "SourceError",
    "UnpinnedRevisionError",
    "builtin_overlays",
    "default_cache_dir",
    "load_overlay",
    "materialize_overlay",
    "verify_folder",
]


def __getattr__(name: str):
    if name not in _PUBLIC_NAMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_PUBLIC_NAMES[name]}"), name)
    globals()[name] = value
    return value


def __dir__():
    return sorted({*globals(), *__all__})


if TYPE_CHECKING:
    from .errors import (
        DiskSpaceError,
        IncompatibleWeightsError,
        IntegrityError,
        ManifestError,
        OverlayError,
        SourceError,
        UnpinnedRevisionError,
    )
    from .hub import default_cache_dir
    from .load import Overlay, load_overlay
    from .manifest import OverlayManifest, builtin_overlays
    from .materialize import materialize_overlay
    from .record import verify_folder
