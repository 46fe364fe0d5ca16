import json
import shutil
import subprocess
from pathlib import Path

import pytest
from PIL import Image

from diffusers_h3.demo.probe import probe_media


SMALL = ("--height", "64", "--width", "64", "--device", "cpu")
LICENCE = "MiniMax-H3 Community License"

# The parts of a whole pipeline, as `model_index.json` names them.
COMPONENTS = [
    "audio_scheduler",
    "audio_vae",
    "processor",
    "scheduler",
    "text_encoder",
    "tokenizer",
    "transformer",
    "vae",
]


def test_materialize_prints_the_folder_alone(run, cache, folder, tiny_release):
    finished = run("materialize", tiny_release / "stage-dmd-step-250", "--cache-dir", cache)
    assert finished.code == 0
    assert finished.out == f"{folder}\n"
    assert finished.err.count(LICENCE) == 1
    assert Path(folder).parent == cache
    index = json.loads((Path(folder) / "model_index.json").read_text())
    assert (index["_class_name"], index["num_inference_steps"]) == ("VDNH3Pipeline", 8)


def test_materialize_json(run, cache, folder, tiny_release):
    finished = run("materialize", tiny_release / "stage-dmd-step-250", "--cache-dir", cache, "--json")
    assert finished.json == {
        "folder": folder,
        "name": "stage-dmd-step-250",
        "components": COMPONENTS,
        "num_inference_steps": 8,
    }


def test_materialize_some_components(run, tmp_path, tiny_release):
    source = tiny_release / "stage-b-step-2000"
    arguments = ("--components", "transformer, scheduler", "--cache-dir", tmp_path, "--json")
    finished = run("materialize", source, *arguments)
    assert finished.code == 0, finished.err
    assert finished.json["components"] == ["scheduler", "transformer"]
    assert finished.json["num_inference_steps"] is None


def test_materialize_without_room_is_code_1(run, tmp_path, tiny_release, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: shutil._ntuple_diskusage(10**6, 10**6, 10))
    finished = run("materialize", tiny_release / "stage-dmd-step-250", "--cache-dir", tmp_path)
    assert finished.code == 1
    assert [line for line in finished.error_lines if line.startswith("error: ")]
    assert "Traceback" not in finished.err
    assert list(tmp_path.glob("stage-*")) == []


def test_nothing_of_a_built_in_here_is_code_1(run, tmp_path):
    for words in (("materialize", "vdn-h3-8step", "--local-files-only"), ("overlays", "verify", "vdn-h3-50step")):
        finished = run(*words, "--cache-dir", tmp_path)
        assert finished.code == 1
        assert finished.out == ""
        assert finished.error_lines[-1].startswith("error: ")


def test_list(run, tmp_path, cache, folder):
    listed = run("overlays", "list", "--cache-dir", cache, "--json").json
    assert [(entry["name"], entry["num_inference_steps"]) for entry in listed["builtin"]] == [
        ("vdn-h3-50step", None),
        ("vdn-h3-8step", 8),
    ]
    assert all(LICENCE in entry["license_note"] for entry in listed["builtin"])
    (made,) = [entry for entry in listed["materialized"] if entry["folder"] == folder]
    assert made["name"] == "stage-dmd-step-250"
    assert sorted(made["components"]) == COMPONENTS
    # Everything but the record itself.
    files = [path for path in Path(folder).rglob("*") if path.is_file() and path.name != "overlay.json"]
    assert made["bytes"] == sum(path.stat().st_size for path in files)

    text = run("overlays", "list", "--cache-dir", cache).out
    assert "vdn-h3-8step " in text
    assert f"{folder}\n" in text
    assert run("overlays", "list", "--cache-dir", tmp_path, "--json").json["materialized"] == []


def test_list_leaves_out_a_broken_record(run, tmp_path):
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "overlay.json").write_text("{")
    finished = run("overlays", "list", "--cache-dir", tmp_path, "--json")
    assert (finished.code, finished.json["materialized"]) == (0, [])
    assert "broken" in finished.err


