"""Releases to spoil, and a Hub to download them from."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file


GOLDEN = Path(__file__).parents[1] / "golden" / "release_t2va"
STAGE = "stage-dmd-step-250"


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    """The default folder of materialised overlays, new for every test."""
    monkeypatch.setenv("DIFFUSERS_H3_CACHE", str(tmp_path / "default-cache"))


@pytest.fixture
def golden(tmp_path):
    """A copy of the golden release, transformer only, that a test may change."""
    return Path(shutil.copytree(GOLDEN, tmp_path / "golden"))


@pytest.fixture
def release(tiny_release, tmp_path):
    """A copy of the complete tiny release that a test may change."""
    return Path(shutil.copytree(tiny_release, tmp_path / "release"))


@pytest.fixture
def serve(hub_server_class, monkeypatch):
    """A function that serves repositories and points `huggingface_hub` at them."""
    from huggingface_hub import constants

    servers = []

    def start(repositories, **options):
        server = hub_server_class(repositories, **options).__enter__()
        servers.append(server)
        monkeypatch.setattr(constants, "ENDPOINT", server.url)
        template = server.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        return server

    yield start
    for server in servers:
        server.__exit__()


@pytest.fixture
def edit_json():
    """A function that changes a JSON file with `change(content)`."""

    def edit(path, change):
        content = json.loads(path.read_text())
        change(content)
        path.unlink()  # the file may be a link to a fixture
        path.write_text(json.dumps(content))

    return edit


@pytest.fixture
def edit_tensors():
    """A function that changes a safetensors file with `change(tensors)`."""

    def edit(path, change):
        tensors = load_file(path)
        change(tensors)
        path.unlink()
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, path)

    return edit


@pytest.fixture
def read_weights():
    """A function that reads a transformer folder through its index."""

    def read(folder):
        index = json.loads((folder / "diffusion_pytorch_model.safetensors.index.json").read_text())["weight_map"]
        shards = {shard: load_file(folder / shard) for shard in set(index.values())}
        return {name: shards[shard][name] for name, shard in index.items()}

    return read


@pytest.fixture
def leftovers():
    """A function listing what a cache holds besides locks and complete overlays."""

    def find(cache):
        if not cache.exists():
            return []
        known = {".listings", ".locks"}
        return sorted(
            path.name for path in cache.iterdir() if path.name not in known and not (path / "overlay.json").is_file()
        )

    return find


@pytest.fixture
def make_base(tmp_path):
    """A function writing a base of two small linears `a` and `b` plus adapter files, for tests of the sums alone."""

    def make(tensors, name="base.safetensors"):
        path = tmp_path / name
        save_file({key: torch.as_tensor(value).contiguous() for key, value in tensors.items()}, path)
        return path

    return make
