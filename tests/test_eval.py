"""Stage 05: metrics by hand, the bootstrap, the page, what is reused and what is refused, and a run on the tiny models."""

import io
import json
import math
import random
import sys
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path

import numpy as np
import pytest
import torch
import world
from conftest import ROOT
from diffusers import Flux2Pipeline
from peft import LoraConfig
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file

import common
from common import UserError

MODELS = ROOT / "tests" / "tiny" / "models"
TINY = common.PRESETS["tiny"]
HELD_OUT = ROOT / "tests" / "tiny" / "heldout.jsonl"
needs_models = pytest.mark.skipif(
    not ((MODELS / "flux2").is_dir() and (MODELS / "qwen3vl").is_dir()), reason="tests/tiny/models has not been built"
)
ev = common.load_stage(ROOT / "05_eval.py")

# A "VLM" that needs no model: 0.9 where the oracle says right, 0.2 elsewhere.
FAKE_SCORER = """
import sys, torch
sys.path.insert(0, {tiny!r})
import world
calls = []
def load_scorer(vlm, device, dtype, map_layers):
    return None
def score(scorer, images, vqa, grid, maps=True):
    if not maps:
        calls.append(len(images))
    right = [world.judge(image.movedim(0, -1).numpy(), vqa) for image in images]
    values = torch.tensor(right).float() * 0.7 + 0.2
    return values, torch.ones(*values.shape, *grid) if maps else None
"""


def start(*argv: str) -> tuple[int, str]:
    """Runs stage 05 in this process -> exit code and all that it printed."""
    out, old = io.StringIO(), sys.argv
    sys.argv = ["05_eval.py", *map(str, argv)]
    try:
        with redirect_stdout(out), redirect_stderr(out):
            common.run_main(ev.main)
        code = 0
    except SystemExit as e:
        code = e.code
    finally:
        sys.argv = old
    return code, out.getvalue()


def refused(*argv: str) -> str:
    code, out = start(*argv)
    lines = [line for line in out.splitlines() if line.startswith("error: ")]
    assert code == 2 and len(lines) == 1, out
    return lines[0]


def synthetic(n: int, images: int = 1, *, lora: bool = True, oracle: bool = True, same: bool = False):
    """n prompts of the tiny world with random scores -> prompts, records."""
    rng, scenes = np.random.default_rng(0), world.held_out_prompts()
    prompts, records = {}, {}
    for row, scene in enumerate(scenes[:n]):
        vqa = world.questions(scene)
        skills = ["count", "attribute", "object", "position", "count", "attribute", "object"]
        skills = skills if len(vqa) == 7 else skills[:3] * 2
        prompts[row] = {"prompt": str(scene), "vqa_list": vqa, "skills": skills, "atom_count": len(vqa)}
        for i in range(images):
            for system in ("base", "lora") if lora else ("base",):
                s = rng.random(len(vqa)).round(3).tolist()
                records[system, row, i] = {"scores": s, "oracle": [v > 0.4 for v in s] if oracle else None}
            if same and lora:
                records["lora", row, i] = records["base", row, i]
    return prompts, records


# ---------------------------------------------------------------- metrics


