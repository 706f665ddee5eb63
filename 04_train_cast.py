"""Stage 04: online RL of the LoRA. A round = rollouts and scores (stage 03), then updates of the policy on its shards.

    python 04_train_cast.py --preset tiny --run runs/demo
    python 04_train_cast.py --preset flux2-dev --run runs/flux2 --credit cast --objective grpo

Reads   atoms.jsonl (02), window.json (01), shards/ (03's are used, missing ones are made).
Writes  lora/round_RRRR/pytorch_lora_weights.safetensors, which pipe.load_lora_weights reads with nothing of ours;
        metrics.jsonl, a line a round; training.png; state/, from which the same command continues in the same bits.

Credit (paper, Table 2): `--credit cast` is mean over atoms of A_ik * M_ik: each atom's signed advantage on the pixels that
the atom is about. `--credit sum` is Flow-GRPO: one advantage a picture. Every objective takes every credit:

    grpo  PPO's clipped ratio a location, on the SDE steps of the window (Flow-GRPO, CAST)
    awm   Advantage Weighted Matching: the flow-matching error, weighted by the credit; rollouts by the ODE
    ram   Reinforce Adjoint Matching: the base's velocity, corrected by the reward, is the target; rollouts of a lagging LoRA
    sft   self-distillation on the best of each group

Not published, ours: M = (1-f)*attention + f*uniform with the floor f of `--map-floor`; the credit of a location is a mean,
not a sum, over atoms; the ratio is clipped per location; the last step is never trained.

Deviations from the papers (common.py has those of the formulas):
1. A credit other than `sum` on AWM, RAM or SFT is ours: the weight of a location multiplies its squared error.
2. Guidance is the rollout's in the update too (`--train-guidance`). AWM has none in either, RAM and SFT only in the rollout.
3. AWM and RAM roll out with other solvers (SA-Solver; 20 Euler steps); ours is the ODE, or the SDE with `--window`.
4. AWM's KL weights are five times its paper's, since it divides the advantages by 5 and we do not (common.py, 2).
5. The lagging LoRA moves once a round. Its rate, and the warm-up of `--ema`, count rounds and optimizer steps from 0.
"""

import argparse
import json
import math
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
from tqdm import tqdm

import common
from common import UserError

SCORER = str(common.ROOT / "03_score_atoms.py")
CREDITS = ("sum", "atom", "spatial", "shuffled", "cast", "step")
# The flags that only some objectives have, with each one's default: the papers' where they give one (formulas 1, 3, 4, 6).
OBJECTIVES = {
    "grpo": dict(clip_range=0.2, ratio="location", beta=0.0, kl="gaussian", max_grad_norm=1.0),
    "awm": dict(clip_range=1.0, beta=5e-3, beta_old=5.0, lag=[0.001, 0.3], draws=6, times="grid", weighting="uniform",
                max_grad_norm=1.0),
    "ram": dict(eta=100.0, lag=[0.01, 0.9], draws=8, times="sqrt", max_grad_norm=0.0),
    "sft": dict(beta=0.0, draws=39, times="logit-normal", max_grad_norm=1.0),
}  # fmt: skip
# FLUX.2: attention and feed-forward of the dual-stream blocks, the fused layers of the single-stream blocks.
LORA_TARGETS = (
    r".*transformer_blocks\.\d+\.(attn\.(to_q|to_k|to_v|to_out\.0|add_q_proj|add_k_proj|add_v_proj|to_add_out)"
    r"|(ff|ff_context)\.linear_(in|out))|single_transformer_blocks\.\d+\.attn\.(to_qkv_mlp_proj|to_out)"
)


def add_lora(transformer: torch.nn.Module, args: argparse.Namespace) -> dict[str, torch.nn.Parameter]:
    """Adds the trainable adapter, B = 0, in float32; returns its parameters by name."""
    torch.manual_seed(args.seed)
    config = LoraConfig(
        r=args.rank, lora_alpha=args.alpha, init_lora_weights="gaussian", target_modules=args.lora_targets
    )
    try:
        transformer.add_adapter(config)
    except (ValueError, re.error) as e:
        raise UserError(f"--lora-targets {args.lora_targets}: {' '.join(str(e).split())[:200]}") from e
    params = {name: p for name, p in transformer.named_parameters() if p.requires_grad}
    for p in params.values():
        p.data = p.data.float()
    return params


