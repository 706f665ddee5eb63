"""What the five stages share: the SDE sampler, the credit map, the losses, the backbone, and safe files.

Notation (one convention everywhere; DESIGN: "The mathematics")

    variable      symbol    meaning                                                              shape
    x             x_sigma   latent tokens, x = (1-sigma)*x0 + sigma*eps                          [N, L, C]
    velocity      v         eps - x0; Tweedie estimate x0_hat = x - sigma*v                      [N, L, C]
    sigma         sigma     noise level, from 1 (noise) to 0 (data)                              scalar
    dt                      sigma_next - sigma < 0                                               scalar
    std           s*|dt|^.5 standard deviation of an SDE step                                    scalar
    log_prob      log p     Gaussian log-density of a step, mean over channels                   [N, L]
    rewards       r_ik      reward of atom k in sample i of a prompt group                       [N, K]
    maps          M_ik      where atom k is in picture i, mean 1 over locations                  [N, K, h, w]
    credit                  signed weight of the policy gradient, broadcastable to               [N, T_w, L]
    flow                    eps - x0 of a draw (t, eps) of the forward process, v's target       [N, L, C]
    error         m         mean over channels of (v - flow)^2                                   [N, L]
    v_base, v_old           velocity of the frozen base, of a lagging LoRA                       [N, L, C]

    N samples of a group, K atoms, T steps, T_w steps in the SDE window, D draws, L = h*w latent tokens, C channels.

Deviations from the papers (CAST publishes neither its weighting nor its knee rule; DESIGN 3 and 4 fix ours):
1. Flow-GRPO's log-probability is a mean over all of a sample; ours is a mean over channels, one a location. Its mean over
   locations is Flow-GRPO's, `--ratio sample` gives that ratio.
2. Advantages: population std of the prompt group, never under a floor; no global std, no clamp. RAM divides by the std of
   the whole batch, AWM clamps at 5 and divides by 5.
3. The densities of "dance" and "cps" keep the constants and the variance that public code drops, so that they are the
   densities of what was drawn; a clip range tuned for those recipes has another meaning here.
4. RAM's, AWM's and SFT's draws of t are stratified in the D draws of a sample: the same p(t), less variance.
5. SFT keeps the best of a group only where the group's std reaches the floor; for soft rewards a tie is too rare a sign of
   a saturated group. With atom credits the best is picked atom by atom.
"""

from __future__ import annotations

import argparse
import fcntl
import hashlib
import importlib.util
import io
import json
import math
import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from safetensors import SafetensorError, safe_open
from safetensors.torch import save

if TYPE_CHECKING:  # imported where they are used: an error in a flag then shows at once
    from diffusers import Flux2Pipeline
    from matplotlib.figure import Figure

Velocity = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]  # x [N, L, C], sigma (one or [N]) -> v [N, L, C]

# ================================================================ the SDE sampler


