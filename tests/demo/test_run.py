import pytest

import diffusers_h3
from diffusers_h3.demo import run


def test_cached_release_is_built_once(tmp_path, monkeypatch):
    built = []

    def build(directory):
        built.append(directory)
        directory.mkdir()

    monkeypatch.setattr(run, "build_release", build)
    expected = tmp_path / "demo" / f"release-{diffusers_h3.__version__}"
    assert [run.cached_release(tmp_path), run.cached_release(str(tmp_path))] == [expected, expected]
    assert built == [expected]


def test_cached_release_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("DIFFUSERS_H3_CACHE", str(tmp_path / "elsewhere"))
    monkeypatch.setattr(run, "build_release", lambda directory: directory.mkdir())
    assert run.cached_release().parent == tmp_path / "elsewhere" / "demo"


def test_cached_release_removes_what_a_killed_build_left(tmp_path, monkeypatch):
    leftover = tmp_path / "demo" / f".release-{diffusers_h3.__version__}-x1y2z3" / "release"
    leftover.mkdir(parents=True)
    (leftover / "half.safetensors").write_bytes(b"half")
    monkeypatch.setattr(run, "build_release", lambda directory: directory.mkdir())
    release = run.cached_release(tmp_path)
    assert sorted(path.name for path in release.parent.iterdir()) == [release.name, f"{release.name}.lock"]


def test_a_failed_build_is_tried_again(tmp_path, monkeypatch):
    def full(directory):
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(run, "build_release", full)
        with pytest.raises(OSError, match="No space left"):
            run.cached_release(tmp_path)
    assert (run.cached_release(tmp_path) / "h3-base" / "transformer" / "config.json").is_file()