def save_lora(pipe, folder: Path) -> None:
    """As diffusers writes it, alpha included. Written beside and renamed: never half there."""
    partial = folder.with_name(f".{folder.name}.partial")
    pipe.save_lora_weights(
        partial, transformer_lora_layers=get_peft_model_state_dict(pipe.transformer),
        **_collate_lora_metadata({"transformer": pipe.transformer}),
    )  # fmt: skip
    folder.mkdir(parents=True, exist_ok=True)
    for file in partial.iterdir():
        file.replace(folder / file.name)
    partial.rmdir()


# ---------------------------------------------------------------- policies: one network, several LoRAs

Params = dict[str, torch.nn.Parameter]
Weights = dict[str, torch.Tensor]


@contextmanager
def policy(params: Params, weights: Weights) -> Iterator[None]:
    """The network has these LoRA weights inside; afterwards its own again, bit for bit. Copies, so that nothing aliases."""
    own = {k: p.detach().clone() for k, p in params.items()}
    try:
        with torch.no_grad():
            for k, p in params.items():
                p.copy_(weights[k])
        yield
    finally:
        with torch.no_grad():
            for k, p in params.items():
                p.copy_(own[k])


def first_policies(params: Params, args: argparse.Namespace) -> dict[str, Weights]:
    """ "base", the LoRA that changes nothing; "old", which lags behind (AWM, RAM); "ema", the average that is saved."""
    policies = {"base": {k: torch.zeros_like(p) for k, p in params.items()}}
    for name in ["old"] * hasattr(args, "lag") + ["ema"] * (args.ema > 0):
        policies[name] = {k: p.detach().clone() for k, p in params.items()}
    return policies


@torch.no_grad()
def follow(weights: Weights, params: Params, decay: float) -> None:
    """weights <- decay*weights + (1-decay)*params."""
    for k, p in params.items():
        weights[k].lerp_(p, 1 - decay)


# ---------------------------------------------------------------- one round

# (name of a policy, points (x, sigma)) -> its velocity at each, without gradient
Reference = Callable[[str, Sequence[tuple[torch.Tensor, torch.Tensor]]], list[torch.Tensor]]
Term = tuple[torch.Tensor, dict[str, torch.Tensor]]  # a loss, diagnostics


def gated(rewards: torch.Tensor, parents: Sequence[Sequence[int]]) -> torch.Tensor:
    """Rewards [N, K], each times those of the atoms that it depends on in the scene graph: a count, colour or relation of
    what is not there earns nothing. GenEval 2 does not do this."""
    return torch.stack([rewards[:, [k, *of]].prod(1) for k, of in enumerate(parents)], 1)


def group_credit(shard: Weights, row: dict, round_: int, group: int, args: argparse.Namespace) -> torch.Tensor:
    """The credit of one prompt group, whose line of atoms.jsonl is row; broadcastable to [N, T_w, L]."""
    rewards = shard["rewards"]
    if args.gate == "parents":
        rewards = gated(rewards, [atom["depends_on"] for atom in row["csg"]["atoms"]])
    if args.credit == "step":
        want = (args.samples, args.window[1] - args.window[0])
        if tuple(shard.get("step_rewards", torch.empty(0)).shape) != want:
            raise UserError(f"--credit step: group {group} of round {round_} has no step_rewards of shape {list(want)}; it takes a "
                            "--scorer that rewards each SDE step")  # fmt: skip
        rewards = shard["step_rewards"]
    maps = (1 - args.map_floor) * shard["maps"] + args.map_floor
    generator = torch.Generator().manual_seed(common.sample_seed(args.seed, round_, group, -2))
    advantages = common.best_of_group if args.objective == "sft" else common.atom_advantages
    return common.credit_map(
        args.credit, rewards, maps, std_floor=args.std_floor, generator=generator, advantages=advantages
    )


