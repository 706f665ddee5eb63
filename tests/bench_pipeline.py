"""Speed as ratios in one run: ours over the bare model calls that the same work needs. `make bench`.

    rollout / forwards      one pass of stage 03's rollout over its transformer forwards alone            goal <= 1.05
    update / fwd+bwd        one optimizer step of stage 04 over its forwards and backwards alone          goal <= 1.10
    ODE / pipe              our ODE sampling over pipe(..., output_type="latent") of diffusers            goal <= 1.00

The two sides run in turn; each time is the median of `--repeats`.
"""

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

import torch  # noqa: E402

import common  # noqa: E402


def ratio(name: str, ours, bare, repeats: int) -> None:
    times: dict[str, list[float]] = {"ours": [], "bare": []}
    ours(), bare()  # warm-up
    for _ in range(repeats):
        for key, call in (("ours", ours), ("bare", bare)):
            start = time.perf_counter()
            call()
            times[key].append(time.perf_counter() - start)
    a, b = (statistics.median(times[k]) for k in ("ours", "bare"))
    print(f"{name:18s} ours {a * 1e3:8.1f} ms   bare {b * 1e3:8.1f} ms   ratio {a / b:.3f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=15)
    options = parser.parse_args()
    sys.argv = ["bench", "--run", "unused"]
    stage3, stage4 = (common.load_stage(ROOT / f) for f in ("03_score_atoms.py", "04_train_cast.py"))
    args = stage4.parse(stage3)
    window = (0, 3)
    args.window = list(window)
    pipe = common.load_pipeline(args.model, args.device, torch.float32)
    pipe.set_progress_bar_config(disable=True)
    text = dict(max_sequence_length=args.max_sequence_length, text_encoder_layers=args.text_encoder_layers)
    prompts = ["three red circles to the left of two blue squares", "a green triangle and two red squares"] * (
        args.batch_groups // 2
    )
    embeds = common.encode_prompts(pipe, prompts, **text)
    grid = common.latent_grid(pipe, args.height, args.width)
    sigmas = common.schedule(pipe, args.steps, grid[0] * grid[1])
    n = len(prompts) * args.samples
    all_embeds = embeds.repeat_interleave(args.samples, 0)
    x = common.start_noise(pipe, grid, range(n))
    velocity = common.velocity_fn(pipe, all_embeds, grid, args.guidance)
    print(f"{n} samples, {args.steps} steps, window {window}, {torch.get_num_threads()} threads")

    @torch.no_grad()
    def forwards() -> None:
        for sigma in sigmas[:-1]:
            velocity(x, sigma)

    # ODE against the pipeline, before the LoRA is added
    ratio(
        "ODE / pipe",
        lambda: common.sample(velocity, x, sigmas),
        lambda: pipe(
            prompt_embeds=all_embeds, latents=x.transpose(1, 2).unflatten(2, grid), height=args.height, width=args.width,
            num_inference_steps=args.steps, guidance_scale=args.guidance, output_type="latent",
        ),
        options.repeats,
    )  # fmt: skip

    params = stage4.add_lora(pipe.transformer, args)
    ratio(
        "rollout / forwards",
        lambda: stage3.rollout(pipe, embeds, range(n), window, args),
        forwards,
        options.repeats,
    )

    t = stage3.rollout(pipe, embeds, range(n), window, args)
    shards = [
        {
            "latents": t.latents[s],
            "log_probs": t.log_probs[s],
            "credit": torch.randn(args.samples, 1, grid[0] * grid[1]),
        }
        for s in (slice(i, i + args.samples) for i in range(0, n, args.samples))
    ]
    policies, optimizer = stage4.first_policies(params, args), torch.optim.AdamW(params.values(), lr=0.0)

    def forwards_and_backwards() -> None:
        for i in range(*window):
            velocity(t.latents[:, i], sigmas[i]).square().mean().backward()
        for p in params.values():
            p.grad = None

    ratio(
        "update / fwd+bwd",
        lambda: stage4.update(pipe, params, policies, optimizer, shards, embeds, sigmas, 0, args),
        forwards_and_backwards,
        options.repeats,
    )


if __name__ == "__main__":
    main()
