"""Every Triton kernel against float64, in Triton's interpreter.

The interpreter is chosen when Triton is imported and for a whole process. So each suite of `triton_interpreter/` runs
in a process of its own, and its file names keep pytest from collecting it here.
"""

import os
import subprocess
import sys
from pathlib import Path

import pytest


FOLDER = Path(__file__).parent / "triton_interpreter"
SUITES = ("delta_rule", "frame_statistics", "layer", "linear_state", "merge", "offsets", "short_conv")


def test_every_suite_is_run():
    assert sorted(path.stem for path in FOLDER.glob("kernels_*.py")) == [f"kernels_{name}" for name in SUITES]


@pytest.mark.slow
@pytest.mark.parametrize("suite", SUITES)
def test_in_the_interpreter(suite):
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    environment |= {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", FOLDER / f"kernels_{suite}.py"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert " passed" in run.stdout
    assert " skipped" not in run.stdout
