"""Stage 05: the frozen base against its LoRA on held-out prompts.

    python 05_eval.py --preset tiny --run runs/demo
    python 05_eval.py --preset flux2-dev --run runs/flux2 --eval-prompts geneval2_data.jsonl --batch-size 4
    python 05_eval.py --preset tiny --run runs/other --images FOLDER              pictures of any model, none is made
    python 05_eval.py --preset tiny --run runs/table --compare runs/sum_* runs/cast_*        the paper's table over seeds

Reads   lora/round_RRRR/ (04) or any folder that diffusers' `load_lora_weights` takes; --eval-prompts: JSONL with prompt,
        vqa_list and skills (GenEval 2's own file, or an atoms.jsonl of 02). With --images: PPPPP_MM.png in FOLDER, or in
        FOLDER/base and FOLDER/lora, as in eval/images.
Writes  eval/images/{base,lora}/PPPPP_MM.png, picture MM of row PPPPP of --eval-prompts; eval/per_image.jsonl, the VLM's
        score and the oracle's verdict of each question; eval/scores.json, the metrics; eval/report.html, one file;
        eval/geneval2_{base,lora}.json and geneval2_prompts.jsonl, for GenEval 2's soft_tifa_analysis.py: a list of scores
        a picture, in the order of the prompts' lines, so a prompt that comes twice keeps two scores.
        --compare: compare.json and compare.md.

Metrics (GenEval 2, arXiv 2512.16853), times 100; s_k is the VLM's probability of the right answer to question k:
    soft_tifa.am   mean_k s_k, averaged over the pictures of a prompt, then over prompts
    soft_tifa.gm   (prod_k s_k)^(1/K), averaged likewise
    skill.*        mean of s_k over all questions of a skill;  atomicity.*: gm over the prompts with that atom count
    hard.gm, .am   gm and am over the prompts with the two highest atom counts (9 and 10 of GenEval 2); ours
    oracle.*       with --oracle: share of right atoms (atom; object, count, attribute, relation = position or verb), of
                   pictures without a wrong atom (all); gap = mean s_k - atom grows when a policy pleases the VLM alone
"delta" is lora - base with a 95% interval: percentile bootstrap over prompts (a prompt is drawn with all its pictures),
10,000 resamples. Base and LoRA start from the same noise. Deviation: several pictures a prompt; GenEval 2 has one.
"""

import argparse
import base64
import functools
import hashlib
import io
import json
import math
import random
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from tqdm import tqdm

import common
from common import UserError

EVAL_ROUND = 1_000_000  # the round in a picture's seed: no training round has it, so no start noise was trained on
LORA_FILE = "pytorch_lora_weights.safetensors"
KINDS = {"object": ["object"], "count": ["count"], "attribute": ["attribute"], "relation": ["position", "verb"]}
HARDEST = 2  # how many of the highest atom counts are "hard"
SHOWN, CHANGED = 60, 12  # prompts with pictures and maps in the report: it stays under 10 MB
FIGURES = {
    "window.png": "Stage 01: window",
    "maps.png": "Stage 03: maps of the atoms",
    "training.png": "Stage 04: training",
}
Records = dict[tuple[str, int, int], dict]  # (system, row, image) -> {"scores": [K], "oracle": [K] or None, ...}


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    g = p.add_argument_group("what is judged")
    g.add_argument("--lora", metavar="FOLDER", help="LoRA to judge; unset: the latest of RUN/lora; none: base alone")
    g.add_argument("--eval-prompts", metavar="FILE", help="JSONL with prompt, vqa_list and skills")
    g.add_argument("--num-prompts", type=int, metavar="N", help="judge N rows, drawn once and for all; unset: all")
    g.add_argument("--images-per-prompt", type=int, default=1, metavar="M", help="pictures a prompt of each system")
    g.add_argument("--images", metavar="FOLDER", help="score these pictures, PPPPP_MM.png by row, and make none")
    g = p.add_argument_group("the table over seeds; nothing is judged")
    g.add_argument(
        "--compare", type=Path, nargs="+", metavar="RUN", help="judged runs: mean and std by method over seeds"
    )
    g.add_argument("--baseline", metavar="METHOD", help='differences are to this one, as "grpo sum"; unset: credit sum')
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
    maps = "text layers of the VLM whose attention is the map of an atom in the report"
    g.add_argument("--map-layers", type=int, nargs="+", metavar="LAYER", default=[1], help=maps)
    g.add_argument("--oracle", metavar="FILE", help="script: judge(picture [H, W, 3], vqa_list) -> a bool a question")
    args = common.parse_args(p)
    for name in ("num_prompts", "images_per_prompt", "batch_size"):
        if (value := getattr(args, name)) is not None and value < 1:
            raise UserError(f"--{name.replace('_', '-')} {value}: must be at least 1")
    if args.images and args.lora not in (None, "none"):
        raise UserError(f"--lora {args.lora}: nothing is drawn with --images; put the LoRA's pictures into FOLDER/lora")
    if args.baseline and not args.compare:
        raise UserError(f"--baseline {args.baseline}: only with --compare")
    if args.images:  # nobody knows what made them
        args.lora, args.model, args.steps, args.guidance = "none", None, None, None
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
    free = (
        "lora lora_sha256 judges vlm scorer oracle num_prompts images_per_prompt batch_size map_layers compare baseline"
    )
    common.require_same(path, args, ignore=free.split())
    if old.get("lora_sha256") not in (None, args.lora_sha256):
        print(f"{out}: the LoRA has changed: its pictures are made and scored again")
        for picture in out.glob("images/lora/*.png"):
            picture.unlink()
    if old != common.settings(args):  # last: a start that is killed before this line is repeated whole
        common.write_settings(path, args)