def test_metrics_by_hand():
    """Two prompts of different length, two pictures each: pooled and averaged metrics differ, and a score of 0 kills GM."""
    prompts = {
        3: {"skills": ["count", "object"], "atom_count": 2},
        7: {"skills": ["count", "verb", "position", "object"], "atom_count": 4},
    }
    scores = {(3, 0): [0.4, 0.9], (3, 1): [0.0, 1.0], (7, 0): [0.5, 0.5, 0.5, 0.5], (7, 1): [1.0, 0.25, 0.25, 1.0]}
    right = {(3, 0): [1, 1], (3, 1): [0, 1], (7, 0): [0, 1, 0, 1], (7, 1): [1, 1, 1, 1]}
    records = {("base", *k): {"scores": s, "oracle": [bool(v) for v in right[k]]} for k, s in scores.items()}
    got = ev.summarise(prompts, records, ["base"], 2)
    want = {
        "soft_tifa.am": ((0.65 + 0.5) / 2 + (0.5 + 0.625) / 2) / 2,
        "soft_tifa.gm": ((0.6 + 0) / 2 + (0.5 + 0.5) / 2) / 2,
        "oracle.all": ((1 + 0) / 2 + (0 + 1) / 2) / 2,
        "oracle.atom": 9 / 12,
        "oracle.gap": (2.3 + 4.5) / 12 - 9 / 12,
        "oracle.object": 4 / 4,
        "oracle.count": 2 / 4,
        "oracle.relation": 3 / 4,
        "skill.object": (0.9 + 1 + 0.5 + 1) / 4,
        "skill.count": (0.4 + 0 + 0.5 + 1) / 4,
        "skill.position": 0.375,
        "skill.verb": 0.375,
        "atomicity.2": 0.3,
        "atomicity.4": 0.5,
        "hard.gm": (0.3 + 0.5) / 2,
        "hard.am": (0.575 + 0.5625) / 2,
    }
    assert got["base"] == pytest.approx({k: 100 * v for k, v in want.items()}, abs=1e-4) and [*got["base"]] == [*want]
    assert got["prompts_of"]["skill.verb"] == 1 and got["prompts_of"]["skill.count"] == 2 and "delta" not in got


def test_skill_scores_pool_questions_not_prompts():
    prompts = {0: {"skills": ["count"] * 3, "atom_count": 3}, 1: {"skills": ["count"], "atom_count": 1}}
    records = {("base", 0, 0): {"scores": [1.0] * 3, "oracle": None}, ("base", 1, 0): {"scores": [0.0], "oracle": None}}
    got = ev.summarise(prompts, records, ["base"], 1)["base"]
    assert got == {
        "soft_tifa.am": 50, "soft_tifa.gm": 50, "skill.count": 75, "atomicity.1": 0, "atomicity.3": 100,
        "hard.gm": 50, "hard.am": 50,
    }  # fmt: skip


def test_a_delta_is_the_paired_difference():
    prompts, records = synthetic(60, 2)
    got = ev.summarise(prompts, records, ["base", "lora"], 2)
    assert got["base"].keys() == got["lora"].keys() == got["delta"].keys()
    for metric, d in got["delta"].items():
        assert d["mean"] == pytest.approx(got["lora"][metric] - got["base"][metric], abs=2e-4)
        assert d["low"] <= d["mean"] <= d["high"]
    assert got == ev.summarise(prompts, records, ["base", "lora"], 2), "the bootstrap has a fixed seed"
    # AM is a mean over prompts: its bootstrap interval must be near mean +- 1.96 standard errors (60 prompts: within 15%)
    am = {s: [np.mean([records[s, r, i]["scores"] for i in range(2)]) for r in prompts] for s in ("base", "lora")}
    error = 100 * np.std(np.subtract(am["lora"], am["base"]), ddof=1) / math.sqrt(len(prompts))
    d = got["delta"]["soft_tifa.am"]
    assert (d["high"] - d["low"]) / 2 == pytest.approx(1.96 * error, rel=0.15)


def test_delta_is_zero_when_the_lora_changes_nothing():
    prompts, records = synthetic(20, 2, same=True)
    delta = ev.summarise(prompts, records, ["base", "lora"], 2)["delta"]
    assert {v for d in delta.values() for v in d.values()} == {0.0}


def test_bootstrap_interval_covers():
    """Of 400 samples of 100 prompts, 95% intervals of a mean and of a ratio of sums with prompts of 1 to 9 questions.

    If the true coverage is 94% (percentile bootstrap at this size), fewer than 90% or more than 98% hits in 400 has a
    probability under 2e-3 a metric (binomial); the seeds are fixed, so this test itself never flips.
    """
    rng, hits = np.random.default_rng(0), np.zeros(2)
    for trial in range(400):
        den = np.stack([np.ones(100), rng.integers(1, 10, 100)], 1).astype(float)
        effect = rng.normal(0.1, 0.3, 100)  # one a prompt, shared by its questions: the prompt is the cluster
        diff = np.stack([effect, effect * den[:, 1]], 1)
        low, high = ev.bootstrap(diff, den, resamples=1000, seed=trial)
        hits += (low <= 0.1) & (0.1 <= high)
    assert ((hits / 400 > 0.90) & (hits / 400 < 0.98)).all(), f"coverage {hits / 400}"


