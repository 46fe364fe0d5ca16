import pytest

from diffusers_h3.planning.measured import Measurement


DEFAULTS = {
    "card": "NVIDIA H200",
    "date": "2026-12-02",
    "versions": {"torch": "2.11.0"},
    "model": "hybrid",
    "height": 768,
    "width": 1344,
    "text_rows": 200,
    "precision": "bf16",
    "attention_precision": "bf16",
    "offload": "none",
    "compiled": True,
    "memory_cap_gb": None,
}
ROWS = {124: 37_910, 141: 43_006, 345: 104_166}


@pytest.fixture
def run_of():
    """A function making a measurement of so many frames of 1344×768 on an H200."""

    def make(frames, seconds, peak, weights=70.0, **fields):
        measured = {"frames": frames, "rows": ROWS[frames], "seconds_per_call": seconds, "peak_gb": peak}
        return Measurement(**DEFAULTS | measured | {"weights_gb": weights} | fields)

    return make


@pytest.fixture
def measured_runs(monkeypatch):
    """A function putting other measurements in the place of those of the package."""

    def put(*runs):
        monkeypatch.setattr("diffusers_h3.planning.estimate.measurements", lambda: runs)

    return put