def sde_step(
    x: torch.Tensor,
    velocity: torch.Tensor,
    sigma: float | torch.Tensor,
    sigma_next: float | torch.Tensor,
    *,
    noise_level: float,
    sigma_max: float | torch.Tensor,
    kind: str = "flow",
    x_next: torch.Tensor | None = None,
    generator: torch.Generator | Sequence[torch.Generator] | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """One step from sigma to sigma_next with its log-density. Flow-GRPO (arXiv 2505.05470), DESIGN 3.

    x, velocity, x_next [N, L, C]; computed in float32, or float64 if x is. `sigma_max` is the grid's second level
    sigmas[1]: it stands in for sigma = 1 in the denominator 1 - sigma. `x_next` given: its density (replay).
    `generator`: one, or one a sample. kind: "flow" (s = a*sqrt(sigma/(1-sigma))), "dance" (DanceGRPO, s = a),
    "cps" (coefficient-preserving, std = sigma_next*sin(a*pi/2)), "ode".
    noise_level 0, kind "ode", and the last step of "cps" are the Euler step, log_prob 0.

    Returns x_next [N, L, C], log_prob [N, L] (constants kept, mean over channels), mean [N, L, C], std (scalar tensor).
    """
    dtype = torch.promote_types(x.dtype, torch.float32)
    x, v = x.to(dtype), velocity.to(dtype)
    sigma, sigma_next, sigma_max = (
        torch.as_tensor(s, dtype=dtype, device=x.device) for s in (sigma, sigma_next, sigma_max)
    )
    dt = sigma_next - sigma
    if kind == "ode" or noise_level == 0 or (kind == "cps" and sigma_next == 0):  # CPS ends without noise
        mean = x + v * dt
        return mean, mean.new_zeros(mean.shape[:-1]), mean, mean.new_zeros(())

    a = noise_level
    if kind == "cps":
        std = sigma_next * math.sin(a * math.pi / 2)
        x0_hat, eps_hat = x - sigma * v, x + (1 - sigma) * v
        mean = (1 - sigma_next) * x0_hat + (sigma_next**2 - std**2).sqrt() * eps_hat
    elif kind in ("flow", "dance"):
        s = (
            a * (sigma / (1 - torch.where(sigma == 1, sigma_max, sigma))).sqrt()
            if kind == "flow"
            else sigma.new_tensor(a)
        )
        mean = x * (1 + s**2 / (2 * sigma) * dt) + v * (1 + s**2 * (1 - sigma) / (2 * sigma)) * dt
        std = s * (-dt).sqrt()
    else:
        raise ValueError(f"kind must be flow, dance, cps or ode, not {kind!r}")

    if x_next is None:
        x_next = mean + std * randn(x.shape, generator, dtype, x.device)
    log_prob = -((x_next.detach().to(dtype) - mean) ** 2) / (2 * std**2) - std.log() - 0.5 * math.log(2 * math.pi)
    return x_next, log_prob.mean(-1), mean, std


def randn(shape: Sequence[int], generator: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Normal noise on `device`; a list of generators (one a sample) makes each sample independent of its batch."""
    if isinstance(generator, Sequence):
        rows = [torch.randn(shape[1:], generator=g, dtype=dtype, device=g.device) for g in generator]
        return torch.stack(rows).to(device)
    return torch.randn(shape, generator=generator, dtype=dtype, device=generator.device if generator else device).to(
        device
    )


@dataclass
class Trajectory:
    """The SDE steps of a rollout, exactly as they were used, and its end."""

    latents: torch.Tensor  # [N, T_w + 1, L, C], float32
    log_probs: torch.Tensor  # [N, T_w, L]
    x0: torch.Tensor  # [N, L, C]


@torch.no_grad()
def sample(
    velocity: Velocity,
    x: torch.Tensor,
    sigmas: torch.Tensor,
    *,
    window: tuple[int, int] = (0, 0),
    noise_level: float = 0.0,
    kind: str = "flow",
    generators: Sequence[torch.Generator] | None = None,
    on_step: Callable[[int, torch.Tensor, torch.Tensor], None] | None = None,
) -> Trajectory:
    """From noise x [N, L, C] along sigmas [T+1]: SDE steps first..last of window = [first, last+1], else Euler steps.

    `on_step(i, x_i, v_i)` sees every step. Raises ValueError for a window that is outside of the steps or holds the
    step to sigma 0, whose density is too narrow to train on.
    """
    first, end = window
    steps = len(sigmas) - 1
    if not (0 <= first <= end <= steps - 1):
        raise ValueError(
            f"window [{first}, {end}] must lie in [0, {steps - 1}]: the last of {steps} steps is never an SDE step"
        )
    latents, log_probs = [], []
    for i in range(steps):
        if first <= i < end:
            latents.append(x)
        v = velocity(x, sigmas[i])
        if on_step:
            on_step(i, x, v)
        x, log_prob, _, _ = sde_step(
            x, v, sigmas[i], sigmas[i + 1], noise_level=noise_level, sigma_max=sigmas[1],
            kind=kind if first <= i < end else "ode", generator=generators,
        )  # fmt: skip
        if first <= i < end:
            log_probs.append(log_prob)
            if i == end - 1:
                latents.append(x)
    if not latents:
        return Trajectory(x.new_empty(len(x), 0, *x.shape[1:]), x.new_empty(len(x), 0, x.shape[1]), x)
    return Trajectory(torch.stack(latents, 1), torch.stack(log_probs, 1), x)


def knee(curve: Sequence[float]) -> int:
    """Index where a rising curve turns into its plateau: the point of its running maximum that lies farthest above the
    chord (Satopaa et al. 2011, "Kneedle"). The paper does not publish its rule; this one is ours."""
    y = np.maximum.accumulate(np.asarray(curve, float))
    return int((y - np.linspace(y[0], y[-1], len(y))).argmax())


# ================================================================ advantages, credit, losses


def atom_advantages(rewards: torch.Tensor, *, std_floor: float) -> torch.Tensor:
    """A_ik: z-score of rewards [N, K] over the N samples of one prompt group, population std, never under std_floor.

    A NaN reward is left out of its group's statistics and gets advantage 0.
    """
    valid = ~rewards.isnan()
    count = valid.sum(0).clamp(min=1)
    centred = torch.where(valid, rewards - rewards.nansum(0) / count, 0.0)
    std = (centred.square().sum(0) / count).sqrt()
    return centred / std.clamp(min=std_floor)


def best_of_group(rewards: torch.Tensor, *, std_floor: float) -> torch.Tensor:
    """SFT's advantage [N, K]: 1 for the highest reward of the group (ties too), else 0; all 0 where the group's std is
    under std_floor, since a group of equal rewards has no best. A NaN reward is never the best."""
    valid = rewards.nan_to_num(-torch.inf)
    live = atom_advantages(rewards, std_floor=std_floor).square().sum(0) > (1 - 1e-4) * (~rewards.isnan()).sum(0)
    return ((valid == valid.amax(0)) & live).to(rewards.dtype)


def credit_map(
    kind: str, rewards: torch.Tensor, maps: torch.Tensor, *, std_floor: float, generator: torch.Generator | None = None,
    advantages: Callable[..., torch.Tensor] = atom_advantages,
) -> torch.Tensor:  # fmt: skip
    """The credit of one prompt group, rewards [N, K] and maps [N, K, h, w] (mean 1) -> [N, 1, L] or [N, 1, 1].

    DESIGN 3's table, the rows of the paper's Table 2: "sum" (Flow-GRPO), "atom", "spatial", "shuffled", "cast"; and "step"
    (Step-GRPO of DRM), whose rewards [N, T_w] are one a window step -> [N, T_w, 1]. advantages: best_of_group for SFT.
    """
    k = rewards.shape[1]
    group = advantages(rewards.nanmean(1, keepdim=True), std_floor=std_floor)  # [N, 1], A_i of the mean reward
    each = advantages(rewards, std_floor=std_floor)  # [N, K]
    m = maps.flatten(2)  # [N, K, L]
    if kind == "sum":
        credit = group
    elif kind == "atom":
        credit = each.mean(1, keepdim=True)
    elif kind == "spatial":
        credit = group * m.mean(1)
    elif kind == "shuffled":
        if k < 2:
            raise ValueError("credit 'shuffled' needs at least 2 atoms: one map has no other atom to go to")
        order = torch.randperm(k, generator=generator)
        derangement = torch.empty_like(order)
        derangement[order] = order.roll(1)  # a random cycle: no atom keeps its own map
        credit = (each[..., None] * m[:, derangement]).mean(1)
    elif kind == "cast":
        credit = (each[..., None] * m).mean(1)
    elif kind == "step":
        return each[..., None]
    else:
        raise ValueError(f"credit must be sum, atom, spatial, shuffled, cast or step, not {kind!r}")
    return credit[:, None]


def grpo_loss(
    log_prob: torch.Tensor, old_log_prob: torch.Tensor, credit: torch.Tensor, *, clip_range: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """PPO's clipped objective per step and location, weighted by the credit (CAST; with a constant credit Flow-GRPO's).

    log_prob, old_log_prob [N, T_w, L]; credit broadcastable to it. -> scalar loss and diagnostics without gradient, of which
    ratio_gap = |ratio-1| [N, T_w, L] is exactly 0 before the first update, but for rounding.
    """
    ratio = (log_prob - old_log_prob).exp()
    clipped = ratio.clamp(1 - clip_range, 1 + clip_range)
    loss = torch.maximum(-credit * ratio, -credit * clipped).mean()
    with torch.no_grad():
        gap = (ratio - 1).abs()
        info = {
            "ratio_gap": gap,
            "clip_fraction": (gap > clip_range).float().mean(),
            "approx_kl": (ratio - 1 - (log_prob - old_log_prob)).mean(),  # k3 of joschu.net/blog/kl-approx.html
        }
    return loss, info


def gaussian_kl(mean: torch.Tensor, mean_base: torch.Tensor, std: torch.Tensor) -> torch.Tensor:
    """KL [N, L] of an SDE step from the base's, mean over channels; both have this std. Flow-GRPO's own code divides by
    s^2 and not by std^2 = s^2*|dt|: its value is this one times |dt|."""
    return ((mean - mean_base) ** 2).mean(-1) / (2 * std**2)


def forward_draws(
    x0: torch.Tensor, draws: int, times: str, sigmas: torch.Tensor, generators: Sequence[torch.Generator]
) -> tuple[torch.Tensor, torch.Tensor]:
    """D draws of the forward process for x0 [N, L, C], a generator a sample -> t [N, D], eps [N, D, L, C].

    times: "grid" (uniform over the rollout's sigmas between its first and 0; AWM), "sqrt" (p(t) = 2t; RAM) or
    "logit-normal" (a standard normal's sigmoid, read off the schedule as a fraction of its steps; SD3, Flow-GRPO's SFT).
    """
    u = torch.stack([torch.rand(draws, generator=g) for g in generators])  # [N, D]
    u = (torch.arange(draws) + u) / draws  # a stratum a draw
    eps = torch.stack([torch.randn(draws, *x0.shape[1:], generator=g) for g in generators])
    sigmas, steps = sigmas.cpu().float(), len(sigmas) - 1
    if times == "grid":
        t = sigmas[1 + (u * (steps - 1)).long().clamp(max=steps - 2)]
    elif times == "sqrt":
        t = u.sqrt()
    elif times == "logit-normal":
        position = (1 - torch.special.ndtri(u).sigmoid()) * steps
        i = position.long().clamp(max=steps - 1)
        t = torch.lerp(sigmas[i], sigmas[i + 1], position - i)
    else:
        raise ValueError(f"times must be grid, sqrt or logit-normal, not {times!r}")
    return t.to(x0), eps.to(x0)


def awm_log_prob(error: torch.Tensor, t: torch.Tensor, weighting: str) -> torch.Tensor:
    """AWM's surrogate log-probability of a draw from its velocity error, in AWM's five weightings; t broadcastable."""
    if weighting == "uniform":
        return -error
    if weighting == "t":
        return -t * error
    if weighting == "t2":
        return -(t**2) * error
    if weighting == "huber":
        return -((error + 1e-10).sqrt() - 1e-5) * t
    if weighting == "ghuber":
        return -((error + 1e-10) ** 0.25 - 1e-10**0.25) * t / 0.25
    raise ValueError(f"weighting must be uniform, t, t2, huber or ghuber, not {weighting!r}")


def awm_loss(
    error: torch.Tensor, old_error: torch.Tensor, t: torch.Tensor, credit: torch.Tensor, *, weighting: str, clip_range: float
) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:  # fmt: skip
    """Advantage Weighted Matching: PPO's objective on the surrogate log-probability of a draw (t, eps), the same draw for
    old and new. error, old_error [N, D, L]; t [N, D, 1]; credit broadcastable. On-policy its gradient is that of
    -credit * log_prob. A negative credit maximises an error without bound: the velocity KL (04) holds it."""
    new, old = (awm_log_prob(e, t, weighting) for e in (error, old_error))
    return grpo_loss(new, old, credit, clip_range=clip_range)


def ram_loss(
    velocity: torch.Tensor, v_base: torch.Tensor, v_old: torch.Tensor, flow: torch.Tensor, credit: torch.Tensor, *, eta: float
) -> torch.Tensor:  # fmt: skip
    """Reinforce Adjoint Matching (arXiv 2605.10759, eq. 17 with R = eta*credit and v_old for v inside the target): the base's
    velocity, corrected by the reward, is the target. velocity, v_base, v_old, flow [N, D, L, C]; credit [N, D, L]."""
    target = v_base + eta * credit[..., None] * (flow - v_old)
    return (velocity - target.detach()).square().mean()


def sft_loss(error: torch.Tensor, credit: torch.Tensor, kept: torch.Tensor) -> torch.Tensor:
    """Self-distillation on the best of each group, a mean over the kept. error [N, D, L]; credit: credit_map with
    best_of_group; kept: the mean of that credit over all samples of the update, of which these N may be a part."""
    return (credit * error).mean() / kept


# ================================================================ the backbone


def load_pipeline(model: str, device: str, dtype: torch.dtype) -> Flux2Pipeline:
    """A frozen diffusers pipeline from a folder or the hub; only safetensors. Raises UserError."""
    from diffusers import DiffusionPipeline, Flux2Pipeline

    try:
        pipe = DiffusionPipeline.from_pretrained(model, dtype=dtype, use_safetensors=True)
    except (OSError, ValueError) as e:
        raise UserError(f"--model {model}: cannot be loaded: {str(e).splitlines()[0].split(' (')[0]}") from e
    if not isinstance(pipe, Flux2Pipeline):
        raise UserError(f"--model {model}: is a {type(pipe).__name__}; supported: Flux2Pipeline")
    for part in (pipe.transformer, pipe.vae, pipe.text_encoder):
        part.eval().requires_grad_(False)
    return pipe.to(device)


@torch.no_grad()
def encode_prompts(
    pipe: Flux2Pipeline, prompts: Sequence[str], *, max_sequence_length: int, text_encoder_layers: Sequence[int]
) -> torch.Tensor:
    """Prompt embeddings [P, S, D]. They depend on max_sequence_length: FLUX.2 attends to the padding."""
    encoder = pipe.text_encoder.config.text_config
    found, wanted = len(text_encoder_layers) * encoder.hidden_size, pipe.transformer.config.joint_attention_dim
    if found != wanted or not all(0 <= i <= encoder.num_hidden_layers for i in text_encoder_layers):
        raise UserError(
            f"--text-encoder-layers {' '.join(map(str, text_encoder_layers))}: this model reads "
            f"{wanted // encoder.hidden_size} of the layers 0 to {encoder.num_hidden_layers}"
        )
    parts = []
    for i in range(0, len(prompts), 32):
        embeds, _ = pipe.encode_prompt(
            list(prompts[i : i + 32]),
            max_sequence_length=max_sequence_length,
            text_encoder_out_layers=tuple(text_encoder_layers),
        )
        parts.append(embeds)
    return torch.cat(parts)


def latent_grid(pipe: Flux2Pipeline, height: int, width: int) -> tuple[int, int]:
    """Latent tokens (h, w) of a picture of height x width pixels."""
    cell = pipe.vae_scale_factor * 2
    if height % cell or width % cell:
        raise UserError(f"--height {height} --width {width}: must be multiples of {cell} for this model")
    return height // cell, width // cell


def schedule(pipe: Flux2Pipeline, steps: int, tokens: int) -> torch.Tensor:
    """The pipeline's own sigmas [steps + 1], float32, from 1 to 0."""
    from diffusers.pipelines.flux2.pipeline_flux2 import compute_empirical_mu

    pipe.scheduler.set_timesteps(
        sigmas=np.linspace(1.0, 1 / steps, steps), mu=compute_empirical_mu(image_seq_len=tokens, num_steps=steps)
    )
    return pipe.scheduler.sigmas.clone()


def start_noise(pipe: Flux2Pipeline, grid: tuple[int, int], seeds: Sequence[int]) -> torch.Tensor:
    """Noise [N, L, C], float32, a seed a sample: what the pipeline draws for the same generators."""
    shape = (1, pipe.transformer.config.in_channels, *grid)
    noise = torch.cat([torch.randn(shape, generator=torch.Generator().manual_seed(s)) for s in seeds])
    return pipe._pack_latents(noise).contiguous().to(pipe.transformer.device)


def velocity_fn(pipe: Flux2Pipeline, embeds: torch.Tensor, grid: tuple[int, int], guidance: float) -> Velocity:
    """v(x, sigma) for embeds [N, S, D], as the pipeline calls its transformer; guidance is embedded."""
    img_ids = pipe._prepare_latent_ids(torch.empty(1, 1, *grid)).to(embeds.device)
    txt_ids = pipe._prepare_text_ids(embeds[:1]).to(embeds.device)
    scale = torch.full((len(embeds),), guidance, device=embeds.device, dtype=torch.float32)

    dtype = pipe.transformer.dtype

    def velocity(x: torch.Tensor, sigma: torch.Tensor) -> torch.Tensor:
        timestep = (sigma * 1000).to(x.device, x.dtype).expand(len(x)) / 1000  # the pipeline's own rounding
        # x and the timestep stay float32 in bf16 too: FLUX.2 rounds the timestep to the dtype of x, its largest error.
        with torch.autocast(x.device.type, dtype, enabled=dtype != torch.float32):
            return pipe.transformer(
                hidden_states=x, timestep=timestep, guidance=scale, encoder_hidden_states=embeds, txt_ids=txt_ids,
                img_ids=img_ids, return_dict=False,
            )[0]  # fmt: skip

    return velocity


@torch.no_grad()
def decode(pipe: Flux2Pipeline, latents: torch.Tensor, grid: tuple[int, int]) -> torch.Tensor:
    """Latent tokens [N, L, C] -> pictures [N, 3, H, W] in 0..1, float32."""
    z = latents.transpose(1, 2).unflatten(2, grid)  # [N, C, h, w]
    bn = pipe.vae.bn
    std = (bn.running_var + pipe.vae.config.batch_norm_eps).sqrt()
    z = pipe._unpatchify_latents(z * std.view(1, -1, 1, 1) + bn.running_mean.view(1, -1, 1, 1))
    return (pipe.vae.decode(z.to(pipe.vae.dtype)).sample.float() / 2 + 0.5).clamp(0, 1)


def load_lora(pipe: Flux2Pipeline, folder: str | Path) -> None:
    """diffusers' load_lora_weights; keys that match nothing are an error here, not a warning. Raises UserError."""
    file = Path(folder) / "pytorch_lora_weights.safetensors"
    wanted = sum(".lora_" in key for key in read_tensors(file)[0])
    try:
        pipe.load_lora_weights(str(folder))
        loaded = sum("lora_" in name for name, _ in pipe.transformer.named_parameters())
        if loaded < max(wanted, 1):
            raise ValueError(f"of its {wanted} matrices {loaded} match the transformer")
    except Exception as e:  # whatever a foreign file makes diffusers or peft raise
        raise UserError(f"{file}: is no LoRA for this model: {' '.join(str(e).split())[:300]}") from e


def lora_digest(transformer: torch.nn.Module) -> str:
    """Names the policy: "base" without a LoRA or with one that changes nothing (B = 0), else a hash of its weights."""
    if not getattr(transformer, "peft_config", None):
        return "base"
    from peft import get_peft_model_state_dict

    weights = sorted(get_peft_model_state_dict(transformer, adapter_name=transformer.active_adapters()[0]).items())
    if not any(bool(w.any()) for k, w in weights if "lora_B" in k):
        return "base"
    digest = hashlib.blake2b(digest_size=16)
    for k, w in weights:
        digest.update(k.encode() + w.detach().float().cpu().numpy().tobytes())
    return digest.hexdigest()


def sample_seed(run_seed: int, round_: int, prompt_id: int, image_index: int) -> int:
    """The seed of one picture: the same whatever the batch, the order or the number of processes."""
    key = f"{run_seed} {round_} {prompt_id} {image_index}".encode()
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "big") >> 2


# ================================================================ settings, errors, files


class UserError(Exception):
    """Something that the user can mend. Its text is one line that names the file, line or flag."""


ROOT = Path(__file__).parent
SKILLS = ("object", "count", "attribute", "position", "verb")  # GenEval 2's kinds of atom; the last two are relations
TINY = "tests/tiny"
PRESETS: dict[str, dict[str, Any]] = {
    "tiny": dict(
        model=f"{TINY}/models/flux2", vlm=f"{TINY}/models/qwen3vl", clip=f"{TINY}/models/clip", oracle=f"{TINY}/world.py",
        lexicon=f"{TINY}/lexicon.json", prompts=f"{TINY}/prompts.txt", eval_prompts=f"{TINY}/heldout.jsonl",
        exclude=[f"{TINY}/heldout.jsonl"], height=32, width=32, steps=10, guidance=4.0, max_sequence_length=8,
        text_encoder_layers=[1, 2, 3], noise_level=1.0, rank=16, alpha=16, lr=2e-3, rounds=60, batch_size=120,
        images_per_prompt=2,
    ),
    # Table 3 of the paper: 1024x1024, 50 steps, default guidance, LoRA rank 64, alpha 64.
    "flux2-dev": dict(
        model="black-forest-labs/FLUX.2-dev", vlm="Qwen/Qwen3-VL-8B-Instruct", clip="openai/clip-vit-large-patch14",
        height=1024, width=1024, steps=50, guidance=4.0, max_sequence_length=512, text_encoder_layers=[10, 20, 30],
        noise_level=0.7, rank=64, alpha=64, dtype="bfloat16", batch_groups=1, vlm_batch=1, batch_size=4,
    ),
}  # fmt: skip


RANGES = dict(
    seed=(0, 2**62), height=(1, 2**14), width=(1, 2**14), steps=(2, 1000), guidance=(0, 1000), max_sequence_length=(1, 4096),
    noise_level=(1e-3, 10), groups=(1, 10**5), samples=(2, 10**4), batch_groups=(1, 10**4), vlm_batch=(1, 10**4),
    round=(0, 10**6 - 1), rounds=(1, 10**6 - 1), map_floor=(0, 1), std_floor=(1e-8, 1e3), clip_range=(1e-8, 1e3),
    updates=(1, 10**4), lr=(1e-12, 1), warmup=(0, 10**6), weight_decay=(0, 10), max_grad_norm=(0, 1e12),
    beta=(0, 1e6), beta_old=(0, 1e6), eta=(1e-6, 1e6), draws=(1, 1000), lag=(0, 1), ema=(0, 0.999999), micro_batch=(1, 10**6),
    train_guidance=(0, 1000), max_ratio_gap=(0, 1), rank=(1, 4096), alpha=(1e-6, 1e6), save_every=(1, 10**6), keep_rounds=(0, 10**6),
)  # fmt: skip


def parse_args(parser: argparse.ArgumentParser) -> argparse.Namespace:
    """Adds the flags that all stages have; the preset's values become the defaults of the flags that the parser has."""
    parser.formatter_class = type(
        "Help", (argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter), {}
    )
    shared = parser.add_argument_group("shared by all stages")
    shared.add_argument(
        "--preset", choices=sorted(PRESETS), default="tiny", help="fills every setting; other flags override it"
    )
    shared.add_argument(
        "--run", type=Path, required=True, metavar="FOLDER", help="folder of the run: all stages read and write it"
    )
    shared.add_argument("--seed", type=int, default=0, help="seed of the run")
    shared.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="torch device")
    shared.add_argument(
        "--dtype", choices=["float32", "bfloat16"], default="float32", help="dtype of the frozen models"
    )
    preset_parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    preset_parser.add_argument("--preset", choices=sorted(PRESETS), default="tiny")
    preset = PRESETS[preset_parser.parse_known_args()[0].preset]

    def located(value: Any) -> Any:  # a preset's paths are the repository's, from whatever folder a script runs
        if isinstance(value, list):
            return [located(v) for v in value]
        of_repository = isinstance(value, str) and value.startswith(TINY)
        return str(ROOT / value) if of_repository and not Path(value).exists() else value

    parser.set_defaults(**{k: located(v) for k, v in preset.items() if k in {a.dest for a in parser._actions}})
    parser.allow_abbrev = False  # the flags that are read before the others know no abbreviations
    args = parser.parse_args()
    for name, (low, high) in RANGES.items():
        value = getattr(args, name, None)
        for v in value if isinstance(value, list) else [] if value is None else [value]:
            if not low <= v <= high:  # NaN is outside of every range
                raise UserError(f"--{name.replace('_', '-')} {v}: must be from {low:g} to {high:g}")
    try:
        torch.empty(0, device=args.device)
    except (RuntimeError, AssertionError) as e:
        raise UserError(f"--device {args.device}: {str(e).splitlines()[0]}") from e
    return args


