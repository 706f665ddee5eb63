"""Stage 01: which denoising steps fix the layout? -> the SDE window. CAST, Figure 7; DESIGN 4.

Reads   --prompts FILE (text, one a line, or .jsonl with a prompt field); --model, a FLUX.2 pipeline; --clip, a CLIP.
Writes  RUN/window.json             model, steps, sigmas [T+1]; clip_similarity [T] of the Tweedie estimate x0_hat = x - sigma*v
                                    of each step to its prompt, mean over prompts, and clip_similarity_stderr [T];
                                    knee_step, tau = knee_step / steps, window = [first, last + 1] SDE steps
        RUN/window.png              the estimates step by step, and the curve with its knee
        RUN/window.settings.json    what they were made with

    python 01_find_window.py --preset tiny --run runs/demo --prompts tests/tiny/prompts.txt
    python 01_find_window.py --preset flux2-dev --run runs/flux2 --prompts prompts.txt --num-prompts 64

The estimate of step i is made of x_i and v_i: that of step 0 is what the model expects of pure noise, that of step T-1
is the picture. Until the knee the layout is open to exploration noise, after it only details are.

Choices where the paper is silent (it shows the curve and the knee before tau = 0.25, not the rule):
  1. The knee is `common.knee` of the mean curve.
  2. The window is [0, knee_step]: SDE steps 0 ... knee_step - 1. It has at least one step, and never the last one, which
     ends at sigma 0, where the step's density degenerates.
"""

import argparse
import hashlib
import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from tqdm import tqdm
from transformers import CLIPModel, CLIPProcessor

import common
from common import UserError, read_json

FILM_ROWS, FILM_COLUMNS, FILM_PIXELS = 3, 5, 256  # the paper's figure shows five steps
INK, ACCENT, MUTED, FAINT = "#1b1f24", "#c8442b", "#6b7280", "#d5d9de"


class Clip:
    """CLIP text-image cosine similarity, in float32."""

    def __init__(self, name: str, device: str) -> None:
        try:
            self.model = CLIPModel.from_pretrained(name, use_safetensors=True).to(device).eval()
            self.processor = CLIPProcessor.from_pretrained(name)
        except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as e:
            raise UserError(f"--clip {name}: cannot be loaded: {str(e).splitlines()[0]}") from e

    @torch.no_grad()
    def embed_text(self, prompts: Sequence[str]) -> torch.Tensor:
        """Prompts, cut at CLIP's length -> unit vectors [P, D]."""
        length = self.model.config.text_config.max_position_embeddings
        tokens = self.processor.tokenizer(
            list(prompts), padding=True, truncation=True, max_length=length, return_tensors="pt"
        )
        return F.normalize(self.model.get_text_features(**tokens.to(self.model.device)).pooler_output, dim=-1)

    @torch.no_grad()
    def similarity(self, images: torch.Tensor, text: torch.Tensor) -> torch.Tensor:
        """Pictures [N, 3, H, W] in 0..1 and unit vectors [N, D] -> cosine [N]."""
        pictures = (images * 255).round().to(torch.uint8).cpu()  # what a PNG would hold
        pixels = self.processor.image_processor(list(pictures), return_tensors="pt")["pixel_values"].to(text.device)
        return (F.normalize(self.model.get_image_features(pixel_values=pixels).pooler_output, dim=-1) * text).sum(-1)


def denoise(pipe: Any, clip: Clip, prompts: list[str], args: argparse.Namespace) -> tuple[np.ndarray, np.ndarray, list]:
    """ODE trajectories of images_per_prompt pictures a prompt.

    Returns similarity [P, J, T] of the Tweedie estimates to their prompts; film [FILM_ROWS, T, 3, h, w] of the first
    prompts' estimates, small; sigmas [T+1].
    """
    grid = common.latent_grid(pipe, args.height, args.width)
    sigmas = common.schedule(pipe, args.steps, grid[0] * grid[1])
    embeds = common.encode_prompts(
        pipe, prompts, max_sequence_length=args.max_sequence_length, text_encoder_layers=args.text_encoder_layers
    )
    text = clip.embed_text(prompts)
    similarity = np.empty((len(prompts), args.images_per_prompt, args.steps))
    film = [[None] * args.steps for _ in prompts[:FILM_ROWS]]
    scale = min(1.0, FILM_PIXELS / max(args.height, args.width))
    pictures = [(p, j) for p in range(len(prompts)) for j in range(args.images_per_prompt)]
    bar = tqdm(total=len(pictures) * args.steps, unit="estimate", desc="denoising")

    def on_step(i: int, x: torch.Tensor, v: torch.Tensor) -> None:
        images = common.decode(pipe, x.float() - sigmas[i].to(x.device) * v.float(), grid)  # x0_hat = x - sigma*v
        similarity[rows, columns, i] = clip.similarity(images, text[rows]).cpu()
        for p, j, image in zip(rows, columns, images, strict=True):
            if j == 0 and p < FILM_ROWS:
                film[p][i] = F.interpolate(image[None], scale_factor=scale, mode="area")[0].cpu().numpy()
        bar.update(len(rows))

    for start in range(0, len(pictures), args.batch_size):
        rows, columns = map(list, zip(*pictures[start : start + args.batch_size], strict=True))
        seeds = [common.sample_seed(args.seed, 0, p, j) for p, j in zip(rows, columns, strict=True)]
        velocity = common.velocity_fn(pipe, embeds[rows], grid, args.guidance)
        common.sample(velocity, common.start_noise(pipe, grid, seeds), sigmas, on_step=on_step)
    bar.close()
    return similarity, np.array(film), sigmas.tolist()


