"""Overlays from the Hub, through the real client: pins, partial reads, resuming, one cache, no connection."""

import json
import os
import shutil
import socket
import subprocess
import sys

import pytest
import torch
from huggingface_hub import constants

from diffusers_h3.overlays import (
    IncompatibleWeightsError,
    IntegrityError,
    ManifestError,
    SourceError,
    UnpinnedRevisionError,
    load_overlay,
    materialize_overlay,
    verify_folder,
)


REPO = "owner/vdn-tiny"
EIGHT, FIFTY = "stage-dmd-step-250", "stage-b-step-2000"
TRANSFORMER = ("transformer",)


@pytest.fixture
def hub(serve, release):
    """A Hub with the tiny release as `REPO`; `hub.folder` is what it serves."""
    server = serve({REPO: release})
    server.folder = release
    return server


@pytest.fixture
def get(tmp_path):
    """A function that loads and materialises from a Hub, with one cache and equal options for both."""

    def run(server, stage=EIGHT, components=None, cache=tmp_path / "cache", **options):
        overlay = load_overlay(f"{REPO}//{stage}", server.commit(REPO), cache_dir=cache, **options)
        return materialize_overlay(overlay, cache, components, **options)

    return run


@pytest.fixture
def block_network(monkeypatch):
    """A function after which every attempt to open a connection fails the test."""

    def refuse(*arguments, **options):
        pytest.fail(f"a connection was opened: {arguments}")

    def block():
        monkeypatch.setattr(socket, "getaddrinfo", refuse)
        monkeypatch.setattr(socket.socket, "connect", refuse)

    return block


def _outputs(folder):
    return {check.path: check.sha256 for check in verify_folder(folder)}


def test_the_result_is_that_of_the_local_release(hub, get, tmp_path):
    folder = get(hub)
    assert _outputs(folder) == _outputs(materialize_overlay(load_overlay(hub.folder / EIGHT), tmp_path / "local"))
    record = json.loads((folder / "overlay.json").read_text())
    assert record["commits"] == {REPO: hub.commit(REPO)}
    # Every file of the Hub is verified against the digest it is listed under.
    assert {entry["checked"] for entry in record["inputs"]} == {"verified"}
    assert {entry["commit"] for entry in record["inputs"]} == {hub.commit(REPO)}


def test_every_request_names_the_commit(hub, get):
    get(hub)
    paths = [path for _, path, _ in hub.requests]
    assert len(paths) > 30
    assert all(f"/{hub.commit(REPO)}" in path for path in paths)


def test_loading_downloads_no_weights(hub, tmp_path):
    overlay = load_overlay(f"{REPO}//{FIFTY}", hub.commit(REPO), cache_dir=tmp_path)
    assert overlay.name == FIFTY
    assert [path for _, path, _ in hub.requests if path.endswith(".safetensors")] == []


def test_several_stages_say_how_to_choose(hub, tmp_path):
    with pytest.raises(SourceError, match=f"{FIFTY}, {EIGHT}.*for example '{REPO}//{FIFTY}'"):
        load_overlay(REPO, hub.commit(REPO), cache_dir=tmp_path)
    with pytest.raises(SourceError, match=f"no overlay 'stage-x'; it holds {FIFTY}, {EIGHT}"):
        load_overlay(f"{REPO}//stage-x", hub.commit(REPO), cache_dir=tmp_path)