def run_main(main: Callable[[], None]) -> None:
    """Runs a stage: a UserError, or a file that cannot be used, is one line and exit code 2; Ctrl-C is 130."""
    try:
        main()
    except UserError as e:
        sys.exit(print(f"error: {e}", file=sys.stderr) or 2)
    except OSError as e:
        sys.exit(print(f"error: {e.filename or ''}: {e.strerror or e}", file=sys.stderr) or 2)
    except KeyboardInterrupt:
        sys.exit(print("\ninterrupted: the same command continues", file=sys.stderr) or 130)


def write_bytes(path: Path, data: bytes) -> None:
    """Atomic: a reader, or a process killed at any moment, sees the old file or the whole new one."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fd, partial = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".partial")
        try:
            with os.fdopen(fd, "wb") as f:
                f.write(data)
                f.flush()
                os.fsync(f.fileno())
            os.chmod(partial, 0o644)
            os.replace(partial, path)
        except BaseException:
            os.unlink(partial)
            raise
    except OSError as e:
        raise UserError(f"{path}: cannot be written: {e.strerror}") from e


def write_text(path: Path, text: str) -> None:
    write_bytes(path, text.encode())


def write_json(path: Path, obj: Any) -> None:
    write_text(path, json.dumps(obj, indent=1, ensure_ascii=False, default=str) + "\n")


def read_json(path: Path) -> Any:
    try:
        return json.loads(path.read_text())
    except FileNotFoundError as e:
        raise UserError(f"{path}: not found") from e
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as JSON: {e}") from e


def write_tensors(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str]) -> None:
    """Atomic safetensors file; parents are made."""
    write_bytes(path, save({k: v.detach().cpu().contiguous() for k, v in tensors.items()}, metadata))


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        with safe_open(path, "pt") as f:
            return {k: f.get_tensor(k) for k in f.keys()}, f.metadata() or {}
    except FileNotFoundError as e:
        raise UserError(f"{path}: not found") from e
    except (OSError, SafetensorError) as e:
        raise UserError(f"{path}: is not a whole safetensors file ({e}); remove it to have it made again") from e


def read_jsonl(path: str | Path) -> list[dict]:
    """One JSON object a line. Raises UserError with file and line."""
    return [row for _, row in read_numbered_jsonl(path)]


def read_numbered_jsonl(path: str | Path) -> list[tuple[int, dict]]:
    """(line number from 1, object) of each line that is not blank."""
    try:
        lines = Path(path).read_text("utf-8-sig").split("\n")
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from e
    rows = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            rows.append((number, json.loads(line)))
            json.dumps(rows[-1][1], ensure_ascii=False).encode()  # half a surrogate pair could not be written again
        except (ValueError, RecursionError) as e:
            raise UserError(f"{path}:{number}: not JSON: {e}") from e
        if not isinstance(rows[-1][1], dict):
            raise UserError(f"{path}:{number}: must be a JSON object, not {type(rows[-1][1]).__name__}")
    if not rows:
        raise UserError(f"{path}: is empty")
    return rows


def read_prompts(path: str | Path) -> list[str]:
    """Prompts of a .jsonl or .json file's "prompt" fields, or of a text file, one a line."""
    if Path(path).suffix in (".jsonl", ".json"):
        prompts = [row.get("prompt") for row in read_jsonl(Path(path))]
        if not all(isinstance(p, str) for p in prompts):
            raise UserError(f'{path}: not every line has a "prompt" that is a text')
        return prompts
    try:
        lines = map(str.strip, Path(path).read_text("utf-8-sig").split("\n"))
    except (OSError, UnicodeDecodeError) as e:
        raise UserError(f"{path}: cannot be read: {getattr(e, 'strerror', None) or e}") from e
    if not (prompts := [line for line in lines if line]):
        raise UserError(f"{path}: is empty")
    return prompts


