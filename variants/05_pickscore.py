"""Stage 05, another score: PickScore (arXiv 2305.01569) of the pictures that 05_eval.py has judged, and how far it and
Soft-TIFA agree (paper, figure 2).

    python variants/05_pickscore.py --preset flux2-dev --run runs/flux2 --eval-prompts geneval2_data.jsonl
    python variants/05_pickscore.py --preset tiny --run runs/demo --pickscore tests/tiny/models/clip

Reads   eval/ of --run, and of each RUN of --more, judged on the same --eval-prompts.
Writes  eval/pickscore.jsonl in each of these runs, a line a picture; eval/pickscore.json and eval/pickscore.png in --run.

PickScore = exp(logit scale) * cosine of a CLIP-H's picture and text features; its logit scale is about 100. A model here is
a run's base or its LoRA. Figure: distributions of PickScore and of Soft-TIFA GM, pooled and by model; and agreement: over
all pairs of pictures of one prompt, of two models or of one, the share in which both scores prefer the same picture.
A pair in which a score is equal prefers nothing: it is counted, and left out. Intervals are 95%, percentile bootstrap over
prompts: the pairs of a prompt are not independent. (The paper's bars are prompt-level standard deviations.)
"""

import argparse
import hashlib
import io
import itertools
import json
import math
import sys
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import UserError

PICKSCORE, PROCESSOR = "yuvalkirstain/PickScore_v1", "laion/CLIP-ViT-H-14-laion2B-s32B-b79K"
SCORES = {"pickscore": "PickScore", "gm": "Soft-TIFA GM"}
RESAMPLES = 10_000


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument(
        "--more", type=Path, nargs="+", default=[], metavar="RUN", help="further judged runs to pool with --run"
    )
    p.add_argument("--eval-prompts", metavar="FILE", help="the prompts that the runs were judged on")
    p.add_argument("--pickscore", default=PICKSCORE, help="CLIP with PickScore's weights: folder or hub name")
    p.add_argument(
        "--processor", help=f"its processor; unset: {PROCESSOR} for the public weights, else --pickscore's own"
    )
    p.add_argument("--batch-size", type=int, default=16, metavar="N", help="pictures a forward")
    args = common.parse_args(p)
    if args.batch_size < 1:
        raise UserError(f"--batch-size {args.batch_size}: must be at least 1")
    args.processor = args.processor or (PROCESSOR if args.pickscore == PICKSCORE else args.pickscore)
    return args


# ---------------------------------------------------------------- PickScore


def load_clip(args: argparse.Namespace) -> tuple[torch.nn.Module, object]:
    from transformers import CLIPModel, CLIPProcessor

    try:
        model = CLIPModel.from_pretrained(args.pickscore, use_safetensors=True, dtype=getattr(torch, args.dtype))
        processor = CLIPProcessor.from_pretrained(args.processor)
    except (OSError, ValueError, TypeError, AttributeError, RuntimeError) as e:
        raise UserError(f"--pickscore {args.pickscore}: cannot be loaded: {str(e).splitlines()[0]}") from e
    return model.to(args.device).eval().requires_grad_(False), processor


@torch.no_grad()
def pickscore(clip: tuple, pictures: list[Image.Image], prompts: list[str]) -> list[float]:
    """N pictures, each with its own prompt, cut at CLIP's length -> N scores."""
    model, processor = clip
    length = model.config.text_config.max_position_embeddings
    text = processor.tokenizer(prompts, padding=True, truncation=True, max_length=length, return_tensors="pt").to(
        model.device
    )
    pixels = processor.image_processor(pictures, return_tensors="pt")["pixel_values"].to(model.device, model.dtype)
    a = F.normalize(model.get_image_features(pixel_values=pixels).pooler_output.float(), dim=-1)
    b = F.normalize(model.get_text_features(**text).pooler_output.float(), dim=-1)
    return (model.logit_scale.float().exp() * (a * b).sum(-1)).tolist()