def test_show_is_a_manifest_that_can_be_loaded(run, tmp_path):
    finished = run("overlays", "show", "vdn-h3-8step", "--json")
    manifest = finished.json
    assert manifest["linear_branch"]["weights"] == {
        "file": "model.safetensors",
        "sha256": "dec6981c7874f5b3bc92d1a02e256b673a3b3499dc1a124714bb3b19da602855",
        "bytes": 4279428112,
        "tensors": 800,
    }
    assert manifest["components"]["text_encoder"]["revision"] == "939557dc319dd91227e30195a763f272ba7f8765"
    copy = tmp_path / "copy.json"
    copy.write_text(finished.out)
    assert run("overlays", "show", copy, "--json").json == manifest


def test_show_as_text_keeps_digests_in_one_line(run, tiny_release):
    text = run("overlays", "show", "vdn-h3-8step").out
    for value in (
        "58558fef506f88bb41649242de9b9b3a365da806b51b2e96afbbe1625222058a",
        "OpenVDN/vdn-minimax-h3/h3-base/transformer at 18be6bcc4ee72585eee322ba28b5ccac2cf85ef0",
        "12 video, 3 audio",
        LICENCE,
    ):
        assert value in text
    local = run("overlays", "show", tiny_release / "stage-b-step-2000").out
    assert str(tiny_release / "h3-base" / "vae") in local
    assert "any number; 50 recommended" in local


def test_verify_finds_what_changed(run, tmp_path, tiny_release):
    arguments = ("--cache-dir", tmp_path, "--json")
    made = Path(run("materialize", tiny_release / "stage-b-step-2000", *arguments).json["folder"])
    report = run("overlays", "verify", made, "--json")
    assert report.code == 0
    assert report.json["ok"]
    assert {entry["status"] for entry in report.json["files"]} == {"ok"}
    assert {Path(entry["file"]).relative_to(made).parts[0] for entry in report.json["files"]} == {
        *COMPONENTS,
        "model_index.json",
    }

    # Same size, other bytes: only a digest can tell. A new file, since links share their bytes with the release.
    shard = made / "transformer" / "diffusion_pytorch_model-00002-of-00003.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.unlink()
    shard.write_bytes(content)
    (made / "scheduler" / "scheduler_config.json").unlink()
    for source in (made, tiny_release / "stage-b-step-2000"):
        report = run("overlays", "verify", source, *arguments)
        assert report.code == 1
        assert not report.json["ok"]
        statuses = {entry["file"]: entry["status"] for entry in report.json["files"]}
        assert {file: status for file, status in statuses.items() if status in ("changed", "missing")} == {
            str(shard): "changed",
            str(made / "scheduler" / "scheduler_config.json"): "missing",
        }

    text = run("overlays", "verify", made)
    assert text.code == 1
    assert f"changed     {shard}\n" in text.out
    assert text.out.splitlines()[-1].endswith("1 changed, 1 missing")


@pytest.mark.slow
def test_a_private_repository_from_download_to_verification(
    run, command, quiet_environment, hub_server_class, tiny_release, tmp_path
):
    with hub_server_class({"owner/tiny": tiny_release}, token="secret") as hub:
        environment = {**quiet_environment, "HF_ENDPOINT": hub.url, "HF_TOKEN": "secret"}
        source, commit = "owner/tiny//stage-dmd-step-250", hub.commit("owner/tiny")
        words = [*command, "materialize", source, "--revision", commit, "--cache-dir", "cache", "--json"]
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        folder = Path(json.loads(done.stdout)["folder"])
        assert folder.parent == tmp_path / "cache"

        environment.pop("HF_TOKEN")
        words[-2] = "other-cache"
        done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
        assert (done.returncode, done.stdout) == (1, "")
        assert "owner/tiny" in done.stderr
        assert "token" in done.stderr
        assert "Traceback" not in done.stderr

    # The server is gone: what follows opens no connection.
    pinned = (source, "--revision", commit, "--cache-dir", tmp_path / "cache")
    assert run("materialize", *pinned, "--local-files-only").out == f"{folder}\n"
    report = run("overlays", "verify", *pinned, "--json")
    assert report.code == 0, report.out
    assert {entry["status"] for entry in report.json["files"]} == {"ok"}
    downloads = [entry["file"] for entry in report.json["files"] if entry["file"].startswith("owner/tiny@")]
    assert len([file for file in downloads if "/adapters/" in file and file.endswith(".safetensors")]) == 2

    # A download that is no longer what its manifest says, and one that is no longer what the Hub published.
    manifest = run("overlays", "show", *pinned, "--local-files-only", "--json").json
    manifest["linear_branch"]["weights"]["sha256"] = "0" * 64
    (tmp_path / "manifest.json").write_text(json.dumps(manifest))
    snapshot = tmp_path / "cache" / "models--owner--tiny" / "snapshots" / commit
    blob = (snapshot / "stage-dmd-step-250/adapters/turbo/adapter_model.safetensors").resolve()
    content = bytearray(blob.read_bytes())
    content[-1] ^= 1
    blob.unlink()
    blob.write_bytes(content)
    report = run("overlays", "verify", tmp_path / "manifest.json", "--cache-dir", tmp_path / "cache", "--json")
    assert report.code == 1
    assert [entry["file"].partition("/stage-")[2] for entry in report.json["files"] if entry["status"] != "ok"] == [
        "dmd-step-250/adapters/turbo/adapter_model.safetensors",
        "dmd-step-250/linear_branch/model.safetensors",
    ]