def read_atoms(path: Path) -> list[dict]:
    """The lines of an atoms.jsonl, each with prompt, vqa_list and skills of one length, and id (its row if it has none)."""
    rows = []
    for number, row in read_numbered_jsonl(path):
        row.setdefault("id", len(rows))
        rows.append(row)
        if type(row["id"]) is not int or type(row.get("atom_count", 0)) is not int:
            raise UserError(f"{path}:{number}: id and atom_count must be whole numbers")
        vqa = row.get("vqa_list")
        if (
            not isinstance(row.get("prompt"), str)
            or not isinstance(vqa, list)
            or not isinstance(row.get("skills"), list)
        ):
            raise UserError(f"{path}:{number}: needs prompt, vqa_list and skills; 02_build_csg.py writes such a file")
        if not vqa or len(vqa) != len(row["skills"]):
            raise UserError(
                f"{path}:{number}: {len(vqa)} atoms and {len(row['skills'])} skills; both must be one a question"
            )
        if unknown := set(map(str, row["skills"])) - set(SKILLS):
            raise UserError(f"{path}:{number}: unknown skill {min(unknown)!r}; known: {', '.join(SKILLS)}")
        if not all(isinstance(a, list) and len(a) == 2 and all(isinstance(s, str) and s for s in a) for a in vqa):
            raise UserError(f"{path}:{number}: vqa_list must hold [question, answer] pairs")
    if len({row["id"] for row in rows}) != len(rows):
        raise UserError(f"{path}: two lines have the same id")
    return rows


