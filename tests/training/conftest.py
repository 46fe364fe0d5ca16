import pytest
import torch


# Enough latent frames that the window does not cover the clip and every layer runs its branch.
NUM_FRAMES, SIZE, CLIPS = 56, 64, 4


@pytest.fixture(scope="package", autouse=True)
def one_thread():
    """Small tensors: more threads only wait for each other where several test processes share the cores."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="session")
def device():
    return torch.device("cpu")


@pytest.fixture(scope="session")
def short():
    """Make a schedule of a few steps that reports every one of them."""
    from training.loop import Schedule

    return lambda steps, **changes: Schedule(steps, warmup=1, report_seconds=0.0, learning_rate=1e-3, **changes)


@pytest.fixture(scope="session")
def run(tmp_path_factory, device, short):
    """A run whose autoencoders took one step each; every later stage adds its own folder."""
    from training import autoencoders

    folder = tmp_path_factory.mktemp("run")
    autoencoders.train_video_vae(folder, short(1), device, batch=1, size=32, statistics_clips=1)
    autoencoders.train_audio_vae(folder, short(1), device, batch=1, num_latents=8, statistics_clips=1)
    return folder


@pytest.fixture(scope="session")
def pool(run, device):
    from training.latents import LatentPool

    return LatentPool(run, device, CLIPS, num_frames=NUM_FRAMES, size=SIZE)


@pytest.fixture(scope="session")
def trained(run, device, short, pool):
    """The run after one step of every stage, in order."""
    from training import dense, hybrid, turbo

    dense.train_dense(run, short(1), device, pool, batch=1, parts=1)
    hybrid.train_align(run, short(1), device, pool, batch=1, parts=1)
    hybrid.train_hybrid(run, short(1), device, pool, batch=1, parts=1)
    turbo.train_turbo(run, short(1), device, pool, batch=1, substeps=2)
    return run