@pytest.fixture(scope="session")
def first_frame(tmp_path_factory):
    path = tmp_path_factory.mktemp("keyframes") / "first.png"
    Image.radial_gradient("L").resize((100, 80)).convert("RGBA").save(path)
    return path


def test_generate_from_a_folder_with_keyframes(run, folder, first_frame, tmp_path):
    output = tmp_path / "new" / "clip.mp4"
    finished = run(
        *("generate", "A lantern.", "--overlay", folder, "--output", output, "--seed", "7", "--json", *SMALL),
        *("--image", first_frame, "--last-image", first_frame, "--steps", "2", "--force-steps"),
    )
    assert finished.code == 0, finished.err
    assert finished.json == {
        "output": str(output),
        "weights": folder,
        "prompt": "A lantern.",
        "seed": 7,
        "steps": 2,
        "height": 64,
        "width": 64,
        "frames": 124,
        "fps": 24,
        "seconds": 124 / 24,
        "audio_channels": 2,
        "sampling_rate": 32000,
        "device": "cpu",
    }
    assert finished.err.count(LICENCE) == 1
    assert [path.name for path in output.parent.iterdir()] == ["clip.mp4"]
    report = probe_media(output)
    assert (report.frames, report.fps, report.width, report.height) == (124, 24.0, 64, 64)
    assert (report.audio_channels, report.sampling_rate) == (2, 32000)


def test_generate_from_an_overlay_replaces_only_on_request(run, cache, folder, tiny_release, tmp_path):
    output = tmp_path / "clip.mp4"
    output.write_bytes(b"mine")
    words = ("generate", "A lantern.", "--overlay", tiny_release / "stage-dmd-step-250", "--cache-dir", cache)
    words = (*words, "--output", output, *SMALL)
    refused = run(*words)
    assert refused.code == 2
    assert output.read_bytes() == b"mine"

    finished = run(*words, "--overwrite")
    assert finished.code == 0, finished.err
    assert finished.out == f"{output}\n"
    assert probe_media(output).frames == 124
    assert [path.name for path in tmp_path.iterdir()] == ["clip.mp4"]


def test_generate_seed_decides_the_video(run, folder, tmp_path, monkeypatch):
    """The noise comes from the seed alone: equal for equal seeds, other for others."""
    drawn = []

    def capture(self, **request):
        drawn.append(request["generator"].initial_seed())
        raise RuntimeError("far enough")

    monkeypatch.setattr("diffusers_h3.pipelines.pipeline_vdn_h3.VDNH3Pipeline.__call__", capture)
    for seed in (0, 5):
        finished = run("generate", "x", "--overlay", folder, "--seed", seed, "--output", tmp_path / "x.mp4", *SMALL)
        assert (finished.code, finished.error_lines[-1]) == (1, "error: far enough")
    assert drawn == [0, 5]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_json_is_all_there_is_on_stdout(command, quiet_environment, folder, tmp_path):
    words = ["generate", "A lantern.", "--overlay", folder, "--output", "clip.mp4", "--json", *SMALL]
    done = subprocess.run(
        [*command, *words], cwd=tmp_path, env=quiet_environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["output"] == str(tmp_path / "clip.mp4")
    assert "8/8" in done.stderr, "the progress bar belongs on stderr"