def settings(args: argparse.Namespace) -> dict[str, Any]:
    """The settings of a stage as JSON, without what changes no result."""
    made = {k: portable(v) for k, v in vars(args).items() if k not in ("run", "preset", "device")}
    return json.loads(json.dumps(made, default=str))


def portable(value: Any) -> Any:
    """A setting as it is recorded: paths in the repository without its place, so that a run goes on in a moved clone."""
    return value.removeprefix(f"{ROOT}/") if isinstance(value, str) else value


def write_settings(path: Path, args: argparse.Namespace) -> None:
    packages = ("torch", "diffusers", "transformers", "peft", "safetensors", "numpy")
    write_json(path, {"settings": settings(args), "versions": {p: version(p) for p in packages}})


def require_same(path: Path, args: argparse.Namespace, ignore: Sequence[str] = ()) -> bool:
    """Whether `path` holds these settings. False if there is no such file; UserError that names what differs."""
    if not path.exists():
        return False
    found = read_json(path)
    refuse_difference(path, found.get("settings") if isinstance(found, dict) else None, settings(args), ignore)
    return True


def refuse_difference(path: Path, old: Any, new: dict[str, Any], ignore: Sequence[str] = ()) -> None:
    """Raises UserError that names the first setting in which old and new differ."""
    if not isinstance(old, dict):
        raise UserError(
            f"{path}: holds no settings, so nobody knows what it was made with; use another --run or remove it"
        )
    for key in sorted((set(old) | set(new)) - set(ignore)):
        if old.get(key) != new.get(key):
            name = "--" + key.replace("_", "-")
            raise UserError(
                f"{path}: was made with {name} {old.get(key)}, not {new.get(key)}; use another --run or remove it"
            )


