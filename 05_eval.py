"""Stage 05: the frozen base against its LoRA on held-out prompts.

    python 05_eval.py --preset tiny --run runs/demo
    python 05_eval.py --preset flux2-dev --run runs/flux2 --eval-prompts geneval2_data.jsonl --batch-size 4

Reads   lora/round_RRRR/ (04) or any folder that diffusers' `load_lora_weights` takes; --eval-prompts: JSONL with prompt,
        vqa_list and skills (GenEval 2's own file, or an atoms.jsonl of 02).
Writes  eval/images/{base,lora}/PPPPP_MM.png, picture MM of row PPPPP of --eval-prompts; eval/per_image.jsonl, the VLM's
        score and the oracle's verdict of each question; eval/scores.json, the metrics; eval/report.html, one file.

Metrics (GenEval 2, arXiv 2512.16853), times 100; s_k is the VLM's probability of the right answer to question k:
    soft_tifa.am   mean_k s_k, averaged over the pictures of a prompt, then over prompts
    soft_tifa.gm   (prod_k s_k)^(1/K), averaged likewise
    skill.*        mean of s_k over all questions of a skill;  atomicity.*: gm over the prompts with that atom count
    oracle.*       with --oracle: share of right atoms (atom; object, count, attribute, relation = position or verb), of
                   pictures without a wrong atom (all); gap = mean s_k - atom grows when a policy pleases the VLM alone
"delta" is lora - base with a 95% interval: percentile bootstrap over prompts (a prompt is drawn with all its pictures),
10,000 resamples. Base and LoRA start from the same noise. Deviation: several pictures a prompt; GenEval 2 has one.
"""

import argparse
import base64
import hashlib
import html
import io
import json
import math
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import common
from common import UserError

