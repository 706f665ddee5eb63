"""Stage 04: online RL of the LoRA. A round = rollouts and scores (stage 03), then policy-gradient updates on its shards.

    python 04_train_cast.py --preset tiny --run runs/demo
    python 04_train_cast.py --preset flux2-dev --run runs/flux2 --credit cast --objective grpo

Reads   atoms.jsonl (02), window.json (01), shards/ (03's are used, missing ones are made).
Writes  lora/round_RRRR/pytorch_lora_weights.safetensors, which pipe.load_lora_weights reads with nothing of ours;
        metrics.jsonl, a line a round; training.png; state/, from which the same command continues in the same bits.

Credit (paper, Table 2): `--credit cast` is mean over atoms of A_ik * M_ik: each atom's signed advantage on the pixels that
the atom is about. `--credit sum` is Flow-GRPO: one advantage a picture.

Not published, ours: M = (1-f)*attention + f*uniform with the floor f of `--map-floor`; the credit of a location is a mean,
not a sum, over atoms; the ratio is clipped per location; the last step is never trained.
"""

import argparse
import json
import math
import re
import time
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from diffusers.training_utils import _collate_lora_metadata
from peft import LoraConfig, get_peft_model_state_dict
from tqdm import tqdm

import common
from common import UserError

SCORER = str(common.ROOT / "03_score_atoms.py")
CREDITS = ("sum", "atom", "spatial", "shuffled", "cast")
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


# ---------------------------------------------------------------- one round


def group_credit(shard: dict[str, torch.Tensor], round_: int, group: int, args: argparse.Namespace) -> torch.Tensor:
    """The credit [N, 1, L] of one prompt group."""
    maps = (1 - args.map_floor) * shard["maps"] + args.map_floor
    generator = torch.Generator().manual_seed(common.sample_seed(args.seed, round_, group, -2))
    credit = common.credit_map(args.credit, shard["rewards"], maps, std_floor=args.std_floor, generator=generator)
    return credit.expand(-1, -1, maps.shape[2] * maps.shape[3])


def backward(
    pipe, embeds: torch.Tensor, batch: dict[str, torch.Tensor], sigmas: torch.Tensor, window: tuple[int, int], share: float,
    args: argparse.Namespace,
) -> dict[str, torch.Tensor]:  # fmt: skip
    """Adds `share` of the batch's mean loss to the gradient, a backward a window step (paper's SDE policy objective).

    batch: latents [B, T_w+1, L, C], log_probs [B, T_w, L], credit [B, 1, L]; embeds [B, S, D]. -> mean diagnostics.
    """
    velocity = common.velocity_fn(pipe, embeds, common.latent_grid(pipe, args.height, args.width), args.guidance)
    infos = []
    for t, step in enumerate(range(*window)):
        # contiguous as in the rollout: another memory layout sums in another order, and the ratio is not exactly 1
        x, x_next = batch["latents"][:, t].contiguous(), batch["latents"][:, t + 1].contiguous()
        _, log_prob, _, _ = common.sde_step(
            x, velocity(x, sigmas[step]), sigmas[step], sigmas[step + 1], noise_level=args.noise_level, sigma_max=sigmas[1],
            kind=args.sde, x_next=x_next,
        )  # fmt: skip
        loss, info = common.grpo_loss(
            log_prob[:, None], batch["log_probs"][:, t : t + 1], batch["credit"], clip_range=args.clip_range
        )
        (loss * share / (window[1] - window[0])).backward()
        infos.append(info | {"loss": loss.detach()})
    mean = {k: torch.stack([i[k] for i in infos]).mean() for k in infos[0]}
    return mean | {"ratio_minus_1": torch.stack([i["ratio_minus_1"] for i in infos]).max()}


