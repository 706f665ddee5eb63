"""Stage 05, another judge: Qwen-Image-Bench (arXiv 2605.28091). Q-Judger looks at a picture and its prompt, thinks, and
answers 56 checks.

    python variants/05_qwen_image_bench.py --run runs/flux2 --input base.jsonl --dtype bfloat16

Reads   --input, JSONL: ID, prompt, image_path (inside the folder of --input), and, if it is known which checks concern the
        prompt, dims_en as the benchmark has it ("Quality / Realism / Physical Logic; ..."): only the dimensions that are
        named there are asked. --judge-prompts: the wording of the requests.
Writes  RUN/eval/qwen_image_bench/NAME.jsonl, a line a request, with the answer as it came; NAME.json, the scores and the list
        of malformed judgements; NAME.settings.json. NAME is the name of --input without its ending.

A request is a picture and one dimension with its checks. A check is 0 (fail), 1 (pass), 2 (excel) or N/A, and counts 0, 60,
100 or not at all. Checks average into level 2, level 2 into the dimension, dimensions into the picture, pictures into the
total. An answer that is not one whole JSON object with a valid score for every check of its dimension, and no other, is
malformed: it is asked again, by sampling, as the greedy answer would be the same. If `--tries` give none, it is listed, and
its picture is in no total; its other dimensions count where they belong.

Deviation: the wording of the requests here is ours, of the same parts and names as the public one, which the judge was
trained on. For totals to hold against published ones, give the public wording: --judge-prompts FILE, a JSON object with
"system", "user" (with {prompt}, {level1_dim}, {format_checklist}, and <image> where the picture goes) and "checklists", a
text a dimension.
"""

import argparse
import functools
import hashlib
import json
import math
import sys
import time
from pathlib import Path

import torch
from PIL import Image
from tqdm import tqdm

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
import common
from common import UserError

# The benchmark's three levels.
CHECKS = {
    "Quality": {
        "Realism": ["Physical Logic", "Material Texture"], "Detail": ["Noise", "Edge Clarity", "Naturalness"],
        "Resolution": ["Resolution"],
    },
    "Aesthetics": {
        "Composition": ["Composition"], "Color Harmony": ["Color Harmony"], "Lighting": ["Lighting & Atmosphere"],
        "Anatomical Portraiture": ["Anatomical Fidelity"], "Emotional Expression": ["Emotional Expression"],
        "Style Control": ["Style Control"],
    },
    "Alignment": {
        "Attributes": ["Quantity", "Facial Expression", "Material Properties", "Color", "Shape", "Size"],
        "Actions": ["Contact Interaction", "Non-contact Interaction", "Full-body Action"],
        "Layout": ["2D Space", "3D Space"],
        "Relations": ["Composition Relationship", "Difference/Similarity", "Containment"],
        "Scene": ["Real-world Scene", "Virtual Scene"],
    },
    "Real-world Fidelity": {
        "Fairness": ["Social Bias", "Cultural Fairness"], "Safety & Compliance": ["Safety & Compliance"],
        "World Knowledge": ["Animals", "Objects", "Information Visualization", "Temporal Characteristics", "Cultural Elements"],
    },
    "Creative Generation": {
        "Imagination": ["Imagination"], "Feature Matching": ["Feature Matching"], "Logical Resolution": ["Logical Resolution"],
        "Text Rendering": ["Text Accuracy", "Text Layout", "Font", "Cross-lingual Generation"],
        "Design Applications": ["Graphic Design", "Product Design", "Spatial Design", "Fashion Styling", "Game Design", "Art Design"],
        "Visual Storytelling": ["Cinematic Style", "Camera / Lens Style", "Storyboard Creation", "Shot Sizes", "Composition",
                                "Angles", "Comic Creation"],
    },
}  # fmt: skip
POINTS = {0: 0.0, 1: 60.0, 2: 100.0, "N/A": None}
OURS = {
    "system": "You judge pictures that a model has drawn from a text, check by check.",
    "user": """# Text prompt
{prompt}

# Picture
<image>

# Dimension
{level1_dim}

# Scores
0: a clear defect. 1: no defect. 2: excellent, and you can say why. "N/A": the check does not concern this prompt or picture.

# Checks, under their groups
{format_checklist}

# Answer
One JSON object and nothing else, every check under its group: {{"group": {{"check": {{"score": 0, 1, 2 or "N/A"}}}}}}""",
    "checklists": {
        dimension: "\n".join(f"## {group}\n" + "\n".join(f"- {c}" for c in checks) for group, checks in groups.items())
        for dimension, groups in CHECKS.items()
    },
}