def test_no_interval_from_a_single_prompt():
    diff, den = np.array([[0.5, 0.2], [0.1, 0.0], [0.3, 0.0]]), np.array([[1.0, 1.0], [1.0, 0.0], [1.0, 0.0]])
    bounds = ev.bootstrap(diff, den, resamples=200)
    assert np.isfinite(bounds[:, 0]).all() and np.isnan(bounds[:, 1]).all()


# ---------------------------------------------------------------- inputs


def test_atom_counts_are_found_from_the_questions(tmp_path):
    """GenEval 2 does not count "a": checked on all held-out prompts, whose file has the counts."""
    lines = common.read_jsonl(HELD_OUT)
    bare = tmp_path / "bare.jsonl"
    bare.write_text("".join(json.dumps({k: v for k, v in r.items() if k != "atom_count"}) + "\n" for r in lines))
    got = ev.read_prompts(str(bare), None)
    assert [r["atom_count"] for r in got.values()] == [r["atom_count"] for r in lines] and [*got] == [*range(360)]


def test_a_subset_is_fixed_nested_and_keyed_by_row():
    small, large = (ev.read_prompts(str(HELD_OUT), n) for n in (20, 90))
    lines = common.read_jsonl(HELD_OUT)
    assert small.items() <= large.items() and len(small) == 20 and [*large] == sorted(large)
    assert all(lines[row]["prompt"] == line["prompt"] for row, line in large.items())
    assert [*small] != [*range(20)], "never the first rows: files are sorted"


def test_the_latest_lora_is_found(tmp_path):
    assert ev.find_lora(tmp_path, "none") is None
    for r in (2, 100, 20):
        folder = tmp_path / "lora" / f"round_{r:04d}"
        folder.mkdir(parents=True)
        (folder / ev.LORA_FILE).touch()
    (tmp_path / "lora" / "round_0200").mkdir()  # has no file yet
    assert ev.find_lora(tmp_path, None).parent.name == "round_0100"
    assert ev.find_lora(tmp_path, str(tmp_path / "lora" / "round_0002")).parent.name == "round_0002"
    with pytest.raises(UserError, match="round_0200: no pytorch_lora_weights"):
        ev.find_lora(tmp_path, str(tmp_path / "lora" / "round_0200"))


def test_bad_input_is_one_clear_line(tmp_path):
    good = HELD_OUT.read_text().splitlines()[0]
    assert "no such folder" in refused("--run", tmp_path / "no")
    assert "lora: no pytorch_lora_weights.safetensors; 04_train_cast.py makes it" in refused("--run", tmp_path)
    assert "--images-per-prompt 0" in refused("--run", tmp_path, "--images-per-prompt", 0)
    assert "--lora x: nothing is drawn" in refused("--run", tmp_path, "--images", tmp_path, "--lora", "x")
    assert "--baseline grpo sum: only with --compare" in refused("--run", tmp_path, "--baseline", "grpo sum")
    assert "--num-prompts -1" in refused("--run", tmp_path, "--num-prompts", -1)
    assert "--eval-prompts" in refused("--run", tmp_path, "--preset", "flux2-dev")
    bad = tmp_path / "prompts.jsonl"
    for text, message in [
        (f"{good}\n{{broken\n", "prompts.jsonl:2: not JSON"), ('{"prompt": "a red circle"}', "02_build_csg.py"),
        (good.replace('"count"', '"colour"'), "prompts.jsonl:1: unknown skill 'colour'"), ("", "is empty"),
        (good.replace('"skills": [', '"skills": ["count", '), "prompts.jsonl:1"),
    ]:  # fmt: skip
        bad.write_text(text)
        assert message in refused("--run", tmp_path, "--lora", "none", "--eval-prompts", bad)
    assert "gone.py" in refused("--run", tmp_path, "--lora", "none", "--oracle", tmp_path / "gone.py")
    assert sorted(p.name for p in tmp_path.rglob("*")) == ["prompts.jsonl"], "nothing is written"