def grpo_terms(
    velocity: common.Velocity, reference: Reference, batch: Weights, sigmas: torch.Tensor, args: argparse.Namespace
) -> Iterator[Term]:
    """The paper's SDE policy objective, a loss for each step of the window. batch: latents [B, T_w+1, L, C], log_probs
    [B, T_w, L], credit broadcastable to [B, T_w, L]."""
    window = range(*args.window)
    credits = batch["credit"].expand(-1, len(window), -1)
    # contiguous as in the rollout: another memory layout sums in another order, and the ratio is not exactly 1
    latents = [x.contiguous() for x in batch["latents"].unbind(1)]
    if args.beta:
        v_base = reference("base", list(zip(latents, sigmas[args.window[0] : args.window[1]], strict=False)))
    for t, step in enumerate(window):
        x, x_next = latents[t], latents[t + 1]
        density = partial(
            common.sde_step, x, sigma=sigmas[step], sigma_next=sigmas[step + 1], noise_level=args.noise_level,
            sigma_max=sigmas[1], kind=args.sde, x_next=x_next,
        )  # fmt: skip
        if args.beta:
            mean_base = density(velocity=v_base[t])[2]
        _, log_prob, mean, std = density(velocity=velocity(x, sigmas[step]))
        old, credit = batch["log_probs"][:, t], credits[:, t]
        if args.ratio == "sample":  # Flow-GRPO's: the mean over all of a picture
            log_prob, old = log_prob.mean(-1, keepdim=True), old.mean(-1, keepdim=True)
        loss, info = common.grpo_loss(log_prob[:, None], old[:, None], credit[:, None], clip_range=args.clip_range)
        if args.beta:
            kl = common.gaussian_kl(mean, mean_base, std).mean()
            loss = loss + args.beta * kl * (sigmas[step] - sigmas[step + 1] if args.kl == "flow-grpo" else 1)
            info["kl_base"] = kl.detach()
        yield loss, info


def matching_terms(
    velocity: common.Velocity, reference: Reference, batch: Weights, sigmas: torch.Tensor, args: argparse.Namespace
) -> Iterator[Term]:
    """AWM, RAM and SFT, a loss for each draw (t, eps) of the forward process from the pictures' x0. batch: x0 [B, L, C],
    seeds [B], credit broadcastable to [B, 1, L]; of SFT kept [B], the mean credit of the whole update."""
    generators = [torch.Generator().manual_seed(int(s) + 2) for s in batch["seeds"]]
    times, noise = common.forward_draws(batch["x0"], args.draws, args.times, sigmas, generators)
    weights = {"base": getattr(args, "beta", 0), "old": getattr(args, "beta_old", 0)}
    needed = ["base", "old"] if args.objective == "ram" else [name for name, w in weights.items() if w]
    needed += ["rollout"] if args.objective == "awm" and args.updates > 1 else []
    points = [
        (torch.lerp(batch["x0"], eps, t[:, None, None]), t)
        for t, eps in zip(times.unbind(1), noise.unbind(1), strict=True)
    ]
    v_at = {name: reference(name, points) for name in needed}
    for d, (x, t) in enumerate(points):
        flow, v_of = noise[:, d] - batch["x0"], {name: v[d] for name, v in v_at.items()}
        v = velocity(x, t).float()
        error, info = (v - flow).square().mean(-1), {}  # [B, L]
        if args.objective == "ram":
            loss = common.ram_loss(
                *(a[:, None] for a in (v, v_of["base"], v_of["old"], flow)), batch["credit"], eta=args.eta
            )
        elif args.objective == "awm":
            old = (v_of["rollout"] - flow).square().mean(-1) if "rollout" in v_of else error.detach()
            loss, info = common.awm_loss(
                error[:, None],
                old[:, None],
                t[:, None, None],
                batch["credit"],
                weighting=args.weighting,
                clip_range=args.clip_range,
            )
        else:
            loss = common.sft_loss(error[:, None], batch["credit"], batch["kept"][0])
        for name in v_of.keys() & {"base", "old"}:
            kl = (v - v_of[name]).square().mean()
            loss, info[f"kl_{name}"] = loss + weights[name] * kl, kl.detach()
        yield loss, info | {"error": error.detach().mean()}


