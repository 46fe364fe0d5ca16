"""Where a pipeline comes from: saved folders, overlays, the hub; and what it is saved as."""

import json
import logging
import shutil
import socket
import subprocess
import sys
import textwrap
from types import SimpleNamespace

import pytest
import torch
from diffusers import DiffusionPipeline
from huggingface_hub.errors import (
    EntryNotFoundError,
    HFValidationError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)

from diffusers_h3 import VDNH3Pipeline, VDNH3Transformer3DModel, notices
from diffusers_h3.pipelines import source


@pytest.fixture(scope="module")
def saved(components, tmp_path_factory):
    """A folder written by `save_pretrained`."""
    folder = tmp_path_factory.mktemp("saved") / "pipeline"
    VDNH3Pipeline(**components, num_inference_steps=2).save_pretrained(folder)
    return folder


@pytest.fixture
def no_network(monkeypatch):
    def refuse(*_arguments, **_options):
        pytest.fail("the network was used")

    monkeypatch.setattr(socket.socket, "connect", refuse)
    monkeypatch.setattr(socket, "getaddrinfo", refuse)


def _quiet(pipeline):
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def test_the_index_names_every_class_by_its_public_place(saved):
    index = json.loads((saved / "model_index.json").read_text())
    assert {name: value for name, value in index.items() if not name.startswith("_diffusers")} == {
        "_class_name": "VDNH3Pipeline",
        "transformer": ["diffusers_h3", "VDNH3Transformer3DModel"],
        "vae": ["diffusers", "AutoencoderKLMiniMaxH3"],
        "audio_vae": ["diffusers", "AutoencoderKLMiniMaxH3Audio"],
        "text_encoder": ["transformers", "Qwen3VLForConditionalGeneration"],
        "tokenizer": ["transformers", "Qwen2Tokenizer"],
        "processor": ["transformers", "Qwen3VLProcessor"],
        "scheduler": ["diffusers", "MiniMaxH3Scheduler"],
        "audio_scheduler": ["diffusers", "MiniMaxH3Scheduler"],
        "num_inference_steps": 2,
    }


@pytest.mark.parametrize("loader", [VDNH3Pipeline, DiffusionPipeline])
def test_a_saved_pipeline_gives_the_same_latents(loader, saved, pipeline, generate, no_network):
    loaded = loader.from_pretrained(saved, local_files_only=True)
    assert type(loaded) is VDNH3Pipeline
    assert type(loaded.transformer) is VDNH3Transformer3DModel
    assert loaded.config.num_inference_steps == 2
    assert (loaded.scheduler.shift, loaded.audio_scheduler.shift) == (12.0, 3.0)
    video, audio = generate(_quiet(loaded), num_inference_steps=None)
    for name, component in pipeline.components.items():
        if isinstance(component, torch.nn.Module):
            weights = loaded.components[name].state_dict()
            assert all(torch.equal(weights[key], tensor) for key, tensor in component.state_dict().items())
    # A mapped file places weights otherwise than an allocator, and some CPUs then add up in another order.
    expected = generate(pipeline, num_inference_steps=2)
    torch.testing.assert_close(video, expected[0], rtol=0, atol=1e-5)
    torch.testing.assert_close(audio, expected[1], rtol=0, atol=1e-5)


def test_loading_in_bfloat16_keeps_what_must_stay_float32(saved, generate, pipeline):
    loaded = VDNH3Pipeline.from_pretrained(saved, dtype=torch.bfloat16)
    dtypes = {name: parameter.dtype for name, parameter in loaded.transformer.named_parameters()}
    assert dtypes["transformer_blocks.0.attn.to_q.weight"] is torch.bfloat16
    for name in ("proj_in.weight", "transformer_blocks.0.attn.linear_attention.alpha.A_log"):
        assert dtypes[name] is torch.float32
    assert {parameter.dtype for parameter in loaded.audio_vae.parameters()} == {torch.float32}
    video, _ = generate(_quiet(loaded))
    assert video.dtype is torch.float32
    expected = generate(pipeline)[0]
    assert 0 < (video - expected).norm() / expected.norm() < 0.05
    frames, audio = generate(loaded, output_type="np")
    assert frames.shape == (1, 124, 64, 96, 3)
    assert audio.dtype is torch.float32
    assert audio.shape == (1, 2, 165600)


def test_components_can_be_left_out_or_replaced(saved, components, generate):
    loaded = VDNH3Pipeline.from_pretrained(
        saved,
        text_encoder=None,
        tokenizer=None,
        processor=None,
        vae=None,
        audio_vae=None,
        transformer=components["transformer"],
    )
    assert loaded.transformer is components["transformer"]
    assert loaded.text_encoder is loaded.vae is None
    embeds = torch.zeros(1, 3, loaded.transformer.config.text_dim)
    video, _ = generate(_quiet(loaded), None, prompt_embeds=embeds, text_token_tags=torch.ones(3, dtype=torch.long))
    assert video.isfinite().all()