# ---------------------------------------------------------------- judging and what is kept


@pytest.fixture
def fake(tmp_path):
    """A run with a (fake) LoRA and all pictures: the base's of the true scenes, the LoRA's of the scene before."""
    run, scorer = tmp_path / "run", tmp_path / "scorer.py"
    scorer.write_text(FAKE_SCORER.format(tiny=str(ROOT / "tests" / "tiny")))
    lora = run / "lora" / "round_0001" / ev.LORA_FILE
    lora.parent.mkdir(parents=True)
    save_file({"x": torch.zeros(1)}, lora)
    argv = ["--run", run, "--scorer", scorer, "--num-prompts", 6, "--images-per-prompt", 2]
    lines = common.read_jsonl(HELD_OUT)

    def draw(folders, prompts, lora, args):
        """Stands in for `generate`."""
        scenes, rng = {str(s): s for s in world.held_out_prompts()}, np.random.default_rng(0)
        for row in prompts:
            for i in range(args.images_per_prompt):
                for system, folder in folders.items():
                    path, shown = ev.picture_path(folder, row, i), row - (system == "lora")
                    if not path.exists():
                        seed = i + (lora.read_bytes()[-1] if system == "lora" else 0)
                        cells = world.lay_out(scenes[lines[shown]["prompt"]], random.Random(seed))
                        common.save_png(path, torch.from_numpy(world.render(cells, rng)).movedim(-1, 0))

    real, ev.generate = ev.generate, draw
    yield run, argv, lora, scorer
    ev.generate = real


def scores_of(run: Path) -> dict:
    return json.loads((run / "eval" / "scores.json").read_text())


def stamps(folder: Path) -> dict[Path, int]:
    return {p: p.stat().st_mtime_ns for p in folder.rglob("*") if p.is_file()}


def test_scores_are_kept_and_a_second_start_writes_nothing(fake):
    run, argv, _, _ = fake
    code, out = start(*argv)
    assert code == 0, out
    scores = scores_of(run)
    assert scores["base"]["oracle.all"] == 100 and scores["base"]["soft_tifa.am"] == pytest.approx(90)
    assert scores["lora"]["oracle.all"] < 100 and scores["delta"]["oracle.all"]["mean"] < 0
    assert scores["prompts"] == 6 and scores["steps"] == TINY["steps"] and scores["seed"] == 0
    lines = common.read_jsonl(run / "eval" / "per_image.jsonl")
    assert len(lines) == 24 and all(len(r["scores"]) == len(r["oracle"]) for r in lines)
    before = stamps(run)
    assert start(*argv)[0] == 0 and stamps(run) == before
    assert not [p for p in before if p.name.startswith(".")], "no temporary file is left"


def test_only_what_is_missing_is_scored(fake):
    run, argv, _, _ = fake
    assert start(*argv)[0] == 0
    want = scores_of(run)
    path = run / "eval" / "per_image.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:-3]))
    assert start(*argv)[0] == 0 and scores_of(run) == want
    assert sys.modules["scorer"].calls == [3], "the fake stage 03 is loaded anew at each start"
    assert sorted(path.read_text().splitlines()) == sorted("".join(lines).splitlines())


def test_another_lora_has_its_pictures_made_again_and_the_base_is_kept(fake):
    run, argv, lora, _ = fake
    assert start(*argv)[0] == 0
    before = stamps(run / "eval" / "images")
    save_file({"x": torch.full((1,), 2.5)}, lora)
    code, out = start(*argv)
    assert code == 0 and "the LoRA has changed" in out
    changed = {p.parent.name for p, t in stamps(run / "eval" / "images").items() if before[p] != t}
    assert changed == {"lora"} and sys.modules["scorer"].calls == [2] * 6, "two pictures a prompt, of the LoRA alone"
    assert start(*argv, "--lora", "none")[0] == 0 and "lora" not in scores_of(run)
    assert start(*argv)[0] == 0 and "lora" in scores_of(run) and sys.modules["scorer"].calls == [2] * 6