def update(
    pipe, params: dict[str, torch.nn.Parameter], optimizer: torch.optim.Optimizer, shards: list[dict[str, torch.Tensor]],
    embeds: torch.Tensor, sigmas: torch.Tensor, window: tuple[int, int], args: argparse.Namespace,
) -> dict[str, float]:  # fmt: skip
    """`--updates` optimizer steps over the round's groups, shards with their credit, embeds [P, S, D]. -> metrics.

    A forward holds the groups that the rollout's forward held, so that before the first step the ratio is exactly 1.
    """
    n, per_pass = args.samples, args.batch_groups
    passes = [range(i, min(i + per_pass, len(shards))) for i in range(0, len(shards), per_pass)]
    infos, norms, first_gap = [], [], 0.0
    for u in range(args.updates):
        mine = passes[u * len(passes) // args.updates : (u + 1) * len(passes) // args.updates]
        total = sum(len(p) for p in mine)
        for p in mine:
            batch = {
                k: torch.cat([shards[g][k] for g in p]).to(embeds.device) for k in ("latents", "log_probs", "credit")
            }
            info = backward(
                pipe, embeds[p.start : p.stop].repeat_interleave(n, 0), batch, sigmas, window, len(p) / total, args
            )
            infos.append(info)
            if u == 0:
                first_gap = max(first_gap, info["ratio_minus_1"].item())
        if first_gap > args.max_ratio_gap:
            raise UserError(f"before the update the ratio is off 1 by {first_gap:.1e}, more than --max-ratio-gap {args.max_ratio_gap}: "
                            "rollout and update do not see the same numbers (dtype, batch shape or shards of another policy)")  # fmt: skip
        norm = torch.nn.utils.clip_grad_norm_(params.values(), args.max_grad_norm)
        if not norm.isfinite():
            raise UserError(f"the gradient is {norm.item()}; nothing was updated, the state of the last round is kept")
        optimizer.step()
        optimizer.zero_grad()
        norms.append(norm.item())
    mean = {k: torch.stack([i[k] for i in infos]).mean().item() for k in ("loss", "clip_fraction", "approx_kl")}
    return mean | {"ratio_minus_1": first_gap, "grad_norm": sum(norms) / len(norms)}


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


def save_state(
    path: Path, round_: int, params: dict, optimizer: torch.optim.Optimizer, args: argparse.Namespace
) -> None:
    """LoRA, AdamW's moments and the number of finished rounds in one atomic file. No random state: seeds are functions."""
    tensors = {f"param.{k}": p for k, p in params.items()}
    for k, p in params.items():
        tensors |= {f"{name}.{k}": v for name, v in optimizer.state[p].items()}
    common.write_tensors(path, tensors, {"made": json.dumps({"round": round_, "settings": common.settings(args)})})


def load_state(path: Path, params: dict, optimizer: torch.optim.Optimizer) -> None:
    tensors, _ = common.read_tensors(path)
    moments = ("step", "exp_avg", "exp_avg_sq")
    shapes = {f"{m}.{k}": () if m == "step" else tuple(p.shape) for k, p in params.items() for m in ("param", *moments)}
    if {k: tuple(v.shape) for k, v in tensors.items()} != shapes:
        raise UserError(f"{path}: is not the state of this LoRA; use another --run")
    for k, p in params.items():
        p.data.copy_(tensors[f"param.{k}"])
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


def train(args: argparse.Namespace, stage: ModuleType, atoms: list[dict]) -> None:
    window = stage.load_window(args)
    # What a resume must have as it was at this start, by what the files hold.
    args.atoms, args.scorer, args.window = (
        common.file_id(args.run / "atoms.jsonl"),
        common.file_id(args.scorer),
        list(window),
    )
    if args.credit == "shuffled" and any(len(a["vqa_list"]) < 2 for a in atoms):
        raise UserError("--credit shuffled: atoms.jsonl has a prompt of one atom, whose map has no other atom to go to")
    state = args.run / "state" / "state.safetensors"
    done = finished_rounds(state, args)
    if done >= args.rounds:
        print(f"{args.run}: all {args.rounds} rounds are done; --rounds continues")
        return
    passes = math.ceil(args.groups / args.batch_groups)
    if not 1 <= args.updates <= passes:
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
    optimizer = torch.optim.AdamW(params.values(), lr=args.lr, betas=(0.9, 0.999), weight_decay=args.weight_decay)
    if done:
        load_state(state, params, optimizer)
    grid = common.latent_grid(pipe, args.height, args.width)
    sigmas = common.schedule(pipe, args.steps, grid[0] * grid[1])
    common.write_settings(args.run / "state" / "settings.json", args)
    print(f"{len(atoms)} prompts; {args.groups} groups x {args.samples} pictures a round, {args.updates} updates of SDE steps "
          f"{window[0]}..{window[1] - 1} of {args.steps}; LoRA: {sum(p.numel() for p in params.values()):,} parameters in "
          f"{len(params) // 2} modules; rounds {done}..{args.rounds - 1}")  # fmt: skip

    with tqdm(total=args.rounds, initial=done, desc="rounds", unit="round", dynamic_ncols=True) as bar:
        for r in range(done, args.rounds):
            # rollouts and scores
            rows = stage.round_rows(atoms, r, args.groups, args.seed)
            mine = torch.stack([embeds[row["id"]] for row in rows])
            policy = common.lora_digest(pipe.transformer)
            shards, seconds = [], {"rollout": 0.0, "scoring": 0.0}
            for shard, took in stage.collect(pipe, score_fn, rows, mine, r, window, policy, args):
                shards.append(shard)
                seconds = {k: seconds[k] + took[k] for k in seconds}

            # credit and updates
            start = time.perf_counter()
            for g, shard in enumerate(shards):
                shard["credit"] = group_credit(shard, r, g, args)
            warm_up = min(1.0, (r + 1) / args.warmup) if args.warmup else 1.0
            for group in optimizer.param_groups:
                group["lr"] = args.lr * warm_up
            line = (
                {"round": r}
                | reward_metrics(rows, shards)
                | update(pipe, params, optimizer, shards, mine, sigmas, window, args)
            )
            seconds["update"] = time.perf_counter() - start

            # log and save; the state last, so that a kill before it repeats this round in the same bits
            metrics = write_metrics(args.run / "metrics.jsonl", line | {"seconds": seconds})
            last = r == args.rounds - 1
            if last or (r + 1) % args.save_every == 0:
                save_lora(pipe, args.run / "lora" / f"round_{r + 1:04d}")
                plot_training(args.run / "training.png", metrics, args)
            save_state(state, r + 1, params, optimizer, args)
            old = args.run / "shards" / f"round_{r - args.keep_rounds:04d}"
            if r > args.keep_rounds and old.is_dir():
                for file in [*old.glob("*.safetensors")]:
                    file.unlink()
                if not any(old.iterdir()):
                    old.rmdir()
            kinds = " ".join(f"{k} {v:.3f}" for k, v in line["atoms"].items())
            bar.write(f"round {r:4d}  reward {line['reward']:.4f} ({kinds})  ratio-1 {line['ratio_minus_1']:.1e}  "
                      f"clipped {line['clip_fraction']:.3f}  grad {line['grad_norm']:.2e}  rollout {seconds['rollout']:.1f} s  "
                      f"scoring {seconds['scoring']:.1f} s  update {seconds['update']:.1f} s")  # fmt: skip
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
    group = parser.add_argument_group("training")
    group.add_argument("--objective", choices=["grpo"], default="grpo", help="policy objective")
    group.add_argument(
        "--credit", choices=CREDITS, default="cast", help="how atom rewards become the credit of a location"
    )
    group.add_argument("--map-floor", type=float, default=0.5, metavar="F", help="share of the uniform map in every atom's map: lets "
                       "the empty places have a share of an atom's credit")  # fmt: skip
    group.add_argument(
        "--std-floor", type=float, default=0.05, help="least standard deviation of a reward in its group"
    )
    group.add_argument(
        "--clip-range", type=float, default=0.2, metavar="C", help="the ratio of a location is clipped to 1-C..1+C"
    )
    group.add_argument(
        "--rounds", type=int, default=100, help="rounds in all; a larger number continues a finished run"
    )
    group.add_argument(
        "--updates", type=int, default=1, help="optimizer steps a round, each on its own share of the groups"
    )
    group.add_argument("--lr", type=float, default=3e-4, help="learning rate of AdamW")
    group.add_argument("--warmup", type=int, default=0, metavar="ROUNDS", help="rounds of linear warm-up")
    group.add_argument("--weight-decay", type=float, default=1e-4, help="weight decay of AdamW")
    group.add_argument("--max-grad-norm", type=float, default=1.0, help="the gradient is scaled down to this norm")
    group.add_argument("--max-ratio-gap", type=float, default=1e-6, help="largest |ratio-1| before an update")
    group.add_argument("--rank", type=int, default=64, help="LoRA rank")
    group.add_argument("--alpha", type=float, default=64, help="LoRA scale alpha")
    group.add_argument("--lora-targets", default=LORA_TARGETS, metavar="REGEX", help="modules that get a LoRA")
    group.add_argument("--save-every", type=int, default=20, metavar="ROUNDS", help="rounds between LoRA folders")
    group.add_argument(
        "--keep-rounds",
        type=int,
        default=2,
        metavar="ROUNDS",
        help="rounds whose shards are kept; stage 03's round 0 always is",
    )
    return common.parse_args(parser)


def main() -> None:
    stage = load_scorer_stage()
    args = parse(stage)
    atoms = common.read_atoms(args.run / "atoms.jsonl")
    with common.only_process(args.run):
        train(args, stage, atoms)


if __name__ == "__main__":
    common.run_main(main)