def find_window(similarity: np.ndarray) -> dict[str, Any]:
    """similarity [P, J, T] -> the curve (mean and standard error over prompts), its knee and the SDE window."""
    per_prompt = similarity.mean(1)  # [P, T]
    curve, stderr = per_prompt.mean(0), per_prompt.std(0, ddof=1) / len(per_prompt) ** 0.5
    step, steps = common.knee(curve), len(curve)
    window = {"knee_step": step, "tau": step / steps, "window": [0, min(max(step, 1), steps - 1)]}
    return {"clip_similarity": curve.tolist(), "clip_similarity_stderr": stderr.tolist()} | window


# ================================================================ Figure 7


def film_steps(steps: int, step: int) -> list[int]:
    """Up to FILM_COLUMNS steps to show, with the first, the knee and the last, the others evenly on both sides of it."""
    half = FILM_COLUMNS // 2
    before = np.linspace(0, step, half + 1).round().astype(int)
    after = np.linspace(step, steps - 1, FILM_COLUMNS - half).round().astype(int)
    return sorted({*before.tolist(), *after.tolist()})


def draw_figure(window: dict[str, Any], film: np.ndarray, prompts: list[str]) -> bytes:
    """Figure 7 for one model, as PNG: film strips of the estimates, and the similarity curve over tau."""
    steps, step = window["steps"], window["knee_step"]
    taus, shown, (rows, _, _, h, w) = np.arange(steps) / steps, film_steps(steps, step), film.shape

    # Places in inches, so that pictures keep their shape for any number of rows and columns.
    cell, gap, caption = 1.5, 0.1, 0.34
    strip, line = len(shown) * (cell + gap), cell * h / w + caption
    size = np.array([strip + 6.5, max(rows * line + 0.75, 4.2)])
    figure = Figure(figsize=size, facecolor="white")

    def axes_at(x: float, y: float, width: float, height: float) -> Axes:
        return figure.add_axes((x / size[0], (size[1] - y - height) / size[1], width / size[0], height / size[1]))

    # Left: a row a prompt, a column a step; the knee's column has a dashed border.
    for row in range(rows):
        for column, i in enumerate(shown):
            axis = axes_at(0.15 + column * (cell + gap), 0.45 + row * line, cell, line - caption)
            axis.imshow(film[row, i].transpose(1, 2, 0), interpolation="nearest")
            axis.set(xticks=[], yticks=[])
            color, width, dash = (ACCENT, 2.4, (0, (3, 1.6))) if i == step else (FAINT, 0.8, "solid")
            axis.spines[:].set(color=color, linewidth=width, linestyle=dash)
            if row == 0:
                axis.set_title(rf"$\tau$ = {taus[i]:.2f}", color=ACCENT if i == step else INK, fontsize=12)
            if column == 0:
                axis.text(
                    0, -0.04, prompts[row], transform=axis.transAxes, va="top", fontsize=10, style="italic", color=MUTED
                )

    # Right: mean similarity, its standard error, the SDE window, and the knee.
    axis = axes_at(strip + 1.1, 0.45, 5.1, size[1] - 1.1)
    mean, stderr = np.array(window["clip_similarity"]), np.array(window["clip_similarity_stderr"])
    end = window["window"][1] / steps
    axis.axvspan(0, end, color=ACCENT, alpha=0.08, lw=0)
    axis.text(end / 2, 1.01, "SDE window", transform=axis.get_xaxis_transform(), color=ACCENT, ha="center", fontsize=11)
    axis.fill_between(
        taus, mean - stderr, mean + stderr, color=INK, alpha=0.15, lw=0, label="standard error over prompts"
    )
    axis.plot(taus, mean, color=INK, lw=2, marker="o", ms=4 if steps <= 20 else 0, label=Path(window["model"]).name)
    label = rf"knee, step {step} of {steps} ($\tau$ = {window['tau']:.2f})"
    axis.plot(taus[step], mean[step], "^", ms=14, color=ACCENT, mec="white", mew=1.5, label=label, zorder=5)
    axis.set_xlim(0, 1)
    axis.set_xlabel(r"denoising progress $\tau$", fontsize=12)
    axis.set_ylabel(r"CLIP similarity of $\hat{x}_0$ and prompt", fontsize=12)
    axis.spines[["top", "right"]].set_visible(False)
    axis.grid(axis="y", color=FAINT, lw=0.8)
    axis.set_axisbelow(True)
    axis.legend(frameon=False, loc="lower right", fontsize=11)

    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=160)
    return buffer.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", metavar="FILE", help="prompts: text, one a line, or .jsonl with a prompt field")
    parser.add_argument("--num-prompts", type=int, default=32, metavar="P", help="the first P prompts of the file")
    parser.add_argument("--images-per-prompt", type=int, default=1, metavar="J", help="pictures a prompt")
    parser.add_argument("--batch-size", type=int, default=8, metavar="N", help="pictures at once: memory")
    model = parser.add_argument_group("models and sampler")
    model.add_argument("--model", metavar="NAME", help="a diffusers FLUX.2 pipeline")
    model.add_argument("--clip", metavar="NAME", help="a transformers CLIP")
    model.add_argument("--height", type=int, metavar="PIXELS", help="of the pictures")
    model.add_argument("--width", type=int, metavar="PIXELS", help="of the pictures")
    model.add_argument("--steps", type=int, metavar="T", help="denoising steps")
    model.add_argument("--guidance", type=float, metavar="G", help="embedded guidance scale")
    model.add_argument("--max-sequence-length", type=int, metavar="S", help="prompt tokens, padding counted")
    model.add_argument("--text-encoder-layers", type=int, nargs="+", metavar="I", help="their states embed the prompt")
    args = common.parse_args(parser)

    # Check everything before the models are loaded.
    if args.prompts is None:
        raise UserError("give --prompts FILE: the window is found on these prompts")
    prompts = common.read_prompts(args.prompts)[: max(args.num_prompts, 0)]
    if len(prompts) < 2:
        raise UserError(f"--prompts, --num-prompts: {len(prompts)} prompt is too few; the standard error needs 2")
    if args.images_per_prompt < 1 or args.batch_size < 1:
        raise UserError("--images-per-prompt and --batch-size must be at least 1")
    digest = hashlib.sha256("\n".join(prompts).encode()).hexdigest()[:12]
    args.prompts = f"{Path(args.prompts).name} (the first {len(prompts)}: sha256 {digest})"
    out, settings = args.run / "window.json", args.run / "window.settings.json"
    if out.exists():
        if not common.require_same(settings, args, ("batch_size",)):
            raise UserError(f"{out}: exists without {settings.name}; use another --run")
        done = read_json(out)
        print(f"{out} is done: knee_step {done['knee_step']}, tau {done['tau']:.3f}, window {done['window']}")
        return

    pipe = common.load_pipeline(args.model, args.device, getattr(torch, args.dtype))
    clip = Clip(args.clip, args.device)
    common.latent_grid(pipe, args.height, args.width)
    common.write_settings(settings, args)
    print(f"{len(prompts)} prompts x {args.images_per_prompt} pictures x {args.steps} steps")
    similarity, film, sigmas = denoise(pipe, clip, prompts, args)
    if not np.isfinite(similarity).all():
        raise UserError(f"--model {args.model}: its pictures are not finite in {args.dtype}; try another --dtype")

    # window.json comes last: where it is, the stage is done.
    window = {
        "model": common.portable(args.model),
        "prompts": len(prompts),
        "images_per_prompt": args.images_per_prompt,
    }
    window |= {"steps": args.steps, "sigmas": sigmas} | find_window(similarity)
    common.write_bytes(args.run / "window.png", draw_figure(window, film, prompts))
    common.write_json(out, window)
    print(f"knee_step {window['knee_step']}, tau {window['tau']:.3f}, window {window['window']}: {args.run}/window.png")


if __name__ == "__main__":
    common.run_main(main)