def update(
    pipe, params: Params, policies: dict[str, Weights], optimizer: torch.optim.Optimizer, shards: list[Weights],
    embeds: torch.Tensor, sigmas: torch.Tensor, round_: int, args: argparse.Namespace,
) -> dict[str, float | list[float]]:  # fmt: skip
    """`--updates` optimizer steps over the round's groups, shards with their credit, embeds [P, S, D]. -> metrics.

    A micro-batch is by default what one forward of the rollout held, so that before the first step the ratio is exactly 1.
    """
    n, per_pass = args.samples, args.batch_groups
    passes = math.ceil(len(shards) / per_pass)
    grid = common.latent_grid(pipe, args.height, args.width)
    terms, keys = (
        (grpo_terms, ["latents", "log_probs"]) if args.objective == "grpo" else (matching_terms, ["x0", "seeds"])
    )
    steps = args.window[1] - args.window[0] if args.objective == "grpo" else args.draws
    policies = policies | {"rollout": {k: p.detach().clone() for k, p in params.items()}}
    totals: dict[str, float] = {}
    gaps: list[list[torch.Tensor]] = [
        [] for _ in range(steps)
    ]  # |ratio-1| of each step before the first optimizer step
    norms = []
    for u in range(args.updates):
        mine = range(
            u * passes // args.updates * per_pass, min((u + 1) * passes // args.updates * per_pass, len(shards))
        )
        batch = {k: torch.cat([shards[g][k] for g in mine]) for k in [*keys, "credit"]}
        owner = torch.arange(mine.start, mine.stop).repeat_interleave(n)  # the group of each sample
        if args.objective == "sft":  # on pictures with credit alone; where no group has a best one, no step
            with_credit = batch["credit"].flatten(1).any(1)
            owner, batch = owner[with_credit], {k: v[with_credit] for k, v in batch.items()}
            batch["kept"] = batch["credit"].mean().expand(len(owner))
            if not len(owner):
                continue
        for first in range(0, len(owner), args.micro_batch):
            part = slice(first, first + args.micro_batch)
            some = {k: v[part].to(embeds.device) for k, v in batch.items()}
            share = len(owner[part]) / len(owner) / steps
            velocity = common.velocity_fn(pipe, embeds[owner[part]], grid, args.train_guidance)

            @torch.no_grad()
            def reference(name: str, points: Sequence, velocity=velocity) -> list[torch.Tensor]:
                with policy(params, policies[name]):
                    return [velocity(x, sigma).float() for x, sigma in points]

            for step, (loss, info) in enumerate(terms(velocity, reference, some, sigmas, args)):
                (loss * share).backward()
                gap = info.pop("ratio_gap", None)
                if u == 0 and gap is not None:
                    gaps[step].append(gap.flatten().cpu())
                for k, v in (info | {"loss": loss.detach()}).items():
                    totals[k] = totals.get(k, 0.0) + v.item() * share / args.updates
        if u == 0 and args.objective == "grpo":
            totals |= check_ratio(gaps, args)
        norm = torch.nn.utils.clip_grad_norm_(params.values(), args.max_grad_norm or math.inf)
        if not norm.isfinite():
            raise UserError(f"the gradient is {norm.item()}; nothing was updated, the state of the last round is kept")
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
        if "ema" in policies:
            count = round_ * args.updates + u
            follow(policies["ema"], params, min((1 + count) / (10 + count), args.ema))
    return totals | {"grad_norm": sum(norms) / max(len(norms), 1), "steps": len(norms)}


def check_ratio(gaps: list[list[torch.Tensor]], args: argparse.Namespace) -> dict[str, float | list[float]]:
    """|ratio-1| before a step was taken is the error of the replay: its largest, and its 99th percentile by window step.
    Raises UserError where the clip range would act on it, or in float32 where it is more than rounding."""
    flat = [torch.cat(g).numpy() for g in gaps]
    p99, largest = [float(np.quantile(g, 0.99)) for g in flat], float(max(g.max() for g in flat))
    why = "rollout and update do not see the same numbers (dtype, batch shape, shards of another policy?)"
    if not max(p99) <= args.clip_range:
        raise UserError(
            f"before the update the 99th percentile of |ratio-1| is {max(p99):.1e}, more than --clip-range {args.clip_range}: {why}"
        )
    if args.dtype == "float32" and not largest <= args.max_ratio_gap:
        raise UserError(
            f"before the update the ratio is off 1 by {largest:.1e}, more than --max-ratio-gap {args.max_ratio_gap}: {why}"
        )
    return {"ratio_minus_1": largest, "gap_p99": p99}


def reward_metrics(rows: list[dict], shards: list[dict[str, torch.Tensor]]) -> dict:
    """Mean reward, mean reward of each kind of atom, share of atoms that tell the samples of their group apart."""
    kinds: dict[str, list[float]] = {}
    for row, shard in zip(rows, shards, strict=True):
        for k, kind in enumerate(row["skills"]):
            kinds.setdefault(kind, []).append(shard["rewards"][:, k].nanmean().item())
    live = torch.cat([s["rewards"].nan_to_num().std(0, correction=0) for s in shards]) > 0.02
    return {
        "reward": sum(s["rewards"].nanmean().item() for s in shards) / len(shards),
        "atoms": {k: sum(v) / len(v) for k, v in sorted(kinds.items())},
        "all_atoms": sum((s["rewards"] > 0.5).all(1).float().mean().item() for s in shards) / len(shards),
        "live_atoms": live.float().mean().item(),
        "nan_rewards": sum(int(s["rewards"].isnan().sum()) for s in shards),
    }