def parse_args() -> argparse.Namespace:
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("--input", type=Path, required=True, metavar="FILE", help="JSONL: ID, prompt, image_path, dims_en")
    p.add_argument("--judge", default="Qwen/Qwen-Image-Bench", help="Q-Judger: folder or hub name")
    p.add_argument("--judge-prompts", type=Path, metavar="FILE", help="JSON: system, user, checklists; unset: ours")
    p.add_argument("--max-new-tokens", type=int, default=4096, metavar="N", help="longest answer, thinking included")
    p.add_argument(
        "--tries", type=int, default=3, metavar="N", help="answers asked of a request before it is malformed"
    )
    args = common.parse_args(p)
    for name in ("max_new_tokens", "tries"):
        if getattr(args, name) < 1:
            raise UserError(f"--{name.replace('_', '-')} {getattr(args, name)}: must be at least 1")
    return args


# ---------------------------------------------------------------- requests


def read_rows(path: Path) -> list[dict]:
    """The rows with "picture", a file inside the folder of `path`, and "dimensions", those to be asked."""
    rows, folder = [], path.resolve().parent
    for number, row in common.read_numbered_jsonl(path):
        if not all(isinstance(row.get(k), str) and row[k] for k in ("prompt", "image_path")) or "ID" not in row:
            raise UserError(f"{path}:{number}: needs ID, prompt and image_path")
        picture = (folder / row["image_path"]).resolve()
        if not picture.is_relative_to(folder):
            raise UserError(f"{path}:{number}: image_path {row['image_path']} lies outside of the folder of --input")
        if not picture.is_file():
            raise UserError(f"{path}:{number}: image_path {row['image_path']}: not found")
        named = {part.split("/")[0].strip() for part in str(row.get("dims_en") or "").split(";")} - {""}
        if unknown := named - set(CHECKS):
            raise UserError(f"{path}:{number}: dims_en: unknown dimension {min(unknown)!r}; known: {', '.join(CHECKS)}")
        dimensions = [d for d in CHECKS if d in named or not named]
        rows.append({"ID": str(row["ID"]), "prompt": row["prompt"], "picture": picture, "dimensions": dimensions})
    if len({row["ID"] for row in rows}) < len(rows):
        raise UserError(f"{path}: two rows have the same ID")
    return rows


def read_judge_prompts(path: Path | None) -> dict:
    found = OURS if path is None else common.read_json(path)
    texts = [found.get("system"), found.get("user")] if isinstance(found, dict) else [None]
    lists = found.get("checklists") if isinstance(found, dict) else None
    if not all(isinstance(t, str) for t in texts) or not isinstance(lists, dict) or not set(CHECKS) <= set(lists):
        raise UserError(
            f"{path}: must hold the texts system and user, and checklists with a text for each of {', '.join(CHECKS)}"
        )
    try:
        found["user"].format(prompt="", level1_dim="", format_checklist="")
    except (KeyError, IndexError, ValueError) as e:
        raise UserError(
            f"{path}: user: only {{prompt}}, {{level1_dim}} and {{format_checklist}} are filled in: {e!r}"
        ) from e
    if found["user"].count("<image>") != 1:
        raise UserError(f"{path}: user: needs <image> once, where the picture goes")
    return found


def request(words: dict, prompt: str, dimension: str) -> list[dict]:
    """Chat messages with a place for one picture. The split comes first, so that a prompt with "<image>" in it stays text."""
    prompt = prompt.replace("<|", "< |")  # a text must not close the chat's turn or open a picture
    filled = dict(prompt=prompt, level1_dim=dimension, format_checklist=words["checklists"][dimension])
    before, after = (part.format(**filled) for part in words["user"].split("<image>"))
    content = [{"type": "text", "text": before}, {"type": "image"}, {"type": "text", "text": after}]
    system = [{"role": "system", "content": [{"type": "text", "text": words["system"]}]}] if words["system"] else []
    return [*system, {"role": "user", "content": content}]


def load_judge(name: str, device: str, dtype: torch.dtype) -> tuple[torch.nn.Module, object]:
    from transformers import AutoModelForImageTextToText, AutoProcessor

    try:
        model = AutoModelForImageTextToText.from_pretrained(name, dtype=dtype, use_safetensors=True)
        processor = AutoProcessor.from_pretrained(name)
    except (OSError, ValueError) as e:
        raise UserError(f"--judge {name}: cannot be loaded: {str(e).splitlines()[0]}") from e
    return model.to(device).eval().requires_grad_(False), processor


