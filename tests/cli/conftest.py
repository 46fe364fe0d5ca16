import json
import os
import sys
from dataclasses import dataclass

import pytest
from typer.testing import CliRunner


@dataclass(frozen=True)
class Finished:
    code: int
    out: str
    err: str

    @property
    def json(self):
        return json.loads(self.out)

    @property
    def error_lines(self):
        return [line for line in self.err.splitlines() if line.strip()]


@pytest.fixture(scope="session")
def run():
    """A function running the command line in this process."""
    # What other libraries print when they are first imported is no part of a command's messages.
    import diffusers_h3.pipelines.pipeline_vdn_h3  # noqa: F401
    from diffusers_h3 import notices
    from diffusers_h3.cli import app

    def run(*arguments):
        notices._log.cache_clear()  # of once in a process
        result = CliRunner().invoke(app, [str(argument) for argument in arguments], prog_name="diffusers-h3")
        return Finished(result.exit_code, result.stdout, result.stderr)

    return run


@pytest.fixture
def command():
    """The command line as a process of its own takes it."""
    return [sys.executable, "-m", "diffusers_h3"]


@pytest.fixture
def quiet_environment():
    """The tests' environment, with stderr as it comes and one thread for PyTorch."""
    return {**os.environ, "PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1"}


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """A cache directory that all tests of a worker share, so that the tiny overlay is merged once."""
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="session")
def folder(run, cache, tiny_release):
    """The tiny 8-step overlay, materialised by the command line."""
    finished = run("materialize", tiny_release / "stage-dmd-step-250", "--cache-dir", cache, "--json")
    assert finished.code == 0, finished.err
    return finished.json["folder"]