# ---------------------------------------------------------------- state, figure, main

SHOWN = [("ratio_minus_1", "ratio-1", ".1e"), ("clip_fraction", "clipped", ".3f"), ("error", "error", ".3f"), ("kl_base", "KL", ".1e"),
         ("grad_norm", "grad", ".2e")]  # fmt: skip


def save_state(
    path: Path, round_: int, params: Params, policies: dict[str, Weights], optimizer: torch.optim.Optimizer,
    args: argparse.Namespace,
) -> None:  # fmt: skip
    """LoRA, its lagging and its averaged copy, AdamW's moments and the number of finished rounds in one atomic file. No
    random state: seeds are functions."""
    tensors = {f"param.{k}": p for k, p in params.items()}
    for k, p in params.items():
        tensors |= {f"{name}.{k}": v for name, v in optimizer.state[p].items()}
    tensors |= {f"{name}.{k}": w for name in policies.keys() - {"base"} for k, w in policies[name].items()}
    common.write_tensors(path, tensors, {"made": json.dumps({"round": round_, "settings": common.settings(args)})})


def load_state(path: Path, params: Params, policies: dict[str, Weights], optimizer: torch.optim.Optimizer) -> None:
    tensors, _ = common.read_tensors(path)
    copies = policies.keys() - {"base"}
    # A parameter that never got a gradient (a run that skipped all updates) has no moments.
    moments = [m for m in ("step", "exp_avg", "exp_avg_sq") if any(k.startswith(f"{m}.") for k in tensors)]
    shapes = {
        f"{m}.{k}": () if m == "step" else tuple(p.shape)
        for k, p in params.items()
        for m in ("param", *copies, *moments)
    }
    if {k: tuple(v.shape) for k, v in tensors.items()} != shapes:
        raise UserError(f"{path}: is not the state of this LoRA; use another --run")
    for k, p in params.items():
        p.data.copy_(tensors[f"param.{k}"])
        for name in copies:
            policies[name][k].copy_(tensors[f"{name}.{k}"])
        if moments:
            optimizer.state[p] = {m: tensors[f"{m}.{k}"].to("cpu" if m == "step" else p.device) for m in moments}


def finished_rounds(path: Path, args: argparse.Namespace) -> int:
    """Rounds that the state has; UserError if it was made with other settings. `--rounds` alone may change."""
    if not path.exists():
        return 0
    _, metadata = common.read_tensors(path)
    try:
        made = json.loads(metadata["made"])
        done, old = int(made["round"]), made["settings"]
    except (KeyError, ValueError, TypeError) as e:
        raise UserError(f"{path}: is not a state of this script; use another --run") from e
    common.refuse_difference(path, old, common.settings(args), ("rounds", "save_every", "keep_rounds"))
    return done


def write_metrics(path: Path, line: dict) -> list[dict]:
    """Replaces the line of this round and drops those after it, which a killed run may have left; returns all lines."""
    lines = common.read_jsonl(path) if path.exists() else []
    if not all(type(m.get("round")) is int and isinstance(m.get("atoms"), dict) for m in lines):
        raise UserError(f"{path}: has a line that this script did not write; remove it")
    lines = [m for m in lines if m["round"] < line["round"]] + [line]
    common.write_text(path, "".join(json.dumps(m) + "\n" for m in lines))
    return lines


def plot_training(path: Path, metrics: list[dict], args: argparse.Namespace) -> None:
    from matplotlib.figure import Figure

    rounds = [m["round"] for m in metrics]
    figure = Figure(figsize=(13, 3.4), layout="constrained")
    axes = figure.subplots(1, 3)
    for kind in metrics[0]["atoms"]:
        axes[0].plot(rounds, [m["atoms"].get(kind, math.nan) for m in metrics], lw=1, label=kind)
    axes[0].plot(rounds, [m["reward"] for m in metrics], lw=2, color="black", label="all atoms' mean")
    axes[0].set_title("Soft-TIFA of the rollouts")
    axes[0].legend(fontsize=7.5, frameon=False, loc="upper left", bbox_to_anchor=(1, 1))
    axes[1].plot(rounds, [m["grad_norm"] for m in metrics], color="#4269d0")
    axes[1].set_title("gradient norm")
    axes[1].set_ylim(0)
    for key in ("rollout", "scoring", "update"):
        axes[2].plot(rounds, [m["seconds"][key] for m in metrics], label=key)
    axes[2].set_title("seconds a round")
    axes[2].set_ylim(0)
    axes[2].legend(fontsize=7.5, frameon=False)
    for ax in axes:
        ax.set_xlabel("round")
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(
        f"--objective {args.objective} --credit {args.credit}, {args.groups} x {args.samples} pictures a round",
        fontsize=9,
    )
    common.write_figure(path, figure)