def find_folders(out: Path, images: str | None, lora: Path | None) -> dict[str, Path]:
    """{system: folder of its pictures}. Pictures from elsewhere are "base", unless FOLDER/base and FOLDER/lora part them."""
    if images is None:
        return {system: out / "images" / system for system in (("base", "lora") if lora else ("base",))}
    if not Path(images).is_dir():
        raise UserError(f"--images {images}: no such folder")
    if (Path(images) / "lora").is_dir() and not (Path(images) / "base").is_dir():
        raise UserError(f"--images {images}: has lora/ and no base/ to compare it with")
    return {s: f for s in ("base", "lora") if (f := Path(images) / s).is_dir()} or {"base": Path(images)}


def picture_path(folder: Path, row: int, image: int) -> Path:
    return folder / f"{row:05d}_{image:02d}.png"


def generate(folders: dict[str, Path], prompts: dict[int, dict], lora: Path | None, args: argparse.Namespace) -> None:
    """Base pictures, then LoRA pictures, of the same seeds in the same batches; pictures that exist are kept."""
    pairs = [(row, m) for row in prompts for m in range(args.images_per_prompt)]
    # A batch is made whole, so that no picture depends on where an earlier start was stopped.
    batches = [pairs[i : i + args.batch_size] for i in range(0, len(pairs), args.batch_size)]
    pipe = None
    for system, folder in folders.items():
        todo = [b for b in batches if not all(picture_path(folder, *key).exists() for key in b)]
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
                    if not (path := picture_path(folder, *key)).exists():
                        common.save_png(path, picture)
                bar.update(len(batch))


def verdicts(path: str, oracle: Callable, picture: torch.Tensor, vqa: list[list[str]]) -> list[bool]:
    """The oracle's bool a question for a picture [3, H, W]."""
    try:
        right = list(oracle(picture.movedim(0, -1).numpy(), vqa))
    except Exception as e:  # whatever a file of the user's raises
        raise UserError(f"--oracle {path}: judge failed on {vqa[0][0]!r} ...: {type(e).__name__}: {e}") from e
    if len(right) != len(vqa) or not all(isinstance(r, (bool, np.bool_)) for r in right):
        raise UserError(f"--oracle {path}: judge must return a bool for each of the {len(vqa)} questions, not {right}")
    return [*map(bool, right)]