def test_misfits_are_refused_before_weights_are_downloaded(hub, get, edit_tensors):
    """Case 13: shapes are read from the first bytes of remote files."""
    base = hub.folder / "h3-base" / "transformer"
    index = json.loads((base / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
    name = "transformer_blocks.0.adaln_proj.linear.weight"
    edit_tensors(base / index[name], lambda tensors: tensors.update({name: tensors[name][:, :8]}))
    with pytest.raises(IncompatibleWeightsError, match=r"'turbo'.*modules of another shape.*adaln_proj"):
        get(hub)
    assert hub.downloads(".safetensors") == []
    ranges = {part for _, path, part in hub.requests if path.endswith(".safetensors")}
    assert ranges
    assert None not in ranges


def test_a_lost_connection_is_resumed(hub, get, monkeypatch):
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 65_536)
    shard = "h3-base/text_encoder/model.safetensors"
    path = f"/{REPO}/resolve/{hub.commit(REPO)}/{shard}"
    hub.break_after[path] = 200_000
    folder = get(hub, components=("text_encoder",))
    assert hub.break_after == {}
    content = (hub.folder / shard).read_bytes()
    assert len(content) > 400_000
    assert (folder / "text_encoder" / "model.safetensors").read_bytes() == content
    # Three whole chunks had arrived.
    assert [part for _, requested, part in hub.requests if requested == path and part] == ["bytes=196608-"]


def test_what_was_downloaded_before_a_failure_is_kept(hub, get, tmp_path, leftovers):
    first, last = "h3-base/vae/diffusion_pytorch_model.safetensors", "h3-base/audio_vae/config.json"
    overlay = load_overlay(f"{REPO}//{EIGHT}", hub.commit(REPO), cache_dir=tmp_path / "cache")
    (hub.folder / last).rename(hub.folder / "away")
    with pytest.raises(SourceError, match=r"h3-base/audio_vae/config\.json: the repository has no such file"):
        materialize_overlay(overlay, tmp_path / "cache", ("vae", "audio_vae"))
    assert [name for name in leftovers(tmp_path / "cache") if EIGHT in name] == []
    (hub.folder / "away").rename(hub.folder / last)
    folder = materialize_overlay(overlay, tmp_path / "cache", ("vae", "audio_vae"))
    assert {check.status for check in verify_folder(folder)} == {"ok"}
    assert len(hub.downloads(first)) == 1


def test_the_hubs_cache_is_linked_not_copied(hub, get, tmp_path):
    folder = get(hub, components=("vae",))
    cached = next((tmp_path / "cache").glob("models--owner--vdn-tiny/snapshots/*/h3-base/vae/*.safetensors"))
    assert (folder / "vae" / cached.name).samefile(cached)
    # A hard link survives cleaning the Hub's cache.
    shutil.rmtree(tmp_path / "cache" / "models--owner--vdn-tiny")
    assert {check.status for check in verify_folder(folder)} == {"ok"}


def test_offline_from_a_warm_cache(hub, get, block_network):
    """Case 21: every part comes from the same cache and no connection is opened."""
    folder = get(hub)
    expected = _outputs(folder)
    shutil.rmtree(folder)
    block_network()
    before = len(hub.requests)
    assert get(hub, local_files_only=True) == folder
    assert _outputs(folder) == expected
    assert len(hub.requests) == before


def test_offline_by_environment(hub, get, block_network, monkeypatch):
    folder = get(hub, components=("vae",))
    shutil.rmtree(folder)
    block_network()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert get(hub, components=("vae",)) == folder


def test_a_finished_overlay_needs_no_connection(hub, get, block_network, tmp_path):
    overlay = load_overlay(f"{REPO}//{EIGHT}", hub.commit(REPO), cache_dir=tmp_path / "cache")
    folder = materialize_overlay(overlay, tmp_path / "cache", TRANSFORMER)
    block_network()
    assert materialize_overlay(overlay, tmp_path / "cache", TRANSFORMER) == folder


def test_local_release_with_a_remote_part(hub, block_network, tmp_path):
    """Case 21: a companion of local weights is not fetched either; the error names it."""
    shutil.rmtree(hub.folder / "h3-base" / "text_encoder")
    overlay = load_overlay(hub.folder / EIGHT, local_files_only=True)
    block_network()
    with pytest.raises(SourceError, match="MiniMaxAI/MiniMax-H3@939557dc319d/text_encoder: the list of its files"):
        materialize_overlay(overlay, tmp_path / "cache", local_files_only=True)
    folder = materialize_overlay(overlay, tmp_path / "cache", TRANSFORMER, local_files_only=True)
    assert {check.status for check in verify_folder(folder)} == {"ok"}


def test_offline_with_an_empty_cache(hub, get, block_network):
    block_network()
    with pytest.raises(SourceError, match=rf"{REPO}@.*list of its files is not in the cache .*local_files_only"):
        get(hub, local_files_only=True)


def test_offline_with_half_a_cache(hub, get, block_network, tmp_path):
    """What was never downloaded is missing, not absent: no adapter is left out, nothing else is taken instead."""
    load_overlay(f"{REPO}//{EIGHT}", hub.commit(REPO), cache_dir=tmp_path / "cache")
    get(hub, stage=FIFTY)
    block_network()
    with pytest.raises(SourceError, match=rf"{EIGHT}/adapters/default/.* is not in the cache"):
        get(hub, local_files_only=True)
    assert get(hub, stage=FIFTY, local_files_only=True).is_dir()


def test_offline_after_another_tools_download(hub, get, block_network, tmp_path):
    from huggingface_hub import snapshot_download

    snapshot_download(REPO, revision=hub.commit(REPO), cache_dir=tmp_path / "cache")
    block_network()
    assert {check.status for check in verify_folder(get(hub, local_files_only=True))} == {"ok"}


def test_the_token_goes_with_every_request(serve, release, get, tmp_path):
    server = serve({REPO: release}, token="secret")
    folder = get(server, token="secret")
    assert {check.status for check in verify_folder(folder)} == {"ok"}
    with pytest.raises(SourceError, match="no such repository, or it is private and the token does not open it"):
        get(server, token="wrong", cache=tmp_path / "other")
    with pytest.raises(SourceError, match="private"):
        get(server, token=False, cache=tmp_path / "other")


def test_branches_need_a_word_and_are_recorded(hub, tmp_path):
    cache = tmp_path / "cache"
    with pytest.raises(UnpinnedRevisionError, match="'main' of owner/vdn-tiny is not a commit"):
        load_overlay(f"{REPO}//{EIGHT}", "main", cache_dir=cache)
    assert hub.requests == []
    overlay = load_overlay(f"{REPO}//{EIGHT}", allow_unpinned=True, cache_dir=cache)
    assert {source.revision for source in overlay.manifest.sources()} == {hub.commit(REPO)}
    folder = materialize_overlay(overlay, cache, TRANSFORMER)
    record = json.loads((folder / "overlay.json").read_text())
    assert record["unpinned"] == [{"repo": REPO, "revision": "main", "commit": hub.commit(REPO)}]
    with pytest.raises(SourceError, match="give the commit instead"):
        load_overlay(f"{REPO}//{EIGHT}", allow_unpinned=True, cache_dir=cache, local_files_only=True)
    # What another tool recorded about a branch is used.
    refs = cache / "models--owner--vdn-tiny" / "refs"
    refs.mkdir(exist_ok=True)
    (refs / "main").write_text(hub.commit(REPO))
    again = load_overlay(f"{REPO}//{EIGHT}", allow_unpinned=True, cache_dir=cache, local_files_only=True)
    assert again == overlay


def test_a_repository_with_a_manifest(serve, release, get, tmp_path):
    """A manifest in a repository: null stands for the repository itself, other parts have their own pins."""
    manifest = load_overlay(release / EIGHT).manifest.to_dict() | {"name": "mine"}
    base = tmp_path / "base"
    shutil.copytree(release / "h3-base", base / "h3-base")
    shutil.rmtree(release / "h3-base")
    server = serve({REPO: release, "owner/base": base})
    sources = [manifest["base_transformer"]["source"], *manifest["components"].values()]
    for source in sources:
        source |= {"repo": "owner/base", "revision": server.commit("owner/base")}
    (release / "overlay.json").write_text(json.dumps(manifest))

    overlay = load_overlay(REPO, server.commit(REPO), cache_dir=tmp_path / "cache")
    assert (overlay.name, overlay.root) == ("mine", None)
    folder = materialize_overlay(overlay, tmp_path / "cache")
    record = json.loads((folder / "overlay.json").read_text())
    assert record["commits"] == {name: server.commit(name) for name in (REPO, "owner/base")}

    manifest["components"]["vae"]["revision"] = "main"
    (release / "overlay.json").write_text(json.dumps(manifest))
    with pytest.raises(UnpinnedRevisionError, match=r"overlay\.json: field `components\.vae\.revision`"):
        load_overlay(REPO, server.commit(REPO), cache_dir=tmp_path / "other")
    overlay = load_overlay(REPO, server.commit(REPO), allow_unpinned=True, cache_dir=tmp_path / "other")
    assert overlay.manifest.components["vae"].revision == server.commit("owner/base")
    assert overlay.unpinned == (("owner/base", "main", server.commit("owner/base")),)


@pytest.mark.parametrize(
    "file",
    [
        "h3-base/transformer/config.json",
        "h3-base/vae/diffusion_pytorch_model.safetensors",
        f"{EIGHT}/adapters/default/adapter_model.safetensors",
    ],
)
def test_a_file_changed_in_the_cache_is_found(hub, get, tmp_path, leftovers, file):
    folder = get(hub)
    cached = next((tmp_path / "cache").glob(f"models--*/snapshots/*/{file}"))
    content = bytearray(cached.read_bytes())
    content[-2] ^= 8
    blob = cached.resolve()
    blob.unlink()  # a hard link elsewhere keeps its content
    blob.write_bytes(content)
    shutil.rmtree(folder)
    with pytest.raises((IntegrityError, ManifestError, IncompatibleWeightsError)) as error:
        get(hub, local_files_only=True)
    assert file in str(error.value) or file.rpartition("/")[0] in str(error.value)
    assert not [name for name in leftovers(tmp_path / "cache") if name.startswith(("stage", ".stage"))]


@pytest.mark.parametrize("pinned", [True, False], ids=["unknown commit", "unknown branch"])
def test_unknown_revisions(hub, tmp_path, pinned):
    revision, allow = ("0" * 40, False) if pinned else ("other", True)
    with pytest.raises(SourceError, match="no such revision"):
        load_overlay(f"{REPO}//{EIGHT}", revision, allow_unpinned=allow, cache_dir=tmp_path)


def test_unknown_repositories(hub, tmp_path):
    with pytest.raises(SourceError, match=r"owner/other@.*no such repository"):
        load_overlay("owner/other", "0" * 40, cache_dir=tmp_path)


def test_an_unreachable_hub_is_one_clear_error(hub, tmp_path):
    hub.__exit__()
    with pytest.raises(SourceError, match=rf"{REPO}@main cannot be downloaded: .*refused") as error:
        load_overlay(f"{REPO}//{EIGHT}", allow_unpinned=True, cache_dir=tmp_path)
    assert len(str(error.value).splitlines()) == 1


def test_builtin_overlays_ask_for_their_pins(serve, release, tmp_path):
    server = serve({"OpenVDN/vdn-minimax-h3": release, "MiniMaxAI/MiniMax-H3": release})
    with pytest.raises(SourceError, match=r"OpenVDN/vdn-minimax-h3@18be6bcc4ee7/.*no such revision"):
        materialize_overlay(load_overlay("vdn-h3-8step"), tmp_path, TRANSFORMER)
    assert all("18be6bcc4ee72585eee322ba28b5ccac2cf85ef0" in path for _, path, _ in server.requests)
    server.requests.clear()
    with pytest.raises(SourceError, match="MiniMaxAI/MiniMax-H3@939557dc319d/text_encoder"):
        materialize_overlay(load_overlay("vdn-h3-50step"), tmp_path, ("text_encoder",))
    assert all("939557dc319dd91227e30195a763f272ba7f8765" in path for _, path, _ in server.requests)


def test_a_fresh_process_with_the_environment_alone(hub, tmp_path):
    """Nothing but HF_ENDPOINT and HF_HOME: the defaults of every cache."""
    code = (
        "import sys; from diffusers_h3 import load_overlay, materialize_overlay;"
        "print(materialize_overlay(load_overlay(sys.argv[1], sys.argv[2]), components=('transformer', 'vae')))"
    )
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(tmp_path / "home")}
    del environment["DIFFUSERS_H3_CACHE"]
    command = [sys.executable, "-c", code, f"{REPO}//{EIGHT}", hub.commit(REPO)]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-1000:]
    assert os.path.dirname(result.stdout.strip()) == str(tmp_path / "home" / "diffusers-h3")
    assert (tmp_path / "home" / "hub" / "models--owner--vdn-tiny").is_dir()


def test_weights_are_read_as_served(hub, get, read_weights):
    """The released numbers, not those of a fixture that happens to be near."""
    from safetensors.torch import load_file

    weights = read_weights(get(hub, components=TRANSFORMER) / "transformer")
    base = read_weights(hub.folder / "h3-base" / "transformer")
    spec = json.loads((hub.folder / EIGHT / "adapters" / "turbo" / "adapter_spec.json").read_text())["config"]
    turbo = load_file(hub.folder / EIGHT / "adapters" / "turbo" / "adapter_model.safetensors")
    module = "transformer_blocks.0.adaln_proj.linear"
    lora_a, lora_b = (turbo[f"{module}.lora_{side}.turbo.weight"].double() for side in "AB")
    assert (spec["alpha_pattern"][module], lora_a.shape[0]) == (5.0, 2)
    expected = base[f"{module}.weight"].double() + 5.0 / 2 * lora_b @ lora_a
    assert torch.equal(weights[f"{module}.weight"], expected.bfloat16())