def test_another_judge_scores_again(fake):
    run, argv, _, scorer = fake
    assert start(*argv)[0] == 0
    scorer.write_text(scorer.read_text().replace("0.7 + 0.2", "0.5 + 0.1"))
    assert start(*argv)[0] == 0
    assert scores_of(run)["base"]["soft_tifa.am"] == pytest.approx(60)
    scorer.write_text(scorer.read_text().replace("0.5 + 0.1", "float('nan')"))
    assert "is not a number" in refused(*argv)


def test_pictures_of_other_settings_are_refused(fake, tmp_path):
    run, argv, _, _ = fake
    assert start(*argv)[0] == 0
    before = stamps(run)
    assert f"with --guidance {TINY['guidance']}, not 3.0" in refused(*argv, "--guidance", 3)
    assert "with --seed 0, not 1" in refused(*argv, "--seed", 1)
    assert "with --model" in refused(*argv, "--model", "another")
    other = tmp_path / "other.jsonl"
    other.write_text(HELD_OUT.read_text() + HELD_OUT.read_text().splitlines()[0] + "\n")
    assert "with --eval-prompts heldout.jsonl (sha256" in refused(*argv, "--eval-prompts", other)
    assert stamps(run) == before
    (run / "eval" / "settings.json").unlink()
    assert "has no settings.json" in refused(*argv)


# ---------------------------------------------------------------- GenEval 2's files


def analysis(benchmark: Path, score_lists: Path) -> dict[str, float]:
    """What GenEval 2's two scripts make of a file of scores, written from their description (formulas, section 15): AM is
    a prompt's arithmetic mean, GM its geometric mean; a skill pools all of its questions, an atom count averages the GMs."""
    lines = [json.loads(line) for line in benchmark.read_text().splitlines()]
    scores = json.loads(score_lists.read_text())
    assert len(lines) == len(scores), "one list of scores a line"
    am, gm, skill, atomicity = [], [], {}, {}
    for line, values in zip(lines, scores, strict=True):
        am.append(math.fsum(values) / len(values))
        gm.append(math.exp(math.fsum(map(math.log, values)) / len(values)) if min(values) > 0 else 0.0)
        atomicity.setdefault(line["atom_count"], []).append(gm[-1])
        for name, value in zip(line["skills"], values, strict=True):
            skill.setdefault(name, []).append(value)
    found = {"soft_tifa.am": am, "soft_tifa.gm": gm} | {f"skill.{k}": v for k, v in skill.items()}
    found |= {f"atomicity.{k}": v for k, v in atomicity.items()}
    return {k: 100 * math.fsum(v) / len(v) for k, v in found.items()}


def write_geneval2(folder: Path, prompts: dict, records: dict, images: int) -> None:
    for name, text in ev.geneval2_files(prompts, records, ["base", "lora"], images).items():
        (folder / name).write_text(text)


@pytest.mark.parametrize("images", [1, 3])
def test_the_metrics_are_what_geneval2_makes_of_our_score_files(tmp_path, images):
    prompts, records = synthetic(40, images)
    records["lora", 3, 0]["scores"][1] = 0.0  # a geometric mean of zero
    write_geneval2(tmp_path, prompts, records, images)
    ours = ev.summarise(prompts, records, ["base", "lora"], images)
    for system in ("base", "lora"):
        want = analysis(tmp_path / "geneval2_prompts.jsonl", tmp_path / f"geneval2_{system}.json")
        assert {k: ours[system][k] for k in want} == pytest.approx(want, abs=1e-4)
        assert set(ours[system]) - set(want) == {k for k in ours[system] if k.startswith(("oracle", "hard"))}


def test_equal_prompts_keep_separate_scores(tmp_path):
    """GenEval 2's file of picture names is keyed by the prompt's text, so that the last of two equal prompts would win."""
    prompts, records = synthetic(4)
    prompts[2] |= {k: prompts[1][k] for k in ("prompt", "skills", "vqa_list", "atom_count")}
    records["base", 2, 0]["scores"] = [0.25] * len(prompts[1]["skills"])
    write_geneval2(tmp_path, prompts, records, 1)
    lists = json.loads((tmp_path / "geneval2_base.json").read_text())
    assert lists[1] == records["base", 1, 0]["scores"] and lists[2] == [0.25] * len(lists[1])


