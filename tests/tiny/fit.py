"""One training loop for all models of the tiny world: AdamW, EMA, progress, and an exact resume."""

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from tqdm import tqdm


def learning_rate(step: int, steps: int, peak: float) -> float:
    """Warm-up over 100 steps, constant to 60%, then linear to 0."""
    return peak * min((step + 1) / 100, 1.0, (steps - step) / (0.4 * steps))


def fit(
    name: str,
    module: torch.nn.Module,
    loss_fn: Callable[[int], tuple[torch.Tensor, dict[str, float]]],
    *,
    steps: int,
    lr: float,
    work: Path,
    ema_decay: float = 0.998,
    save_every_s: float = 60.0,
) -> None:
    """Trains `module` in place for `steps` updates and leaves its EMA weights in it.

    `loss_fn(step)` must draw its batch from `step` alone: then a run that is killed and started again ends in the
    same weights. State goes to `work/name.safetensors`; a finished one is loaded and nothing is trained.
    """
    path = work / f"{name}.safetensors"
    params = {k: p for k, p in module.named_parameters() if p.requires_grad}
    ema = {k: p.detach().clone() for k, p in params.items()}
    optimizer = torch.optim.AdamW(params.values(), lr=lr, betas=(0.9, 0.99), weight_decay=0.01)
    start = 0
    if path.exists():
        state = load_file(path)
        start = int(state["step"])
        for k, p in params.items():
            p.data.copy_(state[f"param.{k}"])
            ema[k].copy_(state[f"ema.{k}"])
            optimizer.state[p] = {
                n: state[f"{n}.{k}"] for n in ("step", "exp_avg", "exp_avg_sq") if f"{n}.{k}" in state
            }

    def save(step: int) -> None:
        state = {"step": torch.tensor(step)}
        for k, p in params.items():
            state |= {f"param.{k}": p.detach(), f"ema.{k}": ema[k]}
            state |= {f"{n}.{k}": v for n, v in optimizer.state[p].items()}
        partial = path.with_suffix(".partial")
        save_file({k: v.contiguous() for k, v in state.items()}, partial)
        os.replace(partial, path)

    module.train()
    saved, smooth = time.monotonic(), {}
    with tqdm(total=steps, initial=start, desc=name, mininterval=2, dynamic_ncols=True) as bar:
        for step in range(start, steps):
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(step, steps, lr)
            loss, shown = loss_fn(step)
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(params.values(), 1.0)
            optimizer.step()
            decay = min(ema_decay, (1 + step) / (10 + step))
            torch._foreach_lerp_(list(ema.values()), [p.detach() for p in params.values()], 1 - decay)
            for k, v in ({"loss": loss.item()} | shown).items():
                smooth[k] = 0.98 * smooth.get(k, v) + 0.02 * v
            bar.set_postfix({k: f"{v:.4f}" for k, v in smooth.items()}, refresh=False)
            bar.update()
            if time.monotonic() - saved > save_every_s:
                save(step + 1)
                saved = time.monotonic()
    if start < steps:
        save(steps)
    for k, p in params.items():
        p.data.copy_(ema[k])
    module.eval()
