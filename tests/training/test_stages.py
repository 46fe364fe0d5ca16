import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from training import autoencoders, dense, hybrid, loop, packing, turbo


STAGES = ("dense", "align", "hybrid", "turbo")


def train_stage(stage, run, schedule, device, pool):
    if stage == "video_vae":
        return autoencoders.train_video_vae(run, schedule, device, batch=1, size=32, statistics_clips=1)
    if stage == "audio_vae":
        return autoencoders.train_audio_vae(run, schedule, device, batch=1, num_latents=4, statistics_clips=1)
    if stage == "dense":
        return dense.train_dense(run, schedule, device, pool, batch=1, parts=2)
    if stage == "align":
        return hybrid.train_align(run, schedule, device, pool, batch=1, parts=1)
    if stage == "hybrid":
        return hybrid.train_hybrid(run, schedule, device, pool, batch=1, parts=1)
    return turbo.train_turbo(run, schedule, device, pool, batch=1, parts=2, substeps=1)


def copy_of(trained, folder, without):
    """Link the stages before `without` into a run of its own."""
    folder.mkdir()
    for entry in Path(trained).iterdir():
        if entry.name != without:
            (folder / entry.name).symlink_to(entry)
    return folder


@pytest.mark.parametrize("stage", ["video_vae", "audio_vae", *STAGES])
def test_a_stage_that_was_stopped_and_resumed_ends_where_an_unbroken_one_does(
    stage, trained, tmp_path, device, short, pool
):
    unbroken, resumed = (copy_of(trained, tmp_path / name, stage) for name in ("unbroken", "resumed"))
    train_stage(stage, unbroken, short(2), device, pool)

    train_stage(stage, resumed, short(2, minutes=0.0), device, pool)
    assert (resumed / stage / "state.pt").is_file()
    stop_after_one_step(stage, resumed, short, device, pool)
    assert [entry["step"] for entry in json.loads((resumed / stage / "history.json").read_text())] == [1]
    train_stage(stage, resumed, short(2), device, pool)

    assert not (resumed / stage / "state.pt").exists()
    first, second = (load_file(run / stage / "weights.safetensors") for run in (unbroken, resumed))
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
    history = json.loads((resumed / stage / "history.json").read_text())
    assert [entry["step"] for entry in history] == [1, 2]


def stop_after_one_step(stage, run, short, device, pool):
    """Let the clock run out during the first step."""
    clock = iter([0.0, 0.0, *[1e6] * 10])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop.time, "monotonic", lambda: next(clock))
        train_stage(stage, run, short(2, minutes=1.0), device, pool)


def test_every_stage_trains_its_own_weights_only(trained):
    names = {stage: set(load_file(trained / stage / "weights.safetensors")) for stage in STAGES}
    branch = {"linear_attention", "softmax_gate", "to_out_linear"}
    assert len(names["align"]) == 16 * 6
    assert all(not branch.isdisjoint(name.split(".")) for name in names["align"])
    adapter = names["hybrid"] - names["align"]
    # Four projections of six blocks and one refiner block, two matrices each.
    assert len(adapter) == 4 * 7 * 2
    assert all(".lora_A.default." in name or ".lora_B.default." in name for name in adapter)
    # Attention, feed-forward, modulation of the blocks, and the output norm.
    assert len(names["turbo"]) == (4 * 7 + 2 * 7 + 6 + 1) * 2
    assert all(".turbo." in name for name in names["turbo"])
    assert not any("lora" in name or not branch.isdisjoint(name.split(".")) for name in names["dense"])


def test_a_finished_stage_does_not_run_again(trained, device, short, pool):
    before = (trained / "dense" / "weights.safetensors").read_bytes()
    train_stage("dense", trained, short(50), device, pool)
    assert (trained / "dense" / "weights.safetensors").read_bytes() == before


def test_a_stage_without_the_one_before_it_says_so(run, tmp_path, device, short, pool):
    with pytest.raises(FileNotFoundError, match="run the stage 'dense' first"):
        train_stage("align", tmp_path, short(1), device, pool)


def test_a_loss_that_is_not_finite_stops_the_stage(tmp_path, device, short):
    module = torch.nn.Linear(1, 1)
    with pytest.raises(FloatingPointError, match="step 1"):
        loop.fit(
            tmp_path / "bad",
            module,
            lambda draws: [(None, (torch.tensor(float("nan")),))],
            lambda key, factor: {"loss": module.weight.sum() * factor},
            short(3),
            device,
        )
    assert not (tmp_path / "bad").exists()


def test_losses_fall_and_the_averaged_weights_follow(tmp_path, device, short):
    module = torch.nn.Linear(2, 1, bias=False)
    target = torch.tensor([[0.5, -0.25]])

    def draw(draws):
        for part in draws.normal((16, 2)).split(8):
            yield "line", (part, part @ target.T)

    def losses(key, x, y):
        assert key == "line"
        return {"loss": (module(x) - y).square().mean()}

    history = loop.fit(tmp_path / "line", module, draw, losses, short(1500, average=0.9), device)
    assert history[-1]["loss"] < 0.01 * history[0]["loss"]
    fresh = torch.nn.Linear(2, 1, bias=False)
    loop.load_weights(fresh, tmp_path / "line")
    torch.testing.assert_close(fresh.weight, target, atol=0.05, rtol=0)
    torch.testing.assert_close(fresh.weight, module.weight)