def test_the_hardest_prompts_are_those_of_the_two_highest_counts():
    prompts = {i: {"skills": ["object"], "atom_count": n} for i, n in enumerate([3, 9, 10, 10, 4])}
    records = {("base", i, 0): {"scores": [s], "oracle": None} for i, s in enumerate([1.0, 0.3, 0.6, 0.9, 1.0])}
    got = ev.summarise(prompts, records, ["base"], 1)
    assert got["base"]["hard.gm"] == got["base"]["hard.am"] == pytest.approx(60) and got["prompts_of"]["hard.gm"] == 3


# ---------------------------------------------------------------- pictures from elsewhere


def test_pictures_from_elsewhere_are_scored_without_a_diffusion_model(fake, tmp_path, monkeypatch):
    run, argv, _, _ = fake
    assert start(*argv)[0] == 0
    want, images, other = scores_of(run), run / "eval" / "images", ["--run", tmp_path / "other", *argv[2:]]
    monkeypatch.setattr(common, "load_pipeline", None)
    monkeypatch.setattr(ev, "generate", None)
    assert start(*other, "--images", images)[0] == 0
    got = scores_of(tmp_path / "other")
    assert all(got[k] == want[k] for k in ("base", "lora", "delta"))
    assert got["model"] is got["guidance"] is None and got["lora_folder"] == "none"
    flat = ["--run", tmp_path / "flat", *argv[2:], "--images", images / "lora"]
    assert start(*flat)[0] == 0
    assert scores_of(tmp_path / "flat")["base"] == want["lora"] and "lora" not in scores_of(tmp_path / "flat")
    # another picture under the same name is scored again, alone
    picture = sorted((images / "lora").iterdir())[0]
    common.save_png(picture, torch.zeros(3, 32, 32))
    assert start(*flat)[0] == 0 and sys.modules["scorer"].calls == [1]


def test_wrong_folders_of_pictures_are_one_clear_line(fake, tmp_path):
    run, argv, _, _ = fake
    assert start(*argv)[0] == 0
    other, images = ["--run", tmp_path / "other", *argv[2:]], run / "eval" / "images"
    assert "--images nowhere: no such folder" in refused(*other, "--images", "nowhere")
    picture = sorted((images / "lora").iterdir())[1]
    common.save_png(picture, torch.zeros(3, 32, 16))
    assert f"{picture}: is 16x32 pixels" in refused(*other, "--images", images)
    picture.unlink()
    assert f"{picture}: not found; picture 1 of row" in refused(*other, "--images", images)
    (images / "base").rename(images / "aside")
    assert "has lora/ and no base/" in refused(*other, "--images", images)


# ---------------------------------------------------------------- the table over seeds

cmp = common.load_stage(ROOT / "variants" / "05_compare.py")


def judged_run(folder: Path, credit: str, seed: int, gm: float, **other: object) -> Path:
    """What 04 and 05 leave that --compare reads."""
    made = {"eval_prompts": "a.jsonl", "guidance": 4.0, "steps": 10, "seed": seed}
    trained = {"objective": "grpo", "credit": credit, "seed": seed, "lr": 1e-3}
    common.write_json(
        folder / "state" / "settings.json", {"settings": trained | {k: other[k] for k in trained if k in other}}
    )
    common.write_json(folder / "eval" / "settings.json", {"settings": made | {k: other[k] for k in made if k in other}})
    scores = {"lora": {"soft_tifa.gm": gm, "soft_tifa.am": gm + 1}, "lora_folder": "lora/round_0060"}
    common.write_json(folder / "eval" / "scores.json", scores)
    return folder


def test_students_t_is_that_of_the_tables():
    """97.5% quantiles of any table of Student's t."""
    want = {1: 12.7062, 2: 4.3027, 3: 3.1824, 4: 2.7764, 9: 2.2622, 30: 2.0423, 1000: 1.9623}
    assert {f: cmp.t_quantile(f) for f in want} == pytest.approx(want, abs=1e-3)