def read_run(run: Path, prompts_file: str, prompts: list[str]) -> list[dict]:
    """The judged pictures of a run: model, row, image, prompt, path, content, gm. Lines whose picture has since gone or been
    made anew are left out. UserError if the run was judged on other prompts."""
    settings = common.read_json(run / "eval" / "settings.json")
    made = settings.get("settings", {}) if isinstance(settings, dict) else {}
    digest = hashlib.sha256(Path(prompts_file).read_bytes()).hexdigest()[:16]
    if digest not in str(made.get("eval_prompts")):
        raise UserError(f"{run}: was judged on {made.get('eval_prompts')}, not on --eval-prompts {prompts_file}")
    folder, rows = Path(made["images"]) if made.get("images") else run / "eval" / "images", []
    for r in common.read_jsonl(run / "eval" / "per_image.jsonl"):
        base = folder if made.get("images") and not (folder / "base").is_dir() else folder / r["system"]
        path = base / f"{r['row']:05d}_{r['image']:02d}.png"
        content = path.read_bytes() if path.exists() else b""
        if hashlib.sha256(content).hexdigest()[:16] != r.get("made_with", [None])[-1]:
            continue
        gm = math.exp(math.fsum(math.log(s) for s in r["scores"]) / len(r["scores"])) if min(r["scores"]) > 0 else 0.0
        rows.append({"model": f"{run.resolve().name} {r['system']}", "row": r["row"], "image": r["image"], "path": path, "content": content,
                     "prompt": prompts[r["row"]], "gm": gm})  # fmt: skip
    if not rows:
        raise UserError(f"{run / 'eval' / 'per_image.jsonl'}: none of its pictures is there; run 05_eval.py again")
    return rows


def score_run(run: Path, rows: list[dict], clip, args: argparse.Namespace) -> None:
    """Adds "pickscore" to the rows; pickscore.jsonl keeps those of the same weights and pictures."""
    path = run / "eval" / "pickscore.jsonl"
    known = {r["of"]: r["pickscore"] for r in (common.read_jsonl(path) if path.exists() else [])}
    for r in rows:
        key = f"{common.portable(str(args.pickscore))} {args.dtype} {r['prompt']} ".encode() + r["content"]
        r["of"] = hashlib.sha256(key).hexdigest()[:24]
    todo = [r for r in rows if r["of"] not in known]
    parts = [todo[i : i + args.batch_size] for i in range(0, len(todo), args.batch_size)]
    for part in tqdm(parts, desc=f"PickScore of {run.name}", unit="batch", dynamic_ncols=True, disable=not parts):
        pictures = []
        for r in part:
            with Image.open(io.BytesIO(r["content"])) as image:  # 05_eval.py has read it, so it is one
                pictures.append(image.convert("RGB"))
        known |= zip((r["of"] for r in part), pickscore(clip(), pictures, [r["prompt"] for r in part]), strict=True)
    for r in rows:
        r["pickscore"] = known[r["of"]]
    if todo:
        lines = ({k: r[k] for k in ("model", "row", "image", "of", "pickscore", "gm")} for r in rows)
        common.write_text(path, "".join(json.dumps(line) + "\n" for line in lines))


# ---------------------------------------------------------------- figure 2


def agreement(rows: list[dict], seed: int = 0) -> dict:
    """Share of pairs of pictures of one prompt on which the two scores prefer the same one.

    {"all", "MODEL", "MODEL, MODEL": {share, low, high, pairs, equal, prompts}}: all pairs, those within a model, those
    between two. None where no pair decides, no interval from a single prompt."""
    prompts: dict[int, list[dict]] = {}
    for r in rows:
        prompts.setdefault(r["row"], []).append(r)
    counts: dict[str, np.ndarray] = {}  # [P, 3]: agree, disagree, equal
    for p, row in enumerate(sorted(prompts)):
        for a, b in itertools.combinations(sorted(prompts[row], key=lambda r: (r["model"], r["image"])), 2):
            product = (a["pickscore"] - b["pickscore"]) * (a["gm"] - b["gm"])
            kind = 0 if product > 0 else 1 if product < 0 else 2
            for name in ("all", ", ".join(dict.fromkeys((a["model"], b["model"])))):
                counts.setdefault(name, np.zeros((len(prompts), 3), int))[p, kind] += 1
    weights = np.random.default_rng(seed).multinomial(len(prompts), [1 / len(prompts)] * len(prompts), RESAMPLES)
    found = {}
    for name, c in counts.items():
        agree, disagree, equal = c.sum(0).tolist()
        decided = int((c[:, :2].sum(1) > 0).sum())
        low = high = None
        if decided > 1:
            drawn = weights @ c  # [resamples, 3]
            total = drawn[:, :2].sum(1)
            low, high = np.percentile(drawn[total > 0, 0] / total[total > 0], [2.5, 97.5]).round(4).tolist()
        share = round(agree / (agree + disagree), 4) if decided else None
        found[name] = dict(share=share, low=low, high=high, pairs=agree + disagree, equal=equal, prompts=decided)
    return found


