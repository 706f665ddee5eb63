"""Stage 01 on a random FLUX.2 pipeline and CLIP of the tiny world's shapes: nothing here needs trained models."""

import io
import json
import math
import subprocess
import sys
from pathlib import Path

import build
import numpy as np
import pytest
import torch
import train_clip
from conftest import ROOT
from diffusers import FlowMatchEulerDiscreteScheduler, Flux2Pipeline
from PIL import Image

import common

window = common.load_stage(ROOT / "01_find_window.py")
PROMPTS = [
    "a red circle",
    "two blue squares under a green triangle",
    "three green circles and a red square",
    "two red triangles",
]
STEPS = 4


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Folders flux2 and clip with random weights, and prompts.txt."""
    folder, tokenizer = tmp_path_factory.mktemp("models"), build.text_tokenizer()
    pipe = Flux2Pipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=1.5), vae=build.autoencoder(), tokenizer=tokenizer,
        text_encoder=build.text_encoder(len(tokenizer)), transformer=build.denoiser(),
    )  # fmt: skip
    pipe.vae.bn.running_var.fill_(0.25)  # a decode without the statistics must not pass
    pipe.vae.bn.running_mean.fill_(0.5)
    pipe.save_pretrained(folder / "flux2")
    processor = train_clip.build_processor()
    train_clip.build_model(processor.tokenizer).save_pretrained(folder / "clip")
    processor.save_pretrained(folder / "clip")
    (folder / "prompts.txt").write_text("\n".join(PROMPTS) + "\n")
    return folder


def arguments(models: Path, run: Path) -> list[str]:
    return [
        "--run", str(run), "--model", str(models / "flux2"), "--clip", str(models / "clip"), "--steps", str(STEPS),
        "--prompts", str(models / "prompts.txt"), "--images-per-prompt", "2", "--batch-size", "3",
    ]  # fmt: skip


@pytest.fixture
def run(run_stage):
    """The stage in this process: its output, or with code=2 its error line."""

    def run(*args: object, code: int | None = None) -> str:
        out, err = run_stage("01_find_window.py", window.main, *args, code=code)
        if code:
            assert err.splitlines()[-1].startswith("error: ") and "Traceback" not in err, err
        return err.splitlines()[-1] if code else out

    return run


def test_writes_the_contract_and_skips_what_is_done(run, models: Path, tmp_path: Path):
    args = arguments(models, tmp_path / "run")
    run(*args)
    assert sorted(p.name for p in (tmp_path / "run").iterdir()) == ["window.json", "window.png", "window.settings.json"]
    result = json.loads((tmp_path / "run/window.json").read_text())
    assert result["model"] == str(models / "flux2") and result["steps"] == STEPS
    assert len(result["sigmas"]) == STEPS + 1 and result["sigmas"][0] == 1 and result["sigmas"][-1] == 0
    assert len(result["clip_similarity"]) == len(result["clip_similarity_stderr"]) == STEPS
    assert all(-1 <= s <= 1 for s in result["clip_similarity"]) and all(s > 0 for s in result["clip_similarity_stderr"])
    assert result["tau"] == result["knee_step"] / STEPS
    first, end = result["window"]
    assert first == 0 < end < STEPS
    with Image.open(tmp_path / "run/window.png") as figure:
        assert min(figure.size) > 500

    before = {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "run").iterdir()}
    assert "is done" in run(*args)
    assert "is done" in run(*args, "--batch-size", 1), "the batch size changes no result"
    assert f"--steps {STEPS}, not 5" in run(*args, "--steps", 5, code=2)
    assert "--num-prompts 32, not 3" in run(*args, "--num-prompts", 3, code=2)
    assert before == {p: (p.stat().st_mtime_ns, p.read_bytes()) for p in (tmp_path / "run").iterdir()}


def test_similarity_of_the_last_estimate_is_that_of_the_pipelines_picture(models: Path, tmp_path: Path, monkeypatch):
    """Independent path: diffusers' own call makes the pictures, CLIPModel's own forward compares them."""
    monkeypatch.setattr(sys, "argv", ["01", *arguments(models, tmp_path)])
    argv = sys.argv[1:]
    pipe = common.load_pipeline(str(models / "flux2"), "cpu", torch.float32)
    clip = window.Clip(str(models / "clip"), "cpu")
    args = settings_of(argv)
    similarity, film, sigmas = window.denoise(pipe, clip, PROMPTS, args)
    assert similarity.shape == (4, 2, STEPS) and film.shape == (3, STEPS, 3, 32, 32)
    for p, prompt in enumerate(PROMPTS):
        for j in range(2):
            generator = torch.Generator().manual_seed(common.sample_seed(args.seed, 0, p, j))
            picture = pipe(
                prompt=prompt, height=32, width=32, num_inference_steps=STEPS, guidance_scale=4.0, generator=generator,
                max_sequence_length=8, text_encoder_out_layers=(1, 2, 3),
            ).images[0]  # fmt: skip
            inputs = clip.processor(text=[prompt], images=[picture], return_tensors="pt", padding=True)
            with torch.no_grad():
                out = clip.model(**inputs)
            expected = (out.logits_per_image / clip.model.logit_scale.exp()).item()
            assert abs(similarity[p, j, -1] - expected) < 1e-3, (prompt, j, similarity[p, j, -1], expected)
            if j == 0 and p < 3:
                shown = np.asarray(picture).transpose(2, 0, 1) / 255
                assert abs(film[p, -1] - shown).max() < 0.01


def settings_of(argv: list[str]):
    """The arguments that `main` parses, without running it."""
    seen = {}

    def stop(pipe, clip, prompts, args):
        seen["args"] = args
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as m:
        m.setattr(sys, "argv", ["01_find_window.py", *argv])
        m.setattr(window, "denoise", stop)
        with pytest.raises(KeyboardInterrupt):
            window.main()
    return seen["args"]


def test_batches_change_nothing(models: Path, tmp_path: Path):
    pipe = common.load_pipeline(str(models / "flux2"), "cpu", torch.float32)
    clip = window.Clip(str(models / "clip"), "cpu")
    args = settings_of(arguments(models, tmp_path))
    a = window.denoise(pipe, clip, PROMPTS[:3], args)
    args.batch_size = 6
    b = window.denoise(pipe, clip, PROMPTS[:3], args)
    # float32 to 1e-6, but a level of 255 may round the other way
    assert abs(a[0] - b[0]).max() < 1e-3 and abs(a[1] - b[1]).max() < 1e-4 and a[2] == b[2]


def test_find_window_is_mean_and_standard_error_over_prompts():
    similarity = np.array(
        [[[0.0, 0.2, 0.9, 1.1], [0.2, 0.4, 0.9, 1.1]], [[0.0, 0.0, 0.6, 0.6], [0.0, 0.0, 0.8, 0.6]]]
    )  # [2, 2, 4]
    found = window.find_window(similarity)
    assert found["clip_similarity"] == pytest.approx([0.05, 0.15, 0.8, 0.85])
    assert found["clip_similarity_stderr"] == pytest.approx([0.05, 0.15, 0.1, 0.25])  # |a - b| / 2 for two prompts
    assert found["knee_step"] == 2 and found["tau"] == 0.5 and found["window"] == [0, 2]


@pytest.mark.parametrize(
    "curve", [[1.0, 0.9, 0.8, 0.7], [0.0, 0.1, 0.2, 0.3], [0.5, 0.5, 0.5, 0.5], [0.0, 0.0, 0.0, 1.0]]
)
def test_window_has_a_step_and_never_the_last(curve: list[float]):
    first, end = window.find_window(np.array([[curve], [curve]]))["window"]
    assert first == 0 < end <= 3


@pytest.mark.parametrize(("steps", "knee"), [(2, 0), (2, 1), (8, 4), (8, 0), (8, 7), (50, 8), (50, 49)])
def test_film_shows_first_knee_and_last(steps: int, knee: int):
    shown = window.film_steps(steps, knee)
    assert shown == sorted(set(shown)) and len(shown) <= window.FILM_COLUMNS
    assert {0, knee, steps - 1} <= set(shown)


def test_figure_marks_the_knee():
    """The dashed border is where the knee's column is, and in no other column."""
    steps = 8
    curve = [0.0, 0.1, 0.3, 0.6, 0.9, 0.92, 0.93, 0.94]
    found = {"model": "x/FLUX", "steps": steps} | window.find_window(np.array([[curve], [curve]]))
    png = window.draw_figure(found, np.full((3, steps, 3, 24, 32), 0.5, np.float32), PROMPTS)
    image = np.asarray(Image.open(io.BytesIO(png)).convert("RGB")).astype(int)
    left = image[:, : image.shape[1] // 2]
    accent = (abs(left - np.array([0xC8, 0x44, 0x2B])).sum(-1) < 30).any(0).nonzero()[0]
    column = image.shape[1] * (1.5 + 0.1) / (5 * 1.6 + 6.5)  # five columns of 1.6 inches, and the curve
    assert found["knee_step"] == 4 and math.isclose(accent.mean() / column, 2.5, abs_tol=0.3), "the third column"


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--num-prompts", 1], "1 prompt is too few"),
        (["--steps", 1], "--steps 1: must be from 2"),
        (["--batch-size", 0], "--batch-size must be at least 1"),
        (["--prompts", "missing.txt"], "missing.txt: cannot be read"),
        (["--model", "missing"], "--model missing: cannot be loaded"),
        (["--clip", "missing"], "--clip missing: cannot be loaded"),
        (["--height", 33], "--height 33"),
    ],
)
def test_bad_settings(run, models: Path, tmp_path: Path, flags: list, says: str):
    assert says in run(*arguments(models, tmp_path / "run"), *flags, code=2)
    assert not (tmp_path / "run").exists(), "nothing is written"


def test_script_starts(tmp_path: Path):
    command = [sys.executable, str(ROOT / "01_find_window.py"), "--run", str(tmp_path / "run")]
    done = subprocess.run([*command, "--prompts", "missing.txt"], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 2 and done.stderr.count("\n") == 1, done.stderr
    assert done.stderr.startswith("error: missing.txt: cannot be read")