@pytest.mark.parametrize(("stage", "steps"), [("stage-dmd-step-250", 8), ("stage-b-step-2000", None)])
def test_a_release_folder_is_fused_once_and_loaded(stage, steps, tiny_release, tmp_path, generate, caplog, no_network):
    notices._log.cache_clear()
    with caplog.at_level(logging.WARNING, logger="diffusers_h3"):
        options = {"cache_dir": tmp_path, "local_files_only": True}
        first = VDNH3Pipeline.from_pretrained(tiny_release / stage, **options)
        second = VDNH3Pipeline.from_pretrained(tiny_release / stage, **options)
    assert caplog.text.count("MiniMax-H3 Community License") == 1
    assert first.config.num_inference_steps == steps
    assert type(first.transformer) is VDNH3Transformer3DModel
    names = [entry["name"] for entry in first.transformer.config.fused_adapters]
    assert names == (["default", "turbo"] if steps else ["default"])
    assert torch.equal(generate(_quiet(first), **_steps(steps))[0], generate(_quiet(second), **_steps(steps))[0])
    [folder] = [path for path in tmp_path.iterdir() if not path.name.startswith(".")]
    third = DiffusionPipeline.from_pretrained(folder)
    assert type(third) is VDNH3Pipeline
    assert torch.equal(generate(_quiet(third), **_steps(steps))[0], generate(_quiet(first), **_steps(steps))[0])


def _steps(steps):
    return {"num_inference_steps": 1, "force_num_inference_steps": steps is not None}


@pytest.fixture
def recorded(monkeypatch):
    """Replace the network's and the overlays' part of loading by records of their arguments."""
    calls = []

    def record(name, result):
        def function(*arguments, **options):
            calls.append((name, arguments, options))
            if isinstance(result, Exception):
                raise result
            return result

        return function

    def install(index):
        monkeypatch.setattr(source, "hf_hub_download", record("download", index))
        monkeypatch.setattr(source, "load_overlay", record("load_overlay", "the overlay"))
        monkeypatch.setattr(source, "materialize_overlay", record("materialize_overlay", "the folder"))
        return calls

    return install


HUB = {"cache_dir": "cache", "token": "secret", "local_files_only": True}
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.mark.parametrize(
    ("name", "revision"), [("vdn-h3-8step", None), ("owner/overlay", COMMIT), ("owner/release//stage-b", COMMIT)]
)
def test_overlays_are_found_and_fused_with_the_same_cache_token_and_mode(name, revision, recorded):
    calls = recorded(EntryNotFoundError("no model_index.json"))
    assert source.resolve_source(name, revision, True, **HUB) == ("the folder", None)
    overlay_calls = [call for call in calls if call[0] != "download"]
    assert overlay_calls == [
        ("load_overlay", (name, revision), {"allow_unpinned": True, **HUB}),
        ("materialize_overlay", ("the overlay",), HUB),
    ]
    downloads = [call for call in calls if call[0] == "download"]
    if name == "owner/overlay":
        assert downloads == [("download", (name, "model_index.json"), {"revision": revision, **HUB})]
    else:
        assert downloads == []


NOT_FOUND = SimpleNamespace(status_code=404, headers={}, request=None)


@pytest.mark.parametrize(
    "error",
    [
        RepositoryNotFoundError("no such repository", response=NOT_FOUND),
        RevisionNotFoundError("no such revision", response=NOT_FOUND),
        LocalEntryNotFoundError("no connection and not in the cache"),
        HFValidationError("no name of a repository"),
    ],
)
def test_a_repository_that_cannot_be_read_is_reported_by_load_overlay(error, recorded, monkeypatch):
    recorded(error)

    def load_overlay(name, *_arguments, **_options):
        raise source.OverlayError(f"{name} is not there")

    monkeypatch.setattr(source, "load_overlay", load_overlay)
    with pytest.raises(source.OverlayError, match="owner/name is not there"):
        VDNH3Pipeline.from_pretrained("owner/name", revision=COMMIT)


def test_a_repository_of_a_saved_pipeline_is_left_to_diffusers(recorded, monkeypatch):
    calls = recorded("model_index.json")
    passed = []
    monkeypatch.setattr(
        DiffusionPipeline, "from_pretrained", classmethod(lambda cls, *args, **options: passed.append((args, options)))
    )
    VDNH3Pipeline.from_pretrained("owner/pipeline", revision=COMMIT, dtype=torch.bfloat16, device_map="cuda", **HUB)
    assert [call[0] for call in calls] == ["download"]
    assert passed == [
        (("owner/pipeline",), {"revision": COMMIT, "dtype": torch.bfloat16, "device_map": "cuda", **HUB})
    ]


def test_what_cannot_be_found_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"no-such-thing"):
        VDNH3Pipeline.from_pretrained("no-such-thing")
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"empty"):
        VDNH3Pipeline.from_pretrained(tmp_path / "empty")


def _run(program, *arguments):
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program), *map(str, arguments)], capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr


@pytest.mark.slow
def test_diffusers_finds_the_pipeline_when_it_is_imported_later(saved):
    _run(
        """
        import importlib.util
        import sys

        import diffusers_h3

        heavy = {"torch", "diffusers", "transformers", "triton", "numpy"} & set(sys.modules)
        assert not heavy, heavy
        # Looking whether diffusers is installed, as many packages do, must not use the registration up.
        assert importlib.util.find_spec("diffusers") is not None
        assert "diffusers" not in sys.modules

        import diffusers

        assert "diffusers_h3.pipelines.pipeline_vdn_h3" not in sys.modules
        assert diffusers.VDNH3Pipeline is diffusers_h3.VDNH3Pipeline
        assert diffusers.MiniMaxH3Scheduler.__name__ == "MiniMaxH3Scheduler"
        try:
            diffusers.NoSuchPipeline
        except AttributeError as error:
            assert "NoSuchPipeline" in str(error)
        else:
            raise AssertionError("an unknown name was found")
        pipeline = diffusers.DiffusionPipeline.from_pretrained(sys.argv[1])
        assert type(pipeline) is diffusers_h3.VDNH3Pipeline
        assert type(pipeline.transformer) is diffusers_h3.VDNH3Transformer3DModel
        """,
        saved,
    )


@pytest.mark.slow
def test_diffusers_finds_the_pipeline_when_it_was_imported_before(saved):
    _run(
        """
        import sys

        from diffusers import DiffusionPipeline

        import diffusers_h3

        assert "diffusers_h3.pipelines.pipeline_vdn_h3" not in sys.modules
        pipeline = DiffusionPipeline.from_pretrained(sys.argv[1])
        assert type(pipeline) is diffusers_h3.VDNH3Pipeline
        assert type(pipeline.transformer) is diffusers_h3.VDNH3Transformer3DModel
        """,
        saved,
    )


def test_diffusers_takes_the_transformer_from_a_repository(saved):
    # What it does with a repository's index before it downloads anything; unknown libraries are refused there.
    from diffusers.pipelines.pipeline_loading_utils import _get_custom_components_and_folders

    index = json.loads((saved / "model_index.json").read_text())
    custom, folders = _get_custom_components_and_folders("owner/pipeline", index, filenames=[])
    assert custom == {}
    assert "transformer" in folders


def test_registering_again_changes_nothing():
    import diffusers

    from diffusers_h3._registration import register

    lookup, finders = vars(diffusers)["__getattr__"], list(sys.meta_path)
    register()
    assert vars(diffusers)["__getattr__"] is lookup
    assert sys.meta_path == finders


@pytest.fixture
def lora(components):
    """A LoRA for one linear, in diffusers' format."""
    weight = components["transformer"].transformer_blocks[0].attn.to_q.weight
    generator = torch.Generator().manual_seed(0)
    prefix = "transformer.transformer_blocks.0.attn.to_q"
    return {
        f"{prefix}.lora_A.weight": torch.randn(2, weight.shape[1], generator=generator),
        f"{prefix}.lora_B.weight": torch.randn(weight.shape[0], 2, generator=generator),
    }


def test_a_lora_is_loaded_and_unloaded_again(saved, lora, generate):
    loaded = _quiet(VDNH3Pipeline.from_pretrained(saved))
    plain = generate(loaded)[0]
    loaded.load_lora_weights(lora)
    assert (generate(loaded)[0] - plain).abs().max() > 1e-3
    assert torch.equal(generate(loaded, attention_kwargs={"scale": 0.0})[0], plain)
    loaded.unload_lora_weights()
    assert torch.equal(generate(loaded)[0], plain)


def test_an_adapter_of_a_release_is_refused_because_it_must_be_merged(make_pipeline, tiny_release):
    folder = tiny_release / "stage-dmd-step-250" / "adapters" / "default"
    with pytest.raises(ValueError, match="VDN-H3 release, whose adapters have to be merged"):
        make_pipeline().load_lora_weights(str(folder), weight_name="adapter_model.safetensors")


@pytest.mark.parametrize("given", ["file", "folder", "folder and name"])
def test_an_adapter_that_is_merged_already_is_refused(given, saved, lora, tmp_path, generate):
    import hashlib

    from safetensors.torch import save_file

    path = tmp_path / "adapter.safetensors"
    save_file(lora, path)
    loaded = VDNH3Pipeline.from_pretrained(saved)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    loaded.transformer.register_to_config(fused_adapters=[{"name": "style", "sha256": digest}])
    arguments = {
        "file": (path, {}),
        "folder": (tmp_path, {}),
        "folder and name": (tmp_path, {"weight_name": "adapter.safetensors"}),
    }
    source_path, options = arguments[given]
    with pytest.raises(ValueError, match="'style' is already merged into this transformer's weights"):
        loaded.load_lora_weights(str(source_path), **options)
    other = tmp_path / "other"
    other.mkdir()
    save_file({name: tensor * 2 for name, tensor in lora.items()}, other / "adapter.safetensors")
    loaded.load_lora_weights(str(other))
    assert loaded.get_list_adapters() == {"transformer": ["default_0"]}
    shutil.rmtree(other)