@torch.no_grad()
def ask(judge: tuple, messages: list[dict], picture: Image.Image, tokens: int, seed: int | None) -> tuple[str, bool]:
    """The answer, thinking included, and whether it came to its end. seed None: greedy, as the public code asks."""
    model, processor = judge
    text = processor.apply_chat_template(messages, add_generation_prompt=True, tokenize=False, enable_thinking=True)
    inputs = processor(text=[text], images=[picture], return_tensors="pt").to(model.device)
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    how = dict(do_sample=False, temperature=None, top_p=None, top_k=None)
    if seed is not None:
        torch.manual_seed(seed)
        how = dict(do_sample=True, temperature=0.6, top_p=0.95, top_k=20)
    found = model.generate(**inputs, max_new_tokens=tokens, repetition_penalty=1.05, **how)[
        0, inputs["input_ids"].shape[1] :
    ]
    ends = model.generation_config.eos_token_id
    ended = int(found[-1]) in (ends if isinstance(ends, list) else [ends])
    return processor.tokenizer.decode(found, skip_special_tokens=True), ended


def load_picture(path: Path) -> Image.Image:
    """As the public code: what is larger than 1024 pixels in a side becomes 1024 x 1024."""
    try:
        with Image.open(path) as image:
            image = image.convert("RGB")
    except (OSError, ValueError) as e:
        raise UserError(f"{path}: cannot be read as a picture: {e}") from e
    return image.resize((1024, 1024), Image.LANCZOS) if max(image.size) > 1024 else image


# ---------------------------------------------------------------- answers


def parse(answer: str, ended: bool, dimension: str) -> dict[str, int | str]:
    """{"group / check": 0, 1, 2 or "N/A"} of every check of the dimension. Raises ValueError that says what is wrong.

    The object is looked for after the thinking. The group that the judge puts a check under is not trusted: within a
    dimension a check's name says its group.
    """

    def unique(pairs: list[tuple]) -> dict:
        if len({k for k, _ in pairs}) < len(pairs):
            raise ValueError(f"a name comes twice: {', '.join(k for k, _ in pairs)[:200]}")
        return dict(pairs)

    if not ended:
        raise ValueError("cut before its end")
    text = answer.rpartition("</think>")[2].strip()
    start, end = text.find("{"), text.rfind("}")
    if start < 0 or end < start:
        raise ValueError("no JSON object after the thinking")
    try:
        found = json.loads(text[start : end + 1], object_pairs_hook=unique)
    except RecursionError as e:
        raise ValueError("nested too deep") from e
    flat = []
    for name, value in found.items():  # a check with its score, or a group of checks
        group = isinstance(value, dict) and "score" not in value
        flat += value.items() if group else [(name, value)]
    groups = {check: f"{g} / {check}" for g, checks in CHECKS[dimension].items() for check in checks}
    scores: dict[str, int | str] = {}
    for check, value in flat:
        score = value.get("score") if isinstance(value, dict) else value
        score = int(score) if isinstance(score, str) and score in ("0", "1", "2") else score
        if check not in groups:
            raise ValueError(f"{check!r} is no check of {dimension}")
        if groups[check] in scores:
            raise ValueError(f"{check!r} is judged twice")
        if isinstance(score, bool) or not isinstance(score, (int, str)) or score not in POINTS:
            raise ValueError(f"{check!r} has the score {score!r}")
        scores[groups[check]] = score
    if missing := set(groups.values()) - set(scores):
        raise ValueError(f"{len(missing)} of {len(groups)} checks are not judged: {min(missing)} ...")
    return scores


def average(values: list[float | None]) -> float | None:
    known = [v for v in values if v is not None]
    return math.fsum(known) / len(known) if known else None


def picture_scores(judged: dict[str, dict[str, int | str]]) -> dict[str, float | None]:
    """{dimension: checks} -> {"total", dimension, "dimension / group"} in 0..100; None where no check applies."""
    scores: dict[str, float | None] = {}
    for dimension, checks in judged.items():
        for group in CHECKS[dimension]:
            points = [POINTS[v] for k, v in checks.items() if k.startswith(f"{group} / ")]
            scores[f"{dimension} / {group}"] = average(points)
        scores[dimension] = average([scores[f"{dimension} / {group}"] for group in CHECKS[dimension]])
    return scores | {"total": average([scores[d] for d in judged])}


