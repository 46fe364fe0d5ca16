import json
import shutil

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from safetensors.torch import load_file, save_file

from training import data, dense, evaluate, export, hybrid, loop, packing, turbo


MERGED_TOLERANCE = 0.008


@pytest.fixture(scope="module")
def grown(trained, tmp_path_factory):
    """A run whose adapters are large enough to be missed: after one step a fresh one still adds next to nothing."""
    folder = tmp_path_factory.mktemp("grown") / "run"
    shutil.copytree(trained, folder)
    generator = torch.Generator().manual_seed(0)
    for stage in ("hybrid", "turbo"):
        file = folder / stage / "weights.safetensors"
        weights = load_file(file)
        for name, value in weights.items():
            if ".lora_B." in name:
                weights[name] = 0.3 * torch.randn(value.shape, generator=generator)
            elif "to_out_linear" in name:
                weights[name] = 0.2 * torch.randn(value.shape, generator=generator)
        save_file(weights, file)
    return folder


@pytest.fixture(scope="module")
def release(grown, tmp_path_factory):
    return export.export_release(grown, tmp_path_factory.mktemp("out") / "release")


def test_the_release_is_small_and_in_the_published_layout(release):
    assert sum(file.stat().st_size for file in release.rglob("*") if file.is_file()) < 12e6
    assert sorted(path.name for path in release.iterdir()) == [
        "digests.json",
        "h3-base",
        "stage-b-step-2000",
        "stage-dmd-step-250",
    ]
    metadata = json.loads((release / "stage-dmd-step-250" / "metadata.json").read_text())["metadata"]
    assert "MiniMax" not in metadata.pop("license_note")
    assert metadata == {"turbo_num_steps": 8, "video_shift": 12.0, "audio_shift": 3.0}
    keys = set(load_file(release / "stage-dmd-step-250" / "adapters" / "default" / "adapter_model.safetensors"))
    assert "transformer_blocks.0.attn.orig.to_q.lora_A.default.weight" in keys
    assert "token_refiner.refiner_blocks.0.attn.to_q.lora_B.default.weight" in keys


def test_the_release_does_not_say_where_it_was_made(release, grown):
    files = [path for path in release.rglob("*") if path.suffix in (".json", ".jinja", ".txt")]
    assert {"digests.json", "config.json", "metadata.json", "tokenizer.json"} <= {path.name for path in files}
    assert [path for path in files if str(grown) in path.read_text(encoding="utf-8")] == []
    vae = json.loads((release / "h3-base" / "vae" / "config.json").read_text())
    assert vae["_class_name"] == "AutoencoderKLMiniMaxH3"
    assert vae.get("_name_or_path", "") == ""


def relative_error(value, expected):
    return float((value - expected).norm() / expected.norm())


@pytest.mark.parametrize("stage", ["hybrid", "turbo"])
def test_the_merged_release_computes_what_the_run_does(stage, release, grown, device, pool, tmp_path):
    """Through overlay and pipeline, up to the one rounding of the merged weights to bfloat16."""
    merged = evaluate.release_pipeline(release, stage, device, tmp_path).transformer
    beside = (
        turbo.load_turbo(grown, device, pool.text_dim)
        if stage == "turbo"
        else hybrid.load_hybrid(grown, device, pool.text_dim, "hybrid")
    )
    draws = loop.Draws.of(0, 0, torch.device("cpu"))
    batch = pool.draw(1, draws)
    noisy, _, times = dense.noised(batch, 0.3, draws)
    timesteps = batch.packing.timesteps(*times)
    with torch.no_grad():
        expected = packing.velocity(beside, batch.packing, *noisy, batch.text, timesteps)
        found = packing.velocity(merged, batch.packing, *noisy, batch.text, timesteps)
        beside.disable_lora()
        without = packing.velocity(beside, batch.packing, *noisy, batch.text, timesteps)
    for value, other, right in zip(found, without, expected, strict=True):
        assert relative_error(value, right) < MERGED_TOLERANCE
        assert relative_error(other, right) > 5 * MERGED_TOLERANCE


def test_the_dense_pipeline_is_the_base_alone(release, grown, device, pool, tmp_path):
    pipeline = evaluate.release_pipeline(release, "dense", device, tmp_path)
    assert type(pipeline.transformer) is MiniMaxH3Transformer3DModel
    expected = dense.load_dense(grown, device, pool.text_dim).state_dict()
    found = pipeline.transformer.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name].float(), expected[name].float()) for name in expected)
    scenes = data.held_out_scenes()[torch.tensor([3])]
    (clip,) = evaluate.generate(pipeline, scenes, calls=2, size=32)
    assert clip.frames.shape == (124, 32, 32, 3)


def test_the_pipeline_makes_clips_that_the_evaluation_reads(release, device, tmp_path):
    pipeline = evaluate.release_pipeline(release, "turbo", device, tmp_path / "cache")
    assert pipeline.config.num_inference_steps == 8
    scenes = data.held_out_scenes()[torch.tensor([3])]
    clips = list(evaluate.generate(pipeline, scenes, calls=8, size=32))
    assert clips[0].frames.shape == (124, 32, 32, 3)
    assert clips[0].audio.shape == (2, 207 * 800)
    assert (clips[0].colour, clips[0].shape, clips[0].motion) == ("cyan", "circle", "down")
    figures = evaluate.score(clips)
    assert figures["clips"] == 1
    assert set(figures.values()) <= {0, 1}
    evaluate.save_clips(tmp_path / "clips.npz", clips)
    assert sorted(path.name for path in tmp_path.glob("clips*")) == ["clips.npz"]


def test_nothing_is_written_over_or_left_half_written(release, grown, tmp_path):
    with pytest.raises(FileExistsError, match="exists already"):
        export.export_release(grown, release)
    with pytest.raises(FileNotFoundError, match="run the stage 'video_vae' first"):
        export.export_release(tmp_path / "none", tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
