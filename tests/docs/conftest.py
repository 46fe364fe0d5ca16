"""The documentation, its generators and the notebooks as tests read them."""

import importlib
from pathlib import Path

import pytest


ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="session")
def root():
    """The root of the repository."""
    return ROOT


@pytest.fixture
def load_script(monkeypatch):
    """A function importing a module of `scripts/docs`, whose modules import each other by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts" / "docs"))
    return importlib.import_module