def has_graph(row: dict) -> bool:
    """Whether the csg of a line of atoms.jsonl says for each of its K atoms on which of the others it depends."""
    csg, k = row.get("csg"), len(row["vqa_list"])
    atoms = csg.get("atoms") if isinstance(csg, dict) else None
    parents = [a.get("depends_on") if isinstance(a, dict) else None for a in atoms] if isinstance(atoms, list) else []
    return len(parents) == k and all(
        isinstance(p, list) and all(type(i) is int and 0 <= i < k for i in p) for p in parents
    )


def train(args: argparse.Namespace, stage: ModuleType, atoms: list[dict]) -> None:
    window = stage.load_window(args)
    if args.objective == "grpo" and window[0] == window[1]:
        raise UserError("--window 0 0: has no SDE step, and --objective grpo trains on those")
    # What a resume must have as it was at this start, by what the files hold.
    args.atoms, args.scorer, args.window = (
        common.file_id(args.run / "atoms.jsonl"),
        common.file_id(args.scorer),
        list(window),
    )
    if args.gate == "parents" and not all(map(has_graph, atoms)):
        raise UserError(f"--gate parents: {args.run / 'atoms.jsonl'} has a prompt whose csg does not say for each atom on which "
                        "others it depends; 02_build_csg.py writes that")  # fmt: skip
    if args.credit == "shuffled" and any(len(a["vqa_list"]) < 2 for a in atoms):
        raise UserError("--credit shuffled: atoms.jsonl has a prompt of one atom, whose map has no other atom to go to")
    state = args.run / "state" / "state.safetensors"
    done = finished_rounds(state, args)
    if done >= args.rounds:
        print(f"{args.run}: all {args.rounds} rounds are done; --rounds continues")
        return
    passes = math.ceil(args.groups / args.batch_groups)
    if args.updates > passes:
        raise UserError(
            f"--updates {args.updates}: a round of {args.groups} groups by {args.batch_groups} allows 1 to {passes}"
        )

    dtype = getattr(torch, args.dtype)
    pipe = common.load_pipeline(args.model, args.device, dtype)
    scorer = stage.load_scorer(args.vlm, args.device, dtype, args.map_layers, args.vlm_batch)
    score_fn = partial(stage.score, scorer)
    embeds = dict(zip((a["id"] for a in atoms), common.encode_prompts(
        pipe, [a["prompt"] for a in atoms], max_sequence_length=args.max_sequence_length,
        text_encoder_layers=args.text_encoder_layers), strict=True))  # fmt: skip
    pipe.text_encoder = None  # the prompts are encoded
    params = add_lora(pipe.transformer, args)
    policies = first_policies(params, args)
    if args.checkpointing:
        pipe.transformer.enable_gradient_checkpointing()
    optimizer = torch.optim.AdamW(params.values(), lr=args.lr, betas=(0.9, 0.999), weight_decay=args.weight_decay)
    if done:
        load_state(state, params, policies, optimizer)
    grid = common.latent_grid(pipe, args.height, args.width)
    sigmas = common.schedule(pipe, args.steps, grid[0] * grid[1])
    common.write_settings(args.run / "state" / "settings.json", args)
    trained = (
        f"SDE steps {window[0]}..{window[1] - 1} of {args.steps}"
        if args.objective == "grpo"
        else f"{args.draws} draws of (t, eps)"
    )
    print(f"{args.objective} on credit {args.credit}; {len(atoms)} prompts; {args.groups} groups x {args.samples} pictures a round, "
          f"updates: {args.updates} of {trained}; LoRA: {sum(p.numel() for p in params.values()):,} parameters in "
          f"{len(params) // 2} modules; rounds {done}..{args.rounds - 1}")  # fmt: skip

    with tqdm(total=args.rounds, initial=done, desc="rounds", unit="round", dynamic_ncols=True) as bar:
        for r in range(done, args.rounds):
            # rollouts and scores
            rows = stage.round_rows(atoms, r, args.groups, args.seed)
            mine = torch.stack([embeds[row["id"]] for row in rows])
            shards, seconds = [], {"rollout": 0.0, "scoring": 0.0}
            with policy(params, policies["old"]) if args.objective == "ram" else nullcontext():
                digest = common.lora_digest(pipe.transformer)
                for shard, took in stage.collect(pipe, score_fn, rows, mine, r, window, digest, args):
                    shards.append(shard)
                    seconds = {k: seconds[k] + took[k] for k in seconds}

            # credit and updates
            start = time.perf_counter()
            for g, shard in enumerate(shards):
                shard["credit"] = group_credit(shard, rows[g], r, g, args)
            warm_up = min(1.0, (r + 1) / args.warmup) if args.warmup else 1.0
            for group in optimizer.param_groups:
                group["lr"] = args.lr * warm_up
            line = (
                {"round": r}
                | reward_metrics(rows, shards)
                | update(pipe, params, policies, optimizer, shards, mine, sigmas, r, args)
            )
            if "old" in policies:
                follow(policies["old"], params, min(args.lag[0] * r, args.lag[1]))
            seconds["update"] = time.perf_counter() - start

            # log and save; the state last, so that a kill before it repeats this round in the same bits
            metrics = write_metrics(args.run / "metrics.jsonl", line | {"seconds": seconds})
            last = r == args.rounds - 1
            if last or (r + 1) % args.save_every == 0:
                with policy(params, policies["ema"]) if args.ema else nullcontext():
                    save_lora(pipe, args.run / "lora" / f"round_{r + 1:04d}")
                plot_training(args.run / "training.png", metrics, args)
            save_state(state, r + 1, params, policies, optimizer, args)
            old = args.run / "shards" / f"round_{r - args.keep_rounds:04d}"
            if r > args.keep_rounds and old.is_dir():
                for file in [*old.glob("*.safetensors")]:
                    file.unlink()
                if not any(old.iterdir()):
                    old.rmdir()
            kinds = " ".join(f"{k} {v:.3f}" for k, v in line["atoms"].items())
            found = "  ".join(f"{name} {line[k]:{spec}}" for k, name, spec in SHOWN if k in line)
            took = "  ".join(f"{k} {v:.1f} s" for k, v in seconds.items())
            bar.write(f"round {r:4d}  reward {line['reward']:.4f} ({kinds})  {found}  {took}")
            bar.update()