def test_the_table_over_seeds_by_hand(tmp_path):
    gm = {"sum": [84.0, 85.0, 84.5], "cast": [86.0, 86.0, 86.5]}
    runs = [judged_run(tmp_path / f"{c}_{s}", c, s, v) for c, row in gm.items() for s, v in enumerate(row)]
    code, out = start("--run", tmp_path / "table", "--compare", *reversed(runs))
    assert code == 0, out
    got = json.loads((tmp_path / "table" / "compare.json").read_text())
    assert got["baseline"] == "grpo sum" and got["methods"]["grpo sum"]["seeds"] == [0, 1, 2]
    cast = got["methods"]["grpo cast"]["soft_tifa.gm"]
    d = np.subtract(gm["cast"], gm["sum"])  # 2, 1, 2: paired by seed, whatever the order of the runs
    half = 4.302653 * d.std(ddof=1) / math.sqrt(3)
    want = dict(mean=86.1667, std=np.std(gm["cast"], ddof=1), difference=5 / 3, low=5 / 3 - half, high=5 / 3 + half)
    assert cast == pytest.approx(want, abs=1e-3)
    assert got["methods"]["grpo sum"]["soft_tifa.gm"] == pytest.approx({"mean": 84.5, "std": 0.5}, abs=1e-6)
    table = (tmp_path / "table" / "compare.md").read_text()
    assert out == table and "| grpo cast | 3 | 86.17 ± 0.29<br>+1.67 [+0.23, +3.10] |" in table
    code, out = start("--run", tmp_path / "table", "--compare", *runs, "--baseline", "grpo cast")
    assert code == 0 and "-1.67 [-3.10, -0.23]" in out


def test_one_seed_has_no_interval(tmp_path):
    runs = [judged_run(tmp_path / c, c, 0, v) for c, v in (("sum", 84.0), ("cast", 86.0))]
    code, out = start("--run", tmp_path / "table", "--compare", *runs)
    assert code == 0 and "| 86.00<br>+2.00 |" in out and "nan" not in out.lower()
    found = json.loads((tmp_path / "table" / "compare.json").read_text())["methods"]["grpo cast"]["soft_tifa.gm"]
    assert found["std"] is found["low"] is None


def test_runs_that_cannot_be_compared_are_refused(tmp_path):
    a, b = (judged_run(tmp_path / f"sum_{s}", "sum", s, 84.0 + s) for s in range(2))
    c = judged_run(tmp_path / "cast_0", "cast", 0, 85.0)
    run = ["--run", tmp_path / "table", "--compare"]
    assert "seeds are not equal: grpo cast has 0 (judged with 0); grpo sum has 0 (judged with 0), 1" in refused(
        *run, a, b, c
    )
    assert "two runs are grpo sum of seed 0" in refused(*run, a, a)
    assert "the runs are grpo sum, grpo cast" in refused(*run, a, c, "--baseline", "cast")
    other = judged_run(tmp_path / "other", "cast", 0, 85.0, guidance=1.0)
    assert f"{other} was judged with guidance 1.0, {a} with 4.0" in refused(*run, a, other)
    other = judged_run(tmp_path / "other", "cast", 0, 85.0, eval_prompts="b.jsonl")
    assert "was judged with eval_prompts b.jsonl" in refused(*run, a, other)
    other = judged_run(tmp_path / "other", "sum", 1, 85.0, lr=2e-3)
    assert f"{other} was trained with lr 0.002, {a} with 0.001" in refused(*run, a, other)
    (other / "eval" / "scores.json").unlink()
    assert "scores.json: not found" in refused(*run, a, other)
    common.write_json(other / "eval" / "scores.json", {"base": {}})
    assert "has no LoRA's scores" in refused(*run, a, other)
    common.write_json(other / "state" / "settings.json", [])
    assert "are not those of stages 04 and 05" in refused(*run, a, other)
    assert not (tmp_path / "table").exists()


# ---------------------------------------------------------------- the tiny models