EVAL_ROUND = 1_000_000  # the round in a picture's seed: no training round has it, so no start noise was trained on
LORA_FILE = "pytorch_lora_weights.safetensors"
KINDS = {"object": ["object"], "count": ["count"], "attribute": ["attribute"], "relation": ["position", "verb"]}
Records = dict[tuple[str, int, int], dict]  # (system, row, image) -> {"scores": [K], "oracle": [K] or None, ...}


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    g = p.add_argument_group("what is judged")
    g.add_argument("--lora", metavar="FOLDER", help="LoRA to judge; unset: the latest of RUN/lora; none: base alone")
    g.add_argument("--eval-prompts", metavar="FILE", help="JSONL with prompt, vqa_list and skills")
    g.add_argument("--num-prompts", type=int, metavar="N", help="judge N rows, drawn once and for all; unset: all")
    g.add_argument("--images-per-prompt", type=int, default=1, metavar="M", help="pictures a prompt of each system")
    g = p.add_argument_group("pictures")
    g.add_argument("--model", help="diffusers pipeline: folder or hub name")
    g.add_argument("--height", type=int, metavar="PIXELS", help="height of a picture")
    g.add_argument("--width", type=int, metavar="PIXELS", help="width of a picture")
    g.add_argument("--steps", type=int, help="ODE steps")
    g.add_argument("--guidance", type=float, help="guidance scale; state it with every result")
    g.add_argument("--max-sequence-length", type=int, metavar="TOKENS", help="padded length of a prompt")
    g.add_argument("--text-encoder-layers", type=int, nargs="+", metavar="LAYER", help="layers that embed a prompt")
    g.add_argument("--batch-size", type=int, default=32, metavar="N", help="pictures a forward; lower it to fit memory")
    g = p.add_argument_group("judges")
    g.add_argument("--vlm", help="frozen vision-language model that scores: folder or hub name")
    g.add_argument("--scorer", default=str(common.ROOT / "03_score_atoms.py"), metavar="FILE", help="stage 03")
    g.add_argument("--oracle", metavar="FILE", help="script: judge(picture [H, W, 3], vqa_list) -> a bool a question")
    args = common.parse_args(p)
    for name in ("num_prompts", "images_per_prompt", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    return args


def read_prompts(path: str | None, n: int | None) -> dict[int, dict]:
    """{row: line} of the prompt file, all or a fixed random n; a larger n contains a smaller one."""
    if path is None:
        raise UserError("--eval-prompts: name a JSONL file with prompt, vqa_list and skills (02_build_csg.py makes it)")
    lines = common.read_atoms(Path(path))
    for line in lines:
        ones = sum(s == "count" and a == "one" for s, (_, a) in zip(line["skills"], line["vqa_list"], strict=True))
        line.setdefault("atom_count", len(line["skills"]) - ones)  # GenEval 2 asks "a" as a count; it is no atom
    order = random.Random(0).sample(range(len(lines)), len(lines))  # files are sorted: never the first n
    return {row: lines[row] for row in sorted(order[:n])}


def find_lora(run: Path, lora: str | None) -> Path | None:
    """The LoRA file to judge; None for the base alone."""
    found = sorted(run.glob(f"lora/round_*/{LORA_FILE}")) if lora is None else [*Path(lora).glob(LORA_FILE)]
    if not found and lora != "none":
        raise UserError(f"{lora or run / 'lora'}: no {LORA_FILE}; 04_train_cast.py makes it; --lora none: base alone")
    return found[-1] if found else None


def reuse(out: Path, args: argparse.Namespace, lora: Path | None) -> None:
    """Keeps what `out` holds of these settings. Another LoRA's pictures are removed; other pictures are refused."""
    path = out / "settings.json"
    old = common.read_json(path)["settings"] if path.exists() else {}
    if not old and any(out.glob("[!.]*")):
        raise UserError(f"{out}: has no settings.json, so nobody knows what made it; remove it or use another --run")
    try:
        files = (args.eval_prompts, lora, args.scorer, args.oracle)
        sha = [f and hashlib.sha256(Path(f).read_bytes()).hexdigest()[:16] for f in files]
    except OSError as e:
        raise UserError(f"{e.filename}: cannot be read: {e.strerror}") from e
    args.eval_prompts = f"{Path(args.eval_prompts).name} (sha256 {sha[0]})"
    args.lora_sha256, args.judges = sha[1] or old.get("lora_sha256"), [args.vlm, *sha[2:]]
    free = "lora lora_sha256 judges vlm scorer oracle num_prompts images_per_prompt batch_size"
    common.require_same(path, args, ignore=free.split())
    if old.get("lora_sha256") not in (None, args.lora_sha256):
        print(f"{out}: the LoRA has changed: its pictures are made and scored again")
        for picture in out.glob("images/lora/*.png"):
            picture.unlink()
    if old != common.settings(args):  # last: a start that is killed before this line is repeated whole
        common.write_settings(path, args)


def picture_path(out: Path, system: str, row: int, image: int) -> Path:
    return out / "images" / system / f"{row:05d}_{image:02d}.png"


def generate(out: Path, prompts: dict[int, dict], lora: Path | None, args: argparse.Namespace) -> None:
    """Base pictures, then LoRA pictures, of the same seeds in the same batches; pictures that exist are kept."""
    pairs = [(row, m) for row in prompts for m in range(args.images_per_prompt)]
    # A batch is made whole, so that no picture depends on where an earlier start was stopped.
    batches = [pairs[i : i + args.batch_size] for i in range(0, len(pairs), args.batch_size)]
    pipe = None
    for system in ("base", "lora") if lora else ("base",):
        todo = [b for b in batches if not all(picture_path(out, system, *key).exists() for key in b)]
        if not todo:
            continue
        if pipe is None:
            pipe = common.load_pipeline(args.model, args.device, getattr(torch, args.dtype))
            grid = common.latent_grid(pipe, args.height, args.width)
            sigmas = common.schedule(pipe, args.steps, math.prod(grid))
            lengths = dict(max_sequence_length=args.max_sequence_length, text_encoder_layers=args.text_encoder_layers)
            embeds = {}
            for row, line in tqdm(prompts.items(), desc="prompts", dynamic_ncols=True):
                embeds[row] = common.encode_prompts(pipe, [line["prompt"]], **lengths)[0].cpu()  # [S, D]
            pipe.text_encoder = None  # 24B parameters of FLUX.2-dev that nothing below needs
        if system == "lora":
            common.load_lora(pipe, lora.parent)
        with tqdm(total=sum(map(len, todo)), desc=f"{system} pictures", unit="img", dynamic_ncols=True) as bar:
            for batch in todo:
                seeds = [common.sample_seed(args.seed, EVAL_ROUND, *key) for key in batch]
                embed = torch.stack([embeds[row] for row, _ in batch]).to(args.device)  # [N, S, D]
                velocity = common.velocity_fn(pipe, embed, grid, args.guidance)
                x0 = common.sample(velocity, common.start_noise(pipe, grid, seeds), sigmas).x0  # [N, L, C]
                for key, picture in zip(batch, common.decode(pipe, x0, grid), strict=True):
                    if not (path := picture_path(out, system, *key)).exists():
                        common.save_png(path, picture)
                bar.update(len(batch))


def verdicts(path: str, oracle: Any, picture: torch.Tensor, vqa: list[list[str]]) -> list[bool]:
    """The oracle's bool a question for a picture [3, H, W]."""
    try:
        right = list(oracle(picture.movedim(0, -1).numpy(), vqa))
    except Exception as e:  # whatever a file of the user's raises
        raise UserError(f"--oracle {path}: judge failed on {vqa[0][0]!r} ...: {type(e).__name__}: {e}") from e
    if len(right) != len(vqa) or not all(isinstance(r, (bool, np.bool_)) for r in right):
        raise UserError(f"--oracle {path}: judge must return a bool for each of the {len(vqa)} questions, not {right}")
    return [*map(bool, right)]


def judge(out: Path, prompts: dict[int, dict], systems: list[str], args: argparse.Namespace) -> Records:
    """Scores of all pictures; per_image.jsonl keeps those that the same judges have done."""
    path, made_with = out / "per_image.jsonl", {"base": args.judges, "lora": [*args.judges, args.lora_sha256]}
    lines = common.read_jsonl(path) if path.exists() else []
    records = {(r["system"], r["row"], r["image"]): r for r in lines if r["made_with"] == made_with[r["system"]]}
    keys = [(s, i) for s in systems for i in range(args.images_per_prompt)]
    todo = {row: new for row in prompts if (new := [(s, i) for s, i in keys if (s, row, i) not in records])}
    if not todo:
        return records
    stage = common.load_stage(args.scorer, ("load_scorer", "score"))
    scorer = stage.load_scorer(args.vlm, args.device, getattr(torch, args.dtype), [0])  # layers of maps: not used here
    oracle = common.load_stage(args.oracle, ("judge",)).judge if args.oracle else None
    saved, last = time.monotonic(), [*todo][-1]
    for row, new in tqdm(todo.items(), desc="scores", unit="prompt", dynamic_ncols=True):
        vqa, paths = prompts[row]["vqa_list"], [picture_path(out, system, row, i) for system, i in new]
        pictures = torch.stack([common.load_png(p) for p in paths])  # [N, 3, H, W]
        scores, _ = stage.score(scorer, pictures, vqa, (1, 1), maps=False)  # [N, K]
        if not scores.isfinite().all():
            raise UserError(f"{paths[0]}: a score of the VLM is not a number; try --dtype float32")
        for (system, i), picture, values in zip(new, pictures, scores.tolist(), strict=True):
            found = {"system": system, "row": row, "image": i, "scores": [round(v, 6) for v in values]}
            found["oracle"] = verdicts(args.oracle, oracle, picture, vqa) if oracle else None
            records[system, row, i] = found | {"made_with": made_with[system]}
        if time.monotonic() - saved > 30 or row == last:
            common.write_text(path, "".join(json.dumps(r) + "\n" for r in records.values()))
            saved = time.monotonic()
    return records


def tally(prompts: dict[int, dict], records: Records, system: str, images: int) -> dict[str, np.ndarray]:
    """Every metric is a ratio of sums over prompts: {metric: [P, 2], numerator and denominator of each prompt}."""
    table: dict[str, np.ndarray] = {}
    for p, (row, line) in enumerate(prompts.items()):
        found = [records[system, row, i] for i in range(images)]
        s, skills = np.array([r["scores"] for r in found]), np.array(line["skills"])  # [M, K], [K]
        parts = {"soft_tifa.am": s.mean(1), "soft_tifa.gm": s.prod(1) ** (1 / s.shape[1])}
        if found[0]["oracle"] is not None:
            right = np.array([r["oracle"] for r in found], float)  # [M, K]
            parts |= {"oracle.all": right.all(1), "oracle.atom": right, "oracle.gap": s - right}
            parts |= {f"oracle.{kind}": right[:, np.isin(skills, names)] for kind, names in KINDS.items()}
        parts |= {f"skill.{k}": s[:, skills == k] for k in common.SKILLS}
        for name, values in parts.items():
            table.setdefault(name, np.zeros((len(prompts), 2)))[p] = values.sum(), values.size
    for n in sorted({line["atom_count"] for line in prompts.values()}):
        table[f"atomicity.{n}"] = table["soft_tifa.gm"] * [[line["atom_count"] == n] for line in prompts.values()]
    return {name: t for name, t in table.items() if t[:, 1].any()}


def bootstrap(diff: np.ndarray, den: np.ndarray, *, resamples: int = 10_000, seed: int = 0) -> np.ndarray:
    """95% percentile intervals of sum(diff)/sum(den) over prompts drawn with replacement: diff, den [P, J] -> [2, J].
    nan for a metric that fewer than two prompts have."""
    p = len(diff)
    weights = np.random.default_rng(seed).multinomial(p, [1 / p] * p, resamples).astype(float)  # [B, P]
    total = weights @ den
    draws = np.divide(weights @ diff, total, out=np.full(total.shape, np.nan), where=total > 0)  # [B, J]
    bounds, measured = np.full((2, diff.shape[1]), np.nan), (den > 0).sum(0) > 1
    bounds[:, measured] = np.nanpercentile(draws[:, measured], [2.5, 97.5], axis=0)
    return bounds


def summarise(prompts: dict[int, dict], records: Records, systems: list[str], images: int) -> dict[str, dict]:
    """{"base": {metric: percent}, "lora": ..., "prompts_of": {metric: prompts}, "delta": {metric: {mean, low, high}}}."""
    tables = {system: tally(prompts, records, system, images) for system in systems}
    num = {system: np.stack([t[:, 0] for t in table.values()], 1) for system, table in tables.items()}  # [P, J]
    den = np.stack([t[:, 1] for t in tables["base"].values()], 1)  # the same prompts and questions in both systems
    result = {system: (100 * n.sum(0) / den.sum(0)).round(4).tolist() for system, n in num.items()}
    result["prompts_of"] = (den > 0).sum(0).tolist()
    if "lora" in num:
        diff = num["lora"] - num["base"]
        values = 100 * np.stack([diff.sum(0) / den.sum(0), *bootstrap(diff, den)])  # [3, J]
        columns = np.where(np.isnan(values), None, values.round(4)).T.tolist()
        result["delta"] = [dict(zip(("mean", "low", "high"), column, strict=True)) for column in columns]
    return {key: dict(zip(tables["base"], values, strict=True)) for key, values in result.items()}


# ---------------------------------------------------------------- the page
# fmt: off

CSS = """
:root{color-scheme:light dark;--bg:light-dark(#fbfbfa,#121418);--card:light-dark(#fff,#1a1d23);--ink:light-dark(#1b1e24,#e7e8ec);
--soft:light-dark(#5b6270,#a1a8b5);--line:light-dark(#d9dce2,#363c47);--up:light-dark(#1a7a37,#62d084);
--down:light-dark(#b3261e,#ff8d85)}*{box-sizing:border-box}body{margin:0;background:var(--bg);color:var(--ink);
font:1rem/1.55 system-ui,sans-serif}main{max-width:72rem;margin:auto;padding:2rem 1rem}h1{font-size:1.7rem;line-height:1.2;
margin:0}p{max-width:48rem}h2{font-size:1.25rem;margin:2.8rem 0 .5rem}h3{font-size:1rem;margin:0 0 .6rem;line-height:1.35}figure{
margin:0 0 .6rem}small,figcaption,i{color:var(--soft);font-size:.84rem}.up{color:var(--up)}.down{color:var(--down)}small{
white-space:nowrap;font-weight:400}.grid{display:grid;gap:1rem;
grid-template-columns:repeat(auto-fit,minmax(min(100%,var(--w)),1fr));align-items:start}.card{background:var(--card);
border:1px solid var(--line);border-radius:8px;padding:1rem;min-width:0}.big b{display:block;font-size:2.1rem;line-height:1.2}
table{border-collapse:collapse;width:100%;font-size:.92rem}table,.big{font-variant-numeric:tabular-nums}th,td{padding:.3rem .4rem;
text-align:right;border-top:1px solid var(--line)}th{font-weight:500}th:first-child{text-align:left}thead *{border:0;
color:var(--soft)}th[colspan]{padding-top:1rem;font-weight:650}.pair{display:grid;grid-template-columns:1fr 1fr;gap:.6rem}img{
max-width:100%;height:auto;display:block}.pair img{width:100%}svg{display:block;width:100%}td svg{width:12rem}figcaption span{
margin-right:.8rem}@media(max-width:40rem){td:has(svg){display:none}td small{display:block}}
"""
GROUPS = dict(soft_tifa="Soft-TIFA", skill="Soft-TIFA AM by skill", atomicity="Soft-TIFA GM by atomicity", oracle="Oracle")
TITLES = {"base": "Base", "lora": "LoRA"}
NAMES = {"oracle.all": "all atoms right", "oracle.atom": "atoms right", "soft_tifa.gm": "GM", "soft_tifa.am": "AM",
         "oracle.gap": "VLM score minus oracle"}
CURVES = ("reward", "atoms", "grad_norm", "clip_fraction", "ratio_minus_1", "seconds")  # of metrics.jsonl
FIGURES = {"window.png": "Stage 01: window", "maps.png": "Stage 03: maps of the atoms", "training.png": "Stage 04: training"}


def difference(metric: str, delta: dict) -> str:
    mean, *ends = (f"{round(v, 1) + 0:+.1f}".replace("-", "&minus;") for v in delta.values() if v is not None)
    tone = "" if not ends or metric == "oracle.gap" else "up" if delta["low"] > 0 else "down" if delta["high"] < 0 else ""
    return f'<b class="{tone}">{mean}</b> <small>{f"[{ends[0]}, {ends[1]}]" if ends else "one prompt"}</small>'


def metric_table(scores: dict) -> str:
    """Base, LoRA and their difference with its interval, in numbers and drawn, all on one scale."""
    deltas, out, last = scores.get("delta", {}), "", ""
    reach = max([abs(v) for d in deltas.values() for v in d.values() if v is not None], default=0) or 1
    for metric, base in scores["base"].items():
        group, name = metric.split(".")
        out += f'<tr><th colspan="5" scope="rowgroup">{GROUPS[group]}</th></tr>' if group != last else ""
        last, n = group, scores["prompts_of"][metric]
        name = NAMES.get(metric, f"{name} atoms" if group == "atomicity" else name)
        out += f'<tr><th scope="row">{name} <small>{f"{n} prompts" if n < scores["prompts"] else ""}</small></th><td>{base:.1f}</td>'
        if d := deltas.get(metric):
            low, mean, high = (80 + 76 * (d["mean"] if d[k] is None else d[k]) / reach for k in ("low", "mean", "high"))
            out += f"""<td>{scores["lora"][metric]:.1f}</td><td>{difference(metric, d)}</td><td><svg viewBox="0 0 160 16"
aria-hidden="true" stroke="currentColor"><path d="M80 0V16" stroke="var(--soft)"/><path d="M{low:.1f} 8H{high:.1f}"
stroke-width="2"/><circle cx="{mean:.1f}" cy="8" r="3" fill="currentColor"/></svg></td>"""
    head = "".join(f'<th scope="col">{h}' for h in ("Metric", "Base", "LoRA", "Difference")[: 4 if deltas else 2])
    return f"<table><thead><tr>{head}</tr></thead><tbody>{out.replace('>-', '>&minus;')}</tbody></table>"


def chart(key: str, rounds: list) -> str:
    """A number, or a {name: number}, of each round as lines, inline SVG."""
    rounds = [v if isinstance(v, dict) else {"": v} for v in rounds]
    names, drawn, legend = sorted(set().union(*rounds)), "", ""
    y = np.array([[v.get(name) for name in names] for v in rounds], float)  # None becomes nan
    low, high = np.nanmin(y), np.nanmax(y)
    for i, name in enumerate(names):
        spots = zip(np.linspace(0, 300, len(y)), 90 - 86 * (y[:, i] - low) / (high - low or 1), strict=True)
        path, colour = " ".join(f"{a:.1f},{b:.1f}" for a, b in spots if b == b), f"hsl({(210, 25, 150, 285, 340)[i % 5]} 60% 48%)"
        drawn += f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        legend += f'<span><b style="color:{colour}">&mdash;</b> {html.escape(name)}</span>' if name else ""
    return f"""<figure class="card"><h3>{key.replace("_", " ")} <small>{low:.3g} to {high:.3g}</small></h3><svg role="img"
aria-label="{key}, from {low:.3g} to {high:.3g}" viewBox="0 0 300 94">{drawn}<path d="M0 93H300" stroke="var(--line)"/></svg>
<figcaption>{legend}</figcaption></figure>"""


def inline_png(path: Path, alt: str, longest: int = 320) -> str:
    """An img tag that holds the picture itself; large pictures are made smaller, small ones keep sharp pixels."""
    with Image.open(path) as image:
        style = "image-rendering:pixelated" if max(image.size) <= 128 else ""
        image.thumbnail((longest, longest))
        image.save(buffer := io.BytesIO(), "PNG")
    return f'<img style="{style}" alt="{html.escape(alt)}" src="data:image/png;base64,{base64.b64encode(buffer.getvalue()).decode()}">'


def card(out: Path, row: int, line: dict, records: Records, systems: list[str]) -> str:
    """Picture 0 of a prompt, base and LoRA side by side, and what the judges say of each question."""
    head, body = "".join(f'<th scope="col">{h}' for h in ("Question, right answer", *(TITLES[s] for s in systems))), ""
    pair = "".join(f"<figure>{inline_png(picture_path(out, s, row, 0), f'{TITLES[s]}: ' + line['prompt'])}<figcaption>{TITLES[s]}"
                   "</figcaption></figure>" for s in systems)
    for k, (question, answer) in enumerate(line["vqa_list"]):
        body += f'<tr><th scope="row">{html.escape(question)} <i>{html.escape(answer)}</i></th>'
        for r in (records[s, row, 0] for s in systems):
            right = r["scores"][k] >= 0.5 if r["oracle"] is None else r["oracle"][k]
            mark = '"up" role="img" aria-label="right">&check;' if right else '"down" role="img" aria-label="wrong">&cross;'
            body += f'<td><span class={mark}</span>&nbsp;{r["scores"][k]:.2f}</td>'
    return f"""<article class="card"><h3>{html.escape(line["prompt"])}</h3><div class="pair">{pair}</div><table><thead><tr>{head}</tr></thead>
<tbody>{body}</tbody></table></article>"""


def pick(prompts: dict[int, dict], records: Records, n: int = 12) -> tuple[list[int], list[int]]:
    """n random rows, and of the others the n whose picture 0 changes most, in either direction."""
    value = {key: np.mean(r["oracle"] or r["scores"]) for key, r in records.items() if key[2] == 0}
    shown = random.Random(1).sample([*prompts], min(n, len(prompts)))
    change = {r: abs(value["lora", r, 0] - value["base", r, 0]) for r in prompts if ("lora", r, 0) in value}
    return shown, [r for r in sorted(change, key=lambda r: -change[r]) if change[r] and r not in shown][:n]


def page(run: Path, prompts: dict[int, dict], records: Records, scores: dict) -> str:
    """report.html: no script, nothing from outside."""
    systems, deltas = [s for s in TITLES if s in scores], scores.get("delta", {})
    judges, big = "oracle" if "oracle.all" in scores["base"] else "VLM", ""
    for metric in [m for m in NAMES if m in scores["base"] and m != "oracle.gap"]:
        values = " &rarr; ".join(f"{scores[s][metric]:.1f}" for s in systems)
        number = f"{difference(metric, deltas[metric])}<br><small>{values}</small>" if deltas else f"<b>{values}</b>"
        big += f'<div class="card big">{GROUPS[metric.split(".")[0]]}: {NAMES[metric]} {number}</div>'
    shown, changed = ("".join(card(run / "eval", r, prompts[r], records, systems) for r in rows) for rows in pick(prompts, records))
    metrics = common.read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    curves = "".join(chart(k, found) for k in CURVES if (found := [m[k] for m in metrics if k in m]))
    figures = {t: inline_png(run / f, t, 1600) for f, t in FIGURES.items() if (run / f).exists()}
    rule = f"&check; right, &cross; wrong by the {judges}; the number is the VLM's probability of the right answer."
    sections = "".join(
        f'<h2>{title}</h2><p>{text}</p><div class="grid" style="--w:{width}rem">{body}</div>' for title, width, body, text in (
            ("Metrics", 60, f'<div class="card">{metric_table(scores)}</div>', "In percent. Soft-TIFA: the VLM's probability of the "
             "right answer, mean (AM) or geometric mean (GM) over a prompt's questions. VLM score minus oracle: grows when a policy "
             "pleases the VLM alone. Brackets: 95% interval of the paired difference, bootstrap over prompts; coloured if without 0."),
            ("Random prompts", 21, shown, f"Drawn at random, whatever came out. {rule}"),
            ("Largest changes", 21, changed, f"Extremes, not typical: of the other prompts those whose first picture changed most, "
             f"for better or worse, in the eyes of the {judges}. {rule}"),
            ("Training", 17, curves, "Of each round; reward and atoms (by kind) are the VLM's, on training prompts."),
            ("Figures of the run", 60, "".join(f'<figure class="card"><h3>{t}</h3>{i}</figure>' for t, i in figures.items()), "")) if body)
    name, *made = (html.escape(Path(str(s)).name) for s in (run.resolve(), scores["model"], scores["lora_folder"], scores["vlm"]))
    return f"""<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{name}
</title><style>{CSS}</style><main><h1>{name}: {"LoRA against base" if deltas else "base"}</h1><p>{scores["prompts"]} held-out
prompts ({scores["prompts_trained_on"]} of them also trained on), pictures of each: {scores["images_per_prompt"]}. {scores["steps"]}
ODE steps, guidance {scores["guidance"]}, seed {scores["seed"]}, the same start noise for both. Base: {made[0]}, LoRA: {made[1]},
VLM: {made[2]}.</p><div class="grid" style="--w:10rem">{big}</div>{sections}
</main></html>"""


def main() -> None:
    args = parse_args()
    if not args.run.is_dir():
        raise UserError(f"--run {args.run}: no such folder; the stages before this one make it")
    prompts, lora, out = read_prompts(args.eval_prompts, args.num_prompts), find_lora(args.run, args.lora), args.run / "eval"
    reuse(out, args, lora)
    generate(out, prompts, lora, args)
    systems, atoms = ["base", "lora"] if lora else ["base"], args.run / "atoms.jsonl"
    records = judge(out, prompts, systems, args)
    trained = {line.get("prompt") for line in common.read_jsonl(atoms)} if atoms.exists() else set()
    scores = {k: getattr(args, k) for k in ("images_per_prompt", "model", "vlm", "steps", "guidance", "seed")}
    scores["prompts_trained_on"] = sum(line["prompt"] in trained for line in prompts.values())
    scores |= {"prompts": len(prompts), "lora_folder": str(lora.parent) if lora else "none"}
    scores |= summarise(prompts, records, systems, args.images_per_prompt)
    texts = {"scores.json": json.dumps(scores, indent=1) + "\n", "report.html": page(args.run, prompts, records, scores)}
    for path in (out / name for name in texts):
        if not path.exists() or path.read_bytes() != texts[path.name].encode():  # a start that changes nothing writes nothing
            common.write_text(path, texts[path.name])
    for metric, base in scores["base"].items():
        rest = (scores["lora"][metric], *scores["delta"][metric].values()) if lora else ()
        print(f"{metric:18}", *(f"{v:7.2f}" if v is not None else "      -" for v in (base, *rest)))
    print(f"columns: base, LoRA, difference, 95% interval, in percent; {out / 'report.html'}")


if __name__ == "__main__":
    common.run_main(main)