def load_scorer_stage() -> ModuleType:
    """Stage 03, or the file of --scorer: it is needed before the other flags are known, since it has flags of its own."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--scorer", default=SCORER)
    names = ("add_rollout_arguments", "load_window", "round_rows", "load_scorer", "score", "collect")
    return common.load_stage(parser.parse_known_args()[0].scorer, names)


def parse(stage: ModuleType) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--scorer", default=SCORER, metavar="FILE", help="stage 03 or its replacement")
    stage.add_rollout_arguments(parser)
    group = parser.add_argument_group(
        "objective", "The defaults of the flags that only some objectives have are in brackets."
    )

    def of(name: str) -> str:
        values = {o: " ".join(map(str, np.atleast_1d(own[name]))) for o, own in OBJECTIVES.items() if name in own}
        return f" ({', '.join(f'{o} {v}' for o, v in values.items())})"

    def add(name: str, help: str, **kwargs) -> None:
        group.add_argument(f"--{name.replace('_', '-')}", default=argparse.SUPPRESS, help=help + of(name), **kwargs)

    # fmt: off
    group.add_argument("--objective", choices=sorted(OBJECTIVES), default="grpo", help="policy objective")
    group.add_argument("--credit", choices=CREDITS, default="cast", help="how atom rewards become the credit of a location")
    group.add_argument("--gate", choices=["none", "parents"], default="none", help="an atom's reward is multiplied by those of the "
                       "atoms that it depends on, such as a count by its object")
    group.add_argument("--map-floor", type=float, default=0.5, metavar="F", help="share of the uniform map in every atom's map: "
                       "lets the empty places have a share of an atom's credit")
    group.add_argument("--std-floor", type=float, default=0.05, help="least standard deviation of a reward in its group")
    add("clip_range", "the ratio is clipped to 1-C..1+C", type=float, metavar="C")
    add("ratio", "ratio of a location, or Flow-GRPO's of a sample, for a credit without maps", choices=["location", "sample"])
    add("beta", "weight of the KL to the base: of SDE steps (grpo), mean squared difference of velocities (awm, sft)", type=float)
    add("kl", "the KL of an SDE step: the Gaussians' own, or Flow-GRPO's, that times |dt|", choices=["gaussian", "flow-grpo"])
    add("beta_old", "weight of the squared difference of velocities to the lagging LoRA", type=float)
    add("lag", "the lagging LoRA keeps min(RATE*round, MAX) of itself after a round", type=float, nargs=2, metavar=("RATE", "MAX"))
    add("eta", "strength of the reward", type=float)
    add("draws", "draws of (t, eps) a picture", type=int)
    add("times", "p(t): uniform on the rollout's grid, 2t, or a sigmoid of a normal", choices=["grid", "sqrt", "logit-normal"])
    add("weighting", "weight of the error by t", choices=["uniform", "t", "t2", "huber", "ghuber"])
    add("max_grad_norm", "the gradient is scaled down to this norm; 0: never", type=float)
    group = parser.add_argument_group("training")
    group.add_argument("--rounds", type=int, default=100, help="rounds in all; a larger number continues a finished run")
    group.add_argument("--updates", type=int, default=1, help="optimizer steps a round, each on its own share of the groups")
    group.add_argument("--micro-batch", type=int, metavar="SAMPLES", help="samples a forward and backward; the gradient is that "
                       "of all; unset: the rollout's, --batch-groups times --samples")
    group.add_argument("--checkpointing", action=argparse.BooleanOptionalAction, default=False, help="recompute activations")
    group.add_argument("--train-guidance", type=float, metavar="SCALE", help="guidance in the update; unset: --guidance")
    group.add_argument("--lr", type=float, default=3e-4, help="learning rate of AdamW")
    group.add_argument("--warmup", type=int, default=0, metavar="ROUNDS", help="rounds of linear warm-up")
    group.add_argument("--weight-decay", type=float, default=1e-4, help="weight decay of AdamW")
    group.add_argument("--ema", type=float, default=0.0, metavar="DECAY", help="lora/ has the LoRA's average over the steps; 0: itself")
    group.add_argument("--max-ratio-gap", type=float, default=1e-5, help="largest |ratio-1| before an update in float32 (grpo)")
    group.add_argument("--rank", type=int, default=64, help="LoRA rank")
    group.add_argument("--alpha", type=float, default=64, help="LoRA scale alpha")
    group.add_argument("--lora-targets", default=LORA_TARGETS, metavar="REGEX", help="modules that get a LoRA")
    group.add_argument("--save-every", type=int, default=20, metavar="ROUNDS", help="rounds between LoRA folders")
    group.add_argument("--keep-rounds", type=int, default=2, metavar="ROUNDS", help="rounds whose shards are kept; stage 03's "
                       "round 0 always is")
    # fmt: on
    return complete(common.parse_args(parser))


def complete(args: argparse.Namespace) -> argparse.Namespace:
    """Fills what depends on other flags; refuses flags that do not go together."""
    own = OBJECTIVES[args.objective]
    for name in {k for o in OBJECTIVES.values() for k in o}:
        flag = f"--{name.replace('_', '-')}"
        if hasattr(args, name) and name not in own:
            having = ", ".join(o for o, flags in OBJECTIVES.items() if name in flags)
            raise UserError(f"{flag}: --objective {args.objective} has no such setting; it is of {having}")
        setattr(args, name, getattr(args, name, own.get(name))) if name in own else None
    if args.gate == "parents" and args.credit == "step":
        raise UserError("--gate parents: --credit step takes the rewards of steps, not of atoms")
    if args.objective == "grpo":
        if args.train_guidance not in (None, args.guidance):
            raise UserError(
                f"--train-guidance {args.train_guidance}: --objective grpo needs the rollout's, {args.guidance}"
            )
        if args.ratio == "sample" and args.credit in ("spatial", "shuffled", "cast"):
            raise UserError(
                f"--ratio sample: --credit {args.credit} differs by location, and a ratio of a sample has none"
            )
    else:
        if args.credit == "step":
            raise UserError(
                f"--credit step: its rewards belong to SDE steps, and --objective {args.objective} trains on none"
            )
        args.window = args.window or [0, 0]
    args.train_guidance = args.guidance if args.train_guidance is None else args.train_guidance
    args.micro_batch = args.micro_batch or args.batch_groups * args.samples
    return args


def main() -> None:
    stage = load_scorer_stage()
    args = parse(stage)
    atoms = common.read_atoms(args.run / "atoms.jsonl")
    with common.only_process(args.run):
        train(args, stage, atoms)


if __name__ == "__main__":
    common.run_main(main)