def summarise(rows: list[dict], lines: dict[tuple[str, str], dict]) -> dict:
    """Means over pictures, with how many each is of and their standard error; and what is left out, by name."""
    values: dict[str, list[float]] = {}
    malformed = []
    for row in rows:
        found = {d: lines[row["ID"], d] for d in row["dimensions"]}
        bad = [d for d, line in found.items() if line["scores"] is None]
        malformed += [{"ID": row["ID"], "dimension": d, "error": found[d]["error"]} for d in bad]
        scores = picture_scores({d: line["scores"] for d, line in found.items() if d not in bad})
        for name, value in scores.items():
            if value is not None and not (name == "total" and bad):
                values.setdefault(name, []).append(value)
    order = ["total", *CHECKS, *(f"{d} / {g}" for d, groups in CHECKS.items() for g in groups)]
    scores = {}
    for name in (n for n in order if n in values):
        v, n = values[name], len(values[name])
        mean = math.fsum(v) / n
        spread = math.sqrt(math.fsum((x - mean) ** 2 for x in v) / (n - 1) / n) if n > 1 else None
        scores[name] = {"mean": round(mean, 4), "standard_error": spread and round(spread, 4), "pictures": n}
    asked = sum(len(row["dimensions"]) for row in rows)
    return {
        "scores": scores,
        "pictures": len(rows),
        "judgements": asked,
        "malformed": len(malformed),
        "malformed_list": malformed,
    }


def judge_all(path: Path, rows: list[dict], words: dict, args: argparse.Namespace) -> dict[tuple[str, str], dict]:
    """{(ID, dimension): line of `path`}. Lines of the same prompt and picture are kept, and asked again if they are
    malformed and have tries left."""
    lines = {(r["ID"], r["dimension"]): r for r in (common.read_jsonl(path) if path.exists() else [])}
    judge = functools.cache(lambda: load_judge(args.judge, args.device, getattr(torch, args.dtype)))
    saved, asked = time.monotonic(), 0

    def save() -> None:
        common.write_text(path, "".join(json.dumps(r, ensure_ascii=False) + "\n" for r in lines.values()))

    for row in tqdm(rows, desc="judged", unit="picture", dynamic_ncols=True):
        of = hashlib.sha256(row["prompt"].encode() + row["picture"].read_bytes()).hexdigest()[:16]
        for dimension in row["dimensions"]:
            line = lines.get((row["ID"], dimension), {})
            if line.get("of") != of:  # another prompt or picture
                line = {"ID": row["ID"], "dimension": dimension, "of": of, "tries": 0, "scores": None}
            lines[row["ID"], dimension] = line
            while line["scores"] is None and line["tries"] < args.tries:
                seed = common.sample_seed(args.seed, line["tries"], int(of, 16), 0) if line["tries"] else None
                messages = request(words, row["prompt"], dimension)
                line["answer"], ended = ask(judge(), messages, load_picture(row["picture"]), args.max_new_tokens, seed)
                line["tries"] += 1
                asked += 1
                try:
                    line |= {"scores": parse(line["answer"], ended, dimension), "error": None}
                except ValueError as e:
                    line["error"] = str(e)
            if time.monotonic() - saved > 30:
                save()
                saved = time.monotonic()
    if asked:
        save()
    return lines


def main() -> None:
    args = parse_args()
    rows, words = read_rows(args.input), read_judge_prompts(args.judge_prompts)
    out, name = args.run / "eval" / "qwen_image_bench", args.input.stem
    args.input, args.judge_prompts = args.input.name, hashlib.sha256(json.dumps(words).encode()).hexdigest()[:16]
    if not common.require_same(out / f"{name}.settings.json", args, ignore=["tries"]):
        common.write_settings(out / f"{name}.settings.json", args)
    found = summarise(rows, judge_all(out / f"{name}.jsonl", rows, words, args))
    common.write_json(out / f"{name}.json", found)
    for key, s in found["scores"].items():
        error = "" if s["standard_error"] is None else f" +- {s['standard_error']:.2f}"
        print(f"{key:45} {s['mean']:7.2f}{error}  ({s['pictures']} pictures)")
    print(
        f"malformed: {found['malformed']} of {found['judgements']} judgements, in no average; {out / name}.json lists them"
    )


if __name__ == "__main__":
    common.run_main(main)