def write_lora(folder: Path, std: float) -> None:
    """A LoRA as stage 04 writes it, with random weights."""
    pipe = common.load_pipeline(str(MODELS / "flux2"), "cpu", torch.float32)
    torch.manual_seed(0)
    pipe.transformer.add_adapter(LoraConfig(r=4, lora_alpha=4, target_modules=["to_q", "to_k", "to_v"]))
    for name, p in pipe.transformer.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=std)
    layers = get_peft_model_state_dict(pipe.transformer)
    Flux2Pipeline.save_lora_weights(folder, transformer_lora_layers=layers)


@needs_models
def test_tiny_models_end_to_end(tmp_path):
    run, lora = tmp_path / "run", tmp_path / "lora"
    run.mkdir()
    write_lora(lora, 0.1)
    models = ["--model", MODELS / "flux2", "--vlm", MODELS / "qwen3vl"]
    argv = ["--run", run, "--lora", lora, "--num-prompts", 4, "--images-per-prompt", 2, "--batch-size", 3, *models]
    code, out = start(*argv)
    assert code == 0, out
    images = sorted((run / "eval" / "images").rglob("*.png"))
    assert len(images) == 16
    pairs = [
        (p.read_bytes(), (run / "eval" / "images" / "lora" / p.name).read_bytes())
        for p in images
        if p.parent.name == "base"
    ]
    assert len({a for a, _ in pairs}) == 8 and all(a != b for a, b in pairs), (
        "8 different pictures, changed by the LoRA"
    )

    # what diffusers' own pipeline draws from the same seeds, to one level of 8 bits
    prompts = ev.read_prompts(str(HELD_OUT), 4)
    pipe = common.load_pipeline(str(MODELS / "flux2"), "cpu", torch.float32)
    pipe.set_progress_bar_config(disable=True)
    for system in ("base", "lora"):
        if system == "lora":
            pipe.load_lora_weights(lora)
        want = pipe(
            prompt=[line["prompt"] for line in prompts.values()], height=32, width=32, num_inference_steps=TINY["steps"], guidance_scale=TINY["guidance"],
            max_sequence_length=8, text_encoder_out_layers=(1, 2, 3), output_type="pt",
            generator=[torch.Generator().manual_seed(common.sample_seed(0, ev.EVAL_ROUND, row, 1)) for row in prompts],
        ).images  # fmt: skip
        got = torch.stack(
            [common.load_png(ev.picture_path(run / "eval" / "images" / system, row, 1)) for row in prompts]
        )
        assert (got - want).abs().max() <= 1.01 / 255

    # a second start writes nothing; a run that lost half of its pictures ends in the same bits
    before, content = stamps(run), {p: p.read_bytes() for p in images}
    assert start(*argv)[0] == 0 and stamps(run) == before
    for p in images[::2]:
        p.unlink()
    assert start(*argv)[0] == 0 and {p: p.read_bytes() for p in images} == content


@needs_models
def test_a_lora_that_changes_nothing_has_delta_zero_and_a_foreign_one_is_refused(tmp_path):
    run, lora = tmp_path / "run", tmp_path / "lora"
    run.mkdir()
    write_lora(lora, 0.0)
    models = ["--model", MODELS / "flux2", "--vlm", MODELS / "qwen3vl"]
    argv = ["--run", run, "--lora", lora, "--num-prompts", 3, *models]
    code, out = start(*argv)
    assert code == 0, out
    assert all(abs(v or 0) <= 1e-3 for d in scores_of(run)["delta"].values() for v in d.values())

    weights = load_file(lora / ev.LORA_FILE)
    foreign = {
        "prefix": {"unet." + k.removeprefix("transformer."): v for k, v in weights.items()},
        "layers": {k.replace("transformer_blocks.1", "transformer_blocks.7"): v for k, v in weights.items()},
        "empty": {},
    }
    for name, keys in foreign.items():
        (tmp_path / name).mkdir()
        save_file(keys, tmp_path / name / ev.LORA_FILE)
        assert "is no LoRA for this model" in refused(*argv[:2], "--lora", tmp_path / name, *argv[4:])
    (tmp_path / "cut").mkdir()
    (tmp_path / "cut" / ev.LORA_FILE).write_bytes((lora / ev.LORA_FILE).read_bytes()[:500])
    assert "is not a whole safetensors file" in refused(*argv[:2], "--lora", tmp_path / "cut", *argv[4:])