def judge(out: Path, folders: dict[str, Path], prompts: dict[int, dict], args: argparse.Namespace) -> Records:
    """Scores of all pictures, then the maps of those that the report shows; per_image.jsonl keeps what the same judges
    have said of the same pictures."""
    path = out / "per_image.jsonl"
    lines = common.read_jsonl(path) if path.exists() else []
    known = {(r["system"], r["row"], r["image"]): r for r in lines}
    keys = [(system, row, i) for row in prompts for system in folders for i in range(args.images_per_prompt)]
    records: Records = {}
    for system, row, i in keys:
        try:
            picture = hashlib.sha256(picture_path(folders[system], row, i).read_bytes()).hexdigest()[:16]
        except FileNotFoundError as e:
            raise UserError(f"{e.filename}: not found; picture {i} of row {row} of --eval-prompts") from e
        made_with, old = [*args.judges, picture], known.get((system, row, i), {})
        records[system, row, i] = old if old.get("made_with") == made_with else {"made_with": made_with}
    pictures = functools.partial(load_pictures, folders)
    stage = functools.cache(lambda: common.load_stage(args.scorer, ("load_scorer", "score")))
    dtype = getattr(torch, args.dtype)
    scorer = functools.cache(lambda: stage().load_scorer(args.vlm, args.device, dtype, args.map_layers))
    oracle = functools.cache(lambda: common.load_stage(args.oracle, ("judge",)).judge)

    def save() -> None:
        named = {k: dict(zip(("system", "row", "image"), k, strict=True)) | r for k, r in records.items()}
        kept = known | {k: r for k, r in named.items() if "scores" in r}
        common.write_text(path, "".join(json.dumps(r) + "\n" for r in kept.values()))

    todo = {row: new for row in prompts if (new := [k for k in keys if k[1] == row and "scores" not in records[k]])}
    saved = time.monotonic()
    for row, new in tqdm(todo.items(), desc="scores", unit="prompt", dynamic_ncols=True, disable=not todo):
        vqa, images = prompts[row]["vqa_list"], pictures(new)
        scores, _ = stage().score(scorer(), images, vqa, (1, 1), maps=False)  # [N, K]
        if not scores.isfinite().all():
            raise UserError(
                f"{picture_path(folders[new[0][0]], row, new[0][2])}: a score of the VLM is not a number; try --dtype float32"
            )
        for key, picture, values in zip(new, images, scores.tolist(), strict=True):
            records[key] |= {"scores": [round(v, 6) for v in values]}
            records[key]["oracle"] = verdicts(args.oracle, oracle(), picture, vqa) if args.oracle else None
        if time.monotonic() - saved > 30:
            save()
            saved = time.monotonic()
    mapped = {}
    for row in sum(pick(prompts, records), []):
        done = [records[s, row, 0].get("map_layers") == args.map_layers for s in folders]
        mapped |= {} if all(done) else {row: [(s, row, 0) for s in folders]}
    for row, new in tqdm(mapped.items(), desc="maps", unit="prompt", dynamic_ncols=True, disable=not mapped):
        images = pictures(new)
        grid = tuple(min(16, max(1, side // 4)) for side in images.shape[2:])  # fine enough to look at
        _, maps = stage().score(scorer(), images, prompts[row]["vqa_list"], grid, maps=True)  # [N, K, h, w]
        for key, m in zip(new, maps if maps is not None else [None] * len(new), strict=True):
            records[key] |= {"map_layers": args.map_layers, "maps": None if m is None else encode_maps(m)}
    if todo or mapped:
        save()
    return records


def load_pictures(folders: dict[str, Path], keys: Sequence[tuple[str, int, int]]) -> torch.Tensor:
    """[N, 3, H, W]; UserError if they are not of one size."""
    paths = [picture_path(folders[system], row, i) for system, row, i in keys]
    pictures = [common.load_png(p) for p in paths]
    for path, picture in zip(paths, pictures, strict=True):
        if picture.shape != pictures[0].shape:
            sizes = ["x".join(map(str, p.shape[:0:-1])) for p in (picture, pictures[0])]
            raise UserError(f"{path}: is {sizes[0]} pixels, and {paths[0]} {sizes[1]}; one comparison needs one size")
    return torch.stack(pictures)


def encode_maps(maps: torch.Tensor) -> dict:
    """Maps [K, h, w] of mean 1 as the page has them: a byte a location, 255 at the strongest."""
    levels = (255 * maps / maps.amax((1, 2), keepdim=True)).round().to(torch.uint8).cpu().numpy()
    return {"size": [*maps.shape[1:]], "bytes": [base64.b64encode(m.tobytes()).decode() for m in levels]}


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
    counts = sorted({line["atom_count"] for line in prompts.values()})
    for name, metric, chosen in [(f"atomicity.{n}", "gm", [n]) for n in counts] + [
        (f"hard.{metric}", metric, counts[-HARDEST:]) for metric in ("gm", "am")
    ]:
        table[name] = table[f"soft_tifa.{metric}"] * [[line["atom_count"] in chosen] for line in prompts.values()]
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


# ---------------------------------------------------------------- GenEval 2's own files, the page


def geneval2_files(prompts: dict[int, dict], records: Records, systems: Sequence[str], images: int) -> dict[str, str]:
    """What soft_tifa_analysis.py of GenEval 2 reads: a list of scores a picture, in the order of the lines of the prompts'
    file, which has a prompt once a picture. Its file of picture names is keyed by the prompt's text, this one is not."""
    keys = [(row, i) for row in prompts for i in range(images)]
    names = ("prompt", "atom_count", "vqa_list", "skills")
    files = {f"geneval2_{s}.json": json.dumps([records[s, *key]["scores"] for key in keys]) + "\n" for s in systems}
    lines = [json.dumps({k: prompts[row][k] for k in names}, ensure_ascii=False) for row, _ in keys]
    return files | {"geneval2_prompts.jsonl": "\n".join(lines) + "\n"}


def pick(prompts: dict[int, dict], records: Records) -> tuple[list[int], list[int]]:
    """SHOWN random rows, and of the others those CHANGED whose picture 0 changes most, in either direction."""
    value = {key: np.mean(r["oracle"] or r["scores"]) for key, r in records.items() if key[2] == 0}
    shown = random.Random(1).sample([*prompts], len(prompts))[:SHOWN]
    change = {r: abs(value["lora", r, 0] - value["base", r, 0]) for r in prompts if ("lora", r, 0) in value}
    order = sorted(change, key=lambda r: -change[r])
    return shown, [r for r in order if change[r] and r not in shown][:CHANGED]


def inline_picture(path: Path, longest: int = 320) -> dict:
    """A picture as a data URL with its size: a small one as it is, a large one smaller and as JPEG."""
    with Image.open(path) as image:
        image = image.convert("RGB")
        kind = "png" if max(image.size) <= 128 else "jpeg"
        image.thumbnail((longest, longest))
        image.save(buffer := io.BytesIO(), kind, **({"quality": 85} if kind == "jpeg" else {}))
    url = f"data:image/{kind};base64,{base64.b64encode(buffer.getvalue()).decode()}"
    return {"src": url, "width": image.width, "height": image.height}


def page(run: Path, folders: dict[str, Path], prompts: dict[int, dict], records: Records, scores: dict) -> str:
    """report.html: docs/report_template.html, which draws all, with the data of this run in its one placeholder."""
    shown, changed = pick(prompts, records)
    entries = []
    for row in random.Random(1).sample([*prompts], len(prompts)):  # begins with `shown`
        line, systems = prompts[row], {}
        for system, folder in folders.items():
            r, path = records[system, row, 0], picture_path(folder, row, 0)
            seen = {"scores": [round(v, 3) for v in r["scores"]], "right": r["oracle"]}
            systems[system] = seen | (
                {"maps": r["maps"], "picture": inline_picture(path)} if row in shown + changed else {}
            )
        entry = {k: line[k] for k in ("prompt", "skills", "vqa_list", "atom_count")}
        entries.append(entry | {"row": row, "shown": row in shown + changed, "systems": systems})
    metrics = common.read_jsonl(run / "metrics.jsonl") if (run / "metrics.jsonl").exists() else []
    figures = [{"title": t} | inline_picture(run / f, 1600) for f, t in FIGURES.items() if (run / f).exists()]
    data = {"name": run.resolve().name, "scores": scores, "prompts": entries, "training": metrics, "figures": figures}
    # "<" in a text could end the block of data; a quote or an ampersand cannot
    blob = json.dumps(data, ensure_ascii=False, separators=(",", ":")).replace("<", "\\u003c")
    before, after = (common.ROOT / "docs" / "report_template.html").read_text().split("/*DATA*/")
    return before + blob + after


def write_new(path: Path, text: str) -> None:
    """A start that changes nothing writes nothing."""
    if not path.exists() or path.read_bytes() != text.encode():
        common.write_text(path, text)


def main() -> None:
    args = parse_args()
    if args.compare:
        table = common.load_stage(common.ROOT / "variants" / "05_compare.py").write_table
        return print(table(args.run, args.compare, args.baseline), end="")
    if not args.run.is_dir() and not args.images:
        raise UserError(f"--run {args.run}: no such folder; the stages before this one make it")
    prompts, lora, out = (
        read_prompts(args.eval_prompts, args.num_prompts),
        find_lora(args.run, args.lora),
        args.run / "eval",
    )
    folders = find_folders(out, args.images, lora)
    reuse(out, args, lora)
    if not args.images:
        generate(folders, prompts, lora, args)
    records, systems, atoms = judge(out, folders, prompts, args), [*folders], args.run / "atoms.jsonl"
    trained = {line.get("prompt") for line in common.read_jsonl(atoms)} if atoms.exists() else set()
    scores = {k: getattr(args, k) for k in ("images_per_prompt", "model", "vlm", "steps", "guidance", "seed", "images")}
    scores["prompts_trained_on"] = sum(line["prompt"] in trained for line in prompts.values())
    scores |= {"prompts": len(prompts), "lora_folder": str(lora.parent) if lora else "none"}
    scores |= summarise(prompts, records, systems, args.images_per_prompt)
    texts = geneval2_files(prompts, records, systems, args.images_per_prompt)
    texts |= {
        "scores.json": json.dumps(scores, indent=1) + "\n",
        "report.html": page(args.run, folders, prompts, records, scores),
    }
    for name, text in texts.items():
        write_new(out / name, text)
    for metric, base in scores["base"].items():
        rest = (scores["lora"][metric], *scores["delta"][metric].values()) if "lora" in scores else ()
        print(f"{metric:18}", *(f"{v:7.2f}" if v is not None else "      -" for v in (base, *rest)))
    print(f"columns: base, LoRA, difference, 95% interval, in percent; {out / 'report.html'}")


if __name__ == "__main__":
    common.run_main(main)
