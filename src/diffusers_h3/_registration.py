"""Make diffusers find this package's pipeline and model by the names that `model_index.json` records.

diffusers looks pipelines up as attributes of its own package and takes components only from libraries in its
`LOADABLE_CLASSES` table; it has no entry point for other packages. Importing diffusers takes seconds, so nothing is
imported here: each registration runs right away when its module is loaded already, and otherwise as soon as it is.
"""

import importlib
import importlib.abc
import importlib.machinery
import sys
from collections.abc import Callable
from types import ModuleType


_PACKAGE = __name__.partition(".")[0]
_PIPELINES = ("VDNH3Pipeline",)
_COMPONENTS = ("VDNH3Transformer3DModel",)


def _register_pipelines(diffusers: ModuleType) -> None:
    """Let `getattr(diffusers, "VDNH3Pipeline")` import the class, through a module `__getattr__` (PEP 562)."""
    previous = vars(diffusers).get("__getattr__")

    def __getattr__(name: str):
        if name in _PIPELINES:
            return getattr(importlib.import_module(_PACKAGE), name)
        if previous is not None:
            return previous(name)
        # diffusers' own lazy lookup, a method of the module's class, runs after this error.
        raise AttributeError(f"module {diffusers.__name__!r} has no attribute {name!r}")

    diffusers.__getattr__ = __getattr__


def _register_components(loading_utils: ModuleType) -> None:
    """Declare this package's models as loadable, so that diffusers saves and loads them like its own."""
    classes = {name: ["save_pretrained", "from_pretrained"] for name in _COMPONENTS}
    loading_utils.LOADABLE_CLASSES[_PACKAGE] = classes
    loading_utils.ALL_IMPORTABLE_CLASSES.update(classes)


def _register_attention_backend(_: ModuleType) -> None:
    """Give Diffusers' attention dispatch the public backend name `"flashinfer"`."""
    importlib.import_module(f"{_PACKAGE}.attention_processors.flashinfer_backend")


_REGISTRATIONS: dict[str, Callable[[ModuleType], None]] = {
    "diffusers": _register_pipelines,
    "diffusers.models.attention_dispatch": _register_attention_backend,
    "diffusers.pipelines.pipeline_loading_utils": _register_components,
}


class _RegisteringFinder(importlib.abc.MetaPathFinder):
    """Find the modules of `_REGISTRATIONS` as the other finders do, and register once their code has run."""

    def find_spec(self, fullname, path=None, target=None) -> importlib.machinery.ModuleSpec | None:
        """Return the spec that the next finder gives, with a loader that also registers."""
        if fullname not in _REGISTRATIONS:
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                break
        else:
            return None
        execute = spec.loader.exec_module

        def execute_and_register(module: ModuleType) -> None:
            execute(module)
            # diffusers replaces itself in `sys.modules` by a lazy module while its code runs.
            _REGISTRATIONS[fullname](sys.modules[fullname])

        spec.loader.exec_module = execute_and_register
        return spec


def register() -> None:
    """Register the package with diffusers, now or as soon as diffusers is imported; repeated calls change nothing."""
    if any(isinstance(finder, _RegisteringFinder) for finder in sys.meta_path):
        return
    sys.meta_path.insert(0, _RegisteringFinder())
    for name, registration in _REGISTRATIONS.items():
        if name in sys.modules:
            registration(sys.modules[name])