def file_id(path: str | Path) -> str:
    """A file as the settings have it: its name and what it holds."""
    return f"{Path(path).name} (sha256 {hashlib.sha256(Path(path).read_bytes()).hexdigest()[:12]})"


@contextmanager
def only_process(run: Path) -> Iterator[None]:
    """The second training process on one run is refused, by a lock on its atoms.jsonl, which ends with the process. What
    a killed one left half written is removed."""
    with open(run / "atoms.jsonl") as f:
        try:
            fcntl.flock(f, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as e:
            raise UserError(f"--run {run}: another process trains it") from e
        for partial in run.rglob(".*.partial"):
            partial.unlink() if partial.is_file() else shutil.rmtree(partial)
        yield


def load_stage(path: str | Path, names: Sequence[str] = ()) -> ModuleType:
    """A script by its path (its name starts with a digit, so `import` cannot name it) that has these names."""
    path = Path(path)
    if not path.is_file() or path.suffix != ".py":
        raise UserError(f"{path}: not found, or not a .py file")
    spec = importlib.util.spec_from_file_location(path.stem.lstrip("0123456789_"), path)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except Exception as e:  # whatever a file of the user's raises
        raise UserError(f"{path}: cannot be loaded: {type(e).__name__}: {e}") from e
    if missing := [n for n in names if not hasattr(module, n)]:
        raise UserError(f"{path}: has no {', '.join(missing)}; 03_score_atoms.py shows what a stage 03 offers")
    return module


def write_figure(path: Path, figure: Figure, dpi: int = 110) -> None:
    """matplotlib figure -> PNG, atomic."""
    buffer = io.BytesIO()
    figure.savefig(buffer, format="png", dpi=dpi)
    write_bytes(path, buffer.getvalue())


def save_png(path: Path, image: torch.Tensor) -> None:
    """Picture [3, H, W] in 0..1 -> PNG, atomic."""
    buffer = io.BytesIO()
    Image.fromarray((image * 255).round().to(torch.uint8).movedim(0, -1).cpu().numpy()).save(buffer, "PNG")
    write_bytes(path, buffer.getvalue())


def load_png(path: Path) -> torch.Tensor:
    """PNG -> [3, H, W] in 0..1, float32. Raises UserError."""
    try:
        with Image.open(path) as image:
            return torch.from_numpy(np.asarray(image.convert("RGB"), np.float32) / 255).movedim(-1, 0)
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as a picture: {e}") from e
