"""Every example in a docstring runs on the CPU and gives what it shows; every public object has one."""

import ast
import doctest
import importlib
import inspect
import re
from pathlib import Path

import pytest


SOURCE = Path(__file__).parents[2] / "src"


def _docstrings(node, name):
    """Yield the name, docstring and line of a module, class or function and of everything in it."""
    if text := ast.get_docstring(node, clean=False):
        yield name, text, node.body[0].lineno
    for child in node.body:
        if isinstance(child, (ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _docstrings(child, f"{name}.{child.name}")


def _examples():
    """Return the examples of the whole package, read without importing it: decorators and lazy names hide nothing."""
    found = {}
    for path in sorted(SOURCE.rglob("*.py")):
        module = ".".join(path.relative_to(SOURCE).with_suffix("").parts).removesuffix(".__init__")
        for name, text, line in _docstrings(ast.parse(path.read_text(encoding="utf-8")), module):
            if ">>>" in text:
                # An example has to be complete: it gets no names but those it imports.
                found[name] = doctest.DocTestParser().get_doctest(text, {}, name, str(path), line)
    return found


EXAMPLES = _examples()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where examples write, and where the embedded release and its overlays are made, once for all of them."""
    return tmp_path_factory.mktemp("examples")


@pytest.fixture(autouse=True)
def _machine(folder, monkeypatch):
    """A machine whose card multiplies fp8, as far as a configuration asks; files go to a folder of the tests."""
    from diffusers_h3.models import quantization

    monkeypatch.setattr(quantization, "cuda_capability", lambda: (8, 9))
    monkeypatch.setenv("DIFFUSERS_H3_CACHE", str(folder / "cache"))
    monkeypatch.chdir(folder)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
@pytest.mark.parametrize("name", EXAMPLES)
def test_example(name):
    report = []
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(EXAMPLES[name], out=report.append)
    assert runner.tries == len(EXAMPLES[name].examples) > 0
    assert not runner.failures, "".join(report)


def _public_objects():
    """Yield, by the names their docstrings have, what the package exports and what the API page describes."""
    import diffusers_h3
    from diffusers_h3 import overlays

    exported = [getattr(module, name) for module in (diffusers_h3, overlays) for name in module.__all__]
    page = (SOURCE.parent / "docs" / "api.md").read_text(encoding="utf-8")
    for path, members in re.findall(r"^::: (\S+)\n(?:.*\n)?(?: +members: \[(.*)\])?", page, re.MULTILINE):
        module, _, name = path.rpartition(".")
        owner = getattr(importlib.import_module(module), name)
        exported.append(owner)
        exported += [inspect.getattr_static(owner, member) for member in members.split(", ") if member]
    for item in exported:
        item = inspect.unwrap(getattr(item, "__func__", item))
        is_error = inspect.isclass(item) and issubclass(item, Exception)
        if (inspect.isclass(item) or inspect.isfunction(item)) and not is_error:
            yield f"{item.__module__}.{item.__qualname__}"


def test_every_public_object_has_an_example():
    public = set(_public_objects())
    assert {
        "diffusers_h3.hybrid.layout.SequenceLayout",
        "diffusers_h3.overlays.record.verify_folder",
        "diffusers_h3.pipelines.pipeline_vdn_h3.VDNH3Pipeline.__call__",
        "diffusers_h3.pipelines.pipeline_vdn_h3.VDNH3Pipeline.from_pretrained",
    } <= public
    assert sorted(public - EXAMPLES.keys()) == []