def distributions(rows: list[dict]) -> dict:
    """{"all" or model: {score: {mean, std, p5, p50, p95, n}}}."""
    found = {}
    for name in ("all", *dict.fromkeys(r["model"] for r in rows)):
        found[name] = {}
        for score in SCORES:
            v = np.array([r[score] for r in rows if name in ("all", r["model"])])
            quantiles = dict(zip(("p5", "p50", "p95"), np.percentile(v, [5, 50, 95]), strict=True))
            facts = dict(mean=v.mean(), std=v.std(ddof=1) if len(v) > 1 else 0.0) | quantiles
            found[name][score] = {k: round(float(x), 4) for k, x in facts.items()} | {"n": len(v)}
    return found


def figure(rows: list[dict], agree: dict, path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    models = ["all", *dict.fromkeys(r["model"] for r in rows)]
    fig, axes = plt.subplots(1, 3, figsize=(13, 1.8 + 0.45 * len(models)), layout="constrained", sharey=False)
    for ax, (score, title) in zip(axes, SCORES.items(), strict=False):
        values = [[r[score] for r in rows if m in ("all", r["model"])] for m in models]
        parts = ax.violinplot(values, orientation="horizontal", showextrema=False, widths=0.85, points=200)
        for i, body in enumerate(parts["bodies"]):
            body.set(facecolor="#c8442b" if i == 0 else "#3b6ea5", alpha=0.55, edgecolor="none")
        ax.plot(
            [np.median(v) for v in values],
            range(1, len(models) + 1),
            "|",
            color="#1b1f24",
            markersize=14,
            markeredgewidth=2,
        )
        ax.set_yticks(range(1, len(models) + 1), models)
        ax.invert_yaxis()
        ax.set_title(f"{title}, median and distribution")
    axes[1].set_xlim(0, 1)
    shown = {k: v for k, v in agree.items() if v["share"] is not None}
    for i, v in enumerate(shown.values()):
        axes[2].plot(100 * v["share"], i, "o", color="#1b1f24")
        if v["low"] is not None:
            axes[2].plot([100 * v["low"], 100 * v["high"]], [i, i], color="#1b1f24")
    axes[2].axvline(50, linestyle="--", color="#6b7280")
    axes[2].set(xlim=(0, 100), xlabel="% of pairs, 95% interval", title="both prefer the same picture")
    axes[2].set_yticks(range(len(shown)), [k.replace(", ", "\nagainst ") for k in shown])
    axes[2].set_ylim(len(shown) - 0.5, -0.5)
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    common.write_figure(path, fig)
    plt.close(fig)


def main() -> None:
    args = parse_args()
    if args.eval_prompts is None:
        raise UserError("--eval-prompts: name the file that the runs were judged on")
    prompts, runs, clip = common.read_prompts(args.eval_prompts), [args.run, *args.more], None
    if len({run.resolve().name for run in runs}) < len(runs):
        raise UserError("--more: two runs have the same name, so their models could not be told apart")

    def loaded() -> tuple:
        nonlocal clip
        clip = clip or load_clip(args)
        return clip

    rows = []
    for run in runs:
        rows += (found := read_run(run, args.eval_prompts, prompts))
        score_run(run, found, loaded, args)
    agree, spread = agreement(rows), distributions(rows)
    common.write_json(
        args.run / "eval" / "pickscore.json", {"pickscore": args.pickscore, "distributions": spread, "agreement": agree}
    )
    figure(rows, agree, args.run / "eval" / "pickscore.png")
    for model, scores in spread.items():
        print(f"{model:30}", "  ".join(f"{SCORES[s]} {v['mean']:.3f} +- {v['std']:.3f}" for s, v in scores.items()))
    for name, v in agree.items():
        share = "no pair decides" if v["share"] is None else f"{100 * v['share']:.1f}%"
        interval = "" if v["low"] is None else f" [{100 * v['low']:.1f}, {100 * v['high']:.1f}]"
        print(f"agreement, {name}: {share}{interval} of {v['pairs']} pairs; {v['equal']} equal in a score")


if __name__ == "__main__":
    common.run_main(main)
