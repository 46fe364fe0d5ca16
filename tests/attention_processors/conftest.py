"""The FlashInfer stand-in and tiny real models as fixtures."""

import importlib.util
import pathlib
import sys

import pytest


def _load(name):
    """Import a module beside this file, which is no package."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, pathlib.Path(__file__).with_name(f"{name}.py"))
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


@pytest.fixture
def hopper(monkeypatch):
    """A machine with one Hopper card, FlashInfer and a compiler; the CPU passes for the card."""
    return _load("flashinfer_stand_in").pretend_hopper(monkeypatch)


@pytest.fixture
def stand_in(hopper, monkeypatch):
    """FlashInfer's stand-in on a Hopper card; `stand_in.calls` records what ran."""
    return _load("flashinfer_stand_in").install(monkeypatch)


@pytest.fixture
def fresh_backends(monkeypatch):
    """Undo what a test does to Diffusers' process-wide default backend."""
    from diffusers.models.attention_dispatch import _AttentionBackendRegistry

    monkeypatch.setattr(_AttentionBackendRegistry, "_active_backend", _AttentionBackendRegistry._active_backend)


@pytest.fixture
def make_model():
    return _load("tiny_models").make_model


@pytest.fixture
def make_inputs():
    return _load("tiny_models").make_inputs
