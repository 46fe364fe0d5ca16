import subprocess
import sys
import time
from pathlib import Path

import pytest
from PIL import Image

import diffusers_h3


COMMANDS = [
    (),
    ("generate",),
    ("materialize",),
    ("overlays",),
    ("overlays", "list"),
    ("overlays", "show"),
    ("overlays", "verify"),
    ("demo",),
    ("doctor",),
    ("plan",),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_help_teaches_on_stdout(run, words):
    finished = run(*words, "--help")
    assert finished.code == 0
    assert finished.err == ""
    assert f"Usage: diffusers-h3{''.join(f' {word}' for word in words)}" in finished.out
    if words != ("overlays",):
        assert finished.out.count("diffusers-h3 ") >= 2, "a help text needs an example that can be copied"
    assert run(*words, "-h").out == finished.out


def test_bare_call_is_help(run):
    assert run().out.split() == run("--help").out.split()


def test_version(run):
    finished = run("--version")
    assert (finished.code, finished.out) == (0, f"diffusers-h3 {diffusers_h3.__version__}\n")


@pytest.mark.parametrize("words", [("--help",), ("generate", "--help"), ("overlays", "show", "vdn-h3-8step")])
def test_help_and_descriptions_need_neither_torch_nor_diffusers(words):
    script = (
        "import sys\n"
        "from diffusers_h3.cli import main\n"
        "try:\n"
        "    main()\n"
        "except SystemExit as stop:\n"
        "    heavy = {'torch', 'transformers', 'diffusers.utils'} & set(sys.modules)\n"
        "    sys.exit(f'imported {heavy}' if heavy or stop.code else 0)\n"
    )
    started = time.monotonic()
    done = subprocess.run([sys.executable, "-c", script, *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "diffusers-h3" in done.stdout or "vdn-h3-8step" in done.stdout
    assert time.monotonic() - started < 10


@pytest.fixture
def files(tmp_path):
    """Files and folders the wrong calls below name, in the order of their placeholders."""
    (tmp_path / "text.png").write_text("not an image")
    (tmp_path / "exists.mp4").write_bytes(b"mine")
    (tmp_path / "folder.mp4").mkdir()
    (tmp_path / "empty").mkdir()
    Image.new("RGB", (640, 100)).save(tmp_path / "wide.png")
    other = tmp_path / "other"
    other.mkdir()
    (other / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "model_index.json").write_text("{")
    return tmp_path


# Every call, and what its message must name: what was given, and what is allowed or the way out.
WRONG = {
    "no prompt": ("generate", ["PROMPT"]),
    "unknown command": ("paint", ["paint"]),
    "unknown option": ("generate x --colour red", ["--colour"]),
    "not a number": ("generate x --height tall", ["--height"]),
    "empty prompt": ("generate  --height 64 --width 64", ["PROMPT", "--image"]),
    "height alone": ("generate x --height 64", ["--height", "--width", "together"]),
    "height between": ("generate x --height 848 --width 1000", ["--height", "848", "832", "864"]),
    "width between": ("generate x --height 832 --width 1000", ["--width", "1000", "992", "1024"]),
    "height zero": ("generate x --height 0 --width 64", ["--height", "32"]),
    "too short": ("generate x --frames 81", ["--frames", "81", "124"]),
    "too long": ("generate x --frames 360", ["--frames", "360", "345"]),
    "steps of other weights": ("generate x --steps 30", ["--steps 30", "8", "--force-steps"]),
    "no steps": ("generate x --steps 0", ["--steps"]),
    "negative seed": ("generate x --seed -1", ["--seed", "-1"]),
    "huge seed": ("generate x --seed 9223372036854775808", ["--seed", "2^63"]),
    "unknown dtype": ("generate x --dtype int4", ["--dtype", "bfloat16"]),
    "unknown device": ("generate x --device toaster", ["--device toaster"]),
    "device not there": ("generate x --device xpu:7", ["--device xpu:7"]),
    "nothing to offload": ("generate x --device cpu --offload group", ["--offload group", "CPU"]),
    "no image": ("generate x --image {}/absent.png", ["--image", "absent.png"]),
    "text as image": ("generate x --last-image {}/text.png", ["--last-image", "text.png", "image"]),
    "keyframe too wide": ("generate x --image {}/wide.png", ["640:100", "4:1"]),
    "other ending": ("generate x --output {}/clip.avi", ["--output", ".mp4", "clip.avi"]),
    "output exists": ("generate x --output {}/exists.mp4", ["exists.mp4", "--overwrite"]),
    "output is a folder": ("generate x --output {}/folder.mp4", ["folder.mp4", "folder"]),
    "output below a file": ("generate x --output {}/text.png/clip.mp4", ["text.png", "not a folder"]),
    "unknown overlay": ("generate x --overlay vdn-h3-9step", ["vdn-h3-9step", "vdn-h3-8step"]),
    "folder of no overlay": ("generate x --overlay {}/empty", ["empty", "h3-base"]),
    "folder of another pipeline": ("generate x --overlay {}/other", ["WanPipeline", "VDNH3Pipeline"]),
    "broken pipeline folder": ("generate x --overlay {}/broken", ["model_index.json", "JSON"]),
    "revision of a folder": ("generate x --overlay {}/other --revision main", ["--revision", "folder"]),
    "revision of a built-in": ("materialize vdn-h3-8step --revision main", ["--revision", "vdn-h3-8step"]),
    "branch": ("materialize owner/name --revision main", ["main", "40", "--allow-unpinned"]),
    "no revision": ("overlays show owner/name", ["owner/name", "--allow-unpinned"]),
    "unknown component": ("materialize vdn-h3-8step --components unet", ["unet", "transformer"]),
    "no component": ("materialize vdn-h3-8step --components ,", ["--components", "nothing"]),
    "unknown overlay to show": ("overlays show vdn-h3-9step", ["vdn-h3-9step", "vdn-h3-50step"]),
    "demo output exists": ("demo --output {}/exists.mp4", ["exists.mp4", "--overwrite"]),
    "demo sheet exists": ("demo --contact-sheet {}/text.png", ["--contact-sheet", "text.png", "--overwrite"]),
    "demo sheet of another kind": ("demo --contact-sheet {}/sheet.jpg", ["--contact-sheet", ".png", "sheet.jpg"]),
    "demo without prompt": ("demo --prompt  --seed 1", ["--prompt"]),
}


@pytest.mark.parametrize(("line", "named"), WRONG.values(), ids=WRONG)
def test_wrong_usage_is_two_lines_and_code_2(run, files, line, named, monkeypatch):
    monkeypatch.chdir(files)
    before = sorted(files.rglob("*"))
    # A single space separates words, so two of them hold an empty one.
    finished = run(*(word.format(files) for word in line.split(" ")))
    assert finished.code == 2, finished.err
    assert finished.out == ""
    assert len(finished.error_lines) == 2, finished.err
    message, hint = finished.error_lines
    assert message.startswith("error: ")
    assert hint.startswith("Try 'diffusers-h3")
    for text in named:
        assert text in message
    assert "Traceback" not in finished.err
    assert sorted(files.rglob("*")) == before
    assert (files / "exists.mp4").read_bytes() == b"mine"


def test_an_output_folder_that_is_not_writable(run, tmp_path, monkeypatch):
    # The superuser may write anywhere, so the answer of the system is put in its mouth.
    monkeypatch.setattr("diffusers_h3.cli.checks.os.access", lambda path, mode: Path(path) != tmp_path)
    finished = run("demo", "--output", tmp_path / "new" / "clip.mp4")
    assert finished.code == 2
    assert f"{tmp_path} is not writable" in finished.err
    assert list(tmp_path.iterdir()) == []


def test_wrong_usage_as_a_process(command, quiet_environment, tmp_path):
    (tmp_path / "clip.mp4").write_bytes(b"mine")
    done = subprocess.run(
        [*command, "demo", "--output", "clip.mp4"],
        cwd=tmp_path,
        env=quiet_environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines() == [
        "error: --output clip.mp4 exists already; pass --overwrite to replace it.",
        "Try 'diffusers-h3 demo --help'.",
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


@pytest.mark.parametrize(
    ("error", "lines"),
    [
        (OSError(28, "No space left on device"), ["error: [Errno 28] No space left on device"]),
        (RuntimeError("first\n\nsecond\nthird"), ["error: first", "second"]),
        (ValueError("pass `overwrite=True`"), ["error: pass --overwrite"]),
        (
            KeyError("scheduler"),
            [
                "error: unexpected KeyError: 'scheduler'",
                "Run again with 'diffusers-h3 --traceback …' and report it.",
            ],
        ),
        (ValueError(), ["error: unexpected ValueError", "Run again with 'diffusers-h3 --traceback …' and report it."]),
    ],
    ids=lambda value: type(value).__name__,
)
def test_failing_work_is_two_lines_and_code_1(run, tmp_path, monkeypatch, error, lines):
    def fail(*arguments):
        raise error

    monkeypatch.setattr("diffusers_h3.demo.run.embedded_release", fail)
    finished = run("demo", "--output", tmp_path / "clip.mp4")
    assert finished.code == 1
    assert finished.out == ""
    assert finished.error_lines == lines
    assert list(tmp_path.iterdir()) == []


def test_traceback_on_request(tmp_path, monkeypatch):
    from typer.testing import CliRunner

    from diffusers_h3.cli import app

    def fail(*arguments):
        raise KeyError("scheduler")

    monkeypatch.setattr("diffusers_h3.demo.run.embedded_release", fail)
    result = CliRunner().invoke(app, ["--traceback", "demo", "--output", str(tmp_path / "clip.mp4")])
    assert result.exit_code == 1
    assert isinstance(result.exception, KeyError)