def test_noise_and_clip_lie_where_the_scheduler_puts_them(pool):
    """From noisy rows and the true velocity one scheduler step to the end arrives at the clip."""
    draws = loop.Draws.of(0, 0, torch.device("cpu"))
    batch = pool.draw(2, draws)
    fraction = 3 / 8
    noisy, flow, times = dense.noised(batch, fraction, draws)
    for rows, velocity, time, scheduler, clean in zip(
        noisy, flow, times, packing.schedules(8), (batch.video, batch.audio), strict=True
    ):
        assert time == pytest.approx(float(scheduler.timesteps[5]), abs=1e-6)
        torch.testing.assert_close(rows + (1 - time) * velocity, clean, atol=1e-5, rtol=1e-5)
    assert times == (
        pytest.approx(1 - packing.shifted(fraction, 12.0)),
        pytest.approx(1 - packing.shifted(fraction, 3.0)),
    )
    assert times[0] == pytest.approx(1 - 12 * 0.375 / (1 + 11 * 0.375))


def test_the_teachers_schedule_holds_every_point_of_the_students():
    for fine, coarse in zip(packing.schedules(32), packing.schedules(8), strict=True):
        torch.testing.assert_close(fine.sigmas[::4], coarse.sigmas, atol=1e-7, rtol=0)


def test_the_students_steps_end_where_the_teacher_arrives(trained, device, pool):
    """Every part's velocity, taken for one step of the student's schedule, ends at a point of the teacher's path."""
    draws = loop.Draws.of(0, 0, device)
    teacher = hybrid.load_hybrid(trained, device, pool.text_dim, "hybrid")
    trajectories = turbo.Trajectories(teacher, pool, 2, loop.Draws.of(0, 0, device))
    paths = {}
    for clips in pool.batches(128):
        noise = draws.normal(clips.video.shape), draws.normal(clips.audio.shape)
        states = list(packing.denoise(teacher, clips.packing, *noise, clips.text, 16))
        paths[clips.packing] = [(states[index][0], states[index][1]) for index in range(0, 17, 2)]
    seen = []
    for layout, (video, audio, _, timestep, _, *flow) in trajectories.parts(3, 8, loop.Draws.of(1, 0, device)):
        point = len(seen)
        sigmas = [(scheduler.sigmas[point], scheduler.sigmas[point + 1]) for scheduler in packing.schedules(8)]
        assert {round(float(1 - s), 4) for s, _ in sigmas} <= {round(float(time), 4) for time in timestep}
        for rows, velocity, (sigma, next_sigma), modality in zip((video, audio), flow, sigmas, (0, 1), strict=True):
            arrived = rows + (sigma - next_sigma) * velocity
            for start, end in zip(rows, arrived, strict=True):
                starts, ends = paths[layout][point][modality], paths[layout][point + 1][modality]
                clip = int((starts - start).abs().amax((1, 2)).argmin())
                torch.testing.assert_close(start, starts[clip])
                torch.testing.assert_close(end, ends[clip], atol=1e-5, rtol=1e-5)
        seen.append(point)
    assert len(seen) == 8


def test_rows_are_packed_as_the_pipeline_unpacks_them(pool):
    """Diffusers' own unpacking gives the latents back."""
    from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AfterDenoiseStep
    from diffusers.modular_pipelines.minimax_h3.modular_pipeline import MiniMaxH3ModularPipeline
    from diffusers.modular_pipelines.modular_pipeline import PipelineState

    video, audio = torch.randn(1, 8, 7, 4, 6), torch.randn(1, 2, 8, 5)
    state = PipelineState()
    values = {
        "latents": packing.video_rows(video)[0],
        "audio_latents": packing.audio_rows(audio)[0],
        "num_latent_frames": 7,
    }
    values |= {"latent_height": 4, "latent_width": 6, "num_audio_latents": 5}
    for name, value in values.items():
        state.set(name, value)

    class Components(MiniMaxH3ModularPipeline):
        vae_latent_channels = 8

    _, state = MiniMaxH3AfterDenoiseStep()(Components(), state)
    assert torch.equal(state.get("latents"), video)
    assert torch.equal(state.get("audio_latents"), audio[0])


def test_layers_are_aligned_on_the_teachers_inputs(trained, device, pool):
    """The student's layers see the teacher's inputs, whatever the student's own layers before them compute."""
    teacher, student = (
        dense.load_dense(trained, device, pool.text_dim),
        hybrid.load_hybrid(trained, device, pool.text_dim, "align"),
    )
    taught = hybrid.AttentionTap(teacher)
    learnt = hybrid.AttentionTap(student, source=taught)
    draws = loop.Draws.of(0, 0, device)
    batch = pool.draw(1, draws)
    noisy, _, times = dense.noised(batch, 0.5, draws)
    with torch.no_grad():
        for transformer in (teacher, student):
            packing.velocity(transformer, batch.packing, *noisy, batch.text, batch.packing.timesteps(*times))
    for mine, theirs in zip(learnt.inputs, taught.inputs, strict=True):
        assert torch.equal(mine, theirs)
    assert not torch.equal(taught.inputs[1], taught.inputs[0])
    assert all(not torch.equal(mine, theirs) for mine, theirs in zip(learnt.outputs, taught.outputs, strict=True))
