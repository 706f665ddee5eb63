"""The paper's Table 2 over seeds, for `05_eval.py --compare RUN...`: mean and sample standard deviation of each method,
and its paired difference to a baseline with a 95% interval.

    python 05_eval.py --preset tiny --run runs/table --compare runs/sum_0 runs/sum_1 runs/cast_0 runs/cast_1

Reads   RUN/eval/scores.json and settings.json (05), RUN/state/settings.json (04), for each RUN.
Writes  compare.json, compare.md into --run.

A method is objective and credit. Differences are paired by seed. The interval is Student's t over the seeds: it holds what
varies when the training is repeated, and says nothing of other prompts.
"""

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import common
from common import UserError

HEADLINE = {
    "soft_tifa.gm": "GM", "soft_tifa.am": "AM", "hard.gm": "GM, hardest", "oracle.all": "oracle, all atoms",
    "oracle.atom": "oracle, atoms",
}  # fmt: skip
# what all runs must have been judged with
JUDGED = "eval_prompts num_prompts images_per_prompt model height width steps guidance judges".split()


def t_quantile(freedom: int) -> float:
    """97.5% quantile of Student's t: with T = sqrt(f) tan(u), the density of u is proportional to cos(u)^(f-1)."""
    u = np.linspace(0, np.pi / 2, 100_001)
    density = np.cos(u) ** (freedom - 1)
    area = np.append(0, np.cumsum(density[1:] + density[:-1]))
    return math.sqrt(freedom) * math.tan(np.interp(0.95, area / area[-1], u))


def read_runs(runs: Sequence[Path]) -> dict[str, dict[int, dict]]:
    """{method: {seed: scores.json's "lora"}}. The runs must have been judged alike, and those of a method trained alike."""
    methods: dict[str, dict[int, dict]] = {}
    judged, trained = {}, {}
    for run in runs:
        scores, made = (common.read_json(run / "eval" / f"{name}.json") for name in ("scores", "settings"))
        settings = common.read_json(run / "state" / "settings.json")
        try:
            settings, made, found = settings["settings"], made["settings"], scores.get("lora")
            method, seed = f"{settings['objective']} {settings['credit']}", settings["seed"]
            settings = {k: v for k, v in settings.items() if k not in ("seed", "atoms")}
            settings["judged"] = Path(scores.get("lora_folder", "")).name  # the round
        except (KeyError, TypeError, AttributeError) as e:
            raise UserError(
                f"{run}: its settings.json and scores.json are not those of stages 04 and 05 ({e} is missing)"
            ) from e
        if not found:
            raise UserError(
                f"{run / 'eval' / 'scores.json'}: has no LoRA's scores; run 05_eval.py on it without --lora none"
            )
        for what, old, new in (
            ("judged", judged, {k: made.get(k) for k in JUDGED}), ("trained", trained.setdefault(method, {}), settings),
        ):  # fmt: skip
            if different := [k for k in new if old and old["made"].get(k) != new[k]]:
                k = different[0]
                raise UserError(
                    f"--compare: {run} was {what} with {k} {new[k]}, {old['run']} with {old['made'].get(k)}"
                )
            old.setdefault("made", new), old.setdefault("run", run)
        if seed in methods.setdefault(method, {}):
            raise UserError(f"--compare: two runs are {method} of seed {seed}; the second is {run}")
        methods[method][seed] = {"scores": found, "eval_seed": made.get("seed")}
    return methods


def compare(methods: dict[str, dict[int, dict]], baseline: str | None) -> dict:
    """{method: {"seeds", metric: {mean, std, difference, low, high}}}: sample std over seeds; the difference to the baseline
    is paired by seed, with its 95% interval of Student's t over seeds. None where one seed gives none."""
    names = [*methods]
    if baseline is None:
        baseline = next((m for m in names if m.endswith(" sum")), names[0])
    if baseline not in methods:
        raise UserError(f"--baseline {baseline}: the runs are {', '.join(names)}")
    base, table = methods[baseline], {}
    for method, runs in methods.items():
        mine, theirs = ({s: r["eval_seed"] for s, r in sorted(rows.items())} for rows in (runs, base))
        if mine != theirs:
            has = [", ".join(f"{s} (judged with {e})" for s, e in seeds.items()) for seeds in (mine, theirs)]
            raise UserError(
                f"--compare: differences are paired by seed, and the seeds are not equal: {method} has {has[0]}; {baseline} has {has[1]}"
            )
        seeds = sorted(runs)
        table[method] = {"seeds": seeds}
        for metric in runs[seeds[0]]["scores"]:
            values, others = (np.array([r[s]["scores"][metric] for s in seeds]) for r in (runs, base))
            d, many = values - others, len(seeds) > 1
            half = t_quantile(len(seeds) - 1) * d.std(ddof=1) / math.sqrt(len(seeds)) if many else math.nan
            row = dict(mean=values.mean(), std=values.std(ddof=1) if many else math.nan)
            row |= dict(difference=d.mean(), low=d.mean() - half, high=d.mean() + half) if method != baseline else {}
            table[method][metric] = {k: None if np.isnan(v) else round(float(v), 4) for k, v in row.items()}
    return {"baseline": baseline, "methods": table}


def markdown(found: dict) -> str:
    """Mean and sample standard deviation, the paired difference and its interval below."""
    columns = {m: title for m, title in HEADLINE.items() if m in found["methods"][found["baseline"]]}
    lines = ["| | seeds | " + " | ".join(columns.values()) + " |", "|---" * (len(columns) + 2) + "|"]
    for method, row in found["methods"].items():
        cells = []
        for v in (row[m] for m in columns):
            cell = f"{v['mean']:.2f}" + ("" if v["std"] is None else f" ± {v['std']:.2f}")
            if "difference" in v:
                cell += f"<br>{v['difference']:+.2f}" + (
                    "" if v["low"] is None else f" [{v['low']:+.2f}, {v['high']:+.2f}]"
                )
            cells.append(cell)
        lines.append(f"| {method} | {len(row['seeds'])} | " + " | ".join(cells) + " |")
    return (
        "\n".join(lines)
        + f"\n\nMean ± sample std over seeds, in percent; below it the paired difference to {found['baseline']}, 95% interval (t).\n"
    )


def write_table(run: Path, runs: Sequence[Path], baseline: str | None) -> str:
    """Writes compare.json and compare.md into `run`; returns the table as markdown."""
    found = compare(read_runs(runs), baseline)
    common.write_text(run / "compare.json", json.dumps(found | {"runs": [str(r) for r in runs]}, indent=1) + "\n")
    common.write_text(run / "compare.md", markdown(found))
    return markdown(found)
